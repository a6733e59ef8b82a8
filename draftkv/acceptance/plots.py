"""The pictures of a report. Each function returns a PNG as bytes, or None when there is nothing to draw.

Colours are the Okabe-Ito palette, which readers with a colour-vision deficiency can tell apart, and every policy also
has a marker of its own. Acceptance-length axes start at 0 (a change has an axis around 0 and says so).
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from draftkv.acceptance.intervals import Interval
from draftkv.acceptance.results import Run, Setting

# A preset keeps its colour in every report; policies of the same preset, or of none, take the next spare one.
PRESET_COLOURS = {"full": "#000000", "swa": "#E69F00", "streaming": "#56B4E9", "snapkv": "#009E73",
                  "rift_stat": "#0072B2", "rift_stat_block": "#CC79A7", "snapkv_published": "#D55E00"}
SPARE_COLOURS = ("#D55E00", "#882255", "#999933", "#44AA99", "#7F7F7F", "#AA4499", "#661100", "#6699CC")
MARKERS = "osD^vPX<>*hpd"
STYLE = {
    "font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.titlesize": 11,
    "grid.color": "#e3e6ea", "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.titlelocation": "left",
    "axes.edgecolor": "#8a939e", "legend.frameon": False, "savefig.dpi": 130, "axes.labelcolor": "#30363d",
}
Style = dict[str, dict[str, Any]]


def styles(policies: Sequence[str], preset: Callable[[str], str | None]) -> Style:
    """Colour and marker of each policy label; `preset` names the preset that a label belongs to."""
    taken: set[str] = set()
    result: Style = {}
    names = [preset(p) for p in policies]
    reserved = {PRESET_COLOURS[n] for n in names if n in PRESET_COLOURS}
    spare = [c for c in (*SPARE_COLOURS, *PRESET_COLOURS.values()) if c not in reserved] or list(SPARE_COLOURS)
    for index, (policy, name) in enumerate(zip(policies, names, strict=True)):
        colour = PRESET_COLOURS.get(name)
        if colour is None or colour in taken:
            colour = next((c for c in spare if c not in taken), spare[index % len(spare)])
        taken.add(colour)
        result[policy] = {"color": colour, "marker": MARKERS[index % len(MARKERS)]}
    return result


def run_styles(run: Run) -> Style:
    return styles(run.policies, lambda p: run.spec(p).get("policy"))


def render(draw: Callable[[Figure], None], width: float, height: float) -> bytes:
    """Draw into a fresh figure (no global state) and return the PNG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def finite(values: Sequence[float | None]) -> np.ndarray:
    """Float array with missing values as gaps."""
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def al_by_policy(run: Run) -> bytes:
    """Bars from 0 per policy and setting: before (pale) and after (full colour), with 95 % intervals and values."""
    look, moments = run_styles(run), [run.first] + ([run.after] if run.after is not None else [])
    top = max((r.get("al_high") or r.get("al") or 0.0) for r in run.records)
    top = top or 1.0  # no row had a complete block: empty axes

    def draw(figure: Figure) -> None:
        axes = np.atleast_1d(figure.subplots(1, len(run.settings), sharey=True))
        for ax, setting in zip(axes, run.settings, strict=True):
            for row, policy in enumerate(run.policies):
                for turn, step in enumerate(moments):
                    record = run.get(setting, policy, step)
                    if record is None or record["al"] is None:
                        continue
                    place = row + (turn - (len(moments) - 1) / 2) * 0.38
                    pale = len(moments) > 1 and turn == 0
                    ax.barh(place, record["al"], 0.34, color=look[policy]["color"], alpha=0.35 if pale else 0.9)
                    ax.errorbar(record["al"], place, xerr=whiskers([record], ("al", "al_low", "al_high")),
                                color="#30363d", capsize=3, linewidth=1.2)
                    note = f"{record['al']:.2f}" + (f"  step {step}" if row == 0 and len(moments) > 1 else "")
                    ax.text((record["al_high"] or record["al"]) + top * 0.015, place, note, va="center", fontsize=9)
            ax.set(title=setting.label, xlabel="acceptance length (tokens per target forward)", xlim=(0, top * 1.28))
            ax.set_yticks(range(len(run.policies)), run.policies)
            ax.grid(axis="y", visible=False)
        axes[0].invert_yaxis()

    wide = max(len(p) for p in run.policies) * 0.075
    return render(draw, wide + 4.2 * len(run.settings), 1.2 + 0.72 * len(run.policies))


def al_by_step(run: Run) -> bytes | None:
    """Per setting: AL against the training step, and its paired change since step 0, with 95 % bands."""
    if run.last is None:
        return None
    look = run_styles(run)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(run.settings), 2, squeeze=False, sharex=True)
        for (left, right), setting in zip(axes, run.settings, strict=True):
            for policy in run.policies_at(setting):
                found = [r for s in run.steps if (r := run.get(setting, policy, s)) is not None]
                _band(left, [r["step"] for r in found], found, ("al", "al_low", "al_high"), look[policy])
                moves = [(s, c) for s in run.steps if (c := run.change(setting, policy, s)) is not None]
                moves = [(run.first, Interval(0.0, 0.0, 0.0, 1, 0)), *moves]
                points = [{"al": c.value, "al_low": c.low, "al_high": c.high} for _, c in moves]
                _band(right, [s for s, _ in moves], points, ("al", "al_low", "al_high"), look[policy])
            left.set(title=setting.label, ylabel="acceptance length", ylim=(0, None))
            right.set(title=f"{setting.label}: change since step {run.first}", ylabel="change of acceptance length")
            right.axhline(0, color="#8a939e", linewidth=1, zorder=1)
            for ax in (left, right):
                ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        for ax in axes[-1]:
            ax.set_xlabel("optimiser step")
        legend(figure, look)

    return render(draw, 11, 0.8 + 3.1 * len(run.settings) + 0.25 * len(look))


