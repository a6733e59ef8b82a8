"""What is measured: one model with its prompts, text alone or an image and a question."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftkv import models
from draftkv.cache.architecture import check_drafter
from draftkv.cache.attention import ATTENTION
from draftkv.errors import InputError
from draftkv.fidelity import vision
from draftkv.recipe import PromptSource, Recipe
from draftkv.teacher.engine import stop_ids
from draftkv.teacher.prompts import load_prompts, read_rows, too_long


@dataclass(frozen=True)
class Sample:
    """One prompt. `key` is a digest of everything that decides the output: weights, dtype, prompt and pixels."""

    row_id: str
    key: str
    prompt_ids: list[int]
    model: Any  # what `generate` takes


@dataclass(frozen=True)
class Subject:
    """A loaded model.

    Attributes:
        processor: of images; None for a text model.
        stops: ids that end an answer.
        identity: digest of weights and dtype.
    """

    name: str
    model: Any
    tokenizer: Any
    processor: Any
    stops: set[int]
    identity: str

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def preflight(name: str, revision: str | None, longest: int) -> None:
    """Refuse what cannot work before any weight is loaded: the configuration only.

    Args:
        longest: prompt and answer together, in tokens.

    Raises:
        InputError: a model that is missing or that no policy was tried on, or whose limit is below `longest`.
    """
    config = models.load_config(name, revision)
    models.refuse_softcapping(config, name)
    (vision.check_vision if vision.is_vision(config) else check_drafter)(config, name)
    if longest > models.model_limit(config):
        raise InputError(f"{name}: prompts.max_prompt_tokens + --max-new-tokens = {longest} tokens, but this model's"
                         f" limit is {models.model_limit(config)}")  # fmt: skip


def load_subject(name: str, revision: str | None, dtype: str, device: torch.device) -> Subject:
    """Raises: InputError, see `draftkv.models.load_model` and `draftkv.fidelity.vision.load_vision`."""
    processor = None
    if vision.is_vision(models.load_config(name, revision)):
        model, processor = vision.load_vision(name, revision, dtype)
        tokenizer = processor.tokenizer
    else:
        tokenizer = models.load_tokenizer(name, revision)
        model = models.load_model(name, revision, dtype)
        model.set_attn_implementation(ATTENTION)
    identity = _digest(json.dumps([models.weights_identity(name, revision), dtype], sort_keys=True).encode())
    return Subject(name, model.to(device), tokenizer, processor, stop_ids(model, tokenizer), identity)


def samples_of(subject: Subject, recipe: Recipe, limit: int | None) -> tuple[int, Iterator[Sample | None]]:
    """How many prompts there are, and the prompts one after the other; None for one that is too long.

    Args:
        limit: use the first so many prompts of `prompts.eval`; None: all that the source's own limit leaves.

    Raises:
        InputError: no usable prompt, or a malformed row; images are opened when their turn comes.
    """
    source, longest = recipe.prompts.eval, recipe.prompts.max_prompt_tokens
    limit = min(filter(None, (limit, source.limit)), default=None)
    if subject.processor is not None:
        rows = list(_image_rows(source, subject, longest, limit))
        if not rows:
            raise InputError(f"{source.source}: it has no rows")
        return len(rows), (_image_sample(subject, longest, *row) for row in rows)
    found = load_prompts(source.model_copy(update={"limit": limit}), subject.tokenizer, longest, "eval").prompts
    return len(found), (Sample(p.row_id, _key(subject, p.prompt_ids), p.prompt_ids, subject.model) for p in found)


def _image_rows(source: PromptSource, subject: Subject, longest: int, limit: int | None) -> Iterator[tuple]:
    """(row_id, image or path, question) of each row.

    Raises:
        InputError: a row without image or prompt, or a file that does not exist.
    """
    folder = Path(source.source).expanduser().parent
    for number, (where, row) in enumerate(read_rows(source, subject.tokenizer, longest)):
        if number == limit:
            return
        image, text = (row.get("image"), row.get("prompt")) if isinstance(row, dict) else (None, None)
        if image is None or not isinstance(text, str) or not text.strip():
            raise InputError(f"{where}: {subject.name} takes images: a row needs `image` (a path, relative to this"
                             " file) and `prompt` (text)")  # fmt: skip
        if isinstance(image, str):
            image = folder / image
            if not image.is_file():
                raise InputError(f"{where}: image {image}: no such file")
        yield str(row.get("row_id") or where), image, text


def _image_sample(subject: Subject, longest: int, row_id: str, image: Any, text: str) -> Sample | None:
    """Raises: InputError for a file that is no image."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(image, Path):
        try:
            with Image.open(image) as opened:
                image = opened.convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise InputError(f"{row_id}: image {image}: cannot be read: {error}") from error
    inputs = vision.prompt_inputs(subject.processor, image.convert("RGB"), text)
    if too_long(inputs["input_ids"].shape[1], longest):
        return None
    bound = vision.ImagePrompt(subject.model, inputs)
    return Sample(row_id, _key(subject, bound.prompt_ids, inputs["pixel_values"]), bound.prompt_ids, bound)


def _key(subject: Subject, prompt_ids: list[int], pixels: Tensor | None = None) -> str:
    parts = [subject.identity.encode(), json.dumps(prompt_ids).encode()]
    if pixels is not None:
        parts.append(pixels.float().numpy().tobytes())
    return _digest(*parts)


def _digest(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()[:24]
