"""Policies of one evaluation that differ in one number alone: what retention is drawn against."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftkv.acceptance.plots import Style, legend, render, whiskers
from draftkv.acceptance.results import Record, Setting

KEYS = ("rho", "budget", "delta")
FIGURES = (("acceptance length", ("al", "al_low", "al_high")),
           ("retention", ("retention", "retention_low", "retention_high")))
Curves = Mapping[str, list[tuple[float, Record]]]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Family:
    """`members`: value of `key` -> policy label, ascending, two or more; `name` says what they share."""

    key: str
    members: dict[float, str]
    name: str


def families(specs: Mapping[str, dict[str, Any]]) -> list[Family]:
    """Families of the policies in `specs` (label -> policy as data), by rho, by budget and by delta."""
    result = []
    for key in KEYS:
        groups: dict[str, dict[float, str]] = {}
        for policy, spec in specs.items():
            value, rest = _apart(spec, key)
            if value is not None:
                groups.setdefault(rest, {})[value] = policy
        result += [Family(key, dict(sorted(g.items())), _name(specs[next(iter(g.values()))], key))
                   for g in groups.values() if len(g) > 1]
    return result


def _apart(spec: dict[str, Any], key: str) -> tuple[float | None, str]:
    """A policy's value of `key`, None where it has none or ignores it, and everything else about the policy."""
    trigger, scorer = spec.get("trigger") or {}, spec.get("scorer") or {}
    trigger = trigger if isinstance(trigger, dict) else {"kind": trigger}
    if key == "delta":
        value, rest = trigger.get("delta"), {**spec, "trigger": {k: v for k, v in trigger.items() if k != "delta"}}
    else:
        value, rest = spec.get(key), {k: v for k, v in spec.items() if k != key}
    # A window of its own overrides rho, and without a scorer rho does not matter.
    idle = key == "rho" and (spec.get("window") is not None or scorer.get("kind") == "none")
    usable = is_number(value) and spec.get("budget") is not None and not idle
    # Entries and shares of the prompt do not share an axis.
    return value if usable else None, json.dumps([type(value).__name__, rest], sort_keys=True)


def _name(spec: dict[str, Any], key: str) -> str:
    shared = [f"{k} {spec[k]:g}" for k in ("budget", "rho") if k != key and is_number(spec.get(k))]
    return f"Evaluated with {', '.join([str(spec.get('policy')), *shared])}"


def draw_curves(curves: Curves, look: Style, axis: str, setting: Setting) -> bytes:
    """Two panels, acceptance length and retention, with one curve a label over (value, record) points; a PNG."""

    def draw(figure: Figure) -> None:
        for ax, (name, keys) in zip(figure.subplots(1, 2), FIGURES, strict=True):
            curves_on(ax, curves, keys, look)
            ax.set(xlabel=axis, title=f"{setting.label}: {name}", ylabel=name, ylim=(0, None))
        legend(figure, look)

    return render(draw, 11, 3.9 + 0.25 * len(look))


def curves_on(ax: Axes, curves: Curves, keys: tuple[str, str, str], look: Style) -> None:
    """One curve a label, with whiskers; a curve is joined when it has one point at each place."""
    places = sorted({x for found in curves.values() for x, _ in found})
    if not places:
        return
    apart = 0.012 * (places[-1] - places[0])  # curves are moved sideways a little, or their whiskers would coincide
    for index, (label, found) in enumerate(curves.items()):
        found = sorted(((x, r) for x, r in found if r.get(keys[0]) is not None), key=lambda f: f[0])
        if not found:
            continue
        shift = apart * (index - (len(curves) - 1) / 2)
        records = [r for _, r in found]
        joined = "-" if len({x for x, _ in found}) == len(found) else "none"
        ax.errorbar([x + shift for x, _ in found], [r[keys[0]] for r in records], yerr=whiskers(records, keys),
                    capsize=2.5, elinewidth=1, linestyle=joined, linewidth=1.6, markersize=5, **look[label])
    ax.set_xticks(places, [f"{x:g}" for x in places])
