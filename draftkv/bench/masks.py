"""The masked training step against dense causal attention and against [H, T, T] masks."""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from draftkv.bench.measure import Row, measure, timed
from draftkv.cache.policy import Policy

PER_HEAD_TOKENS = 8192  # above, an [H, T, T] mask takes gigabytes


def masks_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768],
                         help="T; 7/8 prompt, 1/8 response (2048 8192 32768)")
    options.add_argument("--policy", nargs="+", default=["rift_stat", "swa"])
    options.add_argument("--budget", type=float, default=0.25, help="share of the prompt (0.25)")
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--heads", type=int, default=9, help="query heads of 64, three times the KV heads (9)")
    options.add_argument("--per-head", nargs="*", choices=["sdpa", "eager"], default=["sdpa"],
                         help=f"attention under the [H, T, T] mask, up to T = {PER_HEAD_TOKENS}; eager needs about "
                              "1.2 GiB per layer at T = 4096")
    options.add_argument("--rounds", type=int, default=3, help="the versions in turn, so often; medians count (3)")
    options.add_argument("--repeats", type=int, default=1, help="steps per version and round, the best counts (1)")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def masks_rows(args: argparse.Namespace) -> list[Row]:
    result = []
    shared = {name: getattr(args, name) for name in ("budget", "layers", "heads", "repeats", "device")}
    clock = "seconds" if args.device == "cuda" else "cpu_seconds"
    for tokens in args.tokens:
        per_head = args.per_head if tokens <= PER_HEAD_TOKENS else []
        versions = ["masked", "dense", *(f"per_head_{backend}" for backend in per_head)]
        for policy in args.policy:
            rounds = [
                {v: measure("masks", version=v, tokens=tokens, policy=policy, **shared) for v in versions}
                for _ in range(args.rounds)
            ]
            result += [{"T": tokens, "policy": policy} | _masks_line(rounds, v, clock) for v in versions]
    return result


def _masks_line(rounds: list[dict[str, Row]], version: str, clock: str) -> Row:
    """Medians over rounds; a ratio is taken within a round, where the machine was in the same mood for both."""
    off = max(abs(r[version]["loss"] / r["masked"]["loss"] - 1) for r in rounds)
    if version != "dense" and off > 1e-3:  # the same visibility must give the same loss
        sys.exit(f"{version}: its loss differs from the masked one by {off:.1e}: they do not see the same")

    def ratio(other: str) -> float:
        return statistics.median(r[version][clock] / r[other][clock] for r in rounds)

    return {
        "version": version, clock: statistics.median(r[version][clock] for r in rounds),
        "GiB": max(r[version]["peak_bytes"] for r in rounds) / 2**30,
        "time/dense": ratio("dense"), "time/masked": ratio("masked"),
    }


def masks_worker(
    version: str, tokens: int, policy: str, budget: float, layers: int, heads: int, repeats: int, device: str
) -> Row:
    """Forward and backward of a Llama stack, loss on the response rows' hidden states. Weights are not counted."""
    from transformers import LlamaConfig, LlamaModel

    from draftkv.cache.attention import ATTENTION
    from draftkv.cache.parallel import single

    torch.manual_seed(0)
    width = 64 * heads
    config = LlamaConfig(hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers, vocab_size=64,
                         num_attention_heads=heads, num_key_value_heads=heads // 3, max_position_embeddings=tokens)
    register_per_head()
    config._attn_implementation = {"masked": ATTENTION, "dense": "sdpa"}.get(version, version)
    model = LlamaModel(config).to(device)
    losses = []

    def prepared(tokens: int) -> Callable[[], None]:
        prompt = tokens * 7 // 8
        ids = torch.randint(0, 64, (1, tokens), device=device)
        direction = torch.randn(tokens - prompt, width, device=device)
        view = single(prompt, tokens, Policy(policy=policy, budget=budget))
        extra = {} if version == "dense" else {"cache_view": view}

        def step() -> None:
            model.zero_grad()
            hidden = model(ids, use_cache=False, **extra).last_hidden_state[0, prompt:]
            loss = (hidden * direction).sum()
            loss.backward()
            losses.append(float(loss.detach()))

        return step

    prepared(64)()
    figures = timed(prepared(tokens), repeats, device)
    return figures | {"loss": losses[-1]}


def register_per_head() -> None:
    """Register attentions `per_head_sdpa` and `per_head_eager`: what a cache policy costs as a mask of one plane per
    head. The mask depends on the layer's own selection, so it is built in every layer of every step."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def sdpa(module: Any, query: Any, key: Any, value: Any, _: None, scaling: float, cache_view: Any, **__: Any):
        mask = per_head_mask(cache_view, module.layer_idx, query[0], key[0], scaling)[None]
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)

    def eager(module: Any, query: Any, key: Any, value: Any, _: None, scaling: float, cache_view: Any, **__: Any):
        mask = per_head_mask(cache_view, module.layer_idx, query[0], key[0], scaling)[None]
        mask = torch.zeros((), device=mask.device).masked_fill(~mask, float("-inf"))  # [1, H, T, T], additive
        return eager_attention_forward(module, query, key, value, mask, scaling)

    AttentionInterface.register("per_head_sdpa", sdpa)
    AttentionInterface.register("per_head_eager", eager)


@torch.no_grad()
def per_head_mask(view: Any, layer: int, query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """[H, T, T] bool visibility of the parallel executor's rows; query [H, T, D], key [G, T, D]."""
    from draftkv.cache.attention import front_positions
    from draftkv.cache.scene import Scene

    row, tokens = view.rows[0], query.shape[1]
    prompt, policy = row.prompt_len, row.segments[0].policy
    split = policy.split(prompt)
    kept = front_positions(policy, split, Scene(query[:, :prompt], key[:, :prompt], scaling, layer))
    own, entry = (torch.arange(start, tokens, device=key.device) for start in (prompt, 0))
    band = (entry <= own[:, None]) & (entry >= split.tail_start)
    if split.sliding is not None:
        band &= own[:, None] - entry <= split.sliding
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=key.device).tril().repeat(key.shape[0], 1, 1)
    front = torch.zeros(key.shape[0], tokens, dtype=torch.bool, device=key.device).scatter(1, kept, True)
    mask[:, prompt:] = band | front[:, None]
    return mask.repeat_interleave(query.shape[0] // key.shape[0], 0)
