"""Live speculative decoding with physically evicted caches, compared with replay on the same prompts.

    python eval/live.py RECIPE [key.sub=value ...] [--drafter MODEL] [--prompts N] [--temperature T] [--plan]

At temperature 0 every prompt's output is compared with the stored rollout, and the accepted counts with replay's, block
by block. Differences are reported, not hidden: in fp32 there are none; bf16 rounds otherwise in blocks of other shapes.
"""

import argparse
from typing import TYPE_CHECKING

from rich.table import Table

from draftkv import cli
from draftkv.errors import InputError
from draftkv.recipe import Recipe

if TYPE_CHECKING:
    from torch.nn import Module


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    if args.temperature not in recipe.rollouts.eval_temperatures:
        raise InputError(f"--temperature {args.temperature:g}: the recipe has {recipe.rollouts.eval_temperatures}")
    if args.prompts < 1:
        raise InputError(f"--prompts {args.prompts}: at least 1")
    if args.plan:
        name = args.drafter or recipe.run_dir / "export"
        cli.say(f"decodes {args.prompts} held-out prompts at T={args.temperature:g} with {name} drafting for "
                f"{recipe.target.model}, under {len(recipe.eval.policies)} policies, then replays them")  # fmt: skip
        return
    from draftkv.cache.attention import ATTENTION
    from draftkv.drafter import exported, load_drafter, preflight
    from draftkv.models import load_model, load_tokenizer
    from draftkv.teacher.engine import stop_ids
    from draftkv.teacher.rollouts import held_out_rows, load_rollouts

    name = args.drafter or exported(recipe)
    preflight(recipe, name)
    rows = [r for r in held_out_rows(recipe, load_rollouts(recipe, "eval")) if r["temperature"] == args.temperature]
    rows = rows[: args.prompts]
    drafter, _ = load_drafter(name, None, recipe.target)
    target = load_model(recipe.target.model, recipe.target.revision, "float32")
    target.set_attn_implementation(ATTENTION)
    stops = stop_ids(target, load_tokenizer(recipe.target.model, recipe.target.revision))
    cli.console.print(compare(recipe, target, drafter, rows, stops))


def compare(recipe: Recipe, target: "Module", drafter: "Module", rows: list[dict], stops: set) -> Table:
    """Decode and replay each row under each policy; one line per policy."""
    import torch

    from draftkv.acceptance.live import speculate
    from draftkv.acceptance.replay import replay_row
    from draftkv.acceptance.walk import greedy_blocks

    settings = recipe.eval
    result = Table(title=f"live decoding, draft length {settings.draft_length}, {len(rows)} prompts, fp32")
    for column in ("cache", "AL live", "AL replay", "same output", "same blocks", "entries", "draft s", "verify s"):
        result.add_column(column)
    with cli.progress("live", len(rows) * len(settings.policies)) as advance:
        for policy in settings.policies:
            runs, replays = [], []
            for row in rows:
                generator = torch.Generator().manual_seed(recipe.seed)
                run = speculate(target, drafter, row["prompt_ids"], policy, settings.draft_length,
                                recipe.rollouts.max_new_tokens, stops, row["temperature"], settings.draft,
                                generator)  # fmt: skip
                runs.append((row, run))
                replays.append(replay_row(drafter, row, [policy], settings.draft)[0])
                advance(policy.label)
            emitted = sum(len(r.accepted) + sum(r.accepted) for _, r in runs)
            blocks = sum(r.blocks for _, r in runs)
            walks = [r.walk(settings.draft_length) for r in replays]
            same_text = same_blocks = "-"
            if all(row["temperature"] == 0 for row in rows):
                same_text = str(sum(run.response_ids == row["response_ids"] for row, run in runs))
                same_blocks = str(sum(
                    run.accepted == greedy_blocks(found.flags, settings.draft_length, found.finished)
                    for (_, run), found in zip(runs, replays, strict=True)
                ))  # fmt: skip
            result.add_row(
                policy.label, f"{emitted / max(1, blocks):.3f}",
                f"{sum(w.tokens for w in walks) / sum(w.blocks for w in walks):.3f}", same_text, same_blocks,
                str(max(run.entries for _, run in runs)), f"{sum(run.draft_s for _, run in runs):.1f}",
                f"{sum(run.verify_s for _, run in runs):.1f}",
            )  # fmt: skip
    return result


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--drafter", metavar="MODEL", help="folder or hub id; default: the run's export")
    arguments.add_argument("--prompts", type=int, default=8, help="held-out prompts to decode")
    arguments.add_argument("--temperature", type=float, default=0.0)
    cli.run(main, arguments)
