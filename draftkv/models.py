"""Models and tokenizers: where they lie, how they are loaded, and how a drafter is cut from its target.

A model id is a local folder, `embedded:NAME` (see `draftkv.embedded`), `rehearsal:NAME` (tiny random weights, see
`draftkv.rehearsal`) or a hub id. Only a hub id may use the network, and only when the hub answers.
"""

import contextlib
import copy
import functools
import hashlib
import json
import os
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from draftkv.errors import InputError
from draftkv.recipe import Drafter, Model

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Weight files up to this many bytes in all are hashed whole; of larger ones, SAMPLES pieces of each file.
HASH_LIMIT, SAMPLES, SAMPLE_BYTES, SMALL_BYTES = 8 * 2**30, 64, 1 << 16, 4 << 20
HEADER_BYTES = 100 << 20  # a safetensors header is no longer


def resolve(model_id: str) -> str:
    """What `from_pretrained` takes: a local folder, or a hub id.

    Raises:
        InputError: a folder that is missing or holds no model, an unknown embedded name, or no kind of id at all.
    """
    scheme, _, name = model_id.partition(":")
    if name and scheme == "embedded":
        from draftkv import embedded

        return embedded.model_path(name)
    if name and scheme == "rehearsal":
        from draftkv import rehearsal

        return rehearsal.model_path(name)
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{model_id}: this folder holds no model (no config.json)")
        return str(folder)
    if folder.exists():
        raise InputError(f"{model_id}: a model is a folder, this is a file")
    if not HUB_ID.fullmatch(model_id):
        raise InputError(f"{model_id}: no such folder, and not a hub id (ORGANISATION/NAME) or embedded:NAME")
    return model_id


def load_config(model_id: str, revision: str | None = None) -> PretrainedConfig:
    """Raises: InputError, see `_load`."""
    return _load(AutoConfig, model_id, revision)


def load_tokenizer(model_id: str, revision: str | None = None) -> Tokenizer:
    """Raises: InputError, see `_load`."""
    return _load(AutoTokenizer, model_id, revision)


def load_model(
    model_id: str, revision: str | None = None, dtype: str | torch.dtype = "float32", attention: str = "sdpa"
) -> PreTrainedModel:
    """A causal language model in eval mode, on the CPU.

    Args:
        dtype: of the weights, "float32" or "bfloat16".
        attention: a name of transformers' `AttentionInterface`; "sdpa" becomes "eager" where an architecture has no
            such path (GPT-OSS, for its attention sinks).

    Raises:
        InputError: no such model, weights missing from the files, logits that are soft-capped, or a backend that is
            not installed.
    """
    config = load_config(model_id, revision)
    refuse_softcapping(config, model_id)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if attention == "sdpa" and model_class is not None and not model_class._supports_sdpa:
        attention = "eager"
    model, info = _load(
        AutoModelForCausalLM, model_id, revision,
        dtype=dtype, attn_implementation=attention, output_loading_info=True,
    )  # fmt: skip
    if info["missing_keys"]:
        raise InputError(
            f"{model_id}: the weight files lack {len(info['missing_keys'])} tensors,"
            f" such as {min(info['missing_keys'])}; they would be random"
        )
    return model.eval()


def refuse_softcapping(config: PretrainedConfig, model_id: str) -> None:
    """Raises: InputError for soft-capped logits: neither the chunked head nor the cache policies apply the cap."""
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        cap = getattr(config.get_text_config(), key, None)
        if cap:
            raise InputError(f"{model_id}: {key} = {cap}: models with soft-capped logits are not supported")


