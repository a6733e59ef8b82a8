"""Stored signals: written once, read back as what the target said, and refused when they are not."""

import json

import pytest
import torch
from helpers import call, write_recipe

from draftkv.distill.schedule import Item
from draftkv.distill.student import Teacher
from draftkv.drafter import load_drafter
from draftkv.errors import InputError
from draftkv.models import load_model
from draftkv.recipe import load_recipe
from draftkv.teacher.rollouts import load_rollouts
from draftkv.teacher.signal_store import SHARD_ROWS, SignalPlan, StoredTeacher, row_name
from draftkv.teacher.signals import Dense

FP32 = "target.dtype=float32"


@pytest.fixture
def recipe_path(tmp_path):
    path = write_recipe(tmp_path, steps=4)
    assert call("data/rollouts.py", path, FP32) == 0
    return path


def plan_of(path, *overrides):
    recipe = load_recipe(path, [FP32, *overrides])
    rollouts = load_rollouts(recipe, "train")
    vocab = load_drafter(recipe.drafter.model, None, recipe.target, None)[1]
    return recipe, SignalPlan.of(recipe, rollouts, vocab)


def stored(path, *overrides):
    recipe, plan = plan_of(path, *overrides)
    return plan, StoredTeacher(plan, recipe.signal.temperature, torch.device("cpu"))


def test_what_is_read_is_what_the_target_says(recipe_path):
    assert call("data/signals.py", recipe_path, FP32, "signal.k=16") == 0
    plan, teacher = stored(recipe_path, "signal.k=16")
    target = Teacher(load_model("rehearsal:llama", None, "float32"))
    for row in plan.rows:
        dense = Dense(target.hidden(row).float() @ target.head.float().t())
        want, got = dense.top_k(16), teacher.read(row)
        assert torch.equal(got.ids, want.ids) and len(got) == len(row["response_ids"]) - 1
        assert (got.logprobs.exp() - want.logprobs.exp()).abs().max() < 1e-3
        total = got.logprobs.exp().sum(-1) + got.tail_logprob.exp()
        assert torch.allclose(total, torch.ones_like(total), atol=1e-6), "fp16 rounding stays a distribution"
    items = [Item(plan.rows[1], (), ()), Item(plan.rows[0], (), ())]
    teacher.expect(items)
    both = teacher.signal(items, [(0, 0, 1.0), (0, 1, 1.0), (0, 0, 1.0)])
    parts = [teacher.read(plan.rows[i]) for i in (1, 0, 1)]
    assert torch.equal(both.ids, torch.cat([p.ids for p in parts]))


def test_training_from_stored_signals_follows_training_from_the_target(recipe_path):
    """With every token kept the losses agree; with few they differ and both bounds of acceptance are logged."""
    assert call("train/distill.py", recipe_path, FP32) == 0
    folder = recipe_path.parent / "runs"
    losses = {"run": losses_of(folder / "run")}
    for name, k in (("all", 512), ("few", 4)):
        words = [FP32, f"signal.k={k}", "signal.source=stored", f"name={name}"]
        assert call("data/signals.py", recipe_path, *words) == 0
        assert call("train/distill.py", recipe_path, *words) == 0
        losses[name] = losses_of(folder / name)
    assert losses["all"] == pytest.approx(losses["run"], rel=2e-3) and losses["few"] != pytest.approx(losses["run"])
    last = json.loads((folder / "few" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["alpha_low"] < last["alpha_high"] == last["alpha"]


def losses_of(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_killed_run_goes_on_and_nothing_is_written_twice(recipe_path, monkeypatch):
    from draftkv.teacher import signal_store

    monkeypatch.setattr(signal_store, "SHARD_ROWS", 3)
    written, write = [], signal_store.write_shard

    def stop_at_second(plan, index, *others):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(index)
        write(plan, index, *others)

    monkeypatch.setattr(signal_store, "write_shard", stop_at_second)
    assert call("data/signals.py", recipe_path, FP32) == 130
    with pytest.raises(InputError, match="not finished"):
        stored(recipe_path)
    monkeypatch.setattr(signal_store, "write_shard", lambda *a: (written.append(a[1]), write(*a)))
    assert call("data/signals.py", recipe_path, FP32) == 0
    assert written == [0, 1, 2]
    assert len(stored(recipe_path)[1].places) == 8


def damage(plan, kind):
    file = plan.file(0)
    about = json.loads(file.with_suffix(".json").read_text())
    if kind == "flipped":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "missing":
        file.unlink()
    elif kind == "foreign":
        file.with_suffix(".json").write_text(json.dumps(about | {"key": "0" * 16}))
    elif kind == "other rows":
        file.with_suffix(".json").write_text(json.dumps(about | {"rows": about["rows"][::-1]}))
    else:
        file.with_suffix(".json").write_text("{")


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing", "foreign", "other rows", "unreadable"])
def test_a_bad_shard_is_refused_by_name(recipe_path, kind):
    assert call("data/signals.py", recipe_path, FP32) == 0
    plan = plan_of(recipe_path)[1]
    damage(plan, kind)
    with pytest.raises(InputError, match="shard-00000"):
        stored(recipe_path)


@pytest.mark.parametrize("change", ["signal.k=7", "signal.temperature=2.0", "target.dtype=bfloat16",
                                    "rollouts.max_new_tokens=9"])  # fmt: skip
def test_a_changed_ingredient_is_another_store(recipe_path, change):
    if "rollouts" in change:
        assert call("data/rollouts.py", recipe_path, FP32, change) == 0
    assert plan_of(recipe_path, change)[1].key != plan_of(recipe_path)[1].key


def test_random_samples_leave_the_gradient_of_forward_kl_unbiased():
    """The mean of many sampled targets is the target itself, and each is a distribution without a tail."""
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0)) * 2
    generator, mean = torch.Generator().manual_seed(1), torch.zeros(3, 12)
    for _ in range(4000):
        found = Dense(logits).sample(5, 1.0, generator)
        assert torch.allclose(found.logprobs.exp().sum(-1), torch.ones(3)) and not found.tail_logprob.exp().any()
        assert all(len(set(ids)) == 5 for ids in found.ids.tolist())
        mean.scatter_add_(1, found.ids, found.logprobs.exp() / 4000)
    assert (mean - logits.softmax(-1)).abs().max() < 0.02


@pytest.mark.parametrize("words, message", [
    (["signal.source=stored", "loss=[{name: tv, temperature: 2.0}]"], "loss.0.temperature 2"),
    (["signal.source=stored", "signal.samples=50", "loss=[{name: tv}]"], "no other loss"),
])  # fmt: skip
def test_losses_that_a_stored_signal_cannot_feed_are_refused(recipe_path, words, message):
    with pytest.raises(InputError, match=message):
        load_recipe(recipe_path, words)


def test_sampled_signals_train(recipe_path):
    words = [FP32, "signal.samples=50", "signal.source=stored", "name=sampled"]
    assert call("data/signals.py", recipe_path, *words) == 0
    assert call("train/distill.py", recipe_path, *words) == 0
    assert all(x == x for x in losses_of(recipe_path.parent / "runs" / "sampled"))


def test_row_names_and_shards(recipe_path):
    plan = plan_of(recipe_path)[1]
    assert len(plan.shards) == 1 and len(plan.rows) == 8 <= SHARD_ROWS
    assert row_name(plan.rows[0]).endswith("@0")
