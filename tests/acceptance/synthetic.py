"""A run folder made of simulated acceptance, for the tests of reports."""

import json
from pathlib import Path

import numpy as np
import yaml

from draftkv.acceptance.score import append_jsonl, score
from draftkv.acceptance.walk import walk
from draftkv.cache.policy import Policy

POLICIES = [
    "full",
    {"policy": "swa", "budget": 136},
    {"policy": "streaming", "budget": 136},
    {"policy": "snapkv", "budget": 136},
    {"policy": "rift_stat", "budget": 136, "rho": 0.5, "sinks": 4},
]
LEVELS = (0.97, 0.55, 0.62, 0.66, 0.70)


def write_run(
    folder: Path, steps=(0, 10, 20, 30), prompts=12, tokens=96, gains=(0.0, 0.04, 0.05, 0.0, 0.07), specs=POLICIES,
    levels=LEVELS, temperatures=(0.0, 1.0), bare=False, name="synthetic",
) -> Path:
    """`gains`: what training adds to each policy's acceptance rate by the last step. `bare`: evaluations only."""
    folder.mkdir(parents=True, exist_ok=True)
    policies = [Policy.model_validate(spec) for spec in specs]
    last = max(max(steps), 1)
    for step in steps:
        for temperature in temperatures:
            full = None
            for index, policy in enumerate(policies):
                rate = levels[index] + gains[index] * step / last
                walks = [_row(rate, seed, tokens, temperature) for seed in range(prompts)]
                record = score(walks, [f"row-{i}" for i in range(prompts)], full, 200, 0, 32)
                full = full or walks
                extra = {"step": step, "checkpoint": None, "split": "held_out", "policy": policy.label,
                         "spec": policy.model_dump(mode="json"), "temperature": temperature, "draft": "sampled",
                         "draft_length": 7, "alpha": rate, "tie_rate": 0.001, "wall_s": 0.5}
                append_jsonl(folder / "acceptance.jsonl", {**extra, **record})
    if not bare:
        for step in range(1, last + 1):
            append_jsonl(folder / "metrics.jsonl", {
                "step": step, "loss": 0.5 + 0.4 / step, "lr": 1e-4 * min(step / 5, 1), "grad_norm": 1.0,
                "tokens_per_s": 900.0, "alpha": 0.6 + 0.01 * step})
        recipe = {"name": name, "why": "A simulated run.\n\nIt has <two> paragraphs & a purpose.",
                  "train": {"steps": last, "rows": 8},
                  "eval": {"policies": [p.model_dump(mode="json") for p in policies], "select": -1}}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        (folder / "provenance.json").write_text(json.dumps({"git": "abc", "torch": "2.13", "gpu": None}))
    return folder


def _row(rate: float, seed: int, tokens: int, temperature: float):
    rng = np.random.default_rng(seed)
    # The same noise for every policy and step: prompts differ, and comparisons on them are correlated.
    chance = np.clip(rate + 0.08 * rng.standard_normal() + 0.05 * rng.standard_normal(tokens), 0.02, 0.999)
    return walk(rng.random(tokens) < chance if temperature == 0 else chance, 7, finished=seed % 4 == 0)
