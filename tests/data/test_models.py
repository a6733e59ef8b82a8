"""Loading models, cutting drafters from them, and refusing what does not fit."""

import json
import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from draftkv import models
from draftkv.errors import InputError
from draftkv.recipe import Drafter, Model

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **LINEAR),
    "gemma3": Gemma3TextConfig(**SIZES, **SLIDING),
    "gpt_oss": GptOssConfig(**SIZES, **SLIDING, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.fixture(params=ARCHITECTURES)
def target(request, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[request.param]).eval()
    model.save_pretrained(tmp_path / request.param)
    return model, str(tmp_path / request.param)


def test_a_drafter_of_all_layers_is_its_target(target):
    model, folder = target
    drafter = models.make_drafter(folder)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(drafter(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    assert next(drafter.parameters()).dtype == torch.float32


def test_a_cut_drafter_is_a_whole_model(target, tmp_path):
    model, folder = target
    drafter = models.make_drafter(folder, layers=[1, 2]).eval()
    text = drafter.config.get_text_config()
    assert text.num_hidden_layers == 2
    if getattr(model.config, "layer_types", None):
        assert text.layer_types == model.config.layer_types[1:3]
    ours, theirs = models.decoder_layers(drafter), models.decoder_layers(model)
    for new, old in enumerate((1, 2)):
        for (name, a), (_, b) in zip(ours[new].named_parameters(), theirs[old].named_parameters(), strict=True):
            assert torch.equal(a, b), name
        assert {m.layer_idx for m in ours[new].modules() if hasattr(m, "layer_idx")} == {new}
    head, its = drafter.get_output_embeddings().weight, model.get_output_embeddings().weight
    assert torch.equal(head, its) and head.data_ptr() != its.data_ptr(), "copied, not shared with the target"

    ids = torch.arange(20)[None]
    with torch.no_grad():
        whole = drafter(ids).logits
        first = drafter(ids[:, :13], use_cache=True)
        rest = drafter(ids[:, 13:], cache=first.cache).logits
        drafter.save_pretrained(tmp_path / "cut")
        reloaded = models.load_model(str(tmp_path / "cut"))(ids).logits
    torch.testing.assert_close(rest, whole[:, 13:], atol=1e-5, rtol=0)
    torch.testing.assert_close(reloaded, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layers", [[], [2, 1], [1, 1], [0, 4], [-1]])
def test_layers_that_are_not_there(tiny_llama_dir, layers):
    with pytest.raises(InputError, match="has layers 0 to 3"):
        models.make_drafter(str(tiny_llama_dir), layers=layers)


def test_a_drafter_needs_a_layer_that_a_policy_can_touch():
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["gemma3"])
    with pytest.raises(InputError, match=r"no full-attention layer among them; those are \[1, 3\]"):
        models.keep_layers(model, [0, 2])


def change(source, folder, **keys):
    """A copy of a model folder with other values in its config.json."""
    copy = shutil.copytree(source, folder)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **keys}))
    return str(copy)


def test_soft_capped_logits_are_refused(tmp_path):
    Gemma3TextConfig(**SIZES, **SLIDING, final_logit_softcapping=30.0).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"final_logit_softcapping = 30\.0"):
        models.load_model(str(tmp_path))


def test_missing_weights_are_refused(tiny_llama_dir, tmp_path):
    with pytest.raises(InputError, match=r"lack 9 tensors, such as model\.layers\.4\."):
        models.load_model(change(tiny_llama_dir, tmp_path / "more", num_hidden_layers=5))
    (tmp_path / "more" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match="cannot be loaded"):
        models.load_model(str(tmp_path / "more"))


@pytest.mark.parametrize(
    ("model_id", "complaint"),
    [
        ("/no/such/folder", "no such folder, and not a hub id"),
        ("runs/a/export", "no such folder, and not a hub id"),
        ("embedded:gpt", "unknown embedded model; known: smollm2-135m"),
        ("some-organisation/no-such-model", "the hub cannot be reached.*give a folder"),
    ],
)
def test_a_model_that_is_not_there(model_id, complaint):
    for load in (models.load_config, models.load_tokenizer, models.load_model):
        with pytest.raises(InputError, match=complaint) as caught:
            load(model_id)
        assert "\n" not in str(caught.value)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(InputError, match="holds no model"):
        models.resolve(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="this is a file"):
        models.resolve(str(tmp_path / "file"))


def test_tokens_must_agree_by_string(tiny_tokenizer_dir, tmp_path):
    copy = shutil.copytree(tiny_tokenizer_dir, tmp_path / "other")
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[40:42]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    ours, theirs = (AutoTokenizer.from_pretrained(d) for d in (tiny_tokenizer_dir, copy))
    assert len(ours) == len(theirs)
    with pytest.raises(InputError, match=f"disagree on token {vocab[b]}"):
        models.check_same_tokens(ours, theirs)
    longer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    longer.add_tokens(["<|more|>"])
    assert models.check_same_tokens(ours, longer) == models.check_same_tokens(longer, ours) == len(ours)


def test_a_pair_is_checked_without_weights(tiny_llama_dir, tmp_path):
    target = Model(model=str(tiny_llama_dir))
    size = len(AutoTokenizer.from_pretrained(tiny_llama_dir))
    assert models.check_pair(target, Drafter(), 512) == size
    short = change(tiny_llama_dir, tmp_path / "short", max_position_embeddings=100)
    (tmp_path / "short" / "model.safetensors").unlink()
    assert models.check_pair(target, Drafter(model=short), 100) == size
    with pytest.raises(InputError, match=r"short: .* = 101 tokens, but this model's limit is 100"):
        models.check_pair(target, Drafter(model=short), 101)
