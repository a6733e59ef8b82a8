"""Fidelity: what one model writes under each cache policy, against its own uncompressed greedy output.

    python eval/fidelity.py RECIPE [key.sub=value ...] [--prompts N] [--max-new-tokens N] [--together N] [--plan]

This is the evaluation of "Drift Says When, Budget Says How Much" (RCR): the recipe's target, text or vision-language,
answers the held-out prompts under `eval.policies` (--model: another model does). Records go to RUN/fidelity.jsonl, and
what is there is not generated again, so a run that was stopped goes on; tables and a picture go to
RUN/report/fidelity.md and fidelity.png.
"""

import argparse

from draftkv import cli
from draftkv.errors import InputError
from draftkv.fidelity.policies import check_policies, reference_of
from draftkv.recipe import Recipe, load_recipe


def main(args: argparse.Namespace) -> None:
    recipe = recipe_without_drafter(args)
    for option, value in (("--prompts", args.prompts), ("--max-new-tokens", args.max_new_tokens),
                          ("--together", args.together)):  # fmt: skip
        if value is not None and value < 1:
            raise InputError(f"{option} {value}: at least 1")
    policies, name = recipe.eval.policies, args.model or recipe.target.model
    revision = None if args.model else recipe.target.revision
    check_policies(policies)
    reference = reference_of(policies)
    if args.plan:
        return plan(recipe, name, reference.label, args)
    import torch

    from draftkv.fidelity.records import Ledger, measure
    from draftkv.fidelity.report import Results, write
    from draftkv.fidelity.stats import rouge_scorer
    from draftkv.fidelity.subject import load_subject, preflight, samples_of
    from draftkv.rundir import lock

    rouge_scorer()  # a missing package shows before weights are loaded
    preflight(name, revision, recipe.prompts.max_prompt_tokens + args.max_new_tokens)
    with lock(recipe.run_dir):
        subject = load_subject(name, revision, recipe.target.dtype,
                               torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # fmt: skip
        count, samples = samples_of(subject, recipe, args.prompts)
        ledger = Ledger(recipe.run_dir / "fidelity.jsonl", args.max_new_tokens)
        with cli.progress("fidelity", count * len(policies)) as advance:
            records = measure(subject, samples, policies, ledger, args.together, advance)
        if not records:
            raise InputError(f"{recipe.prompts.eval.source}: every prompt is longer than prompts.max_prompt_tokens"
                             f" {recipe.prompts.max_prompt_tokens}")  # fmt: skip
        results = Results(policies, records, recipe.eval.bootstrap, recipe.seed)
        for sheet in write(results, recipe.run_dir / "report"):
            cli.console.print(sheet.rich())
    cli.say(f"report: {recipe.run_dir / 'report' / 'fidelity.md'}")


def recipe_without_drafter(args: argparse.Namespace) -> Recipe:
    """The recipe, checked without its drafter and export: neither takes part, and what a drafter's architecture must
    honour says nothing about the target (`preflight` asks that of the target itself)."""
    return load_recipe(args.recipe, [*args.overrides, "drafter={model: 'rehearsal:llama'}", "export={}"])


def plan(recipe: Recipe, name: str, reference: str, args: argparse.Namespace) -> None:
    source, run = recipe.prompts.eval, recipe.run_dir
    prompts = min(filter(None, (args.prompts, source.limit)), default=None)
    cli.say(f"generates with {name} ({recipe.target.dtype}) from {prompts or 'all'} prompts of {source.source},"
            f" at most {args.max_new_tokens} tokens each, greedily, {args.together} policies side by side, under:")
    for policy in recipe.eval.policies:
        mark = "  (reference; drift is measured here)" if policy.label == reference else ""
        cli.say(f"  {policy.label}{mark}")
    cli.say(f"records  {run / 'fidelity.jsonl'} ({'there' if (run / 'fidelity.jsonl').is_file() else 'not there'})")
    cli.say(f"report   {run / 'report' / 'fidelity.md'} and fidelity.png")


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", metavar="MODEL", help="folder or hub id; default: the recipe's target")
    arguments.add_argument("--prompts", type=int, help="held-out prompts to use; default: all of prompts.eval")
    arguments.add_argument("--max-new-tokens", type=int, default=512, help="longest output")
    arguments.add_argument("--together", type=int, default=1, metavar="N",
                           help="policies that decode side by side: faster, equal up to float rounding; a stopped run"
                                " loses N outputs at most")  # fmt: skip
    cli.run(main, arguments)
