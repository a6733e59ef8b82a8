"""Measure what the project claims about cost, as ratios of two versions timed in one run on this machine.

    python eval/bench.py head                       chunked vocabulary head against the plain loss
    python eval/bench.py masks                      masked training step against dense causal and [H, T, T] masks
    python eval/bench.py replay                     replay against live speculative decoding, checked to agree
    python eval/bench.py head --json figures.json   also write the rows

To add a subcommand: a function `(args) -> list of row dicts`, a function that adds its options, one entry in BENCHES.
Versions compared in memory each run in a process of their own (`measure`): none warms up or fragments it for another.
Where times are seconds of CPU (all threads), they hold on a machine that others use too; set OMP_NUM_THREADS=1.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from draftkv.cache.policy import Policy
from draftkv.distill.head import distill_loss
from draftkv.distill.losses import drafter_log_probs, target_log_probs, term_rows
from draftkv.recipe import LossTerm
from draftkv.teacher.signals import Dense, Hidden

Row = dict[str, Any]


class Bench(NamedTuple):
    help: str
    rows: Callable[[argparse.Namespace], list[Row]]
    options: Callable[[argparse.ArgumentParser], None]


def measure(worker: str, **settings: Any) -> Row:
    """Run WORKERS[worker](**settings) in a fresh process; it returns what `timed` does."""
    command = [sys.executable, __file__, "_worker", worker, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{worker} {settings}: status {done.returncode}\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def timed(step: Callable[[], Any], repeats: int, device: str) -> Row:
    """Best wall and CPU time of `repeats` calls, and the peak of memory above what was held before the first one.

    On a machine that others use too, compare CPU times (all threads, system time included). CPU memory is the process's
    high-water mark (getrusage), so inputs must have been made without a larger transient.
    """
    cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": min(seconds), "cpu_seconds": min(cpu_seconds), "peak_bytes": peak - before}


# ---- head ------------------------------------------------------------------------------------------------------------


def head_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--rows", type=int, default=2048, help="supervised rows (2048)")
    options.add_argument("--width", type=int, default=576, help="hidden size (576)")
    options.add_argument("--vocab", type=int, nargs="+", default=[32768, 131072, 248320])
    options.add_argument("--loss", default="forward_kl", help="a loss term's name (forward_kl)")
    options.add_argument("--chunk", type=int, default=1024, help="as train.head_chunk (1024)")
    options.add_argument("--repeats", type=int, default=2, help="the best time counts (2)")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def head_rows(args: argparse.Namespace) -> list[Row]:
    result = []
    for vocab in args.vocab:
        shared = {name: getattr(args, name) for name in ("rows", "width", "loss")} | {"vocab": vocab}
        settings = shared | {name: getattr(args, name) for name in ("chunk", "repeats", "device")}
        plain, chunked = (measure("head", version=version, **settings) for version in ("plain", "chunked"))
        result.append(shared | {
            "plain GiB": plain["peak_bytes"] / 2**30, "chunked GiB": chunked["peak_bytes"] / 2**30,
            "memory ratio": chunked["peak_bytes"] / plain["peak_bytes"],
            "plain s": plain["seconds"], "chunked s": chunked["seconds"],
            "time ratio": chunked["seconds"] / plain["seconds"],
            "CPU time ratio": chunked["cpu_seconds"] / plain["cpu_seconds"],
        })
    return result


def head_worker(
    version: str, rows: int, width: int, vocab: int, loss: str, chunk: int, repeats: int, device: str
) -> Row:
    """Loss and gradients of one version. The inputs (weights, hidden states) are not counted, the gradients are."""
    torch.manual_seed(0)
    term = LossTerm(name=loss)

    def prepared(rows: int, vocab: int) -> Callable[[], None]:
        def made(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, device=device).normal_()

        hidden, weight = made(rows, width).requires_grad_(), made(vocab, width).mul_(width**-0.5).requires_grad_()
        # Near the drafter, as in training: every term then has something to keep.
        teacher = Hidden(hidden.detach() + 0.3 * made(rows, width), weight.detach().clone())
        lengths = [rows // 4] * 3 + [rows - rows // 4 * 3]

        def step() -> None:
            hidden.grad = weight.grad = None
            if version == "chunked":
                distill_loss([term], hidden, weight, teacher, lengths, chunk).total.backward()
            else:
                plain_loss(term, hidden @ weight.t(), teacher.hidden @ teacher.weight.t(), lengths).backward()

        return step

    prepared(8, 64)()  # libraries and thread pools are set up before anything is counted
    return timed(prepared(rows, vocab), repeats, device)


def plain_loss(term: LossTerm, logits: torch.Tensor, teacher: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The loss as one would write it with the logits of both models at hand, without metrics."""
    if term.name == "forward_kl":
        return F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")
    signal = Dense(teacher)
    log_p, log_q = target_log_probs(signal, term.temperature), drafter_log_probs(logits, signal, term.temperature)
    return term_rows(term, log_p, log_q, lengths).sum()


