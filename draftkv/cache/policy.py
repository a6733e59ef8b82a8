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
A trigger that selects again when S entries are stored divides the budget with S in the place of P, and selects among
all of them; where generated entries are kept, it goes on selecting among the prompt's.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftkv.cache.scorers import NoScorer, Scorer
from draftkv.cache.triggers import Never, Trigger

# RCR's layout: [selected prefix | the prompt's last entries | every generated entry].
_RCR = {"window": 32, "generated": "kept"}

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
    "rift_dyn": (
        {"rho": 0.5, "scorer": {"kind": "snapkv"}, "trigger": {"kind": "every", "delta": 128}},
        "RIFT-dyn: the whole stored cache is scored again by recent queries every delta tokens",
    ),
    "rift_ada": (
        {"rho": 0.5, "scorer": {"kind": "snapkv"}, "trigger": {"kind": "adaptive"}},
        "RIFT-ada: scored again when acceptance, entropy or queries drift past calibrated thresholds",
    ),
    "rift_drift": (
        {"rho": 0.5, "scorer": {"kind": "snapkv"}, "trigger": {"kind": "rate_controlled"}},
        "RIFT's budget and scorer, RCR's rate controller as trigger",
    ),
    "rcr": (
        {**_RCR, "scorer": {"kind": "lowrank"}, "initial": {"kind": "bacon"}, "trigger": {"kind": "rate_controlled"}},
        "RCR: drift against a rate-controlled threshold, candidates from a rank-8 detector",
    ),
    "fixed_threshold": (
        {**_RCR, "scorer": {"kind": "lowrank"}, "initial": {"kind": "bacon"}, "trigger": {"kind": "fixed_threshold"}},
        "RCR's drift, detector and candidates under a constant threshold",
    ),
    "exact": (
        {**_RCR, "scorer": {"kind": "exact"}, "trigger": {"kind": "always"}},
        "exact scores of every step's own query select for that step",
    ),
    "oracle": ({**_RCR, "scorer": {"kind": "oracle"}}, "one selection, by the uncompressed answer's own attention"),
    "bacon": ({**_RCR, "window": 64, "scorer": {"kind": "bacon"}}, "BACON: SnapKV's score and the last query's excess"),
    "quest": (
        {"window": 16, "dense_layers": 2, "scorer": {"kind": "quest"}, "trigger": {"kind": "always"}},
        "Quest: pages of 16 by an upper bound of the step's logits; layers 0 and 1 stay dense",
    ),
    "arkvale": (
        {"window": 64, "sinks": 64, "dense_layers": 2, "scorer": {"kind": "arkvale"}, "trigger": {"kind": "always"}},
        "ArkVale: pages of 32 by cuboid digests; two sink pages and two window pages stay, layers 0 and 1 dense",
    ),
    "infinigen": (
        {**_RCR, "scorer": {"kind": "infinigen"}, "trigger": {"kind": "always"}},
        "InfiniGen: partial columns of rotated queries and keys score every step",
    ),
    "refreshkv": (
        {"rho": 0.5, "scorer": {"kind": "snapkv", "observation": 1, "pool": 7, "pooling": "max", "group": "max"},
         "trigger": {"kind": "similarity"}},
        "RefreshKV: layers whose query moved away select again, by the last query's attention",
    ),
    "random": ({"rho": 0.5, "scorer": {"kind": "random"}}, "uniformly random prompt entries and a window"),
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
    initial: Scorer | None = Field(None, description="scorer of the first selection; null: `scorer`")
    trigger: Trigger = Field(default_factory=Never, description="when to select again")
    prefill: Literal["full", "windowed"] = Field("full", description="what prompt rows see")
    generated: Literal["sliding", "kept"] = Field("sliding", description="whether generated entries leave the window")
    dense_layers: int = Field(0, ge=0, description="layers with an index below this keep their full cache")
    store: Literal["host", "device"] = Field("host", description="where a trigger that selects again keeps everything")

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
        preset = PRESETS[name][0] if name != "custom" else {}
        merged = {**preset, **value}
        for part in ("scorer", "initial", "trigger"):
            given = merged.get(part)
            if isinstance(given, str):
                merged[part] = {"kind": given}
            elif isinstance(given, dict) and "kind" not in given:  # an override of some of the preset's own keys
                if part not in preset:
                    raise ValueError(f"{part}: which kind? '{name}' has none whose keys could be overridden")
                merged[part] = {**preset[part], **given}
        return merged

    @model_validator(mode="after")
    def _check_budget(self) -> "Policy":
        if self.policy == "full" and self.budget is not None:
            raise ValueError(f"policy 'full' has no budget (given: {self.budget})")
        if self.budget is None:
            if self.policy != "full":
                raise ValueError(f"policy '{self.policy}' needs a budget")
            if self.trigger.kind != "never":
                raise ValueError(f"policy 'full' keeps everything; trigger '{self.trigger.kind}' has nothing to select")
            return self
        if isinstance(self.budget, float) and not 0 < self.budget < 1:
            raise ValueError(f"budget {self.budget}: a fraction of the prompt is between 0 and 1, entries are whole")
        if isinstance(self.budget, int) and self.budget < self.kept_sinks + 1:
            raise ValueError(f"budget {self.budget} is smaller than sinks + 1 = {self.kept_sinks + 1}")
        if isinstance(self.budget, int) and self.scorer.kind != "none" and self._room(self.budget) < self.scorer.block:
            raise ValueError(
                f"budget {self.budget}: sinks ({self.kept_sinks}) and window ({self._window(self.budget)}) leave no"
                f" room for scorer '{self.scorer.kind}' to select {self.scorer.block}"
            )
        return self

    @model_validator(mode="after")
    def _check_trigger(self) -> "Policy":
        if self.reselects and self.scorer.kind == "none":
            raise ValueError(f"trigger '{self.trigger.kind}' selects again, but scorer 'none' selects nothing")
        if self.reselects and self.scorer.kind == "oracle":
            raise ValueError("scorer 'oracle' selects once, from the finished answer: its trigger is 'never'")
        if self.trigger.detects and self.scorer.kind == "bacon":
            raise ValueError(f"scorer 'bacon' carries maps from layer to layer, but under '{self.trigger.kind}' layers"
                             " select apart; use it as `initial`")  # fmt: skip
        if self.scorer.block % self.first_scorer.block:
            raise ValueError(f"blocks of {self.first_scorer.block} (initial) do not divide those of the scorer, "
                             f"{self.scorer.block}")  # fmt: skip
        return self

    @property
    def is_full(self) -> bool:
        return self.budget is None

    @property
    def reselects(self) -> bool:
        """Whether entries may come back, so that everything has to stay stored somewhere."""
        return self.trigger.kind != "never"

    @property
    def is_parallel(self) -> bool:
        """Whether one teacher-forced forward shows it: selections depend on nothing but positions and the prompt."""
        return self.trigger.kind in ("never", "every") and not self.needs_answer

    @property
    def needs_answer(self) -> bool:
        """Whether its first selection is made from the uncompressed answer (`draftkv.cache.oracle`)."""
        return "oracle" in (self.scorer.kind, self.first_scorer.kind)

    @property
    def first_scorer(self) -> Scorer:
        """The scorer of the selection made when decoding begins."""
        return self.initial or self.scorer

    @property
    def query_rows(self) -> int:
        """Most recent query rows that any selection reads."""
        return max(self.scorer.rows, self.first_scorer.rows)

    @property
    def kept_sinks(self) -> int:
        """Sinks rounded up to whole blocks, so that selected blocks are aligned pages of a paged cache."""
        block = self.scorer.block
        return math.ceil(self.sinks / block) * block

    def entries(self, prompt_len: int) -> int | None:
        """Budget in entries for a prompt of `prompt_len` tokens (a fraction is rounded down, at least sinks + 1)."""
        if isinstance(self.budget, float):
            return max(self.kept_sinks + 1, _floor(self.budget * prompt_len))
        return self.budget

    def _window(self, budget: int) -> int:
        window = _floor(self.rho * budget) if self.window is None else self.window
        return min(window, budget - self.kept_sinks)

    def _room(self, budget: int) -> int:
        """Entries that a scorer may select, when the prompt has them."""
        return budget - self.kept_sinks - self._window(budget)

    def split(self, prompt_len: int, stored: int | None = None) -> Split:
        """Divide the budget for a prompt of `prompt_len` tokens; see the module's docstring for the rule.

        Args:
            stored: entries stored at a later selection; None: the first one, when decoding begins.
        """
        budget = self.entries(prompt_len)
        if budget is None:
            return Split(0, 0, None, 0)
        if stored is not None and self.generated == "sliding":
            prompt_len = stored
        window = self._window(budget)
        sinks = min(self.kept_sinks, prompt_len)
        room = max(0, min(self._room(budget), prompt_len - sinks - window))
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
            words.append(f"rho={self.rho:.10g}")
        for name in ("window", "sinks", "prefill", "generated", "dense_layers", "store"):
            if getattr(self, name) != getattr(default, name):
                words.append(f"{name}={getattr(self, name)}")
        if self.initial is None and preset.get("initial"):
            words.append("initial=none")
        for part in ("scorer", "initial", "trigger"):
            words += _differences(getattr(self, part), preset.get(part), prefix=part)
        return " ".join(words)


def _differences(part: BaseModel | None, usual: dict[str, Any] | None, prefix: str) -> list[str]:
    """`key=value` for what a part sets differently from the preset, its kind first; delta is always said."""
    if part is None:
        return []
    kind = (usual or {}).get("kind", "none" if prefix == "scorer" else "never")
    words = [] if part.kind == kind else [f"{prefix}={part.kind}"]
    common = {**type(part)().model_dump(), **(usual or {} if part.kind == kind else {})}
    # Two parts may have a key of the same name, and a label tells policies apart.
    before = "" if prefix == "scorer" else f"{prefix}."
    return words + [f"{'' if k == 'delta' else before}{k}={v}" for k, v in part.model_dump().items()
                    if k != "kind" and (v != common.get(k) or k == "delta")]  # fmt: skip


def _floor(value: float) -> int:
    """floor, but 0.57 * 100 is 57 though floats say 56.99999999999999."""
    return math.floor(round(value, 6))
