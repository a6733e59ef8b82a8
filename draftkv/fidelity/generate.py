"""Greedy generation of one model under cache policies, token by token.

Text and vision-language models share this loop. It asks of a model what the caches ask: `get_decoder()` (the callable
of one forward), `get_output_embeddings()` and `config`; `draftkv.fidelity.vision.ImagePrompt` is such a model for one
image and prompt.

Several policies may decode one prompt side by side: they are at the same position at every step, so one pass over the
weights serves all of them, and each row attends to its own cache. Rows of a batch differ from rows computed alone by
float rounding, which a near tie of two logits can make visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from draftkv.cache.attention import LayerInfo
from draftkv.cache.evicted import EvictedCache
from draftkv.cache.offloaded import OffloadedCache, cache_for
from draftkv.cache.policy import Policy
from draftkv.cache.scene import Notes
from draftkv.teacher.signals import head_logits


@dataclass(frozen=True)
class Generation:
    """What one policy wrote for one prompt.

    Attributes:
        ids: emitted tokens, the first from the prefill, the stop token included.
        finished: whether a stop token ended it.
        layers: layers that the policy compresses; layer-steps are this times the decode steps, `len(ids) - 1`.
        refreshed: per decode step, how many layers selected again for it.
        reads: key and value vectors read from the full store, per layer-step and KV head (the first selection aside).
        drift: mean over layer-steps of the drift that a detecting trigger saw; None for other triggers.
        evicted: mean over layer-steps of the exact attention mass on evicted entries; None when not measured.
    """

    ids: list[int]
    finished: bool
    layers: int
    refreshed: list[int]
    reads: float
    drift: float | None
    evicted: float | None

    @property
    def steps(self) -> int:
        return len(self.ids) - 1


class _Run:
    """One policy at work on one prompt."""

    def __init__(self, cache: EvictedCache, stops: set[int], limit: int):
        self.cache, self.stops, self.limit = cache, stops, limit
        self.ids: list[int] = []
        self.totals: list[Tensor | float] = [0.0]  # refreshed layer-steps so far; tensors are read at the end only

    @property
    def done(self) -> bool:
        return len(self.ids) == self.limit or (bool(self.ids) and self.ids[-1] in self.stops)

    def take(self, logits: Tensor) -> None:
        """Emit the best token of [1, vocab] logits. What was fed is final: nothing is rolled back here."""
        if self.ids:
            self.totals.append(self.cache.cost.refreshes if isinstance(self.cache, OffloadedCache) else 0.0)
        self.cache.commit()
        self.ids.append(int(logits.argmax(-1)))
        if self.cache.policy.trigger.kind == "adaptive":
            logs = logits.log_softmax(-1)
            signals = self.cache.clock.signals
            signals.observe(1, float(-(logs.exp() * logs).sum()), self.cache.policy.trigger.decay)
            signals.al = None  # a block of one token always emits one token, which says nothing

    def ask_trigger(self) -> None:
        """Every token begins a draft block of its own."""
        if self.cache.policy.trigger.level == "block" and self.cache.clock.at_check(len(self.ids)):
            self.cache.refresh(len(self.ids))

    def result(self) -> Generation:
        evicted = drift = None
        reads = 0.0
        if isinstance(self.cache, OffloadedCache):
            cost = self.cache.cost.settled()
            reads = cost.reads_per_step
            drift = cost.drift / cost.steps if self.cache.policy.trigger.detects and cost.steps else None
            if self.cache.probe is not None:
                shares = [share for row in self.cache.probe.mass.values() for share in row.values()]
                evicted = 1 - sum(shares) / len(shares) if shares else 0.0
        totals = [float(total) for total in self.totals]
        steps = [round(after - before) for before, after in zip(totals, totals[1:], strict=False)]
        finished = self.ids[-1] in self.stops
        return Generation(self.ids, finished, len(self.cache.entries()), steps, reads, drift, evicted)


class _SideBySide(Cache):
    """Caches of one prompt under several policies, as one cache and one view: row i of the batch is cache i's."""

    def __init__(self, caches: list[EvictedCache]):
        super().__init__(layers=[])
        self.caches = caches

    def get_seq_length(self, *_: Any) -> int:
        return self.caches[0].length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        for row, cache in enumerate(self.caches):
            cache.update(key_states[row : row + 1], value_states[row : row + 1], layer_idx)
        return key_states, value_states  # the entries that rows attend to are in their caches

    def attend(self, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slots = [cache.layers[layer.index] for cache in self.caches]
        return torch.cat([
            cache.attend(layer, query[row : row + 1], slot.keys, slot.values)
            for row, (cache, slot) in enumerate(zip(self.caches, slots, strict=True))
        ])  # fmt: skip


@torch.no_grad()
def _step(model: Any, runs: list[_Run], device: torch.device, vocab: int | None) -> list[Tensor]:
    """Feed each run's last token; [1, vocab] fp32 logits for each."""
    caches = [run.cache for run in runs]
    ids = torch.tensor([[run.ids[-1]] for run in runs], device=device)
    if len(runs) == 1 or caches[0].is_recurrent:  # a recurrent layer's state is inside its cache and has no rows
        return [cache.forward(model, ids[i : i + 1], 1, vocab) for i, cache in enumerate(caches)]
    both = _SideBySide(caches)
    positions = caches[0].positions(1, device).expand(len(caches), -1)
    hidden = model.get_decoder()(
        input_ids=ids, position_ids=positions, cache=both, cache_view=both, use_cache=True
    ).last_hidden_state  # [runs, 1, hidden]
    for cache in caches:
        cache.length += 1
    return list(head_logits(hidden[:, 0], model.get_output_embeddings().weight[:vocab])[:, None])


def generate(
    model: Any, prompt_ids: list[int], policies: Sequence[Policy], max_new_tokens: int, stops: set[int] = frozenset(),
    *, vocab: int | None = None, notes: Notes | None = None, measured: Policy | None = None,
) -> list[Generation]:
    """Continue one prompt under each policy, side by side; one policy in the list decodes alone.

    Args:
        model: with attention `draftkv` in its language model (see the module's docstring).
        stops: ids that end the output.
        vocab: ids that may be emitted, from 0; None: all rows of the head.
        notes: what scorer `oracle` knows of the answer.
        measured: the policy of the list whose evicted mass is recorded at every step (a full scan of its keys).
    """
    device = next(model.parameters()).device
    prompt = torch.tensor([prompt_ids], device=device)
    runs = []
    for policy in policies:
        own = notes if policy.needs_answer else None
        is_measured = policy == measured
        cache = (OffloadedCache(model.config, policy, own, measure=True) if is_measured
                 else cache_for(model.config, policy, own))  # fmt: skip
        runs.append(_Run(cache, stops, max_new_tokens))
        runs[-1].take(cache.forward(model, prompt, 1, vocab))
    while active := [run for run in runs if not run.done]:
        for run in active:
            run.ask_trigger()
        for run, logits in zip(active, _step(model, active, device, vocab), strict=True):
            run.take(logits)
    return [run.result() for run in runs]
