"""Export: a plain Hugging Face folder that any engine loads, and what a reader must know to serve it.

config, safetensors, tokenizer, generation config; README.md (model card), draft_cache.json (the policy it was trained
for), provenance.json. What was written is loaded again and its logits are compared before the export counts as done.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftkv import rundir
from draftkv.acceptance.score import read_acceptance
from draftkv.cache.architecture import check_native_window
from draftkv.cache.policy import Policy
from draftkv.distill.card import model_card
from draftkv.errors import InputError, RunError
from draftkv.models import load_config, load_model, load_tokenizer, quiet
from draftkv.recipe import Recipe


def export_run(recipe: Recipe) -> list[Path]:
    """Export the run's best (or last) weights to RUN/export, and with `export.native_window` also, with a window in
    its configuration, to RUN/export-native-window (which replay cannot evaluate: nothing is left to compress).

    Raises:
        InputError: nothing to export yet, or a native window that cannot be honoured.
        RunError: what was written does not give the same logits when it is loaded again.
    """
    source, step = _source(recipe)
    if not recipe.export.native_window:
        return [_write(recipe, source, step, recipe.run_dir / "export", native=False)]
    check_native_window(load_config(str(source)).model_type, recipe.eval.policies[recipe.eval.select])
    folders = {"export": False, "export-native-window": True}
    return [_write(recipe, source, step, recipe.run_dir / name, native) for name, native in folders.items()]


def _write(recipe: Recipe, source: Path, step: int, final: Path, native: bool) -> Path:
    policy, draft = recipe.eval.policies[recipe.eval.select], final.with_name(f".{final.name}")
    shutil.rmtree(draft, ignore_errors=True)
    # Loaded in the export's dtype, not converted: `model.to` would round the rotary frequencies too.
    model = load_model(str(source), None, recipe.export.dtype)
    if native:
        policy = write_native_window(model.config, policy)
    with rundir.writing(final, draft), quiet():
        model.save_pretrained(draft)
        load_tokenizer(recipe.target.model, recipe.target.revision).save_pretrained(draft)
    verify(model, draft, native)
    card = _facts(recipe, step, policy, native, model.config)
    (draft / "draft_cache.json").write_text(json.dumps(cache_facts(policy, recipe), indent=1, ensure_ascii=False))
    (draft / "README.md").write_text(model_card(card), encoding="utf-8")
    provenance = recipe.run_dir / "provenance.json"
    known = json.loads(provenance.read_text()) if provenance.is_file() else rundir.provenance(recipe)
    (draft / "provenance.json").write_text(json.dumps({**known, "exported_step": step}, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    return final


def _source(recipe: Recipe) -> tuple[Path, int]:
    name = "best" if recipe.export.checkpoint == "best" else "last"
    source = recipe.run_dir / "checkpoints" / name
    if not (source / "step.json").is_file():
        raise InputError(f"{source}: nothing to export yet; run train/distill.py with this recipe first")
    return source, json.loads((source / "step.json").read_text())["step"]


def write_native_window(config: Any, policy: Policy) -> Policy:
    """Turn full-attention layers into natively sliding ones of the policy's window; the policy that then describes the
    drafter has `prefill: windowed`, because an engine windows the prompt's rows too.

    Raises:
        InputError: an architecture whose engines ignore the window, or a policy that is not a plain window.
    """
    check_native_window(config.model_type, policy)
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    config.sliding_window = policy.budget + 1  # transformers and engines count the token itself
    return policy.model_copy(update={"prefill": "windowed"})


def cache_facts(policy: Policy, recipe: Recipe) -> dict[str, Any]:
    """draft_cache.json: the policy the drafter was selected for, and all views it was trained under."""
    views = [view.model_dump(mode="json", exclude_none=True) for view in recipe.views]
    return {
        "policy": policy.model_dump(mode="json"),
        "label": policy.label,
        "trained_views": views,
        "draft_length": recipe.eval.draft_length,
        "counts": "cached entries, the query's own token not counted",
    }


@torch.no_grad()
def verify(model: PreTrainedModel, folder: Path, native: bool, tolerance: float = 1e-5) -> None:
    """Load the folder as a stranger would, and compare logits on a fixed input.

    Raises:
        RunError: a missing or empty tensor, another architecture, or logits that differ.
    """
    with quiet():
        again, info = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    config = AutoConfig.from_pretrained(folder)
    if config.model_type != model.config.model_type or info["missing_keys"]:
        raise RunError(f"{folder}: not what was written (missing: {sorted(info['missing_keys'])[:3]})")
    empty = [name for name, p in again.named_parameters() if not p.numel()]
    if empty:
        raise RunError(f"{folder}: empty tensors, such as {empty[0]}")
    ids = torch.arange(48)[None] * 7 % model.config.vocab_size
    mine, read = model.state_dict(), again.state_dict()
    changed = [name for name in mine if name not in read or not torch.equal(mine[name], read[name])]
    if changed:
        raise RunError(f"{folder}: {len(changed)} tensors differ after a reload, such as {changed[0]}")
    if native:
        return  # the loaded model slides its window, the model in memory does not: weights are all they share
    apart = (model(ids, use_cache=False).logits - again.eval()(ids, use_cache=False).logits).abs().max().item()
    if not apart <= tolerance:
        raise RunError(f"{folder}: logits differ by {apart:g} after a reload")


def _facts(recipe: Recipe, step: int, policy: Policy, native: bool, config: Any) -> dict[str, Any]:
    path = recipe.run_dir / "acceptance.jsonl"
    records = read_acceptance(path) if path.is_file() else []
    provenance = recipe.run_dir / "provenance.json"
    data = json.loads(provenance.read_text()) if provenance.is_file() else {}
    return {
        "recipe": recipe,
        "step": step,
        "policy": policy,
        "native": native,
        "data": data,
        "model_type": config.model_type,
        "architecture": (config.architectures or ["?"])[0],
        "before": [r for r in records if r["step"] == 0],
        "after": [r for r in records if r["step"] == step],
    }
