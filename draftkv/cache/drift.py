"""Drift: the attention mass that a row would put on evicted entries, and its complement, the captured mass.

The detector (RCR) knows evicted keys only in the top singular vectors of the prompt's keys, and kept keys exactly; with
as many vectors as a head has dimensions it is exact.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftkv.cache.attention import LayerInfo
from draftkv.cache.scene import Scene

if TYPE_CHECKING:
    from draftkv.cache.evicted import Selection
    from draftkv.cache.offloaded import StoredLayer

ROWS = 128  # rows whose weights are held at once


def _band(selection: "Selection", own: int) -> int:
    """First tail entry that the row at position `own` attends to."""
    split = selection.split
    return split.tail_start if split.sliding is None else max(split.tail_start, own - split.sliding)


@torch.no_grad()
def evicted_mass(layer: LayerInfo, query: Tensor, slot: "StoredLayer") -> Tensor:
    """Drift of one row, a scalar in [0, 1]: mean over query heads, hence over KV heads. A learned attention sink takes
    its part of the total. Waits for nothing on the device.

    Args:
        query: [H, 1, D]. slot: a stored layer whose store holds the row's own entry and a projection of all keys.
    """
    with torch.autocast(query.device.type, enabled=False):
        store, selection = slot.store, slot.selection
        size, groups = len(store), selection.positions.shape[0]
        low = _band(selection, size - 1)
        rows = query[:, 0].reshape(groups, -1, query.shape[-1]).float()  # [G, H / G, D]
        logits = (rows @ store.basis) @ store.projected.transpose(1, 2)
        logits[:, :, low:] = rows @ slot.keys[0][:, slot.tail - (size - low) :].float().transpose(1, 2)
        gone = torch.ones(groups, size, dtype=torch.bool, device=query.device)
        gone[:, low:] = False
        if selection.split.front:
            exact = rows @ selection.keys.float().transpose(1, 2)
            logits = logits.scatter(2, selection.positions[:, None].expand(-1, rows.shape[1], -1), exact)
            gone = gone.scatter(1, selection.positions, False)
        logits = logits * layer.scaling
        total = logits.logsumexp(-1)
        if layer.sink_logits is not None:
            total = torch.logaddexp(total, layer.sink_logits.float().view(groups, -1))
        return (logits.masked_fill(~gone[:, None], float("-inf")) - total[..., None]).exp().sum(-1).mean()


@torch.no_grad()
def captured(layer: LayerInfo, query: Tensor, slot: "StoredLayer") -> Tensor:
    """[R]: share of the full cache's attention mass on what each of the last R rows attends to, mean over heads.

    Exact, over all stored keys; a learned attention sink is left out of the total.

    Args:
        query: [H, R, D].
    """
    store, selection, rows = slot.store, slot.selection, query.shape[1]
    first, device = len(store) - rows, query.device
    chosen = torch.zeros(selection.positions.shape[0], len(store), dtype=torch.bool, device=device)
    chosen = chosen.scatter(1, selection.positions, True)
    found = []
    for start in range(0, rows, ROWS):
        stop = min(start + ROWS, rows)
        size = first + stop
        scene = Scene(query[:, start:stop], store.keys(size), layer.scaling)
        own = torch.arange(first + start, size, device=device)
        low = torch.tensor([_band(selection, at) for at in range(first + start, size)], device=device)
        entry = torch.arange(size, device=device)
        seen = chosen[:, None, :size] | ((entry >= low[:, None]) & (entry <= own[:, None]))
        found.append((scene.weights(stop - start) * seen[:, None]).sum(-1).mean((0, 1)))
    return torch.cat(found)
