"""The training loop on tiny models: normalisation, schedule, views, learning, bad steps, resume."""

import copy
import random

import pytest
import torch
from accelerate import Accelerator

from draftkv.cache.attention import ATTENTION
from draftkv.distill import schedule as sched
from draftkv.distill.anchor import Anchor
from draftkv.distill.loop import Trainer
from draftkv.distill.stopping import Stopped, StopSignal
from draftkv.distill.student import Student, Teacher
from draftkv.errors import RunError
from draftkv.recipe import Recipe
from draftkv.rehearsal import tiny_model
from draftkv.settings import validate


def recipe(tmp_path, **train):
    plain = {
        "name": "t", "output": str(tmp_path), "target": {"model": "rehearsal:llama"},
        "prompts": {"train": {"source": "x"}, "eval": {"source": "x"}},
        "views": ["full", {"policy": "swa", "budget": [6, 12], "weight": 2},
                  {"policy": "rift_stat", "budget": 10, "scorer": {"kind": "snapkv", "observation": 4}}],
        "loss": [{"name": "forward_kl"}, {"name": "lk_hybrid", "weight": 0.5}, {"name": "expected_al", "k": 3}],
        "train": {"steps": 4, "rows": 8, "micro_rows": 1, "views_per_row": 2, "lr": 1e-3, "precision": "no",
                  "warmup_steps": 1, "checkpoint_every": 100, **train},
        "eval": {"policies": ["full", {"policy": "swa", "budget": 8}], "every": 100},
    }  # fmt: skip
    return validate(plain, Recipe, "recipe")


def rows(count=16, seed=0):
    rng = random.Random(seed)
    return [
        {"row_id": f"r{i}", "prompt_ids": [rng.randrange(512) for _ in range(rng.randint(8, 24))], "temperature": 0.0,
         "response_ids": [rng.randrange(512) for _ in range(rng.randint(2, 20))], "finish_reason": "length"}
        for i in range(count)
    ]  # fmt: skip


class NoEvaluation:
    def done(self, step):
        return False

    def __call__(self, model, step):
        pass


def trainer(settings, data=None, log=None, drafter_seed=1):
    torch.manual_seed(0)
    model = tiny_model("llama", drafter_seed)
    model.set_attn_implementation(ATTENTION)
    student = Student(model.train(), settings.loss, 512, settings.train.head_chunk)
    optimizer = torch.optim.AdamW(student.parameters(), lr=settings.train.lr)
    accelerator = Accelerator(cpu=True)
    student, optimizer = accelerator.prepare(student, optimizer)
    schedule = sched.Schedule(rows() if data is None else data, settings)
    seen = [] if log is None else log
    anchor = Anchor(student.model, settings.train.initial_share)
    return Trainer(settings, accelerator, student, optimizer, Teacher(tiny_model("llama", 0)), schedule,
                   NoEvaluation(), seen.append, anchor, StopSignal())  # fmt: skip


def test_an_evaluation_that_a_signal_breaks_off_is_made_up_for(tmp_path):
    settings = recipe(tmp_path, steps=6, checkpoint_every=4)
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"every": 2})})

    class Evaluates(NoEvaluation):
        def __init__(self, leaves_at=None):
            self.steps, self.leaves_at = [], leaves_at

        def __call__(self, model, step):
            if step == self.leaves_at:
                raise Stopped
            self.steps.append(step)

    made = trainer(settings)
    made.evaluate = first = Evaluates(leaves_at=2)
    assert made.run() is False and first.steps == [0]
    again = trainer(settings)
    again.evaluate = second = Evaluates()
    assert again.resume() and again.progress.step == 2, "saved, though no checkpoint was due"
    assert again.run() is True and second.steps == [2, 4, 6]


def gradients(settings):
    made = trainer(settings)
    items = made.schedule.items(0)
    sums = made._accumulate(items, sum(i.weight for i in items))
    return sums, [p.grad.clone() for p in made.student.parameters()]


@pytest.mark.parametrize("micro_rows", [2, 4, 8, 3])
def test_gradients_do_not_depend_on_micro_batches(tmp_path, micro_rows):
    """1 x 8, 2 x 4, 8 x 1 and uneven: rows have responses of 2 to 20 tokens, so a per-batch mean would show."""
    want_sums, want = gradients(recipe(tmp_path))
    got_sums, got = gradients(recipe(tmp_path, micro_rows=micro_rows, bucket_steps=1))  # the same rows
    assert want_sums["loss"] == pytest.approx(got_sums["loss"], rel=1e-5)
    scale = max(w.abs().max() for w in want)
    for a, b in zip(want, got, strict=True):
        assert torch.allclose(a, b, atol=1e-6 * float(scale) + 1e-7, rtol=1e-4)


