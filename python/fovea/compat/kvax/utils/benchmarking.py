"""Random inputs, timing and comparison: what kvax's tests and benchmarks are made of."""

from __future__ import annotations

import functools
import logging
import random
import timeit
from typing import Any, Callable, Literal, Optional, Sequence, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..ops.flash_attention_cudnn import create_cudnn_attn_mask, flash_attention_cudnn
from ..ops.flash_attention_triton import flash_attention_triton
from ..ops.mask_creator import calculate_mask_sparsity, create_attention_mask, print_mask
from .common import PADDING_SEGMENT_ID, get_default_flash_attention_params
from .permutation import permute_tokens_context_parallelism, unpermute_tokens_context_parallelism
from .specs import attention_specs
from .typing import DeviceArray, PRNGKey, Specs

AttentionInputsDict = tuple[dict[str, Any], Mesh, Specs, Specs]
Parallelism = Literal["context", "tensor"]

logger = logging.getLogger(__name__)


# ---- Inputs ----


def generate_random_segments_lengths(seq_len: int, num_segments: int) -> Optional[list[int]]:
    """Lengths of documents of 1 token or more that fill a sequence, the same ones in every run; None of a single one."""
    if num_segments == 1:
        return None
    if not 0 < num_segments <= seq_len:
        raise ValueError(f"num_segments is {num_segments} for {seq_len} tokens; expected 1 to {seq_len}.")
    random.seed(0)
    lengths = [1] * num_segments
    for _ in range(seq_len - num_segments):
        lengths[random.randrange(num_segments)] += 1
    return lengths


def _segment_ids(lengths: Optional[Sequence[int]], seq_len: int) -> Any:
    """[seq_len]; a last length of -1 is the rest."""
    if lengths is None:
        return np.zeros(seq_len, np.int32)
    lengths = list(lengths)
    if lengths[-1] == -1:
        lengths[-1] = seq_len - sum(lengths[:-1])
    if sum(lengths) != seq_len:
        raise ValueError(f"list_of_segment_lengths has {sum(lengths)} tokens; expected {seq_len}.")
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def make_random_attention_inputs_with_sharding(
    batch_size: int,
    query_seq_len: int,
    kv_seq_len: int,
    num_query_heads: int,
    num_kv_heads: int,
    qk_head_dim: int,
    value_head_dim: int,
    rng: PRNGKey,
    num_pad_tokens: int = 0,
    shard_kv: bool = True,
    random_num_pad_tokens_in_batch: bool = False,
    start_query_position: Union[int, Sequence[int]] = 0,
    parallelism_type: Parallelism = "tensor",
    list_of_segment_lengths: Optional[Sequence[int]] = None,
) -> AttentionInputsDict:
    """Arrays in bf16, split over all devices.

    Parameters
    ----------
    num_pad_tokens : int
        Of the end of each sequence; with `random_num_pad_tokens_in_batch` at most so many.
    start_query_position : int or sequence of int
        Of the first query. A single query is a step of decoding: keys behind it are padding.
    list_of_segment_lengths : sequence of int, optional
        Of documents; a last one of -1 is the rest.

    Returns
    -------
    (inputs, mesh, query_specs, kv_specs)
        ``inputs["data"]`` are query, key, value, positions and ids of queries, positions and ids of keys; ``inputs["scale"]``.
    """
    of_q, of_k, of_v, of_pad = jax.random.split(rng, 4)
    shapes = ((query_seq_len, num_query_heads, qk_head_dim), (kv_seq_len, num_kv_heads, qk_head_dim), (kv_seq_len, num_kv_heads, value_head_dim))
    rows = [jax.random.normal(key, (batch_size, *shape), jnp.bfloat16) for key, shape in zip((of_q, of_k, of_v), shapes)]

    starts = np.broadcast_to(np.asarray(start_query_position, np.int32), (batch_size,))[:, None]
    num_pad = np.full((batch_size, 1), num_pad_tokens)
    if random_num_pad_tokens_in_batch:
        num_pad = np.asarray(jax.random.randint(of_pad, (batch_size, 1), 0, num_pad_tokens + 1))

    def tokens(seq_len: int, first: Any) -> tuple[Any, Any]:
        index = np.arange(seq_len, dtype=np.int32)[None]
        ids = np.where(index >= seq_len - num_pad, PADDING_SEGMENT_ID, _segment_ids(list_of_segment_lengths, seq_len))
        return index + first, ids.astype(np.int32)

    if query_seq_len == 1:
        query_tokens = (starts, np.zeros((batch_size, 1), np.int32))
        positions, ids = tokens(kv_seq_len, np.zeros_like(starts))
        kv_tokens = (positions, np.where(positions > starts, PADDING_SEGMENT_ID, ids))
    else:
        query_tokens, kv_tokens = tokens(query_seq_len, starts), tokens(kv_seq_len, np.zeros_like(starts))
    inputs = {"data": (*rows, *query_tokens, *kv_tokens), "scale": float(qk_head_dim) ** -0.5}
    return shard_input_data(inputs, parallelism_type, shard_kv)


