"""Acceptance length and captured mass along the generation: what is summed, what is said, and the whole command."""

import json
import runpy

import numpy as np
import pytest
from helpers import ROOT, call, write_recipe

from draftkv.acceptance import plots, staleness
from draftkv.acceptance.replay import Acceptance
from draftkv.acceptance.staleness import Axis, Course, measure, verdict
from draftkv.cache.policy import Policy
from draftkv.errors import InputError, RunError

K, TOKENS = 3, 130
FULL, SNAPKV, SWA = (Policy.model_validate(p) for p in (
    "full", {"policy": "snapkv", "budget": 40}, {"policy": "swa", "budget": 40}))  # fmt: skip


def row(rng, start: float, end: float, mass: tuple[float, float] | None, tokens: int = TOKENS) -> Acceptance:
    """A rollout whose acceptance (0 or 1) and captured share move in a straight line from start to end."""
    flags = (rng.random(tokens) < np.linspace(start, end, tokens)).astype(float)
    shares = None if mass is None else dict(enumerate(np.linspace(*mass, tokens) + rng.normal(0, 0.01, tokens)))
    return Acceptance("r", flags, 0, False, None, {} if mass is None else shares)


def rows(prompts: int, *courses) -> list[list[Acceptance]]:
    rng = np.random.default_rng(0)
    return [[row(rng, *course) for course in courses] for _ in range(prompts)]


def test_a_decay_a_rise_and_a_flat_course_are_told_apart():
    axis = Axis.of(TOKENS, K, 5)
    found = rows(16, (1, 1, None), (0.95, 0.4, (0.7, 0.3)), (0.5, 0.9, (0.4, 0.7)))
    full, once, window = measure(found, [FULL, SNAPKV, SWA], axis, K)
    assert [verdict(full, key) for key in staleness.CHANGES] == ["no clear change", None, None]
    assert {verdict(once, key) for key in staleness.CHANGES} == {"decays"}
    assert {verdict(window, key) for key in staleness.CHANGES} == {"rises"}
    assert "1 of 1 in AL" in staleness.finding([full, once, window])
    assert f"{once['policy']}: AL decays (-" in staleness.sentence(once)
    # The middles of the first and the last bin: the change of the captured share is known.
    assert once["captured_change"]["value"] == pytest.approx(0.3 / 0.7 - 1, abs=0.12)

    found = rows(16, (1, 1, None), (0.7, 0.7, (0.5, 0.5)), (0.7, 0.7, (0.5, 0.5)))
    records = measure(found, [FULL, SNAPKV, SWA], axis, K)
    assert {verdict(r, key) for r in records[1:] for key in staleness.CHANGES} == {"no clear change"}
    said = staleness.finding(records)
    assert "one-shot selections that decay: 0 of 1 in AL" in said and "windows that rise: 0 of 1 in AL" in said
    assert "AL: no clear change" in staleness.sentence(records[1])


def test_flat_courses_are_seldom_called_anything_else():
    """95 % intervals over few prompts are somewhat too narrow; neither side is favoured."""
    rng, axis = np.random.default_rng(0), Axis.of(TOKENS, K, 5)
    said = [
        verdict(measure([[row(rng, 0.8, 0.8, None)] for _ in range(16)], [FULL], axis, K, 200)[0], "al_change")
        for _ in range(60)
    ]
    assert said.count("no clear change") >= 48 and abs(said.count("rises") - said.count("decays")) <= 6


