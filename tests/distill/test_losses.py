"""The formulas of the losses against loops written from their definitions, and their known limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkv.distill.losses import EPS, expected_al, hybrid_share, reference_loss, term_labels
from draftkv.errors import InputError
from draftkv.recipe import LossTerm
from draftkv.teacher.signals import Dense, Hidden, TopK, head_logits

NAMES = ["forward_kl", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid", "expected_al"]
LENGTHS = [4, 0, 1, 6]


def softmax(logits, temperature):
    exps = [math.exp(z / temperature) for z in logits]
    return [e / sum(exps) for e in exps]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def literal_loss(term, p, q, lengths):
    """Sum over rows of one term, by loops, in Python floats."""
    alpha = [sum(min(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    total, start = 0.0, 0
    for length in lengths:
        rows = range(start, start + length)
        start += length
        for t in rows:
            tv = sum(abs(a - b) for a, b in zip(p[t], q[t], strict=True)) / 2
            if term.name == "forward_kl":
                total += kl(p[t], q[t])
            elif term.name == "reverse_kl":
                total += kl(q[t], p[t])
            elif term.name == "jsd":
                m = [term.beta * a + (1 - term.beta) * b for a, b in zip(p[t], q[t], strict=True)]
                total += term.beta * kl(p[t], m) + (1 - term.beta) * kl(q[t], m)
            elif term.name == "tv":
                total += tv
            elif term.name == "lk":
                total += -math.log(alpha[t])
            elif term.name == "lk_hybrid":
                share = math.exp(-term.eta * sum(alpha[r] for r in rows) / length)
                total += share * kl(p[t], q[t]) + (1 - share) * tv
            else:
                window = [r for r in rows if t <= r < t + term.k]
                accepted = [math.prod(alpha[r] for r in window[: j + 1]) for j in range(len(window))]
                total += 1 - sum(accepted) / len(window)
    return total


def pair(rows=11, vocab=9, seed=0, spread=2.0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=draw) * spread, torch.randn(rows, vocab, generator=draw) * spread


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", NAMES)
def test_a_term_equals_its_formula_on_dense_and_top_k_signals(name, temperature):
    term = LossTerm(name=name, temperature=temperature, beta=0.3, eta=2.0, k=3)
    target, drafter = pair()
    p, q = ([softmax(row, temperature) for row in x.tolist()] for x in (target, drafter))
    dense = reference_loss([term], drafter, Dense(target), LENGTHS)
    assert dense.total.item() == pytest.approx(literal_loss(term, p, q, LENGTHS), rel=2e-5)

    top = Dense(target).top_k(3, temperature=temperature)
    merged = [[[x[i] for i in ids] + [sum(v for i, v in enumerate(x) if i not in ids)] for x, ids in
               zip(side, top.ids.tolist(), strict=True)] for side in (p, q)]
    bucket = reference_loss([term], drafter, top, LENGTHS)
    assert bucket.total.item() == pytest.approx(literal_loss(term, *merged, LENGTHS), rel=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_equals_finite_differences_of_the_formula(name):
    """In double precision by loops; lk_hybrid's share is held fixed, as it carries no gradient."""
    term = LossTerm(name=name, k=3)
    target, drafter = pair(rows=5, vocab=4, seed=3)
    lengths = [3, 2]
    logits = drafter.clone().requires_grad_()
    reference_loss([term], logits, Dense(target), lengths).total.backward()
    p = [softmax(row, 1.0) for row in target.tolist()]

    def value(z):
        q = [softmax(row, 1.0) for row in z.tolist()]
        if name != "lk_hybrid":
            return literal_loss(term, p, q, lengths)
        fixed = [softmax(row, 1.0) for row in drafter.tolist()]
        alpha = torch.tensor([sum(map(min, a, b)) for a, b in zip(p, fixed, strict=True)])
        share = hybrid_share(alpha, lengths, term.eta).tolist()
        tv = [sum(abs(a - b) for a, b in zip(x, y, strict=True)) / 2 for x, y in zip(p, q, strict=True)]
        return sum(s * kl(x, y) + (1 - s) * d for s, x, y, d in zip(share, p, q, tv, strict=True))

    step = 1e-5
    for index in [(0, 0), (1, 3), (2, 1), (4, 2)]:
        moved = torch.zeros(5, 4, dtype=torch.float64)
        moved[index] = step
        slope = (value(drafter.double() + moved) - value(drafter.double() - moved)) / (2 * step)
        assert logits.grad[index].item() == pytest.approx(slope, abs=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_equal_distributions_have_no_loss_and_no_gradient(name):
    # Bit-equal, for |p - q| has a kink there: a difference of one rounding gives it a gradient of size p.
    target, _ = pair()
    logits = target.clone().requires_grad_()
    for signal in (Dense(target), Dense(target).top_k(4)):
        result = reference_loss([LossTerm(name=name)], logits, signal, LENGTHS)
        (gradient,) = torch.autograd.grad(result.total, logits)
        assert result.total.item() == pytest.approx(0, abs=5e-6)
        assert gradient.abs().max() < 1e-6
        assert result.metrics["alpha"].item() == pytest.approx(11, abs=1e-5)
        assert result.metrics["agree"] == 11 and result.metrics["rows"] == 11


@pytest.mark.parametrize("name", NAMES)
def test_disjoint_distributions_give_finite_gradients(name):
    """alpha underflows to 0; -log of it stays at the clamp, and no gradient is NaN or infinite."""
    target, drafter = torch.full((3, 6), -300.0), torch.full((3, 6), -300.0)
    target[:, 0], drafter[:, 1] = 300.0, 300.0
    for signal in (Dense(target), Dense(target).top_k(2)):
        logits = drafter.clone().requires_grad_()
        result = reference_loss([LossTerm(name=name)], logits, signal, [2, 1])
        result.total.backward()
        assert result.metrics["alpha"] == 0 and torch.isfinite(result.total)
        assert torch.isfinite(logits.grad).all()
        if name == "lk":
            assert result.total.item() == pytest.approx(-3 * math.log(EPS), rel=1e-5)


def test_lk_learns_from_a_tiny_acceptance():
    """The clamp must not cut the gradient where alpha is small but not zero: -log alpha exists for that case."""
    target, drafter = torch.tensor([[30.0, 0.0]]), torch.tensor([[0.0, 10.0]], requires_grad=True)
    reference_loss([LossTerm(name="lk")], drafter, Dense(target), [1]).total.backward()
    assert drafter.grad[0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_a_zero_loss(name, lengths):
    logits = torch.zeros(0, 5, requires_grad=True)
    result = reference_loss([LossTerm(name=name)], logits, Dense(torch.zeros(0, 5)), lengths)
    result.total.backward()
    assert result.total == 0 and logits.grad.shape == (0, 5)
    assert all(value == 0 for value in result.metrics.values())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 7), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_expected_al_windows_stay_in_their_sequence(lengths, k, seed):
    alpha = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed))
    got, start = expected_al(alpha, lengths, k), 0
    for length in lengths:
        for t in range(start, start + length):
            window = alpha[t : min(t + k, start + length)]
            assert got[t].item() == pytest.approx(1 - window.cumprod(0).mean().item(), abs=1e-6)
        start += length


