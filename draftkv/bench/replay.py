"""Replay against live speculative decoding, checked to agree."""

import argparse
from functools import partial
from typing import Any

from draftkv.bench.measure import Row, clock, measure
from draftkv.cache.policy import Policy

POLICIES = ["full", "swa", "streaming", "snapkv", "rift_stat"]


def replay_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--recipe", help="its held-out prompts, lengths, policies, target and drafter")
    options.add_argument("--model", default="embedded:smollm2-135m", help="without a recipe: target and drafter")
    options.add_argument("--layers", type=int, nargs="+", help="without a recipe: the drafter keeps these layers (all)")
    options.add_argument("--source", default="embedded:prose", help="without a recipe: where prompts come from")
    options.add_argument("--prompt", type=int, default=512, help="without a recipe: longest prompt in tokens (512)")
    options.add_argument("--policy", nargs="+", default=POLICIES, help="without a recipe: presets, budget prompt/4")
    options.add_argument("--tokens", type=int, default=128, help="longest response (128)")
    options.add_argument("--draft-length", type=int, default=7)
    options.add_argument("--rows", type=int, default=2)
    options.add_argument("--repeats", type=int, default=2, help="replays of each row, the best counts (2)")


def replay_rows(args: argparse.Namespace) -> list[Row]:
    settings = {name: value for name, value in vars(args).items() if name not in ("bench", "json")}
    return measure("replay", **settings)["rows"]


def replay_worker(**settings: Any) -> Row:
    """Every row and policy, live (prefills included) and by replay of what the first live run wrote, in one process."""
    from draftkv.acceptance.live import speculate
    from draftkv.acceptance.replay import Replay
    from draftkv.acceptance.walk import block_tokens, greedy_blocks

    args = argparse.Namespace(**settings)
    target, drafter, stops, policies, prompts = _replay_setting(args)
    replay = Replay(args.draft_length)
    sums = [dict.fromkeys(("live", "drafting", "alone", "shared", "tokens", "blocks", "same"), 0.0) for _ in policies]
    for prompt in prompts:
        decode = partial(speculate, target, drafter, prompt)
        live = [clock(partial(decode, p, args.draft_length, args.tokens, stops), 1) for p in policies]
        row = live[0][0].as_row(prompt, "row")
        found, together = clock(partial(replay.row, drafter, row, policies), args.repeats)
        for (run, seconds), policy, mine, total in zip(live, policies, found, sums, strict=True):
            _, alone = clock(partial(replay.row, drafter, row, [policy]), args.repeats)
            blocks = greedy_blocks(mine.flags, args.draft_length, mine.finished)
            same = run.response_ids == row["response_ids"] and run.accepted == blocks
            spent = (seconds, run.draft_s / (run.draft_s + run.verify_s), alone, together / len(policies))
            counts = (block_tokens(run.accepted, len(run.response_ids), run.finished), run.blocks, same)
            for name, value in zip(total, (*spent, *counts), strict=True):
                total[name] += value
    return {"rows": [_replay_line(p.label, t, len(prompts)) for p, t in zip(policies, sums, strict=True)]
            + [_replay_line("all", {k: sum(t[k] for t in sums) for k in sums[0]}, len(prompts) * len(policies))]}


def _replay_line(label: str, total: Row, runs: int) -> Row:
    live, drafting, alone, shared = (total[k] / runs for k in ("live", "drafting", "alone", "shared"))
    return {
        "cache": label, "same blocks": f"{int(total['same'])}/{runs}", "AL": total["tokens"] / max(1, total["blocks"]),
        "live s": live, "drafting share": drafting, "replay alone s": alone, "live/alone": live / alone,
        "replay shared s": shared, "live/shared": live / shared,
    }


def _replay_setting(args: argparse.Namespace) -> tuple[Any, Any, set[int], list[Policy], list[list[int]]]:
    """Target, drafter, ids that end a response, policies, prompts as ids. A recipe's settings go before the flags'."""
    from draftkv.cache.attention import ATTENTION
    from draftkv.drafter import load_drafter
    from draftkv.models import load_model, load_tokenizer
    from draftkv.recipe import Drafter, Model, PromptSource, load_recipe
    from draftkv.teacher.engine import stop_ids
    from draftkv.teacher.prompts import load_prompts

    spec, own = Model(model=args.model), Drafter(layers=args.layers)
    policies = [Policy(policy=p, budget=None if p == "full" else 0.25) for p in args.policy]
    source = PromptSource(source=args.source, split="held_out")
    if args.recipe:
        recipe = load_recipe(args.recipe)
        spec, own, policies, source = recipe.target, recipe.drafter, list(recipe.eval.policies), recipe.prompts.eval
        args.prompt, args.tokens = recipe.prompts.max_prompt_tokens, recipe.rollouts.max_new_tokens
        args.draft_length = recipe.eval.draft_length
    tokenizer = load_tokenizer(spec.model, spec.revision)
    found = load_prompts(source.model_copy(update={"limit": args.rows}), tokenizer, args.prompt, "eval")
    target = load_model(spec.model, spec.revision, "float32", ATTENTION)
    drafter = load_drafter(own.model, own.revision, spec, own.layers)[0] if own.model or own.layers else target
    return target, drafter, stop_ids(target, tokenizer), policies, [p.prompt_ids for p in found.prompts]
