"""What a drafter learns from: the target's next-token distribution at N supervised rows.

Three forms, one way to read them: `signal.rows(start, stop, vocab)` gives those rows as `Dense` or `TopK`, so a loss
can walk over rows without ever holding [N, V] logits.

    Dense   logits of every token                                   online teacher, small vocabularies, tests
    TopK    exact log-probabilities of k tokens, mass of the rest   stored teacher
    Hidden  final hidden states and the head; logits per chunk      online teacher at any vocabulary

The vocabulary rule: target and drafter share the first `vocab` ids. Columns past it are padding of the head (rows that
no tokenizer id uses) and are cut before any softmax, on both sides; `vocab=None` cuts nothing.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

# A half-precision head is converted to fp32 in slices of this size, so that no whole copy of it is made.
_SLICE_BYTES = 64 << 20


def fp32_slices(weight: Tensor) -> list[tuple[int, int]]:
    """Row ranges [start, stop) of a head [V, D] to convert to fp32 at a time; one range when it is fp32 already."""
    rows, width = weight.shape
    step = max(1, rows if weight.dtype == torch.float32 else _SLICE_BYTES // (4 * max(1, width)))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [N, V] in fp32 of hidden states [N, D] under a head [V, D] without bias, any float dtypes.

    fp32 whatever the autocast state: bf16 logits near 34 lie 0.25 apart, so ties would flip the argmax.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if weight.is_cuda and weight.dtype == hidden.dtype and weight.dtype in (torch.bfloat16, torch.float16):
            # Products of two half-precision numbers are exact in fp32, and tensor cores accumulate in fp32.
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        hidden = hidden.float()
        if weight.dtype == torch.float32:
            return hidden @ weight.t()
        logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
        for start, stop in fp32_slices(weight):
            torch.mm(hidden, weight[start:stop].float().t(), out=logits[:, start:stop])
        return logits


@dataclass(frozen=True, eq=False)
class Dense:
    """Target logits [N, V], any float dtype; read in fp32."""

    logits: Tensor
    temperature: ClassVar[float] = 1.0  # at which acceptance is reported; losses may soften logits to any other

    def __len__(self) -> int:
        return self.logits.shape[0]

    def rows(self, start: int, stop: int, vocab: int | None = None) -> "Dense":
        return Dense(self.logits[start:stop, :vocab].float())

    def check(self, vocab: int) -> None:
        """Raises: ValueError when the target has fewer than `vocab` columns."""
        if self.logits.shape[1] < vocab:
            raise ValueError(f"the target has {self.logits.shape[1]} columns of logits, fewer than {vocab} shared ids")

    def top_k(self, k: int, vocab: int | None = None, temperature: float = 1.0) -> "TopK":
        """The k likeliest tokens with exact log-probabilities at `temperature`, and the mass of all others.

        Raises:
            ValueError: k is not in [1, vocab].
        """
        logits = self.logits[:, :vocab].float()
        if not 1 <= k <= logits.shape[1]:
            raise ValueError(f"k = {k}: must lie between 1 and the vocabulary's {logits.shape[1]}")
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        top, ids = logprobs.topk(k, dim=-1)
        # Not log(1 - sum): that loses every digit when the tail is small.
        tail = logprobs.scatter(1, ids, float("-inf")).logsumexp(-1)
        return TopK(ids, top, tail, temperature)


    def sample(self, draws: int, temperature: float, generator: torch.Generator) -> "TopK":
        """`draws` tokens drawn with replacement: log(count / draws) of each that came up, and an empty tail. Places
        that no token fills hold other ids with log-probability -inf.

        Raises:
            ValueError: fewer than one draw.
        """
        if draws < 1:
            raise ValueError(f"{draws} draws: at least 1")
        p = torch.softmax(self.logits.float() / temperature, dim=-1).cpu()
        drawn = torch.multinomial(p, draws, replacement=True, generator=generator)
        counts = torch.zeros_like(p).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=p.dtype))
        count, ids = counts.topk(min(draws, p.shape[1]), dim=-1)
        tail = torch.full((len(p),), float("-inf"))
        device = self.logits.device
        return TopK(ids.to(device), (count / draws).log().to(device), tail.to(device), temperature)


@dataclass(frozen=True, eq=False)
class TopK:
    """Log-probabilities [N, k] of the tokens `ids` [N, k] (distinct, any order) and of all others together [N].

    Made after the vocabulary cut, at one softmax temperature: the tail's mass at another temperature cannot be known,
    so a loss at another one is refused.
    """

    ids: Tensor
    logprobs: Tensor
    tail_logprob: Tensor
    temperature: float = 1.0

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, start: int, stop: int, vocab: int | None = None) -> "TopK":
        cut = slice(start, stop)
        return TopK(self.ids[cut].long(), self.logprobs[cut].float(), self.tail_logprob[cut].float(), self.temperature)

    def check(self, vocab: int) -> None:
        """Raises: ValueError when an id is not among the first `vocab` (the cut comes before the top-k)."""
        if self.ids.numel() and int(self.ids.max()) >= vocab:
            raise ValueError(f"the signal names token {int(self.ids.max())}, past the {vocab} shared ids")


@dataclass(frozen=True, eq=False)
class Hidden:
    """Final hidden states [N, D] of the target (after its last norm) and its head [V, D], without bias."""

    hidden: Tensor
    weight: Tensor
    temperature: ClassVar[float] = 1.0

    def __len__(self) -> int:
        return self.hidden.shape[0]

    @torch.no_grad()
    def rows(self, start: int, stop: int, vocab: int | None = None) -> Dense:
        return Dense(head_logits(self.hidden[start:stop], self.weight[:vocab]))

    def check(self, vocab: int) -> None:
        """Raises: ValueError when the target's head has fewer than `vocab` rows."""
        if self.weight.shape[0] < vocab:
            raise ValueError(f"the target's head has {self.weight.shape[0]} rows, fewer than {vocab} shared ids")


Signal: TypeAlias = Dense | TopK | Hidden
