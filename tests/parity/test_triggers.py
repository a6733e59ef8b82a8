"""When entries come back: the clock, the signals, the drift detector and RCR's threshold, each against its sentence."""

import math

import pytest
import torch
from matrix import ARCHITECTURES, PROMPT, RESPONSE, Recording, cached_logits, model, policy, tokens

from draftkv.cache.offloaded import OffloadedCache
from draftkv.cache.policy import Policy
from draftkv.cache.triggers import Adaptive, Clock, Every, Never, Signals, Similarity

IDS = tokens(PROMPT + RESPONSE)


def refreshes(trigger, starts):
    clock, found = Clock(trigger), []
    for verified in starts:
        if clock.at_check(verified) and clock.check(verified):
            found.append(verified)
    return found


def test_every_refreshes_at_the_first_block_start_at_or_after_it_is_due():
    assert refreshes(Every(delta=8), range(1, 30)) == [8, 16, 24]
    assert refreshes(Every(delta=8), [1, 6, 11, 15, 19, 23, 27]) == [11, 19, 27]
    assert refreshes(Every(delta=8, phase=3), range(1, 30)) == [3, 11, 19, 27]
    assert refreshes(Every(delta=8), [1, 30, 31, 33]) == [30, 33], "intervals that passed unasked are not made up for"
    assert refreshes(Every(delta=1), range(1, 6)) == [1, 2, 3, 4, 5]
    assert refreshes(Never(), range(1, 30)) == []


def test_adaptive_checks_ages_and_signals():
    """Every 8: at age a_max always; at age a_min when a signal passed its threshold; else not."""
    quiet = Adaptive(check=8, a_min=16, a_max=40, drift_above=None)
    assert refreshes(quiet, range(1, 100)) == [40, 80]
    for signals in (Signals(al=1.5), Signals(entropy=3.0), Signals(drift=0.7)):
        loud = Adaptive(check=8, a_min=16, a_max=40, al_below=2.0, entropy_above=2.5, drift_above=0.6)
        clock, found = Clock(loud), []
        clock.signals = signals
        for verified in range(1, 60):
            if clock.at_check(verified) and clock.check(verified):
                found.append(verified)
        assert found == [16, 32, 48], signals
    assert not loud.fires(20, Signals(al=2.0, entropy=2.5, drift=0.6)), "at the threshold nothing has passed it"
    assert not loud.fires(15, Signals(al=1.0)) and loud.fires(40, Signals())


def test_signals_are_exponentially_weighted_means_over_blocks():
    clock = Clock(Adaptive(decay=0.5))
    for emitted, entropy in ((4, 1.0), (2, 3.0), (8, 0.0)):
        clock.observe(emitted, entropy)
    assert clock.signals.al == 0.5 * (0.5 * 4 + 0.5 * 2) + 0.5 * 8
    assert clock.signals.entropy == 0.5 * (0.5 * 1.0 + 0.5 * 3.0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["rcr", "fixed_threshold", "rift_drift"])
def test_drift_of_a_detector_with_all_vectors_is_the_mass_on_evicted_entries(arch, name):
    """Against loops over heads and entries; a detector of few vectors is only near it."""
    m, seen = model(arch), {}

    class Checked(Recording):
        def _step(self, slot, layer, query):
            before, tau = slot.selection, self.tau
            drift = self.cost.drift
            super()._step(slot, layer, query)
            seen.setdefault("drift", []).append(float(self.cost.drift - drift))
            seen.setdefault("literal", []).append(literal_mass(slot, layer, query, before))
            seen.setdefault("tau", []).append((float(tau), float(self.tau)))

    for rank, tolerance in ((16, 1e-5), (2, None)):
        seen.clear()
        pol = policy(name, 12, trigger={"rank": rank})
        cached_logits(m, IDS, PROMPT, pol, 1, 0, Checked(m.config, pol))
        apart = max(abs(a - b) for a, b in zip(seen["drift"], seen["literal"], strict=True))
        assert apart <= tolerance if tolerance else apart > 1e-3
        assert max(seen["literal"]) > 0.05
        if pol.trigger.kind == "rate_controlled":
            for drift, (old, new) in zip(seen["drift"], seen["tau"], strict=True):
                fired = drift > old
                assert new == pytest.approx(old * math.exp(pol.trigger.gain * (fired - pol.trigger.rate)), rel=1e-5)


