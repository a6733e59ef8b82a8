"""The prefill oracle's knowledge: how much the uncompressed answer's own attention looks at each prompt entry."""

import torch
from torch import Tensor, nn

from draftkv.cache.attention import LayerInfo
from draftkv.cache.parallel import ParallelView, single
from draftkv.cache.policy import Policy
from draftkv.cache.scene import Notes, Scene

ROWS = 128  # rows whose weights are held at once


class _Watched:
    """A full-cache pass that records, per full-attention layer, the mean attention of response rows."""

    def __init__(self, view: ParallelView, prompt_len: int):
        self.view, self.prompt_len, self.notes = view, prompt_len, Notes()

    def attend(self, layer: LayerInfo, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer.window is None:
            self.notes.prompt[layer.index] = {"oracle": self._mass(layer, query[0], key[0])}
        return self.view.attend(layer, query, key, value)

    def _mass(self, layer: LayerInfo, query: Tensor, key: Tensor) -> Tensor:
        total, length = 0.0, query.shape[1]
        start_row = min(self.prompt_len, length - 1)  # an answer of one token has no row of its own
        for start in range(start_row, length, ROWS):
            stop = min(start + ROWS, length)
            scene = Scene(query[:, start:stop], key[:, :stop], layer.scaling, sink_logits=layer.sink_logits)
            total = total + scene.weights(stop - start)[..., : self.prompt_len].sum(2).mean(1)
        return total / (length - start_row)


@torch.no_grad()
def oracle_notes(model: nn.Module, prompt_ids: list[int], response_ids: list[int]) -> Notes:
    """Notes from which scorer `oracle` selects: [G, P] mean attention of the response's rows, per layer.

    Args:
        model: loaded with attention `draftkv`; the last response token is not fed.
    """
    ids = torch.tensor([[*prompt_ids, *response_ids[:-1]]], device=next(model.parameters()).device)
    length = ids.shape[1]
    watched = _Watched(single(len(prompt_ids), length, Policy(policy="full")), len(prompt_ids))
    positions = torch.arange(length, device=ids.device)[None]
    model.get_decoder()(ids, position_ids=positions, cache_view=watched, use_cache=False)
    return watched.notes
