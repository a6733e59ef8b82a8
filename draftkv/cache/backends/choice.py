"""Which backend computes attention under a cache policy. Loads a kernel only to see whether it can be.

A backend is a module of this package with one function

    attend(query, front, tail, first, window, scale, sinks) -> [H, R, D]

    query: [H, R, D]. front: keys and values [G, F, D] that every row sees, or None. tail: keys and values [G, N, D];
    row i owns tail entry `first + i`, sees it and `window` entries before it (None: all). scale: factor on the logits.
    sinks: [H] learned logits of an entry without value, or None.

`sdpa` runs everywhere and is what the others are tested against. `flash` merges two flash-attn calls and needs half
precision; fp32 passes of the same model (evaluation without autocast) take sdpa. `flex` is FlexAttention, which has no
backward on the CPU. `auto` is flash where it can run, else sdpa.
"""

import importlib
from importlib import metadata

import torch

from draftkv.errors import InputError

# Names under which transformers knows them. None may contain "flash": transformers would take it for its own.
ATTENTIONS = {"sdpa": "draftkv", "flash": "draftkv_fa2", "flex": "draftkv_flex"}
FLASH_CAPABILITY, FLASH_VERSION = (8, 0), (2, 8)  # Ampere or newer


def chosen(asked: str, half: bool = True) -> str:
    """The backend that `drafter.attention` means on this machine.

    Args:
        half: whether any forward pass is in half precision.

    Raises:
        InputError: what was asked for cannot run here.
    """
    if asked == "auto":
        return "flash" if half and _missing("flash") is None else "sdpa"
    reason = _missing(asked)
    if reason is None and asked == "flash" and not half:
        reason = "needs half precision; set train.precision or eval.precision to bf16"
    if reason is not None:
        raise InputError(f"drafter.attention: '{asked}' {reason}; 'auto' takes what this machine has")
    return asked


def _missing(backend: str) -> str | None:
    """Why a backend cannot run on this machine; None: it can."""
    if backend == "sdpa":
        return None
    if backend == "flash":
        try:
            version = metadata.version("flash-attn")
        except metadata.PackageNotFoundError:
            return "is not installed (package flash-attn)"
        if tuple(map(int, version.split(".")[:2])) < FLASH_VERSION:
            return f"needs flash-attn {'.'.join(map(str, FLASH_VERSION))} or newer, here is {version}"
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if backend == "flash":
        if torch.cuda.get_device_capability() < FLASH_CAPABILITY:
            return "needs a CUDA device of compute capability 8.0 or newer"
        try:
            importlib.import_module("flash_attn.flash_attn_interface")
        except Exception as error:  # built for another torch: an undefined symbol, as a rule
            return f"cannot be loaded: {' '.join(str(error).split())[:150]}"
    return None


def described(backend: str) -> str:
    """One line about a backend, with the version of its library."""
    library = {"sdpa": "torch", "flash": "flash-attn", "flex": "torch"}[backend]
    text = {
        "sdpa": "scaled dot product attention",
        "flash": "two calls merged by log-sum-exp; fp32 passes through sdpa",
        "flex": "FlexAttention, compiled",
    }[backend]
    return f"{backend} ({text}; {library} {metadata.version(library)})"
