"""Several views of one row that share its prompt's pass against a pass of their own for each: forward and backward."""

import argparse
import sys
from collections.abc import Callable

import torch

from draftkv.bench.measure import Row, measure, timed
from draftkv.rehearsal import tiny_model

# Two layers of a kind, as wide as a small drafter's: what a model costs, without its vocabulary.
SHAPES = {
    "llama": {"num_hidden_layers": 4},
    "qwen3_5": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
                "linear_value_head_dim": 64},
    "nemotron_h": {"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64, "chunk_size": 64},
}  # fmt: skip


def views_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["llama", "qwen3_5"])
    options.add_argument("--views", type=int, nargs="+", default=[1, 2, 4], help="views of the row (1 2 4)")
    options.add_argument("--prompt", type=int, default=2048, help="prompt tokens P (2048)")
    options.add_argument("--response", type=int, default=256, help="response tokens R fed to each view (256)")
    options.add_argument("--budget", type=float, default=0.25, help="share of the prompt, policy swa (0.25)")
    options.add_argument("--width", type=int, default=512, help="hidden size, heads of 64 (512)")
    options.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    options.add_argument("--repeats", type=int, default=3, help="the best time counts (3)")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def views_rows(args: argparse.Namespace) -> list[Row]:
    names = ("prompt", "response", "budget", "width", "checkpointing", "repeats", "device")
    settings = {name: getattr(args, name) for name in names}
    clock = "seconds" if args.device == "cuda" else "cpu_seconds"
    result = []
    for shape in args.shape:
        for views in args.views:
            shared, apart = (measure("views", together=t, shape=shape, views=views, **settings) for t in (True, False))
            for figure in ("loss", "gradient"):
                off = abs(shared[figure] / apart[figure] - 1)
                if off > 1e-4:
                    sys.exit(f"{shape}, {views} views: the {figure}s of one pass and of {views} differ by {off:.1e}")
            tokens = args.prompt + views * args.response, views * (args.prompt + args.response)
            result.append({
                "shape": shape, "views": views, "tokens": tokens[0], "tokens apart": tokens[1],
                "token ratio": tokens[0] / tokens[1], clock: shared[clock], "apart": apart[clock],
                "time ratio": shared[clock] / apart[clock],
                "MiB": shared["peak_bytes"] / 2**20, "MiB apart": apart["peak_bytes"] / 2**20,
            })  # fmt: skip
    return result


def views_worker(
    together: bool, shape: str, views: int, prompt: int, response: int, budget: float, width: int,
    checkpointing: bool, repeats: int, device: str,
) -> Row:
    """Forward and backward of the decoder, loss on every view's hidden states; with `together` in one pass, else in a
    pass and a backward for each view. Weights are not counted. The views differ by one budget entry each."""
    from draftkv.cache.attention import ATTENTION
    from draftkv.cache.parallel import lay_out
    from draftkv.cache.policy import Policy

    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "head_dim": 64, "num_attention_heads": width // 64,
             "num_key_value_heads": width // 128, "max_position_embeddings": prompt + response + 1}  # fmt: skip
    # Small weights: at the tiny models' own, hidden states of this width overflow what fp32 can tell apart.
    model = tiny_model(shape, initializer_range=0.02, **sizes, **SHAPES[shape]).to(device).train()
    model.set_attn_implementation(ATTENTION)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    decoder, generator = model.get_decoder(), torch.Generator().manual_seed(0)
    policies = [Policy(policy="swa", budget=max(1, int(budget * prompt) - i)) for i in range(views)]

    def prepared(prompt: int, response: int) -> Callable[[], float]:
        ids = torch.randint(3, 512, (prompt + response + 1,), generator=generator).tolist()
        target = torch.randn(response, width, generator=generator).to(device)
        batches = [lay_out([ids[:prompt]], [ids[prompt:]], [group]).to(device)
                   for group in ([policies] if together else [[p] for p in policies])]  # fmt: skip

        def step() -> float:
            model.zero_grad()
            total = 0.0
            for batch in batches:
                hidden = decoder(
                    batch.input_ids, position_ids=batch.position_ids, cache_view=batch.view, use_cache=False
                ).last_hidden_state[0]
                loss = sum((hidden[s.start : s.stop] * target).square().mean() for s in batch.view.rows[0].segments)
                loss.backward()
                total += float(loss.detach())
            return total

        return step

    prepared(64, 16)()
    step = prepared(prompt, response)
    figures = timed(step, repeats, device)
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    return figures | {"loss": step(), "gradient": squares**0.5}
