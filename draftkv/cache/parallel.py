"""The parallel executor: one teacher-forced forward in which every response row sees what the cache would hold.

A row of the batch is laid out as [prompt | response under view 1 | response under view 2 | ... | padding]. The views
share the prompt's pass, so V views cost P + V*R rows instead of V*(P + R); each view attends to the prompt and its own
response only, recurrent layers branch from the prompt's final state (`draftkv.cache.recurrent`), and `position_ids`
restart after the prompt. Gradient flows through kept keys and values, the prompt's included; the selection itself is
detached.

Rows between two selections are an *epoch*: they share one selected set, so an epoch costs one gather. The later
selections of a view are scored by queries of earlier rows of the same pass, which is causal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import draftkv.cache.recurrent  # noqa: F401  (recurrent layers learn to branch)
from draftkv.cache.attention import LayerInfo, attend_prompt, attend_rows, front_positions, gather
from draftkv.cache.policy import Policy
from draftkv.cache.scene import Notes, Scene


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of the sequence axis: one response (or what is known of it) under one policy.

    Attributes:
        epochs: rows of the segment, counted from its start, from which on a new selection holds (the first selection
            aside). None: where the policy's clock is due, as if a draft block started at every row.
        notes: what scorers remember; an oracle's scores are put here.
    """

    start: int
    stop: int
    policy: Policy
    epochs: tuple[int, ...] | None = None
    notes: Notes = field(default_factory=Notes, compare=False)

    @property
    def renewed(self) -> Sequence[int]:
        """Rows from which a new selection holds."""
        return due_rows(self.policy, self.stop - self.start) if self.epochs is None else self.epochs

    @property
    def refreshes_at_once(self) -> bool:
        """Whether the first row already sees a second selection, which may be another scorer's."""
        return 0 in self.renewed

    def boundaries(self) -> list[int]:
        """First rows of all epochs, the first one (0) included, and the number of rows."""
        size = self.stop - self.start
        return [0, *(row for row in self.renewed if 0 < row < size), size]


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


def due_rows(policy: Policy, rows: int) -> list[int]:
    """Rows of a response at which an `every` trigger is due. Row i is fed x_i, when i + 1 tokens are verified.

    Raises:
        ValueError: a trigger that looks at the run; `draftkv.cache.offloaded` runs those.
    """
    if policy.trigger.kind == "never":
        return []
    if policy.trigger.kind != "every":
        raise ValueError(f"trigger '{policy.trigger.kind}' looks at the run: it has no parallel form")
    due, verified = [], policy.trigger.next_check(0)
    while verified - 1 < rows:
        due.append(verified - 1)
        verified = policy.trigger.next_check(verified)
    return due


def _attend_segment(
    segment: Segment, prompt_len: int, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Rows of one segment, epoch by epoch. Positions count the prompt and the segment's own rows."""
    policy = segment.policy

    def span(x: Tensor, low: int, high: int) -> Tensor:
        """Entries [low, high) of the sequence that this segment continues."""
        if high <= prompt_len:
            return x[:, low:high]
        own = x[:, segment.start + max(0, low - prompt_len) : segment.start + max(0, high - prompt_len)]
        return own if low >= prompt_len else torch.cat([x[:, low : min(high, prompt_len)], own], 1)

    if layer.window is not None or policy.is_full or layer.index < policy.dense_layers:
        low = 0 if layer.window is None else max(0, prompt_len - layer.window)
        high = prompt_len + segment.stop - segment.start
        tail = span(key, low, high), span(value, low, high)
        return attend_rows(layer, span(query, prompt_len, high), None, tail, prompt_len - low, layer.window)
    out, bounds = [], segment.boundaries()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        stored, high = prompt_len + begin, prompt_len + end
        split = policy.split(prompt_len, stored if begin else None)
        front = None
        if split.front:
            with torch.no_grad():
                asked = 0 if begin == 0 else max(0, stored - policy.query_rows)
                recent = span(query, asked, stored)
                scene = Scene(
                    recent, span(key, 0, stored), layer.scaling, layer.index, segment.notes, layer.sink_logits
                )
                at_once = policy.scorer if begin == 0 and segment.refreshes_at_once else None
                kept = front_positions(policy, split, scene, begin == 0, at_once)
            front = gather(span(key, 0, stored), kept), gather(span(value, 0, stored), kept)
        low = split.tail_start
        tail = span(key, low, high), span(value, low, high)
        out.append(attend_rows(layer, span(query, stored, high), front, tail, stored - low, split.sliding))
    return torch.cat(out, 1)


def passes(policies: Sequence[Policy], prompt_len: int) -> list[list[Policy]]:
    """Group policies into forward passes: those whose prompt rows see the same share one."""
    groups: dict[Any, list[Policy]] = {}
    for policy in policies:
        groups.setdefault(policy.prefill_split(prompt_len), []).append(policy)
    return list(groups.values())


def single(
    prompt_len: int, length: int, policy: Policy, notes: Notes | None = None, epochs: tuple[int, ...] | None = None
) -> ParallelView:
    """View of one sequence of `length` tokens under one policy."""
    segment = Segment(prompt_len, length, policy, epochs, notes or Notes())
    segments = (segment,) if length > prompt_len else ()
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
