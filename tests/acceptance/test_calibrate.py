"""Calibrated thresholds: the search on simulated triggers, the split that may be used, whole runs on tiny models."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from helpers import call, write_recipe

from draftkv.acceptance.calibrate import (
    KNOBS,
    TAU,
    Goal,
    Trial,
    check_disjoint,
    fragment,
    full_counts,
    knob_of,
    search,
    try_threshold,
    with_threshold,
)
from draftkv.acceptance.intervals import Interval
from draftkv.acceptance.replay import Replay
from draftkv.cache.attention import ATTENTION
from draftkv.cache.offloaded import OffloadedCache
from draftkv.cache.policy import Policy
from draftkv.errors import InputError, RunError
from draftkv.rehearsal import tiny_model

ADA = Policy.model_validate({"policy": "rift_ada", "budget": 12, "trigger": {"kind": "adaptive", "check": 4,
                                                                              "a_min": 4, "a_max": 24}})  # fmt: skip
FIXED = Policy.model_validate({"policy": "fixed_threshold", "budget": 12, "window": 4})


def simulated(knob, rate, retention=lambda share: share, values=None):
    """`attempt` of a trigger with refresh rate `rate(threshold)` and retention a function of the rate."""
    calls = []

    def attempt(threshold: float) -> Trial:
        calls.append(threshold)
        share = rate(threshold)
        exact = lambda x: Interval(x, x, x, 9, 0)  # noqa: E731
        seen = np.sort(np.random.default_rng(0).gamma(2.0, 0.1, 400)) if values is None else values
        return Trial(threshold, ADA, exact(share), 0.0, exact(2.0), exact(retention(share)), 100, seen)

    return attempt, calls


def above(threshold: float) -> float:
    """Share of a gamma distribution above a threshold."""
    return float((np.random.default_rng(1).gamma(2.0, 0.1, 5000) > threshold).mean())


@pytest.mark.parametrize("target", [0.05, 0.25, 0.4, 0.9])
def test_a_refresh_rate_is_found(target):
    attempt, calls = simulated(TAU, above)
    result = search(attempt, TAU, Goal("refresh_rate", target))
    assert abs(result.chosen.rate.value - target) <= 0.02 and len(calls) == len(result.trials) <= 8
    rates = [t.rate.value for t in result.trials]
    assert rates == sorted(rates), "from the most reluctant to the most eager"
    less, more = result.bracket
    assert less.rate.value < target <= more.rate.value and less.threshold > more.threshold


def test_the_acceptance_length_fires_below_its_threshold():
    attempt, _ = simulated(KNOBS["al"], lambda t: float(np.clip(1 - 1 / t, 0, 1)), values=np.linspace(1, 5, 300))
    result = search(attempt, KNOBS["al"], Goal("refresh_rate", 0.5))
    assert result.chosen.threshold == pytest.approx(2, abs=0.1)
    assert result.trials[0].threshold == 1.0, "reluctant: no acceptance length is below 1"


def test_the_least_refreshing_threshold_that_keeps_the_retention():
    attempt, calls = simulated(TAU, above, lambda share: 0.6 + 0.4 * share)
    result = search(attempt, TAU, Goal("retention", 0.8))
    assert 0.8 <= result.chosen.retention.value < 0.82 and len(calls) <= 8
    assert all(t.retention.value < 0.8 for t in result.trials if t.threshold > result.chosen.threshold)
    attempt, calls = simulated(TAU, above, lambda share: 0.97)
    result = search(attempt, TAU, Goal("retention", 0.95))
    assert result.chosen.threshold == TAU.reluctant and len(calls) == 2, "nothing is cheaper than never"


def test_a_retention_that_only_the_middle_reaches_is_found_and_one_that_nothing_reaches_is_not():
    attempt, _ = simulated(TAU, above, lambda share: 0.9 - abs(share - 0.5))
    assert search(attempt, TAU, Goal("retention", 0.85)).chosen.retention.value >= 0.85
    attempt, calls = simulated(TAU, above, lambda share: 0.5 * share)
    result = search(attempt, TAU, Goal("retention", 0.95))
    assert result.chosen is None and result.bracket is None and len(calls) == 8


def test_a_rate_that_the_ages_forbid_is_refused():
    attempt, _ = simulated(TAU, lambda t: 0.2 + 0.3 * above(t))
    for target in (0.1, 0.6):
        with pytest.raises(RunError, match=r"cannot be reached: tau moves it between 0.200 and 0.500"):
            search(attempt, TAU, Goal("refresh_rate", target))


def test_what_can_be_calibrated():
    assert knob_of(ADA, None) is KNOBS["drift"] and knob_of(ADA, "al") is KNOBS["al"] and knob_of(FIXED, None) is TAU
    trigger = with_threshold(ADA, KNOBS["entropy"], 1.5).trigger
    assert (trigger.entropy_above, trigger.drift_above, trigger.al_below) == (1.5, None, None)
    assert (trigger.check, trigger.a_min, trigger.a_max) == (4, 4, 24)
    mixed = Policy.model_validate({"policy": "rift_stat", "budget": 12, "trigger": {"kind": "fixed_threshold"}})
    assert with_threshold(mixed, knob_of(mixed, None), 0.2).trigger.tau == 0.2, "any policy with the trigger"
    with pytest.raises(InputError, match="looks at the drift alone"):
        knob_of(FIXED, "al")
    with pytest.raises(InputError, match="rate_controlled finds its own threshold"):
        knob_of(Policy.model_validate({"policy": "rcr", "budget": 64}), None)


@pytest.mark.parametrize("policy", [ADA, FIXED, Policy.model_validate({
    "policy": "custom", "budget": 0.25, "sinks": 4, "scorer": {"kind": "snapkv", "block": 4}, "initial": "bacon",
    "trigger": "adaptive"})], ids=lambda p: p.policy)  # fmt: skip
def test_a_fragment_is_the_policy(policy):
    given = with_threshold(policy, knob_of(policy, None), 0.12345)
    text = fragment(given, ["one remark", "another"])
    assert text.startswith("# one remark\n# another\n") and text.count("\n") == 3
    assert Policy.model_validate(yaml.safe_load(text)) == given


def test_held_out_rows_are_refused():
    row = {"row_id": "a@turn2", "source": "s", "prompt_ids": [1, 2, 3]}
    check_disjoint([row], [("s", "b", [1, 2]), ("other", "a", [4])])  # another file's row may have the same name
    for held_out in (("other", "x", [1, 2, 3]), ("s", "a", [9])):
        with pytest.raises(InputError, match="training row 'a@turn2' is also held out"):
            check_disjoint([row], [held_out])


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def replayed(model):
    """A drafter that is right about three times of four, and rows of the model's own text with some tokens changed."""
    rng, rows = np.random.default_rng(0), []
    for i in range(3):
        prompt = rng.integers(3, 500, 40).tolist()
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False)
        response = ids[0, 40:].tolist()
        for at in rng.choice(40, 8, replace=False):
            response[at] = int(rng.integers(3, 500))
        rows.append({"row_id": str(i), "prompt_ids": prompt, "response_ids": response, "temperature": 0.0,
                     "response_logprobs": [-1.0] * 40, "finish_reason": "length"})  # fmt: skip
    model.set_attn_implementation(ATTENTION)
    how = Replay(3)
    return rows, how, full_counts(model, rows, how)