def test_retention_takes_out_what_the_text_does_to_the_full_cache():
    easy_then_hard = rows(20, (0.95, 0.5, None))
    found = [[one, Acceptance("r", one.flags, 0, False, None, dict.fromkeys(range(TOKENS), 0.5))]
             for (one,) in easy_then_hard]  # fmt: skip
    _, same = measure(found, [FULL, SNAPKV], Axis.of(TOKENS, K, 4), K)
    assert verdict(same, "al_change") == "decays"
    assert same["retention_change"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert verdict(same, "retention_change") == "no clear change"


def test_bins_hold_the_blocks_that_start_in_them():
    axis = Axis.of(41, K, 4)  # 37 positions with room for a whole block, 1 .. 37
    assert axis.edges[0] == 1 and axis.edges[-1] == 41 - K and set(np.diff(axis.edges)) <= {9, 10}
    one = row(np.random.default_rng(1), 0.7, 0.7, (0.2, 0.8), 60)  # a longer row: what lies past the axis is left out
    course, walk = Course.of([one], axis, K), one.walk(K)
    for i, (low, high) in enumerate(zip(axis.edges, axis.edges[1:], strict=False)):
        assert course.blocks[0, i] == pytest.approx(walk.starts[low:high].sum())
        assert course.tokens[0, i] == pytest.approx(walk.emitted[low:high].sum())
        assert course.captured[0, i] == pytest.approx(np.mean([one.captured[at] for at in range(low, high)]))
    perfect = Acceptance("r", np.ones(41), 0, False, None, {})
    course = Course.of([perfect], axis, K)
    assert (
        (course.tokens == (K + 1) * course.blocks).all() and (course.blocks > 0).all() and (course.captured == 1).all()
    )


def test_composition_is_the_same_in_every_bin():
    """Short rows enter no bin at all, and the line says how many there are."""
    command = runpy.run_path(str(ROOT / "eval" / "staleness.py"))
    axis = Axis.of(40, K)
    held = [{"response_ids": [0] * size} for size in (40, 39, 80, 12, 41)]
    used, about = command["long_enough"](held, axis, None)
    assert [len(r["response_ids"]) for r in used] == [40, 80, 41] and "2 of 5 held-out rows are too short" in about
    used, about = command["long_enough"](held, axis, 2)
    assert len(used) == 2 and "1 more were not asked for" in about
    with pytest.raises(InputError, match="the longest has 12"):
        command["long_enough"](held[3:4], axis, None)
    with pytest.raises(InputError, match="the last bin needs 40"):
        Course.of([row(np.random.default_rng(0), 1, 1, None, 39)], axis, K)
    with pytest.raises(RunError, match="without measuring"):
        Course.of([Acceptance("r", np.ones(60), 0, False)], axis, K)


def test_bins_are_no_narrower_than_a_block():
    assert len(Axis.of(TOKENS, K).edges) == staleness.BINS + 1
    assert len(Axis.of(17, K).edges) == 3 + 1, "three whole blocks fit"
    for length, bins in ((17, 4), (17, 1), (8, None)):
        with pytest.raises(InputError, match="cannot be compared"):
            Axis.of(length, K, bins)


def test_a_few_prompts_say_nothing():
    _, once = measure(rows(4, (0.8, 0.8, None), (0.95, 0.3, (0.7, 0.3))), [FULL, SNAPKV], Axis.of(TOKENS, K, 3), K)
    assert verdict(once, "al_change") == "too few prompts"
    _, once = measure(rows(1, (0.8, 0.8, None), (0.95, 0.3, (0.7, 0.3))), [FULL, SNAPKV], Axis.of(TOKENS, K, 3), K)
    assert once["al_change"]["low"] == once["al_change"]["value"] == once["al_change"]["high"]


POLICIES = ("eval.policies=[full, {policy: swa, budget: 8}, {policy: snapkv, budget: 8, window: 4}, {policy: rift_dyn, "
            "budget: 8, trigger: {kind: every, delta: 4}}]")  # fmt: skip


def test_rehearsal(tmp_path, monkeypatch, capsys):
    """Target and drafter are the same tiny model, so the full cache's AL is K + 1 in every bin."""
    monkeypatch.setitem(plots.STYLE, "savefig.dpi", 40)
    recipe = write_recipe(tmp_path)
    overrides = (POLICIES, f"eval.draft_length={K}", "rollouts.max_new_tokens=24", "eval.bootstrap=100",
                 "prompts.eval.limit=6")  # fmt: skip
    assert call("data/rollouts.py", recipe, *overrides) == 0
    capsys.readouterr()
    arguments = ("eval/staleness.py", recipe, *overrides, "--drafter", "rehearsal:llama", "--bins", "4")
    assert call(*arguments, "--plan") == 0 and "in 4 bins of positions 1 to 21" in capsys.readouterr().out
    assert not (tmp_path / "runs" / "run" / "staleness.jsonl").exists()
    assert call(*arguments, "--length", "24") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "rows are too short and are left out" in out and "RIFT's finding" in out
    records = [json.loads(line) for line in (tmp_path / "runs/run/staleness.jsonl").read_text().splitlines()]
    assert [r["spec"]["policy"] for r in records] == ["full", "swa", "snapkv", "rift_dyn"]
    assert all(b["al"] == K + 1 and b["captured"] == 1 for b in records[0]["bins"])
    for record in records[1:]:
        assert all(0 < b["captured_low"] <= b["captured"] <= b["captured_high"] < 1 for b in record["bins"])
        assert all(1 <= b["al"] <= K + 1 for b in record["bins"]) and len(record["bins"]) == 4
    page = (tmp_path / "runs/run/report/staleness.md").read_text()
    assert all(r["policy"] in page for r in records) and "(staleness.png)" in page and "None" not in page
    assert (tmp_path / "runs/run/report/staleness.png").read_bytes().startswith(b"\x89PNG")


def test_bad_flags_are_one_line(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    for flags, said in ((("--temperature", "1"), "--temperature 1"), (("--rows", "0"), "--rows 0: at least 1"),
                        (("--bins", "99"), "99 bins cannot be compared")):  # fmt: skip
        assert call("eval/staleness.py", recipe, *flags) == 2
        assert said in capsys.readouterr().err
