"""One process of training: how fast it is fed and how fast it trains, in tokens per second and MFU."""

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftkv.bench.measure import Row, clock, measure, timed
from draftkv.cache.backends.choice import ATTENTIONS, chosen
from draftkv.cache.parallel import Batch
from draftkv.cache.policy import Policy
from draftkv.distill.schedule import Item, Schedule
from draftkv.distill.student import Student, build_batch, supervised_rows
from draftkv.errors import InputError
from draftkv.flops import peak_flops
from draftkv.models import load_model
from draftkv.recipe import LossTerm, Recipe, Train
from draftkv.rehearsal import ARCHITECTURES, tiny_model
from draftkv.shapes import KNOWN
from draftkv.teacher.signal_store import SHARD_ROWS, SignalPlan, StoredTeacher, write_shard
from draftkv.teacher.signals import TopK

K = 64  # stored log-probabilities per position


def rates_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--model", default="embedded:smollm2-135m", help="the drafter")
    options.add_argument("--prompt", type=int, default=512, help="prompt tokens (512)")
    options.add_argument("--response", type=int, default=128, help="response tokens (128)")
    options.add_argument("--rows", type=int, default=4, help="rows per step, one a pass, two views each (4)")
    options.add_argument("--repeats", type=int, default=2, help="the best step counts (2)")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def rates_rows(args: argparse.Namespace) -> list[Row]:
    names = ("model", "prompt", "response", "rows", "repeats", "device")
    return [measure("rates", **{name: getattr(args, name) for name in names})["row"]]


def rates_worker(model: str, prompt: int, response: int, rows: int, repeats: int, device: str) -> Row:
    """Loader: schedule, layout and reading of stored signals, without reading ahead. Trainer: a whole step."""
    drafter = load_model(model, None, "float32")
    vocab = drafter.config.get_text_config().vocab_size
    recipe = _recipe(model, prompt, rows)
    data = [_row(f"r{i}", prompt, response, vocab, i) for i in range(2 * rows)]
    schedule = Schedule(data, recipe)
    with tempfile.TemporaryDirectory() as folder:
        teacher = _store(Path(folder), data, vocab, device)

        def load() -> list[tuple[list[Item], Any]]:
            micro = schedule.micro_batches(schedule.items(0), 0, 1)
            return [(items, _laid_out(items, teacher, device)) for items in micro]

        passes, loading = clock(load, 5 * repeats)
        step = _Step(drafter, device, "auto", half=device == "cuda")
        step(passes)
        figures = timed(lambda: step(passes), repeats, device)
    items = [item for pass_items, _ in passes for item in pass_items]
    fed, seconds = sum(item.fed for item in items), figures["seconds" if device == "cuda" else "cpu_seconds"]
    return {"row": {
        "model": model, "prompt": prompt, "response": response, "loader rows/s": rows / loading,
        "trainer rows/s": rows / seconds, "loader/trainer": seconds / loading, **_rate(step, items, fed, seconds),
    }}  # fmt: skip


def drafter_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--shape", default="Qwen/Qwen3.5-4B", choices=sorted(KNOWN), help="architecture (Qwen3.5-4B)")
    options.add_argument("--layers", type=int, help="keep the last N layers; needed on a CPU")
    options.add_argument("--vocab", type=int, help="another vocabulary, to fit a small machine")
    options.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="7/8 prompt, 1/8 response")
    options.add_argument("--policy", nargs="+", default=["full", "rift_stat"])
    options.add_argument("--budget", type=float, default=0.25, help="share of the prompt (0.25)")
    options.add_argument("--attention", default="auto", help="as drafter.attention (auto)")
    options.add_argument("--repeats", type=int, default=2, help="the best step counts (2)")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")


def drafter_rows(args: argparse.Namespace) -> list[Row]:
    """Raises: InputError for a whole drafter on a CPU, or a shape that has no random model."""
    if args.device == "cpu" and args.layers is None:
        raise InputError(f"drafter: {args.shape} needs a GPU; on a CPU give --layers (and --tokens) that fit it")
    if KNOWN[args.shape].family not in ARCHITECTURES:
        raise InputError(f"drafter: --shape {args.shape} has no random model; take another")
    names = ("shape", "layers", "vocab", "budget", "attention", "repeats", "device")
    settings = {name: getattr(args, name) for name in names}
    result = []
    for tokens in args.tokens:
        rows = [measure("drafter", tokens=tokens, policy=policy, **settings)["row"] for policy in args.policy]
        result += [row | {f"time/{args.policy[0]}": row["s/step"] / rows[0]["s/step"]} for row in rows]
    return result


def drafter_worker(
    shape: str, layers: int | None, vocab: int | None, tokens: int, policy: str, budget: float, attention: str,
    repeats: int, device: str,
) -> Row:
    """A step of a drafter with random weights: checkpointed forward and backward, chunked head, AdamW, a random top-k
    signal. On a GPU bf16 autocast over fp32 weights, as training does."""
    drafter = _random_drafter(shape, layers, vocab, tokens, device)
    vocab = drafter.config.vocab_size
    prompt = tokens * 7 // 8
    view = Policy.model_validate({"policy": policy, **({} if policy == "full" else {"budget": budget})})
    item = Item(_row("r", prompt, tokens - prompt + 1, vocab, 0), (view,), (1.0,))
    drafter.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    step = _Step(drafter, device, attention, half=device == "cuda")
    signal = _random_signal(tokens - prompt, vocab, torch.Generator().manual_seed(1), device)
    batch, owners = build_batch([item])
    index, lengths = supervised_rows(batch)
    work = [([item], (batch.to(torch.device(device)), index.to(device), signal, lengths, [w for *_, w in owners]))]
    step(work)
    figures = timed(lambda: step(work), repeats, device)
    seconds = figures["seconds" if device == "cuda" else "cpu_seconds"]
    return {"row": {
        "shape": f"{shape}, {drafter.config.num_hidden_layers} layers", "tokens": tokens, "cache": policy,
        "attention": step.backend, "s/step": seconds, "GiB": _peak_bytes(device) / 2**30,
        **_rate(step, [item], tokens, seconds),
    }}  # fmt: skip