def shard_input_data(inputs: dict[str, Any], parallelism_type: Parallelism = "tensor", shard_kv: bool = True) -> AttentionInputsDict:
    """The same arrays split over all devices: by heads, or under "context" queries by their tokens."""
    devices = np.array(jax.devices())
    query_specs: tuple[Any, ...]
    kv_specs: tuple[Any, ...]
    if parallelism_type == "context":
        mesh = Mesh(devices.reshape(1, -1, 1), ("data", "context", "model"))
        query_specs, kv_specs = ("data", "context", None, None), ("data", None, None, None)
    else:
        mesh = Mesh(devices.reshape(1, -1), ("data", "model"))
        query_specs, kv_specs = ("data", None, "model", None), ("data", None, "model" if shard_kv else None, None)
    specs = (query_specs, kv_specs, kv_specs, query_specs[:2], query_specs[:2], kv_specs[:2], kv_specs[:2])
    data = tuple(jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for x, spec in zip(inputs["data"], specs))
    return {**inputs, "data": data}, mesh, query_specs, kv_specs


# ---- Timing ----


def format_duration(seconds: Union[int, float]) -> str:
    """In h, m, s or ms, the largest of which there is one."""
    for name, size in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.2f} {name}"
    return f"{seconds * 1e3:.2f} ms"


def format_tflops(tflops: Union[int, float]) -> str:
    """In TFLOPs, of 1 and less in GFLOPs."""
    return f"{tflops:.2f} TFLOPs" if tflops > 1 else f"{tflops * 1e3:.2f} GFLOPs"


def disable_compile_cache() -> None:
    """Lets JAX compile anew."""
    jax.config.update("jax_enable_compilation_cache", False)


def benchmark_jax_func(
    fn_name: str,
    fn: Callable[..., Any],
    fn_args: tuple[Any, ...],
    fn_kwargs: Optional[dict[str, Any]] = None,
    num_iters: int = 100,
    profile: bool = False,
    tflops_per_iter: Optional[float] = None,
) -> Any:
    """Compiles a function, logs the mean time of a call behind the first, and gives what that returned.

    Parameters
    ----------
    profile : bool
        Whether a profile is written to ./profile.
    tflops_per_iter : float, optional
        10^12 operations of a call, for the rate.
    """
    run = jax.jit(functools.partial(fn, **(fn_kwargs or {})))
    result = jax.block_until_ready(run(*fn_args))
    if profile:
        with jax.profiler.trace("./profile"):
            jax.block_until_ready(run(*fn_args))
    seconds = timeit.timeit(lambda: jax.block_until_ready(run(*fn_args)), number=num_iters) / num_iters
    rate = "" if tflops_per_iter is None else f", achieved {format_tflops(tflops_per_iter / seconds)}"
    logger.info("%s took %s per iteration%s", fn_name, format_duration(seconds), rate)
    return result


def _gradients(fn: Callable[..., Any]) -> Any:
    """Gradients of the sum of what `fn` returns, by query, key and value."""
    return jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))


def _benchmark_reference(inputs_dict: AttentionInputsDict, benchmark_fn: Any, tflops: float, num_segments: int, is_causal: bool, is_bwd: bool) -> Any:
    inputs, mesh, query_specs, kv_specs = inputs_dict
    query, key, value, _, q_ids, _, kv_ids = inputs["data"]
    with attention_specs(query_specs, kv_specs):
        mask = create_cudnn_attn_mask(q_ids, kv_ids) if num_segments > 1 else None
        fn = functools.partial(flash_attention_cudnn, scale=inputs["scale"], is_causal=is_causal, mesh=mesh)
        of_mask = () if mask is None else (mask,)
        return benchmark_fn(
            "jax.nn.dot_product_attention", fn=_gradients(fn) if is_bwd else fn, fn_args=(query, key, value, q_ids, kv_ids, *of_mask),
            tflops_per_iter=tflops * 0.5,
        )  # fmt: skip


def benchmark_flash_attention_cudnn_fwd(
    inputs_dict: AttentionInputsDict, benchmark_fn: Callable[..., Any], tflops_per_iter: float, num_segments: int, is_causal: bool
) -> DeviceArray:
    """Times JAX's own attention, and gives its result. Half of the operations count, as of a causal mask."""
    return _benchmark_reference(inputs_dict, benchmark_fn, tflops_per_iter, num_segments, is_causal, is_bwd=False)


def benchmark_flash_attention_cudnn_bwd(
    inputs_dict: AttentionInputsDict, benchmark_fn: Callable[..., Any], tflops_per_iter: float, num_segments: int, is_causal: bool
) -> Any:
    """The same with gradients, which it gives."""
    return _benchmark_reference(inputs_dict, benchmark_fn, tflops_per_iter, num_segments, is_causal, is_bwd=True)


