"""Calibration: the threshold at which a trigger selects again as often as asked, or as seldom as an AL target allows.

A threshold means nothing across models: RIFT-ada's signals and the drift of a step trigger have scales of their own.
What can be asked for is how often to select again, or what share of the full cache's acceptance length (AL) to keep.

The refresh rate, one definition per level of trigger:
    block triggers (adaptive)        checks at which all layers selected again / checks made
    step triggers (fixed_threshold)  layer-steps at which the layer selected again / layer-steps
A check is made at the first block start at or after every `check` verified tokens; whether the selection's age allows
a refresh is part of the answer, so `a_min` and `a_max` bound the rate. For costs, refreshes per layer and 100 verified
tokens are given beside it.

The search. How often a trigger fires depends on the values that its signal takes, and these depend on when it fired
before, so every try is a whole replay that records the signal. The two ends (never but at `a_max`, and whenever it may)
show what can be reached and how far the values spread; then the bracket is cut at quantiles of all values seen in it.
The rate falls with the threshold in expectation, not surely, so the bracket is reported with the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import yaml
from torch import nn

from draftkv.acceptance import intervals
from draftkv.acceptance.intervals import Counts, Interval
from draftkv.acceptance.replay import Acceptance, Replay
from draftkv.acceptance.score import counts_of
from draftkv.cache.offloaded import OffloadedCache
from draftkv.cache.policy import Policy
from draftkv.cache.triggers import Clock
from draftkv.errors import InputError, RunError

REPLAYS = 8  # of all rows, the two ends included
CLOSE = 0.01  # a refresh rate this near to its target ends the search


@dataclass(frozen=True)
class Knob:
    """A threshold of a trigger.

    Attributes:
        key: the trigger's field.
        signal: what is compared with it: a field of `Signals`, or None for a step trigger's drift.
        eager, reluctant: values at which it fires whenever it may, and never.
    """

    key: str
    signal: str | None
    eager: float
    reluctant: float

    def more_reluctant(self, value: float) -> float:
        """Sort key: grows as the trigger fires less."""
        return value if self.reluctant > self.eager else -value


# Drift of queries is 1 - cosine, at most 2; the drift of a step is a share, at most 1; AL is never below 1.
KNOBS = {
    "drift": Knob("drift_above", "drift", 1e-9, 3.0),
    "entropy": Knob("entropy_above", "entropy", 1e-9, 1e3),
    "al": Knob("al_below", "al", 1e6, 1.0),
}
TAU = Knob("tau", None, 0.0, 2.0)


def knob_of(policy: Policy, signal: str | None) -> Knob:
    """The threshold to calibrate; `signal` names one of RIFT-ada's (default: drift).

    Raises:
        InputError: a trigger without a threshold, or a signal that it does not have.
    """
    kind = policy.trigger.kind
    if kind == "fixed_threshold" and signal in (None, "drift"):
        return TAU
    if kind == "adaptive":
        return KNOBS[signal or "drift"]
    if kind == "fixed_threshold":
        raise InputError(f"--signal {signal}: trigger fixed_threshold looks at the drift alone")
    hint = "; rate_controlled finds its own threshold, give it a `rate`" if kind == "rate_controlled" else ""
    raise InputError(f"policy '{policy.label}': trigger '{kind}' has no threshold to calibrate; adaptive and "
                     f"fixed_threshold do{hint}")  # fmt: skip


def with_threshold(policy: Policy, knob: Knob, value: float) -> Policy:
    """The policy with this threshold, and with the trigger's other signals off."""
    trigger = policy.trigger.model_dump()
    trigger.update({k.key: None for k in KNOBS.values() if k.key in trigger})
    return Policy.model_validate({**policy.model_dump(exclude_unset=True), "trigger": {**trigger, knob.key: value}})


# ------------------------------------------------------------------------------------------------------- one threshold


@dataclass
class _Log:
    """What the trigger saw on one row: values of its signal where the threshold decided, checks made and fired."""

    values: list[float] = field(default_factory=list)
    asked: int = 0
    fired: int = 0


class _RecordingClock(Clock):
    def __init__(self, trigger: Any, signal: str, log: _Log):
        super().__init__(trigger)
        self.signal, self.log = signal, log

    def check(self, verified: int) -> bool:
        age, value = verified - self.selected_at, getattr(self.signals, self.signal)
        fired = super().check(verified)
        self.log.asked += 1
        self.log.fired += fired
        if value is not None and self.trigger.a_min <= age < self.trigger.a_max:
            self.log.values.append(value)
        return fired


