"""Every preset through the commands that users run: trained under where it can be, replayed, decoded live, reported."""

import json

import pytest
from helpers import ROOT, call, write_recipe
from matrix import policy
from omegaconf import OmegaConf

from draftkv import cli
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


def test_live_decoding_agrees_with_replay_for_every_preset(run):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli.console, "print", lambda *tables, **_: seen.extend(tables))
        assert call("eval/live.py", run[0], "--prompts", "2", "--drafter", "rehearsal:llama@1") == 0
    first, costs = (
        [dict(zip([c.header for c in t.columns], cells, strict=True))
         for cells in zip(*(c.cells for c in t.columns), strict=True)] for t in seen if hasattr(t, "columns")
    )  # fmt: skip
    assert len(first) == len(PRESETS) and {line["same blocks"] for line in first} == {"2"}
    assert len(costs) == sum("trigger" in parts for parts, _ in PRESETS.values())


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


def perturbed():
    """Pairs of policies that differ in one part."""
    rcr, dyn = {"policy": "rcr", "budget": 64}, {"policy": "rift_dyn", "budget": 64}
    yield {**rcr, "scorer": {"rank": 4}}, {**rcr, "trigger": {"rank": 4}}
    yield rcr, {**rcr, "initial": None}
    yield rcr, {**rcr, "initial": {"observation": 32}}
    yield dyn, {**dyn, "store": "device"}
    yield {**dyn, "rho": 0.5}, {**dyn, "rho": 0.50000001}
    yield dyn, {**dyn, "trigger": {"phase": 3}}
    yield dyn, {**dyn, "scorer": {"pooling": "max"}}
    yield {**dyn, "budget": 0.25}, {**dyn, "budget": 25}


@pytest.mark.parametrize("one, other", perturbed())
def test_a_label_tells_policies_apart(one, other):
    """Records are known by it."""
    one, other = Policy.model_validate(one), Policy.model_validate(other)
    assert one != other and one.label != other.label


@pytest.mark.parametrize("parts, message", [
    ({"policy": "rcr", "budget": 32}, "leave no room for scorer 'lowrank'"),
    ({"policy": "quest", "budget": 20}, "leave no room for scorer 'quest' to select 16"),
    ({"policy": "rcr", "budget": 64, "initial": {"kind": "quest", "block": 8}}, "do not divide"),
    ({"policy": "rift_stat", "budget": 64, "scorer": {"pool": 4}}, "use an odd one"),
    ({"policy": "rift_stat", "budget": 64, "trigger": {"delta": 4}}, "which kind"),
    ({"policy": "bacon", "budget": 96, "trigger": "fixed_threshold"}, "use it as `initial`"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Policy.model_validate(parts)


@pytest.mark.parametrize("view, message", [
    ({"policy": "rift_dyn", "budget": 32, "initial": "oracle"}, "'oracle' looks at the run"),
    ({"policy": "rift_ada", "budget": 32, "delta": 64}, "delta"),
])  # fmt: skip
def test_views_with_parts_that_do_not_fit_are_refused(view, message):
    with pytest.raises(ValueError, match=message):
        View.model_validate(view)


def test_a_view_may_name_its_trigger_as_a_word():
    import random

    view = View.model_validate({"policy": "rift_dyn", "budget": 32, "trigger": "every", "delta": [4, 9]})
    assert 4 <= view.draw(random.Random(0)).trigger.delta <= 9


def test_layers_that_are_all_dense_are_refused(run, capsys):
    policies = "eval.policies=[full, {policy: quest, budget: 40, dense_layers: 3}]"
    assert call("eval/acceptance.py", run[0], policies, "--drafter", "rehearsal:llama@1") == 2
    assert "keeps layers 0 to 2 dense" in capsys.readouterr().err


def test_ties_are_counted_once_however_often_a_row_is_fed():
    from draftkv.acceptance.replay import Replay
    from draftkv.cache.attention import ATTENTION
    from draftkv.rehearsal import tiny_model

    model = tiny_model("llama", tie_word_embeddings=False)
    model.set_attn_implementation(ATTENTION)
    model.get_output_embeddings().weight.data.zero_()
    row = {"prompt_ids": list(range(30)), "response_ids": [5] * 20, "temperature": 0.0, "finish_reason": "length",
           "row_id": "r", "response_logprobs": []}  # fmt: skip
    often = policy("rift_dyn", 12, trigger={"delta": 2})
    for found in Replay(7).row(model, row, [policy("full", 0), policy("rift_stat", 12), often, policy("rcr", 12)]):
        assert found.ties == 20


def test_shares_and_entries_are_not_drawn_on_one_axis():
    from draftkv.acceptance.families import families

    specs = {}
    for budget in (0.25, 0.5, 64, 128):
        one = Policy.model_validate({"policy": "rift_stat", "budget": budget})
        specs[one.label] = one.model_dump(mode="json")
    assert sorted(tuple(f.members) for f in families(specs)) == [(0.25, 0.5), (64, 128)]
