"""Stored signals: the target's top-k log-probabilities and the mass of the rest, for every supervised position.

A store is a folder `{output}/signals/{key}`; like a rollout store its key is a hash of everything that decides its
content: the target's weights and dtype, tokenizer, template, the rollouts, k, temperature.

    manifest.json                 key, ingredients, number of shards; `complete` once all are there
    shard-00000.safetensors       ids [N, k] int32, logprobs [N, k] fp16, tail_logprob [N] fp32, starts [rows + 1]
    shard-00000.json              the manifest's key, row names, sha256 of the shard

Log-probabilities are normalised again when they are read, so that what fp16 rounds stays a distribution. A shard is
written beside its place and renamed; one that is damaged or foreign is refused by name.
"""

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftkv import cli, models
from draftkv.distill.schedule import Item
from draftkv.embedded import lock
from draftkv.errors import InputError
from draftkv.recipe import Recipe
from draftkv.rundir import writing
from draftkv.teacher.engines import engine_ingredient, open_engine
from draftkv.teacher.rollouts import Rollouts, content_hash
from draftkv.teacher.signals import TopK

FORMAT = 1
SHARD_ROWS = 32


def row_name(row: dict[str, Any]) -> str:
    return f"{row['row_id']}@{row['temperature']:g}"


@dataclass(frozen=True)
class SignalPlan:
    """Which store a recipe asks for, and the rows of each shard."""

    folder: Path
    key: str
    ingredients: dict[str, Any]
    rows: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, recipe: Recipe, rollouts: Rollouts, vocab: int) -> "SignalPlan":
        """Args: vocab: ids that target and drafter share; the cut comes before the top-k."""
        signal = recipe.signal
        about = json.loads((rollouts.path / "manifest.json").read_text(encoding="utf-8"))["ingredients"]
        ingredients = {
            "format": FORMAT, "rollouts": rollouts.key, "vocab": vocab, "dtype": recipe.target.dtype,
            "signal": signal.model_dump(mode="json", exclude={"source"}),
            **{name: about[name] for name in ("weights", "tokenizer", "chat_template")},
            **engine_ingredient(recipe),
        }  # fmt: skip
        key = content_hash(ingredients)[:16]
        return cls(Path(recipe.output) / "signals" / key, key, ingredients, tuple(rollouts.rows()))

    @property
    def shards(self) -> list[Sequence[dict[str, Any]]]:
        return [self.rows[i : i + SHARD_ROWS] for i in range(0, len(self.rows), SHARD_ROWS)]

    def file(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.safetensors"

    def about(self, index: int) -> dict[str, Any]:
        """What a shard says of itself.

        Raises:
            InputError: it is missing, damaged, or of another store; the message names the file.
        """
        file = self.file(index).with_suffix(".json")
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            key, names, _ = about["key"], about["rows"], about["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: not a shard's description; delete it and run data/signals.py again") from error
        if key != self.key or names != [row_name(row) for row in self.shards[index]]:
            raise InputError(f"{file}: belongs to another store ({key}); delete it and run data/signals.py again")
        return about


def write_signals(recipe: Recipe, plan: SignalPlan, progress: bool = True) -> None:
    """Write the missing shards of a store with the recipe's engine; a finished store is left as it is.

    Raises:
        InputError: an existing shard of another store.
        RunError: a shard could not be written (a full disk, an engine out of reach); those before it are kept.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock(plan.folder / ".lock"):
        missing = [i for i in range(len(plan.shards)) if not plan.file(i).with_suffix(".json").is_file()]
        for index in set(range(len(plan.shards))) - set(missing):
            plan.about(index)
        if missing:
            _write_missing(recipe, plan, missing, progress)
        engines = [plan.about(index).get("engine") for index in range(len(plan.shards))]
        _write_json(plan.folder / "manifest.json", {
            "key": plan.key, "complete": True, "shards": len(plan.shards), "ingredients": plan.ingredients,
            "engines": [e for i, e in enumerate(engines) if e and e not in engines[:i]],
        })  # fmt: skip


def _write_missing(recipe: Recipe, plan: SignalPlan, missing: list[int], progress: bool) -> None:
    with open_engine(recipe) as engine:
        for index in cli.track("signals", missing) if progress else missing:
            began = time.monotonic()
            parts = engine.score(plan.shards[index], plan.ingredients["vocab"])
            tensors = {
                "ids": torch.cat([p.ids for p in parts]).int(),
                "logprobs": torch.cat([p.logprobs for p in parts]).half(),
                "tail_logprob": torch.cat([p.tail_logprob for p in parts]).float(),
                "starts": torch.tensor([0, *(len(p) for p in parts)]).cumsum(0),
            }  # fmt: skip
            tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            write_shard(plan, index, tensors, time.monotonic() - began, engine.about)


def write_shard(
    plan: SignalPlan, index: int, tensors: dict[str, Tensor], seconds: float, engine: dict[str, Any]
) -> None:
    """The tensors first, then the description that makes them count."""
    final = plan.file(index)
    beside = final.with_suffix(".tmp")
    with writing(final, beside):
        save_file(tensors, beside)
        about = {"key": plan.key, "rows": [row_name(row) for row in plan.shards[index]],
                 "sha256": models.file_hash(beside), "bytes": beside.stat().st_size, "seconds": seconds,
                 "tokens": len(tensors["ids"]), "engine": engine}  # fmt: skip
        os.replace(beside, final)
        _write_json(final.with_suffix(".json"), about)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    beside = file.with_suffix(".json.tmp")
    beside.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(beside, file)


class StoredTeacher:
    """Signals of a finished store, read ahead of the step that needs them. Takes the target's place in training.

    Raises:
        InputError: the store is not finished, or a shard is damaged or foreign; the message names the file.
    """

    def __init__(self, plan: SignalPlan, temperature: float, device: torch.device):
        manifest = plan.folder / "manifest.json"
        if not manifest.is_file():
            raise InputError(f"this recipe's signals are not finished ({plan.folder}); run data/signals.py with it")
        self.temperature, self.device = temperature, device
        self.places: dict[str, tuple[Any, int, int]] = {}
        for index, rows in enumerate(plan.shards):
            about, file = plan.about(index), plan.file(index)
            if not file.is_file() or models.file_hash(file) != about["sha256"]:
                raise InputError(f"{file}: does not match its hash; delete it and its .json, run data/signals.py again")
            shard = safe_open(file, "pt")
            starts = shard.get_tensor("starts").tolist()
            for i, row in enumerate(rows):
                if starts[i + 1] - starts[i] != len(row["response_ids"]) - 1:
                    raise InputError(f"{file}: row {row_name(row)} has {starts[i + 1] - starts[i]} positions")
                self.places[row_name(row)] = (shard, starts[i], starts[i + 1])
        self.reader, self.ahead = ThreadPoolExecutor(1), {}

    def read(self, row: dict[str, Any]) -> TopK:
        """[R - 1] signal of one row, in fp32 and normalised, on the CPU."""
        shard, start, stop = self.places[row_name(row)]
        ids, logprobs, tail = (shard.get_slice(n)[start:stop] for n in ("ids", "logprobs", "tail_logprob"))
        logprobs, tail = logprobs.float(), tail.float()
        total = torch.logaddexp(logprobs.logsumexp(-1), tail)
        return TopK(ids.long(), logprobs - total[:, None], tail - total, self.temperature)

    def expect(self, items: Sequence[Item]) -> None:
        """Start reading what a coming step needs."""
        wanted = {row_name(item.row): item.row for item in items}
        self.ahead = {name: self.ahead.get(name) or self.reader.submit(self.read, row) for name, row in wanted.items()}

    def _take(self, row: dict[str, Any]) -> TopK:
        future: Future | None = self.ahead.get(row_name(row))
        return self.read(row) if future is None else future.result()

    def signal(self, items: Sequence[Item], owners: Sequence[tuple[int, int, float]]) -> TopK:
        """As `Teacher.signal`: one row of the signal per supervised row of the pass."""
        once = [self._take(item.row) for item in items]
        parts = [once[index] for _, index, _ in owners]
        ids, logprobs, tail = (torch.cat([getattr(p, n) for p in parts]).to(self.device)
                               for n in ("ids", "logprobs", "tail_logprob"))
        return TopK(ids, logprobs, tail, self.temperature)
