"""Recurrent layers (Gated DeltaNet, Mamba2) under a view of several segments: they branch from the prompt's end.

Attention keeps segments apart by what it lets a row see; a recurrent layer would carry the first segment's state into
the second. So it is run on the prompt once, and on all segments of a row, stacked as a batch, from the state that the
prompt left: P + V*R tokens for V segments of R, and gradient flows back through that state.

transformers has no registry for these mixers as it has for attention, so the `forward` of their classes is wrapped. The
wrapper acts only under a view with several segments in a row; without one the layer is transformers' own.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

if TYPE_CHECKING:
    from draftkv.cache.parallel import RowLayout

MIXERS = (Qwen3_5GatedDeltaNet, NemotronHMamba2Mixer)  # of the supported architectures


@dataclass
class State:
    """What one layer remembers of a sequence, answering as the cache that a mixer asks.

    Tensors are replaced and never written into (transformers' own cache copies in place), so gradient flows through.

    Attributes:
        conv: [batch, channels, kernel] last inputs of the causal convolution (fewer of a shorter sequence).
        recurrent: [batch, heads, ...] state of the recurrence.
    """

    conv: Tensor | None = None
    recurrent: Tensor | None = None

    def repeat(self, count: int) -> "State":
        """The state of one sequence as the start of `count` that continue it."""
        return State(*(x.expand(count, *x.shape[1:]).contiguous() for x in (self.conv, self.recurrent)))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, new: Tensor, layer_idx: int, conv_kernel_size: int) -> Tensor:
        seen = new if self.conv is None else torch.cat([self.conv, new], -1)
        self.conv = seen[..., -conv_kernel_size:]
        return seen

    def update_recurrent_state(self, new: Tensor, layer_idx: int) -> None:
        self.recurrent = new


def branch(mixer: Callable[..., Tensor], hidden: Tensor, rows: Sequence["RowLayout"]) -> Tensor:
    """Run a mixer on a batch of layouts. [batch, T, D] -> [batch, T, D], zero where rows are padded."""
    out = []
    for row, own in zip(rows, hidden, strict=True):
        state = State()
        parts = [mixer(own[None, : row.prompt_len], cache=state)[0]]
        if row.segments:
            segments = [own[s.start : s.stop] for s in row.segments]
            stacked = pad_sequence(segments, batch_first=True)
            # A single token would take the step-wise kernels, which write into states and have no backward pass.
            stacked = F.pad(stacked, (0, 0, 0, 1)) if stacked.shape[1] == 1 else stacked
            found = mixer(stacked, cache=state.repeat(len(segments)))
            parts += [x[: len(s)] for x, s in zip(found, segments, strict=True)]
        out.append(F.pad(torch.cat(parts), (0, 0, 0, len(own) - row.length)))
    return torch.stack(out)


def branching(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A mixer's `forward` that branches under a view with several segments in a row."""

    @functools.wraps(forward)
    def wrapped(module: nn.Module, hidden_states: Tensor, *args: Any, cache_view: Any = None, **kwargs: Any) -> Tensor:
        rows = getattr(cache_view, "rows", ())  # an evicted cache holds one sequence, and no layouts
        if all(len(row.segments) < 2 for row in rows):
            return forward(module, hidden_states, *args, **kwargs)
        return branch(functools.partial(forward, module), hidden_states, rows)

    return wrapped


for _mixer in MIXERS:
    _mixer.forward = branching(_mixer.forward)
