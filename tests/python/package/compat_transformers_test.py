"""Models of transformers by its own flash_attention_2 and 3, on the drop-ins: what a GPU does there, without one.

transformers takes these words on GPUs alone; here the models are told so past its checks.
"""

import pytest

import fovea.compat

torch = pytest.importorskip("torch")
flash_utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
transformers = pytest.importorskip("transformers")
from transformers_test import GROUPED, assert_equal_to, build, padded, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
WORDS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_3"}


@pytest.fixture(autouse=True)
def route():
    """In place of conftest's: who runs the calls is tested elsewhere."""
    return "extension"


@pytest.fixture(params=WORDS)
def word(request, monkeypatch):
    """transformers' word for a drop-in, which it has loaded."""
    if not hasattr(flash_utils, "_loaded_implementation"):
        pytest.skip("this transformers loads flash_attn in another way")
    name = WORDS[request.param]
    fovea.compat.install(name)
    for loaded in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn"):
        monkeypatch.setattr(flash_utils, loaded, None)
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda *_, **__: request.param == "flash_attention_2")
    flash_utils.lazy_import_flash_attention(request.param)
    assert flash_utils._flash_fn.__module__.startswith(f"fovea.compat.{name}")
    yield request.param
    fovea.compat.uninstall(name)


def on(model, word):
    model.config._attn_implementation_internal = word
    return model


@pytest.fixture
def calls(word, monkeypatch):
    """Names of the functions that models call."""
    names = []
    for name in ("_flash_fn", "_flash_varlen_fn"):
        function = getattr(flash_utils, name)
        monkeypatch.setattr(flash_utils, name, lambda *args, f=function, n=name, **kwargs: names.append(n) or f(*args, **kwargs))
    return names


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["llama", "bert", "gemma2"])
def test_outputs(word, calls, name, padding) -> None:
    model = build(name)
    assert_equal_to(run(model, padding), run(on(model, word), padding))
    assert set(calls) == {"_flash_varlen_fn" if padding else "_flash_fn"} and len(calls) >= 2


def test_windows(word, calls) -> None:
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=5)).eval()
    model.set_attn_implementation("eager")
    assert_equal_to(run(model, "left"), run(on(model, word), "left"))


def test_packed_sequences_without_padding(word, calls) -> None:
    model = on(build("llama"), word)
    tokens, _ = padded("left")
    tokens = tokens[:1].clamp(min=3)
    with torch.no_grad():
        alone = [model(input_ids=part).logits for part in (tokens[:, :9], tokens[:, 9:])]
        positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
        together = model(input_ids=tokens, position_ids=positions).logits
    assert calls[-1] == "_flash_varlen_fn"
    assert_equal_to(torch.cat(alone, 1), together)


def test_generate(word) -> None:
    model = build("llama")
    tokens, visible = padded("left")
    features = {"attention_mask": visible, "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(tokens, **features)
    assert torch.equal(on(model, word).generate(tokens, **features), expected)


def test_training(word) -> None:
    model = build("llama").train()
    tokens, visible = padded("right")

    def gradients():
        model.zero_grad()
        model(input_ids=tokens, attention_mask=visible, labels=tokens.where(visible.bool(), -100)).loss.backward()
        return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    expected = gradients()
    on(model, word)
    for key, gradient in gradients().items():
        assert (gradient - expected[key]).abs().max() <= 1e-4 * max(expected[key].abs().max(), 1e-3), key
