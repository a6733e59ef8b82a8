"""What `torch.compile` does to the parts of a training step that could take it, and what it costs to get there.

Nothing in the package is compiled but FlexAttention, for what this measures on one CPU thread (torch 2.13,
SmolLM2-135M): the MLP takes 0.91x the time and the whole drafter 0.91x, after 55 s for the first row length and 37 s
for two more (38 graphs, 22 breaks); lengths of rows and selections differ at every step, so training would go on
compiling. The elementwise half of the loss takes 0.47x, but products are two thirds of a chunk of the vocabulary head,
so at most a sixth of the head is to be had, for [rows, V] buffers whose number the compiler decides.
"""

import argparse
import time
from collections.abc import Callable

import torch

from draftkv.bench.measure import Row, clock, measure
from draftkv.cache.attention import ATTENTION
from draftkv.cache.parallel import single
from draftkv.cache.policy import Policy
from draftkv.distill.losses import separable_rows
from draftkv.models import load_model
from draftkv.recipe import LossTerm
from draftkv.rehearsal import tiny_model

PARTS = ("loss", "mlp", "model")


def compile_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--tokens", type=int, nargs="+", default=[640, 512, 576], help="row lengths, in turn")
    options.add_argument("--model", default="embedded:smollm2-135m", help="of mlp and model, or `tiny`")
    options.add_argument("--vocab", type=int, default=49152, help="of loss, for 640 rows (49152)")
    options.add_argument("--repeats", type=int, default=3, help="calls at each length, the best counts (3)")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def compile_rows(args: argparse.Namespace) -> list[Row]:
    settings = {name: getattr(args, name) for name in ("tokens", "model", "vocab", "repeats", "device")}
    return [measure("compile", part=part, **settings)["row"] for part in args.part]


def compile_worker(part: str, tokens: list[int], model: str, vocab: int, repeats: int, device: str) -> Row:
    """Forward and backward of one part, plain and compiled, summed over the lengths. `first` is the wall time of the
    call that compiles, `later` of the first calls at other lengths, where what depends on the length compiles again."""
    torch.manual_seed(0)
    step = {"loss": _loss, "mlp": _mlp, "model": _model}[part](model, vocab, device)
    torch._dynamo.reset()
    fast = torch.compile(step)
    plain, quick, starts = 0.0, 0.0, []
    for length in tokens:
        plain += clock(lambda length=length: step(length), repeats, device)[1]
        began = time.perf_counter()  # compilers run in processes of their own
        fast(length)
        starts.append(time.perf_counter() - began)
        quick += clock(lambda length=length: fast(length), repeats, device)[1]
    compiled = torch._dynamo.utils.counters
    return {"row": {
        "part": part, "plain s": plain, "compiled s": quick, "ratio": quick / plain, "first s": starts[0],
        "later s": sum(starts[1:]), "graphs": compiled["stats"]["unique_graphs"],
        "breaks": sum(compiled["graph_break"].values()),
    }}  # fmt: skip


def _loss(model: str, vocab: int, device: str) -> Callable[[int], None]:
    """The elementwise part of a chunk of the vocabulary head: forward KL and its gradient."""
    term = LossTerm(name="forward_kl")

    def step(rows: int) -> torch.Tensor:
        log_p = logits(rows).log_softmax(-1)
        log_q = logits(rows).log_softmax(-1).requires_grad_()
        return torch.autograd.grad(separable_rows(term, log_p, log_q).sum(), log_q)[0]

    held = torch.randn(640, vocab, device=device)

    def logits(rows: int) -> torch.Tensor:
        return held[:rows]

    return step


def _mlp(model: str, vocab: int, device: str) -> Callable[[int], None]:
    layer = _loaded(model).get_decoder().layers[0].mlp.to(device)
    held = torch.randn(1, 4096, layer.gate_proj.in_features, device=device)

    def step(rows: int) -> None:
        layer(held[:, :rows]).sum().backward()

    return step


def _model(model: str, vocab: int, device: str) -> Callable[[int], None]:
    """The drafter under RIFT-stat, the vocabulary head left out."""
    loaded = _loaded(model).to(device)
    loaded.set_attn_implementation(ATTENTION)
    decoder, policy = loaded.get_decoder(), Policy(policy="rift_stat", budget=0.25)

    def step(length: int) -> None:
        ids = torch.arange(length, device=device)[None] % 500
        view = single(length * 7 // 8, length, policy)
        positions = torch.arange(length, device=device)[None]
        hidden = decoder(ids, position_ids=positions, cache_view=view, use_cache=False).last_hidden_state
        hidden.sum().backward()

    return step


def _loaded(model: str) -> torch.nn.Module:
    return tiny_model("llama") if model == "tiny" else load_model(model, None, "float32")
