"""The one attention kernel that every executor calls, and its registration with transformers.

A decoding row sees a *front* (sinks and selected entries: fixed places, per KV head) and a *tail* (contiguous entries,
of which a band is visible). `attend_rows` computes exactly that. The per-head part of a selection is in the gather that
builds the front, so one mask serves all heads, and rows are taken in chunks so that the cost is
O(rows * (front + window)) and no mask grows with the square of the sequence.

Shapes: H query heads, G KV heads, R rows, F front entries, N tail entries, D head_dim. One sequence at a time.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from draftkv.cache.backends import flash, flex, sdpa
from draftkv.cache.backends.choice import ATTENTIONS
from draftkv.cache.policy import Policy, Split
from draftkv.cache.scene import Scene
from draftkv.cache.scorers import Scorer, select

KERNELS = {"sdpa": sdpa.attend, "flash": flash.attend, "flex": flex.attend}
ATTENTION = ATTENTIONS["sdpa"]  # the reference


@dataclass(frozen=True)
class LayerInfo:
    """What one attention layer says about itself.

    Attributes:
        index: layer index in the model.
        scaling: factor on the logits.
        window: cached entries a row sees in a natively sliding layer (self not counted); None: full attention.
        sink_logits: [H] learned attention sinks (GPT-OSS); None elsewhere.
        backend: what computes the kernel; see `draftkv.cache.backends.choice`.
    """

    index: int
    scaling: float
    window: int | None = None
    sink_logits: Tensor | None = None
    backend: str = "sdpa"


class CacheView(Protocol):
    """An executor: computes the attention of one layer under a policy."""

    def attend(self, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, H, T, D], [batch, G, S, D] x2 -> [batch, H, T, D]."""
        ...


def attend_rows(
    layer: LayerInfo, query: Tensor, front: tuple[Tensor, Tensor] | None, tail: tuple[Tensor, Tensor], first: int,
    window: int | None,
) -> Tensor:
    """Attention of R rows that see the whole front and a band of the tail.

    Args:
        query: [H, R, D].
        front: keys and values [G, F, D], or None.
        tail: keys and values [G, N, D]; row i owns tail entry `first + i` and always sees it.
        first: tail index of row 0's own entry.
        window: tail entries before its own that a row sees; None: all.

    Returns:
        [H, R, D].
    """
    kernel = KERNELS[layer.backend]
    return kernel(query, front, tail, first, window, layer.scaling, layer.sink_logits)


def front_positions(
    policy: Policy, split: Split, scene: Scene, first: bool = True, scorer: Scorer | None = None
) -> Tensor:
    """Positions of the front, [G, F]: the sinks, then what the scorer selects. Detached and deterministic.

    Args:
        scene: the layer's stored entries and recent queries. For the first selection, made when decoding begins, it
            holds all queries of the prompt, from which scorers prepare what they remember of it.
        first: whether this is that selection.
        scorer: in the place of the policy's, where a refresh falls on the first row.
    """
    key = scene.key
    scorer = scorer or (policy.first_scorer if first else policy.scorer)
    if first:
        for each in {policy.scorer, policy.first_scorer}:
            scene.notes.prompt.setdefault(scene.layer, {})[each] = each.prepare(scene)
    sinks = torch.arange(split.sinks, device=key.device).expand(key.shape[0], -1)
    picked = select(scorer, scene, sinks=split.sinks, count=split.selected, end=split.tail_start)
    return torch.cat([sinks, picked], 1)


def gather(entries: Tensor, positions: Tensor) -> Tensor:
    """entries [G, S, D], positions [G, F] -> [G, F, D]."""
    return entries.gather(1, positions[:, :, None].expand(-1, -1, entries.shape[-1]))


def attend_prompt(policy: Policy, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Prompt rows of one sequence: causal, or (prefill: windowed) sinks and a window. [H, P, D] -> [H, P, D]."""
    prompt_len = query.shape[1]
    if layer.window is not None:
        return attend_rows(layer, query, None, (key, value), 0, layer.window)
    dense = layer.index < policy.dense_layers
    split = Split(0, 0, None, 0) if dense else policy.prefill_split(prompt_len)
    if not split.sinks:
        return attend_rows(layer, query, None, (key, value), 0, split.sliding)
    sinks = split.sinks
    head = attend_rows(layer, query[:, :sinks], None, (key[:, :sinks], value[:, :sinks]), 0, None)
    front, tail = (key[:, :sinks], value[:, :sinks]), (key[:, sinks:], value[:, sinks:])
    return torch.cat([head, attend_rows(layer, query[:, sinks:], front, tail, 0, split.sliding)], 1)


def _policy_attention(
    backend: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, dropout: float = 0.0, cache_view: CacheView | None = None,
    sliding_window: int | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls for attention layers of a model loaded with attention `draftkv`."""
    if cache_view is None:
        raise ValueError("attention 'draftkv' needs cache_view=...: see draftkv.cache.parallel and .evicted")
    if attention_mask is not None:
        raise ValueError("attention 'draftkv' takes no attention_mask: rows are right-padded and the view is causal")
    if dropout:
        raise ValueError("attention dropout is not supported under a cache policy; set attention_dropout to 0")
    window = None if sliding_window is None else sliding_window - 1  # transformers counts the row itself
    layer = LayerInfo(module.layer_idx, scaling, window, s_aux, backend)
    # Some models hand out fp32 queries beside bf16 values under autocast; SDPA wants one dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return cache_view.attend(layer, query, key, value).transpose(1, 2), None


# Registered for attention only: transformers then builds no mask at all, and the view decides what is seen.
for _backend, _name in ATTENTIONS.items():
    AttentionInterface.register(_name, partial(_policy_attention, _backend))
