"""Flash attention over the front and over the tail, merged by log-sum-exp: no mask is built at all.

With l_k the log-sum-exp of a row's logits over part k, o_k its output there and s a learned sink's logit,

    l = log(sum_k exp(l_k) + exp(s)),   o = sum_k exp(l_k - l) o_k   (the sink's value is zero).

Flash kernels do not take a gradient of their l_k, so the merge has its own backward. A kernel's backward makes its
probabilities from the l it is given, p = exp(q.k - l), and its dS = p * (dO.v - dO.o) from the o it is given. With the
*merged* l and o that is every part's exact share of the whole softmax: dK and dV belong to the part, dQ is summed, and
the sink, an entry without value, gets ds = -sum_rows exp(s - l) (dO.o). (Ring attention, arXiv 2310.01889, does the
same over devices.)

On CUDA the kernel is flash-attn's (2.8: causal masks are aligned to the bottom right; row i sees entries
[i + N - R - left, i + N - R + right]; log-sum-exp is [batch, heads, rows] in fp32; backward writes into dq, dk, dv). On
the CPU it is the one behind torch's SDPA, which takes a mask: slower than SDPA itself, and there so that merge, sinks
and gradients are tested where there is no GPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from draftkv.cache.backends import sdpa
from draftkv.cache.backends.sdpa import ALIGN, Entries

MAX_HEAD_DIM = 256  # of flash-attn 2


def attend(
    query: Tensor, front: Entries | None, tail: Entries, first: int, window: int | None, scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `draftkv.cache.backends.choice`. What flash-attn does not take (fp32 on a GPU) goes through sdpa."""
    if query.is_cuda and (query.dtype == torch.float32 or query.shape[-1] > MAX_HEAD_DIM):
        return sdpa.attend(query, front, tail, first, window, scale, sinks)
    low = 0 if window is None else max(0, first - window)
    seen = slice(low, first + query.shape[1])
    entries = (tail[0][:, seen], tail[1][:, seen], *(front or ()))
    return _Merged.apply(query, sinks, scale, window, *entries)


class _Merged(torch.autograd.Function):
    """The tail (its last R entries are the rows' own) and then, if any, the front."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, sinks: Tensor | None, scale: float, window: int | None, *entries: Tensor
    ) -> Tensor:
        kernel = KERNELS[query.device.type]
        parts = [kernel.forward(query, k, v, scale, b) for k, v, b in _parts(query, window, entries)]
        outs, sums = zip(*parts, strict=True)
        terms = list(sums) if sinks is None else [*sums, sinks.to(sums[0].dtype)[:, None].expand_as(sums[0])]
        if len(terms) == 1:
            out, total = outs[0], sums[0]
        else:
            total = torch.logsumexp(torch.stack(terms), 0)
            shares = [(part - total).exp()[..., None] for part in sums]
            out = sum(share * o for share, o in zip(shares, outs, strict=True)).to(query.dtype)
        ctx.save_for_backward(query, sinks, out, total, *entries)
        ctx.scale, ctx.window, ctx.kernel = scale, window, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, sinks, out, total, *entries = ctx.saved_tensors
        grad, d_query, d_entries = grad.to(query.dtype).contiguous(), 0, []
        for key, value, band in _parts(query, ctx.window, entries):
            dq, dk, dv = ctx.kernel.backward(grad, query, key, value, out, total, ctx.scale, band)
            d_query = d_query + dq.to(total.dtype)
            d_entries += [dk, dv]
        d_sinks = None
        if sinks is not None:
            through = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
            d_sinks = -((sinks.to(total.dtype)[:, None] - total).exp() * through).sum(1).to(sinks.dtype)
        return d_query.to(query.dtype), d_sinks, None, None, *d_entries


Band = tuple[bool, int | None]  # whether rows see a causal band instead of everything, and its window


def _parts(query: Tensor, window: int | None, entries: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor, Band]]:
    # All that is left of the tail is visible to a single row; without a band flash-attn takes a faster path for it.
    bands = ((query.shape[1] > 1, window), (False, None))
    return [(entries[2 * i], entries[2 * i + 1], bands[i]) for i in range(len(entries) // 2)]


class PackageKernel:
    """flash-attn on CUDA. Its layout is [batch, rows, heads, D]."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        q, k, v = map(_to_package, (query, key, value))
        out, total, *_ = _flash_attn_forward(
            q, k, v, 0.0, scale, softcap=0.0, alibi_slopes=None, return_softmax=False, **_window(band)
        )
        return _from_package(out, query), total[0]

    @staticmethod
    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        do, q, k, v, o = map(_to_package, (grad, query, key, value, out))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _flash_attn_backward(
            do, q, k, v, o, total[None].contiguous(), dq, dk, dv, 0.0, scale, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_window(band),
        )  # fmt: skip
        return _from_package(dq, query), _from_package(dk, key), _from_package(dv, value)


def _window(band: Band) -> dict[str, Any]:
    causal, window = band
    return {"causal": causal, "window_size_left": -1 if window is None or not causal else window,
            "window_size_right": 0 if causal else -1}  # fmt: skip


def _to_package(x: Tensor) -> Tensor:
    return F.pad(x.transpose(0, 1)[None], (0, -x.shape[-1] % ALIGN))


def _from_package(x: Tensor, like: Tensor) -> Tensor:
    return x[0].transpose(0, 1)[..., : like.shape[-1]]


class TorchKernel:
    """torch's flash attention on the CPU. Query heads that share a KV head are folded into rows."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        folded = query.reshape(1, key.shape[0], -1, query.shape[-1])
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded, key[None], value[None], attn_mask=_mask(query, key, band), scale=scale
        )
        return out.reshape(query.shape), total.reshape(query.shape[:2])

    @staticmethod
    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, o = (x.reshape(1, key.shape[0], -1, x.shape[-1]) for x in (grad, query, out))
        # It reads the log-sum-exp in the layout in which its forward wrote it: rows before heads.
        total = total.reshape(1, key.shape[0], -1).transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, key[None], value[None], o, total, 0.0, False, attn_mask=_mask(query, key, band), scale=scale
        )
        return dq.reshape(query.shape), dk[0], dv[0]


def _mask(query: Tensor, key: Tensor, band: Band) -> Tensor | None:
    """[groups * R, N], additive: the kernel takes no boolean one."""
    causal, window = band
    if not causal:
        return None
    rows, entries = query.shape[1], key.shape[1]
    own = torch.arange(entries - rows, entries, device=query.device)[:, None]
    entry = torch.arange(entries, device=query.device)[None]
    hidden = entry > own
    if window is not None:
        hidden |= own - entry > window
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill(hidden, float("-inf"))
    return mask.repeat(query.shape[0] // key.shape[0], 1)


KERNELS = {"cuda": PackageKernel, "cpu": TorchKernel}
