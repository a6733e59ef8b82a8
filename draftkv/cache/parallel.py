"""The parallel executor: one teacher-forced forward in which every response row sees what the cache would hold.

A row of the batch is laid out as [prompt | response under view 1 | response under view 2 | ... | padding]. The views
share the prompt's pass, so V views cost P + V*R rows instead of V*(P + R); each view attends to the prompt and its own
response only, and `position_ids` restart after the prompt. Gradient flows through kept keys and values, the prompt's
included; the selection itself is detached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftkv.cache.attention import LayerInfo, attend_prompt, attend_rows, front_positions, gather
from draftkv.cache.policy import Policy


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of the sequence axis: one response (or what is known of it) under one policy."""

    start: int
    stop: int
    policy: Policy


@dataclass(frozen=True)
class RowLayout:
    """One row of the batch: a prompt of `prompt_len` tokens and the segments that continue it."""

    prompt_len: int
    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        return self.segments[-1].stop if self.segments else self.prompt_len


@dataclass(frozen=True)
class ParallelView:
    """Cache view of a batch of layouts; pass it as `model(input_ids, position_ids=..., cache_view=view)`."""

    rows: tuple[RowLayout, ...]

    def attend(self, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(self.rows) != query.shape[0]:
            raise ValueError(f"the view describes {len(self.rows)} rows, the batch has {query.shape[0]}")
        return torch.stack([
            self._attend_row(row, layer, query[i], key[i], value[i]) for i, row in enumerate(self.rows)
        ])

    def _attend_row(self, row: RowLayout, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        prompt_len = row.prompt_len
        prompt = slice(0, prompt_len)
        lead = row.segments[0].policy if row.segments else Policy(policy="full")
        out = [attend_prompt(lead, layer, query[:, prompt], key[:, prompt], value[:, prompt])]
        out += [_attend_segment(segment, prompt_len, layer, query, key, value) for segment in row.segments]
        padding = query.shape[1] - row.length
        if padding:
            out.append(query.new_zeros(query.shape[0], padding, query.shape[2]))
        return torch.cat(out, 1)


def _attend_segment(
    segment: Segment, prompt_len: int, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    own = slice(segment.start, segment.stop)
    split = segment.policy.split(prompt_len)
    front, low, window = None, 0, split.sliding
    if layer.window is not None:
        low, window = max(0, prompt_len - layer.window), layer.window
    elif not segment.policy.is_full:
        low = split.tail_start
        if split.front:
            with torch.no_grad():
                kept = front_positions(segment.policy, split, layer, query[:, :prompt_len], key[:, :prompt_len])
            front = (gather(key[:, :prompt_len], kept), gather(value[:, :prompt_len], kept))
    tail = tuple(torch.cat([x[:, low:prompt_len], x[:, own]], 1) for x in (key, value))
    return attend_rows(layer, query[:, own], front, tail, prompt_len - low, window)


def passes(policies: Sequence[Policy], prompt_len: int, shared: bool) -> list[list[Policy]]:
    """Group policies into forward passes: those whose prompt rows see the same may share one."""
    if not shared:
        return [[p] for p in policies]
    groups: dict[Any, list[Policy]] = {}
    for policy in policies:
        groups.setdefault(policy.prefill_split(prompt_len), []).append(policy)
    return list(groups.values())


def single(prompt_len: int, length: int, policy: Policy) -> ParallelView:
    """View of one sequence of `length` tokens under one policy."""
    segments = (Segment(prompt_len, length, policy),) if length > prompt_len else ()
    return ParallelView((RowLayout(prompt_len, segments),))


@dataclass(frozen=True)
class Batch:
    """Right-padded input of the parallel executor.

    Attributes:
        input_ids, position_ids: [batch, T] int64.
        view: what each row sees.
    """

    input_ids: Tensor
    position_ids: Tensor
    view: ParallelView

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.input_ids.to(device), self.position_ids.to(device), self.view)


def lay_out(prompts: list[list[int]], responses: list[list[int]], views: list[list[Policy]]) -> Batch:
    """Lay out a batch: for each sequence its prompt, then its response once per view.

    The last response token is not fed (nothing is predicted from it): a response of R tokens takes R - 1 rows a view.

    Raises:
        ValueError: views of one row differ in what prompt rows see (they cannot share a prompt pass).
    """
    ids, positions, rows = [], [], []
    for prompt, response, policies in zip(prompts, responses, views, strict=True):
        if len({p.prefill_split(len(prompt)) for p in policies}) > 1:
            raise ValueError("views of one row must agree on what prompt rows see (prefill)")
        fed, size = response[:-1], len(response) - 1
        ids.append(prompt + fed * len(policies))
        positions.append(list(range(len(prompt))) + list(range(len(prompt), len(prompt) + size)) * len(policies))
        starts = [len(prompt) + i * size for i in range(len(policies))]
        segments = tuple(Segment(s, s + size, p) for s, p in zip(starts, policies, strict=True)) if size else ()
        rows.append(RowLayout(len(prompt), segments))
    width = max(map(len, ids))
    pad = lambda seqs: torch.tensor([s + [0] * (width - len(s)) for s in seqs])  # noqa: E731
    return Batch(pad(ids), pad(positions), ParallelView(tuple(rows)))


def predicting_rows(row: RowLayout) -> list[list[int]]:
    """For each segment, the sequence indices of the rows that predict response tokens 0 .. R-1: the last prompt row,
    then the segment's rows. (The first of them is a prompt row and the same for all segments.)"""
    return [[row.prompt_len - 1, *range(s.start, s.stop)] for s in row.segments]
