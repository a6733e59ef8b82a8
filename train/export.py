"""Export a finished run as a plain Hugging Face folder with a model card.

    python train/export.py RECIPE [key.sub=value ...] [--native-window] [--plan]
"""

import argparse

from draftkv import cli


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    native = args.native_window or recipe.export.native_window
    policy = recipe.eval.policies[recipe.eval.select]
    if args.plan:
        cli.say(f"reads  {recipe.run_dir}/checkpoints/{recipe.export.checkpoint}, acceptance.jsonl, provenance.json")
        cli.say(f"writes {recipe.run_dir}/export ({recipe.export.dtype}{', native window' if native else ''})")
        cli.say(f"policy {policy.label}")
        return
    from draftkv import rundir
    from draftkv.distill.export import export_run

    with rundir.lock(recipe.run_dir):
        folder = export_run(recipe, native)
    cli.say(f"exported to {folder}; weights and logits were compared after a reload")


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--native-window", action="store_true", help="also write layer_types and sliding_window")
    cli.run(main, arguments)