def _load(loader: Any, model_id: str, revision: str | None, **kwargs: Any) -> Any:
    """`loader.from_pretrained`, with one-line errors.

    Raises:
        InputError: the folder or hub id does not exist, cannot be reached, or is not readable.
    """
    source = resolve(model_id)
    is_local = Path(source).is_dir()
    offline = is_local or not hub_is_reachable()
    if not is_local:
        kwargs["revision"] = revision
    try:
        with quiet():
            return loader.from_pretrained(source, local_files_only=offline, **kwargs)
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        if offline and not is_local:
            raise InputError(
                f"{model_id}: no such local folder, not in the local hub cache, and the hub cannot be reached;"
                " download it first (`hf download`) or give a folder"
            ) from error
        raise InputError(f"{model_id}: cannot be loaded: {reason}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No loading bars and no advice of transformers while a command prints its own progress."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@functools.cache
def hub_is_reachable() -> bool:
    """Whether the hub's host takes connections. Asked once: without it every file costs half a minute of retries."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    url = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if urllib.request.getproxies().get(url.scheme):
        return True  # the proxy knows; a direct connection would prove nothing
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=3).close()
        return True
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------- the drafter


def make_drafter(target_id: str, revision: str | None = None, layers: list[int] | None = None) -> PreTrainedModel:
    """A drafter cut from its target: embeddings, final norm, head and the listed layers, in fp32.

    Args:
        layers: layers of the target to keep, ascending; None keeps all.

    Raises:
        InputError: see `load_model`; layers that the target does not have, or none with full attention among them.
    """
    return keep_layers(load_model(target_id, revision, "float32"), layers, name=target_id)


def keep_layers(model: PreTrainedModel, layers: list[int] | None, name: str = "model") -> PreTrainedModel:
    """Drop all layers of `model` but the listed ones, in place; its configuration follows.

    Raises:
        InputError: see `make_drafter`.
    """
    if layers is None:
        return model
    check_layers(model.config, layers, name)
    config = model.config.get_text_config()
    count = config.num_hidden_layers

    stack = decoder_layers(model)
    kept = [stack[i] for i in layers]
    for new_index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = new_index
    del stack[:]
    stack.extend(kept)
    # Every per-layer list of the configuration (layer_types and its relatives) is as long as the stack was.
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count and "layer" in key:
            setattr(config, key, [value[i] for i in layers])
    config.num_hidden_layers = len(layers)
    return model


def check_layers(config: PretrainedConfig, layers: list[int], name: str) -> None:
    """Raises: InputError, see `make_drafter`."""
    config = config.get_text_config()
    count = config.num_hidden_layers
    if not layers or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < count:
        raise InputError(f"drafter.layers {layers}: {name} has layers 0 to {count - 1}; list some of them, ascending")
    kinds = getattr(config, "layer_types", None)
    if kinds and "full_attention" in kinds and "full_attention" not in [kinds[i] for i in layers]:
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        raise InputError(f"drafter.layers {layers}: no full-attention layer among them; those are {full}")


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The stack of decoder layers, wherever an architecture keeps it."""
    return model.get_decoder().layers


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """A separate model with the same weights."""
    return copy.deepcopy(model)


# ------------------------------------------------------------------------------------------- agreement and identity


def check_same_tokens(target: Tokenizer, drafter: Tokenizer) -> int:
    """Compare the string of every id and return the size of the shared vocabulary.

    The one rule for padding: the shared vocabulary is the ids below min(len(target), len(drafter)), where len counts
    the ids that a tokenizer knows. Rows of embedding and head beyond it (padding to a round number, or extra tokens of
    one side) are cut from losses and from what a drafter may propose.

    Raises:
        InputError: an id below that size that stands for two different strings.
    """
    size = min(len(target), len(drafter))
    ours, theirs = (t.convert_ids_to_tokens(list(range(size))) for t in (target, drafter))
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise InputError(
                f"target and drafter disagree on token {index}: {a!r} for the target, {b!r} for the drafter;"
                " a drafter must use its target's vocabulary"
            )
    return size


def check_pair(target: Model, drafter: Drafter, longest: int) -> int:
    """Check a target and its drafter before any weights are loaded; returns the size of the shared vocabulary.

    Args:
        longest: prompt and response together, in tokens.

    Raises:
        InputError: a model that is missing, or whose limit is below `longest`; two vocabularies that disagree.
    """
    pairs = [(target.model, target.revision)]
    if drafter.model is not None:
        pairs.append((drafter.model, drafter.revision))
    for model_id, revision in pairs:
        config = load_config(model_id, revision)
        refuse_softcapping(config, model_id)
        if longest > model_limit(config):
            raise InputError(
                f"{model_id}: prompts.max_prompt_tokens + rollouts.max_new_tokens = {longest} tokens,"
                f" but this model's limit is {model_limit(config)}"
            )
    tokenizers = [load_tokenizer(*pair) for pair in pairs]
    return check_same_tokens(tokenizers[0], tokenizers[-1])


def model_limit(config: PretrainedConfig) -> int:
    """The longest sequence, prompt and response together, in tokens."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


@functools.cache
def weights_identity(model_id: str, revision: str | None = None) -> dict[str, str]:
    """What tells two sets of weights apart: file -> sha256 of a local model, or the commit of a hub model.

    Of more than `HASH_LIMIT` bytes in all, each file is known by pieces of it (`sampled_hash`). Copies of the same
    files are the same weights, wherever they lie.

    Raises:
        InputError: see `load_config`.
    """
    source = resolve(model_id)
    if not Path(source).is_dir():
        config = load_config(model_id, revision)
        return {"hub": model_id, "commit": str(getattr(config, "_commit_hash", None) or revision)}
    files = sorted(Path(source).glob("*.safetensors")) + sorted(Path(source).glob("*.bin"))
    too_large = sum(f.stat().st_size for f in files) > HASH_LIMIT
    identity = {"config.json": file_hash(Path(source) / "config.json")}
    for file in files:
        identity[file.name] = sampled_hash(file) if too_large else file_hash(file)
    return identity


def sampled_hash(path: Path) -> str:
    """sha256, in hex, of a file's size, of pieces that are spread over it, and of the beginnings of its small tensors
    (norms, biases, routers), which lie between the pieces. What changes a few large matrices alone may go unseen."""
    size = path.stat().st_size
    pieces = [(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1), SAMPLE_BYTES) for i in range(SAMPLES)]
    with open(path, "rb") as handle:
        with contextlib.suppress(ValueError):  # no safetensors after all; loading it says so
            length = int.from_bytes(handle.read(8), "little")
            tensors = json.loads(handle.read(min(length, HEADER_BYTES)))
            spans = [about["data_offsets"] for name, about in tensors.items() if name != "__metadata__"]
            pieces += [(8 + length + start, min(stop - start, 4096)) for start, stop in sorted(spans)
                       if stop - start <= SMALL_BYTES]  # fmt: skip
        result = hashlib.sha256(str(size).encode())
        for start, count in pieces:
            handle.seek(start)
            result.update(handle.read(count))
    return f"sampled:{result.hexdigest()}"


def file_hash(path: Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
