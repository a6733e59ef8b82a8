"""The dress rehearsal: every shipped recipe shrinks to something that still exercises what it configures."""

import json
from pathlib import Path

import pytest
import torch

from draftkv.errors import InputError
from draftkv.recipe import Recipe, load_recipe
from draftkv.rehearsal import (
    ARCHITECTURES,
    PROMPT,
    VOCAB,
    model_path,
    rehearse,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from draftkv.settings import validate

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
STAND_INS = {
    "quickstart": ("rehearsal:llama", None),
    "presets": ("rehearsal:llama", None),
    "qwen35_4b": ("rehearsal:qwen3_5_moe_text", "rehearsal:qwen3_5_text@1"),
    "qwen3_dense": ("rehearsal:qwen3", "rehearsal:qwen3@1"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DRAFTKV_CACHE", str(tmp_path_factory.getbasetemp() / "rehearsal-cache"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_shrinks(path):
    recipe = load_recipe(path)
    small = rehearse(recipe)
    assert validate(small.model_dump(), Recipe, "recipe") == small
    assert small.name == f"{recipe.name}-rehearsal"
    assert (small.target.model, small.drafter.model) == STAND_INS[path.stem]
    assert len(small.eval.policies) == len(recipe.eval.policies) and len(small.views) == len(recipe.views)
    assert [p.policy for p in small.eval.policies] == [p.policy for p in recipe.eval.policies]
    assert small.train.steps == min(6, recipe.train.steps) and small.eval.rows == 4 and small.eval.draft_length <= 4
    assert small.train.precision == recipe.train.precision
    for policy in small.eval.policies[1:]:
        split = policy.split(PROMPT)
        window = PROMPT - split.tail_start if split.sliding is None else split.sliding
        assert split.front + window == policy.budget < PROMPT, "compression must bite"
        assert (policy.scorer.kind == "none") == (split.selected == 0), "a scorer must have something to select"
    for view, own in zip(small.views, recipe.views, strict=True):
        assert view.rho == own.rho and type(view.budget) is type(own.budget)


def test_a_rehearsal_asks_no_server():
    recipe = load_recipe(ROOT / "recipes/qwen35_4b.yaml", ["engine.kind=server", "rollouts.dtype=bfloat16"])
    assert recipe.engine.is_vllm and not rehearse(recipe).engine.is_vllm


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_prompts_are_longer_than_every_budget_and_fit(path):
    small, tokenizer = rehearse(load_recipe(path)), tiny_tokenizer()
    texts = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in Path(getattr(small.prompts, split).source).read_text().splitlines()]
        texts[split] = {row["messages"][0]["content"] for row in rows}
        for row in rows:
            ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            assert max(p.budget or 0 for p in small.eval.policies) < len(ids) <= small.prompts.max_prompt_tokens
    assert not texts["train"] & texts["eval"]


def test_policies_that_shrink_to_the_same_one_stay_apart():
    overrides = ["eval.policies=[full, {policy: swa, budget: 136}, {policy: swa, budget: 137}]"]
    labels = [p.label for p in rehearse(load_recipe(ROOT / "recipes/quickstart.yaml", overrides)).eval.policies]
    assert len(set(labels)) == 3


def test_a_list_of_layers_maps_to_the_tiny_model():
    overrides = [f"drafter.layers={list(range(0, 30, 2))}"]
    small = rehearse(load_recipe(ROOT / "recipes/quickstart.yaml", overrides))
    assert small.drafter.layers == [0, 1, 2]


@pytest.mark.parametrize("model", ["nobody/nothing-9B", "no/such/folder"])
def test_an_unknown_architecture_is_refused(model):
    with pytest.raises(InputError, match=f"drafter.model: the architecture of '{model}' is not known"):
        rehearse(load_recipe(ROOT / "recipes/quickstart.yaml", [f"drafter.model={model}"]))


def test_an_architecture_without_a_stand_in_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    with pytest.raises(InputError, match="is of type opt; a rehearsal has llama, qwen3,"):
        overrides = [f"target.model={tmp_path}", "drafter.model=rehearsal:llama"]  # such a drafter is refused earlier
        rehearse(load_recipe(ROOT / "recipes/quickstart.yaml", overrides))
    with pytest.raises(InputError, match="no such tiny model"):
        tiny_config("rehearsal:opt")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_models_run_and_look_at_their_context(name):
    config = tiny_config(name)
    assert config.num_attention_heads == 2 * config.num_key_value_heads, "grouped-query heads"
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    assert kinds.count("full_attention") >= 2
    model = tiny_model(name)
    ids = torch.randint(3, VOCAB, (1, 48), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, :8] = changed[0, :8].flip(0)
    with torch.no_grad():
        logits, other = model(ids).logits[0], model(changed).logits[0]
    assert logits.shape == (48, VOCAB) and logits.isfinite().all()
    assert logits.argmax(-1).unique().numel() > 12, "the argmax must vary"
    assert (logits[-1] - other[-1]).abs().max() > 0.05, "the last row must see the first tokens"


def test_tiny_models_are_seeded_and_leave_the_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (tiny_model("llama", seed=s).lm_head.weight for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_saved_pair_reloads_and_agrees_on_every_token():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, drafter = model_path("rehearsal:llama"), model_path("rehearsal:llama@1")
    assert target == model_path("rehearsal:llama") != drafter
    vocabularies = [AutoTokenizer.from_pretrained(p).get_vocab() for p in (target, drafter)]
    assert vocabularies[0] == vocabularies[1] and sorted(vocabularies[0].values()) == list(range(VOCAB))
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(loaded.lm_head.weight, tiny_model("llama").lm_head.weight)
    assert not list(Path(target).parent.glob(".*")), "nothing half-written is left"
