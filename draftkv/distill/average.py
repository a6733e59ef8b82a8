"""Polyak averaging: the mean of all iterates, the initial weights included (Polyak and Juditsky 1992).

A drafter that starts at its full-cache optimum loses full-cache acceptance to the noise of the steps, which averaging
cancels, while the consistent part of them, what a compressed view teaches, stays.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class WeightAverage:
    """Running mean of parameters. Saved and restored with a checkpoint (accelerate's `register_for_checkpointing`)."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        self.means = [p.detach().clone() for p in self.parameters]
        self.count = 1

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are now into the mean."""
        self.count += 1
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            mean.lerp_(parameter, 1 / self.count)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model carries the mean inside, its own weights again afterwards."""
        own = [p.data for p in self.parameters]
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            parameter.data = mean
        try:
            yield
        finally:
            for data, parameter in zip(own, self.parameters, strict=True):
                parameter.data = data

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "means": self.means}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        for mean, saved in zip(self.means, state["means"], strict=True):
            mean.copy_(saved)
