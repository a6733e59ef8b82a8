"""The reference backend: torch's scaled dot product attention under one explicit mask for a chunk of rows."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

Entries = tuple[Tensor, Tensor]  # keys and values
ROW_CHUNK = 1024  # rows whose mask is held at once
ALIGN = 8  # fused kernels want head_dim in multiples of 8


def attend(
    query: Tensor, front: Entries | None, tail: Entries, first: int, window: int | None, scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `draftkv.cache.backends.choice`."""
    rows = query.shape[1]
    if front is None and first == 0 and (window is None or window >= rows - 1):
        return _causal(query, tail[0][:, :rows], tail[1][:, :rows], scale, sinks)
    out = []
    for start, stop, low, high in chunks(rows, first, window):
        own = torch.arange(first + start, high, device=query.device)[:, None]
        entry = torch.arange(low, high, device=query.device)[None]
        mask = entry <= own
        if window is not None:
            mask &= own - entry <= window
        key, value = joined(front, tail, low, high)
        if front is not None:
            mask = F.pad(mask, (front[0].shape[1], 0), value=True)
        out.append(_masked(query[:, start:stop], key, value, mask, scale, sinks))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def chunks(rows: int, first: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Rows [start, stop) and the tail entries [low, high) that any of them sees."""
    for start in range(0, rows, ROW_CHUNK):
        stop = min(start + ROW_CHUNK, rows)
        yield start, stop, 0 if window is None else max(0, first + start - window), first + stop


def joined(front: Entries | None, tail: Entries, low: int, high: int) -> Entries:
    """The front and tail entries [low, high), one after the other."""
    key, value = tail[0][:, low:high], tail[1][:, low:high]
    if front is None:
        return key, value
    return torch.cat([front[0], key], 1), torch.cat([front[1], value], 1)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """SDPA with one [R, S] mask for all heads. Query heads that share a KV head are folded into rows, so that no
    kernel has to repeat keys (and none falls back because of `enable_gqa`)."""
    dim = query.shape[-1]
    if sinks is not None:
        query, key, value = _with_sink(query, key, value, scale, sinks)
        mask = F.pad(mask, (1, 0), value=True)
    heads, rows, _ = query.shape
    groups = heads // key.shape[0]
    folded = query.reshape(key.shape[0], groups * rows, -1)
    mask = mask.repeat(groups, 1) if groups > 1 else mask
    out = F.scaled_dot_product_attention(folded[None], key[None], value[None], attn_mask=mask, scale=scale)
    return out[0].reshape(heads, rows, -1)[..., :dim]


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    dim = query.shape[-1]
    if sinks is not None:
        query, key, value = _with_sink(query, key, value, scale, sinks)
        # A first row for the sink keeps the matrix square, so that plain causal attention shows it to every row.
        query = F.pad(query, (0, 0, 1, 0))
    gqa = query.shape[0] != key.shape[0]
    if gqa and query.is_cuda and query.dtype == torch.float32:
        # No fused CUDA kernel groups heads in fp32: grouping there would build the [H, T, T] matrix.
        key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], 0) for x in (key, value))
        gqa = False
    out = F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=gqa
    )[0]
    return (out[:, 1:] if sinks is not None else out)[..., :dim]


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write a learned sink as one more key: an extra coordinate carries the head's sink logit in the query and 1 in
    the sink's key (0 in all others), and the sink's value is zero. Exact, differentiable, works with any kernel."""
    logit = (sinks / scale).to(query.dtype)[:, None, None].expand(-1, query.shape[1], 1)
    query = F.pad(torch.cat([query, logit], -1), (0, ALIGN - 1))
    key = F.pad(key, (0, ALIGN, 1, 0))
    marker = torch.zeros_like(key[0])
    marker[0, -ALIGN] = 1
    return query, key + marker, F.pad(value, (0, ALIGN, 1, 0))
