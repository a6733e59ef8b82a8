"""The invariant of the project: for every policy and architecture, parallel logits == evicted logits."""

import pytest
import torch
from matrix import (
    ARCHITECTURES,
    HYBRIDS,
    ONE_SHOT,
    PROMPT,
    RESPONSE,
    TOLERANCE,
    cached_logits,
    fresh,
    model,
    notes_for,
    parallel_logits,
    policy,
    related_drafter,
    tokens,
)  # fmt: skip

from draftkv.acceptance.live import speculate
from draftkv.acceptance.replay import Replay
from draftkv.acceptance.walk import greedy_blocks
from draftkv.cache.attention import ATTENTION
from draftkv.cache.evicted import EvictedCache
from draftkv.cache.oracle import oracle_notes
from draftkv.cache.parallel import lay_out, predicting_rows, single
from draftkv.cache.policy import PRESETS, Policy
from draftkv.cache.recurrent import MIXERS
from draftkv.rehearsal import tiny_model


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", [*ONE_SHOT, "oracle"])
@pytest.mark.parametrize("prefill", ["full", "windowed"])
def test_parallel_equals_evicted(arch, name, prefill):
    ids = tokens(PROMPT + RESPONSE)
    for budget in (16, 33) if name != "streaming" else (5, 33):
        pol = policy(name, budget, prefill=prefill)
        notes = notes_for(model(arch), ids, PROMPT, pol)
        want, _ = cached_logits(model(arch), ids, PROMPT, pol)
        apart = parallel_logits(model(arch), ids, PROMPT, pol, notes=notes) - want
        assert apart.abs().max() <= TOLERANCE, (pol.label, apart.abs().max())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("prompt_len", [1, 3, 6, 12, 40])
@pytest.mark.parametrize("name", [n for n in ONE_SHOT if n != "full"])
def test_short_prompts_and_tiny_budgets(arch, prompt_len, name):
    """Prompts shorter than the window, the budget, the observation window, the sinks; a budget of one entry."""
    ids = tokens(prompt_len + 14, seed=prompt_len)
    least = {"streaming": 5, "rift_stat_block": 8}.get(name, 1)
    for budget in (least, 9):
        pol = policy(name, budget)
        want, _ = cached_logits(model(arch), ids, prompt_len, pol)
        apart = parallel_logits(model(arch), ids, prompt_len, pol) - want
        assert apart.abs().max() <= TOLERANCE, (pol.label, apart.abs().max())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_budget_of_everything_is_full_attention(arch):
    """Against transformers' own attention, not ours."""
    ids = tokens(PROMPT + RESPONSE)
    plain = fresh(arch)
    with torch.no_grad():
        want = plain(ids, use_cache=False).logits[0].float()
    for name in PRESETS:
        for budget in (PROMPT + RESPONSE, 500):
            pol = policy(name, budget)
            if pol.reselects or name == "oracle":
                got, _ = cached_logits(model(arch), ids, PROMPT, pol, 8, 0)
            else:
                got = parallel_logits(model(arch), ids, PROMPT, pol)
            assert (got - want).abs().max() <= TOLERANCE, (name, budget)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", [n for n in ONE_SHOT if n != "full"])
