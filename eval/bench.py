"""Measure what the project claims about cost, as ratios of two versions timed in one run on this machine.

    python eval/bench.py head                       chunked vocabulary head against the plain loss
    python eval/bench.py masks                      masked training step against dense causal and [H, T, T] masks
    python eval/bench.py replay                     replay against live speculative decoding, checked to agree
    python eval/bench.py step                       a draft step with a compressed cache against the full one
    python eval/bench.py rates                      loader against trainer; tokens per second and MFU of one process
    python eval/bench.py compile                    parts of a step plain and under torch.compile
    python eval/bench.py drafter                    a step of a 4B-shaped drafter at 8K to 32K tokens, with MFU (GPU)
    python eval/bench.py views                      views that share a prompt's pass against a pass for each
    python eval/bench.py head --json figures.json   also write the rows

To add a subcommand: a module in `draftkv/bench/` with a function `(args) -> list of row dicts` and one that adds its
options, and one entry in BENCHES.
Versions compared in memory each run in a process of their own (`measure`): none warms up or fragments it for another.
Where times are seconds of CPU (all threads), they hold on a machine that others use too; set OMP_NUM_THREADS=1.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from draftkv.bench.compiled import compile_options, compile_rows, compile_worker
from draftkv.bench.head import head_options, head_rows, head_worker
from draftkv.bench.masks import masks_options, masks_rows, masks_worker
from draftkv.bench.measure import Bench, Row
from draftkv.bench.replay import replay_options, replay_rows, replay_worker
from draftkv.bench.step import step_options, step_rows, step_worker
from draftkv.bench.training import (
    drafter_options,
    drafter_rows,
    drafter_worker,
    rates_options,
    rates_rows,
    rates_worker,
)
from draftkv.bench.views import views_options, views_rows, views_worker
from draftkv.errors import InputError

BENCHES = {
    "head": Bench("chunked vocabulary head against full logits: peak memory and time", head_rows, head_options),
    "masks": Bench("masked training step against dense causal and [H, T, T] masks", masks_rows, masks_options),
    "replay": Bench("replay against live decoding: CPU seconds per row and policy", replay_rows, replay_options),
    "step": Bench("draft step with a compressed cache against the full one: CPU time", step_rows, step_options),
    "views": Bench("views that share a prompt's pass against a pass each, with backward", views_rows, views_options),
    "rates": Bench("loader and trainer of one process: rates, tokens per second, MFU", rates_rows, rates_options),
    "compile": Bench("parts of a training step, plain and under torch.compile: CPU seconds", compile_rows,
                     compile_options),
    "drafter": Bench("training step of a drafter with random weights: tokens per second, MFU", drafter_rows,
                     drafter_options),
}
WORKERS = {"head": head_worker, "masks": masks_worker, "replay": replay_worker, "step": step_worker,
           "views": views_worker, "rates": rates_worker, "compile": compile_worker, "drafter": drafter_worker}


def _figure(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def show(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(_figure(v) if isinstance(v, float) else str(v) for v in row.values()))
    console = Console()
    console.width = max(console.width, 132)  # a log file has no width of its own
    console.print(table)


def main() -> None:
    try:
        if sys.argv[1:2] == ["_worker"]:
            print(json.dumps(WORKERS[sys.argv[2]](**json.loads(sys.argv[3]))))
            return
        compare(parsed())
    except (InputError, ValidationError) as error:
        text = error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else error
        sys.stderr.write(f"error: {' '.join(str(text).split())}\n")
        sys.exit(2)


def parsed() -> argparse.Namespace:
    """Raises: InputError for what would only show after measuring."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arguments.add_subparsers(dest="bench", required=True)
    for name, bench in BENCHES.items():
        options = commands.add_parser(name, help=bench.help, description=bench.help)
        bench.options(options)
        options.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = arguments.parse_args()
    if getattr(args, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no CUDA device here")
    if args.json and not args.json.resolve().parent.is_dir():
        raise InputError(f"--json {args.json}: there is no folder {args.json.parent}")
    return args


def compare(args: argparse.Namespace) -> None:
    rows = BENCHES[args.bench].rows(args)
    show(BENCHES[args.bench].help, rows)
    if args.json:
        figures = {"bench": args.bench, "threads": torch.get_num_threads(), "rows": rows}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
