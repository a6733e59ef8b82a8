"""The batch scripts under a Slurm of two stubs: `srun` starts the task, whose processes are all signalled as Slurm does
with those of a step, and `scontrol` names the host and notes what is queued again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, wait_for_file, wait_for_steps, write_recipe

SRUN = """#!/usr/bin/env bash
shift  # --kill-on-bad-exit=1
SLURM_NODEID=0 "$@" &
echo $! > "$STUBS/task"
wait $!
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in show) echo 127.0.0.1 ;; requeue) echo "$2" >> "$STUBS/queued" ;; esac
"""


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """The environment of a job."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    return {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "STUBS": str(stubs), "OMP_NUM_THREADS": "1",
            "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": str(20000 + os.getpid()), "SLURM_JOB_NODELIST": "here",
            "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "HF_HUB_OFFLINE": "1",
            "DRAFTKV_VENV": sys.prefix}  # fmt: skip


def submit(recipe: Path, slurm: dict[str, str], *overrides: str) -> subprocess.Popen:
    command = ["bash", str(ROOT / "launch" / "slurm" / "one_node.sbatch"), str(recipe), *overrides]
    return subprocess.Popen(command, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def signal_step(task: int, name: signal.Signals) -> None:
    started = psutil.Process(task)
    for process in [started, *started.children(recursive=True)]:
        process.send_signal(name)


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_preempted_job_saves_is_queued_again_and_goes_on(tmp_path, slurm):
    recipe = write_recipe(tmp_path, steps=60, checkpoint_every=60)
    run, stubs = tmp_path / "runs" / "run", Path(slurm["STUBS"])
    job = submit(recipe, slurm, "eval.every=60")
    wait_for_steps(run, 3, job)
    for name in (signal.SIGUSR1, signal.SIGTERM):  # its time is nearly up, and the machine is taken
        signal_step(int((stubs / "task").read_text()), name)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err[-3000:]
    assert "saved and not finished" in out and not (run / "done.json").exists()
    assert "2 process(es)" in out
    slurm["SLURM_GPUS_ON_NODE"] = "1"  # another machine
    out, err = (job := submit(recipe, slurm, "eval.every=60")).communicate(timeout=180)
    assert job.returncode == 0 and (run / "done.json").exists(), err[-3000:]
    assert "1 process(es)" in out and "continuing after step" in out
    assert steps(run) == list(range(1, 61)), "no step is lost and none is made twice"
    assert (stubs / "queued").read_text().split() == [slurm["SLURM_JOB_ID"]], "a finished run is not queued again"


def test_a_job_whose_time_is_up_while_it_writes_rollouts_is_queued_again(tmp_path, slurm):
    recipe, stubs = write_recipe(tmp_path), Path(slurm["STUBS"])
    many = "rollouts.train_temperatures=[0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0]"
    job = submit(recipe, slurm, "rollouts.batch_size=1", many)
    wait_for_file(tmp_path / "runs" / "rollouts", "*/shard-00000", job)
    signal_step(int((stubs / "task").read_text()), signal.SIGUSR1)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0 and "saved and not finished" in out, err[-3000:]
    manifest, *_ = (tmp_path / "runs" / "rollouts").glob("*/manifest.json")
    assert not json.loads(manifest.read_text())["complete"], "both processes left in the middle"
    assert (stubs / "queued").read_text().split() == [slurm["SLURM_JOB_ID"]]


def test_a_bad_recipe_and_a_failed_run_are_not_queued_again(tmp_path, slurm):
    recipe = write_recipe(tmp_path)
    out, err = (job := submit(recipe, slurm, "train.stepz=1")).communicate(timeout=60)
    assert job.returncode == 2 and "unknown key; did you mean 'steps'?" in err
    assert not (Path(slurm["STUBS"]) / "task").exists(), "refused before a machine is kept busy"
    job = submit(recipe, {**slurm, "SLURM_GPUS_ON_NODE": "1"}, "train.lr=1.0e+30", "train.max_bad_steps=2")
    out, err = job.communicate(timeout=120)
    assert job.returncode not in (0, 2) and "non-finite" in err
    assert not (Path(slurm["STUBS"]) / "queued").exists()
