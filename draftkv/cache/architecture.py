"""What an architecture can honour, read from its configuration before any weight is loaded.

transformers is imported late: a recipe is checked against `SUPPORTED` when it is read, which has to be quick.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from draftkv.cache.policy import Policy
from draftkv.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Architectures whose layers hand attention to transformers' interface with the arguments that the kernel needs; each
# is in the parity tests. Others are refused rather than trained under masks that nobody has checked.
SUPPORTED = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "qwen3_5_text": "Qwen3.5",
    "gemma3_text": "Gemma 3",
    "gpt_oss": "GPT-OSS",
    "nemotron_h": "Nemotron-H",
}

# Architectures in which an engine honours a drafter's `sliding_window` (tried: vLLM 0.32, see the model card). In
# others the key is ignored, so a native-window export would promise what is not done.
NATIVE_WINDOW = {"llama"}


def layer_kinds(config: "PretrainedConfig") -> list[str]:
    """For each layer: "full", "sliding", "recurrent" or "other"."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

    def kind(layer: object) -> str:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            return "recurrent"
        if isinstance(layer, DynamicLayer):
            return "sliding" if layer.is_sliding else "full"
        return "other"

    return [kind(layer) for layer in DynamicCache(config=config).layers]


def check_family(model_type: str, name: str) -> None:
    """Raises: InputError for a `model_type` that is not in the parity tests."""
    # A multimodal configuration names its text part differently (qwen3_5 holds qwen3_5_text).
    if model_type not in SUPPORTED and f"{model_type}_text" not in SUPPORTED:
        raise InputError(
            f"{name}: cache policies are not proven on '{model_type}'; supported: {', '.join(SUPPORTED.values())}"
        )


def check_drafter(config: "PretrainedConfig", name: str) -> None:
    """Refuse a drafter that cache policies were not proven on.

    Raises:
        InputError: the architecture is not in the parity tests, or it has no full-attention layer to compress.
    """
    text = config.get_text_config(decoder=True)
    check_family(text.model_type, name)
    if "full" not in layer_kinds(text):
        raise InputError(f"{name}: no full-attention layer, so there is no cache for a policy to compress")
    if getattr(text, "attention_dropout", 0):
        raise InputError(f"{name}: attention_dropout is {text.attention_dropout}; it must be 0 under a cache policy")


def check_policies(config: "PretrainedConfig", name: str, policies: Iterable[Policy]) -> None:
    """Raises: InputError for a policy that leaves every full-attention layer of the drafter dense."""
    kinds = layer_kinds(config.get_text_config(decoder=True))
    last = max(i for i, kind in enumerate(kinds) if kind == "full")
    for policy in policies:
        if not policy.is_full and policy.dense_layers > last:
            raise InputError(f"{name}: '{policy.label}' keeps layers 0 to {policy.dense_layers - 1} dense, all that it"
                             f" could compress (the last full-attention layer is {last})")  # fmt: skip


def check_native_window(model_type: str, policy: Policy) -> None:
    """Refuse a native-window export that no engine would honour.

    Raises:
        InputError: an architecture whose window engines ignore, or a policy that is not a plain window.
    """
    if model_type not in NATIVE_WINDOW:
        known = ", ".join(sorted(NATIVE_WINDOW))
        raise InputError(f"native window: engines ignore the drafter's on '{model_type}'; tried and honoured: {known}")
    if policy.scorer.kind != "none" or policy.sinks or not isinstance(policy.budget, int):
        raise InputError(f"native window: '{policy.label}' is not a plain window; choose an swa policy (eval.select)")
