"""Trackers are a convenience: missing, offline or failing ones never stop a run, and metrics.jsonl holds everything."""

import importlib.util
import json
import types
from pathlib import Path

import pytest
from accelerate.tracking import TrackioTracker, WandBTracker
from helpers import call, write_recipe

FIND = importlib.util.find_spec
KEYS = {"step", "loss", "lr", "grad_norm", "alpha", "supervised_tokens", "skipped", "tokens_per_s", "step_s"}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path, tmp_path_factory):
    """No account, and nothing written outside the tests' folders."""
    monkeypatch.setenv("DRAFTKV_CACHE", str(tmp_path_factory.getbasetemp() / "rehearsal-cache"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)


def run(folder: Path, trackers: list[str], capsys) -> str:
    """A run of three steps with these trackers; checks that it finished with all of its records."""
    recipe = write_recipe(folder, steps=3, checkpoint_every=3)
    status = call("train/distill.py", recipe, f"trackers=[{', '.join(trackers)}]")
    seen = capsys.readouterr()
    assert status == 0, seen.err
    metrics = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2, 3] and all(m.keys() >= KEYS for m in metrics)
    records = [json.loads(line) for line in (folder / "runs/run/acceptance.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 0, 3, 3]
    assert seen.out.count("attention: sdpa (") == 1
    assert json.loads((folder / "runs/run/provenance.json").read_text())["attention"].startswith("sdpa (")
    assert (folder / "runs/run/export/config.json").is_file() and (folder / "runs/run/done.json").is_file()
    return seen.out


def test_trackers_that_are_not_installed_are_named(tmp_path, capsys, monkeypatch):
    names = ["wandb", "trackio", "tensorboard"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in names else FIND(name, *a))
    out = run(tmp_path, names, capsys)
    for name in names:
        assert out.count(f"tracker {name} is not installed (pip install 'draftkv[{name}]')") == 1


def raises(*args, **kwargs):
    raise ConnectionError("no route\nto the server")


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
def test_a_tracker_that_fails_is_announced_once_and_spares_the_others(method, tmp_path, capsys, monkeypatch):
    calls = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: FIND(name, *a) or types.ModuleType(name))
    for kind in (WandBTracker, TrackioTracker):
        for name in ("start", "store_init_configuration", "log", "finish"):
            monkeypatch.setattr(kind, name, lambda self, *a, name=name, **k: calls.append((self.name, name, k)))
    monkeypatch.setattr(WandBTracker, method, raises)
    out = run(tmp_path, ["wandb", "trackio"], capsys)
    assert out.count("tracker wandb is off: ConnectionError: no route to the server") == 1
    assert [k["step"] for tracker, name, k in calls if (tracker, name) == ("trackio", "log")] == [0, 1, 2, 3, 3]
    assert [name for tracker, name, _ in calls if tracker == "trackio"][-1] == "finish"


def test_tensorboard_gets_metrics_and_acceptance(tmp_path, capsys):
    if FIND("tensorboard") is None:
        pytest.skip("NOT TESTED HERE: tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert "tracker" not in run(tmp_path, ["tensorboard"], capsys)
    events = EventAccumulator(str(tmp_path / "runs/run/tensorboard/run"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    assert [e.step for e in events.Scalars("al/T0/full")] == [0, 3]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_an_offline_tracker(name, tmp_path, capsys):
    """Without an account or a network the tracker keeps its files here, or is left out; the run does not wait."""
    if FIND(name) is None:
        pytest.skip(f"NOT TESTED HERE: {name} is not installed")
    assert f"tracker {name}" not in run(tmp_path, [name], capsys)
    kept = (tmp_path / "runs/run").rglob("offline-run-*") if name == "wandb" else (tmp_path / "trackio").rglob("*")
    assert list(kept), "its files are kept on this machine"
