"""The target's signal, stored: top-k log-probabilities and the tail's mass at every supervised position.

    python data/signals.py RECIPE [key.sub=value ...] [--plan]

For a target that does not fit beside the drafter: write once where the target fits, then train with
`signal.source=stored`, which never loads it. Needs the training rollouts. A killed run goes on with the next shard.
"""

import argparse
import json
import time

from draftkv import cli
from draftkv.recipe import Recipe, Signal


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    signal = recipe.signal
    if args.plan:
        cli.say(plan_text(recipe, signal))
        cli.say(f"engine: {recipe.engine.text}")
        return
    from draftkv.models import check_pair
    from draftkv.teacher.rollouts import load_rollouts
    from draftkv.teacher.signal_store import SignalPlan, write_signals

    rollouts = load_rollouts(recipe, "train")
    longest = recipe.prompts.max_prompt_tokens + recipe.rollouts.max_new_tokens
    vocab = check_pair(recipe.target, recipe.drafter, longest)
    plan = SignalPlan.of(recipe, rollouts, vocab)
    began = time.monotonic()
    write_signals(recipe, plan)
    abouts = [json.loads(plan.file(i).with_suffix(".json").read_text()) for i in range(len(plan.shards))]
    tokens, size = (sum(a[name] for a in abouts) for name in ("tokens", "bytes"))
    seconds = sum(a["seconds"] for a in abouts)
    cli.say(f"{len(plan.rows)} rows, {tokens:,} positions, {size / max(1, tokens):.0f} bytes each, written at "
            f"{tokens / max(seconds, 1e-9):.0f} positions/s ({time.monotonic() - began:.0f} s now), "
            f"read at {read_rate(recipe, plan):,.0f} positions/s; in {plan.folder}")  # fmt: skip


def plan_text(recipe: Recipe, signal: Signal) -> str:
    """Size of the store, without reading prompts or weights."""
    kept = signal.samples or signal.k
    size = kept * 6 + 4
    text = f"{kept} tokens kept at each position, {size} bytes: {size * 1e9 / 2**30:,.0f} GiB per billion positions"
    limit = recipe.prompts.train.limit
    if limit is not None:
        most = limit * len(set(recipe.rollouts.train_temperatures)) * (recipe.rollouts.max_new_tokens - 1)
        text += f"; at most {most:,} positions here, {most * size / 2**20:,.1f} MiB"
    return text


def read_rate(recipe: Recipe, plan) -> float:
    """Positions per second, rows read in an order of their own."""
    import random

    import torch

    from draftkv.teacher.signal_store import StoredTeacher

    stored = StoredTeacher(plan, recipe.signal.temperature, torch.device("cpu"))
    rows = random.Random(0).sample(plan.rows, len(plan.rows))
    began = time.perf_counter()
    positions = sum(len(stored.read(row)) for row in rows)
    return positions / max(time.perf_counter() - began, 1e-9)


if __name__ == "__main__":
    cli.run(main, cli.parser(__doc__.splitlines()[0]))
