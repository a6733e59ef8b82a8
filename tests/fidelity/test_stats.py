"""Figures on numbers whose answer is known."""

import numpy as np
import pytest

from draftkv.cache.policy import Policy
from draftkv.errors import InputError
from draftkv.fidelity import stats
from draftkv.fidelity.report import Results, sheets, write


def test_rouge_of_equal_and_of_half_equal_texts():
    score = stats.rouge_scorer()
    assert score("a b c d", "a b c d") == 1
    assert score("a b c d", "a b x y") == pytest.approx(0.5)
    assert score("猫", "猫") == 1 and score("猫", "犬") == 0


def test_pairing_takes_out_what_a_sample_does_to_both_sides():
    rng = np.random.default_rng(0)
    hard = rng.uniform(0, 0.6, 60)
    before, after = hard, hard + 0.1 + rng.normal(0, 0.01, 60)
    change = stats.difference(after, before)
    assert change.value == pytest.approx(0.1, abs=0.01) and change.excludes(0)
    wide = stats.mean(after)
    assert wide.high - wide.low > 10 * (change.high - change.low)
    with pytest.raises(InputError, match="same samples"):
        stats.difference(after, before[1:])


def test_shared_start():
    assert stats.shared_start([1, 2, 3], [1, 2, 4]) == 2 and stats.shared_start([1, 2], [1, 2, 3]) == 2
    assert stats.shared_start([1], [2]) == 0


def test_intervals_of_few_samples():
    assert stats.mean([]).value is None
    assert stats.mean([0.5]).is_point and not stats.mean([0.5]).excludes(0)
    assert stats.mean([0.2, 0.4], seed=1) == stats.mean([0.2, 0.4], seed=1)


def test_terciles_hold_every_sample_once_in_order():
    drift = [0.5, 0.1, 0.9, 0.1, 0.3, 0.2, 0.8]
    low, middle, high = stats.terciles(drift)
    assert sorted([*low, *middle, *high]) == list(range(7))
    assert [len(part) for part in (low, middle, high)] == [3, 2, 2]
    assert max(np.take(drift, low)) <= min(np.take(drift, middle)) <= min(np.take(drift, high))
    assert stats.terciles([0.1, 0.2]) is None


def test_spearman_is_that_of_scipy_with_ties_too():
    scipy_stats = pytest.importorskip("scipy.stats", reason="NOT TESTED: Spearman against scipy")
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.integers(0, 6, 30), rng.integers(0, 6, 30)
        assert stats.spearman(x, y) == pytest.approx(scipy_stats.spearmanr(x, y).statistic)
        assert np.allclose(stats.ranks(x), scipy_stats.rankdata(x))


def test_spearman_of_plain_cases():
    assert stats.ranks([10, 20, 20, 5]).tolist() == [2, 3.5, 3.5, 1]
    assert stats.spearman([1, 2, 3], [1, 8, 9]) == pytest.approx(1)
    assert stats.spearman([1, 2, 3], [4, 4, 4]) is None and stats.spearman([1, 2], [1, 2]) is None
    found = stats.correlation(range(30), [-x for x in range(30)])
    assert found.value == pytest.approx(-1) and found.excludes(0)


def test_refresh_rate_of_cut_outputs():
    records = [{"refreshed": [2, 2, 0, 0], "layers": 2}, {"refreshed": [2], "layers": 2}]
    assert stats.refresh_rate(records) == pytest.approx(6 / 10)
    assert stats.refresh_rate(records, 1) == 1
    assert stats.refresh_rate([{"refreshed": [], "layers": 2}]) is None
    assert stats.cuts(40) == [4, 8, 16, 32, 40] and stats.cuts(16) == [4, 8, 16] and stats.cuts(2) == [2]


POLICIES = [Policy(policy="full"), *(Policy(policy=name, budget=64) for name in ("rcr", "infinigen", "exact")),
            Policy(policy="bacon", budget=96)]  # fmt: skip


def synthetic(samples: int) -> list[list[dict]]:
    """Samples whose drift grows, whose gap between InfiniGen and RCR falls with it, and whose length is unrelated."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(samples):
        drift, row = 0.05 + 0.01 * index, []
        scores = [1.0, 0.6 + 0.005 * index, 0.75, 0.8, 0.4]
        for policy, score in zip(POLICIES, scores, strict=True):
            refreshed = [2] * 8 + [1] * 24 if policy.policy == "rcr" else [2] * 32 if policy.reselects else [0] * 32
            row.append({"rouge_l": score, "drift": 0.1 if policy.policy == "rcr" else None,
                        "evicted": drift if policy.policy == "bacon" else None, "tokens": int(rng.integers(20, 60)),
                        "refreshed": refreshed, "layers": 2, "reads": 64.0, "prompt_tokens": 100, "finished": True,
                        "repeat_8": 0.25, "ids": [1, 2, 3, 4 + (score < 1)]})  # fmt: skip
        rows.append(row)
    return rows


def test_tables_of_synthetic_records(tmp_path):
    results = Results(POLICIES, synthetic(30), bootstrap=200)
    assert results.policies[results.reference].policy == "bacon"
    main, terciles, correlations, overshoot = sheets(results)
    rcr = main.rows[1]
    assert rcr[1].startswith("0.672 [") and rcr[2].startswith("+0.272 [") and rcr[3] == "62.5%" and rcr[6] == "3.0"
    assert "Evicted mass under bacon: 0.195" in main.note
    assert terciles.header[1].startswith("low drift (0.095, n=10)") and terciles.rows[0][1] == "0.622, 62.5%"
    gaps = {row[0]: row for row in correlations.rows}
    assert gaps["infinigen - rcr"][2].startswith("-1.000") and set(gaps) == {
        "exact - rcr", "exact - infinigen", "exact - bacon", "infinigen - rcr"}  # fmt: skip
    assert gaps["exact - bacon"][2] == "-", "a gap that does not vary has no correlation"
    assert overshoot.header == ["cache", "target", "4", "8", "16", "32"]
    assert overshoot.rows[0] == ["rcr", "40%", "100.0%", "100.0%", "75.0%", "62.5%"]
    write(results, tmp_path)
    text = (tmp_path / "fidelity.md").read_text()
    assert "| rcr |" in text and "rcr B=64" in text
    assert (tmp_path / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fidelity.md", "fidelity.png"]


def test_one_sample_has_tables_too(tmp_path):
    titles = [sheet.title for sheet in write(Results(POLICIES, synthetic(1), bootstrap=100), tmp_path)]
    assert not any("tercile" in title for title in titles)
