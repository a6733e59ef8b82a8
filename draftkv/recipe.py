"""The one configuration: a YAML recipe, dotted overrides, and a validated value.

`load_recipe` reads YAML with OmegaConf, merges `key.sub=value` overrides and validates with pydantic, unknown keys
forbidden. Every mistake becomes one line that names the key's path, what was given, what is allowed and, for a
misspelt key, the nearest valid one.
"""

import itertools
import random
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigIndexError, OmegaConfBaseException
from pydantic import BaseModel, Field, field_validator, model_validator

from draftkv.cache.backends.choice import chosen
from draftkv.cache.policy import PRESETS, Policy
from draftkv.errors import InputError
from draftkv.serving import Engine
from draftkv.settings import Section, validate


class Model(Section):
    """A model: a local folder, a hub id, or `embedded:NAME` for the model that a package ships."""

    model: str = Field(description="folder, hub id, or embedded:smollm2-135m")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of the forward pass")


class Drafter(Section):
    """The model that learns. Without `model` it is cut from the target: its embeddings, head and (some) layers."""

    model: str | None = Field(None, description="folder or hub id; null: made from the target")
    revision: str | None = None
    layers: list[int] | None = Field(None, description="layers of the target to keep when model is null; null: all")
    attention: Literal["auto", "sdpa", "flash", "flex"] = Field(
        "auto", description="backend of the cache-policy attention; auto: flash where it can run, else sdpa"
    )


class PromptSource(Section):
    """Where prompts come from: a JSONL/Parquet file, a hub data set, or `embedded:NAME`."""

    source: str = Field(description="file.jsonl, file.parquet, hub id, or embedded:code / embedded:prose / ...")
    split: str | None = Field(None, description="split of a hub data set, or train/held_out of an embedded source")
    config: str | None = Field(None, description="configuration of a hub data set")
    limit: int | None = Field(None, ge=1, description="use the first N usable prompts")
    categories: list[str] | None = Field(None, description="keep only these categories")


class Prompts(Section):
    train: PromptSource
    eval: PromptSource
    max_prompt_tokens: int = Field(4096, ge=8, description="longer prompts are skipped and counted")


class Rollouts(Section):
    """How the target writes its responses. Every ingredient is hashed into the store's manifest."""

    max_new_tokens: int = Field(256, ge=2)
    train_temperatures: list[float] = Field([0.0], description="one training response per prompt and temperature")
    eval_temperatures: list[float] = Field([0.0, 1.0], description="one held-out response per prompt and temperature")
    batch_size: int = Field(16, ge=1)
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of generation")
    seed: int = Field(0, description="of sampled responses; its own, so that seeds of training share the rollouts")

    @field_validator("train_temperatures", "eval_temperatures")
    @classmethod
    def _not_negative(cls, value: list[float]) -> list[float]:
        if not value or min(value) < 0:
            raise ValueError("needs at least one temperature, none below 0")
        return value


class View(Section):
    """A distribution over policies for training: a policy whose numbers may be ranges [low, high]."""

    also_holds: ClassVar[tuple[type[BaseModel], ...]] = (Policy,)
    ranges: ClassVar[tuple[str, ...]] = ("budget", "rho", "delta", "phase")

    weight: float = Field(1.0, gt=0, description="share of the draws, where a row takes fewer views than there are")
    loss_weight: float = Field(1.0, gt=0, description="factor on the loss of rows under this view")
    budget: list[int] | int | float | None = None
    rho: list[float] | float | None = None
    delta: list[int] | int | None = Field(None, description="of the trigger `every`: tokens between selections")
    phase: list[int] | int | None = Field(None, description="of the trigger `every`: tokens before the first")
    parts: dict[str, Any] = Field(default_factory=dict, description="the other keys of a policy")

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"policy": value}
        if isinstance(value, dict) and "parts" not in value:
            own = {k: v for k, v in value.items() if k in ("weight", "loss_weight", *cls.ranges)}
            return {**own, "parts": {k: v for k, v in value.items() if k not in own}}
        return value

    @model_validator(mode="after")
    def _extremes_are_policies(self) -> "View":
        for name in self.ranges:
            given = getattr(self, name)
            if isinstance(given, list) and (len(given) != 2 or given[0] > given[1]):
                raise ValueError(f"{name} {given}: a range is [low, high]")
        # Every corner: a high rho with a low budget may leave no room, where both lows and both highs do.
        ranged = [n for n in self.ranges if isinstance(getattr(self, n), list)]
        for corner in itertools.product(*(getattr(self, n) for n in ranged)):
            extreme = self.policy(dict(zip(ranged, corner, strict=True)))
            if not extreme.is_parallel:
                part = "oracle" if extreme.needs_answer else extreme.trigger.kind
                raise ValueError(f"'{part}' looks at the run, so no training view shows it; triggers: never, every")
        return self

    def policy(self, drawn: dict[str, Any]) -> Policy:
        """The policy with ranges replaced by the values in `drawn`."""
        values = {n: v for n in self.ranges if isinstance(v := getattr(self, n), int | float)} | drawn
        clock = {n: values.pop(n) for n in ("delta", "phase") if n in values}
        if not clock:
            return Policy.model_validate({**self.parts, **values})
        trigger = self.parts.get("trigger") or PRESETS.get(self.parts.get("policy"), ({},))[0].get("trigger") or "every"
        trigger = {"kind": trigger} if isinstance(trigger, str) else trigger
        return Policy.model_validate({**self.parts, **values, "trigger": {**trigger, **clock}})

    def draw(self, rng: random.Random) -> Policy:
        drawn: dict[str, Any] = {}
        for name in self.ranges:
            given = getattr(self, name)
            if isinstance(given, list):
                drawn[name] = (rng.uniform if name == "rho" else rng.randint)(*given)
        return self.policy(drawn)


