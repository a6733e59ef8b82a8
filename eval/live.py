"""Live speculative decoding with physically evicted caches, compared with replay on the same prompts.

    python eval/live.py RECIPE [key.sub=value ...] [--drafter MODEL] [--prompts N] [--temperature T] [--delta D ...]
                        [--plan]

At temperature 0 replay reads what live decoding wrote, and "same blocks" counts the prompts whose accepted drafts agree
with it, block by block: in fp32, all of them. "same output" is for information: how many texts equal the stored
rollout, which was written in `rollouts.dtype` and in batches, so a near tie may fall otherwise. Above temperature 0
live decoding draws its own texts and replay reads the stored rollouts: the two ALs agree up to chance.

Where policies select again, a second table says what that cost: measured, rejected drafts included. `--delta` runs
every policy with trigger `every` once per interval.
"""

import argparse
from typing import TYPE_CHECKING

from rich.table import Table

from draftkv import cli
from draftkv.errors import InputError
from draftkv.recipe import Recipe

if TYPE_CHECKING:
    from torch.nn import Module

    from draftkv.acceptance.live import LiveRun
    from draftkv.cache.policy import Policy
    from draftkv.cache.scene import Notes


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    if args.temperature not in recipe.rollouts.eval_temperatures:
        raise InputError(f"--temperature {args.temperature:g}: the recipe has {recipe.rollouts.eval_temperatures}")
    if args.prompts < 1:
        raise InputError(f"--prompts {args.prompts}: at least 1")
    if args.delta:
        recipe = at_intervals(recipe, args.delta)
    if args.plan:
        name = args.drafter or recipe.run_dir / "export"
        cli.say(f"decodes {args.prompts} held-out prompts at T={args.temperature:g} with {name} drafting for "
                f"{recipe.target.model}, under {len(recipe.eval.policies)} policies, then replays them")  # fmt: skip
        return
    import torch

    from draftkv.cache.attention import ATTENTION
    from draftkv.drafter import drafter_to_evaluate, exported, preflight
    from draftkv.models import load_model, load_tokenizer
    from draftkv.teacher.engine import stop_ids
    from draftkv.teacher.rollouts import held_out_rows, load_rollouts

    name = args.drafter or exported(recipe)
    preflight(recipe, name)
    rows = [r for r in held_out_rows(recipe, load_rollouts(recipe, "eval")) if r["temperature"] == args.temperature]
    rows = rows[: args.prompts]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter, vocab = drafter_to_evaluate(recipe, name)
    target = load_model(recipe.target.model, recipe.target.revision, "float32")
    target.set_attn_implementation(ATTENTION)
    stops = stop_ids(target, load_tokenizer(recipe.target.model, recipe.target.revision))
    for table in compare(recipe, target.to(device), drafter.to(device), rows, stops, vocab):
        cli.console.print(table)


def at_intervals(recipe: Recipe, deltas: list[int]) -> Recipe:
    """The recipe with every policy of trigger `every` once per interval.

    Raises:
        InputError: an interval below 1, or no such policy.
    """
    from draftkv.cache.policy import Policy

    if min(deltas) < 1:
        raise InputError(f"--delta {min(deltas)}: at least 1 token")
    policies = []
    for policy in recipe.eval.policies:
        if policy.trigger.kind != "every":
            policies.append(policy)
            continue
        for delta in deltas:
            trigger = policy.trigger.model_copy(update={"delta": delta})
            policies.append(Policy.model_validate({**policy.model_dump(), "trigger": trigger.model_dump()}))
    if len(policies) == len(recipe.eval.policies) and all(p.trigger.kind != "every" for p in policies):
        raise InputError("--delta: eval.policies has no policy with trigger 'every', such as rift_dyn")
    policies = list({p.label: p for p in policies}.values())  # two that differed in delta alone are one now
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"policies": policies})})


