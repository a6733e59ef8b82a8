"""The vocabulary head and the loss in one pass over chunks of rows: [N, V] logits of neither model are ever held.

The drafter's head is `logits = hidden @ weight.T` in fp32, without bias and without soft-capping (models that have
either are refused before they get here). The loss is a sum over rows, so each chunk's gradient is final once its logits
are known: it is computed in the forward pass and added to the gradients of `hidden` and `weight` (fp32), and backward
only scales them. Nothing is recomputed, and no graph spans more than one chunk.

Terms that couple rows of a sequence (`lk_hybrid`, `expected_al`) need the acceptance rate of every row first. They cost
one more pass without gradient; what it yields makes them separable by row:

    lk_hybrid     the KL's share of each row, which carries no gradient anyway
    expected_al   L_r + c_r (alpha_r - sg[alpha_r]), L_r the value and c_r = d(sum L)/d(alpha_r): equal in value and
                  gradient
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftkv.distill.losses import (
    COUPLED,
    LOG_TAIL_MIN,
    HeadLoss,
    acceptance,
    acceptance_metrics,
    agreement,
    check_lengths,
    drafter_log_probs,
    expected_al,
    hybrid_share,
    lk_hybrid,
    row_factors,
    separable_rows,
    target_log_probs,
    term_labels,
)
from draftkv.recipe import LossTerm
from draftkv.teacher.signals import Dense, Signal, TopK, fp32_slices, head_logits

# A chunk's fp32 logits stay within this size, whatever `train.head_chunk` says: 135 rows at a vocabulary of 248,320.
CHUNK_BYTES = 128 << 20


def chunk_rows(chunk: int, vocab: int) -> int:
    """Rows of logits that are held at once: `chunk`, or fewer where they would pass CHUNK_BYTES."""
    return max(1, min(chunk, CHUNK_BYTES // (4 * vocab)))


def distill_loss(
    terms: Sequence[LossTerm],
    hidden: Tensor,
    weight: Tensor,
    signal: Signal,
    lengths: Sequence[int],
    chunk: int = 64,
    vocab: int | None = None,
    weights: Sequence[float] | None = None,
) -> HeadLoss:
    """Weighted sum of terms, summed over rows, equal in value and gradient to `losses.reference_loss`.

    Args:
        terms: the loss; see `draftkv.distill.losses`.
        hidden: [N, D] the drafter's final hidden states at the supervised rows, any float dtype.
        weight: [V, D] the drafter's head, tied to the embedding or not, trainable or not.
        signal: the target at the same N rows, on the same device.
        lengths: rows of each sequence, in order; their sum is N. Whole sequences only.
        chunk: most rows of logits to hold at once; see `chunk_rows`.
        vocab: ids shared by target and drafter; None: all rows of `weight`. Rows past it get zero gradient.
        weights: factor on each sequence's part of the total, one per entry of `lengths` (metrics stay unweighted).

    Returns:
        The total, differentiable once with respect to `hidden` and `weight` where grad mode is on, and the metrics.

    Raises:
        ValueError: row counts that disagree, a vocabulary cut that a side does not have.
        InputError: a TopK signal at another temperature than a term's.
    """
    check_lengths(lengths, hidden.shape[0], signal)
    vocab = weight.shape[0] if vocab is None else vocab
    if not 0 < vocab <= weight.shape[0]:
        raise ValueError(f"vocab = {vocab}: the drafter's head has {weight.shape[0]} rows")
    signal.check(vocab)
    factors = row_factors(weights, lengths, hidden)
    work = _Pass(tuple(terms), signal, tuple(lengths), chunk_rows(chunk, vocab), vocab, factors)
    # Autocast would make the logits bf16; see signals.head_logits.
    with torch.autocast(hidden.device.type, enabled=False):
        work.couple(hidden.detach(), weight.detach())
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            total = _FusedLoss.apply(hidden, weight, work)
        else:
            total, _, _ = work.run(hidden.detach(), weight.detach(), False, False)
    return HeadLoss(total, {name: rows.sum() for name, rows in work.rows.items()})


class _FusedLoss(torch.autograd.Function):
    """Computes the gradients in forward; backward scales them by the gradient of the total."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, work: "_Pass") -> Tensor:
        total, *ctx.gradients = work.run(hidden.detach(), weight.detach(), *ctx.needs_input_grad[:2])
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("distill_loss: backward a second time; its gradients were handed out by the first")
        # Handed out, not kept: autograd can then adopt a gradient as `.grad` instead of copying it.
        gradients, ctx.gradients = ctx.gradients, None
        scaled = []
        while gradients:
            gradient = gradients.pop(0)
            dtype = ctx.dtypes[len(scaled)]
            scaled.append(None if gradient is None else gradient.mul_(grad_total).to(dtype))
        return *scaled, None


