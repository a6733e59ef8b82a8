"""Model FLOPs of a training step and the share of the machine's peak that they reach (MFU).

Per token fed 6 FLOPs for every weight of a matrix (2 forward, 4 backward), per supervised row 6 for every weight of the
vocabulary head, and per pair of a row and an entry that it sees 12 * heads * head_dim in every full-attention layer
(Chowdhery et al. 2022, PaLM, appendix B, with visible entries in the place of the sequence length). Left out, as usual:
norms, softmax, the optimiser, recomputation under checkpointing, the target; also windows of natively sliding layers
and states of linear ones. Of a mixture of experts all weights are counted, so its figure is too high.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from draftkv.cache.parallel import passes
from draftkv.cache.policy import Policy
from draftkv.distill.schedule import Item

# Published dense bf16 peaks, by whole words of the device's name; the first that fits counts.
PEAKS = {
    "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12,
    "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "RTX 4090": 165e12,
}  # fmt: skip


@dataclass(frozen=True)
class Flops:
    """What a model's FLOPs depend on.

    Attributes:
        body: weights of matrices outside embeddings and head.
        head: weights of the vocabulary head.
        attention: query heads * head_dim, summed over full-attention layers.
    """

    body: int
    head: int
    attention: int

    @classmethod
    def of(cls, model: nn.Module) -> "Flops":
        config = model.config.get_text_config()
        tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        body = sum(p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in tables)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = kinds.count("full_attention") * config.num_attention_heads * width
        return cls(body, model.get_output_embeddings().weight.numel(), attention)

    def training(self, items: Iterable[Item]) -> float:
        """Model FLOPs of forward and backward."""
        total = 0.0
        for item in items:
            prompt, rows = len(item.row["prompt_ids"]), len(item.row["response_ids"]) - 1
            count = len(passes(item.views, prompt))
            fed = count * prompt + item.supervised
            seen = count * prompt * (prompt + 1) // 2 + sum(visible(view, prompt, rows) for view in item.views)
            total += 6 * (self.body * fed + self.head * item.supervised) + 12 * self.attention * seen
        return total


def visible(policy: Policy, prompt_len: int, rows: int) -> int:
    """Entries that the rows of a response see, themselves included, summed over rows."""
    budget = policy.entries(prompt_len)
    if budget is None:
        return sum(prompt_len + i + 1 for i in range(rows))
    if policy.generated == "kept":
        return sum(min(budget, prompt_len) + i + 1 for i in range(rows))
    return sum(min(budget, prompt_len + i) + 1 for i in range(rows))


def published_peak(device: torch.device) -> float | None:
    """FLOPs per second of a GPU in PEAKS (dense bf16); None for other devices."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    words = f" {name.replace('-', ' ')} "  # NVIDIA A100-SXM4-80GB
    return next((peak for part, peak in PEAKS.items() if f" {part} " in words), None)


def peak_flops(device: torch.device) -> tuple[float, str]:
    """FLOPs per second that the device can reach, and where the number is from: published, else measured by the best
    of ten products of square matrices (fp32 on a CPU, on this process's threads)."""
    peak = published_peak(device)
    if peak is not None:
        return peak, "published"
    # A small product on a GPU would measure its launch.
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = []
    for _ in range(10):
        start = clock()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((clock() - start) / (1 if device.type == "cuda" else torch.get_num_threads()))
    return 2 * size**3 / min(seconds), "measured"
