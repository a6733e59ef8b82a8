"""What is evaluated and kept: whole weights, with a share of the initial ones (WiSE-FT, Wortsman et al. 2022).

A drafter that starts at its full-cache optimum pays there for every step towards what a compressed view wants. On the
line between the initial and the trained weights the first part of the way gains the most for what it costs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from draftkv.distill.processes import whole
from draftkv.models import copy_of


class Anchor:
    """The drafter as it is evaluated. Make it before `accelerator.prepare` and before a checkpoint is loaded: it has no
    state of its own to save, since the initial weights are the recipe's.

    Args:
        model: the drafter.
        share: of the initial weights.
        sharded: whether `prepare` will leave each process only a part of the weights. They are then gathered into a
            second model, which lies in host memory between evaluations.
    """

    def __init__(self, model: nn.Module, share: float, sharded: bool = False):
        self.model, self.share = model, share
        taught = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.initial = {name: p.detach().clone() for name, p in taught} if share else {}
        self.twin = copy_of(model) if sharded else None

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """A whole drafter of `share * initial + (1 - share) * own` weights. Every process must ask. Where weights are
        replicated it is the model itself, which has its own weights again afterwards."""
        yield from self._replicated() if self.twin is None else self._gathered(self.twin)

    def _replicated(self) -> Iterator[nn.Module]:
        own = {name: p.data for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.data = self._mixed(name, parameter.data)
        try:
            yield self.model
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = own[name]

    def _gathered(self, twin: nn.Module) -> Iterator[nn.Module]:
        device = next(self.model.parameters()).device
        twin.to(device)
        for (name, mine), parameter in zip(self.model.named_parameters(), twin.parameters(), strict=True):
            parameter.data = self._mixed(name, whole(mine).detach())
        try:
            yield twin
        finally:
            twin.to("cpu")

    def _mixed(self, name: str, own: Tensor) -> Tensor:
        initial = self.initial.get(name)
        return own if initial is None else torch.lerp(own, initial.to(own.device), self.share)
