"""The folder of a run: `runs/NAME/`. One run at a time, one recipe for its whole life, and a record of what made it."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from draftkv.cache.backends.choice import described
from draftkv.errors import InputError, RunError
from draftkv.recipe import Recipe
from draftkv.serving import Engine

# Keys, with all below them, that may change between two starts of one run: they touch neither weights nor a number.
FREE_KEYS = ("why", "trackers", "export", "output", "engine.url", "engine.model", "engine.python", "engine.timeout_s",
             "engine.retries", "engine.concurrency", *(f"engine.options.{name}" for name in Engine.operational))
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "flash-attn",
            "flash-linear-attention", "causal-conv1d", "deepspeed")  # fmt: skip


def write_atomic(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: a killed process leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


@contextmanager
def writing(final: Path, draft: Path) -> Iterator[None]:
    """Write a folder as `draft`, which becomes `final` when it is whole: what fails leaves everything else as it was.

    Raises:
        RunError: whatever was raised inside, in one line; safetensors, torch and pyarrow each have their own kind of
            error for a full disk.
    """
    try:
        yield
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)  # on a full disk half a folder is in the way of the next try
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RunError(f"{final}: not written: {reason}; what was complete is kept") from error


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the run folder. The lock goes with the process, however it ends.

    Raises:
        RunError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise RunError(f"{folder}: another run ({holder}) works in this folder") from None
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {platform.node()}")
        handle.flush()
        yield


def claim(recipe: Recipe) -> None:
    """Write the resolved recipe, if the folder's recipe is the same or there is none yet.

    Raises:
        InputError: see `check_claim`.
    """
    check_claim(recipe)
    write_atomic(recipe.run_dir / "recipe.yaml", recipe.as_yaml())


def check_claim(recipe: Recipe) -> None:
    """Raises: InputError when the folder holds a run of another recipe; the text names the key and both values."""
    path = recipe.run_dir / "recipe.yaml"
    if path.is_file():
        before = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        change = first_change(before, recipe.model_dump(mode="json"))
        if change:
            raise InputError(f"{path}: {change}; give the recipe another name, or remove the folder to start again")


def first_change(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The first key whose value differs, as text; keys in FREE_KEYS may differ."""
    old, new = _flat(before), _flat(after)
    for key in [*new, *(k for k in old if k not in new)]:
        is_free = any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
        if not is_free and old.get(key) != new.get(key):
            return f"{key} was {old.get(key)!r} when this run began and is {new.get(key)!r} now"
    return None


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) or tree and isinstance(tree, list):  # an empty section is one without keys
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, value in items for k, v in _flat(value, f"{path}.{key}" if path else str(key)).items()}
    return {path: tree}


def provenance(recipe: Recipe, **facts: Any) -> dict[str, Any]:
    """What a reader needs to make the run again: versions, code, kernels, machine, data; no path of the machine."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"draftkv": metadata.version("draftkv"), "git": _git(), "python": platform.python_version(),
            "packages": versions, "machine": f"{platform.machine()}, {os.cpu_count()} cores", "argv": sys.argv[1:],
            "attention": described(recipe.backend()), "recipe": recipe.name, "seed": recipe.seed, **facts}  # fmt: skip


def write_provenance(recipe: Recipe, **facts: Any) -> None:
    """Write provenance.json; facts of an earlier start are kept unless given again."""
    path = recipe.run_dir / "provenance.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_atomic(path, json.dumps({**before, **provenance(recipe, **facts)}, indent=1))


def _git() -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "-C", root, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + (" with local changes" if dirty.stdout.strip() else "")
