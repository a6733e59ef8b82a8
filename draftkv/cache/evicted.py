"""The evicted executor: a real cache that physically drops entries, decoding a few tokens at a time.

Used by live speculative decoding. The target runs on the same class under the `full` policy, which drops nothing.

A block of speculative decoding is: `commit()` (drop what no later row can see, remember recurrent states), forward some
tokens, `rollback(length)` (forget rejected ones). Attention layers roll back exactly; recurrent layers can only return
to the last commit, so `rollback` says how many tokens the cache really holds and the caller feeds the rest again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin

from draftkv.cache.attention import LayerInfo, attend_prompt, attend_rows, front_positions, gather
from draftkv.cache.policy import Policy, Split
from draftkv.cache.scene import Notes, Scene
from draftkv.teacher.signals import head_logits


@dataclass(frozen=True, eq=False)
class Selection:
    """The entries at fixed places that a layer attends to: sinks and selected, [G, F] positions, [G, F, D] entries."""

    positions: Tensor
    keys: Tensor
    values: Tensor
    split: Split

    @classmethod
    def of(cls, positions: Tensor, keys: Tensor, values: Tensor, split: Split) -> "Selection":
        return cls(positions, gather(keys, positions), gather(values, positions), split)


class EvictedLayer(CacheLayerMixin):
    """Entries of one attention layer: a selection and a contiguous tail, batch of one.

    Attributes:
        keys, values: [1, G, tail, D].
        selection: entries at fixed places; None for layers that a policy leaves alone.
        native_window: entries a row of a natively sliding layer sees; None for full-attention layers.
        compressed: whether the policy applies to this layer.
    """

    is_sliding = False

    def __init__(self, native_window: int | None, compressed: bool):
        super().__init__()
        self.native_window, self.compressed = native_window, compressed
        self.selection: Selection | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        # Some models hand out fp32 keys beside bf16 values under autocast; attention and scorers see one dtype.
        key_states = key_states.to(value_states.dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        else:
            self.keys = torch.cat([self.keys, key_states], 2)
            self.values = torch.cat([self.values, value_states], 2)
        return self.keys, self.values

    @property
    def tail(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_seq_length(self) -> int:
        return self.tail + (self.selection.split.front if self.selection else 0)

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def window(self) -> int | None:
        """Tail entries before its own that a row sees; None: all."""
        return self.selection.split.sliding if self.selection else self.native_window

    @property
    def front(self) -> tuple[Tensor, Tensor] | None:
        chosen = self.selection
        return (chosen.keys, chosen.values) if chosen and chosen.split.front else None

    def drop_oldest(self, count: int) -> None:
        if count > 0:
            self.keys, self.values = self.keys[:, :, count:], self.values[:, :, count:]

    def drop_newest(self, count: int) -> None:
        if count > 0:
            self.keys, self.values = self.keys[:, :, :-count], self.values[:, :, :-count]


class EvictedCache(Cache):
    """KV cache of one sequence under a policy, and its own cache view.

    Use: `cache = EvictedCache(model.config, policy)`, then
    `model(ids, position_ids=cache.positions(n), cache=cache, cache_view=cache, use_cache=True)`; the first call is the
    prefill, with the whole prompt.
    """

    def __init__(self, config: PretrainedConfig, policy: Policy, notes: Notes | None = None):
        stock = DynamicCache(config=config)
        # transformers' layer knows what the architecture needs; only attention layers are replaced.
        super().__init__(layers=[
            self._layer(policy, i, layer) if isinstance(layer, DynamicLayer) else layer
            for i, layer in enumerate(stock.layers)
        ])
        self.policy, self.notes = policy, notes or Notes()
        self.length = 0  # positions the cache has seen
        self.prompt_len: int | None = None
        self.committed = 0
        self._saved: list[tuple] = []

    @staticmethod
    def _layer(policy: Policy, index: int, stock: DynamicLayer) -> EvictedLayer:
        compressed = not (policy.is_full or stock.is_sliding or index < policy.dense_layers)
        return EvictedLayer(stock.sliding_window - 1 if stock.is_sliding else None, compressed)

    @property
    def attention_layers(self) -> list[EvictedLayer]:
        return [layer for layer in self.layers if isinstance(layer, EvictedLayer)]

    @property
    def recurrent_layers(self) -> list[LinearAttentionCacheLayerMixin]:
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    @property
    def is_recurrent(self) -> bool:
        return bool(self.recurrent_layers)

    def positions(self, count: int, device: torch.device | None = None) -> Tensor:
        """[1, count] positions of the next tokens."""
        return torch.arange(self.length, self.length + count, device=device)[None]

    def entries(self) -> list[int]:
        """Entries attended, per layer that the policy compresses."""
        return [layer.get_seq_length() for layer in self.attention_layers if layer.compressed]

    def nbytes(self) -> int:
        """Bytes of keys and values that attention reads, all layers."""
        held = [x for y in self.attention_layers for x in (y.keys, y.values, *(y.front or ()))]
        return sum(x.numel() * x.element_size() for x in held)

    def attend(self, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slot = self.layers[layer.index]
        q, k, v = query[0], key[0], value[0]
        if self.prompt_len is None:
            out = attend_prompt(self.policy, layer, q, k, v)
            if slot.compressed:
                self._first_selection(slot, layer, q, k, v)
            return out[None]
        return self._attend_new(slot, layer, q, k, v)[None]

    def _attend_new(self, slot: EvictedLayer, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows after the prompt; `key` and `value` are the layer's tail, the rows' own entries included."""
        return attend_rows(layer, query, slot.front, (key, value), key.shape[1] - query.shape[1], slot.window)

    def _first_selection(
        self, slot: EvictedLayer, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        split = self.policy.split(query.shape[1])
        scene = Scene(query, key, layer.scaling, layer.index, self.notes, layer.sink_logits)
        slot.selection = Selection.of(front_positions(self.policy, split, scene), key, value, split)
        # A copy, so that what was evicted is given back.
        slot.keys, slot.values = (x[:, :, split.tail_start :].clone() for x in (slot.keys, slot.values))

    @torch.no_grad()
    def forward(
        self, model: torch.nn.Module, ids: Tensor, keep: int | None = None, vocab: int | None = None
    ) -> Tensor:
        """Feed [1, n] tokens; the first call is the prefill. Returns fp32 logits [keep or n, vocab], last rows.

        Args:
            vocab: ids that target and drafter share; None: all rows of the head.
        """
        count = ids.shape[1]
        hidden = model.get_decoder()(
            input_ids=ids, position_ids=self.positions(count, ids.device), cache=self, cache_view=self, use_cache=True
        ).last_hidden_state[0]
        self.length += count
        if self.prompt_len is None:
            self.prompt_len = count
        return head_logits(hidden[-keep:] if keep else hidden, model.get_output_embeddings().weight[:vocab])

    def commit(self) -> None:
        """Everything fed so far is final: drop entries that no later row can see, remember recurrent states."""
        for slot in self.attention_layers:
            if slot.window is not None:
                slot.drop_oldest(slot.tail - slot.window)
        self._saved = [_state(layer) for layer in self.recurrent_layers]
        self.committed = self.length

    def rollback(self, length: int) -> int:
        """Forget tokens beyond `length`; returns how many tokens the cache holds then (recurrent: the last commit)."""
        if length < self.committed:
            raise ValueError(f"cannot roll back to {length}: {self.committed} tokens are committed")
        if length >= self.length:
            return self.length
        if self.is_recurrent:
            length = self.committed
            for layer, saved in zip(self.recurrent_layers, self._saved, strict=True):
                _restore(layer, saved)
        for slot in self.attention_layers:
            slot.drop_newest(self.length - length)
        self.length = length
        return length


def _state(layer: object) -> tuple[dict, dict, dict]:
    copy = lambda states: {i: None if s is None else s.clone() for i, s in states.items()}  # noqa: E731
    return copy(layer.conv_states), copy(layer.recurrent_states), dict(layer.has_previous_state)


def _restore(layer: object, saved: tuple[dict, dict, dict]) -> None:
    conv, recurrent, has = saved
    # Copied into the layer's own tensors and cloned again from the saved ones, so that a commit can be restored twice.
    layer.conv_states = {i: None if s is None else s.clone() for i, s in conv.items()}
    layer.recurrent_states = {i: None if s is None else s.clone() for i, s in recurrent.items()}
    layer.has_previous_state = dict(has)
