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
from draftkv.cache.drift import captured, evicted_mass
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
    pol = policy(name, 13 if name == "arkvale" else 9)  # a page of sinks, a window and a page to select
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


CROSSED = {"snapkv": {"observation": 8}, "bacon": {"observation": 8}, "random": {}, "exact": {}, "quest": {"block": 4},
           "arkvale": {"block": 4}, "infinigen": {}, "lowrank": {"rank": 4}}  # fmt: skip


@pytest.mark.parametrize("scorer", CROSSED)
@pytest.mark.parametrize("arch, delta, phase, initial", [
    ("llama", 1, 0, None), ("llama", 5, 0, None), ("llama", 1, 0, "random"), ("llama", 6, 1, "random"),
    ("qwen3_5", 5, 0, None), ("gpt_oss", 5, 0, None),
])  # fmt: skip
def test_every_scorer_selects_the_same_in_parallel_and_offloaded(arch, scorer, delta, phase, initial):
    """Each selection sees what its own moment knows: nothing of later epochs, nothing of other selections."""
    trigger = {"kind": "every", "delta": delta, "phase": phase}
    pol = Policy(budget=12, sinks=2, window=4, initial=initial, trigger=trigger,
                 scorer={"kind": scorer, **CROSSED[scorer]})  # fmt: skip
    got, _ = recorded(arch, pol, 1, 0)
    assert (got - parallel_logits(model(arch), IDS, PROMPT, pol)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("scorer", CROSSED)
@pytest.mark.parametrize("trigger", ["always", "fixed_threshold", "rate_controlled", "similarity"])
@pytest.mark.parametrize("generated", ["sliding", "kept"])
def test_every_scorer_with_every_trigger(scorer, trigger, generated):
    """What rows saw explains their logits, rejected drafts leave no trace, merging equals branching."""
    parts = {"kind": trigger, **({"tau": 0.2, "rank": 4} if trigger in ("fixed_threshold", "rate_controlled") else {})}
    spec = {"budget": 12, "window": 4, "generated": generated, "trigger": parts,
            "scorer": {"kind": scorer, **CROSSED[scorer]}}  # fmt: skip
    if scorer == "bacon" and "tau" in parts:
        with pytest.raises(ValueError, match="use it as `initial`"):
            Policy.model_validate(spec)
        return
    pol, m = Policy.model_validate(spec), model("llama")
    runs = [recorded("llama", pol, 1, 0), recorded("llama", pol, 1, 2)]
    branched = Recording(m.config, pol.model_copy(update={"store": "device"}), branching=True)
    runs.append(cached_logits(m, IDS, PROMPT, pol, 1, 0, branched))
    for logits, cache in runs:
        assert (logits - runs[0][0]).abs().max() <= TOLERANCE
        assert (logits - literal_logits("llama", IDS, PROMPT, cache.seen)).abs().max() <= TOLERANCE


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


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_bf16_replay_of_a_schedule_scores_the_keys_that_training_scores(arch):
    """Under autocast some models hand out fp32 keys; the cache must hold what the parallel pass attends to."""
    pol = policy("rift_dyn", 12, trigger={"delta": 8})
    with torch.autocast("cpu", torch.bfloat16):
        got, cache = recorded(arch, pol, 1, 0)
        want = parallel_logits(model(arch), IDS, PROMPT, pol)
    layers = cache.stored_layers.values()
    assert {layer.store.keys().dtype for layer in layers} == {torch.bfloat16}
    assert {layer.selection.keys.dtype for layer in layers} == {torch.bfloat16}
    assert (got - want).abs().median() < 0.05


def test_drift_is_the_same_number_under_autocast():
    """It is compared with thresholds of a few hundredths, which bf16 would blur."""
    drifts = []
    for enabled in (False, True):
        m, pol = model("llama"), policy("fixed_threshold", 12, trigger={"tau": 0.999, "rank": 16})
        cache = OffloadedCache(m.config, pol)
        cache.forward(m, IDS[:, :PROMPT], 1)
        cache.commit()
        slot, info = cache.stored_layers[0], cache._infos[0]
        query = slot.queries[:, -1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            drifts.append((float(evicted_mass(info, query, slot)), float(captured(info, query, slot))))
    assert drifts[0] == drifts[1]


def test_replay_keeps_no_history_of_steps_that_are_final():
    pol = policy("rcr", 12)
    row = {"prompt_ids": IDS[0, :PROMPT].tolist(), "response_ids": tokens(40, seed=3)[0].tolist(), "temperature": 0.0,
           "finish_reason": "length", "row_id": "r", "response_logprobs": []}  # fmt: skip
    made = []

    class Watched(OffloadedCache):
        def _state(self):
            made.append(len(self._history))
            return super()._state()

    Replay(3, executor=Watched).row(model("llama"), row, [pol])
    assert max(made) <= 2
