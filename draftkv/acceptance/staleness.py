"""Staleness: acceptance length and captured attention mass along the generation.

RIFT's finding is that a selection made once at the end of the prompt ages: over a long answer SnapKV's acceptance
length (AL) and the share of the full cache's attention mass that it holds both fall, while a sliding window's rise.
This module measures both along the answer and says what the intervals allow to say, whichever way it falls.

The axis. Response positions are cut into equal ranges, the bins. A block belongs to the bin it starts in, and AL in a
bin is sum(emitted) / sum(blocks) over those blocks. Only rows that are long enough for the last bin enter, and they
enter all bins: otherwise easy short answers would leave along the axis and the course would be theirs. Starts without
room for all K + 1 tokens of a block are left out, for there only the short blocks are complete. No bin is narrower than
K + 1 positions, so a block starts in every bin of every row.

Three changes are taken from the first bin to the last, each as last / first - 1: of AL, of the captured mass, and of
the retention (AL under the policy / AL of the full cache), which takes out what the text itself does to any drafter.
Intervals are 95 % bootstraps over prompts; both ends of a change, and both policies of a retention, share the draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftkv.acceptance import plots
from draftkv.acceptance.intervals import Interval, bounds, draws
from draftkv.acceptance.replay import Acceptance
from draftkv.acceptance.wording import NONE, number
from draftkv.cache.policy import Policy
from draftkv.errors import InputError, RunError

BINS = 8  # where they fit
MIN_PROMPTS = 6  # with fewer, all prompts agree by chance more often than one time in twenty
CHANGES = {"al_change": "AL", "captured_change": "captured mass", "retention_change": "retention"}


@dataclass(frozen=True)
class Axis:
    """Bins over response positions: bin i holds the blocks that start in [edges[i], edges[i + 1]).

    `length` is the number of response tokens that a row must have to reach the end of the last bin.
    """

    edges: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, length: int, draft_length: int, bins: int | None = None) -> "Axis":
        """Equal bins (to within one position) over the first `length` response tokens.

        Args:
            bins: None: as many as fit, at most `BINS`.

        Raises:
            InputError: fewer than two bins, or bins that are narrower than a draft block.
        """
        first, stop = 1, length - draft_length  # response token 0 is the prefill's, not a block's
        most = max(0, (stop - first) // (draft_length + 1))
        bins = min(BINS, most) if bins is None else bins
        if not 2 <= bins <= most:
            raise InputError(
                f"{length} response tokens hold {most} bins of at least one draft block (draft length {draft_length}) "
                f"each: {bins} bins cannot be compared (2 or more are needed)"
            )
        edges = np.linspace(first, stop, bins + 1).round().astype(int)
        return cls(tuple(edges.tolist()), length)

    def reaches(self, row: dict[str, Any]) -> bool:
        """Whether a rollout row is long enough for the last bin."""
        return len(row["response_ids"]) >= self.length


@dataclass(frozen=True, eq=False)
class Course:
    """One policy along the axis, float64 [prompts, bins]: expected blocks and the tokens that they emit, and the mean
    captured share of the positions in the bin."""

    blocks: np.ndarray
    tokens: np.ndarray
    captured: np.ndarray

    @classmethod
    def of(cls, found: Sequence[Acceptance], axis: Axis, draft_length: int) -> "Course":
        """Raises: InputError for a row that does not reach the last bin; RunError for one that was not measured."""
        if not found:
            raise InputError("no rows to measure: the evaluation set is empty")
        rows = [_one_row(one, axis, draft_length) for one in found]
        return cls(*(np.stack(part) for part in zip(*rows, strict=True)))


def _one_row(one: Acceptance, axis: Axis, draft_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, tokens and captured share of one row, [bins] each."""
    edges = np.array(axis.edges)
    if len(one.flags) < axis.length:
        raise InputError(f"row {one.row_id} has {len(one.flags)} response tokens; the last bin needs {axis.length}")
    if one.captured is None:
        raise RunError(f"row {one.row_id} was replayed without measuring the captured mass")
    walk = one.walk(draft_length)
    total = lambda values: np.add.reduceat(values[: edges[-1]], edges[:-1])  # noqa: E731
    # No layer is compressed (the full cache): nothing is recorded, and everything is seen.
    share = np.array([one.captured[at] if one.captured else 1.0 for at in range(edges[0], edges[-1])])
    return total(walk.starts), total(walk.emitted), np.add.reduceat(share, edges[:-1] - edges[0]) / np.diff(edges)