LossName = Literal["forward_kl", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid", "expected_al"]


class LossTerm(Section):
    """One term of the loss; the formulas and their sources are in `draftkv.distill.losses`."""

    name: LossName
    weight: float = Field(1.0, gt=0)
    temperature: float = Field(1.0, gt=0, description="softmax temperature of teacher and student")
    beta: float = Field(0.5, gt=0, lt=1, description="jsd: weight of the teacher in the mixture")
    eta: float = Field(3.0, gt=0, description="lk_hybrid: decay of the KL share with the acceptance rate")
    k: int = Field(4, ge=1, description="expected_al: consecutive rows")


class Signal(Section):
    """What the drafter learns from: the target in process, or its stored top-k log-probabilities (data/signals.py)."""

    source: Literal["model", "stored"] = "model"
    k: int = Field(64, ge=1, description="stored: likeliest tokens kept at each position")
    samples: int | None = Field(None, ge=1, description="stored: draws with replacement instead (forward_kl only)")
    temperature: float = Field(1.0, gt=0, description="stored: softmax temperature of the target")


class Train(Section):
    steps: int = Field(100, ge=1)
    rows: int = Field(8, ge=1, description="rows (prompt + response) per optimiser step, over all processes")
    micro_rows: int = Field(1, ge=1, description="rows per forward pass on one process")
    bucket_steps: int = Field(16, ge=1, description="micro_rows > 1: rows of so many steps are grouped by length")
    views_per_row: int = Field(1, ge=1, description="views per row, drawn without replacement; they share its prompt")
    lr: float = Field(1e-5, gt=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate / peak")
    warmup_steps: int = Field(5, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0, description="gradient norm")
    precision: Literal["bf16", "no"] = Field("bf16", description="autocast; master weights are always fp32")
    gradient_checkpointing: bool = False
    initial_share: float = Field(0.0, ge=0, lt=1, description="initial weights in what is evaluated and kept")
    trainable: list[str] | None = Field(None, description="regular expressions of parameter names; null: all")
    head_chunk: int = Field(64, ge=1, description="most rows of vocabulary logits held at once (128 MiB at most)")
    checkpoint_every: int = Field(50, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    max_bad_steps: int = Field(5, ge=1, description="non-finite steps in a row before the run stops")

    @field_validator("trainable")
    @classmethod
    def _are_patterns(cls, value: list[str] | None) -> list[str] | None:
        for pattern in value or []:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None
        return value


class Eval(Section):
    every: int = Field(50, ge=1, description="optimiser steps between evaluations; checkpoints have one too")
    policies: list[Policy] = Field(min_length=1)
    draft_length: int = Field(7, ge=1, description="tokens drafted per block (K)")
    draft: Literal["sampled", "greedy"] = Field("sampled", description="draft at T > 0: sampled, or vLLM's greedy")
    select: int = Field(-1, description="index in `policies` whose T=0 AL picks the best checkpoint; -1: the last")
    bootstrap: int = Field(2000, ge=100, description="resamples for the 95 % intervals")
    rows: int | None = Field(None, ge=1, description="held-out rows per temperature; null: all")
    precision: Literal["bf16", "no"] = Field("bf16", description="autocast of replay; logits are always fp32")

    @model_validator(mode="after")
    def _full_comes_first(self) -> "Eval":
        if not self.policies[0].is_full:
            raise ValueError("policies: the first one must be `full`: retention is measured against it")
        labels = [p.label for p in self.policies]
        if len(set(labels)) < len(labels):
            raise ValueError("policies: the same policy is listed twice")
        if not -len(labels) <= self.select < len(labels):
            raise ValueError(f"select {self.select}: there are {len(labels)} policies")
        return self


class Export(Section):
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    checkpoint: Literal["best", "last"] = "best"
    native_window: bool = Field(False, description="also export with a sliding window for serving engines")


class Recipe(Section):
    """One file, one experiment."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="names the folder runs/NAME")
    why: str = Field("", description="what the experiment is for, in words; repeated in the report")
    seed: int = 0
    output: str = Field("runs", description="folder of all runs, relative to the working directory")
    target: Model
    drafter: Drafter = Drafter()
    prompts: Prompts
    rollouts: Rollouts = Rollouts()
    engine: Engine = Engine()
    views: list[View] = Field(min_length=1)
    signal: Signal = Signal()
    loss: list[LossTerm] = Field([LossTerm(name="forward_kl")], min_length=1)
    train: Train = Train()
    eval: Eval
    export: Export = Export()
    trackers: list[Literal["wandb", "trackio", "tensorboard"]] = []

    @model_validator(mode="after")
    def _losses_take_the_signal(self) -> "Recipe":
        if self.signal.source == "stored":
            for i, term in enumerate(self.loss):
                if term.temperature != self.signal.temperature:
                    raise ValueError(
                        f"loss.{i}.temperature {term.temperature:g}: the stored signal has {self.signal.temperature:g},"
                        " and its tail's mass at another is unknown"
                    )
                if self.signal.samples is not None and term.name != "forward_kl":
                    raise ValueError(f"loss.{i}: signal.samples leaves forward_kl unbiased and no other loss")
        return self

    @model_validator(mode="after")
    def _engine_can_say_it(self) -> "Recipe":
        """vLLM reports log-probabilities of the top k at temperature 1, and a server has one dtype."""
        kind, rollouts = self.engine.kind, self.rollouts
        if not self.engine.is_vllm:
            return self
        for name in ("train_temperatures", "eval_temperatures"):
            other = [t for t in getattr(rollouts, name) if t not in (0, 1)]
            if other:
                raise ValueError(f"rollouts.{name} {other[0]:g}: vLLM reports log-probabilities at temperature 1, so"
                                 f" only 0 and 1 are exact with engine.kind '{kind}'; use 'transformers' for others")
        if self.signal.temperature != 1 or self.signal.samples is not None:
            raise ValueError(f"signal: engine.kind '{kind}' gives the top k at temperature 1; signal.temperature and"
                             " signal.samples need 'transformers'")
        if kind == "server" and rollouts.dtype != self.target.dtype:
            raise ValueError(f"rollouts.dtype {rollouts.dtype}, target.dtype {self.target.dtype}: a server has one")
        return self

    @model_validator(mode="after")
    def _views_keep_the_full_cache(self) -> "Recipe":
        if not any(v.parts.get("policy") == "full" for v in self.views):
            raise ValueError("views: `full` must be one of them, or full-cache acceptance is lost")
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.output) / self.name

    def backend(self) -> str:
        """What `drafter.attention` means on this machine. Raises: InputError when it cannot run here."""
        return chosen(self.drafter.attention, half="bf16" in (self.train.precision, self.eval.precision))

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: list[str] = (), runs_here: bool = True) -> Recipe:
    """Read a recipe file and apply dotted overrides.

    Args:
        runs_here: whether an attention backend that this machine lacks is refused.

    Raises:
        InputError: missing or malformed file, malformed override, a value that the schema refuses, or an architecture
            that cannot honour the recipe; one line.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such recipe file; see recipes/ for examples")
    try:
        tree = OmegaConf.load(path)
        if not OmegaConf.is_dict(tree):
            raise InputError(f"{path}: a recipe is a mapping of keys")
        for item in overrides:
            _override(tree, item)
        plain = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a valid recipe: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    recipe = validate(plain, Recipe, str(path))
    _honoured(recipe, str(path), runs_here)
    return recipe


def _override(tree: DictConfig, item: str) -> None:
    """Set one key. The value takes the place of what was there: a mapping is not merged into the old one."""
    key, sep, text = item.partition("=")
    if not sep or not key:
        raise InputError(f"override '{item}': expected key.sub=value")
    try:
        OmegaConf.update(tree, key, yaml.safe_load(text), merge=False, force_add=True)
    except ConfigIndexError as error:
        there = error.full_key.rpartition("[")[0]
        count = len(OmegaConf.select(tree, there))
        raise InputError(f"override '{item}': {there} has {count} entries, 0 to {count - 1}; to add one, give all of"
                         f" them ({there}=[...])") from None  # fmt: skip
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError, AssertionError) as error:
        raise InputError(f"override '{item}': {str(error).splitlines()[0]}") from error


def _honoured(recipe: Recipe, where: str, runs_here: bool) -> None:
    """Refuse an attention backend that cannot run on this machine, and what the drafter's architecture cannot do,
    where its configuration is on this machine or is known.

    `draftkv.drafter.preflight` asks again, with the configuration itself, when a run begins.
    """
    from draftkv.cache.architecture import check_family, check_native_window
    from draftkv.shapes import family_of

    name = recipe.drafter.model or recipe.target.model
    family = family_of(name)
    try:
        if runs_here:
            recipe.backend()
        if family is None:
            return
        check_family(family, name)
        if recipe.export.native_window:
            check_native_window(family, recipe.eval.policies[recipe.eval.select])
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