# ---- masks -----------------------------------------------------------------------------------------------------------


def masks_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="T; 7/8 prompt, 1/8 response")
    options.add_argument("--policy", nargs="+", default=["rift_stat", "swa"])
    options.add_argument("--budget", type=float, default=0.25, help="share of the prompt (0.25)")
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--heads", type=int, default=9, help="query heads of 64, three times the KV heads (9)")
    options.add_argument("--per-head", nargs="+", choices=["sdpa", "eager"], default=["sdpa"],
                         help="attention under the [H, T, T] mask; eager needs about 1.2 GiB per layer at T = 4096")
    options.add_argument("--rounds", type=int, default=3, help="the versions in turn, so often; medians count (3)")
    options.add_argument("--repeats", type=int, default=1, help="steps per version and round, the best counts (1)")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def masks_rows(args: argparse.Namespace) -> list[Row]:
    result = []
    shared = {name: getattr(args, name) for name in ("budget", "layers", "heads", "repeats", "device")}
    versions = ["masked", "dense", *(f"per_head_{backend}" for backend in args.per_head)]
    clock = "seconds" if args.device == "cuda" else "cpu_seconds"
    for tokens in args.tokens:
        for policy in args.policy:
            rounds = [
                {v: measure("masks", version=v, tokens=tokens, policy=policy, **shared) for v in versions}
                for _ in range(args.rounds)
            ]
            result += [{"T": tokens, "policy": policy} | _masks_line(rounds, v, clock) for v in versions]
    return result


def _masks_line(rounds: list[dict[str, Row]], version: str, clock: str) -> Row:
    """Medians over rounds; a ratio is taken within a round, where the machine was in the same mood for both."""
    off = max(abs(r[version]["loss"] / r["masked"]["loss"] - 1) for r in rounds)
    if version != "dense" and off > 1e-3:  # the same visibility must give the same loss
        sys.exit(f"{version}: its loss differs from the masked one by {off:.1e}: they do not see the same")

    def ratio(other: str) -> float:
        return statistics.median(r[version][clock] / r[other][clock] for r in rounds)

    return {
        "version": version, clock: statistics.median(r[version][clock] for r in rounds),
        "GiB": max(r[version]["peak_bytes"] for r in rounds) / 2**30,
        "time/dense": ratio("dense"), "time/masked": ratio("masked"),
    }


