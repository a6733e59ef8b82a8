"""The evicted executor: a real cache that physically drops entries, decoding a few tokens at a time.

Used by live speculative decoding. The target runs on the same class under the `full` policy, which drops nothing.

A block of speculative decoding is: `commit()` (drop what no later row can see, remember recurrent states), forward some
tokens, `rollback(length)` (forget rejected ones). Attention layers roll back exactly; recurrent layers can only return
to the last commit, so `rollback` says how many tokens the cache really holds and the caller feeds the rest again.
"""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from draftkv.cache.attention import LayerInfo, attend_prompt, attend_rows, front_positions, gather
from draftkv.cache.policy import Policy
from draftkv.teacher.signals import head_logits


class EvictedLayer(CacheLayerMixin):
    """Entries of one attention layer: [front | tail], batch of one.

    Attributes:
        keys, values: [1, G, front + tail, D].
        front: entries at fixed places (sinks and selected).
        native_window: entries a row of a natively sliding layer sees; None for full-attention layers.
    """

    is_sliding = False

    def __init__(self, native_window: int | None):
        super().__init__()
        self.native_window = native_window
        self.front = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        else:
            self.keys = torch.cat([self.keys, key_states], 2)
            self.values = torch.cat([self.values, value_states], 2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def tail(self) -> int:
        return self.get_seq_length() - self.front

    def keep(self, positions: Tensor, tail_start: int) -> None:
        """After prefill: keep `positions` [G, F] as the front and everything from `tail_start` on as the tail."""
        self.keys, self.values = (
            torch.cat([gather(x[0], positions)[None], x[:, :, tail_start:]], 2) for x in (self.keys, self.values)
        )
        self.front = positions.shape[1]

    def drop_oldest(self, count: int) -> None:
        if count > 0:
            front, rest = slice(0, self.front), slice(self.front + count, None)
            self.keys, self.values = (torch.cat([x[:, :, front], x[:, :, rest]], 2) for x in (self.keys, self.values))

    def drop_newest(self, count: int) -> None:
        if count > 0:
            self.keys, self.values = self.keys[:, :, :-count], self.values[:, :, :-count]


class EvictedCache(Cache):
    """KV cache of one sequence under a policy, and its own cache view.

    Use: `cache = EvictedCache(model.config, policy)`, then
    `model(ids, position_ids=cache.positions(n), cache=cache, cache_view=cache, use_cache=True)`; the first call is the
    prefill, with the whole prompt.
    """

    def __init__(self, config: PretrainedConfig, policy: Policy):
        stock = DynamicCache(config=config)
        # transformers' layer knows what the architecture needs; only attention layers are replaced.
        super().__init__(layers=[
            EvictedLayer(layer.sliding_window - 1 if layer.is_sliding else None)
            if isinstance(layer, DynamicLayer) else layer
            for layer in stock.layers
        ])
        self.policy = policy
        self.length = 0  # positions the cache has seen
        self.prompt_len: int | None = None
        self.committed = 0
        self._saved: list[tuple] = []

    @property
    def attention_layers(self) -> list[EvictedLayer]:
        return [layer for layer in self.layers if isinstance(layer, EvictedLayer)]

    @property
    def is_recurrent(self) -> bool:
        return any(not isinstance(layer, EvictedLayer) for layer in self.layers)

    def positions(self, count: int, device: torch.device | None = None) -> Tensor:
        """[1, count] positions of the next tokens."""
        return torch.arange(self.length, self.length + count, device=device)[None]

    def entries(self) -> list[int]:
        """Entries held, per full-attention layer (a policy touches no other)."""
        return [layer.get_seq_length() for layer in self.attention_layers if layer.native_window is None]

    def nbytes(self) -> int:
        """Bytes of keys and values held by attention layers."""
        return sum(x.numel() * x.element_size() for y in self.attention_layers for x in (y.keys, y.values))

    def attend(self, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slot = self.layers[layer.index]
        q, k, v = query[0], key[0], value[0]
        if self.prompt_len is None:
            out = attend_prompt(self.policy, layer, q, k, v)
            self._evict_after_prefill(slot, layer, q, k)
            return out[None]
        front = (k[:, : slot.front], v[:, : slot.front]) if slot.front else None
        tail = (k[:, slot.front :], v[:, slot.front :])
        window = self._window(slot)
        return attend_rows(layer, q, front, tail, slot.tail - q.shape[1], window)[None]

    def _evict_after_prefill(self, slot: EvictedLayer, layer: LayerInfo, query: Tensor, key: Tensor) -> None:
        if slot.native_window is not None or self.policy.is_full:
            return
        split = self.policy.split(query.shape[1])
        slot.keep(front_positions(self.policy, split, layer, query, key), split.tail_start)

    def _window(self, slot: EvictedLayer) -> int | None:
        if slot.native_window is not None:
            return slot.native_window
        return self.policy.split(self.prompt_len).sliding

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
            window = self._window(slot)
            if window is not None:
                slot.drop_oldest(slot.tail - window)
        self._saved = [_state(layer) for layer in self.layers if not isinstance(layer, EvictedLayer)]
        self.committed = self.length

    def rollback(self, length: int) -> int:
        """Forget tokens beyond `length`; returns how many tokens the cache holds then (recurrent: the last commit)."""
        if length < self.committed:
            raise ValueError(f"cannot roll back to {length}: {self.committed} tokens are committed")
        if length >= self.length:
            return self.length
        if self.is_recurrent:
            length = self.committed
            recurrent = [layer for layer in self.layers if not isinstance(layer, EvictedLayer)]
            for layer, saved in zip(recurrent, self._saved, strict=True):
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
