"""The walk against enumeration, simulation and cases worked by hand."""

import itertools
import time

import numpy as np
import pytest
import torch

from draftkv.acceptance.intervals import Counts, al
from draftkv.acceptance.walk import block_tokens, greedy_blocks, sampled_blocks, walk
from draftkv.errors import InputError, RunError


def enumerate_draws(accept, draft_length, finished):
    """Expected counts by listing every outcome of every token, with a plain loop that shares no code with `walk`."""
    rows = len(accept)
    blocks = tokens = 0.0
    accepted, offered = np.zeros(draft_length), np.zeros(draft_length)
    starts, emitted = np.zeros(rows), np.zeros(rows)
    for outcome in itertools.product([0, 1], repeat=rows - 1):
        hit = (None, *outcome)
        weight = np.prod([accept[t] if hit[t] else 1 - accept[t] for t in range(1, rows)])
        start = 1
        while start < rows:
            taken = 0
            while taken < draft_length and start + taken < rows and hit[start + taken]:
                taken += 1
            whole = start + taken < rows
            if not whole and not finished:
                break
            count = taken + 1 if whole else taken
            blocks += weight
            tokens += weight * count
            starts[start] += weight
            emitted[start] += weight * count
            for i in range(draft_length):
                if i <= taken and start + i < rows:
                    offered[i] += weight
                    accepted[i] += weight * (i < taken)
            start += taken + 1
    return blocks, tokens, accepted, offered, starts, emitted


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("draft_length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 9])
def test_equals_enumeration(rows, draft_length, finished):
    accept = np.random.default_rng(rows * 10 + draft_length).random(rows)
    if rows > 4:
        accept[3], accept[4] = 1.0, 0.0
    got = walk(accept, draft_length, finished)
    want = enumerate_draws(accept, draft_length, finished)
    fields = (got.blocks, got.tokens, got.accepted_at, got.offered_at, got.starts, got.emitted)
    for mine, theirs in zip(fields, want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


@pytest.mark.parametrize("finished", [True, False])
def test_within_monte_carlo(finished):
    rng = np.random.default_rng(3)
    accept = rng.beta(2, 1, size=60)
    draws = [sampled_blocks(accept, 5, finished, rng) for _ in range(4000)]
    blocks = np.array([len(d) for d in draws])
    tokens = np.array([block_tokens(d, 60, finished) for d in draws])
    got = walk(accept, 5, finished)
    assert abs(blocks.mean() - got.blocks) < 4 * blocks.std() / 4000**0.5 + 1e-12
    assert abs(tokens.mean() - got.tokens) < 4 * tokens.std() / 4000**0.5 + 1e-12


@pytest.mark.parametrize("draft_length", [1, 3, 7, 11])
def test_flags_give_the_deterministic_walk(draft_length):
    flags = np.random.default_rng(0).random(200) < 0.7
    for finished in (True, False):
        blocks = greedy_blocks(flags, draft_length, finished)
        got = walk(torch.tensor(flags), draft_length, finished)
        assert got.blocks == len(blocks)
        assert got.tokens == block_tokens(blocks, 200, finished)
        assert got.accepted_at.sum() == sum(blocks)
        assert set(np.unique(got.starts)) <= {0.0, 1.0}
    assert walk(flags, draft_length, True).tokens == 199


@pytest.mark.parametrize("draft_length", [1, 2, 7, 11])
def test_always_right_and_always_wrong(draft_length):
    rows = 1 + 5 * (draft_length + 1)
    right, wrong = walk(np.ones(rows), draft_length, False), walk(np.zeros(rows), draft_length, False)
    assert right.al == draft_length + 1 and right.blocks == 5
    assert wrong.al == 1.0 and wrong.blocks == rows - 1
    assert walk(np.ones(rows + 1), draft_length, False).al == draft_length + 1  # the last, cut-off round aside


def test_al_grows_with_the_draft_length():
    accept = np.full(400, 0.8)
    values = [walk(accept, k, True).al for k in range(1, 12)]
    assert values == sorted(values)
    for k, value in enumerate(values, start=1):
        assert value == pytest.approx((1 - 0.8 ** (k + 1)) / 0.2, rel=0.02)  # independent flags: the geometric sum


def test_eos_inside_a_block_counts_up_to_eos():
    flags = [False, True, True, True]  # x_1 .. x_3 are drafted, x_3 is EOS, K = 7 drafts four tokens more
    ended, stopped = walk(flags, 7, True), walk(flags, 7, False)
    assert (ended.blocks, ended.tokens) == (1, 3) and greedy_blocks(flags, 7, True) == [3]
    assert (stopped.blocks, stopped.tokens) == (0, 0) and greedy_blocks(flags, 7, False) == []
    assert stopped.al is None and not stopped.usable
    assert ended.offered_at.tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_eos_as_correction_and_as_bonus():
    assert greedy_blocks([0, 1, 0], 7, True) == greedy_blocks([0, 1, 0], 7, False) == [1]
    assert greedy_blocks([0, 1, 1, 1], 2, True) == [2]
    assert walk([0, 1, 1, 1], 2, True).tokens == 3


def test_cut_off_block_is_left_out():
    flags = [0, 1, 0, 1, 1]  # one block of two tokens, then two accepted drafts and no more text
    got = walk(flags, 4, False)
    assert (got.blocks, got.tokens) == (1, 2)
    assert (walk(flags, 4, True).blocks, walk(flags, 4, True).tokens) == (2, 4)


@pytest.mark.parametrize("rows", [0, 1])
def test_rows_too_short_for_a_block(rows):
    for finished in (True, False):
        got = walk(np.zeros(rows), 3, finished)
        assert got.blocks == got.tokens == 0 and len(got.starts) == rows and greedy_blocks([], 3, finished) == []


def test_recorded_pairs_micro_macro_bonus():
    """(K, accepted) pairs of two requests: 3 blocks that accept 4, 0, 2 and one block that accepts 1."""
    recorded = {"a": [(4, 4), (4, 0), (4, 2)], "b": [(4, 1)]}
    walks = []
    for pairs in recorded.values():
        flags = [False]
        for length, taken in pairs:
            flags += [True] * taken + ([False] if taken < length else [True])  # the bonus token's own flag is not read
        walks.append(walk(flags, 4, False))
        assert greedy_blocks(flags, 4, False) == [taken for _, taken in pairs]
    counts = Counts([w.blocks for w in walks], [w.tokens for w in walks])
    assert al(counts).value == pytest.approx((9 + 2) / 4)
    assert counts.macro == pytest.approx((9 / 3 + 2) / 2)
    assert sum(w.accepted_at.sum() for w in walks) / 4 == pytest.approx(7 / 4)  # without the bonus: exactly one less
    np.testing.assert_allclose(walks[0].accepted_at / walks[0].offered_at, [2 / 3, 1, 1 / 2, 1])


def test_two_prompts_the_mean_is_not_the_last():
    walks = [walk(np.ones(41), 3, False), walk(np.zeros(41), 3, False)]
    counts = Counts([w.blocks for w in walks], [w.tokens for w in walks])
    assert al(counts).value == pytest.approx(80 / 50) and counts.macro == pytest.approx(2.5)


def test_bad_input():
    with pytest.raises(InputError):
        walk([0.0, 1.0], 0, True)
    for bad in (float("nan"), -0.1, 1.5):
        with pytest.raises(RunError, match="position 2"):
            walk([0.0, 1.0, bad], 3, True)
    walk([float("nan"), 1.0], 3, True)  # x_0 is never drafted: its entry is not read


def test_long_rows_are_cheap():
    accept = np.random.default_rng(0).random(4096)
    start = time.perf_counter()
    walk(accept, 11, True)
    assert time.perf_counter() - start < 1.0  # about 15 ms on an idle core
