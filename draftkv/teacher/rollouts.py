"""The rollout store: what the target answered, written once and read by training and evaluation.

A store is a folder `{output}/rollouts/{key}`; the key is a hash of everything that decides its content (the target's
weights, tokenizer and chat template, sampling, prompts), so a changed ingredient is another store, never silent reuse.

    manifest.json         key, ingredients, counts; `complete` once every response is there
    shard-00000/ ...      one batch each, a `datasets` folder, with its hash and the manifest's key in shard.json

Shards are written beside their place and renamed, so a killed run loses one batch at most and the next run goes on.
Later turns of a conversation are written in rounds: a round's prompts hold the answers of the round before.
"""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, Features, List, Value, concatenate_datasets, load_from_disk

from draftkv import cli, models
from draftkv.embedded import lock
from draftkv.errors import InputError
from draftkv.recipe import Recipe
from draftkv.rundir import writing
from draftkv.teacher.engine import Request, Response, batches, repeated_share, row_seed
from draftkv.teacher.engines import TeacherEngine, engine_ingredient, open_engine
from draftkv.teacher.prompts import Prompt, PromptSet, load_prompts, next_turn, too_long

FORMAT = 1
MIN_RESPONSE = 2  # a shorter response has no drafted token to learn from or to score
Split = Literal["train", "eval"]

FEATURES = Features({
    "row_id": Value("string"),
    "source": Value("string"),
    "category": Value("string"),
    "temperature": Value("float64"),
    "finish_reason": Value("string"),
    "prompt_ids": List(Value("int32")),
    "response_ids": List(Value("int32")),
    "response_logprobs": List(Value("float32")),
    "response_logprobs_t1": List(Value("float32")),
    "repeat_8": Value("float32"),
    "repeat_32": Value("float32"),
})  # fmt: skip


@dataclass(frozen=True)
class Rollouts:
    """A complete store.

    `counts` holds `used` (rows for training and evaluation) and `skipped` (reason -> rows: prompts that were not used,
    and responses that are in the store but too short to use).
    """

    key: str
    path: Path
    dataset: Dataset
    counts: dict[str, Any]

    def rows(self, temperature: float | None = None) -> list[dict[str, Any]]:
        """Usable rows, sorted by row_id and temperature; only those of one temperature if it is given."""
        chosen = [
            row for row in self.dataset.to_list()
            if len(row["response_ids"]) >= MIN_RESPONSE
            and (temperature is None or abs(row["temperature"] - temperature) < 1e-6)
        ]  # fmt: skip
        return sorted(chosen, key=lambda row: (row["row_id"], row["temperature"]))


@dataclass
class Job:
    """One response to write: a prompt at a temperature."""

    prompt: Prompt
    temperature: float


def plan_rollouts(recipe: Recipe) -> dict[Split, "_Plan"]:
    """Check the models and read the prompts of both splits, without any weights: what is wrong with the held-out
    prompts must not show hours later, when the training rollouts are written.

    Raises:
        InputError: bad prompts or models.
    """
    return {"train": _Plan(recipe, "train"), "eval": _Plan(recipe, "eval")}


def ensure_rollouts(recipe: Recipe, split: Split, progress: bool = True, plan: "_Plan | None" = None) -> Rollouts:
    """Write what is missing of a split's rollouts and return them; a finished store is only read.

    Raises:
        InputError: bad prompts or models (before any weights are loaded), or a store that is damaged.
        RunError: a batch could not be written (a full disk); the batches before it are kept.
    """
    plan = plan or _Plan(recipe, split)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock(plan.folder / ".lock"):
        if not _is_finished(plan):
            _write_store(plan, progress)
    return load_rollouts(recipe, split, plan=plan)


def load_rollouts(recipe: Recipe, split: Split, plan: "_Plan | None" = None) -> Rollouts:
    """Read a split's rollouts.

    Raises:
        InputError: not written yet, or damaged; the message says what to do.
    """
    plan = plan or _Plan(recipe, split)
    manifest = read_manifest(plan.folder, plan.key)
    if manifest is None or not manifest["complete"]:
        state = "are not finished" if manifest else "have not been written"
        raise InputError(f"the {split} rollouts of this recipe {state} ({plan.folder}); run data/rollouts.py with it")
    shards = [read_shard(plan.folder, index, plan.key) for index in range(manifest["shards"])]
    return Rollouts(plan.key, plan.folder, concatenate_datasets(shards), manifest["counts"])


