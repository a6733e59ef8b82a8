"""Prompts: rows of a file, a hub data set or an embedded source -> chat template -> token ids.

A row holds one of
    messages   a chat, [{"role", "content"}, ...]; what follows the last user message is left for the target to write
    prompt     text, or a chat
    text       text, used as one user message
    turns      user messages of one conversation (SPEED-Bench): each turn becomes a row of its own, whose context holds
               the earlier turns and the target's own answers to them (`draftkv.teacher.rollouts` writes turn by turn)
and may hold `category`, `source` and `row_id`. A malformed row is an error that names file and line. A well-formed row
that cannot be used is skipped and counted by reason.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from draftkv import embedded_prompts
from draftkv.errors import InputError
from draftkv.models import HUB_ID, hub_is_reachable, quiet
from draftkv.recipe import PromptSource

# What the public files of SPEED-Bench hold where a source's licence forbids copying its text.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
SPEED_BENCH = re.compile(r"speed[-_ ]?bench", re.IGNORECASE)
Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One thing to answer. `later_turns` are the user messages that follow once the target has answered."""

    row_id: str
    messages: list[Message]
    prompt_ids: list[int]
    source: str
    category: str
    later_turns: tuple[str, ...] = ()


@dataclass
class PromptSet:
    """Usable prompts in the order of their source, and how many rows were skipped, by reason."""

    prompts: list[Prompt] = field(default_factory=list)
    skipped: Counter = field(default_factory=Counter)


def load_prompts(
    source: PromptSource, tokenizer: Tokenizer, max_prompt_tokens: int, role: Literal["train", "eval"]
) -> PromptSet:
    """Read a source until `limit` usable prompts are found.

    Raises:
        InputError: missing file, malformed row (file and line), a data set with nothing to use, a hub data set that
            cannot be read, or SPEED-Bench as training data.
    """
    if role == "train" and SPEED_BENCH.search(source.source):
        raise InputError(_speed_bench_refusal(source.source))
    result, seen = PromptSet(), set()
    for where, row in read_rows(source, tokenizer, max_prompt_tokens):
        if role == "train" and _is_speed_bench(row):
            raise InputError(_speed_bench_refusal(where))
        messages, later = conversation(row, where)
        category = str(row.get("category") or "none")
        reason = _unusable(messages, later, category, source.categories)
        if reason is None:
            ids = render(messages, tokenizer, where)
            reason = too_long(len(ids), max_prompt_tokens)
        if reason is not None:
            result.skipped[reason] += 1
            continue
        row_id = str(row.get("row_id") or where)
        if row_id in seen:
            raise InputError(f"{where}: row_id '{row_id}' occurs twice")
        seen.add(row_id)
        result.prompts.append(Prompt(row_id, messages, ids, str(row.get("source") or source.source), category, later))
        if len(result.prompts) == source.limit:
            break
    if not result.prompts:
        why = ", ".join(f"{n} {reason}" for reason, n in result.skipped.items()) or "it has no rows"
        raise InputError(f"{source.source}: no usable prompt in this data set ({why})")
    return result


