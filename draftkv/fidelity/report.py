"""Tables and picture of a fidelity run. Every table is made once and shown on the terminal and in Markdown."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from draftkv.acceptance.intervals import Interval
from draftkv.acceptance.plots import legend, render, styles
from draftkv.cache.policy import Policy
from draftkv.fidelity import stats
from draftkv.fidelity.policies import reference_of
from draftkv.fidelity.records import Record
from draftkv.rundir import write_atomic


@dataclass
class Sheet:
    """A table: title, note below it, header and rows of text."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def rich(self) -> Table:
        table = Table(title=self.title, caption=self.note or None)
        for name in self.header:
            table.add_column(name)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", "| " + " | ".join(self.header) + " |", "|---" * len(self.header) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


class Results:
    """Records of N samples under the same policies.

    Attributes:
        records: [N][P], in the order of `policies`; the first policy is full.
        fidelity: [N, P] ROUGE-L F1 against the uncompressed output.
        drift: [N] mean exact attention mass on evicted entries under the reference policy.
        lengths: [N] tokens of the uncompressed output.
        names: [P] what tables call the policies.
    """

    def __init__(self, policies: Sequence[Policy], records: list[list[Record]], bootstrap: int = 2000, seed: int = 0):
        self.policies, self.records, self.bootstrap, self.seed = list(policies), records, bootstrap, seed
        self.reference = self.policies.index(reference_of(policies))
        self.fidelity = np.array([[r["rouge_l"] for r in row] for row in records]).reshape(len(records), -1)
        self.drift = np.array([row[self.reference]["evicted"] for row in records], dtype=float)
        self.lengths = np.array([row[0]["tokens"] for row in records], dtype=float)
        presets = [p.policy for p in self.policies]
        # Labels are long; a preset that is listed once is known by its name.
        self.names = [p.policy if presets.count(p.policy) == 1 else p.label for p in self.policies]

    def __len__(self) -> int:
        return len(self.records)

    def of(self, index: int, samples: Sequence[int] | None = None) -> list[Record]:
        """Records of one policy, of all samples or of some."""
        return [row[index] for row in (self.records if samples is None else [self.records[i] for i in samples])]

    def find(self, preset: str) -> int | None:
        """The first policy of a preset."""
        return next((i for i, p in enumerate(self.policies) if p.policy == preset), None)

    def same_start(self, index: int) -> float:
        """Mean number of tokens before the first one that differs from the uncompressed output."""
        return float(np.mean([stats.shared_start(row[index]["ids"], row[0]["ids"]) for row in self.records]))

    def average(self, index: int) -> Interval:
        return stats.mean(self.fidelity[:, index], self.bootstrap, self.seed)

    def change(self, index: int) -> Interval:
        """Fidelity minus the reference policy's, paired."""
        pair = self.fidelity[:, index], self.fidelity[:, self.reference]
        return stats.difference(*pair, self.bootstrap, self.seed)


def sheets(results: Results) -> list[Sheet]:
    found = [_main(results), _terciles(results), _correlations(results), _overshoot(results)]
    return [sheet for sheet in found if sheet is not None and sheet.rows]


def show(interval: Interval, sign: str = "") -> str:
    if interval.value is None:
        return "-"
    value, low, high = (None if x is None else f"{x:{sign}.3f}" for x in (interval.value, interval.low, interval.high))
    return value if low is None or interval.is_point else f"{value} [{low}, {high}]"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _main(results: Results) -> Sheet:
    base = results.names[results.reference]
    header = ["cache", "ROUGE-L F1", f"minus {base}", "refreshed", "reads / step", "seen drift", "same start",
              "tokens"]
    sheet = Sheet(f"fidelity to the uncompressed output, {len(results)} samples, 95 % intervals over samples", header)
    for index, policy in enumerate(results.policies):
        records = results.of(index)
        seen = [r["drift"] for r in records if r["drift"] is not None]
        sheet.rows.append([
            results.names[index], show(results.average(index)) if index else "1 (itself)",
            "" if index in (0, results.reference) else show(results.change(index), "+"),
            percent(stats.refresh_rate(records)) if policy.reselects else "0",
            f"{np.mean([r['reads'] for r in records]):.1f}" if policy.reselects else "0",
            f"{np.mean(seen):.3f}" if seen else "-", f"{results.same_start(index):.1f}",
            f"{np.mean([r['tokens'] for r in records]):.0f}",
        ])  # fmt: skip
    full = results.of(0)
    sheet.note = (
        f"Prompts of {np.mean([r['prompt_tokens'] for r in full]):.0f} tokens on average. Uncompressed outputs: "
        f"{results.lengths.mean():.0f} tokens ({results.lengths.min():.0f} to {results.lengths.max():.0f}), "
        f"{percent(np.mean([r['finished'] for r in full]))} ended by themselves, "
        f"{percent(np.mean([r['repeat_8'] for r in full]))} of their 8-grams are repeats. "
        f"Evicted mass under {base}: {results.drift.mean():.3f}. refreshed: share of layer-steps; reads / step: key "
        "and value vectors from the full store per decode step, layer and KV head; seen drift: what the trigger's "
        "detector saw; same start: tokens before the first that differs."
    )
    return sheet


