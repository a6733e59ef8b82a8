"""The dress rehearsal: a recipe with its models swapped for tiny random ones of the same architectures.

`rehearse(recipe)` shrinks everything that costs money (models, prompts, responses, steps) in proportion and leaves
the rest alone, so that a mistake in a recipe shows on a laptop before anyone rents GPUs. The tiny models are also the
ones that the parity tests run on: grouped-query heads, two full-attention layers or more in every hybrid, sliding
windows shorter than the prompts, and weights large enough that attention is far from uniform.
"""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from draftkv.cache.policy import Policy
from draftkv.embedded import cache_dir
from draftkv.errors import InputError
from draftkv.recipe import Recipe, View
from draftkv.settings import validate
from draftkv.shapes import shape_of

PREFIX = "rehearsal:"
PROMPT, RESPONSE, SLACK = 96, 32, 32  # tokens; a rehearsal's prompts are PROMPT tokens, give or take the last word
MAX_BUDGET = PROMPT // 2  # so that compression bites whatever the recipe's own ratio is
VOCAB = 512
EOS, PAD = "<|im_end|>", "<|pad|>"
SPECIAL = (PAD, "<|im_start|>", EOS)  # ids 0, 1, 2

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    # Large: with the usual 0.02 all attention is uniform, all logits are equal, and a broken mask changes nothing.
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}
_LINEAR = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "hidden_size": 64,
}
_SLIDING = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
}
_MAMBA = {
    "num_hidden_layers": 5, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention",
                                                  "full_attention"],
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# name -> (model_type that AutoModelForCausalLM knows as text only, what differs from _COMMON)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"num_hidden_layers": 3}),
    "qwen3_5": ("qwen3_5_text", _LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "nemotron_h": ("nemotron_h", _MAMBA),
    "gpt_oss": ("gpt_oss", {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default",
                                                                               "rope_theta": 10000.0}}),
}


def _parse(name: str) -> tuple[str, int]:
    """`rehearsal:qwen3_5_text@1`, `qwen3_5_text` or `qwen3_5` -> (`qwen3_5`, seed)."""
    kind, _, seed = name.removeprefix(PREFIX).partition("@")
    kind = kind.removesuffix("_text")
    if kind not in ARCHITECTURES or not (seed or "0").isdigit():
        known = ", ".join(PREFIX + k for k in ARCHITECTURES)
        raise InputError(f"model '{name}': no such tiny model; known: {known}, each with an optional @SEED")
    return kind, int(seed or 0)


def tiny_config(name: str, **overrides: Any) -> Any:
    """The transformers configuration of a tiny model: a key of `ARCHITECTURES` or `rehearsal:MODEL_TYPE[@SEED]`.

    Raises:
        InputError: an architecture that has no tiny model.
    """
    from transformers import AutoConfig

    model_type, own = ARCHITECTURES[_parse(name)[0]]
    values = {**_COMMON, **own, **overrides}
    if model_type == "qwen3_5_moe_text":
        values.pop("intermediate_size", None)
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and "layer_types" in own:
        values["layer_types"] = (own["layer_types"] * values["num_hidden_layers"])[: values["num_hidden_layers"]]
    return AutoConfig.for_model(model_type, **values)


