"""kvax's benchmarks: ``python -m fovea bench mha``, ``mha_bwd``, ``mha_cp`` and ``mha_cp_bwd``.

The first two compare attention with JAX's own, the others context parallelism with heads that are split; results are compared, too.
"""

from __future__ import annotations

import argparse
import functools
import logging
import pathlib
import sys
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..._block_map import png_of
from .ops.mask_creator import cells_of, create_attention_mask
from .utils import benchmarking
from .utils.common import PADDING_SEGMENT_ID, get_default_flash_attention_params
from .utils.math import get_multi_head_attention_tflops
from .utils.specs import attention_specs

COMMANDS = {
    "mha": "forward, beside jax.nn.dot_product_attention",
    "mha_bwd": "forward and gradients, beside jax.nn.dot_product_attention",
    "mha_cp": "forward, tokens split over the devices, beside heads that are",
    "mha_cp_bwd": "forward and gradients, tokens split over the devices, beside heads that are",
}
_COLOURS = np.array([[255, 255, 255], [244, 157, 65], [43, 94, 167]], np.uint8)  # not visited, partial, full: as block maps have them
_CELL = 8  # pixels

logger = logging.getLogger(__name__)


def _bool(word: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if word.lower() not in values:
        raise argparse.ArgumentTypeError(f"got {word!r}; expected true or false")
    return values[word.lower()]


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"fovea bench {command}", description=COMMANDS[command])
    is_cp = command.startswith("mha_cp")
    length = 32768 if is_cp else 8192
    sizes = {
        "num-iters": 10, "batch-size": 4, "query-seq-len": length, "kv-seq-len": length, "num-heads": 32 if is_cp else 16,
        "num-kv-heads": 8 if is_cp else 16, "qk-head-dim": 128, "value-head-dim": 128, "num-segments": 1,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{default} unless given")
    parser.add_argument("--num-pad-tokens", type=int, default=0, metavar="N", help="padding at the end of each sequence; 0 unless given")
    parser.add_argument("--assume-sequential-positions", type=_bool, default=True, metavar="BOOL", help="true unless given")
    if is_cp:
        parser.add_argument("--permute-tokens-for-load-balance", type=_bool, default=True, metavar="BOOL", help="true unless given")
    parser.add_argument("--show-attention-mask", action="store_true", help="print which blocks are visited")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="write the picture of forward's blocks to this file")
    return parser


def _inputs(args: argparse.Namespace, parallelism: benchmarking.Parallelism) -> benchmarking.AttentionInputsDict:
    num_devices = len(jax.devices())
    return benchmarking.make_random_attention_inputs_with_sharding(
        args.batch_size, args.query_seq_len, args.kv_seq_len, args.num_heads, args.num_kv_heads, args.qk_head_dim, args.value_head_dim,
        jax.random.PRNGKey(0), num_pad_tokens=args.num_pad_tokens, shard_kv=parallelism == "tensor" and args.num_kv_heads % num_devices == 0,
        parallelism_type=parallelism, list_of_segment_lengths=benchmarking.generate_random_segments_lengths(args.query_seq_len, args.num_segments),
    )  # fmt: skip


def _write_png(inputs: benchmarking.AttentionInputsDict, path: pathlib.Path) -> None:
    data, mesh, query_specs, kv_specs = inputs
    q_positions, q_ids, kv_positions, kv_ids = data["data"][3:]
    with attention_specs(query_specs, kv_specs):
        (mask,) = create_attention_mask(q_positions, q_ids, kv_positions, kv_ids, mesh=mesh)
    cells = cells_of(mask, -(-kv_ids.shape[1] // get_default_flash_attention_params(backward=False).kv_block_size))
    pixels = _COLOURS[cells].repeat(_CELL, 0).repeat(_CELL, 1)
    path.write_bytes(png_of(pixels.tobytes(), pixels.shape[0], pixels.shape[1]))


def _without_padding(results: Any, ids: Any) -> tuple[Any, ...]:
    """Rows of padding mean nothing in one of the two."""
    is_padding = (np.asarray(ids) == PADDING_SEGMENT_ID)[..., None, None]
    results = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(jnp.where(is_padding, 0, np.asarray(x)) for x in results)


def _run(command: str, args: argparse.Namespace) -> None:
    is_cp, is_bwd = command.startswith("mha_cp"), command.endswith("_bwd")
    inputs = _inputs(args, "context" if is_cp else "tensor")
    if args.png is not None:
        _write_png(inputs, args.png)
    num_devices = len(jax.devices())
    for name, x in zip(("query", "key", "value"), inputs[0]["data"]):
        logger.info("%s %s %s", name, x.dtype, "x".join(map(str, x.shape)))
    logger.info("%d devices, %s split over them", num_devices, "queries" if is_cp else "heads")
    tflops = get_multi_head_attention_tflops(
        args.batch_size, args.query_seq_len, args.kv_seq_len, args.num_heads, args.qk_head_dim, args.value_head_dim, causal=False,
        num_gpus=num_devices, backward_pass=is_bwd,
    )  # fmt: skip
    timed = functools.partial(benchmarking.benchmark_jax_func, num_iters=args.num_iters)
    ours = benchmarking.benchmark_flash_attention_triton_bwd if is_bwd else benchmarking.benchmark_flash_attention_triton_fwd

    def attention(inputs: benchmarking.AttentionInputsDict, name: str, permute: bool, shows_mask: bool) -> Any:
        return ours(
            inputs, timed, tflops, args.assume_sequential_positions, permute, args.query_seq_len, args.kv_seq_len, shows_mask, name=name
        )

    got = attention(inputs, "fovea, tokens split" if is_cp else "fovea", is_cp and args.permute_tokens_for_load_balance, args.show_attention_mask)
    if is_cp:
        expected = attention(_inputs(args, "tensor"), "fovea, heads split", False, False)
    else:
        reference = benchmarking.benchmark_flash_attention_cudnn_bwd if is_bwd else benchmarking.benchmark_flash_attention_cudnn_fwd
        expected = reference(inputs, timed, tflops, args.num_segments, True)
    check = benchmarking.check_outputs_bwd if is_bwd else benchmarking.check_outputs_fwd
    ids = inputs[0]["data"][4]
    expected, got = (_without_padding(x, ids) for x in (expected, got))
    check(expected if is_bwd else expected[0], got if is_bwd else got[0])
    logger.info("Validation successful.")


def main(words: Sequence[str]) -> int:
    """Runs a command and its words."""
    args = _parser(words[0]).parse_args(words[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        _run(words[0], args)
    except (ValueError, AssertionError) as error:
        print(f"fovea bench {words[0]}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0
