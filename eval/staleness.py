"""Staleness: acceptance length and captured attention mass by position in the generation, per cache policy.

    python eval/staleness.py RECIPE [key.sub=value ...] [--drafter MODEL] [--bins N] [--rows N] [--length TOKENS]
                             [--temperature T] [--plan]

Every policy of `eval.policies` runs with its captured mass measured, on the held-out rollouts that are long enough to
reach the last bin. Writes RUN/report/staleness.md and .png, and appends a record per policy to RUN/staleness.jsonl.
What the figures mean is said in `draftkv.acceptance.staleness`.
"""

import argparse
from typing import TYPE_CHECKING, Any

from rich.table import Table

from draftkv import cli
from draftkv.errors import InputError
from draftkv.recipe import Recipe

if TYPE_CHECKING:
    from draftkv.acceptance.staleness import Axis


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    if args.temperature not in recipe.rollouts.eval_temperatures:
        raise InputError(f"--temperature {args.temperature:g}: the recipe has {recipe.rollouts.eval_temperatures}")
    if args.rows is not None and args.rows < 1:
        raise InputError(f"--rows {args.rows}: at least 1")
    from draftkv.acceptance.staleness import Axis

    axis = Axis.of(args.length or recipe.rollouts.max_new_tokens, recipe.eval.draft_length, args.bins)
    if args.plan:
        cli.say(f"replays {args.drafter or recipe.run_dir / 'export'} on held-out rollouts at T={args.temperature:g} "
                f"of at least {axis.length} response tokens, in {len(axis.edges) - 1} bins of positions "
                f"{axis.edges[0]} to {axis.edges[-1]}, under:")  # fmt: skip
        for policy in recipe.eval.policies:
            cli.say(f"  {policy.label}")
        return
    import torch

    from draftkv.acceptance.replay import Replay
    from draftkv.drafter import drafter_to_evaluate, exported, preflight
    from draftkv.teacher.rollouts import held_out_rows, load_rollouts

    name = args.drafter or exported(recipe)
    preflight(recipe, name)
    rows = [r for r in held_out_rows(recipe, load_rollouts(recipe, "eval")) if r["temperature"] == args.temperature]
    rows, about = long_enough(rows, axis, args.rows)
    cli.say(about)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, vocab = drafter_to_evaluate(recipe, name)
    model, how = model.to(device), Replay.of(recipe, vocab, measure=True)
    found = []
    with cli.progress("staleness", len(rows) * len(recipe.eval.policies)) as advance:
        for row in rows:
            here = []
            for policy in recipe.eval.policies:
                here += how.row(model, row, [policy])
                advance(policy.label)
            found.append(here)
    report(recipe, name, args.temperature, axis, found, about)


def long_enough(rows: list[dict], axis: "Axis", limit: int | None) -> tuple[list[dict], str]:
    """The rows that reach the last bin (the first `limit` of them), and a line that says how many do not.

    Raises:
        InputError: none does.
    """
    kept = [row for row in rows if axis.reaches(row)]
    if not kept:
        longest = max(len(row["response_ids"]) for row in rows)
        raise InputError(f"none of {len(rows)} held-out rows has {axis.length} response tokens; the longest has "
                         f"{longest}: give --length")  # fmt: skip
    used = kept[:limit]
    others = f"; {len(kept) - len(used)} more were not asked for" if len(used) < len(kept) else ""
    return used, (
        f"{len(used)} rows of at least {axis.length} response tokens enter every bin; "
        f"{len(rows) - len(kept)} of {len(rows)} held-out rows are too short and are left out{others}."
    )


def report(recipe: Recipe, name: str, temperature: float, axis: "Axis", found: list[list], about: str) -> None:
    """Write the record, the page and the picture; print the table and what the intervals allow to say."""
    from draftkv.acceptance.score import append_jsonl
    from draftkv.acceptance.staleness import finding, markdown, measure, picture, sentence
    from draftkv.rundir import write_atomic

    settings = recipe.eval
    records = measure(found, settings.policies, axis, settings.draft_length, settings.bootstrap, recipe.seed)
    mode = "greedy" if temperature == 0 else settings.draft
    for record in records:
        append_jsonl(recipe.run_dir / "staleness.jsonl", {
            "checkpoint": name, "split": "held_out", "temperature": temperature, "draft": mode,
            "draft_length": settings.draft_length, **record,
        })  # fmt: skip
    title = f"Staleness: {recipe.name}, T={temperature:g}, draft length {settings.draft_length}"
    folder = recipe.run_dir / "report"
    write_atomic(folder / "staleness.md", markdown(title, [f"Drafter: {name}. {about}"], records))
    (folder / "staleness.png").write_bytes(picture(title, records))
    cli.console.print(table(title, records))
    for line in (finding(records), *map(sentence, records), f"report: {folder / 'staleness.md'}"):
        cli.say(line)


def table(title: str, records: list[dict[str, Any]]) -> Table:
    from draftkv.acceptance.staleness import HEAD, cells

    result = Table(title=f"{title}; 95 % intervals over {records[0]['prompts']} prompts")
    for column in HEAD:
        result.add_column(column)
    for record in records:
        result.add_row(*cells(record))
    return result


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--drafter", metavar="MODEL", help="folder or hub id; default: the run's export")
    arguments.add_argument("--bins", type=int, help="ranges of response positions; default: as many as fit, at most 8")
    arguments.add_argument("--rows", type=int, help="use the first N rows that are long enough; default: all")
    arguments.add_argument("--length", type=int, metavar="TOKENS",
                           help="response tokens that the bins span; default: rollouts.max_new_tokens")  # fmt: skip
    arguments.add_argument("--temperature", type=float, default=0.0)
    cli.run(main, arguments)
