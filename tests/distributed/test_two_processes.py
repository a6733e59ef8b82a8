"""Two CPU processes train what one does: same global batch, same losses, same acceptance."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, finish, write_recipe
from safetensors.torch import load_file


def test_two_processes_equal_one(tmp_path):
    settings = {"rows": 5, "steps": 6, "micro_rows": 2, "checkpoint_every": 6}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    recipes = {name: write_recipe(tmp_path / name, **settings) for name in ("one", "two")}
    code, _, err = finish(recipes["one"])
    assert code == 0, err
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               str(ROOT / "train" / "distill.py"), str(recipes["two"])]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 process(es)" in done.stdout, "torchrun must have started two processes"
    runs = [tmp_path / name / "runs" / "run" for name in ("one", "two")]
    metrics = [[json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    assert len(metrics[0]) == len(metrics[1]) == 6
    for a, b in zip(*metrics, strict=True):
        for key in ("loss", "lr", "grad_norm", "alpha", "supervised_tokens"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
    als = [[json.loads(x)["al"] for x in (run / "acceptance.jsonl").read_text().splitlines()] for run in runs]
    assert als[0] == pytest.approx(als[1], abs=1e-6)
    one, two = (load_file(run / "export" / "model.safetensors") for run in runs)
    assert one.keys() == two.keys()
    assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-4
