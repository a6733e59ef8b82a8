"""Counting as an engine does, and the refusal to report anything where it changed the output."""

import numpy as np
import pytest
from helpers import call, write_recipe

from draftkv.acceptance.served import Counted, counted_as_engines_do, counted_as_we_do, difference


def test_hand_counted_blocks():
    """K = 2, 6 tokens: x_0 from prefill; the block at 1 takes both drafts and a bonus token (1, 2, 3), the block at 4
    takes both and ends at 6, past the end."""
    flags = [np.array([0, 1, 1, 0, 1, 1, 1, 1])]
    assert counted_as_engines_do(flags, 2, 6) == Counted(2, 4)
    assert counted_as_we_do(flags, 2, 6) == Counted(1, 2), "the second block is cut off"
    missed = [np.array([0, 0, 1, 0, 0, 0, 0, 1])]
    assert counted_as_engines_do(missed, 2, 6) == Counted(4, 1), "blocks at 1, 2, 4, 5"
    assert counted_as_engines_do(flags + missed, 2, 6) == Counted(6, 5)
    assert Counted(6, 5).al == pytest.approx(1 + 5 / 6)


@pytest.mark.parametrize("length, tokens", [(7, 128), (3, 50), (1, 9)])
def test_a_perfect_drafter_has_every_draft_accepted(length, tokens):
    flags = [np.ones(tokens + length)] * 2
    counted = counted_as_engines_do(flags, length, tokens)
    assert counted.al == length + 1 and counted.blocks == 2 * -(-(tokens - 1) // (length + 1))
    assert counted_as_we_do(flags, length, tokens).al == length + 1


def test_counts_agree_where_no_block_is_cut_off():
    rng = np.random.default_rng(0)
    for _ in range(200):
        row = (rng.random(40) < 0.7).astype(float)
        ends, start = [], 1
        while start + 5 < 40:
            misses = np.flatnonzero(row[start : start + 4] == 0)
            start += (int(misses[0]) if len(misses) else 4) + 1
            ends.append(start)
        assert counted_as_engines_do([row], 4, ends[-1]) == counted_as_we_do([row], 4, ends[-1])


def test_the_first_difference_is_named():
    assert difference([[1, 2], [3, 4]], [[1, 2, 9], [3, 4, 9]]) is None
    assert difference([[1, 2], [3, 5], [6, 0]], [[1, 2, 9], [3, 4, 9], [6, 7, 8]]) == (
        "2 of 3 texts differ from plain greedy decoding, the first (prompt 1) from token 1 on")


def test_the_command_says_what_is_missing(tmp_path, capsys):
    path = write_recipe(tmp_path)
    assert call("eval/engine.py", path, "--prompts", "0") == 2
    assert call("eval/engine.py", path) == 2
    assert "nothing is exported yet" in capsys.readouterr().err
