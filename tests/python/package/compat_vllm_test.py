"""vLLM's attention backend by a stub of vLLM's interface: batches of chunks and single tokens are what each request is alone."""

import abc
import dataclasses
import enum
import importlib
import importlib.metadata
import random
import sys
import types
from typing import Any

import pytest

import fovea
from fovea.errors import Unsupported

torch = pytest.importorskip("torch")
import flash_formula as formula  # noqa: E402
from compat_flash_attn_test import route  # noqa: E402, F401
from conftest import PACKAGE_SOURCES  # noqa: E402
from fovea.compat import vllm as ours  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
PATH = "fovea.compat.vllm.backend"

# ---- vLLM's interface ----


class AttentionType(str, enum.Enum):
    DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder", "encoder_only", "encoder_decoder"


class MultipleOf:
    def __init__(self, base):
        self.base = base


class AttentionBackend(abc.ABC):
    supported_dtypes = [torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update = True

    @staticmethod
    @abc.abstractmethod
    def get_name(): ...

    @staticmethod
    @abc.abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abc.abstractmethod
    def get_builder_cls(): ...

    @staticmethod
    @abc.abstractmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER


class AttentionMetadata: ...


class AttentionMetadataBuilder(abc.ABC):
    supports_update_block_table = False

    @abc.abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    @abc.abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl(abc.ABC):
    @abc.abstractmethod
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
                 logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None): ...  # fmt: skip

    @abc.abstractmethod
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None): ...


class Registry:
    """vllm.v1.attention.backends.registry."""

    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN, CUSTOM = "flash_attn.FlashAttentionBackend", None

        def is_overridden(self):
            return self in overrides

        def get_path(self):
            return overrides.get(self, self.value)

    @staticmethod
    def register_backend(backend, class_path=None, is_mamba=False):
        overrides[backend] = class_path


overrides: dict[Any, str] = {}


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    seq_lens: Any
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: Any
    slot_mapping: Any = None
    causal: Any = True


@pytest.fixture
def vllm(monkeypatch):
    """vLLM as far as plugins know it; gives our module of classes."""
    backend = types.ModuleType("vllm.v1.attention.backend")
    for part in (AttentionType, MultipleOf, AttentionBackend, AttentionMetadata, AttentionMetadataBuilder, AttentionImpl):
        setattr(backend, part.__name__, part)
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum, registry.register_backend = Registry.AttentionBackendEnum, Registry.register_backend
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.v1.attention"].backend = backend
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    overrides.clear()
    yield importlib.import_module(PATH)
    sys.modules.pop(PATH)


# ---- An engine ----


class Request:
    """Tokens of a prompt and of what follows it, all known from the start: rows of q, k and v."""

    def __init__(self, prompt: int, generated: int, seed: int) -> None:
        self.prompt, self.length, self.done = prompt, prompt + generated, 0
        self.q, self.k, self.v = (formula.draw(self.length, heads, DIM, seed=3 * seed + i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
        self.pages: list[int] = []
        self.chunks: list[int] = []
        self.out = torch.full((self.length, HEADS, DIM), torch.nan)

    def take(self, budget: int, free: list[int]) -> slice:
        """The next chunk of the prompt, or the next token, with pages to write it to."""
        count = min(budget, self.prompt - self.done) if self.done < self.prompt else 1
        self.chunks.append(count)
        rows = slice(self.done, self.done + count)
        self.done += count
        while len(self.pages) * PAGE < self.done:
            self.pages.append(free.pop())
        return rows


def step(vllm, impl, cache, batch, dtype=torch.float32, padding=2, **more):
    """One call for (request, rows) of a batch, with rows of padding behind them; results go to the requests."""
    counts = [rows.stop - rows.start for _, rows in batch]
    table = torch.full((len(batch), max(len(request.pages) for request, _ in batch)), -1, dtype=torch.int32)
    for i, (request, _) in enumerate(batch):
        table[i, : len(request.pages)] = torch.tensor(request.pages)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([rows.stop for _, rows in batch], dtype=torch.int32)
    described = CommonAttentionMetadata(starts, lengths, sum(counts), max(counts), table, **more)
    metadata = vllm.FoveaMetadataBuilder(None, ["layer"], None, torch.device("cpu")).build(0, described)
    tensors = [torch.cat([getattr(request, name)[rows] for request, rows in batch]).to(dtype) for name in "qkv"]
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=torch.nan) for x in tensors)
    output = torch.full_like(q, 7.0)
    assert impl.forward(None, q, k, v, cache, metadata, output) is output
    assert (output[sum(counts) :] == 7.0).all()
    for (request, rows), part in zip(batch, output[: sum(counts)].split(counts)):
        request.out[rows] = part.float()


def empty_cache(vllm, num_pages: int, dtype=torch.float32):
    shape = vllm.FoveaAttentionBackend.get_kv_cache_shape(num_pages, PAGE, KV_HEADS, DIM)
    return torch.full(shape, torch.nan, dtype=dtype)


