"""The offloaded executor: everything stays stored, only the budget is attended, and triggers bring entries back.

Block triggers are asked at the start of a draft block (`refresh`), and all layers select again from their most recent
queries. Step triggers are asked by each layer at each decoded token, so tokens are fed one at a time; what rejected
tokens did to selections and thresholds is undone by `rollback`. A policy that never selects again runs here too, which
the tests compare with the evicted executor.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicLayer

from draftkv.cache.attention import LayerInfo, attend_rows, front_positions
from draftkv.cache.drift import captured, evicted_mass
from draftkv.cache.evicted import EvictedCache, EvictedLayer, Selection
from draftkv.cache.policy import Policy, Split
from draftkv.cache.scene import Notes, Scene
from draftkv.cache.scorers import prefix_basis
from draftkv.cache.store import Store
from draftkv.cache.triggers import Clock


@dataclass
class RefreshCost:
    """What selecting again cost, summed over the full-attention layers that a policy compresses.

    Attributes:
        steps: layer-steps, one per layer and decoded token.
        refreshes: layer-steps at which a layer selected again.
        reads: key and value vectors read from the full store for it, per KV head.
        seconds: time spent detecting and selecting.
        drift: sum over layer-steps of the drift that a step trigger saw.
    """

    steps: int = 0
    refreshes: Tensor | float = 0.0
    reads: Tensor | float = 0.0
    seconds: float = 0.0
    drift: Tensor | float = 0.0

    def settled(self) -> "RefreshCost":
        """Plain numbers, without tensors that may live on a device."""
        return RefreshCost(self.steps, float(self.refreshes), float(self.reads), self.seconds, float(self.drift))

    @property
    def rate(self) -> float:
        """Share of layer-steps that selected again."""
        return float(self.refreshes) / self.steps if self.steps else 0.0

    @property
    def reads_per_step(self) -> float:
        """Vectors read from the store per decoded token, KV head and layer."""
        return float(self.reads) / self.steps if self.steps else 0.0


class StoredLayer(EvictedLayer):
    """An evicted layer beside a store of all its entries and its most recent queries.

    Attributes:
        store: everything, in position order.
        queries: [H, n, D], the last n rows fed, at least as many as a selection reads.
    """

    def __init__(self, native_window: int | None, compressed: bool, place: str):
        super().__init__(native_window, compressed)
        self.store, self.queries = Store(place), None

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        self.store.append(key_states[0].to(value_states.dtype), value_states[0])
        return super().update(key_states, value_states)

    @property
    def stale(self) -> int:
        """Oldest tail entries that the selection has taken over; a row must not see them twice."""
        return max(0, self.selection.split.tail_start - (len(self.store) - self.tail))

    def remember(self, query: Tensor) -> None:
        self.queries = query if self.queries is None else torch.cat([self.queries, query], 1)

    def drop_newest(self, count: int) -> None:
        super().drop_newest(count)
        self.store.truncate(len(self.store) - count)
        if count > 0:
            self.queries = self.queries[:, :-count]


@dataclass
class _State:
    """Selections and threshold after `length` tokens."""

    length: int
    tau: Tensor
    selections: dict[int, Selection]


@dataclass
class _Probe:
    """Shares of the full cache's attention mass that rows attended to: position -> layer -> share."""

    mass: dict[int, dict[int, float]] = field(default_factory=dict)