class _RecordingCache(OffloadedCache):
    def __init__(self, *args: Any, log: _Log, signal: str | None, **others: Any):
        # The host reads every drift anyway; branching on it gives the same result and selects only where it fired.
        super().__init__(*args, branching=True, **others)
        self.log = log
        if signal is not None:
            self.clock = _RecordingClock(self.policy.trigger, signal, log)

    def _step(self, *args: Any) -> None:
        before, self.cost.drift = self.cost.drift, 0.0  # so that the step adds its own drift alone
        super()._step(*args)
        self.log.values.append(float(self.cost.drift))
        self.cost.drift = before + self.cost.drift


@dataclass(frozen=True, eq=False)
class Trial:
    """One threshold, replayed on all rows.

    Attributes:
        rate: the refresh rate (see the module's docstring), with its interval over rows.
        per_100: refreshes per layer and 100 verified tokens.
        retention: AL / AL of the full cache, paired; al: under the policy.
        asked: checks or layer-steps.
        values: sorted values of the signal where the threshold decided.
    """

    threshold: float
    policy: Policy
    rate: Interval
    per_100: float
    al: Interval
    retention: Interval
    asked: int
    values: np.ndarray


def full_counts(
    model: nn.Module, rows: Sequence[dict[str, Any]], how: Replay, advance: Callable[[], None] = lambda: None
) -> Counts:
    """Blocks and tokens per row under the full cache."""
    walks = []
    for row in rows:
        walks.append(how.row(model, row, [Policy(policy="full")])[0].walk(how.draft_length))
        advance()
    return counts_of(walks)


def try_threshold(
    model: nn.Module,
    rows: Sequence[dict[str, Any]],
    how: Replay,
    policy: Policy,
    knob: Knob,
    value: float,
    full: Counts,
    *,
    bootstrap: int = 2000,
    advance: Callable[[], None] = lambda: None,
) -> Trial:
    """Replay the rows under the policy with this threshold.

    Args:
        full: blocks and tokens of the full cache on the same rows.

    Raises:
        InputError: the rows are too short for a single check.
    """
    policy = with_threshold(policy, knob, value)
    logs, found = [], []
    for row in rows:
        logs.append(_Log())
        executor = partial(_RecordingCache, log=logs[-1], signal=knob.signal)
        found += replace(how, executor=executor).row(model, row, [policy])
        advance()
    steps, refreshed = (np.array([getattr(f.cost, name) for f in found], float) for name in ("steps", "refreshes"))
    asked, fired = steps, refreshed
    if knob.signal is not None:
        asked, fired = (np.array([getattr(log, name) for log in logs], float) for name in ("asked", "fired"))
    if not asked.sum():
        raise InputError(f"none of {len(rows)} rows is long enough for one check of '{policy.label}'")
    return Trial(
        value, policy, intervals.al(Counts(asked, fired), bootstrap, how.seed),
        float(100 * refreshed.sum() / steps.sum()), *_lengths(found, how, full, bootstrap), int(asked.sum()),
        np.sort(np.concatenate([np.array(log.values, float) for log in logs])),
    )  # fmt: skip


def _lengths(found: Sequence[Acceptance], how: Replay, full: Counts, bootstrap: int) -> tuple[Interval, Interval]:
    counts = counts_of([f.walk(how.draft_length) for f in found])
    return intervals.al(counts, bootstrap, how.seed), intervals.retention(counts, full, bootstrap, how.seed)


# ---------------------------------------------------------------------------------------------------------- the search


@dataclass(frozen=True)
class Goal:
    """What is asked for: a refresh rate, or the retention that is to be reached with as few refreshes as possible."""

    kind: Literal["refresh_rate", "retention"]
    target: float

    def value(self, trial: Trial) -> float:
        value = (trial.rate if self.kind == "refresh_rate" else trial.retention).value
        if value is None:
            raise InputError("the rows hold no complete draft block")
        return value

    def reached(self, trial: Trial) -> bool:
        return self.value(trial) >= self.target


@dataclass(frozen=True)
class Result:
    """The trial that was chosen (None: no threshold reaches the retention), all trials from the most reluctant to the
    most eager, and the last bracket: neighbours of which the second reaches the target and the first does not."""

    chosen: Trial | None
    trials: list[Trial]
    bracket: tuple[Trial, Trial] | None


def search(attempt: Callable[[float], Trial], knob: Knob, goal: Goal, replays: int = REPLAYS) -> Result:
    """Find the threshold for `goal` in at most `replays` attempts.

    Raises:
        RunError: a refresh rate outside of what the trigger's ages allow.
    """
    trials = [attempt(knob.reluctant), attempt(knob.eager)]
    low, high = (goal.value(t) for t in trials)
    if goal.kind == "refresh_rate" and not low - CLOSE <= goal.target <= high + CLOSE:
        raise RunError(f"a refresh rate of {goal.target:g} cannot be reached: {knob.key} moves it between {low:.3f} "
                       f"and {high:.3f}; the other keys of the trigger bound it")  # fmt: skip
    while len(trials) < replays and not _close(trials, goal):
        pair = _bracket(trials, goal) or _widest(trials, goal)
        value = pair and _between(pair, trials, goal)
        if value is None:
            break
        trials.append(attempt(value))
        trials.sort(key=lambda t: knob.more_reluctant(t.threshold), reverse=True)
    return Result(_choose(trials, goal), trials, _bracket(trials, goal))


