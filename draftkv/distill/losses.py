"""The losses, on dense logits: the formulas in one place, and the reference that the chunked head is tested against.

p is the target, q the drafter, both softmaxes at the term's temperature over the shared vocabulary, and
alpha = sum min(p, q) the probability that one drafted token is accepted (Leviathan et al. 2023). Per row:

    forward_kl    sum p log(p/q)                                       KL(target || drafter), usual for distillation
    reverse_kl    sum q log(q/p)                                       KL(drafter || target)
    jsd           b KL(p||m) + (1-b) KL(q||m), m = b p + (1-b) q       generalised JSD (GKD, Agarwal et al. 2024)
    tv            1/2 sum |p - q| = 1 - alpha                          DistillSpec (Zhou et al. 2023)
    lk            -log max(alpha, EPS)                                 LK losses (arXiv 2602.23881)
    lk_hybrid     l KL(p||q) + (1-l) TV, l = exp(-eta sg[mean alpha])  same; the mean is over the row's own sequence
    expected_al   1 - (1/K) sum_{j<=K} prod_{i<=j} alpha_i             K consecutive rows from this one; near the end
                                                                       of the sequence K is the number that remains

A loss is the SUM over rows; the caller divides by the global count of supervised tokens. No term is scaled by the
square of the temperature. The mean of lk_hybrid is per sequence, so no result depends on how sequences are put in
micro-batches.

Under `TopK` the tail is one bucket: p and q become distributions over k + 1 symbols, and the formulas above are taken
over those. Merging symbols never increases a divergence, so the bias has a sign: forward_kl, reverse_kl, jsd and tv are
lower bounds of their dense values; alpha is an upper bound, so lk and expected_al are lower bounds too; lk_hybrid mixes
two lower bounds with a share that is itself biased. The bias vanishes with the tail. The metrics hold both bounds:
alpha_low = sum_{top-k} min(p, q) <= alpha <= alpha_low + min(p_tail, q_tail) = alpha_high.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftkv.errors import InputError
from draftkv.recipe import LossTerm
from draftkv.teacher.signals import Dense, Signal, TopK

# Keeps -log alpha finite where min(p, q) underflows everywhere. It can be tiny: every component of the logit gradient
# of log alpha lies in [-1, 1], because a gradient of alpha is never larger than alpha itself.
EPS = 1e-20
# Stands for log 0 of the target, so that 0 * log 0 is 0 and not NaN.
LOG_ZERO = -1e4
# Smallest log-mass of the drafter's tail bucket; below it the tail has no gradient. exp of it is still a normal fp32.
LOG_TAIL_MIN = -80.0

COUPLED = ("lk_hybrid", "expected_al")  # terms whose rows depend on other rows of the sequence


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """`total`: scalar, the weighted sum over rows. `metrics`: SUMS over rows, detached.

    Keys: the unweighted sum of each term (a name's second use is `name#2`), `alpha` at the signal's temperature (1
    unless TopK says otherwise), `agree` (rows with equal argmax), `rows`. Under TopK `alpha` is the upper bound that
    the losses see, and `alpha_low` / `alpha_high` are both bounds.
    """

    total: Tensor
    metrics: dict[str, Tensor]


def target_log_probs(teacher: Dense | TopK, temperature: float) -> Tensor:
    """log p [N, S] in fp32: S = V symbols, or k + 1 with the tail last.

    Raises:
        InputError: a TopK signal stored at another temperature.
    """
    if isinstance(teacher, Dense):
        logits = teacher.logits if temperature == 1 else teacher.logits / temperature
        return torch.log_softmax(logits, dim=-1).clamp_(min=LOG_ZERO)
    if not math.isclose(teacher.temperature, temperature):
        raise InputError(
            f"loss temperature {temperature:g}: the top-k signal was stored at {teacher.temperature:g}, and the mass "
            "of its tail at another temperature is unknown; use that temperature or a dense signal"
        )
    return torch.cat([teacher.logprobs, teacher.tail_logprob[:, None]], dim=-1).clamp_(min=LOG_ZERO)


def drafter_log_probs(logits: Tensor, teacher: Dense | TopK, temperature: float) -> Tensor:
    """log q [N, S] of drafter logits [N, V], over the same symbols as `target_log_probs`; differentiable."""
    log_q = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
    if isinstance(teacher, Dense):
        return log_q
    tail = log_q.scatter(1, teacher.ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([log_q.gather(1, teacher.ids), tail.clamp(min=LOG_TAIL_MIN)], dim=-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """alpha [N] = sum min(p, q)."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -acceptance(log_p, log_q).clamp(min=EPS).log()


def hybrid_share(alpha: Tensor, lengths: Sequence[int], eta: float) -> Tensor:
    """The KL's share of lk_hybrid at each row [N], constant within a sequence and without gradient."""
    parts = alpha.detach().split(list(lengths))
    return torch.cat([alpha.new_empty(0), *((-eta * a.mean()).exp().expand(len(a)) for a in parts if len(a))])


def lk_hybrid(log_p: Tensor, log_q: Tensor, share: Tensor) -> Tensor:
    p = log_p.exp()  # once for both parts: at a large vocabulary each pass over [N, V] counts
    return share * (p * (log_p - log_q)).sum(-1) + (1 - share) * (p - log_q.exp()).abs().sum(-1) / 2


def expected_al(alpha: Tensor, lengths: Sequence[int], k: int) -> Tensor:
    """Per start row [N]: one minus the mean over j <= K of the probability that the next j tokens are all accepted."""
    rows = [alpha[:0]]  # not a new tensor: with no rows at all the result still has a gradient
    for a in alpha.split(list(lengths)):
        if not len(a):
            continue
        # Padded with ones and masked, not padded with zeros: the gradient of cumprod is simple without zeros.
        windows = torch.cat([a, a.new_ones(k - 1)]).unfold(0, k, 1)
        left = torch.arange(len(a), 0, -1, device=a.device).clamp(max=k)
        inside = torch.arange(k, device=a.device) < left[:, None]
        rows.append(1 - (windows.cumprod(-1) * inside).sum(-1) / left)
    return torch.cat(rows)


def separable_rows(term: LossTerm, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Per-row values [N] of a term whose rows do not depend on each other."""
    if term.name == "jsd":
        return jsd(log_p, log_q, term.beta)
    return {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "tv": tv, "lk": lk}[term.name](log_p, log_q)


def term_rows(term: LossTerm, log_p: Tensor, log_q: Tensor, lengths: Sequence[int]) -> Tensor:
    """Per-row values [N] of any term, for log-probabilities of all rows of the sequences in `lengths`."""
    if term.name == "lk_hybrid":
        share = hybrid_share(acceptance(log_p, log_q), lengths, term.eta)
        return lk_hybrid(log_p, log_q, share)
    if term.name == "expected_al":
        return expected_al(acceptance(log_p, log_q), lengths, term.k)
    return separable_rows(term, log_p, log_q)


def term_labels(terms: Sequence[LossTerm]) -> list[str]:
    """One metric key per term."""
    seen: list[str] = []
    for term in terms:
        again = sum(label.partition("#")[0] == term.name for label in seen)
        seen.append(f"{term.name}#{again + 1}" if again else term.name)
    return seen


def check_lengths(lengths: Sequence[int], rows: int, signal: Signal) -> None:
    """Raises: ValueError when the sequences' lengths, the drafter's rows and the signal's rows do not agree."""
    if sum(lengths) != rows or len(signal) != rows or min(lengths, default=0) < 0:
        raise ValueError(f"{rows} drafter rows, {len(signal)} signal rows, sequences of {list(lengths)}: must agree")


@torch.no_grad()
def acceptance_metrics(log_p: Tensor, log_q: Tensor, teacher: Dense | TopK) -> dict[str, Tensor]:
    """Per-row alpha [N], and under TopK both bounds of it."""
    smaller = torch.minimum(log_p, log_q).exp_()
    alpha = smaller.sum(-1)
    if isinstance(teacher, Dense):
        return {"alpha": alpha}
    return {"alpha": alpha, "alpha_low": smaller[:, :-1].sum(-1), "alpha_high": alpha}


@torch.no_grad()
def agreement(logits: Tensor, teacher: Dense | TopK) -> Tensor:
    """1.0 per row [N] where target and drafter have the same most likely token."""
    if isinstance(teacher, Dense):
        best = teacher.logits.argmax(-1)
    else:
        best = teacher.ids.gather(1, teacher.logprobs.argmax(-1, keepdim=True))[:, 0]
    return (logits.argmax(-1) == best).float()


def row_factors(weights: Sequence[float] | None, lengths: Sequence[int], like: Tensor) -> Tensor | None:
    """[N] the weight of every row, from one weight per sequence; None stays None. Rows of a sequence share theirs, so
    terms that couple rows stay exact."""
    if weights is None:
        return None
    per_sequence = torch.tensor(weights, dtype=torch.float32, device=like.device)
    return per_sequence.repeat_interleave(torch.tensor(lengths, device=like.device))


def reference_loss(
    terms: Sequence[LossTerm], logits: Tensor, signal: Signal, lengths: Sequence[int], vocab: int | None = None,
    weights: Sequence[float] | None = None,
) -> HeadLoss:
    """Weighted sum of terms over drafter logits [N, V], by plain autograd. Holds everything: for tests and small input.

    Args:
        lengths: rows of each sequence, in order; their sum is N. Zero is allowed.
        vocab: ids shared by target and drafter; None: all columns of `logits`.
        weights: factor on each sequence's part of the total, one per entry of `lengths` (metrics stay unweighted).
    """
    check_lengths(lengths, logits.shape[0], signal)
    vocab = logits.shape[1] if vocab is None else vocab
    signal.check(vocab)
    factors = row_factors(weights, lengths, logits)
    logits, teacher = logits[:, :vocab].float(), signal.rows(0, len(signal), vocab)
    total, metrics = logits.new_zeros(()), {}
    for label, term in zip(term_labels(terms), terms, strict=True):
        log_q = drafter_log_probs(logits, teacher, term.temperature)
        rows = term_rows(term, target_log_probs(teacher, term.temperature), log_q, lengths)
        total = total + term.weight * (rows if factors is None else rows * factors).sum()
        metrics[label] = rows.detach().sum()
    log_p = target_log_probs(teacher, teacher.temperature)
    log_q = drafter_log_probs(logits.detach(), teacher, teacher.temperature)
    metrics |= {name: value.sum() for name, value in acceptance_metrics(log_p, log_q, teacher).items()}
    metrics |= {"agree": agreement(logits, teacher).sum(), "rows": logits.new_ones(len(signal)).sum()}
    return HeadLoss(total, metrics)
