"""Export a finished run as a plain Hugging Face folder with a model card.

    python train/export.py RECIPE [key.sub=value ...] [--native-window] [--plan]
"""

import argparse

from draftkv import cli


def main(args: argparse.Namespace) -> None:
    if args.native_window:
        args.overrides.append("export.native_window=true")
    recipe = cli.recipe_from(args)
    policy = recipe.eval.policies[recipe.eval.select]
    if args.plan:
        window = ", and export-native-window" if recipe.export.native_window else ""
        cli.say(f"reads  {recipe.run_dir}/checkpoints/{recipe.export.checkpoint}, acceptance.jsonl, provenance.json")
        cli.say(f"writes {recipe.run_dir}/export{window} ({recipe.export.dtype})")
        cli.say(f"policy {policy.label}")
        return
    from draftkv import rundir
    from draftkv.distill.export import export_run

    with rundir.lock(recipe.run_dir):
        folders = export_run(recipe)
    cli.say(f"exported to {folders[0]}; weights and logits were compared after a reload")
    for folder in folders[1:]:
        # transformers does not slide a Llama's window, so there are no logits to compare with.
        cli.say(f"exported to {folder}; weights were compared after a reload")


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--native-window", action="store_true", help="also write RUN/export-native-window")
    cli.run(main, arguments)
