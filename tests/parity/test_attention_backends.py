"""Every backend of the attention kernel equals SDPA, in value and gradient, where it can run."""

import random
import sys
import types

import pytest
import torch
from matrix import ARCHITECTURES, ONE_SHOT, PROMPT, RESPONSE, TOLERANCE, cached_logits, fresh, model, policy, tokens

from draftkv.cache.attention import KERNELS
from draftkv.cache.backends import flash, flex
from draftkv.cache.backends.choice import ATTENTIONS
from draftkv.cache.backends.sdpa import ROW_CHUNK
from draftkv.cache.parallel import single

# query heads, KV heads, head_dim, rows, front, tail entries before row 0's own, window
SHAPES = [
    (4, 2, 8, 6, 5, 0, None),
    (4, 2, 8, 6, 5, 7, 3),
    (4, 4, 12, 6, 0, 7, 4),
    (6, 1, 16, 1, 9, 20, 4),
    (2, 1, 8, 1, 0, 4, None),
    (2, 1, 8, 9, 0, 0, None),
    (2, 2, 8, 9, 0, 0, 2),
    (2, 1, 8, 7, 3, 2, 0),
    (2, 2, 8, ROW_CHUNK + 3, 2, 40, 17),
]


def inputs(shape, dtype=torch.float64, device="cpu", seed=0):
    heads, groups, dim, rows, front, first, window = shape
    generator = torch.Generator().manual_seed(seed)

    def made(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    total = first + rows
    tensors = [made(heads, rows, dim), made(groups, total, dim), made(groups, total, dim)]
    if front:
        tensors += [made(groups, front, dim), made(groups, front, dim)]
    return tensors, made(heads), (first, window, dim**-0.5)


def attended(backend, shape, with_sinks, **where):
    """Output and the gradients of queries, keys, values and sinks."""
    (query, *entries), sinks, (first, window, scale) = inputs(shape, **where)
    front = tuple(entries[2:]) or None
    sinks = sinks if with_sinks else None
    out = KERNELS[backend](query, front, tuple(entries[:2]), first, window, scale, sinks)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    leaves = [query, *entries, *([sinks] if with_sinks else [])]
    return [out, *torch.autograd.grad((out * weight.to(out.device, out.dtype)).sum(), leaves)]


def literal(shape, with_sinks):
    """Softmax over every visible entry, as one writes it down."""
    (query, *entries), sinks, (first, window, scale) = inputs(shape)
    tail, front = entries[:2], entries[2:]
    rows, groups = query.shape[1], query.shape[0] // tail[0].shape[0]
    own, entry = first + torch.arange(rows)[:, None], torch.arange(first + rows)[None]
    seen = (entry <= own) & (own - entry <= (first + rows if window is None else window))
    key, value = tail
    if front:
        key, value = torch.cat([front[0], key], 1), torch.cat([front[1], value], 1)
        seen = torch.cat([torch.ones(rows, front[0].shape[1], dtype=torch.bool), seen], 1)
    logits = query @ key.repeat_interleave(groups, 0).mT * scale
    logits = logits.masked_fill(~seen, float("-inf"))
    if with_sinks:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, rows, 1)], -1)
    return logits.softmax(-1)[..., : key.shape[1]] @ value.repeat_interleave(groups, 0)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_flash_equals_sdpa_in_value_and_gradient(shape, with_sinks):
    want = attended("sdpa", shape, with_sinks)
    assert torch.allclose(want[0], literal(shape, with_sinks), atol=1e-12)
    for got, wanted in zip(attended("flash", shape, with_sinks), want, strict=True):
        assert got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-11)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_flex_equals_sdpa(shape, with_sinks):
    """Forward only: FlexAttention has no backward on the CPU."""
    tensors, sinks, (first, window, scale) = inputs(shape)
    (query, *entries), sinks = [x.detach().float() for x in tensors], sinks.detach().float() if with_sinks else None
    got, want = (
        KERNELS[backend](query, tuple(entries[2:]) or None, tuple(entries[:2]), first, window, scale, sinks)
        for backend in ("flex", "sdpa")
    )
    assert got.shape == want.shape and torch.allclose(got, want, atol=2e-6)


