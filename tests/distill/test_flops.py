"""Model FLOPs of training, counted by hand and by torch."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftkv.cache.policy import Policy
from draftkv.distill.schedule import Item
from draftkv.flops import Flops, peak_flops, published_peak, visible
from draftkv.rehearsal import tiny_model


def item(prompt: int, response: int, *views: Policy) -> Item:
    return Item({"prompt_ids": [1] * prompt, "response_ids": [1] * response}, views, (1.0,) * len(views))


def test_entries_that_a_response_sees():
    assert visible(Policy(policy="full"), 10, 3) == 11 + 12 + 13
    assert visible(Policy(policy="swa", budget=4), 10, 3) == 5 * 3
    assert visible(Policy(policy="swa", budget=11), 10, 3) == 11 + 12 + 12, "the window fills up"
    assert visible(Policy(policy="snapkv_published", budget=40), 10, 3) == 11 + 12 + 13
    kept = Policy(policy="exact", budget=33)
    assert visible(kept, 50, 3) == 34 + 35 + 36


@pytest.mark.parametrize("arch, attending", [("llama", 3), ("qwen3_5", 2), ("gemma3", 2), ("nemotron_h", 2)])
def test_parts_of_a_model(arch, attending):
    flops = Flops.of(tiny_model(arch))
    assert (flops.head, flops.attention) == (512 * 64, attending * 4 * 16)


def test_matrices_against_torchs_own_count():
    """One full view of a row: a forward and backward over all of it, with logits of the response's rows only."""
    model, prompt, rows = tiny_model("llama"), 40, 23
    ids = torch.ones(1, prompt + rows, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state[0, prompt:]
        (hidden @ model.get_output_embeddings().weight.T).sum().backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    flops = Flops.of(model)
    matrices = Flops(flops.body, flops.head, 0).training([item(prompt, rows + 1, Policy(policy="full"))])
    assert matrices == pytest.approx(counted, rel=0.01)
    whole = flops.training([item(prompt, rows + 1, Policy(policy="full"))])
    length = prompt + rows
    assert whole - matrices == 12 * flops.attention * length * (length + 1) // 2


def test_views_share_a_prompt_or_repeat_it():
    flops, views = Flops(body=7, head=0, attention=0), [Policy(policy="full"), Policy(policy="swa", budget=4)]
    assert flops.training([item(10, 5, *views)]) == 6 * 7 * (10 + 2 * 4)
    windowed = Policy(policy="swa", budget=4, prefill="windowed")  # its prompt rows see something else
    assert flops.training([item(10, 5, views[0], windowed)]) == 6 * 7 * (2 * 10 + 2 * 4)


def test_the_peak_is_measured_or_published(monkeypatch):
    peak, source = peak_flops(torch.device("cpu"))
    assert peak > 1e8 and source == "measured"
    for name, peak in (("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA L40", 181e12),
                       ("NVIDIA L40S", 362e12), ("NVIDIA A100-SXM4-80GB", 312e12)):  # fmt: skip
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == (peak, "published")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H20")
    assert published_peak(torch.device("cuda")) is None, "no part of another name"
