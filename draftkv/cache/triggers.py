"""Triggers: when the stored entries are scored again.

A trigger is a small frozen value. `level` says who asks it:

    once   the selection made when decoding begins stays                                   never
    block  asked at the start of a draft block, through a `Clock`, for all layers at once  every, adaptive, similarity
    step   asked by every full-attention layer at every decoded token                      rate_controlled, ... always

The clock counts *verified* tokens since the end of the prompt, so a schedule depends on positions and block starts
only and replay stays exact. To add a trigger: write a class, add it to `Trigger` and give `PRESETS` a row.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Level = Literal["once", "block", "step"]


@dataclass
class Signals:
    """What a run knows of itself at a block start: exponentially weighted means over its blocks; None before the first.

    Attributes:
        al: tokens emitted per block, bonus included.
        entropy: entropy (nats, at temperature 1) of the draft distributions at emitted positions.
        drift: 1 - cosine of query summaries now and at the last selection, mean over full-attention layers.
    """

    al: float | None = None
    entropy: float | None = None
    drift: float | None = None

    def observe(self, emitted: int, entropy: float, decay: float) -> None:
        """Take one finished block into the means."""
        mean = lambda old, new: new if old is None else decay * old + (1 - decay) * new  # noqa: E731
        self.al, self.entropy = mean(self.al, float(emitted)), mean(self.entropy, entropy)


class _Trigger(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    level: ClassVar[Level] = "once"
    detects: ClassVar[bool] = False  # needs the drift of every step

    def next_check(self, verified: int) -> int | None:
        """First verified count after `verified` at which a refresh may happen; None: none. Block triggers only."""
        return None

    def fires(self, age: int, signals: Signals) -> bool:
        """Whether to refresh at a check, `age` verified tokens after the last selection. Block triggers only."""
        return False


class Never(_Trigger):
    kind: Literal["never"] = "never"


class Every(_Trigger):
    """RIFT-dyn: at every multiple of `delta` verified tokens, shifted by `phase` in training views."""

    kind: Literal["every"] = "every"
    level: ClassVar[Level] = "block"
    delta: int = Field(128, ge=1, description="verified tokens between two selections")
    phase: int = Field(0, ge=0, description="verified tokens before the first of them; 0: delta")

    def next_check(self, verified: int) -> int:
        first = self.phase or self.delta
        return first if verified < first else first + ((verified - first) // self.delta + 1) * self.delta

    def fires(self, age: int, signals: Signals) -> bool:
        return True


class Adaptive(_Trigger):
    """RIFT-ada: at a check, refresh when the selection is `a_max` old, or when a signal passes its threshold and the
    selection is `a_min` old. A threshold that is null is not looked at; `eval/calibrate.py` finds the others."""

    kind: Literal["adaptive"] = "adaptive"
    level: ClassVar[Level] = "block"
    check: int = Field(8, ge=1, description="verified tokens between two checks")
    a_min: int = Field(16, ge=1)
    a_max: int = Field(256, ge=1)
    al_below: float | None = Field(None, gt=0, description="recent acceptance length that fires")
    entropy_above: float | None = Field(None, gt=0, description="draft entropy (nats) that fires")
    drift_above: float | None = Field(0.06, gt=0, description="query drift that fires; found on SmolLM2-135M")
    decay: float = Field(0.8, ge=0, lt=1, description="of the exponentially weighted means, per block")

    @model_validator(mode="after")
    def _ordered(self) -> "Adaptive":
        if self.a_min > self.a_max:
            raise ValueError(f"a_min {self.a_min} is larger than a_max {self.a_max}")
        return self

    def next_check(self, verified: int) -> int:
        return (verified // self.check + 1) * self.check

    def fires(self, age: int, signals: Signals) -> bool:
        passed = lambda value, limit: value is not None and limit is not None and value > limit  # noqa: E731
        low = signals.al is not None and self.al_below is not None and signals.al < self.al_below
        fired = low or passed(signals.entropy, self.entropy_above) or passed(signals.drift, self.drift_above)
        return age >= self.a_max or (fired and age >= self.a_min)


class Similarity(_Trigger):
    """RefreshKV: at every `stride` tokens each layer compares its head-averaged query with the one at its own last
    selection, and selects again unless their cosine exceeds `threshold` (0.85 for Llama-3.1-8B, 0.95 for Qwen2-7B)."""

    kind: Literal["similarity"] = "similarity"
    level: ClassVar[Level] = "block"
    stride: int = Field(10, ge=1)
    threshold: float = Field(0.85, ge=-1, le=1)

    def next_check(self, verified: int) -> int:
        return (verified // self.stride + 1) * self.stride

    def fires(self, age: int, signals: Signals) -> bool:
        return True


class FixedThreshold(_Trigger):
    """Select again where the drift, the attention mass that a step would put on evicted entries, exceeds `tau`."""

    kind: Literal["fixed_threshold"] = "fixed_threshold"
    level: ClassVar[Level] = "step"
    detects: ClassVar[bool] = True
    tau: float = Field(0.03, ge=0)
    rank: int = Field(8, ge=1, description="singular vectors of the prefix keys in which evicted entries are scored")


class RateControlled(_Trigger):
    """RCR: the drift against one threshold per sample, shared by the layers. After each layer
    tau <- tau * exp(gain * (fired - rate)), which tracks the (1 - rate) quantile of the drift."""

    kind: Literal["rate_controlled"] = "rate_controlled"
    level: ClassVar[Level] = "step"
    detects: ClassVar[bool] = True
    tau: float = Field(0.03, gt=0, description="initial threshold")
    gain: float = Field(0.05, ge=0)
    rate: float = Field(0.4, ge=0, le=1, description="target share of layer-steps that select again")
    rank: int = Field(8, ge=1, description="singular vectors of the prefix keys in which evicted entries are scored")


class Always(_Trigger):
    """Select again at every step of every layer."""

    kind: Literal["always"] = "always"
    level: ClassVar[Level] = "step"


Trigger = Annotated[
    Never | Every | Adaptive | Similarity | FixedThreshold | RateControlled | Always, Field(discriminator="kind")
]


class Clock:
    """When a block trigger is asked. One per sequence; counts verified tokens, the first emitted token included.

    Attributes:
        signals: filled by whoever runs the blocks; the cache adds the drift.
        selected_at: verified count at the last selection.
    """

    def __init__(self, trigger: _Trigger):
        self.trigger, self.signals, self.selected_at = trigger, Signals(), 0
        self.next = trigger.next_check(0)

    def at_check(self, verified: int) -> bool:
        """Whether a check is due at this block start."""
        return self.next is not None and verified >= self.next

    def check(self, verified: int) -> bool:
        """Do the check that is due; True: select again now."""
        self.next = self.trigger.next_check(verified)
        fired = self.trigger.fires(verified - self.selected_at, self.signals)
        if fired:
            self.selected_at = verified
        return fired

    def observe(self, emitted: int, entropy: float) -> None:
        """A block was verified."""
        self.signals.observe(emitted, entropy, getattr(self.trigger, "decay", 0.0))
