"""flash_attn's models on Fovea: weights of transformers' by name, equal outputs, and steps over caches."""

import pytest

import fovea
from fovea.errors import Unsupported

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from compat_flash_attn_test import route  # noqa: E402, F401
from fovea.compat.flash_attn.models import bert, gpt, llama  # noqa: E402
from fovea.compat.flash_attn.utils.generation import InferenceParams  # noqa: E402
from transformers_test import assert_equal_to  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
VOCAB = 91
TOKENS = torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": VOCAB, "attn_implementation": "eager"}
MORE = {"pad_vocab_size_multiple": 8}


def gpt2_config(**more):
    sizes = {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2Config(**{**SIZES, **sizes, **more})


def llama_config(**more):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(**SIZES, **sizes, max_position_embeddings=64, rms_norm_eps=1e-5, **more)


def bert_config(**more):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    return transformers.BertConfig(**SIZES, **sizes, **more)


def made(cls, config):
    """With weights so large, and norms and biases so uneven, that each of them does something."""
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(*((1.0, 0.3) if parameter.dim() == 1 else (0.0, 0.15)))
    return model


def ours(cls, config, weights, **more):
    for name, value in more.items():
        setattr(config, name, value)
    model = cls(config).eval()
    model.load_state_dict(weights(config))  # strict: every name
    return model


@pytest.mark.parametrize("use_flash_attn", [False, True])
@pytest.mark.parametrize("scaling", [{}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}], ids=str)
def test_gpt2(use_flash_attn, scaling) -> None:
    config = gpt2_config(**scaling)
    model = made(transformers.GPT2LMHeadModel, config)
    mine = ours(gpt.GPTLMHeadModel, config, lambda c: gpt.remap_state_dict_hf_gpt2(model.state_dict(), c), use_flash_attn=use_flash_attn, **MORE)
    assert mine.lm_head.weight.shape == (96, 64) and mine.lm_head.weight is mine.transformer.embeddings.word_embeddings.weight
    with torch.no_grad():
        logits = mine(TOKENS).logits
        assert_equal_to(model(TOKENS).logits, logits[..., :VOCAB])
        assert_equal_to(logits[:, -3:], mine(TOKENS, num_last_tokens=3).logits)


def llamas(**more):
    config = llama_config(**more)
    model = made(transformers.LlamaForCausalLM, config)
    own = llama.llama_config_to_gpt2_config(config)
    return model, ours(gpt.GPTLMHeadModel, own, lambda c: llama.remap_state_dict_hf_llama(model.state_dict(), c), use_flash_attn=True, **MORE)


