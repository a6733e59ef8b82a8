"""Policies that select again: every executor agrees, and each decision is the documented one."""

import pytest
import torch
from matrix import (
    ARCHITECTURES,
    LATER,
    ONE_SHOT,
    PROMPT,
    RESPONSE,
    TOLERANCE,
    Recording,
    cached_logits,
    literal_logits,
    model,
    notes_for,
    parallel_logits,
    policy,
    tokens,
)  # fmt: skip

from draftkv.acceptance.replay import Replay
from draftkv.cache.offloaded import OffloadedCache
from draftkv.cache.policy import PRESETS, Policy

ALL = [name for name in PRESETS if name != "full"]
IDS = tokens(PROMPT + RESPONSE)


def recorded(arch, pol, block, wrong):
    cache = Recording(model(arch).config, pol, notes_for(model(arch), IDS, PROMPT, pol))
    return cached_logits(model(arch), IDS, PROMPT, pol, block, wrong, cache)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ALL)
def test_offloaded_equals_one_forward_under_literal_masks(arch, name):
    """Token by token and in blocks with rejected drafts; every row sees itself, and what it saw explains its logits."""
    for budget, block, wrong in ((12, 4, 3), (33, 1, 0), (PROMPT + 6, 5, 0)):
        pol = policy(name, budget)
        got, cache = recorded(arch, pol, block, wrong)
        for rows in cache.seen.values():
            assert all(rows[at][:, at].all() for at in range(PROMPT, PROMPT + RESPONSE))
        want = literal_logits(arch, IDS, PROMPT, cache.seen)
        assert (got - want).abs().max() <= TOLERANCE, (pol.label, block)


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("prompt_len", [1, 7])
def test_prompts_shorter_than_windows_pages_and_budgets(arch, name, prompt_len):
    """The budget fills up while decoding, so the split still changes when an entry is brought back."""
    ids, m = tokens(prompt_len + 30, seed=prompt_len), model(arch)
    pol = policy(name, 9)
    cache = Recording(m.config, pol)
    got, _ = cached_logits(m, ids, prompt_len, pol, 3, 2, cache)
    assert (got - literal_logits(arch, ids, prompt_len, cache.seen)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", [*ONE_SHOT, "oracle"])
def test_offloaded_equals_evicted_where_nothing_comes_back(arch, name):
    pol = policy(name, 12)
    evicted, _ = cached_logits(model(arch), IDS, PROMPT, pol)
    offloaded, _ = recorded(arch, pol, 3, 2)
    assert (evicted - offloaded).abs().max() <= TOLERANCE


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["rift_dyn", "rift_ada"])
@pytest.mark.parametrize("block", [1, 4])
def test_parallel_equals_offloaded_epoch_by_epoch(arch, name, block):
    pol = policy(name, 12)
    got, cache = recorded(arch, pol, block, 2)
    assert len(cache.refreshed_at) >= 2
    want = parallel_logits(model(arch), IDS, PROMPT, pol, tuple(cache.refreshed_at))
    assert (got - want).abs().max() <= TOLERANCE
    if name == "rift_dyn" and block == 1:
        assert (parallel_logits(model(arch), IDS, PROMPT, pol) - want).abs().max() == 0, "the clock's own rows"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", [n for n in LATER if PRESETS[n][0]["trigger"]["kind"] in (
    "rate_controlled", "fixed_threshold", "always")])  # fmt: skip
def test_rejected_tokens_leave_no_trace(arch, name):
    pol = policy(name, 12)
    plain, one = recorded(arch, pol, 1, 0)
    noisy, other = recorded(arch, pol, 4, 3)
    assert (plain - noisy).abs().max() <= TOLERANCE
    assert torch.allclose(one.tau, other.tau, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["rcr", "fixed_threshold", "rift_drift"])
def test_masked_merge_equals_branching(arch, name):
    # Where nothing is remembered of the first selection, drift is about 0.55 on the hybrid's two small layers.
    tau = 0.55 if (arch, name) == ("nemotron_h", "fixed_threshold") else None
    pol = policy(name, 12, **({"trigger": {"tau": tau}} if tau else {}))
    runs = []
    for branching in (False, True):
        cache = OffloadedCache(model(arch).config, pol, branching=branching)
        logits, _ = cached_logits(model(arch), IDS, PROMPT, pol, 1, 0, cache)
        runs.append((logits.argmax(-1), logits, cache.cost.settled()))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][2].refreshes == runs[1][2].refreshes > 0 and runs[0][2].reads == runs[1][2].reads
    assert runs[0][2].refreshes < runs[0][2].steps, "sometimes it fires, sometimes it does not"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_exact_at_every_step_with_room_for_all_is_full_attention(arch):
    full, _ = cached_logits(model(arch), IDS, PROMPT, Policy(policy="full"))
    for generated in ("kept", "sliding"):
        got, _ = recorded(arch, policy("exact", PROMPT + RESPONSE, generated=generated), 1, 0)
        assert (got - full).abs().max() <= TOLERANCE


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_period_longer_than_the_response_is_never(arch):
    once = policy("rift_stat", 12)
    want, _ = cached_logits(model(arch), IDS, PROMPT, once)
    for pol in (policy("rift_dyn", 12, trigger={"delta": RESPONSE + 1}),
                policy("rift_ada", 12, trigger={"check": 50, "a_min": 50, "a_max": 50})):  # fmt: skip
        got, _ = recorded(arch, pol, 3, 2)
        assert torch.equal(got, want) or (got - want).abs().max() <= TOLERANCE
        assert (parallel_logits(model(arch), IDS, PROMPT, pol, ()) - want).abs().max() <= TOLERANCE


def test_replay_of_a_schedule_costs_one_forward_per_refresh():
    """Not one per token: twice the interval, half the forwards; a policy that never selects again takes one in all."""
    m, forwards = model("llama"), []
    row = {"prompt_ids": IDS[0, :PROMPT].tolist(), "response_ids": tokens(97, seed=3)[0].tolist(), "temperature": 0.0,
           "finish_reason": "length", "row_id": "r", "response_logprobs": []}  # fmt: skip
    hook = m.get_decoder().register_forward_hook(lambda *_: forwards.append(1))
    counts = []
    for pol in (policy("rift_stat", 12), *(policy("rift_dyn", 12, trigger={"delta": d}) for d in (8, 16, 200))):
        forwards.clear()
        found = Replay(3).row(m, row, [pol])[0]
        counts.append((len(forwards), round(found.cost.refreshes / len(m.model.layers)) if found.cost else 0))
    hook.remove()
    # The prompt, then one chunk up to each refresh and one after the last.
    assert counts == [(1, 0), (14, 12), (8, 6), (2, 0)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", LATER)
def test_selecting_again_changes_what_is_seen(arch, name):
    pol = policy(name, 12)
    once = Policy.model_validate({**pol.model_dump(), "policy": "custom", "trigger": "never"})
    again, _ = recorded(arch, pol, 1, 0)
    stale, _ = recorded(arch, once, 1, 0)
    assert torch.equal(again[:PROMPT], stale[:PROMPT]) and (again - stale).abs().max() > 1e-4
