"""The walk: how a rollout falls into draft blocks, and the acceptance length that follows.

A rollout row has response tokens x_0 .. x_{R-1}. x_0 comes from the target's prefill, so the first block starts at 1.
With `accept[t]` the probability that x_t is accepted when it is drafted after the true prefix, a block that starts at t
accepts n of K drafted tokens and then emits one more (a correction, or the bonus token when n = K):

    P(n | t) = prod_{i<n} accept[t+i] * (1 - accept[t+n])   for n < K,        P(K | t) = prod_{i<K} accept[t+i]

The next block starts at t + n + 1. `accept` is 0/1 at temperature 0 and for greedy drafts; it is min(1, q/p) for
sampled drafts. The expectation over all draws is exact: P(a block starts at t) follows from the starts before t.

The end of a row. A block that would run past the last token is cut off. In a row stopped by length its outcome is
unknown, so neither the block nor its tokens count. In a row that ended with EOS (the last token) the block that emits
EOS counts, with the tokens up to EOS; when EOS was a drafted token, no further token follows it.

Acceptance length AL = tokens / blocks, the bonus token included: 1 when every draft is wrong, K + 1 when none is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftkv.errors import InputError, RunError

# Expected blocks below this are rounding residue of probabilities that cancel, not blocks.
MIN_BLOCKS = 1e-9


@dataclass(frozen=True, eq=False)
class Walk:
    """Expected counts of one row, over complete blocks only. All arrays are float64.

    blocks, tokens: expected number of blocks and of tokens that they emit.
    offered_at[i]: expected blocks in which drafted token i (0-based) was verified with all earlier ones accepted.
    accepted_at[i]: those in which it was accepted. accepted/offered is the conditional acceptance at that draft
        position, accepted/blocks the joint survival.
    starts[t], emitted[t]: expected blocks that start at response position t, and the tokens that they emit.
    """

    blocks: float
    tokens: float
    accepted_at: np.ndarray
    offered_at: np.ndarray
    starts: np.ndarray
    emitted: np.ndarray

    @property
    def usable(self) -> bool:
        """Whether the row holds a complete block at all; a row that does not has no acceptance length."""
        return self.blocks > MIN_BLOCKS

    @property
    def al(self) -> float | None:
        """Tokens per block, bonus included; None for a row without a complete block."""
        return self.tokens / self.blocks if self.usable else None


def walk(accept: Any, draft_length: int, finished: bool) -> Walk:
    """Expected blocks of one row, exactly.

    Args:
        accept: [R] acceptance probabilities in [0, 1] (tensor, array or list; bool at T=0). accept[0] is not read.
        draft_length: K, tokens drafted per block.
        finished: True when the row ended with EOS, False when it was stopped by length.

    Raises:
        InputError: draft_length < 1.
        RunError: a probability that is not finite or lies outside [0, 1].
    """
    flags = _flags(accept, draft_length)
    rows, width = len(flags), draft_length
    prefix = _prefix(flags, width)
    exact = prefix.copy()  # exact[t, n] = P(n | t); acceptance past the end is 0, so its mass lands on n = rows - t
    exact[:, :-1] -= prefix[:, 1:]

    starts = _start_probabilities(exact)
    left = rows - np.arange(rows)  # tokens from t to the end
    size = np.minimum(np.arange(width + 1) + 1, left[:, None])  # tokens emitted, up to EOS
    inside = np.arange(width + 1) < left[:, None]
    if not finished:
        exact = exact * inside
        # A block is cut off when everything that is left was accepted, and fewer than K + 1 tokens are left.
        cut = prefix[np.arange(rows), np.minimum(left, width)] * (left <= width)
    else:
        cut = np.zeros(rows)
    drafted = inside[:, :-1]  # there is a token to draft
    offered = starts[:, None] * (prefix[:, :-1] - cut[:, None]) * drafted
    accepted = starts[:, None] * (prefix[:, 1:] - cut[:, None]) * drafted
    counted = starts * (1.0 - cut)
    emitted = starts * (exact * size).sum(1)
    return Walk(
        blocks=float(counted.sum()),
        tokens=float(emitted.sum()),
        accepted_at=np.maximum(accepted, 0.0).sum(0),
        offered_at=np.maximum(offered, 0.0).sum(0),
        starts=counted,
        emitted=emitted,
    )


def greedy_blocks(accept: Any, draft_length: int, finished: bool) -> list[int]:
    """Accepted drafts, block by block, for 0/1 flags: the list that live decoding must reproduce.

    A block that ends with EOS has as many accepted drafts as were accepted up to EOS. A cut-off block is left out.

    Raises:
        InputError: draft_length < 1.
        RunError: a flag that is not finite, or lies outside [0, 1].
    """
    flags = _flags(accept, draft_length)
    return _blocks(flags > 0.5, draft_length, finished)


def sampled_blocks(accept: Any, draft_length: int, finished: bool, rng: np.random.Generator) -> list[int]:
    """One draw of the accepted counts, block by block; `walk` is the expectation over such draws."""
    flags = _flags(accept, draft_length)
    return _blocks(rng.random(len(flags)) < flags, draft_length, finished)


def block_tokens(blocks: Sequence[int], response_len: int, finished: bool) -> int:
    """Tokens that accepted counts `blocks` emit in a row of `response_len` tokens (x_0 is not a block's)."""
    whole = sum(blocks) + len(blocks)
    return min(whole, max(response_len - 1, 0)) if finished else whole


def _flags(accept: Any, draft_length: int) -> np.ndarray:
    if draft_length < 1:
        raise InputError(f"draft length {draft_length}: at least 1 token is drafted per block")
    if hasattr(accept, "detach"):
        accept = accept.detach().double().cpu().numpy()
    flags = np.asarray(accept, dtype=np.float64)
    if flags.ndim != 1:
        raise RunError(f"acceptance of shape {flags.shape}: expected one probability per response token")
    used = flags[1:]
    # Rounding of q/p may exceed 1 by a few units in the last place of a float32; anything else is a fault upstream.
    bad = ~((used >= 0.0) & (used <= 1.0 + 1e-5))
    if bad.any():
        at = int(np.argmax(bad)) + 1
        raise RunError(f"acceptance probability {flags[at]} at response position {at}: expected a number in [0, 1]")
    return np.concatenate([[0.0], np.minimum(used, 1.0)])[: len(flags)]


def _prefix(flags: np.ndarray, width: int) -> np.ndarray:
    """[R, K + 1]: entry [t, n] is the probability that the n tokens from t are all accepted; 0 past the end."""
    padded = np.concatenate([flags, np.zeros(width)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)[: len(flags)]
    return np.concatenate([np.ones((len(flags), 1)), np.cumprod(windows, axis=1)], axis=1)


def _start_probabilities(exact: np.ndarray) -> np.ndarray:
    """[R]: probability that a block starts at each position, from P(n | t) as [R, K + 1]."""
    rows, span = exact.shape
    mass = np.zeros(rows + span + 1)
    if rows > 1:
        mass[1] = 1.0
    for t in range(1, rows):
        here = mass[t]
        if here:
            mass[t + 1 : t + 1 + span] += here * exact[t]
    return mass[:rows]


def _blocks(hit: np.ndarray, width: int, finished: bool) -> list[int]:
    result, start, rows = [], 1, len(hit)
    while start < rows:
        window = hit[start : start + width]
        misses = np.flatnonzero(~window)
        taken = int(misses[0]) if len(misses) else len(window)
        if start + taken >= rows and not finished:
            break
        result.append(taken)
        start += taken + 1
    return result
