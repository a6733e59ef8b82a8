"""Drift: the attention mass that a row would put on evicted entries, and its complement, the captured mass.

The detector (RCR) knows evicted keys only in the top singular vectors of the prompt's keys, and kept keys exactly; with
as many vectors as a head has dimensions it is exact.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftkv.cache.attention import LayerInfo

if TYPE_CHECKING:
    from draftkv.cache.evicted import Selection
    from draftkv.cache.offloaded import StoredLayer


def _visible(size: int, selection: "Selection", low: Tensor, own: Tensor) -> Tensor:
    """[G, R, S]: whether row r, at position own[r], attends to an entry: selected, or in its band from low[r] on."""
    entry = torch.arange(size, device=own.device)
    band = (entry >= low[:, None]) & (entry <= own[:, None])
    chosen = torch.zeros(selection.positions.shape[0], size, dtype=torch.bool, device=own.device)
    return band[None] | chosen.scatter(1, selection.positions, True)[:, None]


def _bands(size: int, rows: int, selection: "Selection") -> tuple[Tensor, Tensor]:
    """First visible tail entry and own position of the last `rows` rows of a store of `size` entries."""
    split, device = selection.split, selection.positions.device
    own = torch.arange(size - rows, size, device=device)
    low = torch.full_like(own, split.tail_start)
    return (low if split.sliding is None else torch.maximum(low, own - split.sliding)), own


@torch.no_grad()
def evicted_mass(layer: LayerInfo, query: Tensor, slot: "StoredLayer") -> Tensor:
    """Drift of one row, a scalar in [0, 1]: mean over query heads, hence over KV heads.

    Args:
        query: [H, 1, D]. slot: a stored layer whose store holds the row's own entry and a projection of all keys.
    """
    store, selection = slot.store, slot.selection
    size, groups = len(store), selection.positions.shape[0]
    low, own = _bands(size, 1, selection)
    rows = query[:, 0].reshape(groups, -1, query.shape[-1]).float()  # [G, H / G, D]
    logits = (rows @ store.basis) @ store.projected.transpose(1, 2)
    first = int(low)
    band = slot.keys[0][:, slot.tail - (size - first) :].float()
    logits[:, :, first:] = rows @ band.transpose(1, 2)
    if selection.split.front:
        exact = rows @ selection.keys.float().transpose(1, 2)
        logits = logits.scatter(2, selection.positions[:, None].expand(-1, rows.shape[1], -1), exact)
    logits = logits * layer.scaling
    gone = ~_visible(size, selection, low, own)[:, 0]  # [G, S]
    total = logits.logsumexp(-1)
    if layer.sink_logits is not None:
        total = torch.logaddexp(total, layer.sink_logits.float().view(groups, -1))
    mass = (logits.masked_fill(~gone[:, None], float("-inf")) - total[..., None]).exp().sum(-1)
    return mass.mean()


@torch.no_grad()
def captured(layer: LayerInfo, query: Tensor, slot: "StoredLayer") -> Tensor:
    """[R]: share of the full cache's attention mass on what each of the last R rows attends to, mean over heads.

    Exact, over all stored keys; a learned attention sink is left out of the total.

    Args:
        query: [H, R, D].
    """
    store, selection = slot.store, slot.selection
    size, groups, rows = len(store), selection.positions.shape[0], query.shape[1]
    low, own = _bands(size, rows, selection)
    grouped = query.reshape(groups, -1, rows, query.shape[-1]).float()
    logits = grouped @ store.keys().float().transpose(1, 2)[:, None] * layer.scaling
    future = torch.arange(size, device=own.device)[None] > own[:, None]
    weights = logits.masked_fill(future, float("-inf")).softmax(-1)
    return (weights * _visible(size, selection, low, own)[:, None]).sum(-1).mean((0, 1))