def test_llama_and_its_weights_back() -> None:
    model, mine = llamas(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    with torch.no_grad():
        assert_equal_to(model(TOKENS).logits, mine(TOKENS).logits[..., :VOCAB])
    back = llama.inv_remap_state_dict_hf_llama(mine.state_dict(), mine.config)
    expected = model.state_dict()
    assert back.keys() == expected.keys() and all(torch.equal(back[name], weight) for name, weight in expected.items())


def test_gradients_of_llama() -> None:
    model, mine = llamas()
    for logits in (model(TOKENS).logits, mine(TOKENS).logits[..., :VOCAB]):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    expected = llama.remap_state_dict_hf_llama({name: weight.grad for name, weight in model.named_parameters()}, mine.config)
    for name, weight in mine.named_parameters():
        assert (weight.grad - expected[name]).abs().max() <= 1e-4 * expected[name].abs().max(), name


@pytest.mark.parametrize("use_flash_attn", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_bert(use_flash_attn, has_padding) -> None:
    config = bert_config()
    model = made(transformers.BertForPreTraining, config)
    mine = ours(bert.BertForPreTraining, config, lambda c: bert.remap_state_dict(model.state_dict(), c), use_flash_attn=use_flash_attn, **MORE)
    visible = torch.arange(13) < torch.tensor([[9], [13]]) if has_padding else None
    types = (torch.arange(13) > 5).int().repeat(2, 1)
    with torch.no_grad():
        got, expected = (m(TOKENS, attention_mask=visible, token_type_ids=types) for m in (mine, model))
        rows = slice(None) if visible is None else visible
        assert_equal_to(expected.prediction_logits[rows], got.prediction_logits[rows][..., :VOCAB])
        assert_equal_to(expected.seq_relationship_logits, got.seq_relationship_logits)
        assert (got.prediction_logits[..., VOCAB:] == -100).all() and got.loss is None
        labels, following = TOKENS.where(TOKENS % 3 == 0, 0), torch.tensor([1, 0])
        mine_loss = mine(TOKENS, labels=labels, next_sentence_label=following).loss
        assert_equal_to(model(TOKENS, labels=labels.where(labels > 0, -100), next_sentence_label=following).loss, mine_loss)


def test_bert_with_angles_hides_padding() -> None:
    config = bert_config(position_embedding_type="rotary", use_flash_attn=True)
    model = made(lambda c: bert.BertModel(c, add_pooling_layer=False), config)
    config.use_flash_attn = False
    plain = bert.BertModel(config, add_pooling_layer=False).eval()
    plain.load_state_dict(model.state_dict())
    assert "embeddings.position_embeddings.weight" not in model.state_dict() and model(TOKENS).pooler_output is None
    visible = torch.arange(13) < torch.tensor([[9], [13]])
    got = model(TOKENS, attention_mask=visible).last_hidden_state
    assert torch.equal(got, plain(TOKENS, attention_mask=visible).last_hidden_state)
    assert_equal_to(model(TOKENS[:1, :9]).last_hidden_state, got[:1, :9])


KINDS = {
    "gpt2": {}, "alibi": {"use_alibi": True, "n_positions": 0}, "window": {"window_size": (4, 0)}, "norms_behind": {"prenorm": False},
    "parallel": {"parallel_block": True, "rotary_emb_fraction": 0.5, "n_positions": 0}, "tied": {"parallel_block": True, "parallel_block_tied_norm": True},
    "grouped": {"n_head_kv": 1, "rms_norm": True, "activation_function": "geglu", "rotary_emb_fraction": 1.0}, "head": {"norm_head": True, "lm_head_bias": True},
    "narrow": {"word_embed_proj_dim": 32}, "mup": {"mup_scale_qk_dot_by_d": True, "mup_output_multiplier": 0.5, "mup_embeddings_multiplier": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_steps_over_caches_are_one_pass(kind) -> None:
    options, has_lengths = KINDS[kind], kind in ("gpt2", "parallel")  # positions of each sequence, learned and turned
    model = made(gpt.GPTLMHeadModel, gpt2_config(use_flash_attn=True, **options))
    lengths = torch.zeros(2, dtype=torch.int32) if has_lengths else None
    state = InferenceParams(16, 2, lengths_per_sample=lengths, key_value_memory_dict=model.allocate_inference_cache(2, 16))
    outs = []
    with torch.no_grad():
        expected = model(TOKENS).logits
        for part in TOKENS.split([7, 1, 1, 4], 1):
            outs.append(model(part, inference_params=state).logits)
            state.seqlen_offset += part.shape[1]
            if has_lengths:
                state.seqlen_offset = -1  # is not asked
                lengths += part.shape[1]
    assert_equal_to(expected, torch.cat(outs, 1))


MUP = {"mup_output_multiplier": 0.5, "mup_width_scale": 0.5}


@pytest.mark.parametrize("kind", ["scaled", "normalized", "residual"])
def test_what_configurations_say(kind) -> None:
    """Where a model with an option differs from one without it, and how."""
    plain = made(gpt.GPTLMHeadModel, gpt2_config(tie_word_embeddings=False))
    more = {"scaled": MUP, "normalized": {"norm_head": True}, "residual": {"residual_in_fp32": True}}[kind]
    model = gpt.GPTLMHeadModel(gpt2_config(tie_word_embeddings=False, **more)).eval()
    if kind == "residual":
        model, plain = model.bfloat16(), plain.bfloat16()
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        expected, got = plain(TOKENS).logits, model(TOKENS).logits
        if kind == "scaled":
            assert_equal_to(expected / 4, got)
        elif kind == "normalized":
            assert_equal_to(expected / plain.lm_head.weight.norm(dim=1), got)
        else:
            exact = plain.float()(TOKENS).logits
            assert (got - exact).abs().mean() < (expected - exact).abs().mean()


# ---- Errors ----

REFUSED = {
    "group": (lambda: gpt.GPTModel(gpt2_config(), process_group=1), "GPTModel: process_group; expected None"),
    "activation": (lambda: gpt.GPTModel(gpt2_config(activation_function="mish")), "activation_function is 'mish'; expected one of gelu, relu"),
    "angles": (lambda: llama.llama_config_to_gpt2_config(llama_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})),
               "rope_type is 'linear'; expected 'default'"),
    "dense": (lambda: bert.BertModel(bert_config(dense_seq_output=True)), "dense_seq_output is set; expected False"),
    "subset": (lambda: bert.BertModel(bert_config(last_layer_subset=True)), "last_layer_subset is set; expected False"),
    "masked": (lambda: bert.BertModel(bert_config())(TOKENS, masked_tokens_mask=TOKENS > 0), "masked_tokens_mask; expected None"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_here_is_refused(call, message) -> None:
    with pytest.raises((fovea.InvalidArgument, Unsupported), match=message):
        call()
