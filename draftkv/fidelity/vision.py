"""Vision-language models under cache policies: the prefix is an image and a prompt.

A policy touches the full-attention layers of the language model only; the vision tower keeps its own attention and runs
once per image. Positions are explicit everywhere, as the project asks: Qwen's image tokens have three coordinates, so
positions in the cache (0, 1, 2, ...) are translated into them here, and the caches need not know.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor, PretrainedConfig, PreTrainedModel

from draftkv import models
from draftkv.cache.architecture import layer_kinds
from draftkv.cache.attention import ATTENTION
from draftkv.errors import InputError

# model_type -> the language models that the tests cover inside it.
FAMILIES = {
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "llava_next": ("mistral", "llama"),
}
# What a processor may return that belongs to the image; the rest belongs to the tokens.
PIXELS = ("pixel_values", "image_grid_thw", "image_sizes")


def is_vision(config: PretrainedConfig) -> bool:
    """Whether prompts come with an image. Other multimodal models are taken as the text models inside them."""
    return config.model_type in FAMILIES


def check_vision(config: PretrainedConfig, name: str) -> None:
    """Refuse a vision-language model that cache policies were not tried on.

    Raises:
        InputError: another architecture, no full-attention layer in its language model, or attention dropout.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type not in FAMILIES.get(config.model_type, ()):
        known = ", ".join(f"{outer} ({' or '.join(inner)})" for outer, inner in FAMILIES.items())
        raise InputError(f"{name}: cache policies are not tried on '{config.model_type}' with '{text.model_type}';"
                         f" vision-language models that are: {known}")  # fmt: skip
    if "full" not in layer_kinds(text):
        raise InputError(f"{name}: no full-attention layer in the language model, so there is nothing to compress")
    if getattr(text, "attention_dropout", 0):
        raise InputError(f"{name}: attention_dropout is {text.attention_dropout}; it must be 0 under a cache policy")


def load_vision(model_id: str, revision: str | None, dtype: str) -> tuple[PreTrainedModel, Any]:
    """A vision-language model in eval mode, its language model on the cache-policy attention, and its processor.

    Raises:
        InputError: it cannot be loaded, weights are missing from its files, it has no chat template, or its processor
            needs a package that is not installed.
    """
    if models.load_config(model_id, revision).model_type.startswith("qwen") and not find_spec("torchvision"):
        raise InputError(f"{model_id}: its processor needs the package torchvision, of the same build as torch")
    processor = models._load(AutoProcessor, model_id, revision)
    if not processor.chat_template:
        raise InputError(f"{model_id}: its processor has no chat template, so there is no way to place the image")
    model, info = models._load(AutoModelForImageTextToText, model_id, revision, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise InputError(f"{model_id}: the weight files lack {len(info['missing_keys'])} tensors,"
                         f" such as {min(info['missing_keys'])}; they would be random")  # fmt: skip
    return attach(model.eval()), processor


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Put the language model, and nothing else, on the cache-policy attention."""
    model.set_attn_implementation({"text_config": ATTENTION})
    return model


def prompt_inputs(processor: Any, image: Any, text: str) -> dict[str, Tensor]:
    """Token ids and pixels of one image (PIL, RGB) and one question, up to where the answer begins."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip


class ImagePrompt:
    """A vision-language model bound to one image and prompt: a model as the caches and the oracle know it.

    The image is encoded once, whatever number of policies decode. A forward that begins at position 0 holds the image
    (and may go on beyond the prompt, as the oracle's does); all others are text.

    Args:
        model: see `attach`.
        inputs: `input_ids` [1, P] with the image token repeated as often as the image has features, `pixel_values`, and
            `image_grid_thw` (Qwen) or `image_sizes` (LLaVA-NeXT).
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, inputs: dict[str, Tensor]):
        self.model, self.config, self.core = model, model.config, model.model
        device = model.device
        ids = inputs["input_ids"].to(device)
        pixels = {key: inputs[key].to(device) for key in PIXELS if key in inputs}
        self.prompt_ids: list[int] = ids[0].tolist()
        self.image = self.core.get_image_features(**pixels, return_dict=True)
        self.grid: Tensor | None = None  # [3, 1, P] coordinates of the prompt, where a model has three
        self.shift = 0  # coordinate minus position in the cache, of every token after the prompt
        if hasattr(self.core, "get_rope_index"):
            kinds = (ids == self.config.image_token_id).int()
            self.grid, shift = self.core.get_rope_index(
                ids, mm_token_type_ids=kinds, image_grid_thw=pixels["image_grid_thw"]
            )
            self.shift = int(shift)

    def parameters(self) -> Any:
        return self.model.parameters()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def get_decoder(self) -> Any:
        return self._forward

    def _forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        """One forward; `position_ids` [rows, n] are positions in the cache."""
        kwargs = {"input_ids": input_ids, "position_ids": self._places(position_ids), **kwargs}
        if int(position_ids[0, 0]) == 0:
            return self.core(mm_encoder_outputs={"image": self.image}, **kwargs)
        return self.core.language_model(**kwargs)

    def _places(self, position_ids: Tensor) -> Tensor:
        """What rotary embeddings are computed from: [rows, n] as given, or [3, rows, n] coordinates."""
        if self.grid is None:
            return position_ids
        places = (position_ids + self.shift).expand(3, *position_ids.shape).clone()
        first, prompt = int(position_ids[0, 0]), self.grid.shape[2]
        if first < prompt:
            known = self.grid[..., first : first + position_ids.shape[1]]
            places[..., : known.shape[2]] = known
        return places
