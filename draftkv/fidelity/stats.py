"""Figures of a fidelity run: ROUGE-L, paired intervals, drift terciles, rank correlations, refresh rate by length.

Samples are the independent units everywhere: they are drawn with replacement, and a comparison draws both sides at
once. P policies, N samples.
"""

from collections.abc import Callable, Sequence

import numpy as np

from draftkv.acceptance.intervals import Interval, bounds, draws
from draftkv.errors import InputError

LEAST = 3  # samples below which there is no tercile and no correlation


def rouge_scorer() -> Callable[[str, str], float]:
    """ROUGE-L F1 of two texts, by the package rouge-score without stemming.

    That package compares words of a-z and 0-9 in lower case, so equal texts without any of them would score 0; equal
    texts are 1 here by definition.

    Raises:
        InputError: the package is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError("the package rouge-score is not installed; run: pip install 'draftkv[fidelity]'") from None
    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    return lambda reference, text: 1.0 if reference == text else scorer.score(reference, text)["rougeL"].fmeasure


def shared_start(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that two outputs share: how long a cache goes unnoticed, however the texts part afterwards."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def mean(values: Sequence[float], bootstrap: int = 2000, seed: int = 0) -> Interval:
    """Mean over samples with its 95 % interval; of one sample the interval is the point itself."""
    values = np.asarray(values, dtype=np.float64)
    count = len(values)
    if not count:
        return Interval(None, None, None, 0, 0)
    value = float(values.mean())
    if count == 1:
        return Interval(value, value, value, 1, 0)
    return Interval(value, *bounds(draws(count, bootstrap, seed) @ values / count), count, 0)


def difference(after: Sequence[float], before: Sequence[float], bootstrap: int = 2000, seed: int = 0) -> Interval:
    """Mean of after - before, paired over samples.

    Raises:
        InputError: the two do not hold the same number of samples.
    """
    if len(after) != len(before):
        raise InputError(f"a paired comparison needs the same samples on both sides: {len(after)} and {len(before)}")
    return mean(np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64), bootstrap, seed)


def terciles(drift: Sequence[float]) -> list[np.ndarray] | None:
    """Indices of the third of samples with the lowest, middle and highest drift (sizes differ by at most one; equal
    values keep their order); None with fewer than three samples."""
    if len(drift) < LEAST:
        return None
    return np.array_split(np.argsort(np.asarray(drift, dtype=np.float64), kind="stable"), 3)


def ranks(values: Sequence[float]) -> np.ndarray:
    """1-based ranks [N]; ties share the mean of the ranks that they cover."""
    values = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None with fewer than three samples or when one side does not vary."""
    if len(x) < LEAST:
        return None
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else None


def correlation(x: Sequence[float], y: Sequence[float], bootstrap: int = 2000, seed: int = 0) -> Interval:
    """Spearman's correlation with its 95 % interval; ranks are taken again in every draw, and draws in which one side
    does not vary are left out."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    value = spearman(x, y)
    if value is None:
        return Interval(None, None, None, len(x), 0)
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(x), size=(bootstrap, len(x)))
    samples = [spearman(x[pick], y[pick]) for pick in picks]
    return Interval(value, *bounds(np.array([s for s in samples if s is not None])), len(x), 0)


def refresh_rate(records: Sequence[dict], first: int | None = None) -> float | None:
    """Share of layer-steps that selected again, all samples together; None without any layer-step.

    Args:
        first: count only the first so many decode steps of each output, as if outputs had been cut there.
    """
    refreshed = sum(sum(r["refreshed"][:first]) for r in records)
    steps = sum(len(r["refreshed"][:first]) * r["layers"] for r in records)
    return refreshed / steps if steps else None


def cuts(longest: int) -> list[int]:
    """4, 8, 16, ... decode steps, up to the longest output, which comes last."""
    result = []
    step = 4
    while step < longest:
        result.append(step)
        step *= 2
    return [*result, longest]
