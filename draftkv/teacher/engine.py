"""The in-process engine: the target writes its responses with transformers, in left-padded batches.

`model.generate` keeps the logits of every step to report log-probabilities and pays for finished rows until the last
one ends. This loop keeps two numbers per emitted token, drops rows as they finish, and makes logits in fp32 from hidden
states of any dtype (bf16 logits are spaced so widely that ties decide the argmax).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftkv.models import load_config, resolve


@dataclass
class Request:
    """One response to write.

    `seed` alone decides the draws of the row, so a sampled response does not depend on the rows that share its batch
    (up to the float noise of other batch shapes).
    """

    prompt_ids: list[int]
    temperature: float
    seed: int


@dataclass
class Response:
    """What the target wrote. All three lists have one entry per emitted token, the stop token included.

    `logprobs` is log p at the sampling temperature and `logprobs_t1` at temperature 1; a greedy response has no
    distribution of its own, so there the first equals the second. `finish_reason` is "stop" or "length".
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprobs_t1: list[float] = field(default_factory=list)
    finish_reason: str = "length"


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that ends a response: of the generation configuration and of the tokenizer."""
    return _stops(model.generation_config, tokenizer)


def served_stop_ids(model_id: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """`stop_ids` of a model whose weights are not here, from its files."""
    config = load_config(model_id, revision)
    try:
        generation = GenerationConfig.from_pretrained(resolve(model_id), revision=revision)
    except OSError:  # no generation_config.json: transformers takes the model's own configuration, and so do we
        generation = GenerationConfig.from_model_config(config)
    return _stops(generation, tokenizer)


def _stops(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = getattr(generation, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {i for i in (*listed, tokenizer.eos_token_id) if i is not None}


def row_seed(seed: int, row_id: str, temperature: float) -> int:
    """A seed for one row and temperature, the same wherever and whenever the row is written."""
    digest = hashlib.sha256(f"{seed}/{row_id}/{temperature}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Engine:
    """Batched generation with one model.

    Args:
        vocab_size: ids the tokenizer knows; padding rows of the head beyond it are cut before the softmax.
        stops: ids that end a response.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, stops: set[int]):
        self.model, self.stops = model, stops
        self.decoder = model.get_decoder()
        head = model.get_output_embeddings()
        # One fp32 copy of the head, made once: logits are fp32 whatever the dtype of the forward pass.
        self.head_weight = head.weight[:vocab_size].float()
        self.head_bias = head.bias[:vocab_size].float() if getattr(head, "bias", None) is not None else None

    @torch.inference_mode()
    def write(self, requests: list[Request], max_new_tokens: int) -> list[Response]:
        """One batch of responses, in the order of `requests`."""
        device = self.model.device
        responses = [Response() for _ in requests]
        uniforms = self._uniforms(requests, max_new_tokens).to(device)
        temperatures = torch.tensor([r.temperature for r in requests], dtype=torch.float32, device=device)
        ids, mask = (t.to(device) for t in left_pad([r.prompt_ids for r in requests]))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        alive = list(range(len(requests)))  # alive[i]: the request in row i of the batch
        for step in range(max_new_tokens):
            logits = self._logits(ids, mask, positions, cache)
            tokens, logprobs, logprobs_t1 = choose(logits, temperatures, uniforms[:, step])
            going = []
            emitted = zip(alive, tokens.tolist(), logprobs.tolist(), logprobs_t1.tolist(), strict=True)
            for row, (index, token, logprob, logprob_t1) in enumerate(emitted):
                response = responses[index]
                response.ids.append(token)
                response.logprobs.append(logprob)
                response.logprobs_t1.append(logprob_t1)
                if token in self.stops:
                    response.finish_reason = "stop"
                else:
                    going.append(row)
            if not going or step == max_new_tokens - 1:
                break
            if len(going) < len(alive):
                keep = torch.tensor(going, device=device)
                alive = [alive[row] for row in going]
                tokens, mask, positions = tokens[keep], mask[keep], positions[keep]
                temperatures, uniforms = temperatures[keep], uniforms[keep]
                cache.reorder_cache(keep)
            ids = tokens[:, None]
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        return responses

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache):
        """fp32 logits [rows, vocab] of the last position."""
        out = self.decoder(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
        hidden = out.last_hidden_state[:, -1].float()
        return torch.nn.functional.linear(hidden, self.head_weight, self.head_bias)

    @staticmethod
    def _uniforms(requests: list[Request], count: int) -> torch.Tensor:
        """[rows, count] draws in [0, 1) as fp64: the n-th token of a row uses the n-th draw of its own generator."""
        rows = []
        for request in requests:
            generator = torch.Generator().manual_seed(request.seed)
            rows.append(torch.rand(count, generator=generator, dtype=torch.float64))
        return torch.stack(rows)


def left_pad(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, both [rows, longest] int64, padded on the left with id 0 (masked, so any id would do)."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def choose(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next token of every row.

    Args:
        logits: [rows, vocab], fp32.
        temperatures: [rows]; 0 takes the argmax.
        uniforms: [rows], draws in [0, 1).

    Returns:
        tokens, their log-probability at the row's temperature, and at temperature 1; each [rows].
    """
    greedy = temperatures == 0
    tokens = logits.argmax(-1)
    log_p1 = torch.log_softmax(logits, -1)
    if greedy.all():
        at_1 = log_p1.gather(1, tokens[:, None])[:, 0]
        return tokens, at_1, at_1
    log_p = torch.log_softmax(logits / torch.where(greedy, 1.0, temperatures)[:, None], -1)
    # Inverse transform: the first token whose cumulative probability exceeds the draw, so never one of probability 0.
    cumulative = log_p.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens = torch.where(greedy, tokens, drawn.clamp(max=logits.shape[-1] - 1))
    picked = [table.gather(1, tokens[:, None])[:, 0] for table in (log_p, log_p1)]
    return tokens, picked[0], picked[1]


def batches(requests: list[Request], size: int) -> Iterator[list[int]]:
    """Indices of `requests` in batches of similar prompt length, longest first, so a batch too large fails at once."""
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), i))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def repeated_share(ids: list[int], n: int) -> float:
    """Share of n-grams that occurred before in the same response; near 1 for a loop. 0 when shorter than n + 1."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0
