"""A cache policy: what the drafter may attend to, as a value.

A policy has four parts (budget, scorer, trigger, prefill). Every published system is a point in that space, listed in
`PRESETS`; executors (`parallel`, `evicted`) read the value and never ask for its name.

Semantics for a prompt of P tokens (P counts every entry cached when decoding begins) and a query at position t >= P:

    n_sinks  = min(sinks, P)                               the first entries of the prompt
    window   = min(floor(rho * B), B - sinks)              or `window`, when the policy names one
    selected = min(B - sinks - window, P - n_sinks - window), at least 0, in whole blocks
    sliding  = B - n_sinks - selected                      the entries right before t

so a query sees n_sinks + selected + min(sliding, ...) entries and itself. The sliding part takes what the other two
leave: it equals floor(rho * B) whenever the prompt fills its share, and nothing is dropped before B entries are cached.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftkv.cache.scorers import NoScorer, SnapKVScorer

Scorer = Annotated[NoScorer | SnapKVScorer, Field(discriminator="kind")]

# name -> (parts, source). Parts that a preset leaves out keep the defaults of `Policy`.
PRESETS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"budget": None}, "the uncompressed cache"),
    "swa": ({"rho": 1.0}, "sliding window; RIFT's strongest plain baseline on hybrids"),
    "streaming": ({"rho": 1.0, "sinks": 4}, "StreamingLLM: attention sinks and a window"),
    "snapkv": (
        {"window": 32, "scorer": {"kind": "snapkv"}},
        "SnapKV at a fixed budget: the observation window slides, the rest is selected once",
    ),
    "snapkv_published": (
        {"window": 32, "scorer": {"kind": "snapkv"}, "generated": "kept"},
        "SnapKV as published: B counts prompt entries, every generated entry is kept",
    ),
    "rift_stat": ({"rho": 0.5, "scorer": {"kind": "snapkv"}}, "RIFT-stat: window and one-shot selection"),
    "rift_stat_block": (
        {"rho": 0.5, "scorer": {"kind": "snapkv", "block": 16}},
        "RIFT-stat, block level: blocks ranked by the mean of their tokens' scores",
    ),
}


@dataclass(frozen=True)
class Split:
    """How a budget is divided for one prompt. All counts are cache entries.

    `sliding` is None when nothing slides out (full attention, or generated entries that are kept). `tail_start` is the
    first position of the sliding part when decoding begins; entries are selected in [sinks, tail_start).
    """

    sinks: int
    selected: int
    sliding: int | None
    tail_start: int

    @property
    def front(self) -> int:
        """Entries whose place is fixed for the whole decode: sinks and selected."""
        return self.sinks + self.selected


class Policy(BaseModel):
    """One point of the policy space. Frozen, hashable, and the same value in every executor.

    Raises:
        pydantic.ValidationError: rho outside [0, 1], a budget that cannot hold sinks + 1 entries, an unknown preset.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: str = Field("custom", description="preset name; its parts can be overridden by the keys below")
    budget: int | float | None = Field(None, description="entries (int), share of the prompt (float < 1), or null: all")
    rho: float = Field(0.5, ge=0, le=1, description="share of the budget that is a sliding window")
    sinks: int = Field(0, ge=0, description="first prompt entries that are always kept")
    window: int | None = Field(None, ge=0, description="window in entries; overrides rho")
    scorer: Scorer = Field(default_factory=NoScorer, description="which prompt entries are selected")
    trigger: Literal["never"] = Field("never", description="when to select again")
    prefill: Literal["full", "windowed"] = Field("full", description="what prompt rows see")
    generated: Literal["sliding", "kept"] = Field("sliding", description="whether generated entries leave the window")

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"policy": value}
        if not isinstance(value, dict):
            return value
        name = value.get("policy", "custom")
        if name != "custom" and name not in PRESETS:
            raise ValueError(f"unknown policy '{name}'; known: {', '.join(PRESETS)}")
        merged = {**PRESETS[name][0], **value} if name != "custom" else dict(value)
        if isinstance(merged.get("scorer"), str):
            merged["scorer"] = {"kind": merged["scorer"]}
        return merged

    @model_validator(mode="after")
    def _check_budget(self) -> "Policy":
        if self.policy == "full" and self.budget is not None:
            raise ValueError(f"policy 'full' has no budget (given: {self.budget})")
        if self.budget is None:
            if self.policy != "full":
                raise ValueError(f"policy '{self.policy}' needs a budget")
            return self
        if isinstance(self.budget, float) and not 0 < self.budget < 1:
            raise ValueError(f"budget {self.budget}: a fraction of the prompt is between 0 and 1, entries are whole")
        if isinstance(self.budget, int) and self.budget < self.kept_sinks + 1:
            raise ValueError(f"budget {self.budget} is smaller than sinks + 1 = {self.kept_sinks + 1}")
        return self

    @property
    def is_full(self) -> bool:
        return self.budget is None

    @property
    def kept_sinks(self) -> int:
        """Sinks rounded up to whole blocks, so that selected blocks are aligned pages of a paged cache."""
        block = self.scorer.block
        return math.ceil(self.sinks / block) * block

    def entries(self, prompt_len: int) -> int | None:
        """Budget in entries for a prompt of `prompt_len` tokens (a fraction is rounded down, at least sinks + 1)."""
        if isinstance(self.budget, float):
            return max(self.kept_sinks + 1, int(self.budget * prompt_len))
        return self.budget

    def split(self, prompt_len: int) -> Split:
        """Divide the budget for a prompt of `prompt_len` tokens; see the module's docstring for the rule."""
        budget = self.entries(prompt_len)
        if budget is None:
            return Split(0, 0, None, 0)
        window = min(int(self.rho * budget) if self.window is None else self.window, budget - self.kept_sinks)
        sinks = min(self.kept_sinks, prompt_len)
        room = max(0, min(budget - self.kept_sinks - window, prompt_len - sinks - window))
        block = self.scorer.block
        selected = 0 if self.scorer.kind == "none" else room // block * block
        sliding = budget - sinks - selected
        tail_start = max(sinks + selected, prompt_len - sliding)
        return Split(sinks, selected, None if self.generated == "kept" else sliding, tail_start)

    def prefill_split(self, prompt_len: int) -> Split:
        """What prompt rows see: everything, or (windowed) the sinks and the B - sinks entries before each row."""
        budget = self.entries(prompt_len)
        if budget is None or self.prefill == "full":
            return Split(0, 0, None, 0)
        sinks = min(self.kept_sinks, prompt_len)
        return Split(sinks, 0, budget - sinks, 0)

    @property
    def label(self) -> str:
        """Short unique name for tables and plots, e.g. `rift_stat B=136 rho=0.5 sinks=4`."""
        if self.is_full:
            return self.policy
        preset = PRESETS.get(self.policy, ({}, ""))[0]
        default = Policy.model_construct(**{"scorer": NoScorer(), **preset})
        words = [self.policy, f"B={self.budget}"]
        if self.scorer.kind != "none" and self.window is None:
            words.append(f"rho={self.rho:g}")
        for name in ("window", "sinks", "trigger", "prefill", "generated"):
            if getattr(self, name) != getattr(default, name):
                words.append(f"{name}={getattr(self, name)}")
        given = self.scorer.model_dump()
        usual = {**type(self.scorer)().model_dump(), **(preset.get("scorer") or {})}
        words += [f"{k}={v}" for k, v in given.items() if v != usual.get(k)]
        return " ".join(words)
