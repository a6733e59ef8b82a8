"""A run killed with -9 at many random moments ends with the weights, records and export of an undisturbed one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from helpers import ROOT, call, write_recipe
from safetensors.torch import load_file

KILLS = 25


def test_killed_at_random_moments(tmp_path):
    recipes = []
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        recipes.append(write_recipe(tmp_path / name, steps=8, checkpoint_every=2))
    # A process of its own: one that has used torch's threads, as this one may have, must not fork runs that use them.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, __file__, *map(str, recipes)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    calm, killed = (tmp_path / name / "runs" / "run" for name in ("calm", "killed"))
    one, other = (load_file(run / "export" / "model.safetensors") for run in (calm, killed))
    assert one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)
    assert records(calm) == records(killed)
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    assert set(steps) == set(range(1, 9)) and (killed / "done.json").is_file()


def records(run):
    rows = [json.loads(line) for line in (run / "acceptance.jsonl").read_text().splitlines()]
    return {(r["step"], r["policy"]): r["al"] for r in rows}


def kill_often(calm: str, killed: str) -> None:
    """Finish one run in peace, and the other through `KILLS` kills; the last start of it is left alone."""
    import draftkv.acceptance.report
    import draftkv.distill.export
    import draftkv.distill.loop
    import draftkv.teacher.rollouts  # noqa: F401  so that a forked run starts without importing anything

    began = time.monotonic()
    expect_success(os.waitpid(child(calm), 0)[1], calm)
    whole, rng, kills = time.monotonic() - began, random.Random(0), 0
    while kills < KILLS:
        pid = child(killed)
        time.sleep(rng.uniform(0.0, 0.4 * whole))
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:  # finished between two kills: from the start again, or the kills that are left would hit nothing
            expect_success(status, killed)
            shutil.rmtree(Path(killed).parent / "runs")
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills += 1
    expect_success(os.waitpid(child(killed), 0)[1], killed)


def log_of(recipe: str) -> Path:
    return Path(recipe).with_suffix(".log")


def expect_success(status: int, recipe: str) -> None:
    if status:
        sys.exit(f"a run left with status {os.waitstatus_to_exitcode(status)}:\n{log_of(recipe).read_text()}")


def child(recipe: str) -> int:
    """A forked run of train/distill.py; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    with log_of(recipe).open("a") as out:
        sys.stdout = sys.stderr = out
        code = 1
        try:
            code = call("train/distill.py", recipe)
        except BaseException:
            traceback.print_exc(file=out)
        finally:
            out.flush()
            os._exit(code)


if __name__ == "__main__":
    kill_often(*sys.argv[1:])