def next_turn(prompt: Prompt, answer: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt of the following turn, given what the target answered to this one."""
    first, *rest = prompt.later_turns
    messages = [*prompt.messages, {"role": "assistant", "content": answer}, {"role": "user", "content": first}]
    stem, _, turn = prompt.row_id.rpartition("@turn")
    row_id = f"{stem}@turn{int(turn) + 1}" if stem else f"{prompt.row_id}@turn2"
    ids = render(messages, tokenizer, row_id)
    return replace(prompt, row_id=row_id, messages=messages, prompt_ids=ids, later_turns=tuple(rest))


def too_long(tokens: int, max_prompt_tokens: int) -> str | None:
    """The reason to skip a prompt of so many tokens, or None."""
    return f"longer than {max_prompt_tokens} tokens" if tokens > max_prompt_tokens else None


def render(messages: list[Message], tokenizer: Tokenizer, where: str) -> list[int]:
    """Token ids of a chat up to the point where the target begins to write.

    A tokenizer without a chat template gets the plain text of the messages.

    Raises:
        InputError: the template refuses the messages.
    """
    if not tokenizer.chat_template:
        return tokenizer("\n\n".join(m["content"] for m in messages))["input_ids"]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    except (TemplateError, ValueError) as error:
        raise InputError(f"{where}: the chat template refuses this row: {' '.join(str(error).split())}") from error


def conversation(row: Any, where: str) -> tuple[list[Message], tuple[str, ...]]:
    """(messages to answer, later user messages) of one row.

    Raises:
        InputError: malformed; names `where`.
    """
    if not isinstance(row, dict):
        raise InputError(f"{where}: a row is an object with one of messages, prompt, text, turns")
    if isinstance(turns := row.get("turns"), list | tuple) and turns and all(isinstance(t, str) for t in turns):
        return [{"role": "user", "content": turns[0]}], tuple(turns[1:])
    for key in ("messages", "prompt", "text"):
        value = row.get(key)
        if isinstance(value, str) and key != "messages":
            return [{"role": "user", "content": value}], ()
        if isinstance(value, list) and key != "text":
            return _chat(value, f"{where}: {key}"), ()
    raise InputError(
        f"{where}: needs `messages` (a list), `prompt` or `text` (strings) or `turns` (a list of strings);"
        f" this row has {', '.join(sorted(map(str, row))) or 'no keys'}"
    )


def _chat(messages: list, where: str) -> list[Message]:
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise InputError(f"{where}: every message is an object with text under `role` and `content`")
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    if last is None:
        raise InputError(f"{where}: no message of role 'user', so there is nothing to answer")
    return [{"role": m["role"], "content": m["content"]} for m in messages[: last + 1]]


def _unusable(
    messages: list[Message], later: tuple[str, ...], category: str, categories: list[str] | None
) -> str | None:
    texts = [m["content"] for m in messages if m["role"] == "user"] + list(later)
    if categories is not None and category not in categories:
        return "of another category"
    if any(not text.strip() for text in texts):
        return "empty"
    if any(PLACEHOLDER in text for text in texts):
        return "placeholder (text not fetched)"
    return None


def _is_speed_bench(row: dict) -> bool:
    keys = row.keys() if isinstance(row, dict) else set()
    return {"question_id", "turns"} <= keys and bool({"src_id", "difficulty"} & keys)


def _speed_bench_refusal(where: str) -> str:
    return f"prompts.train: {where} is SPEED-Bench, which is licensed for evaluation only; use it under prompts.eval"


# ------------------------------------------------------------------------------------------------------ reading rows


def read_rows(source: PromptSource, tokenizer: Tokenizer, max_prompt_tokens: int) -> Iterator[tuple[str, dict]]:
    """(where, row) of every row; `where` is what an error message names.

    Raises:
        InputError: the source does not exist or is not readable.
    """
    scheme, _, name = source.source.partition(":")
    path = Path(source.source).expanduser()
    if scheme == "embedded" and name:
        for row in embedded_prompts.rows(name, source.split, tokenizer, max_prompt_tokens):
            yield f"{source.source} {row['row_id']}", row
    elif path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise InputError(f"{source.source}: no such file")
        yield from _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
    elif path.is_file() or not HUB_ID.fullmatch(source.source):
        raise InputError(
            f"{source.source}: prompts are a .jsonl or .parquet file, a hub data set (ORGANISATION/NAME), or"
            " embedded:code, embedded:prose, embedded:humaneval, embedded:mixed"
        )
    else:
        yield from _hub(source)


def _jsonl(path: Path) -> Iterator[tuple[str, dict]]:
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield f"{path}:{number}", _parsed(line, f"{path}:{number}")


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not a line of JSON: {error.msg} at column {error.colno}") from error


def _parquet(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256):
            for row in batch.to_pylist():
                number += 1
                # A column that other rows need is null here: as good as absent.
                yield f"{path}:{number}", {k: v for k, v in row.items() if v is not None}
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from error


def _hub(source: PromptSource) -> Iterator[tuple[str, dict]]:
    import datasets

    if not hub_is_reachable():
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
    try:
        with quiet():
            rows = datasets.load_dataset(source.source, source.config, split=source.split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{source.source}: cannot be read as a hub data set: {reason}") from error
    for number, row in enumerate(rows, 1):
        yield f"{source.source}:{number}", {k: v for k, v in row.items() if v is not None}
