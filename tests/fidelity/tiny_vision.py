"""Tiny random vision-language models of the three supported families, and real images for them.

Image processors are built from their classes; nothing is downloaded. scikit-image ships the pictures in its wheel.
"""

from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MistralConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from draftkv.rehearsal import tiny_tokenizer

IMAGE_TOKEN, VISION_START, VISION_END, EOS = 512, 513, 514, 2
SIDE, PATCH = 56, 14  # LLaVA-NeXT: pixels of a tile and of a patch
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
_TEXT = {
    "vocab_size": 520, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.15, "eos_token_id": EOS,
    "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_QWEN = {"image_token_id": IMAGE_TOKEN, "video_token_id": 515, "vision_start_token_id": VISION_START,
         "vision_end_token_id": VISION_END, "tie_word_embeddings": True}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
FAMILIES = ("qwen2_vl", "qwen3_vl", "llava_mistral", "llava_llama")


def _config(family: str) -> Any:
    if family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": PATCH,
                  "initializer_range": 0.1}  # fmt: skip
        return Qwen2VLConfig(text_config={**_TEXT, "rope_parameters": _ROPE}, vision_config=vision, **_QWEN)
    if family == "qwen3_vl":
        vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH,
                  "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
                  "initializer_range": 0.1}  # fmt: skip
        text = {**_TEXT, "head_dim": 16, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN)
    text = (MistralConfig if family == "llava_mistral" else LlamaConfig)(**_TEXT, head_dim=16)
    text.sliding_window = None
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
                              image_size=SIDE, patch_size=PATCH, projection_dim=32)  # fmt: skip
    return LlavaNextConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN,
                           image_grid_pinpoints=PINPOINTS)  # fmt: skip


_CLASSES = {"qwen2_vl": Qwen2VLForConditionalGeneration, "qwen3_vl": Qwen3VLForConditionalGeneration,
            "llava_mistral": LlavaNextForConditionalGeneration, "llava_llama": LlavaNextForConditionalGeneration}


def tiny_vision(family: str) -> Any:
    """A random model in fp32, eval mode, with its own attention (SDPA)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _CLASSES[family](_config(family)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, 0
    return model


def image_processor(family: str) -> Any:
    if family.startswith("qwen"):
        return Qwen2VLImageProcessorPil(patch_size=PATCH, size={"shortest_edge": 56 * 56, "longest_edge": 140 * 140})
    return LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS
    )


def tokenizer() -> Any:
    """The rehearsal's tokenizer with the tokens around an image."""
    result = tiny_tokenizer()
    result.add_special_tokens({"additional_special_tokens": [
        AddedToken(text, special=True) for text in ("<image>", "<vision_start>", "<vision_end>")
    ]})  # fmt: skip
    assert result.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    return result


def picture(name: str) -> Image.Image:
    """astronaut, chelsea or coffee: pictures inside the wheel of scikit-image."""
    from skimage import data

    return Image.fromarray(getattr(data, name)())


def inputs_of(family: str, model: Any, name: str, text: str) -> dict[str, torch.Tensor]:
    """What a processor would return: the image token repeated once per feature of the image."""
    pixels = dict(image_processor(family)(images=[picture(name)], return_tensors="pt"))
    with torch.no_grad():
        features = model.model.get_image_features(**pixels, return_dict=True).pooler_output
    count = sum(len(feature) for feature in features)
    ids = [1, VISION_START, *[IMAGE_TOKEN] * count, VISION_END, *tokenizer()(text)["input_ids"]]
    return {"input_ids": torch.tensor([ids]), **pixels}