def literal_mass(slot, layer, query, selection) -> float:
    """Attention mass of one row on what it would not see under the selection it had, mean over query heads."""
    keys, size, heads = slot.store.keys(), len(slot.store), query.shape[0]
    total = 0.0
    for head in range(heads):
        group = head // (heads // keys.shape[0])
        logits = [float(query[head, 0] @ keys[group, j]) * layer.scaling for j in range(size)]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        norm = sum(weights)
        if layer.sink_logits is not None:
            norm += math.exp(float(layer.sink_logits[head]) - top)
        window = selection.split.sliding
        low = selection.split.tail_start if window is None else max(selection.split.tail_start, size - 1 - window)
        kept = {int(j) for j in selection.positions[group]} | set(range(low, size))
        total += sum(w for j, w in enumerate(weights) if j not in kept) / norm
    return total / heads


def realised(arch, steps, **trigger):
    """Refresh rate of a run that feeds what the model itself prefers."""
    m = model(arch)
    pol = policy("rcr", 12, trigger={"rank": 8, "tau": 0.03, "gain": 0.05, "rate": 0.4, **trigger})
    cache = OffloadedCache(m.config, pol)
    rates, token = [], cache.forward(m, tokens(PROMPT), 1).argmax()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        cache.commit()
        logits = cache.forward(m, token.view(1, 1))[0]
        token = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator)
        rates.append(cache.cost.rate)
    return rates


def test_the_refresh_rate_settles_at_the_target_and_overshoots_on_short_outputs():
    """tau starts far below the drift of a tiny random model, so at first everything fires."""
    for rate in (0.4, 0.2):
        rates = realised("llama", 400, rate=rate)
        assert rates[-1] == pytest.approx(rate, abs=0.08)
        assert rates[11] > rate + 0.2, "12 tokens are too few for the threshold to settle"
        assert abs(rates[-1] - rate) < abs(rates[99] - rate) < abs(rates[11] - rate)


def test_similarity_refreshes_only_layers_whose_query_moved():
    """RefreshKV: with threshold 1 every layer selects again at each stride, with -1 none does."""
    m = model("llama")
    counts = []
    for threshold in (-1.0, 0.5, 1.0):
        pol = policy("refreshkv", 12, trigger={"stride": 4, "threshold": threshold})
        cache = OffloadedCache(m.config, pol)
        cached_logits(m, IDS, PROMPT, pol, 1, 0, cache)
        counts.append(cache.cost.refreshes)
    layers = m.config.num_hidden_layers
    assert counts[0] == 0 < counts[1] < counts[2] == layers * (RESPONSE // 4)
    assert Similarity().next_check(0) == 10


@pytest.mark.parametrize("parts, message", [
    ({"policy": "swa", "budget": 8, "trigger": "always"}, "scorer 'none' selects nothing"),
    ({"policy": "oracle", "budget": 64, "trigger": "always"}, "selects once"),
    ({"policy": "rift_ada", "budget": 8, "trigger": {"a_min": 9, "a_max": 3}}, "larger than a_max"),
    ({"policy": "rcr", "budget": 64, "scorer": {"block": 4}}, "block"),
    ({"policy": "full", "trigger": "always"}, "has nothing to select"),
    ({"policy": "rift_dyn", "budget": 8, "trigger": {"delta": 0}}, "greater than or equal to 1"),
])  # fmt: skip
def test_policies_that_cannot_work_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Policy.model_validate(parts)


def test_costs_follow_the_number_of_refreshes():
    """A period twice as long reads half as much; a host store moves exactly the vectors that are counted."""
    m, reads = model("llama"), []
    for delta in (4, 8):
        pol = policy("rift_dyn", 12, trigger={"delta": delta})
        cache = OffloadedCache(m.config, pol)
        cached_logits(m, IDS, PROMPT, pol, 1, 0, cache)
        layers, heads, size = len(cache.stored_layers), m.config.num_key_value_heads, m.config.head_dim
        assert cache.cost.refreshes == layers * (RESPONSE // delta)
        assert cache.cost.rate == pytest.approx(1 / delta)
        assert cache.moved_bytes["to_device"] == cache.cost.reads * heads * size * 4
        assert cache.moved_bytes["to_host"] == layers * heads * size * 4 * 2 * RESPONSE
        device = OffloadedCache(m.config, pol.model_copy(update={"store": "device"}))
        cached_logits(m, IDS, PROMPT, pol, 1, 0, device)
        assert device.moved_bytes == {"to_host": 0, "to_device": 0}
        reads.append(cache.cost.reads)
    assert 1.7 < reads[0] / reads[1] < 2.3
