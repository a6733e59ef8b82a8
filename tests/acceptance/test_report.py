"""Records, the report of a run and of a sweep, on simulated runs."""

import json
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from synthetic import POLICIES, write_run

from draftkv.acceptance import plots, report, wording
from draftkv.acceptance.intervals import Interval
from draftkv.acceptance.results import read_run
from draftkv.acceptance.score import append_jsonl, read_acceptance, read_jsonl, score
from draftkv.acceptance.walk import walk
from draftkv.cache.policy import Policy
from draftkv.errors import InputError

ROOT = Path(__file__).parents[2]
LABELS = [Policy.model_validate(p).label for p in POLICIES]


class Checker(HTMLParser):
    """Every tag closed in order, and the text outside of pictures."""

    VOID = {"meta", "img", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.text, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check_page(path: Path) -> str:
    page = path.read_text()
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert all(link.startswith("data:image/png;base64,") for link in checker.links)
    bare = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", page)
    twin = path.with_suffix(".md").read_text()
    for text in (bare, twin):
        assert "http" not in text and not re.search(r"\bnan\b", text, re.IGNORECASE) and "None" not in text
    for picture in re.findall(r"\]\((plots/[^)]+)\)", twin):
        assert (path.parent / picture).read_bytes().startswith(b"\x89PNG")
    return " ".join(" ".join(checker.text).split())


@pytest.fixture(autouse=True)
def coarse_pictures(monkeypatch):
    monkeypatch.setitem(plots.STYLE, "savefig.dpi", 40)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "synthetic")


def test_report_of_a_trained_run(trained):
    page = report.write_report(trained)
    assert page == trained / "report" / "report.html"
    text = check_page(page)
    for label in LABELS:
        assert label in text and label in page.with_suffix(".md").read_text()
    assert "two> paragraphs & a purpose" in text and "no clear change" in text and "higher" in text
    assert "torch" in text and "How to read this" in text
    record = read_run(trained).get(read_run(trained).settings[0], LABELS[4], 30)
    assert f"{record['al']:.2f} [{record['al_low']:.2f}, {record['al_high']:.2f}]" in text


def test_report_of_a_run_that_only_evaluated_step_0(tmp_path):
    run = write_run(tmp_path / "bare", steps=(0,), prompts=3, temperatures=(0.0,), bare=True)
    text = check_page(report.write_report(run))
    assert "Only step 0 was evaluated" in text and "no recipe" in text


def test_one_prompt_and_rows_without_blocks(tmp_path):
    run = write_run(tmp_path / "one", steps=(0, 5), prompts=1, tokens=30, temperatures=(0.0,))
    assert "one prompt: cannot be said" in check_page(report.write_report(run))
    walks = [walk(np.ones(4), 7, False)] * 2
    record = score(walks, ["a", "b"], walks)
    assert record["al"] is None and record["unusable"] == 2 and record["prompts"] == 0 and record["retention"] is None
    append_jsonl(tmp_path / "none" / "acceptance.jsonl", {"step": 0, "policy": "full", "draft_length": 7, **record})
    check_page(report.write_report(tmp_path / "none"))


def test_verdicts():
    assert wording.verdict(Interval(0.1, -0.1, 0.3, 9, 0)) == "no clear change"
    assert wording.verdict(Interval(0.2, 0.1, 0.3, 9, 0)) == "higher"
    assert wording.verdict(Interval(-0.2, -0.3, -0.1, 9, 0)) == "lower"
    assert wording.number(float("nan")) == wording.number(None) == wording.NONE


def test_best_step_is_chosen_and_the_last_is_shown(tmp_path):
    run_dir = write_run(tmp_path / "peak", steps=(0, 10), prompts=6, temperatures=(0.0,))
    late = write_run(tmp_path / "late", steps=(20,), prompts=6, temperatures=(0.0,), gains=(-0.1,) * 5)
    for record in read_acceptance(late / "acceptance.jsonl"):
        append_jsonl(run_dir / "acceptance.jsonl", record)
    run = read_run(run_dir)
    assert (run.first, run.best, run.after, run.last, run.selected) == (0, 10, 10, 20, LABELS[-1])
    assert "AL last (step 20)" in check_page(report.write_report(run_dir))


def test_score_holds_what_the_walks_say():
    flags = [[0, 1, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0]]
    walks = [walk(f, 2, False) for f in flags]
    record = score(walks, ["a", "b"], walks, 100, 0, 4)
    json.dumps(record, allow_nan=False)
    assert record["blocks"] == 11 and record["tokens"] == 14 and record["al"] == pytest.approx(14 / 11)
    assert record["retention"] == 1.0 and len(record["per_position"]) == len(record["survival"]) == 2
    assert 1 + sum(record["survival"]) == pytest.approx(record["al"])
    assert [b["from"] for b in record["bins"]] == [0, 4] and record["bins"][-1]["to"] == 6
    assert record["per_prompt"]["row_ids"] == ["a", "b"]
    assert score(walks, ["a", "b"], None)["retention"] is None
    for bad in (([], [], None), (walks, ["a"], None), (walks, ["a", "b"], walks[:1])):
        with pytest.raises(InputError):
            score(*bad)


def test_the_end_of_a_row_does_not_dip():
    """Constant acceptance gives the same AL in every bin, the last one included."""
    bins = score([walk(np.full(101, 0.8), 7, False)], ["a"], None, 10, 0, 20)["bins"]
    assert [b["al"] for b in bins] == pytest.approx([(1 - 0.8**8) / 0.2] * len(bins))


