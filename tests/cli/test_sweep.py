"""Sweeps: expansion, names, refusal before anything runs, skipping, and what happens when a point fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, call

from draftkv import sweep as module
from draftkv.errors import InputError, RunError
from draftkv.recipe import load_recipe
from draftkv.sweep import load_sweep, plan_sweep, recipe_hash, run_logged, run_sweep

BASE = str(Path(__file__).parent / "example.yaml")
RHO = str(ROOT / "recipes" / "sweeps" / "rho.yaml")


def write(folder: Path, **keys) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"name": "s", "base": BASE, **keys}, sort_keys=False))
    return path


def names(sweep) -> list[str]:
    return [p.recipe.name for p in sweep.points]


def test_a_grid_is_a_product_and_reaches_into_lists(tmp_path):
    sweep = load_sweep(write(tmp_path, grid={"views.2.rho": [0.25, 0.5], "seed": [0, 1]}))
    assert names(sweep) == ["s.rho0.25-seed0", "s.rho0.25-seed1", "s.rho0.5-seed0", "s.rho0.5-seed1"]
    assert [(p.recipe.views[2].rho, p.recipe.seed) for p in sweep.points] == [(0.25, 0), (0.25, 1), (0.5, 0), (0.5, 1)]
    assert sweep.points[1].changes == {"views.2.rho": 0.25, "seed": 1}


def test_points_are_crossed_with_the_grid_and_may_be_named(tmp_path):
    sweep = load_sweep(write(tmp_path, grid={"train.lr": [1e-5, 2e-5]},
                             points=[{"loss.0.name": "tv"}, {"name": "soft", "loss.0.temperature": 2}]))
    assert names(sweep) == ["s.nametv-lr1e-05", "s.nametv-lr2e-05", "s.soft-lr1e-05", "s.soft-lr2e-05"]
    assert [p.recipe.train.lr for p in sweep.points] == [1e-5, 2e-5, 1e-5, 2e-5]
    assert [p.recipe.loss[0].temperature for p in sweep.points] == [1, 1, 2, 2]


def test_keys_with_the_same_last_part_are_told_apart_and_long_values_are_hashed(tmp_path):
    policies = [["full", {"policy": "swa", "budget": b}] for b in (64, 128)]
    sweep = load_sweep(write(tmp_path, set={"eval.select": -1}, grid={"eval.policies": policies},
                             points=[{"views.2.rho": 0.5, "eval.policies.0": "full"}]))
    assert len(set(names(sweep))) == 2
    sweep = load_sweep(write(tmp_path, grid={"views.1.budget": [64], "views.2.budget": [64]}))
    assert names(sweep) == ["s.views1budget64-views2budget64"]


def test_the_command_line_wins_over_set_and_base(tmp_path):
    path = write(tmp_path, set={"train.steps": 20, "train.rows": 2}, grid={"seed": [1]})
    point = load_sweep(path, ["train.steps=3", "name=mine"]).points[0]
    assert (point.recipe.train.steps, point.recipe.train.rows, point.recipe.name) == (3, 2, "mine.seed1")
    assert load_recipe(BASE, list(point.overrides)) == point.recipe, "the command gives the recipe that was checked"


@pytest.mark.parametrize(("keys", "message"), [
    ({"grid": {"seed": [0], "views.2.rho": [0.5, 1.5]}}, "point s.seed0-rho1.5: .*views.2.rho: Input should be less"),
    ({"grid": {"train.stepz": [1]}}, "point s.stepz1: .*train.stepz: unknown key; did you mean 'steps'?"),
    ({"grid": {"views.7.rho": [1]}}, "point s.rho1: override 'views.7.rho=1'"),
    ({"grid": {"seed": []}}, "grid.seed: no values"),
    ({}, "needs a grid or a list of points"),
    ({"grids": {"seed": [0]}}, "grids: unknown key; did you mean 'grid'"),
    ({"points": [{"name": "a", "seed": 0}, {"name": "a", "seed": 1}]}, "two points are named 'a'"),
    ({"grid": {"seed": [0, 0]}}, "two points are named"),
    ({"points": [{"name": "a", "seed": 0}, {"name": "b", "seed": 0}]}, "'a' and 'b' are the same experiment"),
    ({"base": "gone.yaml", "grid": {"seed": [0]}}, "gone.yaml: no such recipe file"),
])
def test_a_bad_sweep_is_refused_before_anything_runs(tmp_path, keys, message):
    with pytest.raises(InputError, match=message) as caught:
        load_sweep(write(tmp_path, **keys))
    assert "\n" not in str(caught.value)


def test_a_missing_or_malformed_file_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such sweep file"):
        load_sweep(tmp_path / "none.yaml")
    for text in ("a: [", "- 1"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(InputError, match="bad.yaml: ") as caught:
            load_sweep(tmp_path / "bad.yaml")
        assert "\n" not in str(caught.value)


def finish(point) -> None:
    (point.recipe.run_dir / "export").mkdir(parents=True, exist_ok=True)
    (point.recipe.run_dir / "export" / "config.json").write_text("{}")
    (point.recipe.run_dir / "done.json").write_text(json.dumps({"recipe_hash": recipe_hash(point.recipe)}))


@pytest.fixture
def three(tmp_path, monkeypatch):
    """A sweep of three points, the reports that it writes, and a runner whose points succeed but for `broken`."""
    path = write(tmp_path, set={"output": str(tmp_path / "runs")}, grid={"seed": [0, 1, 2]})
    sweep, ran, reports, broken = load_sweep(path), [], [], set()
    monkeypatch.setattr(module, "_report", lambda sweep: reports.append([p.slug for p in sweep.points if p.finished]))

    def runner(command, log):
        point = next(p for p in sweep.points if f"name={p.recipe.name}" in command)
        ran.append(point.slug)
        if point.slug in broken:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("error: no space left\n\n")
            return 1
        finish(point)
        return 0

    return sweep, ran, reports, broken, runner


def test_finished_points_are_skipped_unless_their_recipe_changed(three):
    sweep, ran, reports, _, runner = three
    finish(sweep.points[0])
    (sweep.points[1].recipe.run_dir / "export").mkdir(parents=True)
    (sweep.points[1].recipe.run_dir / "export" / "config.json").write_text("{}")
    (sweep.points[1].recipe.run_dir / "done.json").write_text('{"recipe_hash": "of another recipe"}')
    assert "seed0: finished, would be skipped" in plan_sweep(sweep)
    run_sweep(sweep, runner=runner)
    assert ran == ["seed1", "seed2"] and reports == [["seed0", "seed1", "seed2"]]
    run_sweep(sweep, runner=runner)
    assert ran == ["seed1", "seed2"], "all are finished now"


def test_a_failed_point_is_reported_after_the_others_have_run(three, capsys):
    sweep, ran, reports, broken, runner = three
    broken.add("seed1")
    with pytest.raises(RunError, match=r"1 of 3 points failed: s.seed1 \(.*s.seed1/log.txt\)"):
        run_sweep(sweep, runner=runner)
    assert ran == ["seed0", "seed1", "seed2"] and reports == [["seed0", "seed2"]]
    assert "FAILED after 0 s with status 1: error: no space left" in capsys.readouterr().out
    broken.clear()
    run_sweep(sweep, runner=runner)
    assert ran[3:] == ["seed1"], "only the failed one runs again"


def test_status_zero_without_an_export_is_a_failure(three):
    sweep, *_ = three
    with pytest.raises(RunError, match="3 of 3 points failed"):
        run_sweep(sweep, runner=lambda command, log: 0)


def test_output_goes_to_the_log(tmp_path):
    log = tmp_path / "run" / "log.txt"
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert run_logged([sys.executable, "-c", code], log) == 3
    assert log.read_text().startswith("$ ") and {"out", "err"} <= set(log.read_text().split("\n"))


def test_sigterm_lets_the_running_point_save(tmp_path):
    """The launcher dies of the signal at once; its child, which saves first, must still be waited for."""
    save = ("import signal, sys, time, pathlib\n"
            "def stop(*_): time.sleep(0.5); pathlib.Path('saved').touch(); sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, stop); pathlib.Path('ready').touch(); time.sleep(60)")
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {save!r}])"
    outer = ("import sys, pathlib; from draftkv.sweep import run_logged; from draftkv.errors import RunError\n"
             "try: run_logged([sys.executable, '-c', sys.argv[1]], pathlib.Path('log.txt'))\n"
             "except RunError as e: sys.exit(7 if pathlib.Path('saved').exists() else 8)")
    process = subprocess.Popen([sys.executable, "-c", outer, launcher], cwd=tmp_path)
    for _ in range(600):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == 7


def test_plan_prints_the_commands_and_bad_input_exits_with_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("train/sweep.py", RHO, "--plan", "--rehearse", "--config_file", BASE) == 0
    out = capsys.readouterr().out
    commands = [line for line in out.splitlines() if "accelerate.commands.launch" in line]
    assert len(commands) == 3 and all("--config_file" in c and c.endswith("--rehearse") for c in commands)
    assert not (tmp_path / "runs").exists()
    for arguments in ([RHO, "views.1.rho=2"], [RHO, "--config_file", "none.yaml"]):
        assert call("train/sweep.py", *arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_three_point_sweep_rehearses(tmp_path, capsys, monkeypatch):
    """Each point is a process of its own under `accelerate launch`; only the sweep itself runs here."""
    monkeypatch.chdir(tmp_path)
    status = call("train/sweep.py", RHO, "--rehearse")
    logs = {p.parent.name: p.read_text()[-800:] for p in tmp_path.glob("runs/*/log.txt")}
    assert status == 0, (capsys.readouterr(), logs)
    runs = sorted(p.parent.name for p in tmp_path.glob("runs/*/done.json"))
    assert runs == [f"rho.train{r}-rehearsal" for r in ("0.25", "0.5", "0.75")]
    assert list(tmp_path.glob("runs/rho-rehearsal/report/*")), "one collated report"
    capsys.readouterr()
    assert call("train/sweep.py", RHO, "--rehearse") == 0
    assert capsys.readouterr().out.count("finished before, skipped") == 3