class Counting(OffloadedCache):
    """Counts the checks of a block trigger and those that fired, over all of its instances."""

    asked = fired = 0

    def refresh(self, verified):
        done = super().refresh(verified)
        Counting.fired, Counting.asked = Counting.fired + done, Counting.asked + 1
        return done


def test_rates_count_checks_and_layer_steps(model, replayed):
    """Against the checks and layer-steps of an executor that records nothing."""
    rows, how, full = replayed
    trial = try_threshold(model, rows, how, ADA, KNOBS["drift"], 1e-9, full, bootstrap=100)
    Counting.asked = Counting.fired = 0
    plain = [replace(how, executor=Counting).row(model, row, [trial.policy])[0] for row in rows]
    assert trial.rate.value == Counting.fired / Counting.asked == 1.0, "check = a_min: every check may fire"
    assert trial.asked == len(trial.values) == Counting.asked and (trial.values > 0).all()
    assert trial.per_100 == pytest.approx(100 * sum(f.cost.refreshes for f in plain) / sum(f.cost.steps for f in plain))
    never = try_threshold(model, rows, how, ADA, KNOBS["drift"], 3.0, full, bootstrap=100)
    assert 0 < never.rate.value < 0.3, "a_max alone"

    tau = float(np.median(try_threshold(model, rows, how, FIXED, TAU, 2.0, full, bootstrap=100).values))
    trial = try_threshold(model, rows, how, FIXED, TAU, tau, full, bootstrap=100)
    plain = [how.row(model, row, [trial.policy])[0] for row in rows]
    assert trial.rate.value == pytest.approx(sum(f.cost.refreshes for f in plain) / sum(f.cost.steps for f in plain))
    assert 0 < trial.rate.value < 1 and len(trial.values) == trial.asked == sum(f.cost.steps for f in plain)
    assert trial.values.mean() == pytest.approx(sum(f.cost.drift for f in plain) / trial.asked, rel=1e-5)
    assert (trial.values > tau).mean() == pytest.approx(trial.rate.value), "fired exactly where the drift exceeded tau"


@pytest.mark.parametrize("policy,signal,target", [
    (ADA, "drift", 0.5), (ADA, "entropy", 0.5), (ADA, "al", 0.5), (FIXED, None, 0.4)],
    ids=["drift", "entropy", "al", "tau"])  # fmt: skip
