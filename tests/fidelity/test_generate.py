"""The generation loop on text models: against the stock one, side by side against alone, and under block triggers."""

import pytest
import torch

from draftkv.cache.attention import ATTENTION
from draftkv.cache.oracle import oracle_notes
from draftkv.cache.policy import Policy
from draftkv.errors import InputError
from draftkv.fidelity.generate import generate
from draftkv.fidelity.policies import check_policies
from draftkv.rehearsal import tiny_model

PROMPT = torch.randint(3, 512, (60,), generator=torch.Generator().manual_seed(1)).tolist()
NEW = 24
LAYOUT = {"budget": 16, "window": 8, "generated": "kept"}
POLICIES = {
    "full": {}, "swa": {"budget": 16}, "bacon": LAYOUT, "snapkv": {"budget": 16, "window": 8}, "rcr": LAYOUT,
    "fixed_threshold": LAYOUT, "exact": LAYOUT, "infinigen": LAYOUT, "oracle": LAYOUT, "random": LAYOUT,
    "quest": {**LAYOUT, "dense_layers": 1, "scorer": {"kind": "quest", "block": 4}},
    "rift_dyn": {"budget": 16, "trigger": {"kind": "every", "delta": 5}},
    "rift_ada": {"budget": 16, "trigger": {"kind": "adaptive", "check": 2, "a_min": 2, "entropy_above": 0.1}},
    "refreshkv": {"budget": 16, "trigger": {"kind": "similarity", "stride": 3}},
}  # fmt: skip


def policy(name: str) -> Policy:
    return Policy(policy=name, **POLICIES[name])


def ready(name: str):
    """With a head of its own: a tied one at this scale copies its input for ever, and then no cache matters."""
    found = tiny_model(name, tie_word_embeddings=False)
    found.set_attn_implementation(ATTENTION)
    return found


@pytest.fixture(scope="module")
def llama():
    return ready("llama")


def test_full_is_the_stock_generation():
    stock = tiny_model("llama", tie_word_embeddings=False)
    ids = torch.tensor([PROMPT])
    out = stock.generate(ids, max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()
    stock.set_attn_implementation(ATTENTION)
    assert len(set(out)) > 5 and generate(stock, PROMPT, [policy("full")], NEW, {2})[0].ids == out


@pytest.mark.parametrize(("name", "listed"), [
    ("llama", list(POLICIES)), ("gemma3", ["full", "bacon", "rcr", "rift_dyn", "swa"]),
    ("qwen3_5", ["full", "bacon", "rcr", "rift_dyn"]),  # recurrent: decodes one after the other
])  # fmt: skip
def test_side_by_side_is_alone(name, listed):
    model = ready(name)
    full = generate(model, PROMPT, [policy("full")], NEW)[0].ids
    notes = oracle_notes(model, PROMPT, full)
    policies = [policy(each) for each in listed]
    alone = [generate(model, PROMPT, [p], NEW, notes=notes, measured=policy("bacon"))[0] for p in policies]
    together = generate(model, PROMPT, policies, NEW, notes=notes, measured=policy("bacon"))
    for a, b, p in zip(alone, together, policies, strict=True):
        assert a.ids == b.ids and a.refreshed == b.refreshed, p.label
        for figure in ("reads", "drift", "evicted"):
            found, expected = getattr(a, figure), getattr(b, figure)
            assert found == (expected and pytest.approx(expected, rel=1e-4)), (p.label, figure)
    assert sum(made.ids == full for made in alone) < len(alone) / 2, "small budgets change the output"
    assert [made.evicted is not None for made in together] == [p == policy("bacon") for p in policies]


def test_stops_end_a_row_and_the_others_go_on(llama):
    policies = [policy("full"), policy("bacon"), policy("rcr")]
    free = generate(llama, PROMPT, policies, NEW)
    stop = free[1].ids[3]
    for made, whole in zip(generate(llama, PROMPT, policies, NEW, {stop}), free, strict=True):
        end = whole.ids.index(stop) + 1 if stop in whole.ids else NEW
        assert made.ids == whole.ids[:end] and made.finished == (stop in whole.ids)
        assert made.steps == len(made.refreshed) == end - 1


def test_what_refreshed_and_when(llama):
    dyn, exact, bacon = generate(llama, PROMPT, [policy("rift_dyn"), policy("exact"), policy("bacon")], NEW,
                                 measured=policy("bacon"))  # fmt: skip
    layers = llama.config.num_hidden_layers
    # Step i feeds token i, when i tokens are known.
    assert [i for i, count in enumerate(dyn.refreshed, 1) if count] == [5, 10, 15, 20] and dyn.layers == layers
    assert exact.refreshed == [layers] * (NEW - 1) and exact.reads == len(PROMPT) - 8 + 8
    assert bacon.refreshed == [0] * (NEW - 1) and 0 < bacon.evicted < 1 and bacon.drift is None
    roomy = Policy(policy="bacon", budget=2000)
    assert generate(llama, PROMPT, [roomy], NEW, measured=roomy)[0].evicted == pytest.approx(0, abs=1e-6)


def test_an_acceptance_length_that_does_not_exist_is_refused():
    trigger = {"kind": "adaptive", "al_below": 2.0, "drift_above": None}
    with pytest.raises(InputError, match="al_below.*no acceptance length"):
        check_policies([policy("full"), Policy(policy="rift_ada", budget=16, trigger=trigger)])
    check_policies([Policy(policy="rift_ada", budget=16, trigger={**trigger, "entropy_above": 1.0})])


def test_a_block_of_one_token_is_no_acceptance_length(llama):
    """al_below fires on none of these tokens; a_max alone decides."""
    trigger = {"kind": "adaptive", "al_below": 9.0, "drift_above": None, "entropy_above": 99.0, "check": 1, "a_min": 1,
               "a_max": 10}  # fmt: skip
    made = generate(llama, PROMPT, [Policy(policy="rift_ada", budget=16, trigger=trigger)], NEW)[0]
    assert [i for i, count in enumerate(made.refreshed, 1) if count] == [10, 20]
