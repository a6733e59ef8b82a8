"""How figures are put into words: the same in the report of a run and of a sweep."""

import math

from draftkv.acceptance.intervals import Interval
from draftkv.acceptance.page import Block, Bullets, Heading
from draftkv.acceptance.results import Record

NONE = "–"


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number for a reader; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:{'+' if sign else ''}.{digits}f}"


def with_interval(
    value: float | None, low: float | None, high: float | None, digits: int = 2, sign: bool = False
) -> str:
    """`value [low, high]`."""
    if value is None:
        return NONE
    return f"{number(value, digits, sign)} [{number(low, digits, sign)}, {number(high, digits, sign)}]"


def al_text(record: Record | None) -> str:
    return NONE if record is None else with_interval(record["al"], record.get("al_low"), record.get("al_high"))


def retention_text(record: Record | None) -> str:
    """Retention in per cent; the full cache's own is 100 by definition and has no interval."""
    if record is None:
        return NONE
    if record.get("retention") is None:
        return "100 %" if (record.get("spec") or {}).get("budget", 0) is None else NONE
    keys = ("retention", "retention_low", "retention_high")
    value, low, high = (number(None if (v := record.get(k)) is None else 100 * v, 1) for k in keys)
    return f"{value} % [{low}, {high}]"


def refresh_texts(record: Record | None) -> list[str]:
    """Share of layer-steps that selected again, in per cent, and vectors read for it per step and KV head."""
    rate = (record or {}).get("refresh_rate")
    return [NONE if rate is None else f"{100 * rate:.1f} %", number((record or {}).get("reads_per_step"), 1)]


def verdict(change: Interval | None) -> str:
    """What the interval of a paired change allows to say."""
    if change is None or change.value is None:
        return NONE
    if change.is_point:
        return "one prompt: cannot be said"
    if not change.excludes(0.0):
        return "no clear change"
    return "higher" if change.value > 0 else "lower"


def change_text(change: Interval | None) -> str:
    return NONE if change is None else with_interval(change.value, change.low, change.high, sign=True)


def how_to_read() -> list[Block]:
    """The definitions behind every figure of a report."""
    return [
        Heading("How to read this"),
        Bullets([
            "Acceptance length (AL): tokens emitted per forward pass of the target, the target's own token (correction "
            "or bonus) included. 1 means that drafting gained nothing, K + 1 that every drafted token was accepted.",
            "AL is a micro average: all tokens / all blocks, so long responses weigh more. AL macro is the mean of the "
            "prompts' own ALs. A last block that the length limit cuts off is not counted; one that ends with EOS is.",
            "Every figure is a replay of the target's stored responses: what a drafter would have had accepted. At "
            "temperature 0 a token is accepted when it is the drafter's argmax; with sampled drafts with probability "
            "min(1, q/p), and the expectation is reported.",
            "Retention: AL with the compressed cache / AL with the full cache, on the same prompts. It also rises when "
            "the full-cache AL falls, so read it beside the absolute AL.",
            "Intervals are 95 % percentile bootstraps over prompts. Changes and retention are paired: both sides use "
            "the same draws of prompts. They speak of other prompts like these, not of another training run.",
            "A change is called higher or lower when its interval leaves out 0, else no clear change. Each comparison "
            "stands alone: among many, about one in twenty looks clear by chance.",
            "Refresh rate: share of layer-steps (one per compressed layer and decoded token) at which a layer selected "
            "again; reads: key and value vectors read from the full store for it, per step and KV head. Where triggers "
            "ask at block starts and drafts are sampled, one path of blocks is drawn per response.",
            "Unusable rows hold no complete block (too short, or cut off at once) and are left out of every average.",
        ]),
    ]
