"""The model card: README.md of an export, made from the run's own records."""

from typing import Any

HONOURED = """\
Serve with a windowed drafter cache: the exported configuration says `layer_types: sliding_attention` and
`sliding_window: {window}` (the token itself counted), and the matching policy has `prefill: windowed`.

Tried with vLLM 0.32 (CPU build, `method: draft_model`, K = 7, a Llama drafter): the window is applied, but only with
`disable_hybrid_kv_cache_manager=True` is the output right. Without it the target's own output was corrupted. Compare
speculative output with plain greedy output before trusting an acceptance length.

    vllm serve TARGET --disable-hybrid-kv-cache-manager \\
        --speculative-config '{{"model": "THIS_FOLDER", "method": "draft_model", "num_speculative_tokens": {k}}}'
"""

FULL = """\
Any engine that takes a draft model serves this folder with the full cache:

    vllm serve TARGET --speculative-config \\
        '{{"model": "THIS_FOLDER", "method": "draft_model", "num_speculative_tokens": {k}}}'

The compressed cache it was trained for is in `draft_cache.json`. A plain window needs no plugin where the engine
honours `sliding_window` of a drafter (`train/export.py --native-window`; tried: Llama drafters in vLLM 0.32, with
`disable_hybrid_kv_cache_manager=True`; a Qwen3 drafter's window was ignored). Selected entries need an engine that
evicts: `draftkv.cache.evicted` is the reference.
"""

UNPROVEN = """
This architecture ({architecture}) was not proven in vLLM's `draft_model` mode. Text-only Qwen3.5 checkpoints need a
vLLM that registers `Qwen3_5ForCausalLM` (newer than July 2026).
"""


def model_card(facts: dict[str, Any]) -> str:
    """Markdown of the card; every figure comes from `facts` (see `draftkv.distill.export`)."""
    recipe, policy = facts["recipe"], facts["policy"]
    serve = (HONOURED if facts["native"] else FULL).format(window=(policy.budget or 0) + 1 if facts["native"] else "",
                                                         k=recipe.eval.draft_length)  # fmt: skip
    if facts["model_type"] != "llama":
        serve += UNPROVEN.format(architecture=facts["architecture"])
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft-model, kv-cache-compression]
---
# {recipe.name}

A drafter for `{recipe.target.model}`, distilled under compressed KV caches (the views of the recipe below) and chosen
for **{policy.label}**. {recipe.why.strip()}

## Acceptance length

{_table(facts)}

AL: tokens emitted per target forward, bonus included, micro-average over blocks, draft length
{recipe.eval.draft_length}; 95 % bootstrap intervals over prompts. Retention: AL / full-cache AL of the same weights.
{_caveats(facts)}

## Data

{_data(facts)}

## Serving

{serve}
## Recipe

```yaml
{recipe.as_yaml().rstrip()}
```
"""


def _table(facts: dict[str, Any]) -> str:
    if not facts["after"]:
        return "No evaluation was recorded for these weights."
    before = {(r["policy"], r["temperature"]): r for r in facts["before"]}
    lines = [f"| cache | T | before | after (step {facts['step']}) | retention |", "|---|---|---|---|---|"]
    for r in sorted(facts["after"], key=lambda r: r["temperature"]):
        old = before.get((r["policy"], r["temperature"]))
        kept = "" if r["retention"] is None else f"{r['retention']:.1%}"
        lines.append(f"| {r['policy']} | {r['temperature']:g} | {_al(old)} | {_al(r)} | {kept} |")
    return "\n".join(lines)


def _caveats(facts: dict[str, Any]) -> str:
    export = facts["recipe"].export
    said = [f"Measured by replay with fp32 weights; this folder holds them in {export.dtype}."]
    if export.checkpoint == "best":
        said.append("The step was chosen by the AL on these same prompts, so the figures lean high.")
    if facts["native"]:
        said.append("Measured with prompt rows seeing everything; under the exported native window they do not, and "
                    "that was not measured.")  # fmt: skip
    return "\n".join(said)


def _al(record: dict[str, Any] | None) -> str:
    if record is None or record["al"] is None:
        return "-"
    return f"{record['al']:.2f} [{record['al_low']:.2f}, {record['al_high']:.2f}]"


def _data(facts: dict[str, Any]) -> str:
    data = facts["data"]
    names = {"train_rows": "training rows", "eval_rows": "held-out rows", "supervised_tokens": "supervised tokens",
             "fed_tokens": "tokens fed to the drafter"}  # fmt: skip
    lines = [f"- {label}: {data[key]:,}" for key, label in names.items() if key in data]
    return "\n".join(lines) or "- not recorded"
