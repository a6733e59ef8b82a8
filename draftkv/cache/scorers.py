"""Scorers: which prompt entries are worth keeping.

A scorer is a small frozen value with one method, `score`. To add one: write a class like `SnapKVScorer`, and add it to
the `Scorer` union and a row to `PRESETS` in `policy.py`; every executor and the whole test matrix then know it.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class _Scorer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    block: int = Field(1, ge=1, description="select contiguous blocks of this many entries by their mean score")


class NoScorer(_Scorer):
    """Selects nothing: the whole budget is sinks and window."""

    kind: Literal["none"] = "none"


class SnapKVScorer(_Scorer):
    """SnapKV (FasterDecoding/SnapKV, defaults of its `init_snapkv`): attention of the last prompt queries.

    softmax over all keys, causal, in fp32; mean over the `observation` last prompt queries and, under grouped-query
    attention, over the query heads that share a key head (after the softmax); average pooling over positions with
    zero padding. Pooling runs over the candidates only, i.e. without the window, as published.
    """

    kind: Literal["snapkv"] = "snapkv"
    observation: int = Field(32, ge=1, description="number of last prompt queries that vote")
    pool: int = Field(5, ge=1, description="width of the average pooling over positions (odd)")

    def score(self, query: Tensor, key: Tensor, scaling: float, candidates: int) -> Tensor:
        """Score the first `candidates` prompt entries.

        Args:
            query: [heads, P, head_dim], rotated prompt queries (only the last `observation` rows are read).
            key: [kv_heads, P, head_dim], rotated prompt keys.
            scaling: factor on the logits.
            candidates: number of leading entries outside the window.

        Returns:
            [kv_heads, candidates] scores in fp32.
        """
        kv_heads, prompt_len, dim = key.shape
        rows = min(self.observation, prompt_len)
        grouped = query[:, prompt_len - rows :].reshape(kv_heads, -1, dim).float()
        logits = grouped @ key.float().transpose(1, 2) * scaling
        logits = logits.view(kv_heads, -1, rows, prompt_len)
        row = torch.arange(prompt_len - rows, prompt_len, device=key.device)
        future = torch.arange(prompt_len, device=key.device)[None] > row[:, None]
        weights = logits.masked_fill(future, float("-inf")).softmax(-1)
        score = weights.mean(2).mean(1)[:, :candidates]
        return F.avg_pool1d(score[:, None], self.pool, stride=1, padding=self.pool // 2)[:, 0, :candidates]


@torch.no_grad()
def select(scorer: _Scorer, query: Tensor, key: Tensor, scaling: float, sinks: int, count: int, end: int) -> Tensor:
    """Positions of the `count` best prompt entries in [sinks, end), ascending, per KV head.

    Ties are broken by position (lower wins), so that two runs of one step agree, as activation checkpointing needs.
    Blocks start at `sinks`, which the policy rounds up to whole blocks; the partial last block is never a candidate
    (the sliding part of the budget takes the entries that whole blocks leave over).

    Returns:
        [kv_heads, count] int64 positions.
    """
    if count == 0:
        return torch.empty(key.shape[0], 0, dtype=torch.long, device=key.device)
    score = scorer.score(query, key, scaling, end)[:, sinks:]
    block = scorer.block
    blocks = score.shape[1] // block
    score = score[:, : blocks * block].view(score.shape[0], blocks, block).mean(-1)
    best = score.sort(dim=-1, descending=True, stable=True).indices[:, : count // block].sort(-1).values
    picked = best[:, :, None] * block + torch.arange(block, device=key.device)
    return picked.flatten(1) + sinks
