"""pallas-flexattn's functions beside the dense formula; both of its signatures, and what it planned."""

import importlib
import inspect

import numpy as np
import pytest

import fovea.compat
from fovea.compat._drop_ins import DROP_INS

jax = pytest.importorskip("jax")
peer = pytest.importorskip("fovea.compat.pallas_flexattn")
jnp = jax.numpy

from jax_formula import draw  # noqa: E402

B, H, T, D = 2, 2, 20, 8  # no multiple of a block
Q, K, V = (draw(B, H, T, D, seed=i) for i in range(3))
MASKS = {"none": None, "causal": peer.causal_mask, "window": peer.sliding_window_mask(3, -1), "documents": peer.mask_mod.document_mask([7, 1, 12])}


@pytest.fixture(autouse=True)
def route() -> None:
    """XLA calls the library itself: the routes of the other tests are one."""


def close(got, expected) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MASKS)
def test_same_as_the_formula(name: str) -> None:
    def loss(function):
        return lambda *x: (function(*x, mask_mod=MASKS[name]) ** 2).sum()

    close(peer.flash_attention(Q, K, V, MASKS[name], 64, 64, 4, 3, True), peer.mha_reference(Q, K, V, mask_mod=MASKS[name]))
    got, expected = (jax.jit(jax.grad(loss(of), (0, 1, 2)))(Q, K, V) for of in (peer.flash_attention, peer.mha_reference))
    for one, other in zip(got, expected):
        close(one, other)
    out, lse = peer.flash_attention_fwd(Q, K, V, MASKS[name], interpret=True)
    assert lse.shape == (B, H, T) and lse.dtype == jnp.float32
    for one, other in zip(peer.flash_attention_bwd(Q, K, V, out, lse, 2 * out, MASKS[name]), expected):
        close(one, other)


def test_the_first_signature() -> None:
    causal = peer.mha_reference(Q, K, V, peer.causal_mask)
    close(peer.flash_attention(Q, K, V, True), causal)
    close(peer.flash_attention(Q, K, V, True, (1, 1), 32, 64), causal)  # beside causal the window is not looked at
    close(peer.flash_attention(Q, K, V, causal=True, interpret=True), causal)
    for window in ((2, 1), (-1, 2), (2, -1), (-1, -1)):
        expected = peer.mha_reference(Q, K, V, peer.sliding_window_mask(*window))
        close(peer.flash_attention(Q, K, V, False, window), expected)
        close(peer.flash_attention(Q, K, V, window_size=window), expected)
        close(peer.flash_attention(Q, K, V, sliding_window=window), expected)
    with pytest.raises(fovea.InvalidArgument, match="got colour; expected some of block_r"):
        peer.flash_attention(Q, K, V, colour=1)
    with pytest.raises(fovea.InvalidArgument, match="got 6 sizes"):
        peer.flash_attention(Q, K, V, None, 1, 2, 3, 4, 5, 6)


def test_what_the_peer_planned() -> None:
    slopes = jnp.asarray(draw(H))

    def learned(slopes):
        score = lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j)  # noqa: E731
        return peer.flash_attention(Q, K, V, peer.causal_mask, score_mod=score)

    distance = np.abs(np.arange(T)[:, None] - np.arange(T))
    turned = [x.transpose(0, 2, 1, 3) for x in (Q, K, V)]
    expected = fovea.attention(*turned, causal=True, bias=-np.asarray(slopes)[:, None, None] * distance.astype(np.float32))
    close(learned(slopes), expected.transpose(0, 2, 1, 3))
    assert jax.grad(lambda x: learned(x).sum())(slopes).any()
    by_head = lambda b, h, i, j: (j <= i) | (h == 1)  # noqa: E731
    close(peer.flash_attention(Q, K, V, by_head), peer.mha_reference(Q, K, V, by_head))


def test_block_masks_say_what_is_seen() -> None:
    window = peer.create_sliding_window_block_mask(T, 3, 8)
    np.testing.assert_array_equal(window.num_blocks_in_row, [2, 3, 2])
    np.testing.assert_array_equal(window.col_indices, [[0, 1, -1], [0, 1, 2], [1, 2, -1]])
    assert (window.num_q_blocks, window.num_kv_blocks) == (3, 3) and window.sparsity == pytest.approx(2 / 9)
    blocks = lambda q, k: abs(q // 8 - k // 8) <= 1  # noqa: E731
    run = jax.jit(lambda mask, *x: peer.flash_attention(*x, block_mask=mask))
    close(run(window, Q, K, V), peer.mha_reference(Q, K, V, blocks))
    close(
        peer.flash_attention(Q, K, V, peer.causal_mask, block_mask=window),
        peer.mha_reference(Q, K, V, lambda q, k: blocks(q, k) & (k <= q)),
    )
    # One key between the cells that a block's corners and middles are.
    stripe = peer.create_block_mask(lambda q, k: (k == 3) & (q >= 0), 1, 1, T, T, block_size=8)
    np.testing.assert_array_equal(stripe.col_indices, [[0]] * 3)


def test_rows_without_keys_are_zero() -> None:
    nothing = peer.flash_attention(Q, K, V, lambda q, k: (k < 0) & (q >= 0))
    assert not nothing.any() and not peer.mha_reference(Q, K, V, lambda q, k: (k < 0) & (q >= 0)).any()


def test_sizes_and_their_page(capsys) -> None:
    assert peer.get_optimal_params(300) == (64, 64, 4, 3) and peer.get_optimal_params(9000) == (128, 128, 8, 5)
    assert peer.get_optimal_params(100, 256, True) == (32, 32, 4, 2) and peer.get_optimal_params(100, 32) == (32, 32, 4, 4)
    assert peer.get_kernel_config(1, 2, 4096, 64, "causal") == {
        "batch_size": 1, "num_heads": 2, "seq_len": 4096, "head_dim": 64, "block_r": 64, "block_c": 64, "num_warps": 8, "num_stages": 4,
    }  # fmt: skip
    peer.print_kernel_config(1, 2, 300, 64)
    assert "num_warps    4\n" in capsys.readouterr().out


def test_imports_find_it_and_the_table_is_whole() -> None:
    fovea.compat.install("pallas_flexattn")
    try:
        assert importlib.import_module("pallas_flexattn").flash_attention is peer.flash_attention
        assert importlib.import_module("pallas_flexattn.mask_mod").causal_mask is peer.causal_mask
    finally:
        fovea.compat.uninstall("pallas_flexattn")
    arguments = {x for of in ("flash_attention", "flash_attention_bwd") for x in inspect.signature(getattr(peer, of)).parameters}
    listed = [name for row in DROP_INS["pallas_flexattn"].arguments for name in row.name.split(", ")]
    assert arguments - {"sizes", "named"} <= set(listed) and len(listed) == len(set(listed))
