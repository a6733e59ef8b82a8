"""The run's export in a serving engine (vLLM, offline), its acceptance length beside replay's on the same texts.

    python eval/engine.py RECIPE [key.sub=value ...] [--prompts N] [--tokens N] [--at-once N] [--plan]

Serves target + RUN/export, and RUN/export-native-window where there is one, on held-out prompts at temperature 0 in
fp32. The engine's speculative output is first compared with its own plain greedy output: where they differ it does not
serve the target any more, and no AL is reported (exit status 1). One text at a time, so that nothing but the drafter
decides what is drafted; with `--at-once` it shows what a batch changes (in vLLM 0.32 a windowed drafter's blocks, not
the output). Needs launch/engine_env.sh; records are appended to RUN/engine.jsonl.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from draftkv import cli
from draftkv.errors import InputError, RunError
from draftkv.recipe import Recipe

if TYPE_CHECKING:
    from draftkv.cache.policy import Policy

RULES = ("T=0, fp32. Accepted: the draft is the target's argmax. First tokens come from prefill and are not drafted."
         " A last block counts in full for the engine (accepted tokens beyond the end too), so for 'replay, alike';"
         " 'replay' leaves it out, as all our tables do. Texts run on past EOS.")  # fmt: skip


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    tokens = args.tokens or recipe.rollouts.max_new_tokens
    if args.prompts < 1 or args.at_once < 1 or tokens < 2:
        raise InputError(f"--prompts {args.prompts} --at-once {args.at_once} --tokens {tokens}: at least 1, 1 and 2")
    if args.plan:
        cli.say(f"serves {recipe.target.model} in vLLM alone, then with {recipe.run_dir / 'export'} (and"
                f" export-native-window) drafting {recipe.eval.draft_length}: {args.prompts} held-out prompts,"
                f" {tokens} tokens each; then replays the texts")  # fmt: skip
        return
    from draftkv.acceptance.score import append_jsonl
    from draftkv.acceptance.served import ServedTarget
    from draftkv.drafter import exported
    from draftkv.teacher.rollouts import plan_rollouts

    folder = Path(exported(recipe))
    prompts = [p.prompt_ids for p in plan_rollouts(recipe)["eval"].prompts.prompts[: args.prompts]]
    more = recipe.eval.draft_length  # so that replay can see how a last block would have gone on
    longest = max(map(len, prompts)) + tokens + more + 1
    cli.say("engine: plain greedy decoding")
    with ServedTarget(recipe, longest, max_num_seqs=args.at_once) as engine:
        plain = engine.write(prompts, tokens + more)
    records, refusals = [], []
    for name, policy, options in cases(folder):
        options["max_num_seqs"] = args.at_once
        cli.say(f"engine: {name} drafts")
        with ServedTarget(recipe, longest, folder.with_name(name), **options) as engine:
            differs = difference_of(engine.write(prompts, tokens), plain)
            counted = None if differs else engine.counted(recipe.eval.draft_length)
        record = {"export": name, "policy": policy.label, "vllm": engine.version, "draft_length": more,
                  "prompts": len(prompts), "tokens": tokens, "options": options | recipe.engine.options,
                  "differs": differs}  # fmt: skip
        if counted is not None:
            alike, ours = replayed(recipe, folder, policy, prompts, plain, tokens)
            record |= {"engine": asdict(counted), "replay_alike": asdict(alike), "replay": asdict(ours)}
        else:
            refusals.append(f"{name}: {differs}")
        append_jsonl(recipe.run_dir / "engine.jsonl", record | {"texts": plain})
        records.append(record)
    cli.console.print(table(records))
    if refusals:
        raise RunError(f"no AL of {'; '.join(refusals)}: the engine does not serve the target then")


def cases(folder: Path) -> list[tuple[str, "Policy", dict[str, Any]]]:
    """Each exported folder's name, the policy to replay the plain export under, and options that vLLM needs."""
    from draftkv.cache.policy import Policy

    found = [("export", Policy(policy="full"), {})]
    native = folder.with_name("export-native-window") / "draft_cache.json"
    if native.is_file():
        policy = Policy.model_validate(json.loads(native.read_text(encoding="utf-8"))["policy"])
        # Without it vLLM 0.32 gives drafter and target one cache group each, and corrupts the target's.
        found.append(("export-native-window", policy, {"disable_hybrid_kv_cache_manager": True}))
    return found


def difference_of(speculative: list[list[int]], plain: list[list[int]]) -> str | None:
    from draftkv.acceptance.served import difference

    return difference(speculative, plain)


def replayed(
    recipe: Recipe, folder: Path, policy: "Policy", prompts: list[list[int]], texts: list[list[int]], tokens: int
) -> tuple:
    """Our counts on the engine's texts: as the engine counts, and in our own way."""
    import torch

    from draftkv.acceptance.replay import Replay
    from draftkv.acceptance.served import counted_as_engines_do, counted_as_we_do
    from draftkv.drafter import load_drafter

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter, vocab = load_drafter(str(folder), None, recipe.target)
    replay, length = Replay(recipe.eval.draft_length, "greedy", vocab=vocab), recipe.eval.draft_length
    flags = []
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        row = {"row_id": str(index), "prompt_ids": prompt, "response_ids": text, "temperature": 0.0,
               "finish_reason": "length", "response_logprobs": []}  # fmt: skip
        flags.append(replay.row(drafter.to(device), row, [policy])[0].flags)
    return counted_as_engines_do(flags, length, tokens), counted_as_we_do(flags, length, tokens)


def table(records: list[dict[str, Any]]) -> Table:
    first = records[0]
    result = Table(title=f"acceptance length in vLLM {first['vllm']}, draft length {first['draft_length']},"
                         f" {first['prompts']} prompts x {first['tokens']} tokens", caption=RULES)  # fmt: skip
    for column in ("cache", "output", "AL engine", "AL replay, alike", "AL replay", "blocks", "accepted"):
        result.add_column(column)
    for record in records:
        cache = f"{record['policy']} ({record['export']})"
        if record["differs"]:
            result.add_row(cache, "differs", "refused", "", "", "", "")
            continue
        engine, alike, ours = (record[name] for name in ("engine", "replay_alike", "replay"))
        al = [f"{1 + counted['accepted'] / counted['blocks']:.3f}" if counted["blocks"] else "-"
              for counted in (engine, alike, ours)]  # fmt: skip
        result.add_row(cache, "equal", *al, *(f"{engine[n]} / {alike[n]}" for n in ("blocks", "accepted")))
    return result


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--prompts", type=int, default=12, metavar="N", help="held-out prompts")
    arguments.add_argument("--tokens", type=int, metavar="N", help="of a text; default: rollouts.max_new_tokens")
    arguments.add_argument("--at-once", type=int, default=1, metavar="N", help="texts in one batch of the engine")
    cli.run(main, arguments)
