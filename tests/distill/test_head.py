"""The chunked head against the reference: values, gradients, metrics; splits, precision, and what it holds."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftkv.distill import head
from draftkv.distill.head import chunk_rows, distill_loss
from draftkv.distill.losses import reference_loss
from draftkv.recipe import LossTerm
from draftkv.teacher import signals
from draftkv.teacher.signals import Dense, Hidden, TopK

NAMES = ["forward_kl", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid", "expected_al"]
LENGTHS, VOCAB, WIDTH = [5, 0, 1, 7], 23, 6
ROWS = sum(LENGTHS)
TERMS = {name: [LossTerm(name=name, temperature=1.5, beta=0.3, k=3)] for name in NAMES} | {
    "weighted": [LossTerm(name=name, weight=0.5 + i, k=2) for i, name in enumerate(NAMES)],
}


def inputs(seed=0, rows=ROWS, extra=0):
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(rows, WIDTH, generator=draw), torch.randn(VOCAB + extra, WIDTH, generator=draw)
    teacher = Hidden(hidden + 0.5 * torch.randn(rows, WIDTH, generator=draw), weight + 0.1)
    return hidden, weight, teacher


def signal_of(kind, teacher, temperature=1.0):
    dense = teacher.rows(0, len(teacher))
    return {"hidden": teacher, "dense": dense, "top_k": dense.top_k(4, temperature=temperature)}[kind]


def with_gradients(function, hidden, weight):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    result = function(hidden, weight)
    (3 * result.total).backward()
    return result, hidden.grad, weight.grad


def assert_same(got, want):
    torch.testing.assert_close(got[0].total, want[0].total, atol=1e-5, rtol=1e-5)
    assert got[0].metrics.keys() == want[0].metrics.keys()
    for name, value in want[0].metrics.items():
        torch.testing.assert_close(got[0].metrics[name], value, atol=1e-5, rtol=1e-5, msg=name)
    for mine, reference in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(mine, reference, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("kind", ["dense", "top_k", "hidden"])
@pytest.mark.parametrize("name", TERMS)
def test_chunked_equals_reference(name, kind, chunk):
    terms = TERMS[name]
    hidden, weight, teacher = inputs()
    signal = signal_of(kind, teacher, terms[0].temperature)
    want = with_gradients(lambda h, w: reference_loss(terms, h @ w.t(), signal, LENGTHS), hidden, weight)
    got = with_gradients(lambda h, w: distill_loss(terms, h, w, signal, LENGTHS, chunk), hidden, weight)
    assert want[1].abs().max() > 1e-3
    assert_same(got, want)


@pytest.mark.parametrize("name", ["forward_kl", "lk_hybrid", "weighted"])
def test_sequence_weights_scale_loss_and_gradient_but_not_metrics(name):
    terms, (hidden, weight, teacher) = TERMS[name], inputs()
    scale = [0.5, 1.0, 0.0, 3.0]
    want = with_gradients(lambda h, w: reference_loss(terms, h @ w.t(), teacher, LENGTHS, None, scale), hidden, weight)
    got = with_gradients(lambda h, w: distill_loss(terms, h, w, teacher, LENGTHS, 4, None, scale), hidden, weight)
    assert_same(got, want)
    plain = distill_loss(terms, hidden, weight, teacher, LENGTHS, 4)
    assert plain.metrics["alpha"] == got[0].metrics["alpha"] and plain.total != got[0].total


def test_terms_at_several_temperatures():
    terms = [LossTerm(name=name, temperature=t, k=3) for name, t in
             [("tv", 2.0), ("lk_hybrid", 0.5), ("forward_kl", 1.0), ("expected_al", 2.0), ("lk_hybrid", 2.0)]]
    hidden, weight, teacher = inputs()
    want = with_gradients(lambda h, w: reference_loss(terms, h @ w.t(), teacher, LENGTHS), hidden, weight)
    assert_same(with_gradients(lambda h, w: distill_loss(terms, h, w, teacher, LENGTHS, 3), hidden, weight), want)


@pytest.mark.parametrize("kind", ["dense", "top_k", "hidden"])
def test_padding_rows_are_cut_and_get_no_gradient(kind):
    hidden, weight, teacher = inputs(extra=5)
    cut = Hidden(teacher.hidden, teacher.weight[:VOCAB])
    signal = signal_of("top_k", cut) if kind == "top_k" else signal_of(kind, teacher)
    terms = TERMS["weighted"]
    want = with_gradients(lambda h, w: reference_loss(terms, h @ w[:VOCAB].t(), signal, LENGTHS, VOCAB), hidden, weight)
    got = with_gradients(lambda h, w: distill_loss(terms, h, w, signal, LENGTHS, 4, VOCAB), hidden, weight)
    assert_same(got, want)
    assert (got[2][VOCAB:] == 0).all()
    with pytest.raises(ValueError, match="vocab = 99"):
        distill_loss(terms, hidden, weight, signal, LENGTHS, vocab=99)


@pytest.mark.parametrize("split", [[8], [4, 4], [2] * 4, [1] * 8, [3, 5]])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_do_not_depend_on_the_micro_batch_split(name, split):
    lengths = [1, 6, 2, 3, 1, 4, 2, 5]
    hidden, weight, teacher = inputs(rows=sum(lengths))
    terms = [LossTerm(name=name, k=3)]

    def run(h, w, parts):
        total, start = 0.0, 0
        for first, count in zip([sum(parts[:i]) for i in range(len(parts))], parts, strict=True):
            mine = lengths[first : first + count]
            stop = start + sum(mine)
            signal = Hidden(teacher.hidden[start:stop], teacher.weight)
            loss = distill_loss(terms, h[start:stop], w, signal, mine, chunk=5).total / sum(lengths)
            loss.backward()
            total, start = total + loss.item(), stop
        return total

    results = []
    for parts in ([1] * 8, split):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        results.append((run(h, w, parts), h.grad, w.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["dense", "top_k", "hidden"])
def test_no_rows_give_a_zero_loss_and_zero_gradients(name, kind):
    hidden, weight, teacher = inputs(rows=0)
    signal = signal_of(kind, teacher)
    got = with_gradients(lambda h, w: distill_loss([LossTerm(name=name)], h, w, signal, [0]), hidden, weight)
    assert got[0].total == 0 and got[1].shape == (0, WIDTH) and (got[2] == 0).all()
    full = distill_loss([LossTerm(name=name)], *inputs()[:2], signal_of(kind, inputs()[2]), LENGTHS)
    assert got[0].metrics.keys() == full.metrics.keys() and not any(v.item() for v in got[0].metrics.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["dense", "top_k"])
def test_disjoint_distributions_give_finite_gradients(name, kind):
    weight = torch.eye(VOCAB)
    hidden, target = torch.full((4, VOCAB), -300.0), torch.full((4, VOCAB), -300.0)
    hidden[:, 1], target[:, 0] = 300.0, 300.0
    signal = Dense(target) if kind == "dense" else Dense(target).top_k(3)
    terms = [LossTerm(name=name)]
    got = with_gradients(lambda h, w: distill_loss(terms, h, w, signal, [3, 1], 2), hidden, weight)
    assert all(torch.isfinite(x).all() for x in (got[0].total, *got[1:]))
    assert_same(got, with_gradients(lambda h, w: reference_loss(terms, h @ w.t(), signal, [3, 1]), hidden, weight))


@pytest.mark.parametrize("half_head", [False, True])
def test_half_precision_under_autocast_has_fp32_logits(half_head, monkeypatch):
    """bf16 hidden states and autocast change nothing but the rounding of the input and of the gradients handed back."""
    monkeypatch.setattr(signals, "_SLICE_BYTES", 4 * WIDTH * 5)  # five rows of the head at a time
    hidden, weight, teacher = inputs()
    hidden, weight = hidden.bfloat16(), weight.bfloat16() if half_head else weight
    terms = TERMS["weighted"]

    def plain(h, w):
        return reference_loss(terms, h.float() @ w.float().t(), teacher, LENGTHS)

    def chunked(h, w):
        with torch.autocast("cpu", torch.bfloat16):
            return distill_loss(terms, h, w, teacher, LENGTHS, 4)

    want, got = with_gradients(plain, hidden, weight), with_gradients(chunked, hidden, weight)
    torch.testing.assert_close(got[0].total, want[0].total, atol=1e-4, rtol=1e-5)
    assert got[1].dtype == torch.bfloat16 and got[2].dtype == weight.dtype
    for mine, reference in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(mine, reference, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["forward_kl", "expected_al"])
def test_evaluation_and_frozen_inputs(name):
    hidden, weight, teacher = inputs()
    terms = [LossTerm(name=name)]
    want, want_hidden, want_weight = with_gradients(
        lambda h, w: distill_loss(terms, h, w, teacher, LENGTHS, 4), hidden, weight)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.no_grad():
        quiet = distill_loss(terms, h, w, teacher, LENGTHS, 4)
    assert quiet.total == want.total and not quiet.total.requires_grad
    (3 * distill_loss(terms, h, weight, teacher, LENGTHS, 4).total).backward()
    (3 * distill_loss(terms, hidden, w, teacher, LENGTHS, 4).total).backward()
    assert torch.equal(h.grad, want_hidden) and torch.equal(w.grad, want_weight)
    assert not any(value.requires_grad for value in want.metrics.values())


def test_a_tied_embedding_gets_both_gradients():
    embedding = torch.nn.Embedding(VOCAB, WIDTH)
    ids, (_, _, teacher) = torch.arange(ROWS), inputs()
    grads = []
    for loss in (lambda h: distill_loss(TERMS["tv"], h, embedding.weight, teacher, LENGTHS, 4),
                 lambda h: reference_loss(TERMS["tv"], h @ embedding.weight.t(), teacher, LENGTHS)):
        embedding.weight.grad = None
        loss(embedding(ids).tanh()).total.backward()
        grads.append(embedding.weight.grad)
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_gradients_pass_through_ddp(tmp_path):
    """The hooks of DistributedDataParallel fire on the head's weight as on any other parameter."""
    hidden, weight, teacher = inputs()

    class Drafter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, VOCAB, bias=False)

        def forward(self, x):
            return distill_loss(TERMS["lk_hybrid"], self.body(x), self.head.weight, teacher, LENGTHS, 4).total

    model = Drafter()
    model(hidden).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model)(hidden).backward()
    finally:
        torch.distributed.destroy_process_group()
    for got, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(got.grad, expected)