def tiny_model(name: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random causal language model in fp32, eval mode; the caller's random state is left as it was.

    Attention is SDPA, or eager for GPT-OSS, whose attention sinks SDPA cannot express.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(name, **overrides)
    attention = "eager" if config.model_type == "gpt_oss" else "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.eval()


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of exactly `VOCAB` tokens with a ChatML template, the same one for every model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    core.train_from_iterator([_text(random.Random(i), 200) for i in range(20)], trainer)
    if core.get_vocab_size() != VOCAB:
        raise AssertionError(f"the rehearsal tokenizer has {core.get_vocab_size()} tokens, not {VOCAB}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=PAD, model_max_length=1024)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


_SYLLABLES = [c + v + e for c in "bdfgklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "st")]


def _text(rng: random.Random, words: int) -> str:
    """Deterministic pseudo-prose: a few words come back often, so that there is something worth remembering."""
    theme = ["".join(rng.choices(_SYLLABLES, k=2)) for _ in range(12)]
    fresh = ("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(words))
    return " ".join(rng.choice(theme) if rng.random() < 0.6 else word for word in fresh)


def _publish(final: Path, write: Any) -> Path:
    """Write a folder beside `final` and rename it, so that readers see all of it or nothing; first writer wins."""
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        write(draft)
        os.chmod(draft, 0o755)
        draft.rename(final)
    except OSError:
        if not final.exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _version() -> str:
    """Key of the cached files: they follow this file and the libraries that write them."""
    import hashlib

    import tokenizers
    import torch
    import transformers

    libraries = " ".join(library.__version__ for library in (transformers, torch, tokenizers))
    return hashlib.sha256(Path(__file__).read_bytes() + libraries.encode()).hexdigest()[:12]


def model_path(name: str) -> str:
    """Folder of the tiny model `rehearsal:MODEL_TYPE[@SEED]` with its tokenizer, built on first use.

    Raises:
        InputError: an architecture that has no tiny model.
    """
    kind, seed = _parse(name)

    def write(folder: Path) -> None:
        from transformers.utils import logging

        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # a bar over one 1 MB shard
        tiny_model(kind, seed).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        if bars:
            logging.enable_progress_bar()

    return str(_publish(cache_dir() / "rehearsal" / _version() / f"{kind}-{seed}", write))


def prompts_path(split: str, rows: int) -> str:
    """JSONL of `rows` synthetic chat prompts of about `PROMPT` tokens; `split` ("train", "held_out") seeds the text."""

    def write(folder: Path) -> None:
        tokenizer = tiny_tokenizer()
        with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
            for i in range(rows):
                words = _text(random.Random(f"{split}/{i}"), PROMPT).split()
                while len(_chat(tokenizer, words)) > PROMPT:
                    words.pop()
                messages = [{"role": "user", "content": " ".join(words)}]
                file.write(json.dumps({"messages": messages, "category": ("low", "high")[i % 2]}) + "\n")

    return str(_publish(cache_dir() / "rehearsal" / _version() / f"text-{split}-{rows}", write) / "prompts.jsonl")


def _chat(tokenizer: Any, words: list[str]) -> list[int]:
    messages = [{"role": "user", "content": " ".join(words)}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def rehearse(recipe: Recipe) -> Recipe:
    """The dress rehearsal of `recipe`, itself a valid recipe; the synthetic prompts are written to the cache.

    Raises:
        InputError: a model whose architecture is not known without its configuration, or has no tiny stand-in.
    """
    plain = recipe.model_dump()
    scale = PROMPT / recipe.prompts.max_prompt_tokens
    plain["name"] = f"{recipe.name}-rehearsal"
    plain["target"] = {"model": _stand_in(recipe.target.model, "target", 0), "dtype": recipe.target.dtype}
    if recipe.drafter.model is not None:
        plain["drafter"]["model"] = _stand_in(recipe.drafter.model, "drafter", 1)
    elif recipe.drafter.layers is not None:
        plain["drafter"]["layers"] = _fewer_layers(recipe, plain["target"]["model"])
    plain["drafter"]["revision"] = None
    train, held_out = ({"source": prompts_path(s, n)} for s, n in (("train", 8), ("held_out", 4)))
    plain["prompts"] = {"train": train, "eval": held_out, "max_prompt_tokens": PROMPT + SLACK}
    plain["rollouts"] |= {"max_new_tokens": min(RESPONSE, recipe.rollouts.max_new_tokens),
                          "batch_size": min(4, recipe.rollouts.batch_size)}
    plain["engine"]["kind"] = "transformers"  # the stand-ins are served nowhere
    plain["views"] = [_view(view, scale) for view in recipe.views]
    plain["train"] |= {
        "steps": min(6, recipe.train.steps), "rows": min(4, recipe.train.rows), "warmup_steps": 1,
        "micro_rows": min(2, recipe.train.micro_rows), "checkpoint_every": 3,
        "head_chunk": min(24, recipe.train.head_chunk),  # shorter than a response: chunk borders are crossed
    }
    plain["eval"] |= {
        "every": 3, "rows": min(4, recipe.eval.rows or 4), "bootstrap": 100,
        "draft_length": min(4, recipe.eval.draft_length), "policies": _policies(recipe.eval.policies, scale),
    }
    return validate(plain, Recipe, f"rehearsal of {recipe.name}")


def _stand_in(model: str, role: str, seed: int) -> str:
    shape = shape_of(model)
    if shape is None:
        raise InputError(f"{role}.model: the architecture of '{model}' is not known here; for a rehearsal give a folder"
                         f" that holds its config.json, or one of {', '.join(PREFIX + k for k in ARCHITECTURES)}")
    kind = shape.family.removesuffix("_text")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{role}.model: '{model}' is of type {shape.family}; a rehearsal has {known}")
    return f"{PREFIX}{ARCHITECTURES[kind][0]}" + (f"@{seed}" if seed else "")


def _fewer_layers(recipe: Recipe, target: str) -> list[int]:
    shape = shape_of(recipe.target.model)
    layers = (shape and shape.layers) or max(recipe.drafter.layers) + 1
    tiny = tiny_config(target).num_hidden_layers
    return sorted({layer * tiny // layers for layer in recipe.drafter.layers})


# Lengths in entries, with the least that still does something. Everything else of a policy stays as it is.
_LEAST = {"sinks": 1, "window": 4, "observation": 4, "block": 4, "pool": 3, "delta": 4, "phase": 1, "check": 4,
          "a_min": 4, "a_max": 8, "stride": 4}  # fmt: skip


def _shrink(value: Any, scale: float, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _shrink(v, scale, k) for k, v in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and key in _LEAST:
        return min(value, max(_LEAST[key], round(value * scale)))
    return value


def _budget(value: Any, scale: float, least: int) -> Any:
    """Scaled budget in entries, within [least, MAX_BUDGET]; fractions of the prompt scale by themselves."""
    if isinstance(value, list):
        return [_budget(v, scale, least) for v in value]
    return min(max(round(value * scale), 8, least), MAX_BUDGET) if isinstance(value, int) else value


def _parts(policy: Policy, scale: float) -> tuple[dict[str, Any], int]:
    """Shrunken parts of a policy without its budget, and the smallest budget that they leave valid."""
    parts = _shrink(policy.model_dump(exclude={"budget"}), scale)
    block = parts["scorer"]["block"]
    return parts, -(-parts["sinks"] // block) * block + 1


def _view(view: View, scale: float) -> dict[str, Any]:
    low = {n: v[0] for n in view.ranges if isinstance(v := getattr(view, n), list)}
    parts, least = _parts(view.policy(low), scale)
    plain = {"weight": view.weight, "loss_weight": view.loss_weight, "budget": _budget(view.budget, scale, least)}
    if view.rho is not None:
        parts.pop("rho")
        plain["rho"] = view.rho
    for name in ("delta", "phase"):
        given = getattr(view, name)
        if given is not None:
            parts["trigger"].pop(name)
            least_of = lambda v, name=name: _shrink({name: v}, scale)[name]  # noqa: E731
            plain[name] = [least_of(v) for v in given] if isinstance(given, list) else least_of(given)
    return {**plain, "parts": parts}


def _policies(policies: list[Policy], scale: float) -> list[dict[str, Any]]:
    result, seen = [], set()
    for policy in policies:
        parts, least = _parts(policy, scale)
        plain = {**parts, "budget": _budget(policy.budget, scale, least)}
        while (label := Policy.model_validate(plain).label) in seen:  # two budgets that shrink to the same one
            plain["budget"] += 1
        seen.add(label)
        result.append(plain)
    return result
