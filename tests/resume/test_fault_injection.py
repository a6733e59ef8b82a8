"""A run killed with -9 at many random moments ends with the weights, records and export of an undisturbed one."""

import json
import os
import random
import signal
import sys
import time
import traceback

from helpers import call, write_recipe
from safetensors.torch import load_file

KILLS = 25


def child(recipe, log) -> int:
    """A forked run: the imports of this process are its own, so that a start costs nothing. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    with open(log, "a") as out:
        sys.stdout = sys.stderr = out
        code = 1
        try:
            code = call("train/distill.py", recipe)
        except BaseException:
            traceback.print_exc(file=out)
        finally:
            out.flush()
            os._exit(code)


def records(run):
    rows = [json.loads(line) for line in (run / "acceptance.jsonl").read_text().splitlines()]
    return {(r["step"], r["policy"]): r["al"] for r in rows}


def test_killed_at_random_moments(tmp_path):
    recipes = {}
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        recipes[name] = write_recipe(tmp_path / name, steps=8, checkpoint_every=2)
    began = time.monotonic()
    assert os.waitpid(child(recipes["calm"], tmp_path / "calm.log"), 0)[1] == 0, (tmp_path / "calm.log").read_text()
    whole = time.monotonic() - began
    rng, kills, log = random.Random(0), 0, tmp_path / "killed.log"
    while True:
        pid = child(recipes["killed"], log)
        if kills < KILLS:
            time.sleep(rng.uniform(0.0, 0.4 * whole))
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                kills += 1
                continue
        else:
            status = os.waitpid(pid, 0)[1]
        assert status == 0, log.read_text()[-2000:]
        if kills >= KILLS:
            break
    calm, killed = (tmp_path / name / "runs" / "run" for name in ("calm", "killed"))
    one, other = (load_file(run / "export" / "model.safetensors") for run in (calm, killed))
    assert one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)
    assert records(calm) == records(killed)
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    assert set(steps) == set(range(1, 9)) and (killed / "done.json").is_file()
