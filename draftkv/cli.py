"""What every command shares: `SCRIPT RECIPE [key.sub=value ...] [--plan]`, one-line errors, exit statuses, progress.

Exit status: 0 done, 1 a run that failed, 2 bad input, 130 interrupted. What the user can mend is one line on stderr.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

# Set before any library reads them: no network unless a recipe names a hub id, and no advice on stderr.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftkv.errors import InputError, Interrupted, RunError
from draftkv.recipe import Recipe, load_recipe

console = Console(highlight=False, soft_wrap=True)


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes (rank 0 under accelerate or torchrun)."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Print one line, from the main process only."""
    if is_main_process():
        console.print(text, markup=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")  # argparse would print the usage too


def parser(description: str, recipe: str = "RECIPE") -> argparse.ArgumentParser:
    """The argument parser of a command: a recipe, overrides, `--plan`. Scripts add their own flags to it."""
    result = _Parser(description=description, allow_abbrev=False)
    result.add_argument("recipe", metavar=recipe, help="YAML file, see recipes/")
    result.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override any key of the recipe")
    result.add_argument("--plan", action="store_true", help="print what would run, with estimates, and stop")
    return result


def recipe_from(args: argparse.Namespace) -> Recipe:
    return load_recipe(args.recipe, args.overrides, runs_here=not args.plan)


def run(main: Callable[[argparse.Namespace], None], arguments: argparse.ArgumentParser) -> None:
    """Run a command and leave the process with its exit status; no traceback for what the user can mend.

    Set DRAFTKV_TRACEBACK=1 to see where an error came from.
    """
    args = arguments.parse_intermixed_args()
    try:
        main(args)
    except (InputError, RunError) as error:
        status = 2 if isinstance(error, InputError) else 130 if isinstance(error, Interrupted) else 1
        _leave(str(error), status)
    except OSError as error:
        text = error.strerror or str(error)
        _leave(f"{text}: {error.filename}" if error.filename else text, 1)
    except KeyboardInterrupt:
        _leave("interrupted; the same command goes on from what is saved", 130)


def _leave(text: str, status: int) -> NoReturn:
    if os.environ.get("DRAFTKV_TRACEBACK"):
        traceback.print_exc()
    if status != 130 or is_main_process():  # Ctrl-C reaches every process of a launch
        sys.stderr.write(f"error: {' '.join(text.split())}\n")
    sys.exit(status)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar with rate and ETA on a terminal, plain lines (every tenth) otherwise. Yields `advance(note)`."""
    if not is_main_process():
        yield lambda note="": None
        return
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=total, note="")
            yield lambda note="": bar.update(task, advance=1, note=note)
        return
    yield _PlainProgress(title, total)


class _PlainProgress:
    def __init__(self, title: str, total: int):
        import time

        self.title, self.total, self.done, self.clock = title, total, 0, time.monotonic
        self.start = self.clock()
        self.stride = max(1, total // 10)

    def __call__(self, note: str = "") -> None:
        self.done += 1
        if self.done % self.stride == 0 or self.done == self.total:
            spent = self.clock() - self.start
            eta = spent / self.done * (self.total - self.done)
            rate = self.done / max(spent, 1e-9)
            say(f"{self.title} {self.done}/{self.total}  {rate:.2f}/s  eta {eta:.0f} s  {note}".rstrip())


def track(title: str, items: Iterable, total: int | None = None) -> Iterator:
    """Iterate with `progress`."""
    items = list(items) if total is None else items
    with progress(title, len(items) if total is None else total) as advance:
        for item in items:
            yield item
            advance("")
