"""Measure what the project claims about cost, as ratios of two versions timed in one run on this machine.

    python eval/bench.py head                       chunked vocabulary head against the plain loss
    python eval/bench.py head --json figures.json   also write the rows

To add a subcommand: a function `(args) -> list of row dicts`, a function that adds its options, one entry in BENCHES.
Every version runs in a process of its own (`measure`), so that neither warms up or fragments memory for the other.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

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


# ---- the table of subcommands ----------------------------------------------------------------------------------------

BENCHES = {
    "head": Bench("chunked vocabulary head against full logits: peak memory and time", head_rows, head_options),
}
WORKERS = {"head": head_worker}


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