class _Step:
    """One optimiser step over prepared passes."""

    def __init__(self, drafter: torch.nn.Module, device: str, attention: str, half: bool):
        self.backend = chosen(attention, half)
        drafter.set_attn_implementation(ATTENTIONS[self.backend])
        vocab = drafter.config.get_text_config().vocab_size
        terms = [LossTerm(name="forward_kl")]
        self.student = Student(drafter.to(device).train(), terms, vocab, Train().head_chunk, autocast=half)
        self.optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5)
        self.device = device

    def __call__(self, passes: list[tuple[list[Item], tuple]]) -> None:
        for items, (batch, index, signal, lengths, weights) in passes:
            loss = self.student(batch, index, signal, lengths, weights).total
            (loss / sum(item.weight for item in items)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _rate(step: _Step, items: list[Item], fed: int, seconds: float) -> Row:
    """Args: seconds: wall time on a GPU; CPU time of all threads on a CPU, so that other users do not count."""
    peak, source = peak_flops(torch.device(step.device))
    seconds /= 1 if step.device == "cuda" else torch.get_num_threads()
    reached = step.student.flops.training(items) / seconds
    return {"tokens/s": fed / seconds, "GFLOP/s": reached / 1e9, "peak GFLOP/s": peak / 1e9, "MFU": reached / peak,
            "peak": source}  # fmt: skip


def _peak_bytes(device: str) -> int:
    """Weights and optimiser included."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _random_drafter(shape: str, layers: int | None, vocab: int | None, tokens: int, device: str) -> torch.nn.Module:
    known = KNOWN[shape]
    count = layers or known.layers
    values = {
        "num_hidden_layers": count, "hidden_size": known.hidden, "intermediate_size": known.mlp,
        "num_attention_heads": known.heads, "num_key_value_heads": known.kv_heads, "head_dim": known.head_dim,
        "vocab_size": vocab or known.vocab, "tie_word_embeddings": known.tied, "max_position_embeddings": tokens,
        "initializer_range": 0.02,
    }  # fmt: skip
    if known.full_attention_layers != known.layers:
        every = known.layers // known.full_attention_layers
        kinds = (["linear_attention"] * (every - 1) + ["full_attention"]) * known.full_attention_layers
        values |= {"layer_types": kinds[-count:], "linear_num_key_heads": known.heads, "linear_key_head_dim": 128,
                   "linear_num_value_heads": 2 * known.heads, "linear_value_head_dim": 128}  # fmt: skip
    with torch.device(device):
        return tiny_model(known.family, **values)


def _row(name: str, prompt: int, response: int, vocab: int, seed: int) -> dict[str, Any]:
    ids = torch.randint(0, vocab, (prompt + response,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {"row_id": name, "temperature": 0.0, "prompt_ids": ids[:prompt], "response_ids": ids[prompt:]}


def _random_signal(rows: int, vocab: int, generator: torch.Generator, device: str) -> TopK:
    ids = torch.rand(rows, min(vocab, 4 * K), generator=generator).topk(K).indices
    logprobs = (4 * torch.randn(rows, K + 1, generator=generator)).log_softmax(-1)
    return TopK(ids.to(device), logprobs[:, :K].to(device), logprobs[:, K].to(device))


def _store(folder: Path, rows: list[dict[str, Any]], vocab: int, device: str) -> StoredTeacher:
    """A signal store on disk, of random signals."""
    plan, generator = SignalPlan(folder, "bench", {}, tuple(rows)), torch.Generator().manual_seed(0)
    for index, shard in enumerate(plan.shards):
        parts = [_random_signal(len(row["response_ids"]) - 1, vocab, generator, "cpu") for row in shard]
        write_shard(plan, index, {
            "ids": torch.cat([p.ids for p in parts]).int(), "logprobs": torch.cat([p.logprobs for p in parts]).half(),
            "tail_logprob": torch.cat([p.tail_logprob for p in parts]),
            "starts": torch.tensor([0, *(len(p) for p in parts)]).cumsum(0),
        }, 0.0, {"kind": "none"})  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps({"complete": True, "shards": len(rows) // SHARD_ROWS + 1}))
    return StoredTeacher(plan, 1.0, torch.device(device))


def _laid_out(
    items: list[Item], teacher: StoredTeacher, device: str
) -> tuple[Batch, torch.Tensor, TopK, list[int], list[float]]:
    batch, owners = build_batch(items)
    index, lengths = supervised_rows(batch)
    signal = teacher.signal(items, owners)
    return batch.to(torch.device(device)), index.to(device), signal, lengths, [weight for *_, weight in owners]


def _recipe(model: str, prompt: int, rows: int) -> Recipe:
    budget = max(8, prompt // 4)
    return Recipe.model_validate({
        "name": "bench", "target": {"model": model}, "prompts": {"train": {"source": "-"}, "eval": {"source": "-"}},
        "views": ["full", {"policy": "rift_stat", "budget": budget}], "eval": {"policies": ["full"]},
        "train": {"rows": rows, "views_per_row": 2, "micro_rows": 1},
    })  # fmt: skip