def test_a_second_backward_is_refused():
    hidden, weight, teacher = inputs()
    total = distill_loss(TERMS["tv"], hidden.requires_grad_(), weight, teacher, LENGTHS).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward a second time"):
        total.backward()


class _LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation makes while the mode is on."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("kind", ["top_k", "hidden"])
@pytest.mark.parametrize("name", TERMS)
def test_no_tensor_exceeds_a_chunk_of_logits_or_the_head(name, kind):
    hidden, weight, teacher = inputs(rows=64)
    terms = TERMS[name]
    signal = signal_of(kind, teacher, terms[0].temperature)
    with _LargestTensor() as seen:
        with_gradients(lambda h, w: distill_loss(terms, h, w, signal, [40, 24], chunk=8), hidden, weight)
    assert seen.elements == max(8 * VOCAB, VOCAB * WIDTH, 64 * WIDTH) < 64 * VOCAB


def test_chunks_shrink_as_the_vocabulary_grows(monkeypatch):
    assert [chunk_rows(1024, v) for v in (32_768, 131_072, 248_320)] == [1024, 256, 135]
    assert chunk_rows(16, 32_768) == 16 and chunk_rows(1024, 10**9) == 1
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * VOCAB * 3)
    hidden, weight, teacher = inputs()
    terms = TERMS["weighted"]
    want = with_gradients(lambda h, w: reference_loss(terms, h @ w.t(), teacher, LENGTHS), hidden, weight)
    assert_same(with_gradients(lambda h, w: distill_loss(terms, h, w, teacher, LENGTHS), hidden, weight), want)


def test_stored_half_precision_top_k_is_read_in_fp32():
    hidden, weight, teacher = inputs()
    top = signal_of("top_k", teacher)
    stored = TopK(top.ids.int(), top.logprobs.half(), top.tail_logprob.half())
    result = distill_loss([LossTerm(name="forward_kl")], hidden, weight, stored, LENGTHS)
    want = distill_loss([LossTerm(name="forward_kl")], hidden, weight, top, LENGTHS)
    torch.testing.assert_close(result.total, want.total, atol=2e-2, rtol=1e-2)
