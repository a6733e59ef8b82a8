"""Calibrate: find a trigger's threshold for a refresh rate, or for a share of full-cache acceptance length to keep.

    python eval/calibrate.py RECIPE [key.sub=value ...] --policy INDEX_OR_PRESET (--refresh-rate R | --retention R)
                             [--signal al|entropy|drift] [--drafter MODEL] [--rows N] [--temperature T]
                             [--out FILE.yaml] [--plan]

The policy is one of `eval.policies`, with trigger `adaptive` (one signal at a time, the others off) or
`fixed_threshold`. Thresholds are found on TRAINING rollouts, by 8 replays at most; a row that is also held out is
refused. The refresh rate is the share of checks (adaptive) or of layer-steps (fixed_threshold) that select again.
`--retention R` takes the threshold that selects again least among those that keep R of the full cache's acceptance
length; if none does, the exit status is 1. Writes a policy for `eval.policies`, in one line, to
RUN/calibration/PRESET-KEY.yaml.
"""

import argparse
import random
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from draftkv import cli
from draftkv.cache.policy import Policy
from draftkv.errors import InputError, RunError
from draftkv.recipe import Recipe

if TYPE_CHECKING:
    from draftkv.acceptance.calibrate import Goal, Knob, Result, Trial


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    policy = policy_of(recipe, args.policy)
    _check(args, recipe)
    from draftkv.acceptance.calibrate import REPLAYS, Goal, full_counts, knob_of, search, try_threshold

    knob = knob_of(policy, args.signal)
    kind, target = ("refresh_rate", args.refresh_rate) if args.retention is None else ("retention", args.retention)
    goal = Goal(kind, target)
    out = Path(args.out) if args.out else recipe.run_dir / "calibration" / f"{policy.policy}-{knob.key}.yaml"
    if args.plan:
        cli.say(f"calibrates {knob.key} of '{policy.label}' for {goal.kind} {goal.target:g}")
        cli.say(f"replays {args.rows} training rollouts at T={args.temperature:g} with "
                f"{args.drafter or recipe.run_dir / 'export'}: once with the full cache and at most {REPLAYS} times "
                f"under the policy; writes {out}")  # fmt: skip
        return
    import torch

    from draftkv.acceptance.replay import Replay
    from draftkv.drafter import drafter_to_evaluate, exported, preflight

    name = args.drafter or exported(recipe)
    preflight(recipe, name)
    rows = calibration_rows(recipe, args.temperature, args.rows)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, vocab = drafter_to_evaluate(recipe, name)
    model, how = model.to(device), Replay.of(recipe, vocab)
    with cli.progress(f"calibrate {knob.key}, at most", len(rows) * (REPLAYS + 1)) as advance:
        full = full_counts(model, rows, how, lambda: advance("full"))

        def attempt(value: float) -> "Trial":
            return try_threshold(model, rows, how, policy, knob, value, full, bootstrap=recipe.eval.bootstrap,
                                 advance=lambda: advance(f"{knob.key}={value:g}"))  # fmt: skip

        result = search(attempt, knob, goal)
    cli.console.print(table(result, knob))
    keep(recipe, name, rows, knob, goal, result, out)


def _check(args: argparse.Namespace, recipe: Recipe) -> None:
    """Raises: InputError for a flag's value that makes no sense."""
    if args.temperature not in recipe.rollouts.train_temperatures:
        raise InputError(f"--temperature {args.temperature:g}: the training rollouts have "
                         f"{recipe.rollouts.train_temperatures}")  # fmt: skip
    if args.rows < 1:
        raise InputError(f"--rows {args.rows}: at least 1")
    if args.refresh_rate is not None and not 0 < args.refresh_rate <= 1:
        raise InputError(f"--refresh-rate {args.refresh_rate:g}: a share, above 0 and at most 1")
    if args.retention is not None and not 0 < args.retention < 10:
        raise InputError(f"--retention {args.retention:g}: a share of the full cache's acceptance length, such as 0.95")


def policy_of(recipe: Recipe, text: str) -> Policy:
    """The policy of `eval.policies` that an index or a preset's name means.

    Raises:
        InputError: there is none, or a name that means several.
    """
    policies = recipe.eval.policies
    listed = ", ".join(f"{i}: {p.label}" for i, p in enumerate(policies))
    if text.lstrip("-").isdigit():
        if not -len(policies) <= int(text) < len(policies):
            raise InputError(f"--policy {text}: no such index; eval.policies holds {listed}")
        return policies[int(text)]
    found = [p for p in policies if p.policy == text]
    if len(found) == 1:
        return found[0]
    raise InputError(f"--policy {text}: {len(found) or 'none'} of eval.policies; give an index, or another list by an "
                     f"override; it holds {listed}")  # fmt: skip


