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

from draftkv.errors import RunError
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
            (draft / STATE).write_text(json.dumps({"step": step, **state}))
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

    Raises:
        RunError: it cannot be read; the text names it.
    """
    found = complete(run_dir)
    if not found:
        return None
    try:
        state = json.loads((found[-1] / STATE).read_text())
        accelerator.load_state(str(found[-1]))
    except Exception as error:
        raise RunError(f"{found[-1]}: unreadable ({error}); remove it to resume from the one before") from error
    return state
