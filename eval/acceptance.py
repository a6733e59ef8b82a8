"""Replay: full-cache and compressed acceptance length of any drafter on the recipe's held-out rollouts.

    python eval/acceptance.py RECIPE [key.sub=value ...] [--drafter FOLDER_OR_HUB_ID] [--plan]

Without --drafter: the run's export. Records are appended to RUN/acceptance.jsonl under the drafter's name.
"""

import argparse

from rich.table import Table

from draftkv import cli
from draftkv.recipe import Recipe


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    if args.plan:
        cli.say(f"replays {args.drafter or recipe.run_dir / 'export'} on the held-out rollouts under:")
        for policy in recipe.eval.policies:
            cli.say(f"  {policy.label}")
        return
    import torch

    from draftkv.acceptance.replay import Replay, evaluate
    from draftkv.acceptance.score import append_jsonl
    from draftkv.drafter import drafter_to_evaluate, exported, preflight
    from draftkv.teacher.rollouts import held_out_rows, load_rollouts

    settings = recipe.eval
    name = args.drafter or exported(recipe)
    preflight(recipe, name)
    rows = held_out_rows(recipe, load_rollouts(recipe, "eval"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, vocab = drafter_to_evaluate(recipe, name)
    with cli.progress("replay", len(rows)) as advance:
        records = evaluate(
            model.to(device), rows, settings.policies, Replay.of(recipe, vocab), bootstrap=settings.bootstrap,
            advance=lambda: advance(""),
        )  # fmt: skip
    for record in records:
        append_jsonl(
            recipe.run_dir / "acceptance.jsonl", {"step": None, "checkpoint": name, "split": "held_out", **record}
        )
    cli.console.print(table(recipe, records))


def table(recipe: Recipe, records: list[dict]) -> Table:
    from draftkv.acceptance.wording import refresh_texts

    result = Table(title=f"acceptance length, draft length {recipe.eval.draft_length}, 95 % intervals over prompts")
    again = any("refresh_rate" in r for r in records)
    extra = ("refresh rate", "reads per step") if again else ()
    for column in ("T", "cache", "AL", "macro", "retention", "prompts", "blocks", "tie rate", *extra):
        result.add_column(column)
    for r in records:
        kept = "" if r["retention"] is None else f"{r['retention']:.1%}"
        al = "-" if r["al"] is None else f"{r['al']:.3f} [{r['al_low']:.3f}, {r['al_high']:.3f}]"
        macro = "-" if r["al_macro"] is None else f"{r['al_macro']:.3f}"
        result.add_row(f"{r['temperature']:g}", r["policy"], al, macro, kept, str(r["prompts"]),
                       f"{r['blocks']:.0f}", f"{r['tie_rate']:.2%}", *(refresh_texts(r) if again else ()))  # fmt: skip
    return result


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--drafter", metavar="MODEL", help="folder or hub id; default: the run's export")
    cli.run(main, arguments)