@given(st.integers(1, 12), st.floats(0.1, 6.0), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_top_k_bounds_hold_the_true_acceptance(k, spread, seed):
    target, drafter = pair(rows=4, vocab=12, seed=seed, spread=spread)
    truth = reference_loss([LossTerm(name="tv")], drafter, Dense(target), [4]).metrics["alpha"].item()
    got = reference_loss([LossTerm(name="tv")], drafter, Dense(target).top_k(k), [4]).metrics
    assert got["alpha_low"].item() - 1e-5 <= truth <= got["alpha_high"].item() + 1e-5
    assert got["alpha"] == got["alpha_high"]


@pytest.mark.parametrize("name", NAMES)
def test_top_k_of_the_whole_vocabulary_is_dense(name):
    target, drafter = pair()
    results = []
    for signal in (Dense(target), Dense(target).top_k(9)):
        logits = drafter.clone().requires_grad_()
        result = reference_loss([LossTerm(name=name)], logits, signal, LENGTHS)
        result.total.backward()
        results.append((result.total, logits.grad, result.metrics["alpha"], result.metrics["agree"]))
    for dense, bucket in zip(*results, strict=True):
        torch.testing.assert_close(dense, bucket, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "tv", "lk", "expected_al"])
def test_top_k_is_a_lower_bound(name):
    target, drafter = pair()
    term = LossTerm(name=name)
    dense = reference_loss([term], drafter, Dense(target), LENGTHS).total
    values = [reference_loss([term], drafter, Dense(target).top_k(k), LENGTHS).total for k in (1, 3, 6)]
    assert all(value <= dense + 1e-5 for value in values)


def test_padding_columns_are_cut_before_the_softmax():
    target, drafter = pair(vocab=9)
    padded = torch.cat([target, torch.full((11, 3), 50.0)], dim=1)
    wide = torch.cat([drafter, torch.full((11, 7), 50.0)], dim=1)
    term = LossTerm(name="forward_kl")
    want = reference_loss([term], drafter, Dense(target), LENGTHS).total
    assert reference_loss([term], wide, Dense(padded), LENGTHS, vocab=9).total == want
    assert Dense(padded).top_k(2, vocab=9).ids.max() < 9


def test_a_top_k_signal_refuses_another_temperature():
    target, drafter = pair()
    with pytest.raises(InputError, match="temperature 2.*stored at 1"):
        reference_loss([LossTerm(name="tv", temperature=2.0)], drafter, Dense(target).top_k(3), LENGTHS)


def test_what_does_not_fit_together_is_refused():
    target, drafter = pair()
    term = LossTerm(name="tv")
    with pytest.raises(ValueError, match="must agree"):
        reference_loss([term], drafter, Dense(target), [4, 4])
    with pytest.raises(ValueError, match="fewer than"):
        reference_loss([term], drafter, Dense(target[:, :5]), LENGTHS)
    with pytest.raises(ValueError, match="past the 2 shared ids"):
        top = TopK(torch.full((11, 1), 3), torch.zeros(11, 1), torch.zeros(11))
        reference_loss([term], drafter, top, LENGTHS, vocab=2)
    with pytest.raises(ValueError, match="k = 10"):
        Dense(target).top_k(10)


def test_a_weighted_sum_adds_up_and_names_repeated_terms():
    target, drafter = pair()
    terms = [LossTerm(name="jsd", beta=0.1), LossTerm(name="tv", weight=2.0), LossTerm(name="jsd", beta=0.9)]
    assert term_labels(terms) == ["jsd", "tv", "jsd#2"]
    result = reference_loss(terms, drafter, Dense(target), LENGTHS)
    parts = sum(t.weight * result.metrics[label] for t, label in zip(terms, term_labels(terms), strict=True))
    assert result.total.item() == pytest.approx(parts.item(), rel=1e-6)


def test_hidden_makes_fp32_logits_of_half_precision_states():
    hidden, weight = torch.randn(6, 8).bfloat16(), torch.randn(20, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = Hidden(hidden, weight).rows(2, 5, vocab=17)
    assert got.logits.dtype == torch.float32
    torch.testing.assert_close(got.logits, hidden[2:5].float() @ weight[:17].float().t())
    torch.testing.assert_close(head_logits(hidden, weight.float()), hidden.float() @ weight.float().t())
