"""A disk that fills up: status 1, one line, and what was complete is still there to go on from.

A limit on the size of files stands in for the full disk: the system refuses the write in the middle of a file, in the
C++ and Rust code that writes weights too, and needs no disk of its own.
"""

import errno
import json
import shutil
import time
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import call, finish, start, write_recipe
from safetensors.torch import load_file

resource = pytest.importorskip("resource")
LIMIT = 200_000  # bytes: more than the records of the run, less than its weights


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="NOT TESTED HERE: a file-size limit needs Linux")
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    recipe, run = write_recipe(tmp_path), tmp_path / "runs" / "run"
    process = start(recipe, "train.steps=5000", "eval.every=5000")
    until = time.monotonic() + 120
    while not (run / "checkpoints/step-000007/state.json").is_file():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.002)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and len(err.splitlines()) == 1, err
    assert "not written: " in err and err.rstrip().endswith("what was complete is kept")
    kept = sorted(p.name for p in (run / "checkpoints").iterdir() if p.name[-1].isdigit())
    assert kept and all((run / "checkpoints" / name / "state.json").is_file() for name in kept), "no half folder"
    last = json.loads((run / "checkpoints" / kept[-1] / "state.json").read_text())["step"]
    # A changed recipe is refused, and 5000 steps take too long: the folder is told that 21 were asked for.
    text = (run / "recipe.yaml").read_text()
    goal = last + 3
    (run / "recipe.yaml").write_text(text.replace("steps: 5000", f"steps: {goal}", 1))
    code, out, err = finish(recipe, f"train.steps={goal}", "eval.every=5000")
    assert code == 0 and f"continuing after step {last}" in out, err


def full_after(written: int, save):
    """`Dataset.save_to_disk` on a disk with room for so many shards."""
    done = []

    def save_to_disk(self, folder, *args, **kwargs):
        save(self, folder, *args, **kwargs)
        done.append(folder)
        if len(done) > written:
            next(Path(folder).glob("*.arrow")).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    return save_to_disk


def test_a_full_disk_leaves_a_store_that_resumes(tmp_path, capsys, monkeypatch):
    words = [write_recipe(tmp_path), "rollouts.batch_size=2"]
    save = Dataset.save_to_disk
    monkeypatch.setattr(Dataset, "save_to_disk", full_after(3, save))
    assert call("data/rollouts.py", *words) == 1
    err = capsys.readouterr().err
    assert "shard-00003: not written: [Errno 28] No space left on device" in err and len(err.splitlines()) == 1
    (store,) = (tmp_path / "runs" / "rollouts").iterdir()
    assert sorted(p.name for p in store.glob("shard*")) == ["shard-00000", "shard-00001", "shard-00002"]
    monkeypatch.setattr(Dataset, "save_to_disk", save)
    assert call("data/rollouts.py", *words) == 0
    assert "3 of 4 batches are already in" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["last", "export"])
def test_a_full_disk_leaves_the_weights_before(which, tmp_path, capsys, monkeypatch):
    """Weights and export are replaced when the new ones are whole, not before."""
    from transformers import LlamaForCausalLM

    recipe, run = write_recipe(tmp_path, steps=4, checkpoint_every=2), tmp_path / "runs" / "run"
    assert call("train/distill.py", recipe) == 0
    folder = run / ("export" if which == "export" else "checkpoints/last")
    before = load_file(folder / "model.safetensors")
    capsys.readouterr()

    def fails(self, draft, *args, **kwargs):
        Path(draft).mkdir(parents=True)
        (Path(draft) / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fails)
    (run / "done.json").unlink()
    if which == "last":
        shutil.rmtree(run / "export")
    assert call("train/export.py" if which == "export" else "train/distill.py", recipe) == 1
    err = capsys.readouterr().err
    assert "No space left on device; what was complete is kept" in err and len(err.splitlines()) == 1
    after = load_file(folder / "model.safetensors")
    assert all((after[k] == v).all() for k, v in before.items())
    assert not list(run.rglob(".export")) and not list(run.rglob(".last"))