def masks_worker(
    version: str, tokens: int, policy: str, budget: float, layers: int, heads: int, repeats: int, device: str
) -> Row:
    """Forward and backward of a Llama stack, loss on the response rows' hidden states. Weights are not counted."""
    from transformers import LlamaConfig, LlamaModel

    from draftkv.cache.attention import ATTENTION
    from draftkv.cache.parallel import single

    torch.manual_seed(0)
    width = 64 * heads
    config = LlamaConfig(hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers, vocab_size=64,
                         num_attention_heads=heads, num_key_value_heads=heads // 3, max_position_embeddings=tokens)
    register_per_head()
    config._attn_implementation = {"masked": ATTENTION, "dense": "sdpa"}.get(version, version)
    model = LlamaModel(config).to(device)
    losses = []

    def prepared(tokens: int) -> Callable[[], None]:
        prompt = tokens * 7 // 8
        ids = torch.randint(0, 64, (1, tokens), device=device)
        direction = torch.randn(tokens - prompt, width, device=device)
        view = single(prompt, tokens, Policy(policy=policy, budget=budget))
        extra = {} if version == "dense" else {"cache_view": view}

        def step() -> None:
            model.zero_grad()
            hidden = model(ids, use_cache=False, **extra).last_hidden_state[0, prompt:]
            loss = (hidden * direction).sum()
            loss.backward()
            losses.append(float(loss))

        return step

    prepared(64)()
    figures = timed(prepared(tokens), repeats, device)
    return figures | {"loss": losses[-1]}


def register_per_head() -> None:
    """Register attentions `per_head_sdpa` and `per_head_eager`: what a cache policy costs as a mask of one plane per
    head. The mask depends on the layer's own selection, so it is built in every layer of every step."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def sdpa(module: Any, query: Any, key: Any, value: Any, _: None, scaling: float, cache_view: Any, **__: Any):
        mask = per_head_mask(cache_view, module.layer_idx, query[0], key[0], scaling)[None]
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)

    def eager(module: Any, query: Any, key: Any, value: Any, _: None, scaling: float, cache_view: Any, **__: Any):
        mask = per_head_mask(cache_view, module.layer_idx, query[0], key[0], scaling)[None]
        mask = torch.zeros((), device=mask.device).masked_fill(~mask, float("-inf"))  # [1, H, T, T], additive
        return eager_attention_forward(module, query, key, value, mask, scaling)

    AttentionInterface.register("per_head_sdpa", sdpa)
    AttentionInterface.register("per_head_eager", eager)


@torch.no_grad()
def per_head_mask(view: Any, layer: int, query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """[H, T, T] bool visibility of the parallel executor's rows; query [H, T, D], key [G, T, D]."""
    from draftkv.cache.attention import LayerInfo, front_positions

    row, tokens = view.rows[0], query.shape[1]
    prompt, policy = row.prompt_len, row.segments[0].policy
    split = policy.split(prompt)
    kept = front_positions(policy, split, LayerInfo(layer, scaling), query[:, :prompt], key[:, :prompt])
    own, entry = (torch.arange(start, tokens, device=key.device) for start in (prompt, 0))
    band = (entry <= own[:, None]) & (entry >= split.tail_start)
    if split.sliding is not None:
        band &= own[:, None] - entry <= split.sliding
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=key.device).tril().repeat(key.shape[0], 1, 1)
    front = torch.zeros(key.shape[0], tokens, dtype=torch.bool, device=key.device).scatter(1, kept, True)
    mask[:, prompt:] = band | front[:, None]
    return mask.repeat_interleave(query.shape[0] // key.shape[0], 0)


# ---- replay ----------------------------------------------------------------------------------------------------------

POLICIES = ["full", "swa", "streaming", "snapkv", "rift_stat"]


def replay_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--recipe", help="its held-out prompts, lengths, policies, target and drafter")
    options.add_argument("--model", default="embedded:smollm2-135m", help="without a recipe: target and drafter")
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
        live = [_clock(partial(decode, p, args.draft_length, args.tokens, stops), 1) for p in policies]
        row = live[0][0].as_row(prompt, "row")
        found, together = _clock(partial(replay.row, drafter, row, policies), args.repeats)
        for (run, seconds), policy, mine, total in zip(live, policies, found, sums, strict=True):
            _, alone = _clock(partial(replay.row, drafter, row, [policy]), args.repeats)
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


def _clock(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """What a call returns, and the CPU seconds of the best of `repeats` calls."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        seconds.append(time.process_time() - start)
    return result, min(seconds)


def _replay_setting(args: argparse.Namespace) -> tuple[Any, Any, set[int], list[Policy], list[list[int]]]:
    """Target, drafter, ids that end a response, policies, prompts as ids. A recipe's settings go before the flags'."""
    from draftkv.cache.attention import ATTENTION
    from draftkv.drafter import load_drafter
    from draftkv.models import load_model, load_tokenizer
    from draftkv.recipe import Drafter, Model, PromptSource, load_recipe
    from draftkv.teacher.engine import stop_ids
    from draftkv.teacher.prompts import load_prompts

    spec, own = Model(model=args.model), Drafter()
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


# ---- the table of subcommands ----------------------------------------------------------------------------------------

BENCHES = {
    "head": Bench("chunked vocabulary head against full logits: peak memory and time", head_rows, head_options),
    "masks": Bench("masked training step against dense causal and [H, T, T] masks", masks_rows, masks_options),
    "replay": Bench("replay against live decoding: CPU seconds per row and policy", replay_rows, replay_options),
}
WORKERS = {"head": head_worker, "masks": masks_worker, "replay": replay_worker}


def show(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    console = Console()
    console.width = max(console.width, 132)  # a log file has no width of its own
    console.print(table)


def main() -> None:
    if sys.argv[1:2] == ["_worker"]:
        print(json.dumps(WORKERS[sys.argv[2]](**json.loads(sys.argv[3]))))
        return
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arguments.add_subparsers(dest="bench", required=True)
    for name, bench in BENCHES.items():
        options = commands.add_parser(name, help=bench.help, description=bench.help)
        bench.options(options)
        options.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = arguments.parse_args()
    rows = BENCHES[args.bench].rows(args)
    show(BENCHES[args.bench].help, rows)
    if args.json:
        figures = {"bench": args.bench, "threads": torch.get_num_threads(), "rows": rows}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