def calibration_rows(recipe: Recipe, temperature: float, limit: int) -> list[dict]:
    """Training rows of one temperature, a seeded subset of `limit`, none of which is held out.

    Raises:
        InputError: see `check_disjoint`; or there are no usable rows.
    """
    from draftkv.acceptance.calibrate import check_disjoint
    from draftkv.teacher.rollouts import load_rollouts, plan_rollouts

    plans = plan_rollouts(recipe)
    rollouts = load_rollouts(recipe, "train", plan=plans["train"])
    rows = rollouts.rows(temperature)
    if not rows:
        raise InputError(f"{rollouts.path}: no usable training row at temperature {temperature:g}; {rollouts.counts}")
    held_out = [(p.source, p.row_id, p.prompt_ids) for p in plans["eval"].prompts.prompts]
    check_disjoint(rows, held_out)
    if limit >= len(rows):
        return rows
    chosen = random.Random(f"calibrate/{recipe.seed}").sample(range(len(rows)), limit)
    return [rows[i] for i in sorted(chosen)]


def table(result: "Result", knob: "Knob") -> Table:
    rows = result.trials[0].retention.prompts
    shown = Table(title=f"thresholds tried, from seldom to often; 95 % intervals over {rows} rows")
    for column in (knob.key, "refresh rate", "per 100 tokens", "AL", "retention"):
        shown.add_column(column)
    for trial in result.trials:
        mark = " *" if trial is result.chosen else ""
        shown.add_row(f"{trial.threshold:g}{mark}", figure(trial.rate), f"{trial.per_100:.2f}", figure(trial.al),
                      figure(trial.retention))  # fmt: skip
    return shown


def figure(interval) -> str:
    return "-" if interval.value is None else f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def keep(recipe: Recipe, name: str, rows: list[dict], knob: "Knob", goal: "Goal", result: "Result", out: Path) -> None:
    """Write the policy with its threshold, or fail when none reaches the target.

    Raises:
        RunError: no threshold keeps the retention.
    """
    from draftkv.acceptance.calibrate import fragment
    from draftkv.rundir import write_atomic

    best = result.chosen
    if best is None:
        best = max(result.trials, key=goal.value)
        raise RunError(f"no {knob.key} keeps {goal.target:.1%} of the full cache's acceptance length; the best reached "
                       f"is {goal.value(best):.1%}, at {knob.key}={best.threshold:g} with refresh rate "
                       f"{best.rate.value:.3f}")  # fmt: skip
    what = "checks" if knob.signal else "layer-steps"
    remarks = [
        f"{knob.key} calibrated for {goal.kind} {goal.target:g}; reached {goal.value(best):.3f}",
        f"recipe {recipe.name}, drafter {name}, draft length {recipe.eval.draft_length}",
        f"{len(rows)} training rows at T={rows[0]['temperature']:g}, seed {recipe.seed}; {best.asked} {what}",
        f"refresh rate (share of {what}) {figure(best.rate)}; {best.per_100:.2f} refreshes per layer and 100 tokens",
        f"acceptance length {figure(best.al)}; retention {figure(best.retention)}",
    ]
    if result.bracket:
        ends = " and ".join(f"{goal.value(t):.3f} at {t.threshold:g}" for t in result.bracket)
        remarks.append(f"bracket: {ends}")
    if goal.kind == "refresh_rate" and abs(goal.value(best) - goal.target) > 0.05:
        remarks.append("far from its target: the rate jumps within the bracket, or more rows are needed to tell")
    text = fragment(best.policy, remarks)
    write_atomic(out, text)
    cli.say(text.rstrip())
    cli.say(f"written: {out}")


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--policy", required=True, metavar="INDEX_OR_PRESET", help="one of eval.policies")
    goals = arguments.add_mutually_exclusive_group(required=True)
    goals.add_argument("--refresh-rate", type=float, metavar="R", help="share of checks or layer-steps that refresh")
    goals.add_argument("--retention", type=float, metavar="R", help="share of full-cache AL to keep, e.g. 0.95")
    arguments.add_argument("--signal", choices=("al", "entropy", "drift"), help="of trigger adaptive; default: drift")
    arguments.add_argument("--drafter", metavar="MODEL", help="folder or hub id; default: the run's export")
    arguments.add_argument("--rows", type=int, default=16, help="training rows, a seeded subset (default: 16)")
    arguments.add_argument("--temperature", type=float, default=0.0)
    arguments.add_argument("--out", metavar="FILE.yaml", help="default: RUN/calibration/PRESET-KEY.yaml")
    cli.run(main, arguments)
