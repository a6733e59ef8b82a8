"""Every comparison of eval/bench.py runs, at a size where its figures mean nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, call

from draftkv.bench.training import _random_signal, _row, _Step
from draftkv.cache.policy import Policy
from draftkv.distill.schedule import Item
from draftkv.distill.student import build_batch, supervised_rows
from draftkv.rehearsal import tiny_model

TINY = "rehearsal:llama"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


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


@pytest.mark.parametrize("words, told", [
    (["drafter", "--device", "cpu"],
     "drafter: Qwen/Qwen3.5-4B needs a GPU; on a CPU give --layers (and --tokens) that fit it"),
    pytest.param(["rates", "--device", "cuda"], "--device cuda: no CUDA device here", marks=no_gpu),
    (["rates", "--json", "/absent/figures.json"], "--json /absent/figures.json: there is no folder /absent"),
    (["replay", "--recipe", "absent.yaml"], "absent.yaml: no such recipe file"),
    (["step", "--model", "/absent/model"], "/absent/model: "),
])  # fmt: skip
def test_bad_input_is_one_line(capsys, monkeypatch, words, told):
    """Here or in the process that measures."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert call("eval/bench.py", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}") and error.count("\n") == 1


def test_a_bad_policy_is_one_line_from_the_process_that_measures(capsys):
    assert call("eval/bench.py", "masks", "--policy", "swaa", "--tokens", "64") == 2
    error = capsys.readouterr().err
    assert "unknown policy 'swaa'; known: full, swa" in error and error.count("\n") == 1


def test_a_step_is_measured_in_half_precision_as_training_takes_it():
    seen = []
    drafter = tiny_model("llama")
    drafter.get_decoder().layers[0].self_attn.q_proj.register_forward_hook(lambda *a: seen.append(a[-1].dtype))
    item = Item(_row("r", 12, 5, 512, 0), (Policy(policy="full"),), (1.0,))
    batch, owners = build_batch([item])
    index, lengths = supervised_rows(batch)
    signal = _random_signal(4, 512, torch.Generator().manual_seed(0), "cpu")
    for half, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        _Step(drafter, "cpu", "sdpa", half)([([item], (batch, index, signal, lengths, [w for *_, w in owners]))])
        assert seen.pop() == dtype
