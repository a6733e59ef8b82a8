"""FlexAttention over the front and a band of the tail. Forward only on the CPU, where it has no backward.

The block mask covers one chunk of rows, so it does not grow with the square of the sequence, and is kept for the
layers that ask for the same one. The numbers in it are tensors, so that other lengths do not compile the kernel again;
what does (less than a block of rows, one row, with or without gradients) is a handful of cases.
A learned sink takes the share sigmoid(sink - l) of every row's probability, l being the row's log-sum-exp.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from draftkv.cache.backends.sdpa import Entries, chunks, joined


def attend(
    query: Tensor, front: Entries | None, tail: Entries, first: int, window: int | None, scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `draftkv.cache.backends.choice`."""
    kernel = compiled() if query.is_cuda else flex_attention
    fixed = 0 if front is None else front[0].shape[1]
    out = []
    for start, stop, low, high in chunks(query.shape[1], first, window):
        key, value = joined(front, tail, low, high)
        mask = _block_mask(stop - start, fixed, high - low, first + start - low, window, query.device)
        rows, aux = kernel(
            query[None, :, start:stop].contiguous(), key[None].contiguous(), value[None].contiguous(),
            block_mask=mask, scale=scale,
            enable_gqa=query.shape[0] != key.shape[0], return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        if sinks is not None:
            rows = rows * torch.sigmoid(aux.lse - sinks[:, None]).to(rows.dtype)[..., None]
        out.append(rows[0])
    return out[0] if len(out) == 1 else torch.cat(out, 1)


@cache
def compiled(backend: str = "inductor") -> Callable:
    """The kernel. Raises torch's error where it would be compiled too often: torch would otherwise go on without it and
    materialize all scores."""
    kernel = torch.compile(flex_attention, dynamic=True, backend=backend)

    def call(*tensors: Tensor, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            return kernel(*tensors, **options)

    return call


@lru_cache(maxsize=32)
def _block_mask(rows: int, fixed: int, entries: int, first: int, window: int | None, device: torch.device) -> BlockMask:
    """`fixed` entries that every row sees, then `entries` of which row i sees those in (first + i - window - 1,
    first + i]."""
    front, own, width = (
        torch.tensor(n, device=device) for n in (fixed, first, entries if window is None else window)
    )

    def visible(batch: Tensor, head: Tensor, row: Tensor, entry: Tensor) -> Tensor:
        behind = own + row - (entry - front)
        return (entry < front) | ((behind >= 0) & (behind <= width))

    return create_block_mask(visible, None, None, rows, fixed + entries, device=device)
