"""Bootstrap intervals: coverage, pairing, and the cases in which there is nothing to resample."""

import numpy as np
import pytest

from draftkv.acceptance.intervals import Counts, al, difference, draws, retention
from draftkv.errors import InputError


def simulate(rng, prompts, mean=3.0, spread=0.5):
    blocks = rng.integers(20, 60, size=prompts).astype(float)
    return Counts(blocks, blocks * (mean + spread * rng.standard_normal(prompts)))


def test_coverage_on_simulated_data():
    rng = np.random.default_rng(0)
    covered = sum((i := al(simulate(rng, 40), 400, seed)).low <= 3.0 <= i.high for seed in range(300))
    assert 0.88 <= covered / 300 <= 0.99


def test_paired_is_narrower_than_unpaired_on_correlated_data():
    rng = np.random.default_rng(1)
    before = simulate(rng, 30, spread=1.0)
    after = Counts(before.blocks, before.tokens + before.blocks * (0.2 + 0.02 * rng.standard_normal(30)))
    paired = difference(after, before)
    a, b = al(after), al(before)
    assert paired.high - paired.low < 0.3 * ((a.high - a.low) + (b.high - b.low))
    assert paired.excludes(0.0) and paired.value == pytest.approx(a.value - b.value)
    kept = retention(before, after)
    assert kept.value == pytest.approx(b.value / a.value) and kept.low <= kept.value <= kept.high


def test_same_seed_same_interval():
    data = simulate(np.random.default_rng(2), 20)
    assert al(data, 500, 7) == al(data, 500, 7)
    assert al(data, 500, 7) != al(data, 500, 8)
    assert (draws(20, 50, 0).sum(1) == 20).all()


def test_one_prompt_is_a_point():
    one = Counts([10.0], [25.0])
    result = al(one)
    assert (result.value, result.low, result.high) == (2.5, 2.5, 2.5) and result.is_point
    assert not difference(one, Counts([10.0], [20.0])).excludes(0.0)


def test_rows_without_blocks_are_counted():
    data = Counts([10.0, 0.0, 10.0], [20.0, 0.0, 40.0])
    assert (al(data).value, al(data).prompts, al(data).unusable) == (3.0, 2, 1)
    other = Counts([0.0, 5.0, 10.0], [0.0, 5.0, 20.0])
    assert (difference(data, other).prompts, difference(data, other).unusable) == (1, 2)
    nothing = al(Counts([0.0], [0.0]))
    assert (nothing.value, nothing.low, nothing.prompts, nothing.unusable) == (None, None, 0, 1)
    assert not nothing.excludes(1.0) and Counts([0.0], [0.0]).macro is None
    assert al(Counts([], [])).value is None


def test_bad_input():
    with pytest.raises(InputError, match="same prompts"):
        difference(Counts([1.0], [1.0]), Counts([1.0, 1.0], [1.0, 1.0]))
    for bad in ([float("nan")], [-1.0], [1.0, 2.0]):
        with pytest.raises(InputError):
            Counts(bad, [1.0])
    with pytest.raises(InputError):
        al(Counts([1.0, 1.0], [1.0, 1.0]), bootstrap=0)
