"""Every comparison of eval/bench.py runs, at a size where its figures mean nothing."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, call

TINY = "rehearsal:llama"


@pytest.mark.parametrize("words, expected", [
    (["head", "--vocab", "8192", "--rows", "512", "--width", "32", "--repeats", "1"], "memory ratio"),
    (["masks", "--tokens", "64", "--layers", "1", "--heads", "3", "--rounds", "1", "--policy", "rift_stat",
      "--per-head", "sdpa", "eager"], "version"),
    (["step", "--model", TINY, "--prompt", "48", "--budget", "16", "--steps", "3", "--repeats", "1"], "time ratio"),
    (["rates", "--model", TINY, "--prompt", "48", "--response", "16", "--rows", "2", "--repeats", "1"],
     "loader/trainer"),
    (["compile", "--part", "mlp", "--model", "tiny", "--tokens", "16", "--repeats", "1"], "ratio"),
    (["drafter", "--shape", "Qwen/Qwen3-0.6B", "--layers", "1", "--vocab", "512", "--tokens", "64", "--policy",
      "rift_stat", "--repeats", "1", "--device", "cpu"], "MFU"),
    (["views", "--shape", "qwen3_5", "--views", "2", "--prompt", "40", "--response", "9",
      "--width", "128", "--repeats", "1", "--checkpointing"], "time ratio"),
])  # fmt: skip
def test_every_comparison_runs(tmp_path, words, expected):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "eval" / "bench.py"), *words, "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert rows and any(expected in name for name in rows[0]), rows[0]


def test_a_drafter_that_only_a_gpu_holds_is_refused_on_a_cpu(capsys):
    assert call("eval/bench.py", "drafter", "--device", "cpu") == 2
    assert capsys.readouterr().err == (
        "error: drafter: Qwen/Qwen3.5-4B needs a GPU; on a CPU give --layers (and --tokens) that fit it\n"
    )
