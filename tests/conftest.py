"""Shared fixtures: a tiny tokenizer, a tiny random Llama, and the environment of every test.

Set before torch and transformers are imported: one thread (the machines have few cores), no network.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import json
from pathlib import Path

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEEDS = {
    "gpu": ("no CUDA device", lambda: torch.cuda.is_available()),
    "engine": ("no engine environment (bash launch/test_engine.sh)", lambda: "DRAFTKV_ENGINE_PYTHON" in os.environ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; `pytest_terminal_summary` says so aloud."""
    for mark, (reason, is_there) in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and not is_there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"NOT TESTED HERE, marked '{mark}': {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Read from the reports: with several processes, those are all that this one has seen of the tests."""
    reasons = [str(r.longrepr[2]).removeprefix("Skipped: ") for r in terminalreporter.stats.get("skipped", [])]
    for reason in sorted(set(reasons)):
        terminalreporter.write_line(f"{reasons.count(reason)} skipped: {reason}", yellow=True)


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 384 tokens with a ChatML template, trained on a few sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    text = ["def function(argument): return argument", "the user and the assistant speak of this and that"] * 20
    bpe.train_from_iterator(text, trainer)
    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """A random Llama (4 layers, 4 heads in 2 groups, limit 512) with the tiny tokenizer; weights spread enough to
    make its text vary."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    ))  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def write_jsonl(tmp_path: Path):
    """Write rows (objects, or lines as they are) to a JSONL file and return its path as text."""

    def write(rows: list, name: str = "prompts.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(tmp_path / name)

    return write
