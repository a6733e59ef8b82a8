"""Write the report of a run: acceptance length by policy, before and after, as one HTML page and a Markdown twin.

    eval/report.py RECIPE [key.sub=value ...] [--plan]

Reads what the run left in its folder (the folder is the recipe's `output`/`name`) and needs no model.
"""

import argparse

from draftkv.cli import parser, recipe_from, run, say

READS = ("acceptance.jsonl", "metrics.jsonl", "recipe.yaml", "provenance.json")


def main(args: argparse.Namespace) -> None:
    folder = recipe_from(args).run_dir
    if args.plan:
        for name in READS:
            needed = "" if name != READS[0] else ", needed"
            say(f"reads   {folder / name} ({'there' if (folder / name).is_file() else 'not there'}{needed})")
        for name in ("report.html", "report.md", "plots/*.png"):
            say(f"writes  {folder / 'report' / name}")
        return
    # Imported late: the plan needs no plotting library.
    from draftkv.acceptance.report import write_report

    say(f"report: {write_report(folder)}")


if __name__ == "__main__":
    run(main, parser(__doc__.splitlines()[0]))
