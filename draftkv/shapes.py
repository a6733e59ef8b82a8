"""Architecture facts that can be known without weights: what `--plan` and the dress rehearsal need.

They come from a local `config.json` (a folder, or one that the hub client already holds) or from a small table of the
models that the shipped recipes name. Anything else is `None`: a plan says that it does not know rather than guess.
"""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftkv.errors import InputError

BF16 = 2  # bytes


@dataclass(frozen=True)
class Shape:
    """One model. Counts are layers, heads or channels; `params` is a number of parameters.

    `full_attention_layers` are the layers whose cache a policy touches: linear-attention layers hold a state of fixed
    size and natively sliding layers a window of `sliding_window` entries. None: not known.
    """

    family: str
    layers: int | None = None
    full_attention_layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    params: float | None = None
    params_from: str = "not known"
    max_positions: int | None = None
    sliding_window: int | None = None


def _dense(family: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int,
           tied: bool, max_positions: int) -> Shape:
    shape = Shape(family, layers, layers, hidden, heads, kv_heads, head_dim, mlp, vocab, tied, None, "", max_positions)
    return replace(shape, params=dense_params(shape), params_from="the architecture")


def dense_params(shape: Shape) -> float | None:
    """Parameters of a plain decoder with a gated MLP (norms and biases left out); None when a number is missing."""
    s = shape
    if None in (s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.mlp, s.vocab, s.tied):
        return None
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    embeddings = s.vocab * s.hidden * (1 if s.tied else 2)
    return float(embeddings + s.layers * (attention + 3 * s.hidden * s.mlp))


# The hub ids that recipes/ names, from the published configurations. Sizes of the Qwen3.5 pair are those of the names.
KNOWN: dict[str, Shape] = {
    "embedded:smollm2-135m": _dense("llama", 30, 576, 9, 3, 64, 1536, 49152, True, 8192),
    "Qwen/Qwen3-0.6B": _dense("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True, 40960),
    "Qwen/Qwen3-8B": _dense("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False, 40960),
    "Qwen/Qwen3.5-4B": Shape(
        "qwen3_5", 32, 8, 2560, 16, 4, 256, 9216, 248320, True, 4e9, "the name", 262144),
    "Qwen/Qwen3.5-122B-A10B": Shape("qwen3_5_moe", vocab=248320, params=122e9, params_from="the name"),
}

# Families whose parameters `dense_params` counts.
DENSE = ("llama", "qwen3", "gemma3", "gemma3_text")


def shape_of(name: str) -> Shape | None:
    """The shape of a model given as a recipe gives it: folder, hub id, `embedded:NAME`, `rehearsal:NAME`.

    Nothing is downloaded. Returns None when nothing is known.

    Raises:
        InputError: a config.json that is not JSON.
    """
    if name.startswith("rehearsal:"):
        from draftkv.rehearsal import tiny_config

        return from_config(tiny_config(name).to_dict())
    path = _local_config(name)
    if path is None:
        return KNOWN.get(name)
    shape = from_config(_read_config(path))
    counted = _stored_params(path.parent)
    return replace(shape, params=counted, params_from="its weight files") if counted else shape


def family_of(name: str) -> str | None:
    """`model_type` of a model's text part, as far as it is known without loading a library; see `shape_of`."""
    path = None if name.startswith("rehearsal:") else _local_config(name)
    if path is not None:
        return from_config(_read_config(path)).family
    return KNOWN[name].family if name in KNOWN else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: a model's configuration is an object")
    return config


def _local_config(name: str) -> Path | None:
    path = Path(name).expanduser() / "config.json"
    if path.is_file():
        return path
    if name.count("/") == 1 and not Path(name).exists():
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(name, "config.json")
        except ValueError:  # not the form of a hub id
            return None
        return Path(cached) if isinstance(cached, str) else None
    return None


def from_config(config: dict[str, Any]) -> Shape:
    """Shape from the contents of a `config.json`; a multimodal one is read through its `text_config`."""
    family = config.get("model_type", "unknown")
    config = {**config, **(config.get("text_config") or {})}
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    shape = Shape(
        family=config.get("model_type", family),
        layers=config.get("num_hidden_layers"),
        full_attention_layers=_full_layers(config),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (hidden // heads if hidden and heads else None),
        mlp=config.get("intermediate_size") or config.get("moe_intermediate_size"),
        vocab=config.get("vocab_size"),
        tied=config.get("tie_word_embeddings"),
        max_positions=config.get("max_position_embeddings"),
        sliding_window=config.get("sliding_window"),
    )
    if shape.family not in DENSE:
        return shape
    return replace(shape, params=dense_params(shape), params_from="the architecture")


def _full_layers(config: dict[str, Any]) -> int | None:
    layers = config.get("num_hidden_layers")
    if kinds := config.get("layer_types"):
        return sum(kind == "full_attention" for kind in kinds)
    every = config.get("full_attention_interval") or config.get("sliding_window_pattern")
    return layers // every if layers and every else layers


def _stored_params(folder: Path) -> float | None:
    """Parameters in a folder's safetensors files, from their headers alone (8 bytes of length, then JSON)."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for key, tensor in header.items():
            if key != "__metadata__":
                size = 1
                for side in tensor["shape"]:
                    size *= side
                total += size
    return float(total) or None


def draft_kv_bytes(shape: Shape, entries: int) -> int | None:
    """Bytes of a bf16 key/value cache of `entries` entries in the full-attention layers, for one sequence.

    Natively sliding layers and linear-attention states are left out: no policy changes them. None: shape not known.
    """
    if None in (shape.full_attention_layers, shape.kv_heads, shape.head_dim):
        return None
    return shape.full_attention_layers * 2 * shape.kv_heads * shape.head_dim * BF16 * entries
