"""The target writes its responses: prompts -> chat template -> responses with log-probabilities -> a store.

    python data/rollouts.py RECIPE [key.sub=value ...] [--plan] [--show N]

Writes the training rollouts and the held-out ones (`rollouts.train_temperatures`, `rollouts.eval_temperatures`). What
is there already is kept: a killed run goes on where it stopped, and a changed recipe writes another store.
"""

import argparse

from rich.table import Table

from draftkv import cli, models
from draftkv.recipe import Recipe
from draftkv.teacher.rollouts import Rollouts, ensure_rollouts, plan_rollouts, seconds_spent


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    if args.plan:
        plan(recipe)
        return
    plans = plan_rollouts(recipe)
    stores = {split: ensure_rollouts(recipe, split, plan=plans[split]) for split in plans}
    for split, store in stores.items():
        show(recipe, split, store, args.show)
    cli.console.print(summary(stores))
    for split, store in stores.items():
        cli.say(f"{split}: {totals(store)}")


def plan(recipe: Recipe) -> None:
    """What would be written, without reading prompts or weights."""
    cli.say(recipe.as_yaml())
    cli.say(f"engine: {recipe.engine.text}")
    sampling = recipe.rollouts
    for split, source, temperatures in (
        ("train", recipe.prompts.train, sampling.train_temperatures),
        ("eval", recipe.prompts.eval, sampling.eval_temperatures),
    ):
        prompts = "all usable prompts" if source.limit is None else f"up to {source.limit} prompts"
        text = f"{split}: {prompts} of {source.source} at temperatures {temperatures}"
        if source.limit is not None:
            rows = source.limit * len(set(temperatures))
            text += f": up to {rows} responses, {rows * sampling.max_new_tokens:,} tokens to write"
            text += f" after at most {rows * recipe.prompts.max_prompt_tokens:,} prompt tokens"
        cli.say(text)


def show(recipe: Recipe, split: str, store: Rollouts, count: int) -> None:
    """Print the first `count` rows as text."""
    if count < 1:
        return
    tokenizer = models.load_tokenizer(recipe.target.model, recipe.target.revision)
    for row in store.rows()[:count]:
        cli.console.rule(f"{split}  {row['row_id']}  T={row['temperature']:g}  {row['finish_reason']}")
        cli.say(tokenizer.decode(row["prompt_ids"]))
        cli.say("----- the target's response -----")
        cli.say(tokenizer.decode(row["response_ids"]))


def summary(stores: dict[str, Rollouts]) -> Table:
    """One line for every split, category and temperature; lengths in tokens."""
    table = Table(title="rollouts", caption="repeats: share of 8-grams / 32-grams that occurred before in the response")
    for name in ("split", "category", "T", "rows", "prompt", "response", "stopped", "repeats"):
        table.add_column(name, justify="left" if name in ("split", "category") else "right")
    for split, store in stores.items():
        groups: dict[tuple, list[dict]] = {}
        for row in store.rows():
            groups.setdefault((row["category"], row["temperature"]), []).append(row)
        for (category, temperature), rows in sorted(groups.items()):
            table.add_row(split, category, f"{temperature:g}", *_statistics(rows))
        table.add_section()
    return table


def totals(store: Rollouts) -> str:
    """Rows, tokens, speed, what was skipped and why, and where the store lies."""
    written, seconds = sum(map(len, store.dataset["response_ids"])), seconds_spent(store)
    skipped = ", ".join(f"{n} {reason}" for reason, n in store.counts["skipped"].items()) or "none"
    speed = f" ({written / seconds:.0f} tokens/s)" if seconds else ""
    return f"{store.counts['used']} rows, {written:,} tokens{speed}, skipped: {skipped}; in {store.path}"


def _statistics(rows: list[dict]) -> list[str]:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return [
        str(len(rows)),
        f"{mean([len(r['prompt_ids']) for r in rows]):.0f}",
        f"{mean([len(r['response_ids']) for r in rows]):.0f}",
        f"{mean([r['finish_reason'] == 'stop' for r in rows]):.0%}",
        f"{mean([r['repeat_8'] for r in rows]):.0%} / {mean([r['repeat_32'] for r in rows]):.0%}",
    ]


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--show", type=int, default=0, metavar="N", help="print N decoded examples of each split")
    cli.run(main, arguments)