def compare(
    recipe: Recipe, target: "Module", drafter: "Module", rows: list[dict], stops: set, vocab: int | None = None
) -> list[Table]:
    """Decode and replay each row under each policy; one line per policy, and the cost of those that select again. All
    rows are of one temperature."""
    from draftkv.acceptance.replay import Replay
    from draftkv.acceptance.walk import block_tokens, greedy_blocks

    settings = recipe.eval
    replay = Replay(settings.draft_length, settings.draft, vocab=vocab, seed=recipe.seed)
    result = Table(title=f"live decoding, draft length {settings.draft_length}, {len(rows)} prompts, fp32")
    for column in ("cache", "AL live", "AL replay", "same output", "same blocks", "entries", "draft s", "verify s"):
        result.add_column(column)
    costs = Table(title="what selecting again cost the drafter, prefill excluded")
    for column in ("cache", "draft steps", "refresh rate", "share of draft time", "reads per step", "attended",
                   "to host", "to device"):  # fmt: skip
        costs.add_column(column)
    with cli.progress("live", len(rows) * len(settings.policies)) as advance:
        for policy in settings.policies:
            runs, replays = [], []
            for row in rows:
                notes = answer_notes(drafter, row, policy)
                run = decode(recipe, target, drafter, row, policy, stops, vocab, notes)
                written = row if row["temperature"] else run.as_row(row["prompt_ids"], row["row_id"])
                runs.append(run)
                replays.append(replay.row(drafter, written, [policy], notes)[0])
                advance(policy.label)
            emitted = sum(block_tokens(run.accepted, len(run.response_ids), run.finished) for run in runs)
            walks = [found.walk(settings.draft_length) for found in replays]
            same_text = same_blocks = "-"
            if all(row["temperature"] == 0 for row in rows):
                pairs = zip(runs, rows, strict=True)
                same_text = str(sum(run.response_ids == row["response_ids"] for run, row in pairs))
                same_blocks = str(sum(
                    run.accepted == greedy_blocks(found.flags, settings.draft_length, found.finished)
                    for run, found in zip(runs, replays, strict=True)
                ))  # fmt: skip
            result.add_row(
                policy.label, ratio(emitted, sum(run.blocks for run in runs)),
                ratio(sum(w.tokens for w in walks), sum(w.blocks for w in walks)), same_text, same_blocks,
                str(max(run.entries for run in runs)), f"{sum(run.draft_s for run in runs):.1f}",
                f"{sum(run.verify_s for run in runs):.1f}",
            )  # fmt: skip
            if policy.reselects:
                costs.add_row(policy.label, *cost_cells(runs))
    return [result, costs] if costs.row_count else [result]


def cost_cells(runs: list["LiveRun"]) -> list[str]:
    """Draft steps; share of layer-steps that selected again; share of drafting seconds spent on it; vectors read from
    the store per step and KV head; entries attended per step; bytes moved per draft step in either direction."""
    steps, layer_steps = sum(r.draft_steps for r in runs), sum(r.cost.steps for r in runs)
    total = lambda name: sum(getattr(r.cost, name) for r in runs)  # noqa: E731
    moved = [sum(r.moved_bytes[way] for r in runs) / max(1, steps) for way in ("to_host", "to_device")]
    seconds = sum(r.draft_s for r in runs) or 1.0  # no block was drafted
    return [str(steps), f"{total('refreshes') / max(1, layer_steps):.1%}", f"{total('seconds') / seconds:.1%}",
            f"{total('reads') / max(1, layer_steps):.1f}", str(max(r.entries for r in runs)),
            *(f"{size / 1024:.1f} KiB" for size in moved)]  # fmt: skip


def decode(
    recipe: Recipe, target: "Module", drafter: "Module", row: dict, policy: "Policy", stops: set, vocab: int | None,
    notes: "Notes | None" = None,
) -> "LiveRun":
    """One prompt, live; the seed and the row alone decide its draws."""
    import torch

    from draftkv.acceptance.live import speculate
    from draftkv.teacher.engine import row_seed

    generator = torch.Generator().manual_seed(row_seed(recipe.seed, row["row_id"], row["temperature"]))
    return speculate(target, drafter, row["prompt_ids"], policy, recipe.eval.draft_length,
                     recipe.rollouts.max_new_tokens, stops, row["temperature"], recipe.eval.draft, generator,
                     vocab, notes)  # fmt: skip


def answer_notes(drafter: "Module", row: dict, policy: "Policy") -> "Notes | None":
    """What an oracle is told: the drafter's uncompressed attention over the stored rollout, live and in replay."""
    from draftkv.cache.oracle import oracle_notes

    return oracle_notes(drafter, row["prompt_ids"], row["response_ids"]) if policy.needs_answer else None


def ratio(tokens: float, blocks: float) -> str:
    from draftkv.acceptance.walk import MIN_BLOCKS

    return f"{tokens / blocks:.3f}" if blocks > MIN_BLOCKS else "-"


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--drafter", metavar="MODEL", help="folder or hub id; default: the run's export")
    arguments.add_argument("--prompts", type=int, default=8, help="held-out prompts to decode")
    arguments.add_argument("--temperature", type=float, default=0.0)
    arguments.add_argument("--delta", type=int, nargs="+", metavar="D", help="intervals of the `every` trigger to try")
    cli.run(main, arguments)
