"""Replay under triggers that select again: the rollout is fed block by block to the cache that live decoding uses.

A chunk runs from one check of the trigger to the last row that a draft block begun before the next check may need, so
the number of forwards follows the number of checks, not of tokens. Step triggers feed one token at a time. Where blocks
start depends on what was accepted: at temperature 0 that is known; above it one path is drawn per row, with the row's
own generator, and its flags are 0 or 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftkv.cache.offloaded import OffloadedCache

Accept = Callable[[Tensor, int], np.ndarray]
ROWS = 256  # rows of vocabulary logits held at once


@dataclass
class _Path:
    """Blocks along one rollout. flags[t] is what position t would be accepted with; entropy[t] of its draft, where the
    trigger looks at it."""

    flags: np.ndarray
    entropy: np.ndarray
    wants_entropy: bool
    drawn: np.random.Generator | None

    def take(self, start: int, known: int, draft_length: int) -> int | None:
        """Accepted drafts of the block at `start`; None when it needs flags from `known` on, or the row's end."""
        for i in range(draft_length):
            t = start + i
            if t >= known or t >= len(self.flags):
                return None
            if self.drawn is not None:
                self.flags[t] = float(self.drawn.random() < self.flags[t])
            if self.flags[t] < 0.5:
                return i
        return draft_length


@torch.no_grad()
def sequential_flags(
    model: nn.Module, row: dict[str, Any], cache: OffloadedCache, draft_length: int, accept: Accept,
    vocab: int | None = None, drawn: np.random.Generator | None = None,
) -> np.ndarray:
    """[R] acceptance of each response token under the cache's policy (entry 0 is never drafted).

    Args:
        row: a rollout row.
        cache: empty; afterwards it holds the cost of selecting and, if it measures, the captured mass.
        accept: (logits [n, vocab] of the rows that predict response tokens first .. first + n - 1, first) -> [n].
        drawn: generator of the path above temperature 0; None: flags are 0 or 1 already, or no check depends on them.
    """
    prompt, response = row["prompt_ids"], row["response_ids"]
    device = next(model.parameters()).device
    tokens = torch.tensor([[*prompt, *response]], device=device)
    size = len(response)
    logits = cache.forward(model, tokens[:, : len(prompt)], 1, vocab)
    cache.commit()
    wants = getattr(cache.policy.trigger, "entropy_above", None) is not None
    path = _Path(np.zeros(size), np.zeros(size), wants, drawn)
    path.flags[:1] = accept(logits, 0)
    start = 1  # response position at which the next block starts
    while start < size:
        if cache.policy.trigger.level == "block" and cache.clock.at_check(start):
            cache.refresh(start)
        check = cache.clock.next if cache.policy.trigger.level == "block" else None
        start = _chunk(model, cache, tokens, len(prompt), path, start, check, draft_length, accept, vocab)
    return path.flags


def _chunk(
    model: nn.Module, cache: OffloadedCache, tokens: Tensor, prompt_len: int, path: _Path, start: int,
    check: int | None, draft_length: int, accept: Accept, vocab: int | None,
) -> int:
    """Feed rows up to the next check and walk the blocks in them; returns where the first block at the check starts."""
    size = len(path.flags)
    stop = size if check is None else min(size, check + draft_length)  # flags are known before this position
    # Under step triggers nothing is rolled back here, so every token is final: no state of it has to be kept.
    step = 1 if cache.policy.trigger.level == "step" else ROWS
    while cache.length < prompt_len + stop - 1:
        # The row of response token t - 1 predicts token t; the prompt's last row has predicted token 0.
        first, end = cache.length - prompt_len + 1, min(cache.length + step, prompt_len + stop - 1)
        logits = cache.forward(model, tokens[:, cache.length : end], None, vocab)
        path.flags[first : first + len(logits)] = accept(logits, first)
        if check is not None and path.wants_entropy:
            path.entropy[first : first + len(logits)] = _entropy(logits)
        if check is None:
            cache.commit()
    if check is None:
        return size
    while start < size and start < check:
        taken = path.take(start, stop, draft_length)
        if taken is None:
            return size  # the row ends inside this block
        examined = path.entropy[start : start + min(taken + 1, draft_length)]
        cache.clock.observe(taken + 1, float(examined.mean()))
        start += taken + 1
    if start < size:
        _settle(model, cache, tokens, prompt_len + start - 1)
    return start


def _settle(model: nn.Module, cache: OffloadedCache, tokens: Tensor, length: int) -> None:
    """Commit exactly the first `length` tokens; recurrent layers feed some of them again."""
    # Rows past `length` were fed ahead and will be fed again: they are no steps of the run.
    steps = cache.cost.steps - (cache.length - length) * len(cache.stored_layers)
    held = cache.rollback(length)
    if held < length:
        cache.forward(model, tokens[:, held:length], 1)
    cache.cost.steps = steps
    cache.commit()


def _entropy(logits: Tensor) -> np.ndarray:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).double().cpu().numpy()
