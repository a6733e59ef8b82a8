"""`--plan`: what a recipe would run and what it would cost, from arithmetic alone.

Needs no weights and no network. Facts come from `draftkv.shapes`; where a fact is missing the plan says "not known".
Every memory figure is an estimate of the largest parts, for prompts and responses of the greatest allowed length.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

from draftkv.cli import say
from draftkv.recipe import Recipe
from draftkv.shapes import Shape, dense_params, draft_kv_bytes, shape_of

WIDTH = {"float32": 4, "bfloat16": 2}
LARGEST_DEVICE = 141e9  # bytes of an H200; a larger teacher has to be spread or served
UNKNOWN = "not known"


def print_plan(recipe: Recipe) -> None:
    """Print `plan` for the processes of this launch, from the main one."""
    say(plan(recipe, int(os.environ.get("WORLD_SIZE", "1"))))


def plan(recipe: Recipe, processes: int = 1) -> str:
    """The resolved recipe, the stages and their state, and estimates of tokens, memory and disk, as plain text."""
    target, drafter = shape_of(recipe.target.model), drafter_shape(recipe)
    sections = [
        ("recipe", recipe.as_yaml().rstrip().splitlines()),
        ("models", [_model("target", recipe.target.model, target),
                    _model("drafter", recipe.drafter.model or "made from the target", drafter)]),
        ("stages", _stages(recipe)),
        ("tokens, at most (every prompt and response at its limit)", _tokens(recipe, processes)),
        (f"memory per process, estimated ({processes} process{'es' * (processes > 1)})",
         _memory(recipe, processes, target, drafter)),
        ("draft cache of one sequence at the longest prompt, bf16, full-attention layers", _caches(recipe, drafter)),
        ("disk, estimated", _disk(recipe, drafter)),
        ("notes", _notes(recipe, target, drafter)),
    ]
    blocks = ["\n".join([f"== {title}", *(f"  {line}" for line in lines)]) for title, lines in sections if lines]
    return "\n".join(blocks)


def drafter_shape(recipe: Recipe) -> Shape | None:
    """Shape of the drafter; one that is cut from the target keeps its share of the layers."""
    if recipe.drafter.model is not None:
        return shape_of(recipe.drafter.model)
    shape = shape_of(recipe.target.model)
    if shape is None or recipe.drafter.layers is None or shape.layers is None:
        return shape
    kept = len(recipe.drafter.layers)
    # Which of the kept layers are full attention is only known for models that have no others.
    full = kept if shape.full_attention_layers == shape.layers else None
    cut = replace(shape, layers=kept, full_attention_layers=full)
    return replace(cut, params=dense_params(cut), params_from="the architecture")


def size(count: float | None) -> str:
    """Bytes in binary units, `256 MiB`; None is `not known`."""
    if count is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def _model(role: str, name: str, shape: Shape | None) -> str:
    if shape is None:
        return f"{role}: {name}, architecture {UNKNOWN} here (no local config.json): no memory estimates for it"
    facts = [shape.family]
    if shape.params:
        facts.append(f"{shape.params / 1e9:.3g} B parameters (from {shape.params_from})")
    if shape.layers:
        full = UNKNOWN if shape.full_attention_layers is None else shape.full_attention_layers
        facts.append(f"{shape.layers} layers, {full} of them full attention")
    if shape.kv_heads and shape.head_dim:
        facts.append(f"{shape.kv_heads} KV heads of {shape.head_dim}")
    if shape.vocab:
        facts.append(f"vocabulary {shape.vocab:,}")
    return f"{role}: {name}, {', '.join(facts)}"


def _stages(recipe: Recipe) -> list[str]:
    """The commands of the main job and what is there of each. States come from files; nothing is opened but JSON."""
    run = recipe.run_dir
    stores = sorted(Path(recipe.output).glob("rollouts/*/manifest.json"))
    checkpoints = sorted(p for p in run.glob("checkpoints/step-*") if (p / "state.json").is_file())
    records = run / "acceptance.jsonl"
    states = [
        ("engine", f"{recipe.engine.text} (rollouts and stored signals)"),
        ("rollouts", f"{len(stores)} store(s) in {recipe.output}/rollouts, reused if the ingredients are the same"
         if stores else "absent"),
        ("distill", "done" if (run / "done.json").is_file() else
         f"would resume from {checkpoints[-1].name}" if checkpoints else "absent"),
        ("acceptance", f"{_lines(records)} records" if records.is_file() else "absent"),
        ("export", "done" if (run / "export" / "config.json").is_file() else "absent"),
        ("report", "done" if any(run.glob("report/*")) else "absent"),
    ]
    if (run / "done.json").is_file() and _changed(recipe):
        states.append(("note", f"{run}/recipe.yaml differs from this recipe, which needs another name"))
    return [f"{name:<11}{state}" for name, state in states]


def _changed(recipe: Recipe) -> bool:
    stored = recipe.run_dir / "recipe.yaml"
    return stored.is_file() and stored.read_text(encoding="utf-8").strip() != recipe.as_yaml().strip()


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _train_prompts(recipe: Recipe) -> int | None:
    """Number of training prompts, if a limit or a local JSONL file tells."""
    source = recipe.prompts.train
    path = Path(source.source)
    counts = [source.limit] if source.limit else []
    if path.suffix == ".jsonl" and path.is_file():
        counts.append(_lines(path))
    return min(counts) if counts else None


def _tokens(recipe: Recipe, processes: int) -> list[str]:
    train, prompt, response = recipe.train, recipe.prompts.max_prompt_tokens, recipe.rollouts.max_new_tokens
    prompts = _train_prompts(recipe)
    step = train.rows * (prompt + train.views_per_row * response)
    supervised = train.rows * train.views_per_row * response
    lines = []
    if prompts is None:
        lines.append(f"rollouts: number of training prompts {UNKNOWN} before the source is read")
    else:
        rows = prompts * len(recipe.rollouts.train_temperatures)
        lines.append(f"rollouts: {rows:,} training rows, {rows * response:,} tokens written by the target")
        lines.append(f"epochs: {train.steps * train.rows / rows:.3g} ({train.steps:,} steps of {train.rows} rows)")
    evaluations = {0, train.steps, *range(0, train.steps, recipe.eval.every),
                   *range(0, train.steps, train.checkpoint_every)}  # fmt: skip
    accumulate = max(1, -(-train.rows // (train.micro_rows * processes)))
    lines += [
        f"step: {step:,} tokens = {train.rows} rows x ({prompt:,} prompt + {train.views_per_row} views x {response:,}),"
        f" in {accumulate} forward passes per process",
        f"supervised: {supervised:,} tokens a step, {supervised * train.steps:,} in {train.steps:,} steps",
        f"evaluations: {len(evaluations)} x {len(recipe.eval.policies)} policies"
        f" x {len(recipe.rollouts.eval_temperatures)} temperatures, draft length {recipe.eval.draft_length}",
    ]
    return lines


def _memory(recipe: Recipe, processes: int, target: Shape | None, drafter: Shape | None) -> list[str]:
    """Training: weights, gradients and two Adam moments in fp32, the teacher, activations of one forward pass, head."""
    parts: dict[str, float | None] = {}
    params = drafter.params if drafter else None
    trained = "" if recipe.train.trainable is None else ", as if all were trained"
    stage, divided = sharding(), ("", "Adam", "gradients, Adam", "weights, gradients, Adam")
    each = sum(size / (processes if stage >= least else 1) for size, least in ((4, 3), (4, 2), (8, 1)))
    shared = f"; {divided[stage]} in {processes} parts" if stage and processes > 1 else ""
    parts[f"drafter in fp32: weights + gradients + Adam, {each:.3g} bytes a parameter{trained}{shared}"] = (
        params and each * params)
    if recipe.signal.source == "model":
        teacher = target.params if target else None
        parts[f"target, {recipe.target.dtype}"] = teacher and WIDTH[recipe.target.dtype] * teacher
    kind = "with" if recipe.train.gradient_checkpointing else "without"
    parts[f"activations of one pass, {kind} checkpointing"] = _activations(recipe, drafter)
    parts[f"vocabulary head, {recipe.train.head_chunk:,} rows at once, fp32"] = _head(recipe, drafter or target)
    lines = [f"{size(value):>10}  {name}" for name, value in parts.items()]
    known = [v for v in parts.values() if v is not None]
    least = "" if len(known) == len(parts) else " at least, some parts are not known"
    lines.append(f"{size(sum(known)):>10}  together{least}")
    if processes > 1 and not stage:
        lines.append("every process holds all of it (plain data parallelism)")
    return lines


def sharding() -> int:
    """What this launch divides among processes, as ZeRO counts: 0 nothing, 1 Adam, 2 and gradients, 3 and weights."""
    on = {name: os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true" for name in ("FSDP", "DEEPSPEED")}
    if on["DEEPSPEED"]:
        file = Path(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", ""))
        given = json.loads(file.read_text()) if file.is_file() else {}
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)
        return int(given.get("zero_optimization", {}).get("stage", 0) if given else stage)
    return 3 if on["FSDP"] else 0


def _activations(recipe: Recipe, shape: Shape | None) -> float | None:
    """Bytes kept for the backward pass of `micro_rows` rows.

    A layer keeps about ten hidden-sized, three MLP-sized and two attention-sized tensors in bf16 (fp32 without
    autocast); with checkpointing only its fp32 input, and one layer at a time is run again.
    """
    if shape is None or None in (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.mlp):
        return None
    train = recipe.train
    tokens = train.micro_rows * (
        recipe.prompts.max_prompt_tokens + train.views_per_row * recipe.rollouts.max_new_tokens)
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = (2 if train.precision == "bf16" else 4) * (10 * shape.hidden + 3 * shape.mlp + 2 * attention)
    if train.gradient_checkpointing:
        return float(tokens * (4 * shape.hidden * shape.layers + layer))
    return float(tokens * layer * shape.layers)


def _head(recipe: Recipe, shape: Shape | None) -> float | None:
    """Logits of both models, their softmax and the gradient: four fp32 matrices of [chunk, vocabulary]."""
    if shape is None or shape.vocab is None:
        return None
    # The head's own rule, repeated here because a plan imports no torch: a chunk's logits stay within 128 MiB.
    return 4.0 * min(4 * recipe.train.head_chunk * shape.vocab, 128 << 20)


def _caches(recipe: Recipe, drafter: Shape | None) -> list[str]:
    prompt = recipe.prompts.max_prompt_tokens
    per_token = drafter and draft_kv_bytes(drafter, 1)
    lines = [f"{size(per_token)} a token"]
    for policy in recipe.eval.policies:
        entries = policy.entries(prompt)
        if entries is None or entries >= prompt:
            entries = prompt
        bytes_ = per_token and per_token * entries
        ratio = f", {prompt / entries:.3g}x less" if entries < prompt else ""
        lines.append(f"{policy.label}: {size(bytes_)} ({entries:,} entries{ratio})")
    return lines


def _disk(recipe: Recipe, drafter: Shape | None) -> list[str]:
    """Rollouts hold 4 bytes an id and 8 bytes of log-probabilities a response token."""
    row = 4 * recipe.prompts.max_prompt_tokens + 12 * recipe.rollouts.max_new_tokens
    prompts = _train_prompts(recipe)
    rows = prompts and prompts * len(recipe.rollouts.train_temperatures)
    params = drafter.params if drafter else None
    kept = recipe.train.keep_checkpoints + 1  # and the best one
    total = f", {size(rows * row)} for {rows:,} training rows" if rows else ""
    signals = []
    if recipe.signal.source == "stored":
        entry = 6 * (recipe.signal.samples or recipe.signal.k) + 4
        signals = [f"signals: at most {size(entry * recipe.rollouts.max_new_tokens)} a training row"]
    return [
        f"rollouts: at most {size(row)} a row{total}", *signals,
        f"checkpoints: {size(params and 12.0 * params * kept)} (weights and Adam in fp32, {kept} of them)",
        f"export: {size(params and WIDTH[recipe.export.dtype] * params)}",
    ]


def _notes(recipe: Recipe, target: Shape | None, drafter: Shape | None) -> list[str]:
    longest = recipe.prompts.max_prompt_tokens + recipe.rollouts.max_new_tokens
    notes = []
    for role, shape in (("target", target), ("drafter", drafter)):
        if shape and shape.max_positions and shape.max_positions < longest:
            notes.append(f"prompt + response = {longest:,} is longer than the {role}'s limit of"
                         f" {shape.max_positions:,}: the run would be refused")
    weights = WIDTH[recipe.target.dtype] * target.params if target and target.params else 0
    if recipe.signal.source == "model" and weights > LARGEST_DEVICE:
        notes.append(f"the target's weights ({size(weights)}) fit no device of 141 GB:"
                     " they must be spread over several, and a copy in every process will not do; serve it"
                     " (engine.kind=server) and train with signal.source=stored")
    for role, shape, name in (("target", target, recipe.target.model), ("drafter", drafter, recipe.drafter.model)):
        if shape is None:
            notes.append(f"{role} {name}: give a folder with its config.json to have it in the estimates")
    notes.append("rehearse first: --rehearse runs every stage on tiny models of the same architectures")
    return notes