def test_reader_survives_a_killed_run(tmp_path):
    path = tmp_path / "acceptance.jsonl"
    append_jsonl(path, {"step": 0, "policy": "full", "al": 1.0})
    append_jsonl(path, {"step": 5, "policy": "full", "al": 2.0})
    with open(path, "a") as file:
        file.write('{"step": 10, "al"')
    assert len(read_acceptance(path)) == 2
    append_jsonl(path, {"step": 5, "policy": "full", "al": 3.0})  # the resumed run writes its step again
    assert [r["al"] for r in read_acceptance(path)] == [1.0, 3.0] and len(read_jsonl(path)) == 3
    path.write_text('{"step": 0}\nnonsense\n{"step": 1}\n')
    with pytest.raises(InputError, match="acceptance.jsonl:2"):
        read_acceptance(path)
    with pytest.raises(InputError, match="no such file"):
        read_acceptance(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError):
        append_jsonl(path, {"al": float("nan")})


def test_what_a_later_record_replaces(tmp_path):
    """Of one training step, the earlier record; of another drafter, nothing."""
    path, same = tmp_path / "acceptance.jsonl", {"split": "held_out", "policy": "full", "temperature": 0.0}
    measured = [(5, "step 5", 1.0), (None, "a", 2.0), (None, "b", 3.0), (5, "step 5", 4.0), (None, "a", 5.0)]
    for step, name, al in measured:
        append_jsonl(path, {"step": step, "checkpoint": name, **same, "al": al})
    assert [(r["checkpoint"], r["al"]) for r in read_acceptance(path)] == [("step 5", 4.0), ("a", 5.0), ("b", 3.0)]


RECIPE = """
name: synthetic
target: {model: embedded:smollm2-135m}
prompts: {train: {source: a.jsonl}, eval: {source: b.jsonl}}
views: [full]
eval: {policies: [full]}
"""


def test_command(trained, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)

    script = str(ROOT / "eval" / "report.py")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", [script, str(recipe), *arguments])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out.replace("\n", "")

    assert "acceptance.jsonl (there, needed)" in command(f"output={trained.parent}", "--plan")
    assert "report.html" in command(f"output={trained.parent}")
    line = [sys.executable, script, str(recipe), "output=nowhere"]
    missing = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "acceptance.jsonl" in missing.stderr


def rho_sweep(folder, rhos=(0.25, 0.5, 0.75)):
    specs = ["full", *({"policy": "rift_stat", "budget": b, "rho": r} for b in (64, 136) for r in rhos)]
    points = []
    for index, rho in enumerate(rhos):
        gains = (0.0, *(0.08 - 0.1 * abs(rho - r) for _ in (64, 136) for r in rhos))
        levels = (0.97, *(0.5 + b / 700 - 0.1 * abs(r - 0.5) for b in (64, 136) for r in rhos))
        run = write_run(folder / f"train{rho}", steps=(0, 9), prompts=6, tokens=64, specs=specs, levels=levels,
                        gains=gains, temperatures=(0.0,), bare=True)
        points.append(({"views.2.rho": rho, "eval.select": index + 1}, run))
    return points


def test_sweep_report(tmp_path):
    points = [*rho_sweep(tmp_path), ({"views.2.rho": 0.9, "eval.select": 1}, tmp_path / "failed")]
    page = report.write_sweep_report(points, tmp_path / "report")
    text = check_page(page)
    assert "3 of 4 points" in text and "views.2.rho=0.9" in text
    assert "Sweep of views.2.rho" in text and "rift_stat B=136 rho=0.25" in text and "before training" in text
    names = {p.stem.split("_")[0] + "_" + p.stem.split("_")[1] for p in (page.parent / "plots").iterdir()}
    assert {"heat_held", "eval_rho", "eval_budget", "train_views.2.rho"} <= names
    record = read_run(points[0][1]).get(read_run(points[0][1]).settings[0], "rift_stat B=64 rho=0.25", 9)
    assert f"{record['al']:.2f} [{record['al_low']:.2f}, {record['al_high']:.2f}]" in text


def test_sweep_report_without_results(tmp_path):
    untrained = write_run(tmp_path / "a", steps=(0,), prompts=2, temperatures=(0.0,), bare=True)
    points = [({"seed": 0}, untrained), ({"seed": 1}, tmp_path / "gone"), ({"seed": None}, tmp_path / "gone")]
    page = report.write_sweep_report(points, tmp_path / "report").read_text()
    assert "0 of 3 points" in page and "only step 0 was evaluated" in page and "no such file" in page
    with pytest.raises(InputError):
        report.write_sweep_report([], tmp_path)


def test_sweep_report_of_mixed_keys(tmp_path):
    """A list value, a missing key and a repeated number are points like any other."""
    runs = [write_run(tmp_path / n, steps=(0, 5), prompts=2, tokens=40, temperatures=(0.0,), bare=True) for n in "abc"]
    keys = ({"views.1.budget": [64, 128], "seed": 0}, {"views.1.budget": 64, "seed": 0}, {"views.1.budget": 64})
    page = report.write_sweep_report(list(zip(keys, runs, strict=True)), tmp_path / "report")
    assert "views.1.budget=[64, 128]" in check_page(page).replace("\u00a0", " ")