def _close(trials: Sequence[Trial], goal: Goal) -> bool:
    near = min(CLOSE, goal.target / 20)
    return goal.kind == "refresh_rate" and any(abs(goal.value(t) - goal.target) <= near for t in trials)


def _choose(trials: Sequence[Trial], goal: Goal) -> Trial | None:
    if goal.kind == "refresh_rate":
        return min(trials, key=lambda t: abs(goal.value(t) - goal.target))
    return next((t for t in trials if goal.reached(t)), None)


def _bracket(trials: Sequence[Trial], goal: Goal) -> tuple[Trial, Trial] | None:
    """The most reluctant trial that reaches the target and its more reluctant neighbour, which then does not."""
    at = next((i for i, t in enumerate(trials) if goal.reached(t)), 0)
    return (trials[at - 1], trials[at]) if at else None


def _inside(pair: tuple[Trial, Trial], trials: Sequence[Trial]) -> np.ndarray:
    """Values of the signal strictly between two thresholds, over all trials, from the reluctant end to the eager."""
    values = np.sort(np.concatenate([t.values for t in trials]))
    ends = sorted(t.threshold for t in pair)
    values = values[(values > ends[0]) & (values < ends[1])]
    return values if pair[0].threshold < pair[1].threshold else values[::-1]


def _widest(trials: Sequence[Trial], goal: Goal) -> tuple[Trial, Trial] | None:
    """Where nothing reaches the retention yet, not even the eager end: the gap that holds the most values."""
    if goal.kind == "refresh_rate" or any(goal.reached(t) for t in trials):
        return None  # an end is the answer
    pairs = list(zip(trials, trials[1:], strict=False))
    return max(pairs, key=lambda pair: len(_inside(pair, trials)))


def _between(pair: tuple[Trial, Trial], trials: Sequence[Trial], goal: Goal) -> float | None:
    """A threshold between the two of a bracket: for a rate the quantile at which a straight line meets the target,
    else the median. Half-way between two values seen, and short enough to be written down exactly."""
    values = _inside(pair, trials)
    share = 0.5
    if goal.kind == "refresh_rate":
        less, more = (goal.value(t) for t in pair)
        # Not nearer to an end than a tenth: a curved rate would otherwise creep along one side.
        share = float(np.clip((goal.target - less) / (more - less), 0.1, 0.9))
    if not len(values):
        return None
    at = min(int(share * len(values)), len(values) - 1)
    value = float(f"{(values[at - 1] + values[at]) / 2 if at else values[0]:.5g}")
    low, high = sorted(t.threshold for t in pair)
    return value if low < value < high else None


# -------------------------------------------------------------------------------------------------------- what is kept


def fragment(policy: Policy, remarks: Sequence[str]) -> str:
    """YAML of the policy in one line, for `eval.policies` or an override, under remarks on where it comes from."""
    plain = policy.model_dump(mode="json", exclude_unset=True)
    spec = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6).strip()
    assert Policy.model_validate(yaml.safe_load(spec)) == policy, spec
    return "".join(f"# {line}\n" for line in remarks) + spec + "\n"


def check_disjoint(rows: Sequence[dict[str, Any]], held_out: Sequence[tuple[str, str, Sequence[int]]]) -> None:
    """Refuse calibration rows that are held out for evaluation: a threshold that saw them would flatter itself.

    Args:
        rows: calibration rows.
        held_out: (source, row_id, prompt_ids) of every held-out prompt. Turns of one conversation share its row_id up
            to `@turn`, so none of them may be on the other side.

    Raises:
        InputError: a row with the same tokens as a held-out prompt, or of the same conversation.
    """
    stem = lambda source, row_id: (source, row_id.split("@turn")[0])  # noqa: E731
    names = {stem(source, row_id) for source, row_id, _ in held_out}
    prompts = {tuple(ids) for _, _, ids in held_out}
    for row in rows:
        if tuple(row["prompt_ids"]) in prompts or stem(row["source"], row["row_id"]) in names:
            raise InputError(
                f"training row '{row['row_id']}' is also held out for evaluation; thresholds are not calibrated on "
                "rows that they are reported on: change prompts.train or prompts.eval"
            )
