"""Live decoding at temperature 1: the target's distribution comes out, and replay predicts the acceptance length."""

import numpy as np
import pytest
import torch
from matrix import policy as scaled

from draftkv.acceptance import intervals
from draftkv.acceptance.live import AcceptanceRule, speculate
from draftkv.acceptance.replay import Replay
from draftkv.cache.attention import ATTENTION
from draftkv.cache.policy import Policy
from draftkv.rehearsal import tiny_model

P = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05])
Q = torch.tensor([0.10, 0.45, 0.05, 0.15, 0.25])


@pytest.mark.parametrize("draft", ["sampled", "greedy"])
def test_output_frequencies_and_acceptance_rate(draft):
    """Five tokens, fixed p and q, 20,000 draws: output follows p; acceptance is sum min(p, q), or p(argmax q).

    Exact-match acceptance, a fault seen elsewhere, would accept sampled drafts at sum p*q = 0.21 instead of 0.5."""
    rule = AcceptanceRule(1.0, draft, torch.Generator().manual_seed(0))
    count, accepted, out = 20_000, 0, np.zeros(5)
    target = P.log().expand(2, -1)
    for _ in range(count):
        drafted = rule.pick_draft(Q.log())
        taken, extra = rule.verify(target, [drafted], [Q.log()])
        accepted += taken
        out[drafted if taken else extra] += 1
    want = float(torch.minimum(P, Q).sum()) if draft == "sampled" else float(P[Q.argmax()])
    sigma = (want * (1 - want) / count) ** 0.5
    assert abs(accepted / count - want) < 4 * sigma
    for got, p in zip(out / count, P.tolist(), strict=True):
        assert abs(got - p) < 4 * (p * (1 - p) / count) ** 0.5


def test_identical_distributions_are_always_accepted():
    rule = AcceptanceRule(1.0, "sampled", torch.Generator().manual_seed(0))
    for _ in range(200):
        drafted = [rule.pick_draft(P.log()) for _ in range(3)]
        assert rule.verify(P.log().expand(4, -1), drafted, [P.log()] * 3)[0] == 3


@pytest.mark.parametrize("arch, name", [("llama", "streaming"), ("qwen3_5", "streaming"), ("llama", "rift_dyn"),
                                        ("llama", "rift_ada"), ("llama", "rcr")])  # fmt: skip
@pytest.mark.parametrize("draft", ["sampled", "greedy"])
def test_replay_expects_what_live_decoding_gets(arch, name, draft):
    """The mean AL that replay expects on the emitted texts lies in the 95 % interval of the live AL.

    The interval is that of the difference, paired by prompt, since both saw the same texts."""
    target, drafter = tiny_model(arch, 0, vocab_size=24), tiny_model(arch, 0, vocab_size=24)
    with torch.no_grad():
        for p in drafter.parameters():
            p *= 0.7
    for m in (target, drafter):
        m.set_attn_implementation(ATTENTION)
    policy = scaled(name, 8 if name == "rcr" else 12)
    generator = torch.Generator().manual_seed(5)
    live, expected = [], []
    for i in range(50):
        prompt = torch.randint(24, (16,), generator=generator).tolist()
        run = speculate(target, drafter, prompt, policy, 3, 20, frozenset(), 1.0, draft, generator)
        row = run.as_row(prompt, f"r{i}") | {"temperature": 1.0, "response_logprobs": logprobs(target, prompt, run)}
        live.append((run.blocks, sum(run.accepted) + run.blocks))
        walk = Replay(3, draft).row(drafter, row, [policy])[0].walk(3)
        expected.append((walk.blocks, walk.tokens))
    sides = [intervals.Counts(*map(list, zip(*side, strict=True))) for side in (live, expected)]
    apart = intervals.difference(*sides)
    assert apart.low <= 0 <= apart.high
    assert 1.03 < intervals.al(sides[0]).value < 3.95, "some drafts are accepted and some are not"


@torch.no_grad()
def logprobs(target, prompt, run):
    from draftkv.cache.parallel import single

    ids = torch.tensor([prompt + run.response_ids])
    view = single(ids.shape[1], ids.shape[1], Policy(policy="full"))
    positions = torch.arange(ids.shape[1])[None]
    out = target(ids, position_ids=positions, cache_view=view, use_cache=False).logits[0].float().log_softmax(-1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return out[at, ids[0, len(prompt) :]].tolist()
