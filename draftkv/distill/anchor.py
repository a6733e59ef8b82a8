"""Interpolation with the initial weights (WiSE-FT, Wortsman et al. 2022).

A drafter that starts at its full-cache optimum pays there for every step towards what a compressed view wants. On the
line between the initial and the trained weights the first part of the way gains the most for what it costs.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Anchor:
    """The initial weights, and the model with a share of them. Make it before a checkpoint is loaded: it has no state
    of its own to save, since the initial weights are the recipe's."""

    def __init__(self, parameters: Iterable[nn.Parameter], share: float):
        self.parameters, self.share = list(parameters), share
        self.initial = [p.detach().clone() for p in self.parameters] if share else []

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """The model carries `share * initial + (1 - share) * own` inside, its own weights again afterwards."""
        own = [p.data for p in self.parameters]
        for parameter, initial in zip(self.parameters, self.initial, strict=False):
            parameter.data = torch.lerp(parameter.data, initial.to(parameter.device), self.share)
        try:
            yield
        finally:
            for parameter, data in zip(self.parameters, own, strict=True):
                parameter.data = data