@dataclass(eq=False)
class _Pass:
    """One evaluation of the loss: its input, what couples rows, and the per-row values it leaves behind."""

    terms: tuple[LossTerm, ...]
    signal: Signal
    lengths: tuple[int, ...]
    step: int
    vocab: int
    factors: Tensor | None  # [N] weight of each row
    coupling: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # term index -> tensors [N]
    rows: dict[str, Tensor] = field(default_factory=dict)  # metric -> per-row values [N]

    def spans(self) -> list[tuple[int, int]]:
        """Chunks [start, stop); for N = 0 a single empty one, so that every metric exists."""
        n = len(self.signal)
        return [(start, min(start + self.step, n)) for start in range(0, max(n, 1), self.step)]

    @torch.no_grad()
    def couple(self, hidden: Tensor, weight: Tensor) -> None:
        """First pass, only where a term couples rows: acceptance of every row, then what a row needs of the others."""
        coupled = {i: term for i, term in enumerate(self.terms) if term.name in COUPLED}
        alphas = {term.temperature: hidden.new_zeros(len(hidden), dtype=torch.float32) for term in coupled.values()}
        for start, stop in self.spans() if coupled else []:
            logits = head_logits(hidden[start:stop], weight[: self.vocab])
            teacher = self.signal.rows(start, stop, self.vocab)
            for temperature, alpha in alphas.items():
                log_p = target_log_probs(teacher, temperature)
                log_q = drafter_log_probs(logits, teacher, temperature)
                alpha[start:stop] = acceptance_metrics(log_p, log_q, teacher)["alpha"]
        for i, term in coupled.items():
            alpha = alphas[term.temperature].clone()
            if term.name == "lk_hybrid":
                self.coupling[i] = (hybrid_share(alpha, self.lengths, term.eta),)
                continue
            with torch.enable_grad():
                alpha.requires_grad_()
                values = expected_al(alpha, self.lengths, term.k)
                (slope,) = torch.autograd.grad(values.sum(), alpha)
            self.coupling[i] = values.detach(), slope

    @torch.no_grad()
    def run(
        self, hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The fused pass: (total, gradient of hidden or None, gradient of weight or None), gradients in fp32."""
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        head = weight[: self.vocab]
        for start, stop in self.spans():
            grad_logits = self._chunk(hidden, head, start, stop, want_hidden or want_weight)
            if grad_logits is not None and self.factors is not None:
                grad_logits.mul_(self.factors[start:stop, None])
            if grad_hidden is not None:
                for a, b in fp32_slices(head):
                    grad_hidden[start:stop].addmm_(grad_logits[:, a:b], head[a:b].float())
            if grad_weight is not None:
                grad_weight[: self.vocab].addmm_(grad_logits.t(), hidden[start:stop].float())
            del grad_logits  # or it would live beside the next chunk's buffers
        labelled = zip(term_labels(self.terms), self.terms, strict=True)
        total = sum(term.weight * self._weighted(self.rows[label]).sum() for label, term in labelled)
        return total, grad_hidden, grad_weight

    def _weighted(self, rows: Tensor) -> Tensor:
        return rows if self.factors is None else rows * self.factors

    def _chunk(self, hidden: Tensor, head: Tensor, start: int, stop: int, want: bool) -> Tensor | None:
        """Per-row values of one chunk into `rows`; the gradient [n, V] of its logits where it is wanted."""
        teacher = self.signal.rows(start, stop, self.vocab)
        logits = head_logits(hidden[start:stop], head)
        self._note("agree", start, agreement(logits, teacher))
        self._note("rows", start, logits.new_ones(len(logits)))
        grad_logits = None
        # The signal's own temperature comes last, even if no term has it: metrics are taken there.
        temperatures = sorted({term.temperature for term in self.terms} | {teacher.temperature})
        temperatures.sort(key=lambda t: t == teacher.temperature)
        for temperature in temperatures:
            symbols = _Symbols(logits, teacher, temperature)
            if temperature == teacher.temperature:
                # Both are [n, V] buffers that the rest of the chunk does not need.
                del logits, teacher
            grad_symbols = self._terms(symbols, temperature, start, stop, want)
            if grad_symbols is not None:
                part = symbols.pull_back(grad_symbols)
                grad_logits = part if grad_logits is None else grad_logits.add_(part)
        return grad_logits

    def _terms(self, symbols: "_Symbols", temperature: float, start: int, stop: int, want: bool) -> Tensor | None:
        """Values of the terms at one temperature, and the gradient of their weighted sum with respect to log q."""
        if temperature == symbols.teacher_temperature:
            for name, value in symbols.metrics().items():
                self._note(name, start, value)
        labels = term_labels(self.terms)
        grad: Tensor | None = None
        for i, term in enumerate(self.terms):
            if term.temperature != temperature:
                continue
            # Term by term, so that only one term's graph exists at a time.
            log_q = symbols.log_q.detach().requires_grad_(want)
            with torch.set_grad_enabled(want):
                rows = self._rows(i, term, symbols.log_p, log_q, slice(start, stop))
            self._note(labels[i], start, rows.detach())
            if want:
                (part,) = torch.autograd.grad(rows, log_q, torch.ones_like(rows))
                del rows
                part.mul_(term.weight)
                grad = part if grad is None else grad.add_(part)
        return grad

    def _rows(self, i: int, term: LossTerm, log_p: Tensor, log_q: Tensor, span: slice) -> Tensor:
        if term.name not in COUPLED:
            return separable_rows(term, log_p, log_q)
        if term.name == "lk_hybrid":
            return lk_hybrid(log_p, log_q, self.coupling[i][0][span])
        value, slope = (tensor[span] for tensor in self.coupling[i])
        alpha = acceptance(log_p, log_q)
        return value + slope * (alpha - alpha.detach())

    def _note(self, name: str, start: int, value: Tensor) -> None:
        # Into one tensor made once: a small one kept per chunk would settle in a freed [n, V] block of the C heap and
        # split it, so that the next chunk needs a new one (seen: 2 GB of such holes).
        if name not in self.rows:
            self.rows[name] = value.new_zeros(len(self.signal))
        self.rows[name][start : start + len(value)] = value


class _Symbols:
    """log p and log q [n, S] of one chunk at one temperature, and the way back from log q to the logits.

    Under TopK S is k + 1: everything elementwise in the loss is small, and of the [n, V] buffers only the logits stay.
    """

    def __init__(self, logits: Tensor, teacher: Dense | TopK, temperature: float):
        self.temperature = temperature
        self.teacher_temperature = teacher.temperature
        self.log_p = target_log_probs(teacher, temperature)
        self.log_q = drafter_log_probs(logits, teacher, temperature)
        self.top = teacher if isinstance(teacher, TopK) else None
        self.logits = None if self.top is None else logits

    def metrics(self) -> dict[str, Tensor]:
        return acceptance_metrics(self.log_p, self.log_q, Dense(self.log_p) if self.top is None else self.top)

    def pull_back(self, grad: Tensor) -> Tensor:
        """Gradient [n, V] of the logits from the gradient [n, S] of log q. Uses up its buffers.

        Dense: with log q = z/T - logsumexp(z/T), dL/dz = (g - q sum g) / T. The tail of TopK is log q_t = log sum of q
        over the rest, so a rest token gets g_t q / q_t in place of g.
        """
        grad_sum = grad.sum(-1, keepdim=True)
        if self.top is None:
            result = grad.addcmul_(self.log_q.exp_(), -grad_sum)
        else:
            log_tail = self.log_q[:, -1:]
            tail = torch.where(log_tail > LOG_TAIL_MIN, grad[:, -1:] * (-log_tail).exp(), 0)
            at_top = grad[:, :-1].addcmul(self.log_q[:, :-1].exp(), -grad_sum)
            result = torch.softmax(self.logits / self.temperature, dim=-1).mul_(tail - grad_sum)
            result.scatter_(1, self.top.ids, at_top)
        return result if self.temperature == 1 else result.div_(self.temperature)