def test_budget_bites_on_response_rows_only(arch, name):
    ids = tokens(PROMPT + RESPONSE)
    wide = parallel_logits(model(arch), ids, PROMPT, policy(name, 32))
    half = parallel_logits(model(arch), ids, PROMPT, policy(name, 16))
    assert torch.equal(wide[:PROMPT], half[:PROMPT])
    assert (wide[PROMPT:] - half[PROMPT:]).abs().max() > 1e-3


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_prompt_keys_and_values(arch, checkpointing):
    """Gradient flows through kept entries, selected prompt entries included, also when layers are recomputed."""
    m = fresh(arch)
    m.set_attn_implementation(ATTENTION)
    m.train()
    if checkpointing:
        m.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    ids = tokens(PROMPT + RESPONSE)
    embeds = m.get_input_embeddings()(ids).detach().requires_grad_()
    view = single(PROMPT, PROMPT + RESPONSE, policy("rift_stat", 16))
    positions = torch.arange(PROMPT + RESPONSE)[None]
    out = m(inputs_embeds=embeds, position_ids=positions, cache_view=view, use_cache=False).logits
    out[0, PROMPT:].float().pow(2).mean().backward()
    assert embeds.grad[0, :PROMPT].abs().max() > 0
    grads = [p.grad for name, p in m.named_parameters() if name.endswith(("k_proj.weight", "v_proj.weight"))]
    assert len(grads) >= 2
    for grad in grads:
        assert torch.isfinite(grad).all() and grad.abs().max() > 0
    if checkpointing:
        plain = [p.grad.clone() for p in m.parameters() if p.grad is not None]
        m.zero_grad()
        m.gradient_checkpointing_disable()
        out = m(inputs_embeds=embeds, position_ids=positions, cache_view=view, use_cache=False).logits
        out[0, PROMPT:].float().pow(2).mean().backward()
        for a, b in zip(plain, [p.grad for p in m.parameters() if p.grad is not None], strict=True):
            assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_views_of_one_row_equal_separate_passes(arch, checkpointing):
    """Batched rows of different lengths, several views each: logits and gradients equal one pass per view."""
    m = fresh(arch).train()
    m.set_attn_implementation(ATTENTION)
    if checkpointing:
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # The last row feeds one token a view: recurrent layers have step-wise kernels for those, without gradient.
    seqs = [tokens(n, seed=n)[0].tolist() for n in (PROMPT, 21, 2)]
    responses = [tokens(n, seed=n)[0].tolist() for n in (RESPONSE, 9, 2)]
    views = [[policy("full", 0), policy("swa", 7), policy("rift_stat", 12)], [policy("streaming", 9)],
             [policy("full", 0), policy("swa", 1)]]  # fmt: skip
    batch = lay_out(seqs, responses, views)
    shared, together = _logits_and_gradients(m, [batch])
    single_views = [([p], [r], [[v]]) for p, r, vs in zip(seqs, responses, views, strict=True) for v in vs]
    apart, separate = _logits_and_gradients(m, [lay_out(*one) for one in single_views])
    assert len(shared) == len(apart) == 6
    for a, b in zip(shared, apart, strict=True):
        assert (a - b).abs().max() <= TOLERANCE
    assert together.keys() == separate.keys()
    for name, grad in together.items():
        assert torch.allclose(grad, separate[name], atol=1e-5, rtol=1e-4), name


