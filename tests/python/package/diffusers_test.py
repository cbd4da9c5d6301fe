"""fovea.torch.install_diffusers by a stub of diffusers' registry: its names, its dispatch, and what calls give."""

import enum
import sys
import types

import pytest

from fovea.errors import InvalidArgument, Unsupported

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402
from flash_formula import draw  # noqa: E402


@pytest.fixture(autouse=True)
def route() -> str:
    """In place of conftest's: who runs the calls is tested elsewhere."""
    return "extension"


def native(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, _parallel_config=None):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if enable_gqa:  # which PyTorch knows from 2.5 on
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale).transpose(1, 2)


@pytest.fixture
def dispatch(monkeypatch):
    """diffusers.models.attention_dispatch as far as installing and calling know it."""
    module = types.ModuleType("diffusers.models.attention_dispatch")

    class AttentionBackendName(str, enum.Enum):
        NATIVE = "native"

    class _AttentionBackendRegistry:
        _backends, _constraints = {AttentionBackendName.NATIVE: native}, {}
        _active_backend = AttentionBackendName.NATIVE

        @classmethod
        def register(cls, backend, constraints=None, supports_context_parallel=False):
            def decorator(function):
                cls._backends[backend], cls._constraints[backend] = function, constraints or []
                return function

            return decorator

    def dispatch_attention_fn(query, key, value, *, backend=None, parallel_config=None, **features):
        name = _AttentionBackendRegistry._active_backend if backend is None else AttentionBackendName(backend)
        return _AttentionBackendRegistry._backends[name](query=query, key=key, value=value, _parallel_config=parallel_config, **features)

    module.AttentionBackendName, module._AttentionBackendRegistry = AttentionBackendName, _AttentionBackendRegistry
    module.dispatch_attention_fn = dispatch_attention_fn
    models = types.ModuleType("diffusers.models")
    models.attention_dispatch = module
    for name, part in {"diffusers": types.ModuleType("diffusers"), "diffusers.models": models, module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, part)
    return module


def tensors(seqlen_kv=11, heads_kv=4):
    return draw(2, 7, 4, 16), draw(2, seqlen_kv, heads_kv, 16, seed=1), draw(2, seqlen_kv, heads_kv, 16, seed=2)


BOOLS = draw(2, 1, 7, 11, seed=3) > -1
FEATURES = {
    "plain": {}, "scale": {"scale": 0.3}, "causal": {"is_causal": True}, "bools": {"attn_mask": BOOLS}, "one": {"attn_mask": BOOLS[0, 0]},
    "floats": {"attn_mask": draw(2, 4, 7, 11, seed=4)}, "padding": {"attn_mask": BOOLS[:, :, :1]}, "grouped": {"enable_gqa": True},
}  # fmt: skip


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_calls_give_what_native_ones_do(dispatch, features) -> None:
    fovea.torch.install_diffusers()
    inputs = [x.requires_grad_() for x in tensors(heads_kv=2 if "enable_gqa" in features else 4)]
    results = []
    for backend in ("native", "fovea"):
        out = dispatch.dispatch_attention_fn(*inputs, backend=backend, **features)
        results.append((out, *torch.autograd.grad((out * draw(*out.shape, seed=5)).sum(), inputs)))
    assert all(torch.allclose(ours, theirs, atol=5e-6) for theirs, ours in zip(*results))


def test_a_mask_of_rank_3_is_one_for_each_sequence(dispatch) -> None:
    fovea.torch.install_diffusers()
    out, expected = (dispatch.dispatch_attention_fn(*tensors(), backend="fovea", attn_mask=mask) for mask in (BOOLS[:, 0], BOOLS))
    assert torch.equal(out, expected)


def test_the_name_is_one_of_the_enumeration(dispatch) -> None:
    names = dispatch.AttentionBackendName
    for _ in range(2):  # once more changes nothing
        fovea.torch.install_diffusers()
        assert [member.value for member in names] == ["native", "fovea"] and list(names.__members__) == ["NATIVE", "FOVEA"]
    assert dispatch._AttentionBackendRegistry._backends[names.FOVEA].__module__ == "fovea.torch._diffusers"
    assert names("fovea") is names.FOVEA and names.FOVEA == "fovea" and names["FOVEA"].name == "FOVEA"
    assert dispatch._AttentionBackendRegistry._active_backend is names.NATIVE
    fovea.torch.install_diffusers(is_default=True)
    assert dispatch._AttentionBackendRegistry._active_backend is names.FOVEA
    assert torch.equal(dispatch.dispatch_attention_fn(*tensors()), dispatch.dispatch_attention_fn(*tensors(), backend="fovea"))


def test_what_cannot_be_is_refused(dispatch, monkeypatch) -> None:
    fovea.torch.install_diffusers()
    with pytest.raises(Unsupported, match="a parallel configuration; expected none"):
        dispatch.dispatch_attention_fn(*tensors(), backend="fovea", parallel_config=object())
    with pytest.raises(InvalidArgument, match="attn_mask beside is_causal"):
        dispatch.dispatch_attention_fn(*tensors(), backend="fovea", attn_mask=BOOLS, is_causal=True)
    del dispatch._AttentionBackendRegistry
    with pytest.raises(Unsupported, match="_AttentionBackendRegistry.*; expected diffusers 0.35 to 0.42"):
        fovea.torch.install_diffusers()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "diffusers.models")
    with pytest.raises(Unsupported, match="diffusers.*; expected diffusers 0.35 to 0.42"):
        fovea.torch.install_diffusers()