def al_along(run: Run, setting: Setting) -> bytes | None:
    """AL by the response position at which a block starts: before, and after when there is an after."""
    look = run_styles(run)
    moments = [run.first] + ([run.after] if run.after is not None else [])
    if not any(r.get("bins") for p in run.policies if (r := run.get(setting, p, run.first))):
        return None

    def draw(figure: Figure) -> None:
        axes = np.atleast_1d(figure.subplots(1, len(moments), sharey=True))
        for ax, step in zip(axes, moments, strict=True):
            for policy in run.policies_at(setting):
                record = run.get(setting, policy, step)
                bins = [b for b in (record or {}).get("bins") or [] if b["al"] is not None]
                middle = [(b["from"] + b["to"]) / 2 for b in bins]
                _band(ax, middle, bins, ("al", "low", "high"), look[policy])
            ax.set(title=f"{setting.label}: step {step}", xlabel="position in the response (tokens)",
                   xlim=(0, None), ylim=(0, None))
        axes[0].set_ylabel("acceptance length")
        legend(figure, {p: look[p] for p in run.policies_at(setting)})

    return render(draw, 5.6 * len(moments) + (1.4 if len(moments) == 1 else 0), 3.9 + 0.25 * len(look))


def by_draft_position(run: Run, setting: Setting) -> bytes | None:
    """Conditional acceptance and joint survival by draft position; dashed before training, solid after."""
    look = run_styles(run)
    moments = [(run.first, "--")] + ([(run.after, "-")] if run.after is not None else [])

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for policy in run.policies_at(setting):
            for step, line in moments if len(moments) > 1 else [(run.first, "-")]:
                record = run.get(setting, policy, step)
                for ax, key in ((left, "per_position"), (right, "survival")) if record else ():
                    values = finite(record.get(key) or [])
                    ax.plot(range(1, len(values) + 1), values, line, markersize=4.5, alpha=0.5 if line == "--" else 1,
                            **look[policy])
        left.set(title="accepted, given that all earlier ones were", ylabel="share of blocks", ylim=(0, 1.02))
        right.set(title="accepted together with all earlier ones")
        for ax in (left, right):
            ax.set_xlabel(f"position in the draft ({setting.label})")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        lines = [Line2D([], [], color="#30363d", linestyle=s, label=f"step {n}") for n, s in moments]
        legend(figure, {p: look[p] for p in run.policies_at(setting)}, lines if len(moments) > 1 else [])

    return render(draw, 11, 3.9 + 0.25 * len(look))


def training_curve(run: Run) -> bytes | None:
    """Loss, acceptance rate in training and learning rate against the step, from the metrics of the run."""
    wanted = [("loss", "training loss"), ("alpha", "acceptance rate in training"), ("lr", "learning rate")]
    rows = [m for m in run.metrics if isinstance(m.get("step"), int)]
    series = []
    for key, name in wanted:
        points = [(m["step"], m[key]) for m in rows if isinstance(m.get(key), int | float) and np.isfinite(m[key])]
        if points:
            series.append((name, *np.array(points, dtype=float).T))
    if not series:
        return None

    def draw(figure: Figure) -> None:
        axes = np.atleast_1d(figure.subplots(1, len(series)))
        for ax, (name, steps, values) in zip(axes, series, strict=True):
            # The schedule is exact; loss and acceptance rate of single steps are noisy, so their mean is drawn too.
            smooth = len(values) > 15 and name != "learning rate"
            ax.plot(steps, values, ".", color="#0072B2", alpha=0.35 if smooth else 0.9, markersize=4)
            ax.plot(steps, _smooth(values) if smooth else values, color="#0072B2", linewidth=1.8 if smooth else 1.2)
            ax.set(title=name, xlabel="optimiser step", ylim=(0, None))
            ax.ticklabel_format(axis="y", scilimits=(-3, 4))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))

    return render(draw, 3.8 * len(series), 3.0)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average over about a tenth of the run, corrected for its start."""
    keep = 1 - 1 / max(3, len(values) // 10)
    total, result = 0.0, np.empty(len(values))
    for i, value in enumerate(values):
        total = keep * total + (1 - keep) * value
        result[i] = total / (1 - keep ** (i + 1))
    return result


def whiskers(records: Sequence[dict], keys: tuple[str, str, str]) -> np.ndarray:
    """[2, N] distances from the value to the ends of its interval."""
    value, low, high = (finite([r[k] for r in records]) for k in keys)
    return np.nan_to_num(np.maximum(np.stack([value - low, high - value]), 0.0))


def _band(ax: Axes, x: Sequence[float], records: Sequence[dict], keys: tuple[str, str, str], look: dict) -> None:
    value, low, high = (finite([r[k] for r in records]) for k in keys)
    ax.fill_between(x, low, high, color=look["color"], alpha=0.13, linewidth=0)
    ax.plot(x, value, linewidth=1.8, markersize=5, **look)


def legend(figure: Figure, look: Style, extra: Sequence[Line2D] = ()) -> None:
    """Below the axes, so that it never covers data."""
    handles = [Line2D([], [], linewidth=1.8, markersize=5, label=p, **s) for p, s in look.items()]
    columns = 2 if max(map(len, look)) > 28 else 3
    figure.legend(handles=[*handles, *extra], loc="outside lower center", ncols=columns)