def _logits_and_gradients(m, batches):
    """Logits of every segment's predicting rows, and the gradients of their mean squares."""
    m.zero_grad(set_to_none=True)
    found = []
    for batch in batches:
        out = m(batch.input_ids, position_ids=batch.position_ids, cache_view=batch.view, use_cache=False).logits
        found += [out[i, rows] for i, layout in enumerate(batch.view.rows) for rows in predicting_rows(layout)]
    sum(x.float().pow(2).mean() for x in found).backward()
    return [x.detach() for x in found], {n: p.grad for n, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("arch", HYBRIDS)
def test_recurrent_layers_read_the_prompt_once(arch):
    """P + V R tokens for V views, counted where the recurrence is computed; the prompt gets every view's gradient."""
    m, counts = fresh(arch), []
    m.set_attn_implementation(ATTENTION)
    mixers = [x for x in m.modules() if isinstance(x, MIXERS)]
    for mixer in mixers:
        mixer.out_proj.register_forward_hook(lambda _, inputs, out: counts.append(out.shape[0] * out.shape[1]))
    views = [policy("full", 0), policy("swa", 7), policy("rift_stat", 12), policy("streaming", 9)]
    batch = lay_out([tokens(PROMPT)[0].tolist()], [tokens(RESPONSE)[0].tolist()], [views])
    embeds = m.get_input_embeddings()(batch.input_ids).detach().requires_grad_()
    out = m(inputs_embeds=embeds, position_ids=batch.position_ids, cache_view=batch.view, use_cache=False).logits
    assert mixers and sum(counts) == len(mixers) * (PROMPT + 4 * (RESPONSE - 1))
    start = batch.view.rows[0].segments[3].start
    grad = torch.autograd.grad(out[0, start:].float().pow(2).mean(), embeds)[0][0]
    assert grad[:PROMPT].abs().max() > 0 and grad[PROMPT:start].abs().max() == 0, "views do not see one another"


@pytest.mark.parametrize("arch", HYBRIDS)
def test_replay_of_many_policies_is_one_pass(arch):
    """Several policies in one forward of a hybrid give what each gives alone."""
    m, forwards = model(arch), []
    row = {"row_id": "r", "prompt_ids": tokens(PROMPT)[0].tolist(), "response_ids": tokens(RESPONSE)[0].tolist(),
           "response_logprobs": [-1.0] * RESPONSE, "temperature": 1.0, "finish_reason": "length"}  # fmt: skip
    policies = [policy("full", 0), policy("swa", 7), policy("rift_stat", 12)]
    hook = m.get_decoder().register_forward_hook(lambda *_: forwards.append(1))
    together = Replay(4).row(m, row, policies)
    hook.remove()
    assert len(forwards) == 1
    for pol, found in zip(policies, together, strict=True):
        assert abs(found.flags - Replay(4).row(m, row, [pol])[0].flags).max() <= TOLERANCE


def test_views_that_see_different_prompts_are_refused():
    with pytest.raises(ValueError, match="prompt rows"):
        lay_out([[1] * 20], [[2] * 5], [[policy("full", 0), policy("swa", 4, prefill="windowed")]])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", list(PRESETS))
def test_live_equals_replay_block_by_block(arch, name):
    """Greedy live decoding with evicted caches: the target's own output, and replay's accepted counts."""
    target, drafter, pol = model(arch), related_drafter(arch), policy(name, 12)
    blocks = []
    for seed, drafts in ((7, 1), (8, 4), (9, 4)) if name == "full" else ((7, 4),):
        prompt = tokens(30, seed=seed)[0].tolist()
        length = 32 if name == "full" else 22
        want = greedy(target, prompt, length)
        notes = oracle_notes(drafter, prompt, want) if name == "oracle" else None
        run = speculate(target, drafter, prompt, pol, drafts, max_new_tokens=length, notes=notes)
        assert run.response_ids == want
        found = Replay(drafts).row(drafter, run.as_row(prompt, "r"), [pol])[0]
        assert greedy_blocks(found.flags, drafts, found.finished) == run.accepted
        if pol.generated == "sliding" and not pol.is_full:
            assert run.entries <= 12, "the budget, at every block start"
        blocks += [n / drafts for n in run.accepted]
    if name == "full":
        assert 0 < sum(blocks) < len(blocks), "a drafter that is sometimes right, or the test shows nothing"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_drafters_that_are_always_right_or_always_wrong(arch):
    target, prompt = model(arch), tokens(30, seed=7)[0].tolist()
    want = greedy(target, prompt, 32)
    run = speculate(target, target, prompt, policy("full", 0), 4, max_new_tokens=32)
    assert run.response_ids == want and set(run.accepted) == {4}
    wrong = Reversed(target)
    run = speculate(target, wrong, prompt, policy("full", 0), 4, max_new_tokens=32)
    assert run.response_ids == want and set(run.accepted) == {0} and run.blocks == 31


class Reversed(torch.nn.Module):
    """A model with the target's layers and a negated head: its best token is the target's worst."""

    def __init__(self, target):
        super().__init__()
        self.target, self.config = target, target.config
        self.head = torch.nn.Linear(1, 1, bias=False)
        self.head.weight = torch.nn.Parameter(-target.get_output_embeddings().weight.detach())

    def get_decoder(self):
        return self.target.get_decoder()

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_eos_inside_a_draft_block(arch):
    """Whatever token of the greedy output is called EOS, live decoding stops with it and agrees with replay."""
    target, drafter, prompt = model(arch), related_drafter(arch), tokens(30, seed=9)[0].tolist()
    want, pol = greedy(target, prompt, 32), policy("rift_stat", 12)
    for at in range(0, 14):
        stop = want.index(want[at])
        run = speculate(target, drafter, prompt, pol, 4, max_new_tokens=32, eos_ids={want[at]})
        assert run.finished and run.response_ids == want[: stop + 1]
        if stop:
            found = Replay(4).row(drafter, run.as_row(prompt, "r"), [pol])[0]
            assert greedy_blocks(found.flags, 4, finished=True) == run.accepted


@pytest.mark.parametrize("padded", [(512, 520), (520, 512), (520, 528)])
@pytest.mark.parametrize("temperature, draft", [(0.0, "sampled"), (1.0, "sampled"), (1.0, "greedy")])
def test_padding_of_the_head_is_never_emitted(padded, temperature, draft):
    """512 shared ids and heads padded to different sizes, with padding that would win every argmax."""
    target, drafter = with_padding(model("llama"), padded[0]), with_padding(related_drafter("llama"), padded[1])
    prompt, pol = tokens(30, seed=7)[0].tolist(), policy("full", 0)
    generator = torch.Generator().manual_seed(0)
    run = speculate(target, drafter, prompt, pol, 4, 32, frozenset(), temperature, draft, generator, 512)
    assert len(run.response_ids) == 32 and max(run.response_ids) < 512
    row = run.as_row(prompt, "r")
    if temperature == 0:
        assert run.response_ids == greedy(model("llama"), prompt, 32)
        found = Replay(4, vocab=512).row(drafter, row, [pol])[0]
        assert greedy_blocks(found.flags, 4, found.finished) == run.accepted and sum(run.accepted) > 0
        return
    row |= {"temperature": temperature, "response_logprobs": [-3.0] * 32}
    got, want = (
        Replay(4, draft, vocab=v).row(m, row, [pol])[0] for m, v in ((drafter, 512), (related_drafter("llama"), None))
    )
    assert abs(got.flags - want.flags).max() <= TOLERANCE


def test_an_id_that_only_the_target_has_is_not_accepted():
    """Replay of a rollout with such an id, at each kind of draft."""
    drafter, response = with_padding(model("llama"), 520), [3, 515, 4]
    row = {"prompt_ids": [5, 6, 7], "response_ids": response, "finish_reason": "length", "row_id": "r",
           "response_logprobs": [-30.0] * 3}  # fmt: skip
    for temperature, draft in ((0.0, "sampled"), (1.0, "greedy"), (1.0, "sampled")):
        found = Replay(4, draft, vocab=512).row(drafter, row | {"temperature": temperature}, [policy("full", 0)])[0]
        assert found.flags[1] == 0 and (temperature == 0 or draft == "greedy" or found.flags[2] == 1)


def with_padding(plain: torch.nn.Module, size: int) -> torch.nn.Module:
    """A copy with `size` rows of embedding and head; those past the 512 shared ids have huge logits of either sign."""
    padded = tiny_model("llama", vocab_size=size, tie_word_embeddings=False)
    state = {**plain.state_dict(), "lm_head.weight": plain.get_output_embeddings().weight.detach()}
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        old = state[key]
        extra = 1e3 * torch.randn(size - len(old), old.shape[1], generator=torch.Generator().manual_seed(0))
        state[key] = torch.cat([old, extra])
    padded.load_state_dict(state)
    padded.set_attn_implementation(ATTENTION)
    return padded


def greedy(target, prompt: list[int], count: int) -> list[int]:
    cache = EvictedCache(target.config, Policy(policy="full"))
    out = [int(cache.forward(target, torch.tensor([prompt]), keep=1).argmax())]
    while len(out) < count:
        cache.commit()
        out.append(int(cache.forward(target, torch.tensor([[out[-1]]])).argmax()))
    return out


def test_windowed_prefill_is_a_native_sliding_window():
    """`swa` with `prefill: windowed` is what an engine runs for a natively sliding model: B entries and the token."""
    native = tiny_model("qwen3", initializer_range=0.1, use_sliding_window=True, sliding_window=9,
                        layer_types=["sliding_attention"] * 2, num_hidden_layers=2)  # fmt: skip
    ours = tiny_model("qwen3", initializer_range=0.1, num_hidden_layers=2)
    ours.load_state_dict(native.state_dict())
    ours.set_attn_implementation(ATTENTION)
    ids = tokens(PROMPT + RESPONSE)
    with torch.no_grad():
        want = native(ids, use_cache=False).logits[0]
    got = parallel_logits(ours, ids, PROMPT, policy("swa", 8, prefill="windowed"))
    assert (got - want).abs().max() <= TOLERANCE
    assert (parallel_logits(ours, ids, PROMPT, policy("swa", 8)) - want).abs().max() > 1e-2
