"""What tests of several folders share: a tiny recipe, and the commands run on it, in this process or another."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20


def write_recipe(folder: Path, **train) -> Path:
    """A recipe of tiny random models, eight short prompts and 20 steps in fp32, in `folder`; its run is runs/run."""
    prompts = folder / "prompts.jsonl"
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    lines = [{"text": " ".join(words[(i * j) % 10] for j in range(1, 24)), "row_id": f"p{i}"} for i in range(8)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    plain = {
        "name": "run", "output": str(folder / "runs"), "target": {"model": "rehearsal:llama"},
        "drafter": {"model": "rehearsal:llama@1"},
        "prompts": {"train": {"source": str(prompts)}, "eval": {"source": str(prompts), "limit": 2},
                    "max_prompt_tokens": 200},
        "rollouts": {"max_new_tokens": 16, "eval_temperatures": [0.0], "dtype": "float32"},
        "views": ["full", {"policy": "swa", "budget": [6, 12]}],
        "train": {"steps": STEPS, "rows": 4, "lr": 1e-3, "precision": "no", "checkpoint_every": 7,
                  "initial_share": 0.25, **train},
        "eval": {"policies": ["full", {"policy": "swa", "budget": 8}], "every": 10, "precision": "no"},
        "export": {"dtype": "float32", "checkpoint": "last"},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


def start(recipe: Path, *overrides: str) -> subprocess.Popen:
    """train/distill.py, not waited for."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "train" / "distill.py"), str(recipe), *overrides]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(recipe: Path, *overrides: str) -> tuple[int, str, str]:
    """Run train/distill.py; its exit status, output and errors."""
    process = start(recipe, *overrides)
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def wait_for_steps(run: Path, count: int, process: subprocess.Popen) -> None:
    """Until a run has logged so many steps."""
    metrics = run / "metrics.jsonl"
    until = time.monotonic() + 120
    while not metrics.is_file() or metrics.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "the run makes no steps"
        time.sleep(0.005)


def wait_for_file(folder: Path, pattern: str, process: subprocess.Popen) -> None:
    """Until there is a file below `folder` that matches."""
    until = time.monotonic() + 120
    while not any(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, f"no {pattern} in {folder}"
        time.sleep(0.005)


def call(script: str, *arguments: str | Path) -> int:
    """Run a command in this process, which saves the seconds that its imports take; returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as left:
            return left.code or 0
    return 0