def test_views_depend_on_seed_step_and_row_alone(tmp_path):
    settings = recipe(tmp_path)
    first, again = (sched.Schedule(rows(), settings).items(3) for _ in range(2))
    assert [i.views for i in first] == [i.views for i in again]
    other = sched.Schedule(rows(), settings.model_copy(update={"seed": 1})).items(3)
    assert [i.views for i in first] != [i.views for i in other]
    shares = [p.is_full for s in range(100) for i in sched.Schedule(rows(), settings).items(s) for p in i.views]
    assert 0.2 < sum(shares) / len(shares) < 0.5


def test_as_many_draws_as_views_gives_every_view_once(tmp_path):
    settings = recipe(tmp_path, views_per_row=3)
    for item in sched.Schedule(rows(), settings).items(0):
        assert sorted(p.policy for p in item.views) == ["full", "rift_stat", "swa"]


def test_processes_share_a_step_without_overlap(tmp_path):
    settings = recipe(tmp_path, micro_rows=2, rows=7)
    schedule = sched.Schedule(rows(), settings)
    items = schedule.items(0)
    parts = [schedule.micro_batches(items, rank, 3) for rank in range(3)]
    assert len({len(p) for p in parts}) == 1, "every process makes the same number of passes"
    names = [i.row["row_id"] for p in parts for micro in p for i in micro]
    assert sorted(names) == sorted(i.row["row_id"] for i in items)


def test_every_row_is_seen_once_an_epoch(tmp_path):
    schedule = sched.Schedule(rows(16), recipe(tmp_path))
    seen = [i.row["row_id"] for s in range(2) for i in schedule.items(s)]
    assert sorted(seen) == sorted(r["row_id"] for r in rows(16))


def test_learning_rate_ends_at_its_minimum(tmp_path):
    train = recipe(tmp_path, steps=20, warmup_steps=4, min_lr_ratio=0.1).train
    rates = [sched.learning_rate(train, s) for s in range(20)]
    assert rates[0] == pytest.approx(train.lr / 4) and max(rates) == pytest.approx(train.lr)
    assert rates[-1] == pytest.approx(0.1 * train.lr)


def test_training_lowers_the_loss_and_only_what_is_trainable_moves(tmp_path):
    log = []
    made = trainer(recipe(tmp_path, steps=25, lr=3e-3), data=rows(8), log=log)
    frozen = made.student.model.get_input_embeddings().weight.requires_grad_(False).clone()
    made.run()
    assert log[-1]["loss"] < 0.8 * log[0]["loss"] and log[-1]["alpha"] > log[0]["alpha"]
    assert torch.equal(frozen, made.student.model.get_input_embeddings().weight)


def test_an_identical_drafter_under_the_full_view_has_nothing_to_learn(tmp_path):
    settings = recipe(tmp_path).model_copy(update={"views": (recipe(tmp_path).views[0],)})
    log = []
    trainer(settings, log=log, drafter_seed=0).step()
    assert log[0]["forward_kl"] == pytest.approx(0, abs=1e-5) and log[0]["alpha"] == pytest.approx(1, abs=1e-4)


def test_what_is_evaluated_lies_between_the_initial_and_the_own_weights(tmp_path):
    made = trainer(recipe(tmp_path, initial_share=0.25))
    weight = made.student.model.get_decoder().layers[0].self_attn.q_proj.weight
    initial = weight.detach().clone()
    with made.anchor.applied():
        assert torch.equal(weight, initial)
    made.step()
    own = weight.detach().clone()
    assert not torch.equal(own, initial)
    with made.anchor.applied():
        assert torch.allclose(weight, 0.25 * initial + 0.75 * own, atol=1e-7) and not torch.equal(weight, own)
    assert torch.equal(weight, own)


def test_a_non_finite_step_is_skipped_and_counted_then_stops_the_run(tmp_path):
    log = []
    made = trainer(recipe(tmp_path, max_bad_steps=2, steps=6), log=log)
    made.step()
    before = copy.deepcopy(made.student.state_dict())
    with torch.no_grad():
        made.teacher.model.get_output_embeddings().weight[0, 0] = float("nan")
    made.step()
    after = made.student.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before) and log[-1]["skipped"] == 1
    assert log[-1]["loss"] is None
    with pytest.raises(RunError, match="non-finite.*r"):
        made.step()
