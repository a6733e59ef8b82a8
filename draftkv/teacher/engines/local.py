"""The target in this process, with transformers."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from draftkv import models
from draftkv.recipe import Recipe, Signal
from draftkv.teacher.engine import Engine, Request, Response, row_seed, stop_ids
from draftkv.teacher.signals import Hidden, TopK


class Local:
    """Writes in `rollouts.dtype` and scores in `target.dtype`; the weights are loaded for the first question."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.about = {"kind": "transformers", "version": transformers.__version__}

    def write(self, requests: list[Request], max_new_tokens: int) -> list[Response]:
        return self._writer.write(requests, max_new_tokens)

    def score(self, rows: Sequence[dict[str, Any]], vocab: int) -> list[TopK]:
        teacher, seed = self._teacher, self.recipe.rollouts.seed
        return [
            compress(teacher.hidden(row), teacher.head, self.recipe.signal, vocab,
                     row_seed(seed, row["row_id"], row["temperature"]))
            for row in rows
        ]  # fmt: skip

    @cached_property
    def _writer(self) -> Engine:
        tokenizer = models.load_tokenizer(self.recipe.target.model, self.recipe.target.revision)
        model = self._load(self.recipe.rollouts.dtype)
        return Engine(model, len(tokenizer), stop_ids(model, tokenizer))

    @cached_property
    def _teacher(self):
        from draftkv.distill.student import Teacher

        return Teacher(self._load(self.recipe.target.dtype))

    def _load(self, dtype: str):
        model = models.load_model(self.recipe.target.model, self.recipe.target.revision, dtype)
        return model.to("cuda" if torch.cuda.is_available() else "cpu")

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing to close."""


@torch.no_grad()
def compress(hidden: Tensor, head: Tensor, signal: Signal, vocab: int, seed: int, chunk: int = 256) -> TopK:
    """A row's signal [R - 1] from the target's hidden states, chunk by chunk.

    `signal.samples` draws instead of taking the likeliest: N draws with replacement, each distinct token stored with
    log(count / N) and no tail. The gradient of forward KL is then unbiased (sparse logit sampling, arXiv 2503.16870).
    """
    generator = torch.Generator().manual_seed(seed)
    whole, found = Hidden(hidden, head), []
    for start in range(0, len(hidden), chunk):
        dense = whole.rows(start, min(start + chunk, len(hidden)), vocab)
        if signal.samples is None:
            found.append(dense.top_k(signal.k, None, signal.temperature))
        else:
            found.append(dense.sample(signal.samples, signal.temperature, generator))
    return TopK(torch.cat([f.ids for f in found]), torch.cat([f.logprobs for f in found]),
                torch.cat([f.tail_logprob for f in found]), signal.temperature)  # fmt: skip
