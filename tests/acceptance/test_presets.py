"""Every preset through the commands that users run: trained under where it can be, replayed, decoded live, reported."""

import json

import pytest
from helpers import ROOT, call, write_recipe
from matrix import policy
from omegaconf import OmegaConf

from draftkv.cache.policy import PRESETS, Policy
from draftkv.recipe import View

BUDGET = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished tiny run: views of every preset that training can show, and all presets evaluated."""
    folder = tmp_path_factory.mktemp("presets")
    path = write_recipe(folder, steps=2, views_per_row=20, checkpoint_every=50, initial_share=0.0)
    recipe = OmegaConf.to_container(OmegaConf.load(path))
    specs = [policy(name, BUDGET) for name in PRESETS]
    shown = [p.model_dump(mode="json") for p in specs if p.is_parallel]
    for view in shown:
        if view["trigger"]["kind"] == "every":
            view |= {"trigger": {"kind": "every"}, "delta": [3, 6], "phase": [0, 2]}
    recipe["views"] = shown
    policies = [p.model_dump(mode="json") for p in specs]
    recipe["eval"] |= {"policies": policies, "draft_length": 3, "every": 2, "select": 1}
    recipe["rollouts"]["eval_temperatures"] = [0.0, 1.0]
    OmegaConf.save(OmegaConf.create(recipe), path)
    assert call("train/distill.py", path) == 0
    return path, folder / "runs" / "run"


def records(folder):
    return [json.loads(line) for line in (folder / "acceptance.jsonl").read_text().splitlines()]


def test_every_preset_is_evaluated_at_both_temperatures(run):
    found = {(r["spec"]["policy"], r["temperature"], r["step"]): r for r in records(run[1])}
    assert {k[0] for k in found} == set(PRESETS) and len(found) == len(PRESETS) * 2 * 2
    for (name, _, _), record in found.items():
        assert 1 <= record["al"] <= 4
        again = Policy.model_validate(record["spec"]).reselects
        assert ("refresh_rate" in record) == again, name
        if again:
            assert 0 < record["refresh_rate"] <= 1 and record["reads_per_step"] > 0
    for t in (0.0, 1.0):
        assert found["exact", t, 0]["refresh_rate"] == 1


def test_the_report_shows_refresh_rates(run):
    assert call("eval/report.py", run[0]) == 0
    text = (run[1] / "report" / "report.md").read_text()
    assert "refresh rate" in text and "rift_dyn" in text


def test_live_decoding_agrees_with_replay_for_every_preset(run, capsys):
    assert call("eval/live.py", run[0], "--prompts", "1", "--drafter", "rehearsal:llama@1") == 0
    out = capsys.readouterr().out
    assert "what selecting again cost" in out


def test_the_table_of_the_readme_names_every_preset():
    text = (ROOT / "README.md").read_text()
    for name, (_, source) in PRESETS.items():
        assert f"| `{name}` |" in text, name
        assert source


def test_a_view_draws_delta_and_phase():
    import random

    view = View.model_validate({"policy": "rift_dyn", "budget": 32, "delta": [4, 9], "phase": [1, 3]})
    drawn = {(p.trigger.delta, p.trigger.phase) for p in (view.draw(random.Random(i)) for i in range(300))}
    assert drawn == {(d, p) for d in range(4, 10) for p in range(1, 4)}
    fixed = View.model_validate({"policy": "rift_dyn", "budget": 32}).draw(random.Random(0))
    assert fixed == Policy.model_validate({"policy": "rift_dyn", "budget": 32})


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "full" and not policy(n, BUDGET).is_parallel])
def test_views_that_training_cannot_show_are_refused(name):
    with pytest.raises(ValueError, match="looks at the run"):
        View.model_validate({**policy(name, BUDGET).model_dump()})
