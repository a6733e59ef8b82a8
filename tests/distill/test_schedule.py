"""Which rows share a forward pass: little padding, every row once an epoch, whatever the number of processes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkv.distill.schedule import Schedule
from draftkv.recipe import Recipe
from draftkv.settings import validate


def recipe(**train) -> Recipe:
    return validate({
        "name": "t", "target": {"model": "x"}, "prompts": {"train": {"source": "x"}, "eval": {"source": "x"}},
        "views": ["full", {"policy": "swa", "budget": 8}], "train": train, "eval": {"policies": ["full"]},
    }, Recipe, "recipe")  # fmt: skip


def rows(count: int, spread: float = 1.0, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    lengths = [(max(8, int(rng.lognormvariate(7, spread))), max(2, int(rng.lognormvariate(5.5, spread))))
               for _ in range(count)]  # fmt: skip
    return [{"row_id": f"r{i}", "prompt_ids": [0] * p, "response_ids": [0] * r} for i, (p, r) in enumerate(lengths)]


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize("micro_rows", [2, 4, 8])
@pytest.mark.parametrize("spread", [0.6, 1.0])
def test_padding_stays_under_a_tenth(spread, micro_rows, processes):
    """Log-normal lengths, as of chats and documents: medians 1,100 and 245 tokens, spread 0.6 and 1."""
    schedule = Schedule(rows(1000, spread), recipe(rows=32, micro_rows=micro_rows, views_per_row=2))
    shares = [schedule.padding(schedule.items(step), processes) for step in range(62)]  # two epochs
    assert sum(shares) / len(shares) < 0.1
    plain = Schedule(rows(1000, spread), recipe(rows=32, micro_rows=micro_rows, views_per_row=2, bucket_steps=1))
    assert sum(shares) < sum(plain.padding(plain.items(step), processes) for step in range(62))


def test_padding_is_what_the_batches_hold():
    from draftkv.distill.student import build_batch

    schedule = Schedule(rows(64), recipe(rows=16, micro_rows=4, views_per_row=2))
    items = schedule.items(1)
    batches = [build_batch(m)[0] for rank in (0, 1) for m in schedule.micro_batches(items, rank, 2)]
    fed = sum(row.length for batch in batches for row in batch.view.rows)
    held = sum(batch.input_ids.numel() for batch in batches)
    assert schedule.padding(items, 2) == pytest.approx(1 - fed / held)


@settings(max_examples=40, deadline=None)
@given(total=st.integers(1, 70), size=st.integers(1, 9), micro=st.integers(1, 5), buckets=st.integers(1, 5))
def test_every_row_comes_once_an_epoch_in_an_order_of_seed_and_rows(total, size, micro, buckets):
    plan, data = recipe(rows=size, micro_rows=micro, bucket_steps=buckets), rows(total)
    steps = 2 * total  # at least two epochs
    seen = [i.row["row_id"] for step in range(steps) for i in sorted_by_place(Schedule(data, plan), step)]
    for epoch in range(len(seen) // total):
        assert sorted(seen[epoch * total : (epoch + 1) * total]) == sorted(r["row_id"] for r in data)
    late = Schedule(data, plan)  # begins in the middle, as a resumed run does
    assert [i.row["row_id"] for i in sorted_by_place(late, steps - 1)] == seen[-size:]


def sorted_by_place(schedule: Schedule, step: int) -> list:
    """A step's items, in any order within it: only whole epochs are compared, so put them as they lie in the epoch."""
    items, total, size = schedule.items(step), len(schedule.rows), schedule.recipe.train.rows
    place = {}
    for at in range(step * size, (step + 1) * size):
        place.setdefault(schedule._epoch(at // total)[at % total], []).append(at)
    return sorted(items, key=lambda item: place[schedule.rows.index(item.row)].pop(0))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), micro=st.integers(1, 6), processes=st.integers(1, 9))
def test_processes_divide_a_step(size, micro, processes):
    schedule = Schedule(rows(50), recipe(rows=size, micro_rows=micro))
    items = schedule.items(3)
    parts = [schedule.micro_batches(items, rank, processes) for rank in range(processes)]
    assert len({len(part) for part in parts}) == 1, "every process makes the same number of passes"
    assert max(len(m) for part in parts for m in part) <= micro
    dealt = [item for turn in zip(*parts, strict=True) for m in turn for item in m]
    assert [i.row["row_id"] for i in dealt] == [i.row["row_id"] for i in items], "in turn, each row once"
    counts = [sum(map(len, part)) for part in parts]
    assert max(counts) - min(counts) <= len(parts[0]), "no process has a whole pass more than another"