def test_a_calibrated_fragment_reproduces_its_rate(model, replayed, policy, signal, target):
    rows, how, full = replayed
    knob = knob_of(policy, signal)
    result = search(lambda v: try_threshold(model, rows, how, policy, knob, v, full, bootstrap=100), knob,
                    Goal("refresh_rate", target))  # fmt: skip
    best = result.chosen
    # A recent acceptance length is exactly 1 for long on random text, and the rate jumps there.
    assert signal == "al" or abs(best.rate.value - target) < 0.15
    assert len(result.trials) <= 8
    loaded = Policy.model_validate(yaml.safe_load(fragment(best.policy, [])))
    again = try_threshold(model, rows, how, loaded, knob, getattr(loaded.trigger, knob.key), full, bootstrap=100)
    assert (again.rate, again.retention) == (best.rate, best.retention)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A recipe with its rollouts, on prompts that are disjoint, and its overrides."""
    folder = tmp_path_factory.mktemp("calibrate")
    recipe = write_recipe(folder)
    other = folder / "held_out.jsonl"
    other.write_text("\n".join(json.dumps({"text": f"omega psi chi number {i}", "row_id": f"p{i}"}) for i in range(3)))
    overrides = ["rollouts.max_new_tokens=32", "eval.draft_length=3", "eval.bootstrap=100", "eval.policies=[full, "
                 "{policy: rift_ada, budget: 8, trigger: {kind: adaptive, check: 4, a_min: 4, a_max: 24}}, "
                 "{policy: fixed_threshold, budget: 8, window: 4}]"]  # fmt: skip
    disjoint = [*overrides, f"prompts.eval.source={other}"]
    assert call("data/rollouts.py", recipe, *disjoint) == 0
    return recipe, overrides, disjoint


def test_rehearsal(written, tmp_path, capsys):
    recipe, overrides, disjoint = written
    common = ("eval/calibrate.py", recipe, *disjoint, "--drafter", "rehearsal:llama", "--rows", "3")
    out = tmp_path / "tau.yaml"
    flags = ("--policy", "fixed_threshold", "--refresh-rate", "0.4", "--out", out)
    assert call(*common, *flags, "--plan") == 0 and "at most 8 times" in capsys.readouterr().out and not out.exists()
    assert call(*common, *flags) == 0
    text = out.read_text()
    policy = Policy.model_validate(yaml.safe_load(text))
    assert policy.policy == "fixed_threshold" and policy.trigger.tau > 0
    assert "3 training rows at T=0" in text and "recipe run, drafter rehearsal:llama" in text
    reached = float(re.search(r"reached (\S+)", text)[1])
    assert abs(reached - 0.4) < 0.1 and f"refresh rate (share of layer-steps) {reached:.3f} [" in text

    # The target is the drafter, so the full cache keeps everything and a budget of 8 does not.
    assert call(*common, "--policy", "1", "--retention", "0.05") == 0
    kept = Policy.model_validate(
        yaml.safe_load((recipe.parent / "runs/run/calibration/rift_ada-drift_above.yaml").read_text())
    )
    assert kept.trigger.drift_above == KNOBS["drift"].reluctant
    capsys.readouterr()
    assert call(*common, "--policy", "1", "--retention", "1.5") == 1
    assert re.search(r"keeps 150.0% .* best reached is \d+\.\d%, at drift_above=", capsys.readouterr().err)


def test_the_evaluation_split_is_never_calibrated_on(written, capsys):
    """The recipe's own prompts: both splits read the same file."""
    recipe, overrides, _ = written
    flags = ("--drafter", "rehearsal:llama", "--policy", "1", "--refresh-rate", "0.5")
    assert call("eval/calibrate.py", recipe, *overrides, *flags) == 2
    assert "is also held out for evaluation" in capsys.readouterr().err


def test_bad_flags_are_one_line(written, capsys):
    recipe, _, disjoint = written
    for flags, said in (
        (("--policy", "9", "--retention", "0.9"), "--policy 9: no such index"),
        (("--policy", "rcr", "--retention", "0.9"), "--policy rcr: none of eval.policies"),
        (("--policy", "0", "--retention", "0.9"), "trigger 'never' has no threshold"),
        (("--policy", "1", "--retention", "95"), "--retention 95"),
        (("--policy", "1", "--refresh-rate", "40"), "--refresh-rate 40"),
        (("--policy", "1", "--refresh-rate", "0.4", "--temperature", "1"), "--temperature 1"),
        (("--policy", "1"), "one of the arguments --refresh-rate --retention is required"),
    ):
        assert call("eval/calibrate.py", recipe, *disjoint, *flags) == 2
        assert said in capsys.readouterr().err
