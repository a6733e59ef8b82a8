"""The table of eval/live.py: acceptance length, agreement with replay, and the draws of each prompt."""

import runpy

import pytest
import torch
from helpers import ROOT, write_recipe

from draftkv.cache.attention import ATTENTION
from draftkv.errors import InputError
from draftkv.recipe import load_recipe
from draftkv.rehearsal import tiny_model

LIVE = runpy.run_path(str(ROOT / "eval" / "live.py"))


@pytest.fixture(scope="module")
def models():
    """A target, and a drafter that is right often."""
    target, drafter = tiny_model("llama", 0, vocab_size=24), tiny_model("llama", 0, vocab_size=24)
    with torch.no_grad():
        for p in drafter.parameters():
            p *= 0.7
    for m in (target, drafter):
        m.set_attn_implementation(ATTENTION)
    return target, drafter


@pytest.fixture
def recipe(tmp_path):
    return load_recipe(write_recipe(tmp_path), ["eval.draft_length=3"])


def stored(temperature: float, name: str = "r", response=(1, 1, 1, 1, 1, 1)) -> dict:
    """A rollout that live decoding does not write."""
    return {"row_id": name, "prompt_ids": list(range(3, 19)), "response_ids": list(response), "finish_reason": "length",
            "temperature": temperature, "response_logprobs": [-3.0] * len(response)}  # fmt: skip


def lines(table) -> list[dict]:
    names = [c.header for c in table.columns]
    return [dict(zip(names, cells, strict=True)) for cells in zip(*(c.cells for c in table.columns), strict=True)]


def test_blocks_are_compared_on_the_text_that_was_emitted(recipe, models):
    for line in lines(LIVE["compare"](recipe, *models, [stored(0.0)], set())[0]):
        assert (line["same output"], line["same blocks"]) == ("0", "1") and line["AL live"] == line["AL replay"]


def test_a_drafted_eos_is_the_last_token(recipe, models):
    """The target as its own drafter, so every draft is accepted: AL counts up to EOS, as replay does."""
    target, row = models[0], stored(0.0)
    text = LIVE["decode"](recipe, target, target, row, recipe.eval.policies[0], set(), None).response_ids
    at = next(i for i, t in enumerate(text) if text.index(t) == i and i % 4 in (1, 2, 3))
    line = lines(LIVE["compare"](recipe, target, target, [row], {text[at]})[0])[0]
    assert line["AL live"] == line["AL replay"] == f"{at / -(-at // 4):.3f}" and line["same blocks"] == "1"


def test_draws_differ_between_rows_and_repeat_for_one(recipe, models):
    first, again, other = (
        LIVE["decode"](recipe, *models, stored(1.0, name), recipe.eval.policies[1], set(), None).response_ids
        for name in ("a", "a", "b")
    )
    assert first == again != other
    line = lines(LIVE["compare"](recipe, *models, [stored(1.0, "a")], set())[0])[0]
    assert line["same output"] == line["same blocks"] == "-" and float(line["AL live"]) > 1


def test_no_block_at_all_has_no_acceptance_length(recipe, models):
    """Every token is EOS, so the target's first one ends the response."""
    line = lines(LIVE["compare"](recipe, *models, [stored(0.0)], set(range(24)))[0])[0]
    assert line["AL live"] == line["AL replay"] == "-"


def test_the_cost_of_selecting_again_is_measured_per_interval(tmp_path, models):
    """Shorter intervals select more often and read more; a run without such policies has no table of costs."""
    policy = "{policy: rift_dyn, budget: 8, scorer: {observation: 4}}"
    recipe = load_recipe(write_recipe(tmp_path), ["eval.draft_length=3", f"eval.policies=[full, {policy}]"])
    some = LIVE["at_intervals"](recipe, [2, 6, 1024])
    assert [p.trigger.delta for p in some.eval.policies[1:]] == [2, 6, 1024]
    _, costs = LIVE["compare"](some, *models, [stored(0.0, response=[1] * 16)], set())
    cells = lines(costs)
    rates, reads = ([float(c[name].rstrip("%")) for c in cells] for name in ("refresh rate", "reads per step"))
    assert rates[0] > rates[1] > rates[2] == 0 and reads[0] > reads[1] > reads[2] == 0
    assert all(c["attended"] == "8" for c in cells) and cells[0]["to device"] > cells[2]["to device"] == "0.0 KiB"
    assert all(float(c["share of draft time"].rstrip("%")) < 100 for c in cells)
    plain = load_recipe(write_recipe(tmp_path), ["eval.draft_length=3"])
    assert len(LIVE["compare"](plain, *models, [stored(0.0)], set())) == 1
    with pytest.raises(InputError, match="rift_dyn"):
        LIVE["at_intervals"](plain, [4])