def test_flex_is_compiled_for_a_handful_of_cases_whatever_the_lengths(monkeypatch):
    """Past torch's own limit of eight it would run unfused, with all scores in memory, and hardly say so."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex, "flex_attention", flex.compiled("eager"))
    generator, graphs = random.Random(0), torch._dynamo.utils.counters["stats"]
    for step in range(20):
        prompt, rows = generator.randint(20, 1500), (1, 2, *map(generator.randint, (70, 300), (99, 329)))[step % 4]
        with torch.set_grad_enabled(step % 3 != 2):  # training and evaluation
            for shape in ((4, 2, 16, prompt, 0, 0, None), (4, 2, 16, rows, 30, 200, 100)):
                tensors, _, (first, window, scale) = inputs(shape, torch.float32)
                query, *entries = (x.detach() for x in tensors)
                flex.attend(query, tuple(entries[2:]) or None, tuple(entries[:2]), first, window, scale)
        found = graphs["unique_graphs"]
        if step == 16:
            early = found
    assert 8 < found == early, "it settles"
    torch._dynamo.reset()


def test_merged_gradients_against_finite_differences():
    for shape in SHAPES[:4]:
        (query, *entries), sinks, (first, window, scale) = inputs(shape)

        def attend(query, sinks, *entries, first=first, window=window, scale=scale):
            return flash.attend(query, entries[2:] or None, entries[:2], first, window, scale, sinks)

        assert torch.autograd.gradcheck(attend, (query, sinks, *entries))


class Package(types.ModuleType):
    """The two functions of flash_attn 2.8 that the backend calls, in plain torch, after the package's documentation:
    layout [batch, rows, heads, D]; grouped heads; causal and window aligned to the bottom right, both ends inclusive;
    log-sum-exp [batch, heads, rows] in fp32 (fp64 here); backward writes into dq, dk, dv and reads the given out and
    log-sum-exp. It refuses what the kernels refuse."""

    def __init__(self):
        super().__init__("flash_attn.flash_attn_interface")
        self.calls = []

    @staticmethod
    def _logits(q, k, scale, causal, left, right):
        assert q.shape[-1] % 8 == 0 and q.shape[2] % k.shape[2] == 0 and q.stride(-1) == k.stride(-1) == 1
        key = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        logits = torch.einsum("bihd,bjhd->bhij", q, key) * scale
        shift = k.shape[1] - q.shape[1]
        i, j = torch.arange(q.shape[1])[:, None] + shift, torch.arange(k.shape[1])[None]
        right = 0 if causal else right
        hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
        if left >= 0:
            hidden |= j < i - left
        if right >= 0:
            hidden |= j > i + right
        return logits.masked_fill(hidden, float("-inf"))

    def _flash_attn_forward(self, q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
                            softcap, alibi_slopes, return_softmax):  # fmt: skip
        assert dropout_p == 0 and softcap == 0 and alibi_slopes is None and not return_softmax
        logits = self._logits(q, k, softmax_scale, causal, window_size_left, window_size_right)
        self.calls.append((causal, window_size_left, window_size_right))
        value = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
        out = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), value)
        return out, logits.logsumexp(-1), torch.empty(0), torch.empty(2)

    def _flash_attn_backward(self, dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                             window_size_left, window_size_right, softcap, alibi_slopes, deterministic):  # fmt: skip
        assert dropout_p == 0 and softcap == 0 and alibi_slopes is None and not deterministic
        assert dq.is_contiguous() and dk.is_contiguous() and dv.is_contiguous() and softmax_lse.is_contiguous()
        logits = self._logits(q, k, softmax_scale, causal, window_size_left, window_size_right)
        groups = q.shape[2] // k.shape[2]
        key, value = (x.repeat_interleave(groups, 2) for x in (k, v))
        p = (logits - softmax_lse[..., None]).exp()
        dp = torch.einsum("bihd,bjhd->bhij", dout, value)
        ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * softmax_scale
        dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, key))
        for into, full in ((dk, torch.einsum("bhij,bihd->bjhd", ds, q)),
                           (dv, torch.einsum("bhij,bihd->bjhd", p, dout))):  # fmt: skip
            into.copy_(full.unflatten(2, (-1, groups)).sum(3))


@pytest.fixture
def package(monkeypatch):
    """flash_attn, taken for what runs on the CPU."""
    module = Package()
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    monkeypatch.setitem(flash.KERNELS, "cpu", flash.PackageKernel)
    return module


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_calls_of_the_flash_attn_package(package, shape, with_sinks):
    want = attended("sdpa", shape, with_sinks)
    for got, wanted in zip(attended("flash", shape, with_sinks), want, strict=True):
        assert torch.allclose(got, wanted, atol=1e-11)
    front, rows, window = shape[4], shape[3], shape[6]
    band = (True, -1 if window is None else window, 0) if rows > 1 else (False, -1, -1)
    assert package.calls == [band, *([(False, -1, -1)] if front else [])]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("backend", ["flash", "flex"])
@pytest.mark.parametrize("name", ONE_SHOT)
def test_parallel_under_a_backend_equals_evicted_under_sdpa(backend, arch, name):
    other = under(backend, arch)
    ids = tokens(PROMPT + RESPONSE)
    for prefill in ("full", "windowed"):
        pol = policy(name, 16, prefill=prefill)
        want, _ = cached_logits(model(arch), ids, PROMPT, pol)
        positions, view = torch.arange(ids.shape[1])[None], single(PROMPT, ids.shape[1], pol)
        with torch.no_grad():
            got = other(ids, position_ids=positions, cache_view=view, use_cache=False).logits[0]
        assert (got - want).abs().max() <= TOLERANCE, pol.label


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_evicted_under_flash_equals_evicted_under_sdpa(arch):
    ids, pol = tokens(PROMPT + RESPONSE), policy("rift_stat", 16)
    want, _ = cached_logits(model(arch), ids, PROMPT, pol)
    got, _ = cached_logits(under("flash", arch), ids, PROMPT, pol)
    assert (got - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_parameter_gradients_under_flash(arch, checkpointing):
    """Learned sinks (GPT-OSS) among them; also when layers are recomputed."""
    grads = {}
    for backend in ("sdpa", "flash"):
        m = fresh(arch)
        m.set_attn_implementation(ATTENTIONS[backend])
        m.train()
        if checkpointing:
            m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = tokens(PROMPT + RESPONSE)
        view = single(PROMPT, PROMPT + RESPONSE, policy("rift_stat", 16))
        out = m(ids, position_ids=torch.arange(ids.shape[1])[None], cache_view=view, use_cache=False).logits
        out[0, PROMPT:].float().pow(2).mean().backward()
        grads[backend] = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
    assert grads["flash"].keys() == grads["sdpa"].keys()
    assert arch != "gpt_oss" or any("sinks" in name and g.abs().max() > 0 for name, g in grads["flash"].items())
    for name, wanted in grads["sdpa"].items():
        assert torch.allclose(grads["flash"][name], wanted, atol=1e-5 * float(wanted.abs().max()) + 1e-8), name


def test_the_budget_bites_under_every_backend():
    """Otherwise equal logits would show nothing."""
    ids = tokens(PROMPT + RESPONSE)
    for backend in ("flash", "flex"):
        m, positions = under(backend, "llama"), torch.arange(ids.shape[1])[None]
        wide, half = (
            m(ids, position_ids=positions, cache_view=single(PROMPT, ids.shape[1], policy("rift_stat", budget)),
              use_cache=False).logits[0].detach() for budget in (32, 16)
        )  # fmt: skip
        assert torch.equal(wide[:PROMPT], half[:PROMPT]) and (wide[PROMPT:] - half[PROMPT:]).abs().max() > 1e-3


_UNDER: dict = {}


def under(backend: str, arch: str) -> torch.nn.Module:
    """A tiny model without gradients under a backend."""
    if (backend, arch) not in _UNDER:
        m = fresh(arch).requires_grad_(False)
        m.set_attn_implementation(ATTENTIONS[backend])
        _UNDER[backend, arch] = m
    return _UNDER[backend, arch]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "flex"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", [(16, 4, 128, 700, 300, 900, 257), (8, 2, 64, 1500, 0, 0, None),
                                   (4, 2, 256, 64, 33, 500, None), (8, 2, 64, 1, 300, 200, 128)])  # fmt: skip
def test_backends_on_a_gpu(backend, with_sinks, shape):
    """bf16 against fp64 SDPA on the CPU: off by no more than a few roundings of SDPA's own bf16."""
    if backend == "flash":
        pytest.importorskip("flash_attn")
    want = attended("sdpa", shape, with_sinks, dtype=torch.float64)
    near = attended("sdpa", shape, with_sinks, dtype=torch.bfloat16, device="cuda")
    got = attended(backend, shape, with_sinks, dtype=torch.bfloat16, device="cuda")
    for mine, reference, wanted in zip(got, near, want, strict=True):
        rounding = (reference.cpu().double() - wanted).norm()
        assert (mine.cpu().double() - wanted).norm() <= 2 * rounding + 1e-3 * wanted.norm()


@pytest.mark.gpu
def test_fp32_rows_on_a_gpu_take_sdpa():
    shape = (8, 2, 64, 100, 30, 50, 20)
    got, want = (attended(b, shape, True, dtype=torch.float32, device="cuda") for b in ("flash", "sdpa"))
    for mine, wanted in zip(got, want, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-5)
