"""kvax's functions beside the dense formula: both of its APIs, masks of blocks, and on eight devices of the host every way to split a call.

Devices are counted when JAX starts, so that meshes are tried in a process of their own.
"""

import functools
import importlib
import inspect
import os
import subprocess
import sys

import numpy as np
import pytest

import fovea.compat
from fovea.compat._drop_ins import DROP_INS

jax = pytest.importorskip("jax")
kvax = pytest.importorskip("fovea.compat.kvax")
jnp = jax.numpy

import fovea.__main__ as fovea_main  # noqa: E402
from fovea.compat.kvax import benchmarks  # noqa: E402
from fovea.compat.kvax.ops import flash_attention_clean as clean, mask_creator  # noqa: E402
from fovea.compat.kvax.utils import benchmarking, common, permutation, specs as specs_module  # noqa: E402
from fovea.compat.kvax.utils.math import get_multi_head_attention_tflops  # noqa: E402
from fovea.compat.kvax.utils.typing import AttentionMask  # noqa: E402
from jax_formula import draw  # noqa: E402

BATCH, SEQLEN, HEADS, KV_HEADS, SCALE = 2, 32, 4, 2, 0.3
BLOCKS = kvax.utils.FlashAttentionParamsConfig(query_block_size=8, kv_block_size=4)
# Documents one behind the other with padding at the end, and one in two pieces around another with padding between.
IDS = np.array([[0] * 5 + [3] * 15 + [7] * 8 + [-1] * 4, [1] * 8 + [4] * 8 + [-1] * 4 + [1] * 12], np.int32)
ONE_DEVICE = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
POSITIONS = np.stack([np.arange(SEQLEN), np.arange(SEQLEN) // 2 * 3 - 7]).astype(np.int32)


@pytest.fixture(autouse=True)
def route() -> None:
    """XLA calls the library itself: the routes of the other tests are one."""


def inputs(kv_heads: int = KV_HEADS):
    shapes = ((HEADS, 8), (kv_heads, 8), (kv_heads, 4))
    return [jnp.asarray(draw(BATCH, SEQLEN, *shape, seed=i)) for i, shape in enumerate(shapes)]


def tokens(positions=POSITIONS, ids=IDS):
    return (positions, ids, positions, ids)


def visible(positions=POSITIONS, ids=IDS):
    return (positions[:, :, None] >= positions[:, None]) & (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0)


def formula(q, k, v, seen, scale=SCALE):
    """[batch, seqlen_q, seqlen_kv] says who sees whom."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.where(seen[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale, -1e30)
    weights = jnp.where(seen[:, None], jax.nn.softmax(scores, -1), 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def close(got, expected) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def with_gradients(attend, *rows):
    return jax.jit(jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), argnums=range(len(rows))))(*rows)


# ---- One device ----


@pytest.mark.parametrize("masks", [0, 1, 3])
def test_same_as_the_formula(masks: int) -> None:
    rows, read = inputs(), {"scale": SCALE, "fwd_params": BLOCKS}
    mask = kvax.create_attention_mask(*tokens(), fwd_params=BLOCKS, calc_bwd_mask=masks == 3) if masks else None
    assert mask is None or len(mask) == masks
    run = jax.jit(jax.value_and_grad(lambda *x: (kvax.flash_attention(*x, *tokens(), mask, **read) ** 2).sum(), argnums=(0, 1, 2)))
    close(run(*rows), with_gradients(lambda *x: formula(*x, visible()), *rows))
    # Whatever padding holds.
    close(run(*(jnp.where(IDS[..., None, None] < 0, jnp.nan, x) for x in rows)), run(*rows))
    of_clean = clean.flash_attention(*rows, *tokens(), mask, **read)
    close(of_clean, formula(*rows, visible()))
    assert not np.asarray(of_clean)[IDS < 0].any()


def test_positions_that_are_indices_are_not_read() -> None:
    rows, wrong = inputs(), np.zeros_like(POSITIONS)
    index = np.broadcast_to(np.arange(SEQLEN), POSITIONS.shape)
    got = kvax.flash_attention(*rows, *tokens(wrong), scale=SCALE, assume_sequential_positions=True)
    close(got, formula(*rows, visible(index)))
    # A step of decoding: the query's position is the whole mask's.
    one = kvax.flash_attention(rows[0][:, :1], *rows[1:], np.full((BATCH, 1), 2, np.int32), IDS[:, :1], index, IDS, scale=SCALE)
    close(one, formula(rows[0][:, :1], *rows[1:], (index[:, None] <= 2) & (IDS[:, None] == IDS[:, :1, None])))


def blocks_of(seen, rows: int, inner: int):
    """Bounds by the dense mask, as create_attention_mask gives them."""
    cells = seen.reshape(BATCH, SEQLEN // rows, rows, SEQLEN // inner, inner)
    return cells.any((2, 4)), cells.all((2, 4))


def test_masks_of_blocks() -> None:
    bwd = common.FlashAttentionParamsConfig(query_block_size=4, kv_block_size=16)
    masks = kvax.create_attention_mask(*tokens(), fwd_params=BLOCKS, bwd_params=bwd, calc_bwd_mask=True)
    sizes = ((8, 4), (16, 4), (16, 4))
    for number, (mask, (rows, inner)) in enumerate(zip(masks, sizes)):
        assert mask.block_sizes == (rows, inner)
        seen = visible() if number < 2 else visible().transpose(0, 2, 1)
        visited, full = blocks_of(seen, rows, inner)
        lower, upper, lower_full, upper_full = (np.asarray(x)[:, 0] for x in mask.flatten())
        index = np.arange(SEQLEN // inner)
        within = (index >= lower[..., None]) & (index < upper[..., None])
        assert not (visited & ~within).any()
        # In one piece bounds are exact; in several what lies between is visited, and only what is full counts as full.
        np.testing.assert_array_equal(within[0], visited[0])
        within_full = (index >= lower_full[..., None]) & (index < upper_full[..., None])
        np.testing.assert_array_equal(within_full[0], full[0])
        assert not (within_full & ~full).any()
    left_in = kvax.create_attention_mask(*tokens(), fwd_params=BLOCKS, skip_pad_tokens=False)[0]
    assert left_in.upper_bounds[0, 0].tolist() == [2, 4, 6, 8] and masks[0].upper_bounds[0, 0].tolist() == [2, 4, 6, 7]
    # Full blocks of a document in two pieces around another: partial, all of them, in the row that has some of both.
    apart = np.array([[0] * 8 + [1] * 8 + [0] * 16] * 2, np.int32)
    index = np.broadcast_to(np.arange(SEQLEN), POSITIONS.shape)
    mask = kvax.create_attention_mask(*tokens(index, apart), fwd_params=BLOCKS)[0]
    np.testing.assert_array_equal(mask.lower_full_bounds[0, 0], [0, 2, 0, 0])
    np.testing.assert_array_equal(mask.upper_full_bounds[0, 0], [0, 2, 2, 0])


def test_what_a_mask_leaves_out_is_not_seen() -> None:
    rows, (mask,) = inputs(), kvax.create_attention_mask(*tokens(), fwd_params=BLOCKS)
    narrow = AttentionMask.unflatten((jnp.maximum(mask.lower_bounds, mask.upper_bounds - 1), *mask.flatten()[1:]))
    block = np.arange(SEQLEN) // 4
    least = np.repeat(np.asarray(narrow.lower_bounds)[:, 0], 8, 1)[:, :, None]
    for attend in (kvax.flash_attention, clean.flash_attention):
        got = with_gradients(lambda *x: attend(*x, *tokens(), (narrow,), scale=SCALE, fwd_params=BLOCKS), *rows)
        close(got, with_gradients(lambda *x: formula(*x, visible() & (block >= least)), *rows))


def test_policies_find_out_and_lse() -> None:
    def loss(q, k, v):
        return kvax.flash_attention(jnp.sin(q), k, v, *tokens()).sum()

    def calls(policy):
        kept = jax.checkpoint(loss, policy=policy)
        return str(jax.make_jaxpr(jax.grad(kept))(*inputs())).count("fovea_forward")

    names = jax.checkpoint_policies.save_only_these_names
    assert calls(names("attention_outputs")) == 1 and calls(names("other")) == 2


def test_refusals() -> None:
    rows, mask = inputs(), kvax.create_attention_mask(*tokens(), fwd_params=BLOCKS)
    cases = [
        (NotImplementedError, "Bias is not supported", {"bias": rows[0]}),
        (ValueError, "should be at least equal to one", {"mask": ()}),
        (ValueError, "num_mask_tensors=2 is not supported", {"mask": mask * 2, "fwd_params": BLOCKS}),
        (ValueError, r"the mask has blocks of \(8, 4\) queries and keys, fwd_params of \(64, 64\)", {"mask": mask}),
        (ValueError, r"has shape \(2, 1, 4\); expected \(2, 1, 1\)", {"mask": (AttentionMask.unflatten(mask[0].flatten()),)}),
        (ValueError, "must be initialised", {"mesh": ONE_DEVICE}),
        (ValueError, "kv_specs must have exactly 4 dimensions, got None", {"query_spec": (None,) * 4}),
        (ValueError, "no mesh is set", {"query_spec": (None,) * 4, "kv_spec": (None,) * 4}),
    ]
    for kind, text, words in cases:
        with pytest.raises(kind, match=text):
            kvax.flash_attention(*rows, *tokens(), **words)
    with pytest.raises(ValueError, match=r"q_ids have shape \(2, 31\); expected \(2, 32\)"):
        kvax.flash_attention(*rows, POSITIONS, IDS[:, 1:], POSITIONS, IDS)
    with pytest.raises(ValueError, match="must be given when mesh is"):
        clean.flash_attention(*rows, *tokens(), mesh=ONE_DEVICE)
    with pytest.raises(ValueError, match="query_positions and query_segment_ids have shapes"):
        kvax.create_attention_mask(POSITIONS, IDS[:, 1:], POSITIONS, IDS)


@pytest.mark.parametrize(
    "q, kv, text",
    [
        (("a", None, None), ("a", None, None, None), "query_specs must have exactly 4 dimensions, got 3."),
        (("a", None, None, None), (None,) * 4, "Batch dimension sharding must match"),
        ((None, None, None, "a"), (None,) * 4, "head_dim dimension sharding must match"),
        ((None, None, None, "a"), (None, None, None, "a"), "Sharding of attention_head_dim is not supported."),
        ((None, "a", None, None), (None, "a", None, None), "Context parallelism with sharded key/value tensors is not supported."),
        ((None,) * 4, (None, None, "a", None), "kv_specs split heads over 'a'"),
    ],
)
def test_specs_that_do_not_go_together(q, kv, text) -> None:
    with pytest.raises(ValueError, match=text), kvax.attention_specs(q, kv):
        pass


def test_specs_hold_where_they_are_set() -> None:
    pair = ("data", "context", None, None), ("data", None, None, None)
    with pytest.raises(ValueError, match="must be initialised"):
        specs_module.get_attention_specs()
    with kvax.attention_specs(*pair):
        assert specs_module.get_attention_specs() == specs_module.AttentionSpecs(*pair)
        assert mask_creator.make_attention_mask_spec(True) == ("data", "context", None)
        assert mask_creator.make_attention_mask_specs() == ((pair[0][:2],) * 2 + (pair[1][:2],) * 2, (("data", None, "context"),) * 4)
        with pytest.raises(ValueError, match="Mesh axis context is not present in the device mesh shape."):
            kvax.permute_tokens_context_parallelism(POSITIONS, ONE_DEVICE)
    assert specs_module.held_specs() is None


def test_permutation() -> None:
    tokens_of = jnp.arange(8)[None]
    (permuted,) = permutation.apply_permutation((tokens_of,), 4, False)
    assert permuted.tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    assert permutation.generate_shard_indices(4, reverse=True).tolist() == [0, 2, 3, 1]
    assert permutation.apply_permutation((permuted,), 4, True)[0].tolist() == tokens_of.tolist()
    with pytest.raises(ValueError, match="length 8; expected a multiple of 6"):
        permutation.apply_permutation((tokens_of,), 6, False)


def test_pictures(caplog) -> None:
    caplog.set_level("INFO")
    index, ids = np.arange(8)[None], np.array([[0] * 4 + [1] * 4])
    mask = mask_creator.compute_attention_mask_single_device(index, ids, index, ids, 2, 2)
    mask_creator.print_mask(mask, 4)
    assert "||░░      ||\n||██░░    ||\n||    ░░  ||\n||    ██░░||\n" in caplog.text and "  ========  \n" in caplog.text
    assert mask_creator.calculate_mask_sparsity(mask, 2, 2, 8, 8) == 6 / 16
    # 65 columns are two a cell: of the last one alone, at the edge, too.
    long, zeros = np.arange(65)[None], np.zeros((1, 65), int)
    mask = mask_creator.compute_attention_mask_single_device(long, zeros, long, zeros, 1, 1)
    mask_creator.print_mask(mask, 65)
    assert f"||{'██' * 32}░░||\n" in caplog.text


def test_imports_find_it_and_the_table_is_whole() -> None:
    fovea.compat.install("kvax")
    try:
        assert importlib.import_module("kvax.ops").flash_attention is kvax.flash_attention
        assert importlib.import_module("kvax.ops.flash_attention_triton").flash_attention_triton is kvax.flash_attention
        for module in DROP_INS["kvax"].modules:
            importlib.import_module(module)
    finally:
        fovea.compat.uninstall("kvax")
    arguments = {x for of in (kvax.flash_attention, clean.flash_attention, kvax.create_attention_mask) for x in inspect.signature(of).parameters}
    listed = [name for row in DROP_INS["kvax"].arguments for name in row.name.split(", ")]
    assert arguments == set(listed) and len(listed) == len(set(listed))


# ---- Benchmarks ----

SIZES = "--batch-size 2 --query-seq-len 256 --kv-seq-len 256 --num-heads 4 --num-kv-heads 2 --qk-head-dim 16 --value-head-dim 8 --num-iters 1"


@pytest.mark.parametrize("command, implementation", [("mha", "jax.nn.dot_product_attention"), ("mha_cp_bwd", "fovea, heads split")])
def test_benchmarks(command: str, implementation: str, caplog, tmp_path) -> None:
    caplog.set_level("INFO")
    png = tmp_path / "mask.png"
    words = f"{command} {SIZES} --num-segments 3 --num-pad-tokens 70 --show-attention-mask --png {png}"
    assert benchmarks.main(words.split()) == 0
    assert "query bfloat16 2x256x4x16" in caplog.text and "Validation successful." in caplog.text
    assert f"{implementation} took" in caplog.text and caplog.text.count("  ========  \n||") == (3 if command.endswith("bwd") else 1)
    picture = png.read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and picture[16:24] == b"\0\0\0\x20" * 2  # 4 x 4 blocks of 8 pixels


def test_benchmarks_that_cannot_run(capsys, monkeypatch) -> None:
    assert benchmarks.main(f"mha {SIZES} --num-segments 300".split()) == 2
    assert "fovea bench mha: num_segments is 300 for 256 tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmarks.main(["mha_cp", "--assume-sequential-positions", "perhaps"])
    assert "got 'perhaps'; expected true or false" in capsys.readouterr().err
    monkeypatch.setattr(benchmarks.sys, "argv", ["fovea", "bench", "mha_other"])
    assert fovea_main.main() == 2 and "'mha_other' is no benchmark" in capsys.readouterr().err


def test_comparisons_see_differences() -> None:
    one = jnp.ones((1, 2))
    benchmarking.check_outputs_fwd(one, one + 0.01)
    for other in (one + 0.1, one * jnp.nan):
        with pytest.raises(AssertionError, match="output"):
            benchmarking.check_outputs_fwd(one, other)
    with pytest.raises(AssertionError, match="dkey"):
        benchmarking.check_outputs_bwd((one,) * 3, (one, one + 1, one))
    assert benchmarking.format_duration(0.5) == "500.00 ms" and benchmarking.format_duration(90) == "1.50 m"
    assert benchmarking.format_tflops(0.5) == "500.00 GFLOPs"
    assert get_multi_head_attention_tflops(1, 10**4, 10**4, 10, 100, 100, True, num_gpus=2, backward_pass=True) == pytest.approx(0.35)


# ---- Eight devices ----


def test_meshes() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-B", __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def mesh_of(*extents: int):
    return jax.sharding.Mesh(np.array(jax.devices()[: np.prod(extents)]).reshape(extents), ("data", "context", "model"))


def check() -> None:
    """Both APIs, split in every way, are one device's."""
    index = np.broadcast_to(np.arange(SEQLEN), POSITIONS.shape).astype(np.int32)
    batch, context = ("data", None, None, None), ("data", "context", None, None)
    heads = ("data", None, "model", None)

    @functools.cache
    def expected_of(kv_heads, is_sequential):
        rows, seen = inputs(kv_heads), visible(index if is_sequential else POSITIONS)
        return formula(*rows, seen), with_gradients(lambda *x: formula(*x, seen), *rows)

    splits = [
        # extents of the mesh, specs, kv heads, whether positions are indices, whether tokens are permuted
        ((2, 1, 2), heads, heads, 2, False, False),
        ((2, 1, 4), heads, batch, 2, True, False),  # two kv heads on each device, query heads of one of them
        ((1, 8, 1), context, batch, 2, True, True),
        ((2, 4, 1), context, batch, 2, False, True),
        ((1, 2, 4), ("data", "context", "model", None), batch, 1, True, False),
    ]
    blocks = common.FlashAttentionParamsConfig(query_block_size=4, kv_block_size=4)
    for extents, q_spec, kv_spec, kv_heads, is_sequential, is_permuted in splits:
        mesh, rows, positions = mesh_of(*extents), inputs(kv_heads), index if is_sequential else POSITIONS
        words = {
            "scale": SCALE, "fwd_params": blocks, "assume_sequential_positions": is_sequential, "permute_tokens_for_load_balance": is_permuted
        }  # fmt: skip

        def original(*x):
            mask = kvax.create_attention_mask(*read, fwd_params=blocks, calc_bwd_mask=True)
            return kvax.flash_attention(*x, *read, mask, **words)

        def by_arguments(*x):
            split = {"mesh": mesh, "query_spec": q_spec, "kv_spec": kv_spec}
            mask = clean.create_attention_mask(*read, fwd_params=blocks, **split)
            return clean.flash_attention(*x, *read, mask, **words, **split)

        with jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else mesh, kvax.attention_specs(q_spec, kv_spec):
            read, args = tokens(positions), rows
            if is_permuted:
                *args, of_positions, of_ids = kvax.permute_tokens_context_parallelism((*rows, *read[:2]))
                read = (of_positions, of_ids, *read[2:])
            out = jax.jit(by_arguments)(*args)
            loss, gradients = with_gradients(original, *args)
            if is_permuted:
                out, *gradients = kvax.unpermute_tokens_context_parallelism((out, *gradients))
        expected, of_loss = expected_of(kv_heads, is_sequential)
        close(out, expected)
        close((loss, tuple(gradients)), of_loss)

    # Contributions of eight devices are added up before they are rounded.
    mesh, whole = mesh_of(1, 8, 1), inputs()
    rounded = [x.astype(jnp.bfloat16) for x in whole]
    split = {"mesh": mesh, "query_spec": context, "kv_spec": batch, "permute_tokens_for_load_balance": False}

    def error(attend, *rows, **words):
        dv = jax.jit(jax.grad(lambda v: attend(*rows[:2], v, **words).astype(jnp.float32).sum()))(rows[2])
        return float(jnp.square(dv.astype(jnp.float32) - exact).mean())

    exact = jax.grad(lambda v: formula(*(x.astype(jnp.float32) for x in rounded[:2]), v, visible()).sum())(rounded[2].astype(jnp.float32))
    of_eight, of_one = (error(lambda *x, **y: clean.flash_attention(*x, *tokens(), scale=SCALE, **y), *rounded, **words) for words in (split, {}))
    assert of_eight < 1.1 * of_one, (of_eight, of_one)


if __name__ == "__main__":
    check()