class _Plan:
    """What a store of a split must hold: checked prompts, ingredients, key and folder. Loads no weights."""

    def __init__(self, recipe: Recipe, split: Split):
        self.recipe, self.split = recipe, split
        longest = recipe.prompts.max_prompt_tokens + recipe.rollouts.max_new_tokens
        models.check_pair(recipe.target, recipe.drafter, longest)
        self.tokenizer = models.load_tokenizer(recipe.target.model, recipe.target.revision)
        source = recipe.prompts.train if split == "train" else recipe.prompts.eval
        self.prompts: PromptSet = load_prompts(source, self.tokenizer, recipe.prompts.max_prompt_tokens, split)
        given = recipe.rollouts.train_temperatures if split == "train" else recipe.rollouts.eval_temperatures
        self.temperatures = sorted(set(given))
        self.ingredients = self._ingredients()
        self.key = content_hash(self.ingredients)[:16]
        self.folder = Path(recipe.output) / "rollouts" / self.key

    def _ingredients(self) -> dict[str, Any]:
        rollouts, target = self.recipe.rollouts, self.recipe.target
        return {
            "format": FORMAT,
            "split": self.split,
            "weights": models.weights_identity(target.model, target.revision),
            "tokenizer": content_hash(self.tokenizer.get_vocab()),
            "chat_template": content_hash(self.tokenizer.chat_template),
            # The batch size decides which rows share a shard, and (by float noise) may decide a token.
            "sampling": {
                "temperatures": self.temperatures, "max_new_tokens": rollouts.max_new_tokens,
                "batch_size": rollouts.batch_size, "dtype": rollouts.dtype, "seed": rollouts.seed,
                "max_prompt_tokens": self.recipe.prompts.max_prompt_tokens,
            },
            "prompts": content_hash([
                [p.row_id, p.prompt_ids, p.source, p.category, p.later_turns] for p in self.prompts.prompts
            ]),
            **engine_ingredient(self.recipe),
        }  # fmt: skip

    def first_round(self) -> list[Job]:
        return [Job(prompt, t) for prompt in self.prompts.prompts for t in self.temperatures]

    def next_round(self, jobs: list[Job], answers: dict[tuple[str, float], list[int]], skipped: Counter) -> list[Job]:
        """The following turns of the conversations in `jobs` that have one."""
        result = []
        for job in jobs:
            if job.prompt.later_turns:
                ids = answers[job.prompt.row_id, job.temperature]
                answer = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
                turn = next_turn(job.prompt, answer, self.tokenizer)
                reason = too_long(len(turn.prompt_ids), self.recipe.prompts.max_prompt_tokens)
                if reason is None:
                    result.append(Job(turn, job.temperature))
                else:
                    skipped[f"later turn {reason}"] += 1 + len(turn.later_turns)
        return result


def _is_finished(plan: _Plan) -> bool:
    manifest = read_manifest(plan.folder, plan.key)
    if manifest is None or not manifest["complete"]:
        return False
    return all(shard_folder(plan.folder, i).exists() for i in range(manifest["shards"]))


def _write_store(plan: _Plan, progress: bool) -> None:
    """Write every missing shard, round by round, then the finished manifest."""
    for left in plan.folder.glob("*.tmp"):  # of a run that was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    write_manifest(plan, shards=0, counts={}, complete=False)
    jobs, skipped = plan.first_round(), Counter(plan.prompts.skipped)
    shards: list[Dataset] = []
    with open_engine(plan.recipe) as engine:
        while jobs:
            written = _write_round(plan, jobs, len(shards), engine, progress)
            shards += written
            answers = {(r["row_id"], r["temperature"]): r["response_ids"] for shard in written for r in shard.to_list()}
            jobs = plan.next_round(jobs, answers, skipped)
    lengths = [len(ids) for shard in shards for ids in shard["response_ids"]]
    short = sum(length < MIN_RESPONSE for length in lengths)
    if short:
        skipped[f"response shorter than {MIN_RESPONSE} tokens"] = short
    counts = {"used": len(lengths) - short, "skipped": dict(skipped)}
    write_manifest(plan, shards=len(shards), counts=counts, complete=True)


def _write_round(plan: _Plan, jobs: list[Job], first: int, engine: TeacherEngine, progress: bool) -> list[Dataset]:
    """Write the missing shards of one round and return all of its shards; they are numbered from `first`."""
    seed, sampling = plan.recipe.rollouts.seed, plan.recipe.rollouts
    requests = [
        Request(j.prompt.prompt_ids, j.temperature, row_seed(seed, j.prompt.row_id, j.temperature)) for j in jobs
    ]
    groups = list(enumerate(batches(requests, sampling.batch_size), first))
    missing = [(index, group) for index, group in groups if not shard_folder(plan.folder, index).exists()]
    title = f"{plan.split} rollouts"
    if progress and len(missing) < len(groups):
        cli.say(f"{title}: {len(groups) - len(missing)} of {len(groups)} batches are already in {plan.folder}")
    for index, group in cli.track(title, missing) if progress else missing:
        began = time.monotonic()
        responses = engine.write([requests[i] for i in group], sampling.max_new_tokens)
        rows = to_rows([jobs[i] for i in group], responses)
        write_shard(plan.folder, index, plan.key, rows, time.monotonic() - began, engine.about)
    return [read_shard(plan.folder, index, plan.key) for index, _ in groups]


