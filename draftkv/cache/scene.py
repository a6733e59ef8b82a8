"""What a selection may look at: one layer's stored entries and recent queries, and what is remembered of the sequence.

Shapes: H query heads, G KV heads, S stored entries, D head_dim. All arithmetic is fp32.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Notes:
    """What scorers and triggers remember of one sequence, between layers and between selections.

    Attributes:
        prompt: layer -> what was made of the prompt: the scorer that prepared it, or a name, -> its tensors.
        residue: (stored entries, layer) -> what a scoring left for later layers of the same selection (BACON).
    """

    prompt: dict[int, dict[Any, Any]] = field(default_factory=dict)
    residue: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """One full-attention layer of one sequence at the moment of a selection.

    Attributes:
        query: [H, n, D] the most recent rotated queries, oldest first; row i sits at position S - n + i.
        key: [G, S, D] rotated keys of all S stored entries.
        scaling: factor on the logits.
        layer: index of the layer.
        notes: memory of the sequence.
        sink_logits: [H] learned attention sinks, part of every softmax; None where there are none.
        count: entries about to be selected per KV head; `select` sets it.
        start: first candidate, where blocks begin (the number of sinks); `select` sets it.
    """

    query: Tensor
    key: Tensor
    scaling: float
    layer: int = 0
    notes: Notes = field(default_factory=Notes)
    sink_logits: Tensor | None = None
    count: int = 0
    start: int = 0

    @property
    def stored(self) -> int:
        return self.key.shape[1]

    def grouped(self, rows: int) -> Tensor:
        """The last `rows` queries by key head: [G, H / G, rows, D] in fp32 (fewer rows when fewer are known)."""
        heads, known, dim = self.query.shape
        rows = min(rows, known)
        return self.query[:, known - rows :].reshape(self.key.shape[0], -1, rows, dim).float()

    def weights(self, rows: int) -> Tensor:
        """Causal softmax attention of the last `rows` queries over all stored entries: [G, H / G, rows, S] in fp32."""
        with torch.autocast(self.key.device.type, enabled=False):
            query = self.grouped(rows)
            logits = query @ self.key.float().transpose(1, 2)[:, None] * self.scaling
        own = torch.arange(self.stored - query.shape[2], self.stored, device=query.device)
        future = torch.arange(self.stored, device=query.device)[None] > own[:, None]
        logits = logits.masked_fill(future, float("-inf"))
        if self.sink_logits is None:
            return logits.softmax(-1)
        sinks = self.sink_logits.float().view(*query.shape[:2], 1, 1).expand(-1, -1, query.shape[2], -1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
