"""Unmodified models of transformers, with random weights, on Fovea by both of its doors."""

import pytest

import fovea

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import fovea.torch  # noqa: E402
from sdpa_test import has_place  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def make_bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def make_gemma2():
    config = transformers.Gemma2Config(**GROUPED, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    return transformers.Gemma2ForCausalLM(config)


def make_gpt_oss():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**GROUPED, **sizes))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)  # large enough to be seen
    return model


def make_t5():
    config = transformers.T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return transformers.T5EncoderModel(config)


# A model, what it is compared with, and whether it generates. Where transformers has no SDPA, its plain formula is it.
MODELS = {
    "llama": (make_llama, "sdpa", True),
    "bert": (make_bert, "sdpa", False),
    "gemma2": (make_gemma2, "eager", True),
    "gpt-oss": (make_gpt_oss, "eager", True),
    "t5": (make_t5, "eager", False),
}


def build(name):
    torch.manual_seed(0)
    make, reference, _ = MODELS[name]
    try:
        model = make().eval()
    except AttributeError:
        pytest.skip(f"this transformers has no {name}")
    for parameter in model.parameters():  # initial weights are too small for attention to matter
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.set_attn_implementation(reference)
    return model


def padded(side: str):
    """Two sequences, the second of 9 tokens fewer."""
    tokens = torch.randint(3, 97, (2, 23), generator=torch.Generator().manual_seed(1))
    visible = torch.ones_like(tokens)
    visible[1, slice(0, 9) if side == "left" else slice(14, None)] = 0
    return tokens * visible, visible


def run(model, padding):
    tokens, visible = (padded("left")[0], None) if padding is None else padded(padding)
    if padding is None:
        tokens = tokens.clamp(min=3)
    with torch.no_grad():
        answer = model(input_ids=tokens, attention_mask=visible)
    answer = answer.logits if hasattr(answer, "logits") else answer.last_hidden_state
    return answer if visible is None else answer[visible.bool()]  # what padding computes is nobody's


@pytest.fixture
def registered():
    fovea.torch.install_transformers()


def assert_equal_to(expected, got) -> None:
    assert expected.abs().max() > 0.1
    assert (got - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_by_the_registers(registered, name, padding) -> None:
    model = build(name)
    expected = run(model, padding)
    model.set_attn_implementation("fovea")
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        from fovea.torch import _transformers

        patch.setattr(_transformers, "attention", lambda *args, **kwargs: calls.append(kwargs) or fovea.attention(*args, **kwargs))
        assert_equal_to(expected, run(model, padding))
    assert len(calls) >= 2


@pytest.mark.parametrize("name", [name for name, (_, _, generates) in MODELS.items() if generates])
@pytest.mark.parametrize("padding", [None, "left"])
def test_generate_by_the_registers(registered, name, padding) -> None:
    model = build(name)
    tokens, visible = padded("left") if padding else (padded("left")[0].clamp(min=3), None)
    features = {"attention_mask": visible, "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(tokens, **features)
    model.set_attn_implementation("fovea")
    assert torch.equal(model.generate(tokens, **features), expected)
    static = model.generate(tokens, **features, cache_implementation="static", disable_compile=True)
    assert torch.equal(static[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_training_by_the_registers(registered, name) -> None:
    model = build(name).train()
    tokens, visible = padded("right")

    def gradients():
        model.zero_grad()
        model(input_ids=tokens, attention_mask=visible, labels=tokens).loss.backward()
        return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    expected = gradients()
    model.set_attn_implementation("fovea")
    got = gradients()
    for key, gradient in expected.items():
        assert (got[key] - gradient).abs().max() <= 1e-4 * max(gradient.abs().max(), 1e-3), key


@pytest.mark.skipif(not has_place, reason="this PyTorch has no place for other kernels")
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", [name for name, (_, reference, _) in MODELS.items() if reference == "sdpa"])
def test_outputs_by_pytorchs_own_function(name, padding, monkeypatch) -> None:
    from fovea.torch import _sdpa

    model = build(name)
    expected = run(model, padding)
    tokens, visible = padded("left")
    words = model.generate(tokens, attention_mask=visible, max_new_tokens=12, do_sample=False) if name == "llama" else None
    calls, forward = [], _sdpa._forward
    monkeypatch.setattr(_sdpa, "_forward", lambda *args, **kwargs: calls.append(args) or forward(*args, **kwargs))
    fovea.torch.install_sdpa()
    try:
        assert_equal_to(expected, run(model, padding))
        assert len(calls) == 3
        if words is not None:
            assert torch.equal(model.generate(tokens, attention_mask=visible, max_new_tokens=12, do_sample=False), words)
    finally:
        fovea.torch.uninstall_sdpa()


def test_padding_is_not_seen(registered) -> None:
    model = build("llama")
    model.set_attn_implementation("fovea")
    tokens, visible = padded("left")
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=visible).logits[1, 9:]
        tokens[1, :9] = 50
        got = model(input_ids=tokens, attention_mask=visible).logits[1, 9:]
    assert torch.equal(got, expected)
