"""The KV cache, contiguous or paged: append, decode; and results over parts of the keys, joined."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Sequence

from . import _abi
from ._arrays import Array, check_writable, framework_of
from ._attention import _shape as shape_of, keep_template, lse_shape, make_outputs, out_spec
from ._calls import Builder, Template, offset
from ._forward import Arguments, _flag, _whole, add_forward, check_choice, gather, resolved
from ._library import address_of
from ._prepared import PreparedPlan, is_on_host, kept_features, spec_beside
from .errors import InvalidArgument

_DECODE = address_of("fovea_attention_decode")
_APPEND = address_of("fovea_append_to_cache")
_MERGE = address_of("fovea_merge_states")
_PLAN_RUN_DECODE = address_of("fovea_plan_run_decode")
_PLAN_RUN_APPEND = address_of("fovea_plan_run_append")


@dataclasses.dataclass
class KvCache:
    """Keys and values of earlier tokens.

    Attributes
    ----------
    k : array, [slots, capacity, num_heads_kv, head_dim_qk] f32, f16 or bf16, or codes: i8 or e4m3 (float8_e4m3fn)
        With `page_table`: [num_pages, page_size, num_heads_kv, head_dim_qk].
    v : array, the same with head_dim_v
    seqlens : array, [batch] i32 or i64
        Rows in use. Calls do not change it: add the appended tokens after the last layer.
    page_table : array, [batch, max_pages] i32 or i64, optional
    batch_idx : array, [batch] i32 or i64, optional
        The slot of each sequence; contiguous caches alone.
    left_padding : array, [batch] i32 or i64, optional
        Rows at the start that are no keys.
    page_indptr, page_indices : array, [batch + 1] and [num_indices] i32 or i64, optional
        In place of page_table: page n of sequence b is ``page_indices[page_indptr[b] + n]``; on the host alone.
    k_scale, v_scale : array, f32, optional
        What codes are multiplied by: [slots, capacity, num_heads_kv] or [num_pages, page_size, num_heads_kv], written where tokens
        are appended; of e4m3 also [batch, num_heads_kv] or [1], which are given.
    """

    k: Array
    v: Array
    seqlens: Array
    page_table: Array | None = None
    batch_idx: Array | None = None
    left_padding: Array | None = None
    page_indptr: Array | None = None
    page_indices: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None


class Rotary(NamedTuple):
    """Angles that turn queries and appended keys.

    Attributes
    ----------
    cos, sin : array, [max_positions, rotary_dim / 2] f32, f16 or bf16
    positions : array, [batch, seqlen_q], optional
        The place in the sequence; behind the cached rows unless given.
    is_interleaved : bool
        Pairs (2j, 2j + 1) instead of (j, j + rotary_dim / 2).
    positions_q : array, [batch, seqlen_q] or [total_q], optional
        Of queries alone; `positions` are then those of appended keys alone.
    """

    cos: Array
    sin: Array
    positions: Array | None = None
    is_interleaved: bool = False
    positions_q: Array | None = None


_CACHE_DTYPES = ("f32", "f16", "bf16", "i8", "e4m3")


def kv_cache(
    like: Array,
    batch: int,
    capacity: int,
    num_heads_kv: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    page_size: int | None = None,
    dtype: str | None = None,
) -> KvCache:
    """An empty cache of `like`'s library and device.

    Parameters
    ----------
    like : array
        Gives library and device, and the dtype unless one is named.
    batch, capacity : int
        Sequences, and the tokens that each has room for.
    num_heads_kv, head_dim : int
    head_dim_v : int, optional
        `head_dim` unless given.
    page_size : int, optional
        Keys of a page; contiguous unless given. Page n of sequence b is page ``b * max_pages + n`` at first.
    dtype : {"f32", "f16", "bf16", "i8", "e4m3"}, optional
        Codes, i8 or e4m3, take half the memory of 16 bits, and scales for each row and head, which lie side by side for a head.

    Returns
    -------
    KvCache
        All lengths 0.

    Raises
    ------
    InvalidArgument
        `like` is an array of JAX, whose arrays cannot be written, `page_size` is below 1, a size below 0, or `dtype` none of these.
    """
    framework = framework_of(like, "kv_cache", "like")
    if framework.name == "jax":
        raise InvalidArgument("kv_cache: like is an array of JAX, whose arrays cannot be written; expected one of NumPy or PyTorch")
    if dtype is not None:
        check_choice(dtype, "dtype", _CACHE_DTYPES, "kv_cache")
    sizes = {"batch": batch, "capacity": capacity, "num_heads_kv": num_heads_kv, "head_dim": head_dim}
    for name, size in sizes.items():
        if _whole(size, name, "kv_cache") < 0:
            raise InvalidArgument(f"kv_cache: {name} is {size}; expected >= 0")
    table = None
    rows = (batch, capacity)
    if page_size is not None:
        if _whole(page_size, "page_size", "kv_cache") < 1:
            raise InvalidArgument(f"kv_cache: page_size is {page_size}; expected >= 1")
        max_pages = -(-capacity // page_size)
        rows = (batch * max_pages, page_size)
        table = framework.numbered(like, batch, max_pages)
    seqlens = framework.empty(like, (batch,), "i32")
    seqlens[:] = 0
    k = framework.empty(like, (*rows, num_heads_kv, head_dim), dtype)
    v = framework.empty(like, (*rows, num_heads_kv, head_dim_v or head_dim), dtype)
    if dtype not in ("i8", "e4m3"):
        return KvCache(k, v, seqlens, table)
    scales = (framework.empty(like, (rows[0], num_heads_kv, rows[1]), "f32").swapaxes(1, 2) for _ in "kv")
    return KvCache(k, v, seqlens, table, None, None, None, None, *scales)


#: What stands in for `decode` and `append_to_cache` where PyTorch watches operators: set by fovea.torch.
compiled: Any = None

_templates: dict[Any, Template] = {}
CACHE_FIELDS = ("seqlens", "page_table", "batch_idx", "left_padding", "page_indptr", "page_indices", "k_scale", "v_scale")


class _CacheCall(NamedTuple):
    """What decode and append have beyond a forward call."""

    arguments: Arguments
    given: dict[str, Array]
    is_interleaved: bool
    sees_all_keys: bool = False
    max_seqlen_q: int = 0
    shared_prefix: int = 0

    @property
    def tensors(self) -> tuple[Array, ...]:
        return *self.arguments.tensors, *self.given.values()

    @property
    def words(self) -> tuple[int, ...]:
        """Behind them come the address and size of a workspace."""
        return *self.arguments.words, self.max_seqlen_q, self.shared_prefix

    def template(self, function: str) -> Template:
        key = (self.arguments.key, tuple(self.given), self.is_interleaved, self.sees_all_keys, function)
        found = _templates.get(key)
        if found is not None:
            return found
        builder = Builder(function)
        struct = _abi.DecodeArgs
        flags = {"is_interleaved": int(self.is_interleaved), "sees_all_keys": int(self.sees_all_keys)}
        at = builder.add(_abi.sized(struct, **flags))
        # k and v of a cache have one order of dimensions, whatever that of q and out.
        forward = add_forward(builder, self.arguments, function)
        builder.point(at + offset(struct, "forward"), forward)
        for name in self.given:
            builder.tensor(at + offset(struct, name), name)
        builder.word(at + offset(struct, "max_seqlen_q"))
        builder.word(at + offset(struct, "shared_prefix"))
        builder.word(forward + offset(_abi.ForwardArgs, "workspace"))
        builder.word(forward + offset(_abi.ForwardArgs, "workspace_bytes"))
        return keep_template(_templates, key, builder.done())


def _check_cache(cache: KvCache, function: str) -> None:
    if not isinstance(cache, KvCache):
        raise InvalidArgument(f"{function}: cache is a {type(cache).__name__}; expected a KvCache")


def _cache_arguments(
    cache: KvCache,
    append_k: Array | None,
    append_v: Array | None,
    append_cu_seqlens: Array | None,
    rotary: Rotary | None,
    function: str,
) -> dict[str, Array]:
    _check_cache(cache, function)
    if append_k is not None:
        check_writable(cache.k, "cache.k", function)
        check_writable(cache.v, "cache.v", function)
        for name in ("k_scale", "v_scale"):
            scale = getattr(cache, name)
            if scale is not None and len(scale.shape) == 3:  # of rows
                check_writable(scale, f"cache.{name}", function)
    given = {name: getattr(cache, name) for name in CACHE_FIELDS}
    given |= {"append_k": append_k, "append_v": append_v, "append_cu_seqlens": append_cu_seqlens}
    if rotary is not None:
        given |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "rotary_positions": rotary.positions}
        given |= {"rotary_positions_q": rotary.positions_q}
    return {name: array for name, array in given.items() if array is not None}


def _decode_call(
    function: str,
    q: Array,
    cache: KvCache,
    out: Array,
    lse: Array | None,
    stream: int,
    /,
    *,
    append_k: Array | None = None,
    append_v: Array | None = None,
    append_cu_seqlens: Array | None = None,
    rotary: Rotary | None = None,
    sees_all_keys: bool = False,
    cu_seqlens: Array | None = None,
    max_seqlen_q: int = 0,
    shared_prefix: int = 0,
    shared_cu_sequences: Array | None = None,
    **features: Any,
) -> _CacheCall:
    if features.get("layout", "bshd") != "bshd":
        raise InvalidArgument(f"{function}: layout is {features['layout']!r}; expected 'bshd', the layout of caches")
    sees_all_keys, max_seqlen_q = _flag(sees_all_keys, "sees_all_keys", function), _whole(max_seqlen_q, "max_seqlen_q", function)
    if _whole(shared_prefix, "shared_prefix", function) < 0:
        raise InvalidArgument(f"{function}: shared_prefix is {shared_prefix}; expected >= 0")
    given = _cache_arguments(cache, append_k, append_v, append_cu_seqlens, rotary, function)
    if cu_seqlens is not None:
        features["cu_seqlens"] = (cu_seqlens, None)  # a cache has lengths of its own
    if shared_cu_sequences is not None:
        given["shared_cu_sequences"] = shared_cu_sequences
    arguments = gather(function, q, cache.k, cache.v, out, lse, stream, **features)
    is_interleaved = rotary is not None and rotary.is_interleaved
    return _CacheCall(arguments, given, is_interleaved, sees_all_keys, max_seqlen_q, shared_prefix)


def _append_call(
    function: str, cache: KvCache, k: Array, v: Array | None, rotary: Rotary | None, cu_seqlens: Array | None, stream: int
) -> _CacheCall:
    given = _cache_arguments(cache, k, v, cu_seqlens, rotary, function)
    arguments = gather(function, None, cache.k, cache.v, None, None, stream)
    return _CacheCall(arguments, given, rotary is not None and rotary.is_interleaved)


def decode(
    q: Array,
    cache: KvCache,
    *,
    append_k: Array | None = None,
    append_v: Array | None = None,
    append_cu_seqlens: Array | None = None,
    rotary: Rotary | None = None,
    sees_all_keys: bool = False,
    cu_seqlens: Array | None = None,
    max_seqlen_q: int = 0,
    shared_prefix: int = 0,
    shared_cu_sequences: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    **features: Any,
) -> Any:
    """Attention over the keys of a cache, after new ones were appended to it.

    Parameters
    ----------
    q : array, [batch, seqlen_q, num_heads_q, head_dim_qk], f32, f16 or bf16
        With `cu_seqlens` packed: [total_q, num_heads_q, head_dim_qk].
    cache : KvCache
        New rows are written behind `seqlens`, which stays as it is.
    append_k : array, [batch, seqlen_new, num_heads_kv, head_dim_qk], optional
    append_v : array, [batch, seqlen_new, num_heads_kv, head_dim_v], optional
        None where cache.v is a view of cache.k's first columns, which are written with append_k.
    append_cu_seqlens : array, [batch + 1] i32 or i64, optional
        Where each sequence begins in packed append_k and append_v, [total_new, num_heads_kv, ...]; `cu_seqlens` unless given.
    rotary : Rotary, optional
        Turns q and append_k.
    sees_all_keys : bool
        A call that poses no mask at all is causal, the last query at the last key, unless this is set.
    cu_seqlens : array, [batch + 1] i32 or i64, optional
        Where each sequence begins in a packed q: chunks of prompts and single tokens in one call.
    max_seqlen_q : int
        With `cu_seqlens`: queries of the longest sequence, or more; 0: total_q.
    shared_prefix : int
        The first keys of every sequence, attended to once for all queries, where the first sequence has them; at most the
        keys before a sequence's first query.
    shared_cu_sequences : array, [num_groups + 1] i32 or i64, optional
        Sequences from one to the next share a prefix of their own; all of them share one unless given.
    return_lse, out, lse
        As `attention`'s.
    **features
        Others of `attention`'s: window, softcap, score_mod, mask_mod, sinks, ... On Hopper also quant, 'fast' or 'accurate': what the
        cache holds, codes or numbers, is rounded anew for chunks of prompts.

    Returns
    -------
    out, or (out, lse)
        As `attention`.

    Raises
    ------
    InvalidArgument, Unsupported
        As `attention`.
    """
    options = {
        "append_k": append_k, "append_v": append_v, "append_cu_seqlens": append_cu_seqlens, "cu_seqlens": cu_seqlens, "rotary": rotary,
        "sees_all_keys": sees_all_keys, "max_seqlen_q": max_seqlen_q, "shared_prefix": shared_prefix,
        "shared_cu_sequences": shared_cu_sequences, **features,
    }  # fmt: skip
    if compiled is not None and compiled.is_watched():
        _check_cache(cache, "decode")
        return compiled.decode(q, cache, return_lse=return_lse, out=out, lse=lse, **options)
    return _decode("decode", q, cache, out, lse, return_lse, options)


def _decode(
    function: str, q: Array, cache: KvCache, out: Array | None, lse: Array | None, return_lse: bool, options: dict[str, Any],
    plan: PreparedPlan | None = None,
) -> Any:  # fmt: skip
    """By a plan or without."""
    _check_cache(cache, function)
    framework = framework_of(q, function, "q")
    out, lse = make_outputs(function, framework, q, cache.v, out, lse, return_lse, "bshd")
    call = _decode_call(function, q, cache, out, lse, framework.stream(q), **options)
    call = call._replace(arguments=resolved(framework, call.arguments, function))
    template = call.template(function)
    if plan is None:
        template.invoke(call.tensors, (*call.words, 0, 0), _DECODE)
    else:
        plan._invoke(template, call.tensors, call.words, _PLAN_RUN_DECODE, framework, q)
    finish = framework.finish
    return (finish(out), finish(lse)) if return_lse else finish(out)


def append_to_cache(
    cache: KvCache, k: Array, v: Array | None = None, rotary: Rotary | None = None, *, cu_seqlens: Array | None = None
) -> None:
    """Writes new keys and values behind `cache.seqlens`, which stays as it is.

    Parameters
    ----------
    cache : KvCache
    k : array, [batch, seqlen_new, num_heads_kv, head_dim_qk]
    v : array, [batch, seqlen_new, num_heads_kv, head_dim_v]
        None where cache.v is a view of cache.k's first columns, which are written with k.
    rotary : Rotary, optional
        Turns k.
    cu_seqlens : array, [batch + 1] i32 or i64, optional
        Where each sequence begins in packed k and v, [total_new, num_heads_kv, ...].

    Raises
    ------
    InvalidArgument
        A shape or dtype is wrong, or a sequence has no room; nothing was written.
    """
    function = "append_to_cache"
    if compiled is not None and compiled.is_watched():
        _check_cache(cache, function)
        compiled.append_to_cache(cache, k, v, rotary, cu_seqlens)
        return
    call = _append_call(function, cache, k, v, rotary, cu_seqlens, framework_of(k, function, "k").stream(k))
    call.template(function).invoke(call.tensors, (*call.words, 0, 0), _APPEND)


def _merge_template(num_states: int, has_lse: bool) -> Template:
    key = ("merge_states", num_states, has_lse)
    found = _templates.get(key)
    if found is not None:
        return found
    builder = Builder("merge_states")
    struct = _abi.MergeStatesArgs
    at = builder.add(_abi.sized(struct, num_states=num_states))
    for field in ("outs", "lses"):
        pointers = builder.add(8 * num_states)
        builder.point(at + offset(struct, field), pointers)
        for index in range(num_states):
            builder.tensor(pointers + 8 * index, f"{field}[{index}]")
    builder.tensor(at + offset(struct, "out"), "out")
    if has_lse:
        builder.tensor(at + offset(struct, "lse"), "lse")
    builder.word(at + offset(struct, "stream"))
    return keep_template(_templates, key, builder.done())


def merge_states(
    outs: Sequence[Array], lses: Sequence[Array], *, out: Array | None = None, lse: Array | None = None
) -> tuple[Array, Array]:
    """Attention over parts of the keys, joined in the order given.

    Parameters
    ----------
    outs : sequence of array, [batch, seqlen_q, num_heads_q, head_dim_v] or [total_q, num_heads_q, head_dim_v]
    lses : sequence of array, [batch, num_heads_q, seqlen_q] or [num_heads_q, total_q], f32
    out, lse : array, optional
        Written; may be ``outs[0]`` and ``lses[0]``.

    Returns
    -------
    out, lse : array
        As of one call over all keys.

    Raises
    ------
    InvalidArgument
        The lists differ in length or are empty, or a shape or dtype is wrong.
    """
    if len(outs) != len(lses) or not len(outs):
        raise InvalidArgument(f"merge_states: {len(outs)} outs and {len(lses)} lses; expected as many of each, at least one")
    framework = framework_of(outs[0], "merge_states", "outs[0]")
    for name, array in (("out", out), ("lse", lse)):
        if array is not None:
            check_writable(array, name, "merge_states")
    if out is None:
        out = framework.empty(outs[0], tuple(outs[0].shape), None)
    if lse is None:
        lse = framework.empty(lses[0], tuple(lses[0].shape), None)
    _merge_template(len(outs), True).invoke((*outs, *lses, out, lse), (framework.stream(outs[0]),), _MERGE)
    return framework.finish(out), framework.finish(lse)


# ---- Planned ----


class DecodePlan(PreparedPlan):
    """Attention over a cache, validated, with its kernels and its exact workspace; made by `plan_decode`. Threads may share it.

    Attributes
    ----------
    workspace_bytes : int
        Bytes of workspace that a run takes.
    """

    _made_by = "plan_decode"

    def __init__(self, address: int, max_seqlen_kv: int, options: dict[str, Any], returns_lse: bool, is_on_host: bool) -> None:
        super().__init__("fovea_plan_create_decode", address, max_seqlen_kv, is_on_host=is_on_host)
        self._options = options
        self._returns_lse = returns_lse

    def run(
        self,
        q: Array,
        cache: KvCache,
        *,
        append_k: Array | None = None,
        append_v: Array | None = None,
        append_cu_seqlens: Array | None = None,
        cu_seqlens: Array | None = None,
        return_lse: bool | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        **changed: Any,
    ) -> Any:
        """Attention of tensors like those of the plan, over sequences of no more keys than it is for.

        Parameters
        ----------
        q, cache, append_k, append_v, append_cu_seqlens, cu_seqlens, return_lse, out, lse
            As `decode`'s: tokens are of this run alone.
        **changed
            What else is other than planned: ``rotary=``, ``score_mod=program.with_captures(...)``.

        Returns
        -------
        As `decode`.

        Raises
        ------
        InvalidArgument
            The call does not fit the plan; nothing was written.
        """
        options = {
            **self._options, **changed, "append_k": append_k, "append_v": append_v, "append_cu_seqlens": append_cu_seqlens,
            "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        wants_lse = self._returns_lse if return_lse is None else return_lse
        return _decode("DecodePlan.run", q, cache, out, lse, wants_lse, options, self)


def _capacity(cache: KvCache) -> int:
    """Keys that a sequence has room for."""
    rows = int(cache.k.shape[1])
    if cache.page_table is not None:
        return int(cache.page_table.shape[1]) * rows
    if cache.page_indices is not None:
        raise InvalidArgument("plan_decode: max_seqlen_kv is None and the cache has page_indices; expected a number")
    return rows


def plan_decode(
    q: Array,
    cache: KvCache,
    *,
    max_seqlen_kv: int | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    **options: Any,
) -> DecodePlan:
    """Validates a decode problem and chooses its kernels once; `DecodePlan.run` then decides nothing.

    Parameters
    ----------
    q : array or TensorSpec
        As `decode`'s; no tensor needs data here.
    cache : KvCache
        Of arrays or specs.
    max_seqlen_kv : int, optional
        Keys of the longest sequence, those of append_k among them; what the cache has room for unless given.
    return_lse : bool
        Whether runs return lse.
    out : array or TensorSpec, optional
        As runs will have it; row-major in the dtype of q unless given.
    **options
        As `decode`'s. append_k, append_v, append_cu_seqlens and cu_seqlens say that runs have such tensors, and of what kind; all
        else is kept for the runs.

    Returns
    -------
    DecodePlan

    Raises
    ------
    InvalidArgument, Unsupported, CompileError
        As `decode`; a GPU kernel is compiled here, if need be.
    """
    function = "plan_decode"
    _check_cache(cache, function)
    kept = kept_features(options)
    shape = shape_of(q, "q", function)
    if out is None:
        out = out_spec(q, cache.v, "cache.v", function)
    lse = spec_beside(q, "q", lse_shape(shape, "bshd"), "f32", function) if return_lse else None
    call = _decode_call(function, q, cache, out, lse, 0, **kept)
    bound = call.template(function).bind(call.tensors, (*call.words, 0, 0))
    limit = _capacity(cache) if max_seqlen_kv is None else max_seqlen_kv
    return DecodePlan(bound.address, limit, kept, return_lse, is_on_host(q))


class AppendPlan(PreparedPlan):
    """Writing to a cache, validated, with its kernel; made by `plan_append`. Threads may share it.

    Attributes
    ----------
    workspace_bytes : int
        0: a run takes none.
    """

    _made_by = "plan_append"

    def __init__(self, address: int, rotary: Rotary | None, is_on_host: bool) -> None:
        super().__init__("fovea_plan_create_append", address, is_on_host=is_on_host)
        self._rotary = rotary

    def run(
        self, cache: KvCache, k: Array, v: Array | None = None, rotary: Rotary | None = None, *, cu_seqlens: Array | None = None
    ) -> None:
        """Writes tokens like those of the plan behind `cache.seqlens`.

        Parameters
        ----------
        cache, k, v, rotary, cu_seqlens
            As `append_to_cache`'s; the plan's rotary unless one is given.

        Raises
        ------
        InvalidArgument
            The call does not fit the plan, or a sequence has no room; nothing was written.
        """
        function = "AppendPlan.run"
        framework = framework_of(k, function, "k")
        call = _append_call(function, cache, k, v, self._rotary if rotary is None else rotary, cu_seqlens, framework.stream(k))
        self._invoke(call.template(function), call.tensors, call.words, _PLAN_RUN_APPEND, framework, k)


def plan_append(
    cache: KvCache, k: Array, v: Array | None = None, rotary: Rotary | None = None, *, cu_seqlens: Array | None = None
) -> AppendPlan:
    """Validates the writing of new tokens and chooses its kernel once.

    Parameters
    ----------
    cache, k, v, rotary, cu_seqlens
        As `append_to_cache`'s, arrays or specs; rotary is kept for the runs.

    Returns
    -------
    AppendPlan

    Raises
    ------
    InvalidArgument, Unsupported, CompileError
        As `append_to_cache`; a GPU kernel is compiled here, if need be.
    """
    function = "plan_append"
    call = _append_call(function, cache, k, v, rotary, cu_seqlens, 0)
    bound = call.template(function).bind(call.tensors, (*call.words, 0, 0))
    return AppendPlan(bound.address, rotary, is_on_host(k))
