"""Checkpoints: written beside and renamed, the newest complete one wins, and resuming is exact.

`accelerate` saves and loads what a backend shards (model, optimiser, random states); `state.json` holds the step and is
written last, so a folder with it under its final name is complete.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftkv.distill.processes import backend_name
from draftkv.errors import InputError, RunError
from draftkv.rundir import writing

STATE = "state.json"
# It warns at every checkpoint that a tied head is stored once, which is what a tied head is for.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def save(accelerator: Accelerator, run_dir: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Save after `step` optimiser steps. Called on every process.

    Raises:
        RunError: not written, such as for a full disk; older checkpoints are kept.
    """
    final = folder(run_dir) / f"step-{step:06d}"
    draft = final.with_name(f".{final.name}")
    if accelerator.is_main_process:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    accelerator.wait_for_everyone()
    with writing(final, draft):
        accelerator.save_state(str(draft))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            launch = {"backend": backend_name(accelerator), "processes": accelerator.num_processes}
            (draft / STATE).write_text(json.dumps({"step": step, "launch": launch, **state}))
            shutil.rmtree(final, ignore_errors=True)
            draft.rename(final)
    if accelerator.is_main_process:
        for old in complete(run_dir)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def complete(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = folder(run_dir).glob("step-*") if folder(run_dir).is_dir() else []
    return sorted(p for p in found if (p / STATE).is_file())


def load_newest(accelerator: Accelerator, run_dir: Path) -> dict[str, Any] | None:
    """Load the newest complete checkpoint into the prepared objects; its state, or None when there is none.

    Rows, views and learning rates are functions of the step, so replicated weights resume on any number of processes.

    Raises:
        InputError: it was written by another backend, or its parts by another number of processes.
        RunError: it cannot be read; the text names it.
    """
    found = complete(run_dir)
    if not found:
        return None
    try:
        state = json.loads((found[-1] / STATE).read_text())
    except ValueError as error:
        raise _unreadable(found[-1], error) from error
    _check_launch(accelerator, found[-1], state.pop("launch", {}))
    try:
        accelerator.load_state(str(found[-1]))
    except Exception as error:
        raise _unreadable(found[-1], error) from error
    return state


def _unreadable(path: Path, error: Exception) -> RunError:
    reason = " ".join(str(error).split())[:200]
    return RunError(f"{path}: unreadable ({reason}); remove it to resume from the one before")


def _check_launch(accelerator: Accelerator, path: Path, before: dict[str, Any]) -> None:
    """Raises: InputError for parts that these processes cannot put together."""
    name, processes = backend_name(accelerator), accelerator.num_processes
    was, number = before.get("backend", name), before.get("processes", processes)
    if was != name:
        raise InputError(f"{path}: written by backend {was}, this launch is {name}; launch as before")
    if name.startswith("zero") and number != processes:
        raise InputError(f"{path}: written in parts by {number} processes of {name}, this launch has {processes}; "
                         f"launch {number}, or train replicated (DDP), which resumes on any number")  # fmt: skip
