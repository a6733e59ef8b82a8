"""The chunked vocabulary head against the plain loss."""

import argparse
from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F

from draftkv.bench.measure import Row, measure, timed
from draftkv.distill.head import chunk_rows, distill_loss
from draftkv.distill.losses import drafter_log_probs, target_log_probs, term_rows
from draftkv.recipe import LossName, LossTerm
from draftkv.teacher.signals import Dense, Hidden


def head_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--rows", type=int, default=2048, help="supervised rows (2048)")
    options.add_argument("--width", type=int, default=576, help="hidden size (576)")
    options.add_argument("--vocab", type=int, nargs="+", default=[32768, 131072, 248320])
    options.add_argument("--loss", default="forward_kl", choices=get_args(LossName))
    options.add_argument("--chunk", type=int, nargs="+", default=[64, 1024], help="as train.head_chunk (64 1024)")
    options.add_argument("--repeats", type=int, default=2, help="the best time counts (2)")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def head_rows(args: argparse.Namespace) -> list[Row]:
    result = []
    for vocab in args.vocab:
        shared = {name: getattr(args, name) for name in ("rows", "width", "loss")} | {"vocab": vocab}
        settings = shared | {name: getattr(args, name) for name in ("repeats", "device")}
        plain = measure("head", chunk=None, **settings)
        for chunk in args.chunk:
            chunked = measure("head", chunk=chunk, **settings)
            result.append(shared | {
                "chunk": chunk_rows(chunk, vocab),
                "plain GiB": plain["peak_bytes"] / 2**30, "chunked GiB": chunked["peak_bytes"] / 2**30,
                "memory ratio": chunked["peak_bytes"] / max(1, plain["peak_bytes"]),  # tiny sizes fit what was held
                "plain s": plain["seconds"], "chunked s": chunked["seconds"],
                "time ratio": chunked["seconds"] / plain["seconds"],
                "CPU time ratio": chunked["cpu_seconds"] / plain["cpu_seconds"],
            })
    return result


def head_worker(
    chunk: int | None, rows: int, width: int, vocab: int, loss: str, repeats: int, device: str
) -> Row:
    """Loss and gradients, by chunks or (None) plain. Weights and hidden states are not counted, gradients are."""
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
            if chunk is not None:
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
