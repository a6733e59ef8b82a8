"""95 % percentile-bootstrap intervals over prompts.

Prompts are the independent units (blocks of one response are not), so prompts are drawn with replacement and the micro
average sum(tokens) / sum(blocks) is taken again in every draw. Comparisons are paired: both sides use the same draw,
so what a prompt does to both cancels.

A row without a complete block has no acceptance length. It cannot be used, and is counted in `unusable`; in a pair it
is unusable when either side has none. With one usable prompt there is nothing to resample: the interval is the point
itself and says nothing about other prompts. With none, `value`, `low` and `high` are None.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftkv.acceptance.walk import MIN_BLOCKS
from draftkv.errors import InputError

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure with the ends of its 95 % interval, and how many prompts it rests on."""

    value: float | None
    low: float | None
    high: float | None
    prompts: int
    unusable: int

    @property
    def is_point(self) -> bool:
        """One prompt: the interval has no width because nothing could be resampled, not because it is certain."""
        return self.prompts == 1

    def excludes(self, number: float) -> bool:
        """Whether `number` lies outside the interval; never with fewer than two prompts."""
        return self.prompts > 1 and not self.low <= number <= self.high


@dataclass(frozen=True, eq=False)
class Counts:
    """Expected blocks and tokens of each prompt, float64 [N]; prompt i is the same prompt in every `Counts` paired.

    Raises:
        InputError: lengths that differ, or counts that are negative or not finite.
    """

    blocks: Sequence[float] | np.ndarray
    tokens: Sequence[float] | np.ndarray

    def __post_init__(self):
        for name in ("blocks", "tokens"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        if self.blocks.shape != self.tokens.shape or self.blocks.ndim != 1:
            raise InputError(f"counts of shapes {self.blocks.shape} and {self.tokens.shape}: expected one per prompt")
        if not all((np.isfinite(part) & (part >= 0)).all() for part in (self.blocks, self.tokens)):
            raise InputError("counts of blocks and tokens must be finite and not negative")

    @property
    def usable(self) -> np.ndarray:
        """[N] bool: prompts with a complete block."""
        return self.blocks > MIN_BLOCKS

    @property
    def macro(self) -> float | None:
        """Mean of the prompts' own acceptance lengths; None without a usable prompt."""
        keep = self.usable
        return float((self.tokens[keep] / self.blocks[keep]).mean()) if keep.any() else None


def draws(prompts: int, bootstrap: int, seed: int) -> np.ndarray:
    """[bootstrap, prompts] float64: how often each prompt was drawn in each resample of as many prompts.

    Raises:
        InputError: bootstrap < 1.
    """
    if bootstrap < 1:
        raise InputError(f"bootstrap {bootstrap}: at least one resample is needed")
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=bootstrap).astype(np.float64)


def bounds(samples: np.ndarray) -> tuple[float | None, float | None]:
    """The ends of the central 95 % of `samples`; entries that are not a number (an empty draw) are left out."""
    samples = samples[np.isfinite(samples)]
    if not len(samples):
        return None, None
    low, high = np.percentile(samples, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


def al(counts: Counts, bootstrap: int = 2000, seed: int = 0) -> Interval:
    """Micro acceptance length, tokens / blocks."""
    return _interval([counts], lambda ratio: ratio[0], bootstrap, seed)


def retention(compressed: Counts, full: Counts, bootstrap: int = 2000, seed: int = 0) -> Interval:
    """AL compressed / AL full, paired over prompts.

    Raises:
        InputError: the two do not hold the same number of prompts.
    """
    return _interval([compressed, full], lambda ratio: ratio[0] / ratio[1], bootstrap, seed)


def difference(after: Counts, before: Counts, bootstrap: int = 2000, seed: int = 0) -> Interval:
    """AL after - AL before, in tokens per block, paired over prompts.

    Raises:
        InputError: the two do not hold the same number of prompts.
    """
    return _interval([after, before], lambda ratio: ratio[0] - ratio[1], bootstrap, seed)


def _interval(sides: list[Counts], figure, bootstrap: int, seed: int) -> Interval:
    sizes = [len(side.blocks) for side in sides]
    if len(set(sizes)) > 1:
        raise InputError(f"a paired comparison needs the same prompts on both sides: {sizes[0]} against {sizes[1]}")
    keep = np.logical_and.reduce([side.usable for side in sides])
    prompts, unusable = int(keep.sum()), int((~keep).sum())
    if not prompts:
        return Interval(None, None, None, 0, unusable)
    value = float(figure([side.tokens[keep].sum() / side.blocks[keep].sum() for side in sides]))
    if prompts == 1:
        return Interval(value, value, value, 1, unusable)
    times = draws(prompts, bootstrap, seed)
    samples = figure([(times @ side.tokens[keep]) / (times @ side.blocks[keep]) for side in sides])
    return Interval(value, *bounds(samples), prompts, unusable)