def measure(
    found: Sequence[Sequence[Acceptance]],
    policies: Sequence[Policy],
    axis: Axis,
    draft_length: int,
    bootstrap: int = 2000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One record per policy: its bins and its changes from the first to the last.

    Args:
        found: per row the acceptance under each policy (the first one is the full cache), measured; all rows reach the
            last bin.

    Returns:
        policy (label), spec, prompts, length, bins (from, to, blocks, al and captured with `_low` and `_high`), and
        `al_change`, `captured_change`, `retention_change` (value, low, high: relative, 0.1 is +10 %). What the full
        cache has by definition (a retention, a captured share that stays 1) has no change: null.
    """
    courses = [Course.of(column, axis, draft_length) for column in zip(*found, strict=True)]
    prompts = len(found)
    # Row 0 weighs every prompt once: the figure itself. The others are the resamples.
    times = np.concatenate([np.ones((1, prompts)), draws(prompts, bootstrap, seed)])
    length = [(times @ course.tokens) / (times @ course.blocks) for course in courses]
    records = []
    for policy, course, al in zip(policies, courses, length, strict=True):
        captured = times @ course.captured / prompts
        changes = {"al_change": _change(al), "captured_change": _change(captured),
                   "retention_change": _change(al / length[0])}  # fmt: skip
        if policy.is_full:
            changes["captured_change"] = changes["retention_change"] = None
        records.append({
            "policy": policy.label, "spec": policy.model_dump(mode="json"), "prompts": prompts, "length": axis.length,
            "bins": [
                {"from": axis.edges[i], "to": axis.edges[i + 1], "blocks": float(course.blocks[:, i].sum()),
                 **_named("al", _interval(al[:, i], prompts)), **_named("captured", _interval(captured[:, i], prompts))}
                for i in range(len(axis.edges) - 1)
            ],
            **{name: None if c is None else _plain(_interval(c, prompts)) for name, c in changes.items()},
        })  # fmt: skip
    return records


def _change(values: np.ndarray) -> np.ndarray:
    """[draws]: last bin / first bin - 1, from [draws, bins]."""
    return values[:, -1] / values[:, 0] - 1


def _interval(samples: np.ndarray, prompts: int) -> Interval:
    """From the figure itself (entry 0) and its resamples."""
    value = float(samples[0])
    return Interval(value, *(bounds(samples[1:]) if prompts > 1 else (value, value)), prompts, 0)


def _named(name: str, interval: Interval) -> dict[str, float | None]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _plain(interval: Interval) -> dict[str, float | None]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


# ------------------------------------------------------------------------------------------------------------ in words


def verdict(record: dict[str, Any], change: str) -> str | None:
    """`decays`, `rises`, `no clear change` or `too few prompts`: what the interval of one of `CHANGES` allows to say;
    None: no change is defined."""
    ends = record[change]
    if ends is None:
        return None
    if record["prompts"] < MIN_PROMPTS:
        return "too few prompts"
    if ends["low"] <= 0 <= ends["high"]:
        return "no clear change"
    return "decays" if ends["value"] < 0 else "rises"


def sentence(record: dict[str, Any]) -> str:
    """What one policy does between the first bin and the last."""
    parts = []
    for key, what in CHANGES.items():
        word = verdict(record, key)
        if word is not None:
            parts.append(f"{what}{'' if word in ('decays', 'rises') else ':'} {word} ({change_text(record[key])})")
    return f"{record['policy']}: {'; '.join(parts)}."


def finding(records: Sequence[dict[str, Any]]) -> str:
    """Whether RIFT's finding is there: how many one-shot selections decay, and how many windows rise."""
    policies = [(r, Policy.model_validate(r["spec"])) for r in records]
    once = [r for r, p in policies if not (p.is_full or p.reselects) and p.scorer.kind != "none"]
    windows = [r for r, p in policies if not p.is_full and p.scorer.kind == "none"]

    def count(group: list[dict[str, Any]], word: str) -> str:
        found = [sum(verdict(r, key) == word for r in group) for key in CHANGES]
        return ", ".join(f"{n} of {len(group)} in {what}" for n, what in zip(found, CHANGES.values(), strict=True))

    parts = [
        f"{name} that {word.removesuffix('s')}: {count(group, word)}"
        for name, group, word in (("one-shot selections", once, "decays"), ("windows", windows, "rises"))
        if group
    ]
    head = "RIFT's finding (a one-shot selection decays, a window rises)"
    return f"{head}: {'; '.join(parts)}." if parts else f"{head}: the recipe evaluates neither."


def change_text(ends: dict[str, float | None] | None) -> str:
    """`+4.1 % [+1.0, +7.3]`."""
    if ends is None:
        return NONE
    value, low, high = (number(None if ends[k] is None else 100 * ends[k], 1, sign=True)
                        for k in ("value", "low", "high"))  # fmt: skip
    return f"{value} % [{low}, {high}]"


HEAD = ("policy", "AL, first to last bin", "change", "captured, first to last", "change", "change of retention")


def cells(record: dict[str, Any]) -> list[str]:
    """One row of the table, in the order of `HEAD`."""
    first, last = record["bins"][0], record["bins"][-1]
    return [record["policy"], " to ".join(number(b["al"], 3) for b in (first, last)), change_text(record["al_change"]),
            " to ".join(f"{number(100 * b['captured'], 1)} %" for b in (first, last)),
            change_text(record["captured_change"]), change_text(record["retention_change"])]  # fmt: skip


def markdown(title: str, about: Sequence[str], records: Sequence[dict[str, Any]]) -> str:
    """The page `staleness.md`; the picture lies beside it."""
    lines = [HEAD, ["---"] + ["---:"] * (len(HEAD) - 1), *map(cells, records)]
    table = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines]
    said = [finding(records), *map(sentence, records)]
    return "\n".join([
        f"# {title}", "", *(f"- {line}" for line in said), "", "![AL and captured mass along the response]"
        "(staleness.png)", "", *table, "", *(f"- {line}" for line in about),
        "- AL in a bin: tokens emitted / draft blocks, over the blocks that start in it. Captured: share of the full "
        "cache's attention mass on what a row attends to, mean over its compressed layers and heads.",
        "- Changes are last bin / first bin - 1 with paired 95 % bootstrap intervals over prompts; `decays` or `rises` "
        "where the interval leaves out 0, from 6 prompts on. Retention: AL / AL of the full cache in the same bin.", "",
    ])  # fmt: skip


def picture(title: str, records: Sequence[dict[str, Any]]) -> bytes:
    """PNG: AL and captured mass against the response position, a line with a 95 % band per policy."""
    specs = {r["policy"]: r["spec"] for r in records}
    look = plots.styles(list(specs), lambda label: specs[label].get("policy"))

    def draw(figure: Figure) -> None:
        panels = (("al", "acceptance length", None), ("captured", "captured share of attention mass", 1.03))
        for ax, (key, name, top) in zip(figure.subplots(1, 2), panels, strict=True):
            for record in records:
                middle = [(b["from"] + b["to"]) / 2 for b in record["bins"]]
                value, low, high = (plots.finite([b[k] for b in record["bins"]])
                                    for k in (key, f"{key}_low", f"{key}_high"))  # fmt: skip
                style = look[record["policy"]]
                ax.fill_between(middle, low, high, color=style["color"], alpha=0.13, linewidth=0)
                ax.plot(middle, value, linewidth=1.8, markersize=5, **style)
            ax.set(title=name, xlabel="position in the response (tokens)", xlim=(0, records[0]["length"]),
                   ylim=(0, top))  # fmt: skip
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        plots.legend(figure, look)

    return plots.render(draw, 11, 4.2 + 0.25 * len(look))
