"""From walks to the record of one evaluation, and the file `acceptance.jsonl` that holds such records.

A record says what one checkpoint reaches under one policy, at one temperature and kind of draft. `score` makes its
body; whoever runs the evaluation adds step, checkpoint, split, policy (label), spec (policy as data), temperature,
draft, draft_length, alpha, tie_rate and wall_s. Every value is plain JSON and a figure that does not exist is null.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftkv.acceptance import intervals
from draftkv.acceptance.intervals import Counts, Interval
from draftkv.acceptance.walk import MIN_BLOCKS, Walk
from draftkv.errors import InputError

# What makes two records the same measurement; a resumed run writes it again, and the later one holds. Evaluations of
# drafters outside the training have no step and are told apart by checkpoint.
IDENTITY = ("step", "checkpoint", "split", "policy", "temperature", "draft", "draft_length")


def score(
    walks: Sequence[Walk],
    row_ids: Sequence[str],
    full: Sequence[Walk] | None,
    bootstrap: int = 2000,
    seed: int = 0,
    bin_width: int = 32,
) -> dict[str, Any]:
    """The body of one record.

    Args:
        walks: one per prompt, all of one draft length.
        row_ids: the prompts' names, in the same order.
        full: the walks of the full cache on the same prompts; None when `walks` are the full cache's own, whose
            retention is 1 by definition and is written as null.
        bin_width: response positions per bin of AL along the generation; a block belongs to the bin it starts in.

    Returns:
        al, al_low, al_high (micro, tokens per block), al_macro; retention, retention_low, retention_high; prompts
        (usable), unusable (rows without a complete block); blocks, tokens (expected); per_position (conditional
        acceptance of drafted token 1..K), survival (joint); bins; per_prompt.

    Raises:
        InputError: no rows, or lists of different lengths.
    """
    if not walks:
        raise InputError("no rows to score: the evaluation set is empty")
    if len(walks) != len(row_ids) or (full is not None and len(full) != len(walks)):
        raise InputError(f"{len(walks)} walks for {len(row_ids)} rows: expected one per row, in the same order")
    if bin_width < 1:
        raise InputError(f"bin width {bin_width}: at least 1 token")
    counts = counts_of(walks)
    micro = intervals.al(counts, bootstrap, seed)
    kept = None if full is None else intervals.retention(counts, counts_of(full), bootstrap, seed)
    accepted = sum(w.accepted_at for w in walks)
    offered = sum(w.offered_at for w in walks)
    blocks = float(counts.blocks.sum())
    return {
        **_named("al", micro),
        "al_macro": counts.macro,
        **_named("retention", kept),
        "prompts": micro.prompts,
        "unusable": micro.unusable,
        "blocks": blocks,
        "tokens": float(counts.tokens.sum()),
        "per_position": [_ratio(a, o) for a, o in zip(accepted, offered, strict=True)],
        "survival": [_ratio(a, blocks) for a in accepted],
        "bins": _bins(walks, bin_width, bootstrap, seed),
        "per_prompt": {
            "row_ids": [str(name) for name in row_ids],
            "blocks": counts.blocks.tolist(),
            "tokens": counts.tokens.tolist(),
        },
    }


def counts_of(walks: Sequence[Walk]) -> Counts:
    """Blocks and tokens per prompt, for `draftkv.acceptance.intervals`."""
    return Counts([w.blocks for w in walks], [w.tokens for w in walks])


def _named(name: str, interval: Interval | None) -> dict[str, float | None]:
    ends = (None, None, None) if interval is None else (interval.value, interval.low, interval.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > MIN_BLOCKS else None


def _bins(walks: Sequence[Walk], width: int, bootstrap: int, seed: int) -> list[dict[str, Any]]:
    """AL of the blocks that start in [from, to), with an interval over prompts; positions count from x_0.

    Only starts with room for K + 1 tokens are binned. Nearer to the end just the short blocks are complete, and the
    last bin would dip for that reason alone.
    """
    draft_length = len(walks[0].accepted_at)
    longest = max(len(w.starts) - draft_length for w in walks)
    edges = np.arange(0, max(longest, 1), width)
    blocks, tokens = np.zeros((len(walks), len(edges))), np.zeros((len(walks), len(edges)))
    for row, w in enumerate(walks):
        here = np.arange(max(len(w.starts) - draft_length, 0)) // width
        np.add.at(blocks[row], here, w.starts[: len(here)])
        np.add.at(tokens[row], here, w.emitted[: len(here)])
    keep = blocks.sum(1) > MIN_BLOCKS
    if not keep.any():
        return []
    times = intervals.draws(int(keep.sum()), bootstrap, seed)
    drawn_blocks, drawn_tokens = times @ blocks[keep], times @ tokens[keep]
    result = []
    for index, start in enumerate(edges):
        whole = blocks[:, index].sum()
        filled = drawn_blocks[:, index] > MIN_BLOCKS
        low, high = intervals.bounds(drawn_tokens[filled, index] / drawn_blocks[filled, index])
        value = _ratio(tokens[:, index].sum(), whole)
        result.append({"from": int(start), "to": int(min(start + width, longest)), "al": value,
                       "low": low if value is not None else None, "high": high if value is not None else None,
                       "blocks": float(whole)})
    return result


def read_acceptance(path: str | Path) -> list[dict[str, Any]]:
    """The records of an `acceptance.jsonl`, each measurement once.

    A last line that a killed run left unfinished is ignored; a later record of the same measurement (`IDENTITY`)
    replaces an earlier one.

    Raises:
        InputError: no such file, or a malformed line that is not the last (file and line are named).
    """
    return list({tuple(r.get(k) for k in IDENTITY): r for r in read_jsonl(path)}.values())


def append_jsonl(path: str | Path, record: dict[str, Any]) -> None:
    """Append one object as a line. What a killed run left of an unfinished last line is cut away first.

    Raises:
        ValueError: a value that JSON cannot hold, such as a NaN.
    """
    line = (json.dumps(record, allow_nan=False) + "\n").encode()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if path.exists() else "w+b") as file:
        text = file.read()
        file.seek(text.rfind(b"\n") + 1)
        file.truncate()
        file.write(line)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; an unfinished last line is ignored.

    Raises:
        InputError: see `read_acceptance`.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise InputError(f"{path}:{number}: not valid JSON: {error.msg}") from None
        if not isinstance(record, dict):
            raise InputError(f"{path}:{number}: expected an object")
        records.append(record)
    return records
