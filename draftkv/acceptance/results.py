"""What a run folder holds, read back for a report: evaluation records, training curve, recipe, provenance."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from draftkv.acceptance import intervals
from draftkv.acceptance.intervals import Counts, Interval
from draftkv.acceptance.score import read_acceptance, read_jsonl
from draftkv.cache.policy import Policy
from draftkv.errors import InputError

Record = dict[str, Any]


@dataclass(frozen=True, order=True)
class Setting:
    """What must be equal for two acceptance lengths to be comparable."""

    split: str
    temperature: float
    draft: str
    draft_length: int

    @property
    def label(self) -> str:
        # At temperature 0 a sampled draft is the greedy one, so its kind says nothing.
        draft = f", {self.draft} draft" if self.temperature > 0 and self.draft else ""
        split = "" if self.split == "held_out" else f"{self.split}: "
        return f"{split}T={self.temperature:g}{draft}, K={self.draft_length}"

    @property
    def slug(self) -> str:
        """The same as a part of a file name."""
        text = f"{self.split}_t{self.temperature:g}_{self.draft}_k{self.draft_length}"
        return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def setting_of(record: Record) -> Setting:
    return Setting(
        str(record.get("split") or "held_out"),
        float(record.get("temperature") or 0.0),
        str(record.get("draft") or ""),
        int(record.get("draft_length") or len(record.get("per_position") or [])),
    )


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder. `records` have a training step; `others` are evaluations of checkpoints outside the training."""

    folder: Path
    records: list[Record]
    others: list[Record]
    metrics: list[Record]
    recipe: dict[str, Any] | None
    provenance: dict[str, Any] | None

    @cached_property
    def settings(self) -> list[Setting]:
        return sorted({setting_of(r) for r in self.records})

    @cached_property
    def policies(self) -> list[str]:
        """Labels, the full cache first, the others in the order in which they were evaluated."""
        specs = {r["policy"]: r.get("spec") or {} for r in self.records}
        return sorted(specs, key=lambda p: p != "full" and specs[p].get("policy") != "full")

    @cached_property
    def _index(self) -> dict[tuple, Record]:
        return {(setting_of(r), r["policy"], r["step"]): r for r in self.records}

    def get(self, setting: Setting, policy: str, step: int | None) -> Record | None:
        return self._index.get((setting, policy, step))

    def spec(self, policy: str) -> dict[str, Any]:
        return next((r.get("spec") or {} for r in self.records if r["policy"] == policy), {})

    def policies_at(self, setting: Setting) -> list[str]:
        here = {r["policy"] for r in self.records if setting_of(r) == setting}
        return [p for p in self.policies if p in here]

    @cached_property
    def steps(self) -> list[int]:
        return sorted({r["step"] for r in self.records})

    @property
    def first(self) -> int:
        """The step that counts as before training: 0, or the earliest that was evaluated."""
        return self.steps[0]

    @property
    def last(self) -> int | None:
        """The last step evaluated; None when nothing but the first was."""
        return self.steps[-1] if len(self.steps) > 1 else None

    @cached_property
    def selected(self) -> str:
        """Label of the policy whose AL picks the best step: `eval.select` of the recipe, else the last policy."""
        chosen = (self.recipe or {}).get("eval", {})
        try:
            label = Policy.model_validate(chosen["policies"][chosen.get("select", -1)]).label
        except (KeyError, IndexError, TypeError, ValidationError):
            label = self.policies[-1]
        return label if label in self.policies else self.policies[-1]

    @cached_property
    def best(self) -> int | None:
        """The trained step (earliest of equals) with the highest AL of `selected` at the lowest temperature."""
        scored = [
            (-r["al"], r["step"])
            for r in self.records
            if r["policy"] == self.selected and setting_of(r) == self.settings[0]
            and r["step"] > self.first and r.get("al") is not None
        ]
        return min(scored)[1] if scored else self.last

    @property
    def after(self) -> int | None:
        """The step that stands for the trained drafter: what the recipe exports, the best step unless it says last."""
        exported = (self.recipe or {}).get("export", {}).get("checkpoint", "best")
        return self.last if exported == "last" else self.best

    def change(self, setting: Setting, policy: str, step: int | None) -> Interval | None:
        """AL at `step` minus AL before training, paired over the prompts that both evaluated."""
        then, now = self.get(setting, policy, self.first), self.get(setting, policy, step)
        if step is None or step == self.first or then is None or now is None:
            return None
        return intervals.difference(*paired(now, then))


def counts_of(record: Record) -> Counts:
    return Counts(record["per_prompt"]["blocks"], record["per_prompt"]["tokens"])


def paired(one: Record, other: Record) -> tuple[Counts, Counts]:
    """The counts of two records over the prompts that both hold, in one order."""
    places = [{name: i for i, name in enumerate(r["per_prompt"]["row_ids"])} for r in (one, other)]
    common = [name for name in places[0] if name in places[1]]
    result = []
    for record, place in zip((one, other), places, strict=True):
        rows = np.array([place[name] for name in common], dtype=int)
        counts = counts_of(record)
        result.append(Counts(counts.blocks[rows], counts.tokens[rows]))
    return result[0], result[1]


def read_run(folder: str | Path) -> Run:
    """Read a run folder; everything but `acceptance.jsonl` may be absent.

    Raises:
        InputError: no evaluation was recorded, or a file is malformed.
    """
    folder = Path(folder)
    records = read_acceptance(folder / "acceptance.jsonl")
    for number, record in enumerate(records, start=1):
        missing = [k for k in ("policy", "al", "per_prompt") if k not in record]
        if missing:
            raise InputError(f"{folder / 'acceptance.jsonl'}: record {number} has no '{missing[0]}'")
    stepped = [r for r in records if isinstance(r.get("step"), int)]
    if not stepped:
        raise InputError(f"{folder / 'acceptance.jsonl'}: no evaluation of a training step yet")
    metrics = folder / "metrics.jsonl"
    return Run(
        folder,
        stepped,
        [r for r in records if not isinstance(r.get("step"), int)],
        read_jsonl(metrics) if metrics.is_file() else [],
        _mapping(folder / "recipe.yaml", yaml.safe_load),
        _mapping(folder / "provenance.json", json.loads),
    )


def _mapping(path: Path, parse) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a mapping")
    return value
