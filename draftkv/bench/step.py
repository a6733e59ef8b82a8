"""One draft step with a compressed cache against the same step with the full cache, on one model."""

import argparse

import torch

from draftkv.bench.measure import Row, measure, timed
from draftkv.cache.attention import ATTENTION
from draftkv.cache.offloaded import cache_for
from draftkv.cache.policy import Policy
from draftkv.models import load_model
from draftkv.rehearsal import tiny_model


def step_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--prompt", type=int, nargs="+", default=[8192, 32768], help="prompt tokens (8192 32768)")
    options.add_argument("--budget", type=int, default=1024)
    options.add_argument("--policy", nargs="+", default=["swa", "rift_stat", "rift_dyn"])
    options.add_argument("--steps", type=int, default=32, help="draft steps timed, one token each (32)")
    options.add_argument("--model", default="embedded:smollm2-135m", help="a model, or `wide`: 4 random layers of 2048")
    options.add_argument("--layers", type=int, default=4, help="layers of `wide` (4)")
    options.add_argument("--repeats", type=int, default=2, help="the best time counts (2)")


def step_rows(args: argparse.Namespace) -> list[Row]:
    result = []
    for prompt in args.prompt:
        settings = {n: getattr(args, n) for n in ("budget", "steps", "model", "layers", "repeats")} | {"prompt": prompt}
        full = measure("step", policy="full", **settings)
        for policy in args.policy:
            mine = measure("step", policy=policy, **settings)
            full_ms, own_ms = (1e3 * row["cpu_seconds"] / args.steps for row in (full, mine))
            result.append({
                "prompt": prompt, "cache": policy, "budget": args.budget, "full ms": full_ms, "compressed ms": own_ms,
                "time ratio": mine["cpu_seconds"] / full["cpu_seconds"],
                "full MiB": full["attended"] / 2**20, "attended MiB": mine["attended"] / 2**20,
                "stored MiB": mine["stored"] / 2**20,
            })  # fmt: skip
    return result


def step_worker(policy: str, prompt: int, budget: int, steps: int, model: str, layers: int, repeats: int) -> Row:
    """Greedy draft steps after a prefill of random tokens (speed does not depend on which), fp32.

    The store of a policy that selects again is on the host and not part of what is attended.
    """
    loaded = _wide(layers) if model == "wide" else load_model(model, None, "float32")
    loaded.set_attn_implementation(ATTENTION)
    value = Policy.model_validate({"policy": policy, **({} if policy == "full" else {"budget": budget})})
    cache = cache_for(loaded.config, value)
    ids = torch.randint(0, min(1000, loaded.config.vocab_size), (1, prompt), generator=torch.Generator().manual_seed(0))
    token = cache.forward(loaded, ids, 1).argmax().view(1, 1)
    verified = 1

    def decode() -> None:
        nonlocal token, verified
        for _ in range(steps):
            cache.commit()
            if value.trigger.level == "block" and cache.clock.at_check(verified):
                cache.refresh(verified)
            token = cache.forward(loaded, token, 1).argmax().view(1, 1)
            verified += 1

    decode()
    row = timed(decode, repeats, "cpu")
    stored = cache.store_nbytes() if value.reselects else 0
    return row | {"attended": cache.nbytes(), "stored": stored}


def _wide(layers: int) -> torch.nn.Module:
    """A few layers of a small model's width: attention and weights in the proportion of a real drafter."""
    return tiny_model("qwen3", num_hidden_layers=layers, hidden_size=2048, intermediate_size=6144, head_dim=128,
                      num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=65536)  # fmt: skip