class OffloadedCache(EvictedCache):
    """KV cache of one sequence under a policy that may select again; used like `EvictedCache`.

    Args:
        branching: decide on the host whether a step trigger fired, instead of merging both outcomes on the device
            (which waits for nothing where `store` is the device).
        timed: wait for the device before and after selecting, so that `cost.seconds` is its time and no other's.
        measure: record what share of the full cache's attention mass every row attends to (costs a full scan).
    """

    def __init__(
        self, config: PretrainedConfig, policy: Policy, notes: Notes | None = None, *, branching: bool = False,
        measure: bool = False, timed: bool = False,
    ):
        super().__init__(config, policy, notes)
        self.branching, self.timed, self.cost = branching, timed, RefreshCost()
        self.clock = Clock(policy.trigger)
        self.tau: Tensor | None = None
        self.probe = _Probe() if measure else None
        self._history: list[_State] = []
        self._summaries: dict[int, Tensor] = {}
        self._infos: dict[int, LayerInfo] = {}

    @staticmethod
    def _layer(policy: Policy, index: int, stock: DynamicLayer) -> EvictedLayer:
        plain = EvictedCache._layer(policy, index, stock)
        return StoredLayer(plain.native_window, True, policy.store) if plain.compressed else plain

    @property
    def stored_layers(self) -> dict[int, StoredLayer]:
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, StoredLayer)}

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes between the device and a store on the host since decoding began, by direction: every new entry, and
        the vectors that selections need (`Scorer.reads`). This executor copies whole keys instead of keeping digests
        and candidates apart, so on a device with memory of its own it moves more than that."""
        stores = [layer.store for layer in self.stored_layers.values()]
        return {"to_host": sum(s.bytes_in for s in stores), "to_device": int(sum(s.bytes_out for s in stores))}

    def store_nbytes(self) -> int:
        """Bytes of the full stores (wherever they are)."""
        return sum(layer.store.nbytes() for layer in self.stored_layers.values())

    def forward(self, model: nn.Module, ids: Tensor, keep: int | None = None, vocab: int | None = None) -> Tensor:
        by_token = self.policy.trigger.level == "step" and self.prompt_len is not None
        if not by_token:
            out = super().forward(model, ids, keep, vocab)
            if not self._history:
                self._begin(out.device)
            return out
        rows = []
        for i in range(ids.shape[1]):
            self.notes.residue.clear()
            rows.append(super().forward(model, ids[:, i : i + 1], 1, vocab))
            self._history.append(self._state())
        return torch.cat(rows[-keep:] if keep else rows)

    def _begin(self, device: torch.device) -> None:
        for layer in self.stored_layers.values():
            layer.store.bytes_in = 0  # the prompt's own copy is no cost of decoding
        self.tau = torch.tensor(float(getattr(self.policy.trigger, "tau", 0.0)), device=device)
        self._history = [self._state()]
        self._summaries = {i: self._summary(layer) for i, layer in self.stored_layers.items()}

    def _state(self) -> _State:
        return _State(self.length, self.tau, {i: layer.selection for i, layer in self.stored_layers.items()})

    def commit(self) -> None:
        super().commit()
        for layer in self.stored_layers.values():
            layer.queries = layer.queries[:, -self.policy.query_rows :]
            layer.drop_oldest(layer.stale)
        self._history = self._history[-1:]

    def rollback(self, length: int) -> int:
        held = super().rollback(length)
        while len(self._history) > 1 and self._history[-1].length > held:
            self._history.pop()
        state = self._history[-1]
        self.tau = state.tau
        for i, selection in state.selections.items():
            self.layers[i].selection = selection
        return held

    # Block triggers.

    def refresh(self, verified: int) -> bool:
        """Ask the trigger at a draft block's start; True: selections changed.

        Every token but the last emitted one must have been fed and committed: the new selection holds from that
        token's row on. `clock.at_check(verified)` says whether asking is due.
        """
        trigger, start = self.policy.trigger, self._now()
        summaries = {}
        if trigger.kind == "adaptive" and trigger.drift_above is not None and self.stored_layers:
            summaries = {i: self._summary(layer) for i, layer in self.stored_layers.items()}
            drifts = [1 - float(torch.dot(new, self._summaries[i])) for i, new in summaries.items()]
            self.clock.signals.drift = sum(drifts) / len(drifts)
        fired = self.clock.check(verified)
        if fired:
            self.notes.residue.clear()
            for i, layer in self.stored_layers.items():
                if trigger.kind != "similarity" or self._moved(i, layer, trigger.threshold):
                    self._select_again(i, layer)
            self._summaries.update(summaries)
            self._history = [self._state()]
        self.cost.seconds += self._now() - start
        return fired

    def _now(self) -> float:
        if self.timed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _summary(self, layer: StoredLayer) -> Tensor:
        """Normalised query summary: per head the mean over recent rows, heads concatenated. RefreshKV compares the
        last query averaged over heads."""
        if self.policy.trigger.kind == "similarity":
            return nn.functional.normalize(layer.queries[:, -1].float().mean(0), dim=0)
        return nn.functional.normalize(layer.queries[:, -self.policy.query_rows :].float().mean(1).flatten(), dim=0)

    def _moved(self, index: int, layer: StoredLayer, threshold: float) -> bool:
        now = self._summary(layer)
        if float(torch.dot(now, self._summaries[index])) > threshold:
            return False
        self._summaries[index] = now
        return True

    def _select_again(self, index: int, layer: StoredLayer) -> None:
        stored = len(layer.store)
        split = self.policy.split(self.prompt_len, stored)
        scene = self._scene(self._infos[index], layer, stored)
        positions = front_positions(self.policy, split, scene, first=False)
        layer.selection = Selection(positions, *layer.store.gather(positions), split)
        layer.drop_oldest(layer.stale)
        self._count(layer, split, 1.0)

    def _count(self, layer: StoredLayer, split: Split, fired: Tensor | float) -> None:
        """Costs of one selection, where `fired` is 1; kept on the device, so that counting does not wait for it."""
        reads = fired * self.policy.scorer.reads(split.tail_start - split.sinks, split.selected)
        self.cost.refreshes, self.cost.reads = self.cost.refreshes + fired, self.cost.reads + reads
        layer.store.read(reads)

    def _scene(self, info: LayerInfo, layer: StoredLayer, stored: int) -> Scene:
        query = layer.queries[:, -self.policy.query_rows :]
        return Scene(query, layer.store.keys(stored), info.scaling, info.index, self.notes, info.sink_logits)

    # Attention.

    def _first_selection(
        self, slot: StoredLayer, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        super()._first_selection(slot, layer, query, key, value)
        self._infos[layer.index] = layer
        slot.remember(query[:, -self.policy.query_rows :])
        if self.policy.trigger.detects:
            basis = prefix_basis(key, self.policy.trigger.rank)
            self.notes.prompt.setdefault(layer.index, {})["drift"] = basis
            slot.store.project(basis)

    def _attend_new(self, slot: EvictedLayer, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not slot.compressed:
            return super()._attend_new(slot, layer, query, key, value)
        slot.remember(query)
        self.cost.steps += query.shape[1]
        if self.policy.trigger.level == "step":
            start = self._now()
            self._step(slot, layer, query)
            self.cost.seconds += self._now() - start
        if self.probe is not None:
            self._measure(slot, layer, query)
        tail = key[:, slot.stale :], value[:, slot.stale :]
        return attend_rows(layer, query, slot.front, tail, tail[0].shape[1] - query.shape[1], slot.window)

    def _step(self, slot: StoredLayer, layer: LayerInfo, query: Tensor) -> None:
        """Let the trigger decide about one row, before it attends."""
        trigger = self.policy.trigger
        stored = len(slot.store) - 1  # entries before the row's own
        split = self.policy.split(self.prompt_len, stored)
        fired = torch.ones((), device=query.device)
        if trigger.detects:
            drift = evicted_mass(layer, query, slot)
            fired = (drift > self.tau).float()
            self.cost.drift = self.cost.drift + drift
        if trigger.kind == "rate_controlled":
            self.tau = self.tau * torch.exp(trigger.gain * (fired - trigger.rate))
        # Where shapes differ there is nothing to merge: a short prompt's selection still grows.
        old = slot.selection
        alone = self.branching or (old.split.sinks, old.split.selected) != (split.sinks, split.selected)
        if alone and not fired:
            return
        scene = self._scene(layer, slot, stored + 1)
        positions = front_positions(self.policy, split, scene, first=False)
        if alone:
            slot.selection = Selection(positions, *slot.store.gather(positions), split)
        else:
            merged = torch.where(fired.bool(), positions, old.positions)
            keys, values = slot.store.gather(positions)
            slot.selection = Selection(
                merged, torch.where(fired.bool(), keys, old.keys), torch.where(fired.bool(), values, old.values), split
            )
        self._count(slot, split, fired)

    def _measure(self, slot: StoredLayer, layer: LayerInfo, query: Tensor) -> None:
        first = len(slot.store) - query.shape[1]
        for row, share in enumerate(captured(layer, query, slot).tolist()):
            self.probe.mass.setdefault(first + row, {})[layer.index] = share


def cache_for(
    config: PretrainedConfig, policy: Policy, notes: Notes | None = None, timed: bool = False
) -> EvictedCache:
    """The executor that runs a policy live: evicted, unless its trigger may bring entries back."""
    if policy.reselects:
        return OffloadedCache(config, policy, notes, timed=timed)
    return EvictedCache(config, policy, notes)
