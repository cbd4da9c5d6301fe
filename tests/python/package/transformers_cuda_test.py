"""Models of transformers on a GPU by attn_implementation="flash_attention_2", unmodified, on the drop-in: as near to f64 as its own attention in bf16.

transformers looks for flash_attn once, so the drop-in comes first: this file wants a process of its own.
"""

import sys

import pytest

import fovea.compat

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if "transformers" in sys.modules:
    pytest.skip("transformers is imported already: run this file by itself", allow_module_level=True)
fovea.compat.install("flash_attn")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
SIZES = {
    "vocab_size": 997, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# A configuration of each kind of attention, and what transformers itself computes it by in 16 bits.
MODELS = {
    "llama": (transformers.LlamaConfig, {}, "sdpa"),
    "mistral": (transformers.MistralConfig, {"sliding_window": 129}, "sdpa"),
    "gemma2": (transformers.Gemma2Config, {"sliding_window": 129, "attn_logit_softcapping": 5.0}, "eager"),
    "qwen2": (transformers.Qwen2Config, {"head_dim": 64, "hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1}, "sdpa"),
}
LENGTHS = (611, 257, 64, 1)


@pytest.fixture(autouse=True)
def route():
    """In place of conftest's: who runs the calls is tested elsewhere."""
    return "extension"


@pytest.fixture(autouse=True)
def softmax_of_f64(monkeypatch):
    """transformers' plain attention takes its softmax in f32 and so would the reference, whose mask is -inf there."""
    softmax = torch.nn.functional.softmax

    def in_its_own_dtype(scores, dim, dtype=None):
        return softmax(scores, dim=dim, dtype=None if scores.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", in_its_own_dtype)


def build(name, implementation, dtype):
    kind, features, _ = MODELS[name]
    torch.manual_seed(0)
    config = kind(**{**SIZES, **features}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16).to(dtype)
    model.set_attn_implementation(implementation)
    return model


def sequences():
    torch.manual_seed(1)
    return [torch.randint(3, SIZES["vocab_size"], (length,), device="cuda") for length in LENGTHS]


def padded():
    """Tokens and visibility of all sequences, padded in front."""
    tokens = torch.zeros(len(LENGTHS), max(LENGTHS), device="cuda", dtype=torch.long)
    for row, sequence in zip(tokens, sequences(), strict=True):
        row[len(row) - len(sequence) :] = sequence
    return tokens, (tokens != 0).long()


def logits_of(model, packed):
    """[sum(LENGTHS), vocabulary], one sequence behind the other."""
    with torch.no_grad():
        if not packed:
            tokens, visible = padded()
            positions = (visible.cumsum(-1) - 1).clamp(min=0)
            return model(input_ids=tokens, attention_mask=visible, position_ids=positions).logits[visible.bool()].double()
        if model.config._attn_implementation != "flash_attention_2":
            return torch.cat([model(input_ids=sequence[None]).logits[0] for sequence in sequences()]).double()
        positions = torch.cat([torch.arange(length, device="cuda") for length in LENGTHS])
        return model(input_ids=torch.cat(sequences())[None], position_ids=positions[None], use_cache=False).logits[0].double()


def distance(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, packed) -> None:
    expected = logits_of(build(name, "eager", torch.float64), packed)
    theirs = distance(logits_of(build(name, MODELS[name][2], torch.bfloat16), packed), expected)
    ours = distance(logits_of(build(name, "flash_attention_2", torch.bfloat16), packed), expected)
    print(f"{name} packed={packed}: ours {ours:.5f}, {MODELS[name][2]} {theirs:.5f}")
    assert ours <= 1.2 * theirs


@pytest.mark.parametrize("name", MODELS)
def test_training_step(name) -> None:
    def step(implementation, dtype):
        model = build(name, implementation, dtype).train()
        tokens, visible = padded()
        # A sequence's first token is predicted by padding in front of it, whose rows are no two implementations' the same.
        labels = tokens.where(visible.cumsum(-1) > 1, -100)
        loss = model(input_ids=tokens, attention_mask=visible, labels=labels).loss
        loss.backward()
        return loss.double().item(), {key: parameter.grad.double() for key, parameter in model.named_parameters()}

    expected_loss, expected = step("eager", torch.float64)
    their_loss, theirs = step(MODELS[name][2], torch.bfloat16)
    our_loss, ours = step("flash_attention_2", torch.bfloat16)
    assert abs(our_loss - expected_loss) <= max(1.5 * abs(their_loss - expected_loss), 2e-3 * abs(expected_loss))
    whole = [torch.cat([part[key].flatten() for key in expected]) for part in (expected, theirs, ours)]
    their_error, our_error = distance(whole[1], whole[0]), distance(whole[2], whole[0])
    print(f"{name}: gradients ours {our_error:.5f}, {MODELS[name][2]} {their_error:.5f}; norms {whole[2].norm():.5f} of {whole[0].norm():.5f}")
    assert our_error <= 1.2 * their_error
    assert abs(whole[2].norm() / whole[0].norm() - 1) <= 1e-2