def to_rows(jobs: list[Job], responses: list[Response]) -> list[dict[str, Any]]:
    """Rows of the store, in the shape of `FEATURES`."""
    return [
        {
            "row_id": job.prompt.row_id,
            "source": job.prompt.source,
            "category": job.prompt.category,
            "temperature": job.temperature,
            "finish_reason": response.finish_reason,
            "prompt_ids": job.prompt.prompt_ids,
            "response_ids": response.ids,
            "response_logprobs": response.logprobs,
            "response_logprobs_t1": response.logprobs_t1,
            "repeat_8": repeated_share(response.ids, 8),
            "repeat_32": repeated_share(response.ids, 32),
        }
        for job, response in zip(jobs, responses, strict=True)
    ]


# ------------------------------------------------------------------------------------------------- files of the store


def content_hash(value: Any) -> str:
    """sha256 of a value's JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def read_manifest(folder: Path, key: str) -> dict[str, Any] | None:
    """The manifest of a store, or None when there is none yet.

    Raises:
        InputError: unreadable, or of another store.
    """
    file = folder / "manifest.json"
    if not file.is_file():
        return None
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found, _, _ = content_hash(manifest["ingredients"])[:16], manifest["complete"], manifest["shards"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: not a manifest of a rollout store; delete the folder to write it again") from error
    if found != key or manifest.get("key") != key:
        raise InputError(f"{file}: belongs to another store ({found}); delete the folder to write it again")
    return manifest


def write_manifest(plan: _Plan, shards: int, counts: dict, complete: bool) -> None:
    target = plan.recipe.target
    # Each shard names the engine that wrote it: a run that goes on may find another release of it.
    engines = [shard_about(plan.folder, index).get("engine") for index in range(shards)]
    about = {"target": target.model, "revision": target.revision,
             "engines": [e for i, e in enumerate(engines) if e and e not in engines[:i]]}  # fmt: skip
    content = {
        "key": plan.key, "complete": complete, "shards": shards, "counts": counts,
        "about": about, "ingredients": plan.ingredients,
    }  # fmt: skip
    beside = plan.folder / "manifest.json.tmp"
    beside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, plan.folder / "manifest.json")


def shard_folder(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}"


def write_shard(
    folder: Path, index: int, key: str, rows: list[dict[str, Any]], seconds: float, engine: dict[str, Any]
) -> None:
    """Write one batch beside its place and rename it."""
    place = shard_folder(folder, index)
    beside = place.with_suffix(".tmp")
    with writing(place, beside):
        Dataset.from_list(rows, features=FEATURES).save_to_disk(beside)
        hashes = {f.name: models.file_hash(f) for f in sorted(beside.glob("*.arrow"))}
        about = {"key": key, "index": index, "rows": len(rows), "seconds": seconds, "engine": engine,
                 "files": hashes}  # fmt: skip
        (beside / "shard.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    os.rename(beside, place)


def shard_about(folder: Path, index: int) -> dict[str, Any]:
    """What a shard says of itself: rows, seconds it took, hashes of its files."""
    return json.loads((shard_folder(folder, index) / "shard.json").read_text(encoding="utf-8"))


def read_shard(folder: Path, index: int, key: str) -> Dataset:
    """Raises: InputError for a shard that is missing, damaged, or of another store."""
    place = shard_folder(folder, index)
    try:
        about = shard_about(folder, index)
        if about["key"] != key or about["index"] != index:
            raise InputError(f"{place}: belongs to another store ({about['key']}); delete it to write it again")
        if {f.name: models.file_hash(f) for f in place.glob("*.arrow")} != about["files"]:
            raise InputError(f"{place}: its data do not match its hash; delete it to write it again")
        return load_from_disk(str(place))
    except InputError:
        raise
    except Exception as error:  # whatever a damaged file makes its readers raise
        raise InputError(f"{place}: damaged ({type(error).__name__}); delete it to write it again") from error


def seconds_spent(store: Rollouts) -> float:
    """Time the target took to write a store, over all runs."""
    return sum(shard_about(store.path, index)["seconds"] for index in range(len(list(store.path.glob("shard-*")))))


def held_out_rows(recipe: Recipe, rollouts: Rollouts) -> list[dict[str, Any]]:
    """The first `eval.rows` held-out rows of every temperature; rows without a drafted token cannot be scored.

    Raises:
        InputError: no usable row at one of `rollouts.eval_temperatures`.
    """
    rows: list[dict[str, Any]] = []
    for temperature in recipe.rollouts.eval_temperatures:
        usable = rollouts.rows(temperature)
        if not usable:
            raise InputError(f"{rollouts.path}: no usable held-out row at temperature {temperature}; {rollouts.counts}")
        rows += usable[: recipe.eval.rows]
    return rows
