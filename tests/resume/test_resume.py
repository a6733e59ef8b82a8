"""Runs that die: killed, asked to stop, started twice, started with another recipe."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from accelerate import Accelerator
from helpers import STEPS, call, finish, start, wait_for_file, wait_for_steps, write_recipe
from safetensors.torch import load_file

from draftkv.acceptance.replay import Replay
from draftkv.distill.hooks import Evaluation, Trackers
from draftkv.distill.stopping import Stopped, StopSignal
from draftkv.drafter import load_drafter
from draftkv.recipe import load_recipe
from draftkv.rundir import lock
from draftkv.teacher.rollouts import held_out_rows, load_rollouts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, out, err = finish(write_recipe(folder))
    assert code == 0, err
    return folder / "runs" / "run"


def go_on(capsys, recipe: Path, *overrides: str) -> tuple[int, str, str]:
    """As `finish`, in this process."""
    capsys.readouterr()
    return call("train/distill.py", recipe, *overrides), *capsys.readouterr()


def weights(run: Path) -> dict:
    return load_file(run / "export" / "model.safetensors")


def same_end(run: Path, other: Path) -> None:
    a, b = weights(run), weights(other)
    assert a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a), "weights are bit-equal"
    last = [[r for r in map(json.loads, (x / "acceptance.jsonl").read_text().splitlines()) if r["step"] == STEPS]
            for x in (run, other)]  # fmt: skip
    for x, y in zip(last[0][-2:], last[1][-2:], strict=True):
        assert {k: v for k, v in x.items() if k != "wall_s"} == {k: v for k, v in y.items() if k != "wall_s"}


def test_killed_and_resumed_equals_undisturbed(tmp_path, undisturbed, capsys):
    recipe, run = write_recipe(tmp_path), tmp_path / "runs" / "run"
    process = start(recipe)
    wait_for_steps(run, 9, process)
    process.kill()
    process.communicate()
    assert not (run / "done.json").exists()
    code, out, err = go_on(capsys, recipe)
    assert code == 0, err
    assert "continuing after step 7" in out
    same_end(run, undisturbed)


def test_sigterm_saves_and_leaves_with_status_0(tmp_path, undisturbed, capsys):
    recipe, run = write_recipe(tmp_path), tmp_path / "runs" / "run"
    process = start(recipe)
    wait_for_steps(run, 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "the same command continues" in out
    code, out, err = go_on(capsys, recipe)
    assert code == 0 and "continuing after step" in out, err
    same_end(run, undisturbed)


def complete(stores: Path) -> bool:
    """Whether every store in a folder is."""
    manifests = [folder / "manifest.json" for folder in stores.iterdir()]
    return all(file.is_file() and json.loads(file.read_text())["complete"] for file in manifests)


def test_sigterm_while_stores_are_written_leaves_with_status_0(tmp_path, capsys):
    recipe, runs, prompts = write_recipe(tmp_path, steps=2), tmp_path / "runs", tmp_path / "many.jsonl"
    lines = [{"text": f"number {i} of many " * 5, "row_id": f"m{i}"} for i in range(60)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    words = [f"prompts.train.source={prompts}", "rollouts.train_temperatures=[0.0, 0.5, 1.0]", "rollouts.batch_size=4",
             "signal.source=stored"]  # fmt: skip
    kept = {}
    for first in ("rollouts/*/shard-00000", "signals/*/shard-00000.json"):
        process = start(recipe, *words)
        wait_for_file(runs, first, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "stopped by a signal" in out and "the same command continues" in out
        if first.startswith("rollouts"):  # signals of so small a model may be complete before the signal comes
            assert not complete(runs / "rollouts"), "it left in the middle"
        kept |= {shard: shard.stat().st_mtime_ns for shard in runs.glob(first)}
    code, out, err = go_on(capsys, recipe, *words)
    assert code == 0 and (runs / "run" / "done.json").exists(), err
    assert all(shard.stat().st_mtime_ns == time for shard, time in kept.items()), "what was complete is kept"


def test_an_evaluation_that_is_broken_off_records_nothing(undisturbed, monkeypatch):
    recipe = load_recipe(undisturbed.parent.parent / "recipe.yaml", ["name=broken-off", "trackers=[]"])
    rows, stop, replayed = held_out_rows(recipe, load_rollouts(recipe, "eval")), StopSignal(), []
    drafter, vocab = load_drafter(str(undisturbed / "export"), None, recipe.target)
    own = Replay.row

    def row(self, model, row, policies):
        replayed.append(row["row_id"])
        stop.asked = True
        return own(self, model, row, policies)

    monkeypatch.setattr(Replay, "row", row)
    accelerator = Accelerator(cpu=True)
    evaluate = Evaluation(recipe, accelerator, rows, Trackers(recipe, accelerator), stop, vocab)
    with pytest.raises(Stopped):
        evaluate(drafter, 3)
    assert len(replayed) == 1 < len(rows) and not evaluate.path.exists() and not evaluate.done(3)
    stop.asked = False
    monkeypatch.undo()
    evaluate(drafter, 3)
    assert evaluate.done(3)


def test_second_run_does_nothing_and_a_changed_recipe_is_refused_by_key(undisturbed, capsys):
    recipe = undisturbed.parent.parent / "recipe.yaml"
    before = (undisturbed / "metrics.jsonl").read_bytes()
    code, out, _ = go_on(capsys, recipe)
    assert code == 0 and "nothing to do" in out
    code, _, err = go_on(capsys, recipe, "train.lr=0.5")
    assert code == 2 and "train.lr was 0.001" in err and "0.5 now" in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_a_half_written_checkpoint_is_ignored(tmp_path, undisturbed, capsys):
    recipe, run = write_recipe(tmp_path), tmp_path / "runs" / "run"
    process = start(recipe)
    wait_for_steps(run, 9, process)
    process.kill()
    process.communicate()
    half = run / "checkpoints" / "step-000014"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    code, out, err = go_on(capsys, recipe)
    assert code == 0 and "continuing after step 7" in out, err
    same_end(run, undisturbed)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "state.json"])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, name):
    import torch
    from accelerate import Accelerator

    from draftkv.distill import checkpoints
    from draftkv.errors import RunError

    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    for step in (3, 6):
        checkpoints.save(accelerator, tmp_path, step, {}, 2)
    file = tmp_path / "checkpoints" / "step-000006" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(RunError, match="step-000006: unreadable .*remove it to resume from the one before"):
        checkpoints.load_newest(accelerator, tmp_path)
    shutil.rmtree(file.parent)
    assert checkpoints.load_newest(accelerator, tmp_path)["step"] == 3


def test_two_runs_in_one_folder(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    with lock(tmp_path / "runs" / "run"):
        assert call("train/distill.py", recipe) == 1
    err = capsys.readouterr().err
    assert "another run (process" in err and len(err.splitlines()) == 1


def test_export_is_complete_and_loads_anywhere(undisturbed):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = undisturbed / "export"
    for name in ("config.json", "generation_config.json", "README.md", "draft_cache.json", "provenance.json"):
        assert (folder / name).is_file(), name
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    card = (folder / "README.md").read_text()
    assert "| swa B=8 | 0 |" in card and "training rows: 8" in card
    assert json.loads((folder / "draft_cache.json").read_text())["policy"]["budget"] == 8


def test_native_window_export(undisturbed, capsys):
    recipe = undisturbed.parent.parent / "recipe.yaml"
    assert call("train/export.py", recipe, "--native-window") == 0, capsys.readouterr().err
    native = undisturbed / "export-native-window"
    config = json.loads((native / "config.json").read_text())
    assert set(config["layer_types"]) == {"sliding_attention"} and config["sliding_window"] == 9
    cache = json.loads((native / "draft_cache.json").read_text())
    assert cache["policy"]["prefill"] == "windowed"
    assert "disable-hybrid-kv-cache-manager" in (native / "README.md").read_text()
    plain = json.loads((undisturbed / "export" / "config.json").read_text())
    assert plain.get("sliding_window") is None, "the plain export, which replay can evaluate, stays beside it"


def test_weights_moved_aside_by_a_killed_run_come_back(tmp_path, monkeypatch):
    """Killed after the old best weights were moved and before the new ones took their place."""
    from accelerate import Accelerator

    from draftkv.distill.hooks import read_step, save_weights
    from draftkv.rehearsal import tiny_model

    best, model, rename = tmp_path / "best", tiny_model("llama"), Path.rename
    save_weights(Accelerator(cpu=True), model, best, {"step": 3})

    def killed(self, target):
        if self.name == ".best":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save_weights(Accelerator(cpu=True), model, best, {"step": 6})
    monkeypatch.undo()
    assert not best.exists() and read_step(best) == {"step": 3} and (best / "model.safetensors").is_file()
    save_weights(Accelerator(cpu=True), model, best, {"step": 6})
    assert read_step(best) == {"step": 6} and [p.name for p in tmp_path.iterdir()] == ["best"]
    assert read_step(tmp_path / "last") == {}