def _terciles(results: Results) -> Sheet | None:
    parts = stats.terciles(results.drift)
    if parts is None:
        return None
    names = [f"{name} drift ({results.drift[part].mean():.3f}, n={len(part)})"
             for name, part in zip(("low", "middle", "high"), parts, strict=True)]  # fmt: skip
    sheet = Sheet("fidelity and refreshed share by drift tercile", ["cache", *names])
    sheet.note = f"Drift of a sample: mean attention mass on evicted entries under {results.names[results.reference]}."
    for index, policy in enumerate(results.policies[1:], 1):
        cells = []
        for part in parts:
            rate = f", {percent(stats.refresh_rate(results.of(index, part)))}" if policy.reselects else ""
            cells.append(f"{results.fidelity[part, index].mean():.3f}{rate}")
        sheet.rows.append([results.names[index], *cells])
    return sheet


def _correlations(results: Results) -> Sheet:
    """Spearman of fidelity gaps with drift and length: exact minus each policy, and InfiniGen minus RCR."""
    exact, infinigen, rcr = (results.find(name) for name in ("exact", "infinigen", "rcr"))
    pairs = [] if exact is None else [(exact, i) for i in range(1, len(results.policies)) if i != exact]
    if infinigen is not None and rcr is not None:
        pairs.append((infinigen, rcr))
    sheet = Sheet("rank correlation (Spearman) of fidelity gaps", ["gap", "mean", "with drift", "with output length"])
    for after, before in pairs:
        gap = results.fidelity[:, after] - results.fidelity[:, before]
        drift, length = (stats.correlation(gap, other, results.bootstrap, results.seed)
                         for other in (results.drift, results.lengths))  # fmt: skip
        label = f"{results.names[after]} - {results.names[before]}"
        sheet.rows.append([label, f"{gap.mean():+.3f}", show(drift, "+"), show(length, "+")])
    return sheet


def _steps(results: Results) -> list[int]:
    return stats.cuts(max((len(r["refreshed"]) for row in results.records for r in row), default=0))


def _overshoot(results: Results) -> Sheet:
    cuts = _steps(results)
    title = "refreshed share of layer-steps, outputs cut after so many steps"
    sheet = Sheet(title, ["cache", "target", *map(str, cuts)])
    for index, policy in enumerate(results.policies):
        if policy.reselects:
            target = f"{policy.trigger.rate:.0%}" if policy.trigger.kind == "rate_controlled" else "-"
            rates = [percent(stats.refresh_rate(results.of(index), cut)) for cut in cuts]
            sheet.rows.append([results.names[index], target, *rates])
    return sheet


def picture(results: Results) -> bytes:
    """PNG: fidelity per policy with intervals, and refreshed share against output length."""
    labels = results.names
    look = styles(labels, dict(zip(labels, (p.policy for p in results.policies), strict=True)).get)
    moving = [i for i, p in enumerate(results.policies) if p.trigger.level == "step" and p.trigger.kind != "always"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 2 if moving else 1, squeeze=False)[0]
        for place, index in enumerate(range(1, len(labels))):
            found, label = results.average(index), labels[index]
            axes[0].barh(place, found.value, 0.7, color=look[label]["color"], alpha=0.9)
            low, high = found.low if found.low is not None else found.value, found.high or found.value
            axes[0].errorbar(found.value, place, xerr=[[max(0, found.value - low)], [max(0, high - found.value)]],
                             color="#30363d", capsize=3, linewidth=1.2)  # fmt: skip
        axes[0].set_yticks(range(len(labels) - 1), labels[1:])
        axes[0].set(title=f"fidelity, {len(results)} samples", xlabel="ROUGE-L F1 against the uncompressed output",
                    xlim=(0, 1))  # fmt: skip
        axes[0].grid(axis="y", visible=False)
        axes[0].invert_yaxis()
        for index in moving:
            cuts = _steps(results)
            rates = [stats.refresh_rate(results.of(index), cut) for cut in cuts]
            axes[1].plot(cuts, rates, linewidth=1.8, markersize=5, **look[labels[index]])
            if results.policies[index].trigger.kind == "rate_controlled":
                axes[1].axhline(results.policies[index].trigger.rate, linestyle="--", linewidth=1,
                                color=look[labels[index]]["color"])  # fmt: skip
        if moving:
            axes[1].set(title="refreshed share (dashed: target)", xlabel="decode steps", ylim=(0, 1), xscale="log")
            axes[1].set_xticks(_steps(results), [str(cut) for cut in _steps(results)])
            axes[1].minorticks_off()
            legend(figure, {labels[i]: look[labels[i]] for i in moving})

    wide = max(map(len, labels)) * 0.075
    return render(draw, wide + (9.5 if moving else 5), 1.6 + 0.42 * len(labels))


def write(results: Results, folder: Path) -> list[Sheet]:
    """Write FOLDER/fidelity.md and FOLDER/fidelity.png; returns the tables."""
    found = sheets(results)
    listed = [f"- {name}: `{policy.label}`" for name, policy in zip(results.names, results.policies, strict=True)]
    text = "\n".join(["# Fidelity", "", "![fidelity by policy](fidelity.png)", "", *(s.markdown() for s in found),
                      "## The caches", "", *listed, ""])  # fmt: skip
    write_atomic(folder / "fidelity.md", text)
    draft = folder / f".fidelity.png.{os.getpid()}"
    draft.write_bytes(picture(results))
    draft.replace(folder / "fidelity.png")
    return found