def layer(vllm, **features):
    return vllm.FoveaAttentionBackend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, **features)


def served(vllm, impl, num_requests: int, budget: int, max_running: int, dtype=torch.float32):
    """Requests come, their prompts are cut into what a step has room for, they generate, and leave their pages to others."""
    draw = random.Random(0)
    waiting = [Request(draw.randint(1, 40), draw.randint(0, 12), seed) for seed in range(num_requests)]
    free, running, finished = list(range(max_running * 13)), [], []
    draw.shuffle(free)
    cache, kinds = empty_cache(vllm, len(free), dtype), set()
    while waiting or running:
        while waiting and len(running) < max_running:
            running.append(waiting.pop(0))
        batch, left = [], budget
        for request in running:
            if left:
                rows = request.take(left, free)
                batch.append((request, rows))
                left -= rows.stop - rows.start
        kinds.add((any(r.done > r.prompt for r, _ in batch), any(rows.stop - rows.start > 1 for _, rows in batch)))
        step(vllm, impl, cache, batch, dtype)
        for request in [request for request in running if request.done == request.length]:
            running.remove(request)
            finished.append(request)
            free += request.pages
            draw.shuffle(free)
    assert (True, True) in kinds  # chunks and tokens in one call
    return finished


def alone(vllm, impl, request: Request, dtype=torch.float32):
    """The same chunks of the request by itself."""
    again = Request.__new__(Request)
    again.__dict__ |= {**request.__dict__, "done": 0, "pages": [], "chunks": [], "out": torch.full_like(request.out, torch.nan)}
    free = list(range(-(-request.length // PAGE)))
    cache = empty_cache(vllm, len(free), dtype)
    for count in request.chunks:
        step(vllm, impl, cache, [(again, again.take(count, free))], dtype, padding=0)
    return again.out


SLOPES = [0.5, 0.25, 0.1, 0.0]
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
FEATURES = {
    "plain": ({}, {}), "window": ({"sliding_window": 5}, {"window": (4, 0)}),
    "alibi_softcap": ({"alibi_slopes": SLOPES, "logits_soft_cap": 3.0}, {"alibi": torch.tensor(SLOPES), "softcap": 3.0}), "sinks": ({"sinks": SINKS}, {}),
}  # fmt: skip


def expected(request: Request, dtype, has_sinks=False, **features):
    out, lse = formula.attention(*(x[None].to(dtype) for x in (request.q, request.k, request.v)), causal=True, **features)
    if has_sinks:
        out = out * torch.sigmoid(lse - SINKS.to(dtype)[:, None]).transpose(1, 2)[..., None]
    return [out[0]]


@pytest.mark.parametrize("name", FEATURES)
def test_each_request_is_the_formulas(vllm, name) -> None:
    options, features = FEATURES[name]
    for request in served(vllm, layer(vllm, **options), 12, budget=24, max_running=5):
        formula.assert_close([request.out], lambda dtype, r=request: expected(r, dtype, name == "sinks", **features))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_64_requests_are_bit_for_bit_what_each_is_alone(vllm, dtype) -> None:
    impl = layer(vllm)
    finished = served(vllm, impl, 64, budget=64, max_running=20, dtype=dtype)
    assert len(finished) == 64 and max(len(request.chunks) for request in finished) > 3
    for request in finished:
        assert torch.equal(request.out, alone(vllm, impl, request, dtype))


def prefilled(vllm, **features):
    """Two requests after a step of their prompts, and the cache."""
    requests, free, cache = [Request(7, 3, 1), Request(4, 3, 2)], list(range(8)), empty_cache(vllm, 8)
    step(vllm, layer(vllm, **features), cache, [(request, request.take(9, free)) for request in requests])
    return requests, free, cache


def test_layers_that_share_keys_write_none(vllm) -> None:
    requests, _, cache = prefilled(vllm)
    expected_outs, before = [request.out.clone() for request in requests], cache.clone()
    sharing = layer(vllm, kv_sharing_target_layer_name="layer")
    for request in requests:
        request.k, request.v = request.k * torch.nan, request.v * torch.nan
    step(vllm, sharing, cache, [(request, slice(0, request.prompt)) for request in requests])
    assert torch.equal(cache.nan_to_num(5.0), before.nan_to_num(5.0))
    assert all(torch.equal(request.out[: request.prompt], out[: request.prompt]) for request, out in zip(requests, expected_outs))


def test_steps_without_a_mask_see_all_keys(vllm) -> None:
    requests, free, cache = [Request(7, 0, 1), Request(4, 0, 2)], list(range(8)), empty_cache(vllm, 8)
    step(vllm, layer(vllm), cache, [(request, request.take(9, free)) for request in requests], causal=False)
    for request in requests:
        formula.assert_close([request.out], lambda dtype, r=request: [formula.attention(*(x[None].to(dtype) for x in (r.q, r.k, r.v)))[0][0]])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_encoders_have_no_cache(vllm, kind, window) -> None:
    requests = [Request(7, 0, 1), Request(4, 0, 2)]
    impl = layer(vllm, attn_type=kind, sliding_window=window)
    step(vllm, impl, torch.empty(0), [(request, request.take(9, list(range(4)))) for request in requests])
    features = {} if window is None else {"window": (window - 1, window - 1)}
    for request in requests:
        formula.assert_close(
            [request.out], lambda dtype, r=request: [formula.attention(*(x[None].to(dtype) for x in (r.q, r.k, r.v)), **features)[0][0]]
        )


def test_another_table_is_another_cache(vllm) -> None:
    requests, _, cache = prefilled(vllm)
    builder = vllm.FoveaMetadataBuilder(None, [], None, torch.device("cpu"))
    described = CommonAttentionMetadata(torch.tensor([0, 1]), torch.tensor([7]), 1, 1, torch.tensor([[5, 6]], dtype=torch.int32))
    other = builder.update_block_table(builder.build(0, described), torch.tensor([requests[0].pages], dtype=torch.int32), None)
    assert builder.supports_update_block_table and torch.equal(other.num_computed_tokens, torch.tensor([6]))
    output = torch.empty(1, HEADS, DIM)
    layer(vllm).forward(None, *(x[6:7] for x in (requests[0].q, requests[0].k, requests[0].v)), cache, other, output)
    assert torch.allclose(output, requests[0].out[6:7], atol=1e-6)


def test_memory_is_measured_without_a_step(vllm) -> None:
    output = torch.full((3, HEADS, DIM), torch.nan)
    assert not layer(vllm).forward(None, output, output, output, None, None, output).any()


# ---- What vLLM asks before ----


def test_what_the_backend_says_of_itself(vllm) -> None:
    backend = vllm.FoveaAttentionBackend
    assert backend.get_name() in Registry.AttentionBackendEnum.__members__ and backend.forward_includes_kv_cache_update
    assert backend.get_kv_cache_shape(9, 16, 2, 64) == (9, 2, 16, 2, 64) and [size.base for size in backend.get_supported_kernel_block_sizes()] == [1]
    assert backend.supports_head_size(576) and not backend.supports_head_size(577)
    assert backend.supports_sink() and backend.supports_non_causal() and torch.float32 in backend.supported_dtypes
    assert [backend.supports_attn_type(kind) for kind in AttentionType] == [True, True, True, False]
    assert issubclass(vllm.FoveaAttentionMetadata, AttentionMetadata) and backend.get_builder_cls() is vllm.FoveaMetadataBuilder


REFUSED = {
    "kind": ({"attn_type": "encoder_decoder"}, "attn_type is encoder_decoder; expected decoder"),
    "float8": ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is fp8_e4m3; expected auto"),
}


@pytest.mark.parametrize("features, message", REFUSED.values(), ids=REFUSED)
def test_layers_that_are_refused(vllm, features, message) -> None:
    with pytest.raises(Unsupported, match=message):
        layer(vllm, **features)


def test_steps_that_are_refused(vllm) -> None:
    output = torch.empty(1, HEADS, DIM)
    with pytest.raises(Unsupported, match="output_scale; expected none"):
        layer(vllm).forward(None, output, output, output, None, None, output, output_scale=torch.ones(1))
    with pytest.raises(Unsupported, match="causal is a tensor, one for each request"):
        prefilled_step = Request(3, 0, 1)
        step(vllm, layer(vllm), empty_cache(vllm, 2), [(prefilled_step, prefilled_step.take(3, [0]))], causal=torch.tensor([True]))


# ---- Registration ----


def test_the_plugin_takes_the_name_for_others(vllm) -> None:
    custom = Registry.AttentionBackendEnum.CUSTOM
    ours.plugin()
    assert overrides == {custom: f"{PATH}.FoveaAttentionBackend"}
    ours.register()  # once more changes nothing
    module, _, name = overrides[custom].rpartition(".")
    assert getattr(importlib.import_module(module), name) is vllm.FoveaAttentionBackend


def test_another_packages_backend_stays(vllm) -> None:
    custom = Registry.AttentionBackendEnum.CUSTOM
    overrides[custom] = "theirs.Backend"
    with pytest.raises(Unsupported, match="CUSTOM is theirs.Backend already"):
        ours.register()
    ours.plugin()
    assert overrides == {custom: "theirs.Backend"}


def test_without_vllm_nothing_happens(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Unsupported, match="expected vLLM with"):
        ours.register()
    ours.plugin()


def test_the_wheel_has_the_entry_point() -> None:
    text = (PACKAGE_SOURCES.parents[1] / "pyproject.toml").read_text()
    group, _, rest = text.partition('[project.entry-points."vllm.general_plugins"]\n')
    assert rest.startswith('fovea = "fovea.compat.vllm:plugin"\n') and group
    assert callable(fovea.compat.vllm.plugin)