def _benchmark(
    inputs_dict: AttentionInputsDict, benchmark_fn: Any, tflops: float, sequential: bool, permute: bool, show_mask: bool, name: str, is_bwd: bool
) -> Any:
    inputs, mesh, query_specs, kv_specs = inputs_dict
    data: Any = inputs["data"]
    is_permuted = permute and query_specs[1] is not None
    fwd, bwd = (get_default_flash_attention_params(backward) for backward in (False, True))
    seqlen_q, seqlen_kv = data[0].shape[1], data[1].shape[1]
    with attention_specs(query_specs, kv_specs):
        if is_permuted:
            data = (*permute_tokens_context_parallelism(data[:5], mesh=mesh), *data[5:])
        q_positions, q_ids, kv_positions, kv_ids = data[3:]
        mask = create_attention_mask(q_positions, q_ids, kv_positions, kv_ids, fwd_params=fwd, bwd_params=bwd, calc_bwd_mask=is_bwd, mesh=mesh)
        if show_mask:
            inner = ((seqlen_kv, fwd.kv_block_size), (seqlen_kv, bwd.query_block_size), (seqlen_q, bwd.query_block_size))
            for one, (seqlen, block_size) in zip(mask, inner):
                print_mask(one, -(-seqlen // block_size))
        attention = functools.partial(
            flash_attention_triton, scale=inputs["scale"], fwd_params=fwd, bwd_params=bwd, assume_sequential_positions=sequential,
            permute_tokens_for_load_balance=permute, mesh=mesh,
        )  # fmt: skip
        density = calculate_mask_sparsity(mask[0], fwd.query_block_size, fwd.kv_block_size, seqlen_q, seqlen_kv)
        fn = _gradients(attention) if is_bwd else attention
        result = benchmark_fn(name, fn=fn, fn_args=(*data, mask), tflops_per_iter=tflops * density)
        return unpermute_tokens_context_parallelism(result, mesh=mesh) if is_permuted else result


def benchmark_flash_attention_triton_fwd(
    inputs_dict: AttentionInputsDict,
    benchmark_fn: Callable[..., Any],
    tflops_per_iter: float,
    assume_sequential_positions: bool,
    permute_tokens_for_load_balance: bool,
    query_seq_len: int,
    kv_seq_len: int,
    show_attention_mask: bool,
    name: str = "flash_attention_triton",
) -> DeviceArray:
    """Times attention, and gives its result in the order of the inputs. Blocks that are visited count. Lengths are those of the inputs."""
    return _benchmark(
        inputs_dict, benchmark_fn, tflops_per_iter, assume_sequential_positions, permute_tokens_for_load_balance, show_attention_mask, name,
        is_bwd=False,
    )  # fmt: skip


def benchmark_flash_attention_triton_bwd(
    inputs_dict: AttentionInputsDict,
    benchmark_fn: Callable[..., Any],
    tflops_per_iter: float,
    assume_sequential_positions: bool,
    permute_tokens_for_load_balance: bool,
    query_seq_len: int,
    kv_seq_len: int,
    show_attention_mask: bool,
    name: str = "flash_attention_triton",
) -> Any:
    """The same with gradients, which it gives."""
    return _benchmark(
        inputs_dict, benchmark_fn, tflops_per_iter, assume_sequential_positions, permute_tokens_for_load_balance, show_attention_mask, name,
        is_bwd=True,
    )  # fmt: skip


# ---- Comparison ----


def _compare(name: str, expected: Any, got: Any, atol: float, rtol: float) -> None:
    one, other = (np.asarray(x, np.float32) for x in (expected, got))
    assert np.isfinite(one).all() and np.isfinite(other).all(), f"{name}: not all are finite"
    np.testing.assert_allclose(other, one, atol=atol, rtol=rtol, err_msg=name)


def check_outputs_fwd(results_ref: DeviceArray, results: DeviceArray, atol: float = 2e-2, rtol: float = 1e-5) -> None:
    """Raises an AssertionError where results are not finite, or apart."""
    _compare("output", results_ref, results, atol, rtol)


def check_outputs_bwd(
    results_ref: Sequence[DeviceArray],
    results: Sequence[DeviceArray],
    query_atol: float = 3e-2,
    query_rtol: float = 1e-2,
    kv_atol: float = 3e-2,
    kv_rtol: float = 3e-2,
) -> None:
    """The same of gradients by query, key and value."""
    tolerances = ((query_atol, query_rtol), (kv_atol, kv_rtol), (kv_atol, kv_rtol))
    for name, expected, got, (atol, rtol) in zip(("dquery", "dkey", "dvalue"), results_ref, results, tolerances):
        _compare(name, expected, got, atol, rtol)
