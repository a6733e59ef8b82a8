"""The two models of training: the drafter with its loss as one module, and the target that supervises it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftkv.cache.parallel import Batch, lay_out, passes
from draftkv.cache.policy import Policy
from draftkv.distill.head import HeadLoss, distill_loss
from draftkv.distill.schedule import Item
from draftkv.flops import Flops
from draftkv.models import decoder_layers
from draftkv.recipe import LossTerm
from draftkv.teacher.signals import Hidden


def build_batch(items: Sequence[Item]) -> tuple[Batch, list[tuple[int, int, float]]]:
    """Lay out items; views under which prompt rows see something else get rows of their own.

    Returns:
        The batch, and for each segment in order (batch row, index of its item, loss weight).
    """
    prompts, responses, views, owners = [], [], [], []
    for index, item in enumerate(items):
        # `passes` keeps the order of equal policies, so the n-th time a policy comes up it takes its n-th weight.
        weights: dict[Policy, list[float]] = {}
        for policy, weight in zip(item.views, item.weights, strict=True):
            weights.setdefault(policy, []).append(weight)
        for group in passes(item.views, len(item.row["prompt_ids"])):
            prompts.append(item.row["prompt_ids"])
            responses.append(item.row["response_ids"])
            views.append(group)
            owners += [(len(prompts) - 1, index, weights[policy].pop(0)) for policy in group]
    return lay_out(prompts, responses, views), owners


class Student(nn.Module):
    """The drafter and its loss. One module, so that a wrapper (DDP) sees a single forward per pass.

    Args:
        model: the drafter, loaded with attention `draftkv`, fp32 weights.
        vocab: ids that target and drafter share.
        autocast: whether the forward pass runs in bfloat16.
    """

    def __init__(self, model: nn.Module, terms: Sequence[LossTerm], vocab: int, chunk: int, autocast: bool = False):
        super().__init__()
        self.model, self.terms, self.vocab, self.chunk, self.autocast = model, list(terms), vocab, chunk, autocast
        self.flops = Flops.of(model)  # counted before a backend divides the weights
        # The layers that a sharding backend gathers one at a time.
        kinds = {type(layer).__name__ for layer in decoder_layers(model)}
        self._no_split_modules = sorted(kinds)

    def forward(
        self, batch: Batch, rows: Tensor, signal: Hidden, lengths: list[int], weights: list[float]
    ) -> HeadLoss:
        """Loss of one pass, summed over supervised rows.

        Args:
            rows: [N, 2] (batch row, sequence index) of supervised rows, segment by segment.
            signal: the target at the same rows.
            lengths: supervised rows of each segment.
            weights: factor on the loss of each segment.
        """
        with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.model.get_decoder()(
                batch.input_ids, position_ids=batch.position_ids, cache_view=batch.view, use_cache=False
            ).last_hidden_state
            hidden = hidden[rows[:, 0], rows[:, 1]]
            weight = self.model.get_output_embeddings().weight
            return distill_loss(self.terms, hidden, weight, signal, lengths, self.chunk, self.vocab, weights)


def supervised_rows(batch: Batch) -> tuple[Tensor, list[int]]:
    """[N, 2] (batch row, sequence index) of every segment's rows, and the rows of each segment.

    Row t of a segment predicts response token t + 1; the token before it comes from a prompt row and is never drafted.
    """
    segments = [(i, s) for i, row in enumerate(batch.view.rows) for s in row.segments]
    index = [(i, t) for i, s in segments for t in range(s.start, s.stop)]
    return torch.tensor(index).view(-1, 2), [s.stop - s.start for _, s in segments]


class Teacher:
    """The target, forward only, one row at a time: final hidden states at the rows that a loss is taken on.

    Nothing reads what the last layer's MLP makes of the prompt, so where a layer has an `mlp` it is fed the other rows
    alone. Attention has to see the prompt in every layer.

    Args:
        calls: forward passes to make for each signal, with repeated rows where there are fewer: a sharded target is
            gathered by all processes together, so all have to call it equally often.
    """

    def __init__(self, model: nn.Module, calls: int = 0):
        self.model, self.calls = model.eval().requires_grad_(False), calls
        self.unread = 0  # rows at the start of a sequence that no loss is taken on
        last = getattr(decoder_layers(model)[-1], "mlp", None)
        if last is not None:
            last.register_forward_pre_hook(lambda _, args: (args[0][:, self.unread :], *args[1:]))
            last.register_forward_hook(lambda _, __, out: self._filled(out))

    @property
    def head(self) -> Tensor:
        """[V, D] weight of the target's head."""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def hidden(self, row: dict[str, Any]) -> Tensor:
        """[R - 1, D] hidden states of the rows that predict response tokens 1 .. R - 1."""
        device = next(self.model.parameters()).device
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"][:-1]], device=device)
        self.unread = len(row["prompt_ids"])
        try:
            return self.model.get_decoder()(ids, use_cache=False).last_hidden_state[0, self.unread :]
        finally:
            self.unread = 0

    def _filled(self, out: Any) -> Any:
        """Zeros in the place of the rows that were not fed; the residual connection expects all."""
        if isinstance(out, tuple):  # with a router's scores
            return self._filled(out[0]), *out[1:]
        return F.pad(out, (0, 0, self.unread, 0))

    def signal(self, items: Sequence[Item], owners: Sequence[tuple[int, int, float]]) -> Hidden:
        """The signal for a pass: every view of a row is taught by the same full-cache target."""
        once = [self.hidden(item.row) for item in items]
        for _ in range(len(items), self.calls):
            self.hidden(items[0].row)
        return Hidden(torch.cat([once[index] for _, index, _ in owners]), self.head)

    def expect(self, items: Sequence[Item]) -> None:
        """Nothing to read ahead: the target answers when it is asked."""
