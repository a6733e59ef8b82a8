"""eval/fidelity.py on a tiny text model: resume, determinism, reuse and refusals."""

import json
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, call, write_recipe

from draftkv.fidelity import records as ledger
from draftkv.recipe import load_recipe

POLICIES = ["full", {"policy": "bacon", "budget": 16, "window": 8}, {"policy": "rcr", "budget": 16, "window": 8},
            {"policy": "exact", "budget": 16, "window": 8}]  # fmt: skip


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path)
    plain = yaml.safe_load(path.read_text())
    plain["eval"]["policies"], plain["target"]["dtype"] = POLICIES, "float32"
    plain["prompts"]["eval"]["limit"] = 3
    path.write_text(yaml.safe_dump(plain))
    return path


@pytest.fixture
def calls(monkeypatch) -> list[list[str]]:
    """Policies of every call of `generate`; a call beyond the limit in `calls.stop` is interrupted."""
    true, seen = ledger.generate, Calls()

    def counted(model, prompt, policies, *args, **kwargs):
        if len(seen) == seen.stop:
            raise KeyboardInterrupt
        seen.append([p.policy for p in policies])
        return true(model, prompt, policies, *args, **kwargs)

    monkeypatch.setattr(ledger, "generate", counted)
    return seen


class Calls(list):
    stop: int | None = None


def fidelity(recipe: Path, *arguments) -> int:
    return call("eval/fidelity.py", recipe, "--max-new-tokens", 12, *arguments)


def lines(recipe: Path) -> list[dict]:
    return [json.loads(line) for line in (recipe.parent / "runs/run/fidelity.jsonl").read_text().splitlines()]


def test_a_stopped_run_goes_on_where_it_was(recipe, calls, tmp_path, capsys):
    assert fidelity(recipe, f"output={tmp_path / 'whole'}") == 0
    whole = (tmp_path / "whole/run/fidelity.jsonl").read_text()
    assert len(calls) == 3 * len(POLICIES)
    calls.clear()
    calls.stop = 6  # in the middle of the second sample
    assert fidelity(recipe) == 130
    assert [r["policy"] for r in lines(recipe)] == [json.loads(line)["policy"] for line in whole.splitlines()[:6]]
    with open(recipe.parent / "runs/run/fidelity.jsonl", "a") as file:
        file.write('{"row_id": "cut o')  # a kill in the middle of a line
    calls.stop = None
    assert fidelity(recipe) == 0
    assert len(calls) == 3 * len(POLICIES), "nothing was generated twice"
    assert (recipe.parent / "runs/run/fidelity.jsonl").read_text() == whole, "and all of it is the same"
    for name in ("fidelity.md", "fidelity.png"):
        found = (recipe.parent / "runs/run/report" / name).read_bytes()
        assert found == (tmp_path / "whole/run/report" / name).read_bytes()
    calls.clear()
    assert fidelity(recipe) == 0 and not calls


def test_side_by_side_loses_one_group_at_most(recipe, calls):
    calls.stop = 3  # sample 1: full, the others; sample 2: full
    assert fidelity(recipe, "--together", 3) == 130
    assert calls == [["full"], ["bacon", "rcr", "exact"], ["full"]] and len(lines(recipe)) == 5


def test_only_what_was_measured_is_reused(recipe, calls):
    assert fidelity(recipe, "--prompts", 1) == 0
    calls.clear()
    assert fidelity(recipe, "--prompts", 1, "eval.policies.2.trigger.rate=0.2") == 0
    assert calls == [["rcr"]], "another rate is another policy"
    calls.clear()
    assert call("eval/fidelity.py", recipe, "--prompts", 1, "--max-new-tokens", 8) == 0
    assert len(calls) == len(POLICIES), "another length is another output"
    calls.clear()
    assert fidelity(recipe, "--prompts", 1, "--model", "rehearsal:llama@1") == 0
    assert len(calls) == len(POLICIES), "other weights are another model"
    calls.clear()
    fewer = [p for p in POLICIES if p == "full" or p["policy"] != "bacon"]
    assert fidelity(recipe, "--prompts", 1, f"eval.policies={json.dumps(fewer)}") == 0
    assert calls == [["rcr"]], "the drift of a sample is now measured under rcr, which was not"


def test_records_say_what_happened(recipe, capsys):
    assert fidelity(recipe) == 0
    for record in lines(recipe):
        assert len(record["refreshed"]) == record["tokens"] - 1 == len(record["ids"]) - 1
        assert (record["evicted"] is not None) == record["policy"].startswith("bacon")
        assert record["rouge_l"] == 1 if record["policy"] == "full" else 0 <= record["rouge_l"] <= 1
    out = capsys.readouterr().out
    for words in ("fidelity to the uncompressed output, 3 samples", "drift tercile", "rank correlation", "refreshed"):
        assert words in out


def test_plan_needs_no_weights(recipe, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    assert fidelity(recipe, "--plan", "--prompts", 2) == 0
    out = capsys.readouterr().out
    assert "2 prompts" in out and "bacon B=16 window=8  (reference" in out and "not there" in out


@pytest.mark.parametrize("name", ["text", "qwen2_vl"])
def test_shipped_recipes_hold_rcrs_layout(name, capsys):
    path = ROOT / "recipes/fidelity" / f"{name}.yaml"
    assert call("eval/fidelity.py", path, "--plan") == 0 and "bacon B=64 window=32  (ref" in capsys.readouterr().out
    for policy in load_recipe(path).eval.policies[1:]:
        split = policy.split(1000)
        assert (split.sinks, split.selected, split.sliding, split.tail_start) == (0, 32, None, 968), policy.label
        assert policy.dense_layers == 0 and policy.prefill == "full"


@pytest.mark.parametrize(("arguments", "said"), [
    (["--prompts", "0"], "--prompts 0: at least 1"),
    (["--together", "-1"], "--together -1: at least 1"),
    (["--max-new-tokens", "0"], "--max-new-tokens 0: at least 1"),
    (["--max-new-tokens", "many"], "--max-new-tokens"),
    (["--max-new-tokens", "2000"], "this model's limit is 1024"),
    (["eval.policies=[full]"], "list a compressed one"),
    (["--model", "nowhere/at-all/x"], "nowhere/at-all/x"),
    (["prompts.eval.source=gone.jsonl"], "gone.jsonl: no such file"),
    (["eval.polices=[full]"], "did you mean 'policies'"),
    (['eval.policies=[full,{"policy":"rift_ada","budget":8,"trigger":{"kind":"adaptive","al_below":2,'
      '"drift_above":null}}]'], "no acceptance length"),
])  # fmt: skip
def test_bad_input_is_one_line(recipe, capsys, arguments, said):
    assert call("eval/fidelity.py", recipe, *arguments) == 2
    found = capsys.readouterr()
    assert said in found.err and found.err.count("\n") == 1


def test_a_missing_package_is_named(recipe, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "rouge_score.rouge_scorer", None)
    assert fidelity(recipe) == 2
    assert "pip install 'draftkv[fidelity]'" in capsys.readouterr().err
