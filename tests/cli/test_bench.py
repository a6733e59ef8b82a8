"""Every comparison of eval/bench.py runs, at a size where its figures mean nothing."""

import json
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
import torch
from helpers import call

from draftkv.bench.training import _random_signal, _row, _Step
from draftkv.cache.policy import Policy
from draftkv.distill.schedule import Item
from draftkv.distill.student import build_batch, supervised_rows
from draftkv.rehearsal import tiny_model

TINY = "rehearsal:llama"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


@pytest.fixture
def one_process(monkeypatch):
    """What would be measured in processes of their own runs in this one, which has imported everything."""

    own = subprocess.run

    def here(command, **how):
        if "_worker" not in command:  # a compiler
            return own(command, **how)
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            status = call(*command[1:])
        return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())

    monkeypatch.setattr("draftkv.bench.measure.subprocess.run", here)


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
@pytest.mark.usefixtures("one_process")
def test_every_comparison_runs(tmp_path, capsys, words, expected):
    assert call("eval/bench.py", *words, "--json", tmp_path / "figures.json") == 0, capsys.readouterr().err
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert rows and any(expected in name for name in rows[0]), rows[0]


@pytest.mark.parametrize("words, told", [
    (["drafter", "--device", "cpu"],
     "drafter: Qwen/Qwen3.5-4B needs a GPU; on a CPU give --layers (and --tokens) that fit it"),
    pytest.param(["rates", "--device", "cuda"], "--device cuda: no CUDA device here", marks=no_gpu),
    (["rates", "--json", "/absent/figures.json"], "--json /absent/figures.json: there is no folder /absent"),
    (["replay", "--recipe", "absent.yaml"], "absent.yaml: no such recipe file"),
    (["step", "--model", "/absent/model"], "/absent/model: "),
    (["masks", "--policy", "swaa"], "unknown policy 'swaa'; known: full, swa"),
])  # fmt: skip
@pytest.mark.usefixtures("one_process")
def test_bad_input_is_one_line(capsys, words, told):
    """Found here or where it is measured."""
    assert call("eval/bench.py", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}") and error.count("\n") == 1


def test_the_process_that_measures_hands_on_what_is_wrong(capsys):
    assert call("eval/bench.py", "masks", "--policy", "swaa") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown policy 'swaa'") and error.count("\n") == 1


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
