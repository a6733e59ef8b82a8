"""The report of a sweep: every point beside the others, on the prompts that all of them were evaluated on.

A point is a run. What it was trained with are its swept keys (`views.1.rho`); what it is evaluated with are the
policies in its records (`spec.rho`). A sweep of rho therefore has two axes, and the heat map shows both.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftkv.acceptance import intervals
from draftkv.acceptance.families import FIGURES, Family, curves_on, draw_curves, families, is_number
from draftkv.acceptance.page import Block, Bullets, Heading, Paragraph, Picture, Table, write_page
from draftkv.acceptance.plots import MARKERS, SPARE_COLOURS, Style, legend, render, styles
from draftkv.acceptance.results import Record, Run, Setting, paired, read_run
from draftkv.acceptance.wording import al_text, change_text, how_to_read, retention_text, verdict
from draftkv.errors import InputError

POINT_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", *SPARE_COLOURS)


@dataclass(frozen=True, eq=False)
class Trained:
    """A point with a trained drafter: its swept keys and what its run recorded."""

    label: str
    axes: dict[str, Any]
    run: Run

    def record(self, setting: Setting, policy: str) -> Record | None:
        return self.run.get(setting, policy, self.run.after)


def write_sweep_report(points: Sequence[tuple[dict[str, Any], str | Path]], out_dir: str | Path) -> Path:
    """Collate the runs of a sweep into `out_dir/report.html` and `report.md`; returns the path of the page.

    Args:
        points: (swept keys of the point, its run folder), planned points that never ran or failed included: a point
            without a readable evaluation after training is listed as missing, with the reason.

    Raises:
        InputError: no points at all.
    """
    if not points:
        raise InputError("a sweep report needs at least one point")
    axes = _training_axes([keys for keys, _ in points])
    trained, missing = [], []
    for keys, folder in points:
        label = _label({k: keys[k] for k in axes if k in keys})
        try:
            run = read_run(folder)
        except InputError as error:
            missing.append([label, str(error)])
            continue
        if run.after is None:
            missing.append([label, f"only step {run.first} was evaluated"])
        else:
            trained.append(Trained(label, {k: keys.get(k) for k in axes}, run))
    trained.sort(key=lambda t: [(isinstance(v, str | list | dict | None), v if is_number(v) else str(v))
                                for v in t.axes.values()])
    blocks: list[Block] = [Bullets(_summary(trained, missing), summary=True)]
    for setting in sorted({s for t in trained for s in t.run.settings}):
        blocks += _section(trained, setting)
    if missing:
        blocks += [Heading("Failed or missing points"), Table(["point", "why"], missing, 2)]
    return write_page(f"Sweep of {', '.join(axes) or 'one point'}", [*blocks, *how_to_read()], Path(out_dir))


def _training_axes(keys: list[dict[str, Any]]) -> list[str]:
    """Swept keys that tell the points apart. Keys of the evaluation do not unless nothing else does."""
    names = list(dict.fromkeys(k for point in keys for k in point))
    varied = [n for n in names if len({json.dumps(p.get(n), default=str) for p in keys}) > 1]
    training = [n for n in varied if not n.startswith("eval.")]
    told_apart = len({_label({n: p.get(n) for n in training}) for p in keys}) == len(keys)
    return (training if told_apart else varied) or names


def _label(axes: dict[str, Any]) -> str:
    return " ".join(f"{k}={v:g}" if is_number(v) else f"{k}={v}" for k, v in axes.items()) or "point"


def _policies(trained: list[Trained]) -> list[str]:
    return list(dict.fromkeys(p for t in trained for p in t.run.policies))


def _spec(trained: list[Trained], policy: str) -> dict[str, Any]:
    return next((s for t in trained if (s := t.run.spec(policy))), {})


def _summary(trained: list[Trained], missing: list[list[str]]) -> list[str]:
    items = [f"{len(trained)} of {len(trained) + len(missing)} points have a trained drafter with evaluations."]
    if not trained:
        return items
    setting = min(s for t in trained for s in t.run.settings)
    for policy in _policies(trained):
        found = [(r["al"], t, r) for t in trained if (r := t.record(setting, policy)) and r["al"] is not None]
        found.sort(key=lambda f: -f[0])
        if not found:
            continue
        text = f"{setting.label}, {policy}: highest AL {al_text(found[0][2])} at {found[0][1].label}"
        if len(found) > 1:
            gap = intervals.difference(*paired(found[0][2], found[1][2]))
            text += f"; against the next, {found[1][1].label}: {change_text(gap)}, {verdict(gap)}"
        items.append(f"{text}.")
    return items


def _section(trained: list[Trained], setting: Setting) -> list[Block]:
    policies = [p for p in _policies(trained) if any(t.record(setting, p) for t in trained)]
    points = [t for t in trained if setting in t.run.settings]
    before = _untrained(points, setting, policies)
    base = [["before training", *[al_text(before.get(p)) for p in policies]]] if before else []
    head = ["trained with", *policies]
    slug = setting.slug
    blocks: list[Block] = [
        Heading(setting.label),
        Heading("Acceptance length: training (rows) by evaluation (columns)", 3),
        Table(head, [*base, *[[t.label, *[al_text(t.record(setting, p)) for p in policies]] for t in points]]),
        Heading("Paired change since before training", 3),
        Table(head, [[t.label, *[_change(t, setting, p) for p in policies]] for t in points]),
        Heading("Retention", 3),
        Table(head, [[t.label, *[retention_text(t.record(setting, p)) for p in policies]] for t in points]),
    ]
    specs = {p: _spec(trained, p) for p in policies}
    for place, family in enumerate(families(specs), start=1):
        if family.key == "rho" and any(k.endswith("rho") for k in points[0].axes):
            blocks.append(Picture(f"heat_{slug}_{place}", _heat_map(points, setting, family.members, before),
                                  f"Acceptance length by training and evaluation rho, {setting.label}",
                                  f"{family.name}. Numbers are AL with their 95 % interval; the darkest cell is the "
                                  "highest."))
        blocks.append(Picture(f"eval_{family.key}_{slug}_{place}",
                              _against_evaluation(points, setting, family, before),
                              f"AL and retention against the {family.key} of the evaluation, {setting.label}",
                              f"{family.name}. Whiskers are 95 % intervals over prompts, moved apart."))
    for axis in points[0].axes:
        values = {t.axes[axis] for t in points if is_number(t.axes[axis])}
        if len(values) > 1:
            png = _against_training(points, setting, policies, axis, before)
            blocks.append(Picture(f"train_{axis}_{slug}", png,
                                  f"AL and retention against {axis} of the training, {setting.label}",
                                  "Whiskers are 95 % intervals over prompts, moved apart; dotted: before training."))
    if len(points) < 2:
        blocks.append(Paragraph("One point has results, so nothing can be drawn against the swept keys.", note=True))
    return blocks


def _change(point: Trained, setting: Setting, policy: str) -> str:
    change = point.run.change(setting, policy, point.run.after)
    return f"{change_text(change)} {verdict(change)}" if change else change_text(change)


def _untrained(points: list[Trained], setting: Setting, policies: list[str]) -> dict[str, Record]:
    """Records before training, when all points start from the same drafter (the same AL everywhere)."""
    result = {}
    for policy in policies:
        records = [r for t in points if (r := t.run.get(setting, policy, t.run.first))]
        if not records or any(r["al"] is None or abs(r["al"] - (records[0]["al"] or 0)) > 1e-9 for r in records):
            return {}
        result[policy] = records[0]
    return result


def _heat_map(
    points: list[Trained], setting: Setting, family: dict[float, str], before: dict[str, Record]
) -> bytes:
    rows = [("before training", [before.get(p) for p in family.values()])] if before else []
    rows += [(t.label, [t.record(setting, p) for p in family.values()]) for t in points]
    values = np.array([[np.nan if r is None or r["al"] is None else r["al"] for r in row] for _, row in rows])

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 1.0)
        shade = ax.imshow(values, cmap="Blues", aspect="auto", vmin=low, vmax=max(high, low + 1e-6))
        for i, (_, row) in enumerate(rows):
            for j, record in enumerate(row):
                dark = values[i, j] > (low + high) / 2
                text = al_text(record).replace(" [", "\n[")
                ax.text(j, i, text, ha="center", va="center", fontsize=9.5, color="white" if dark else "#1b1f24")
        ax.set_xticks(range(len(family)), [f"{v:g}" for v in family])
        ax.set_yticks(range(len(rows)), [name for name, _ in rows])
        ax.set(xlabel="rho of the evaluation", ylabel="trained with", title=setting.label)
        ax.grid(False)
        ax.spines[:].set_visible(False)
        figure.colorbar(shade, ax=ax, label="acceptance length")

    return render(draw, 3.4 + 1.35 * len(family), 1.4 + 0.62 * len(rows))


def _against_training(
    points: list[Trained], setting: Setting, policies: list[str], axis: str, before: dict[str, Record]
) -> bytes:
    look = styles(policies, lambda p: _spec(points, p).get("policy"))
    usable = [t for t in points if is_number(t.axes[axis])]

    def draw(figure: Figure) -> None:
        for ax, (name, keys) in zip(figure.subplots(1, 2), FIGURES, strict=True):
            curves_on(ax, {p: [(t.axes[axis], r) for t in usable if (r := t.record(setting, p))] for p in policies},
                    keys, look)
            for policy in policies:
                start = before.get(policy, {}).get(keys[0])
                if start is not None:
                    ax.axhline(start, color=look[policy]["color"], linestyle=":", linewidth=1)
            ax.set(xlabel=f"{axis} (training)", title=f"{setting.label}: {name}", ylabel=name, ylim=(0, None))
        legend(figure, look)

    return render(draw, 11, 3.9 + 0.25 * len(look))


def _against_evaluation(
    points: list[Trained], setting: Setting, family: Family, before: dict[str, Record]
) -> bytes:
    curves = {t.label: [(v, r) for v, p in family.members.items() if (r := t.record(setting, p))] for t in points}
    look: Style = {t.label: {"color": POINT_COLOURS[i % len(POINT_COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
                   for i, t in enumerate(points)}
    if before:
        look["before training"] = {"color": "#000000", "marker": "x"}
        curves["before training"] = [(v, before[p]) for v, p in family.members.items()]
    return draw_curves(curves, look, f"{family.key} (evaluation)", setting)
