"""vLLM in a process of its own environment, spoken to over pipes (`worker.py` is the other end)."""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from draftkv.recipe import Recipe
from draftkv.teacher.engine import Request, Response
from draftkv.teacher.engines import answers
from draftkv.teacher.engines.serve import (
    ServedTokens,
    engine_environment,
    engine_python,
    vllm_options,
    weights_name,
)
from draftkv.teacher.engines.worker import __file__ as WORKER
from draftkv.teacher.signals import TopK

Found = TypeVar("Found")
LOOK_S = 0.5  # between looks at whether a process that says nothing still lives


class Worker:
    """A running `worker.py`. Everything that vLLM prints goes to `log`.

    Args:
        timeout_s: to wait for one answer.

    Raises:
        OSError: from every method, when the process has died or answers nothing in time.
        Refused: it says that the request cannot be answered.
    """

    def __init__(self, python: str, log: Path, timeout_s: float):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.timeout_s, self.rest = log, timeout_s, b""
        with open(log, "ab") as file:
            # A session of its own: Ctrl-C is ours to handle, and its engine processes can be ended with it.
            self.process = subprocess.Popen(
                [python, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                env=engine_environment(), start_new_session=True,
            )  # fmt: skip

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps({"what": what, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ConnectionError(self._epitaph()) from error
        answer = json.loads(self._line())
        if "error" in answer:
            raise answers.Refused(f"vLLM says: {' '.join(answer['error'].split())[:400]} (log: {self.log})")
        return answer

    def _line(self) -> bytes:
        until, source = time.monotonic() + self.timeout_s, self.process.stdout.fileno()
        parts = [self.rest]
        while b"\n" not in parts[-1]:
            ended = self.process.poll() is not None  # asked first: what it said before is still in the pipe then
            left = until - time.monotonic()
            # The pipe's end alone would not tell: a process that vLLM started may hold it open.
            if select.select([source], [], [], max(0.0, min(left, LOOK_S)))[0]:
                parts.append(os.read(source, 1 << 20))
                ended = not parts[-1]
            if ended:
                raise ConnectionError(self._epitaph())
            if left <= 0:
                raise TimeoutError(f"no answer in {self.timeout_s:g} s (engine.timeout_s); log: {self.log}")
        line, _, self.rest = b"".join(parts).partition(b"\n")
        return line

    def _epitaph(self) -> str:
        """How it ended, with the last line of its log that names an error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        lines = self.log.read_text(errors="replace").splitlines()
        told = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no log")
        return f"the engine's process ended (status {self.process.returncode}): {told.strip()[:300]}; log: {self.log}"

    def close(self, patience_s: float = 20.0) -> None:
        """End it, and whatever it started; by force when it takes longer."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


class Offline(ServedTokens):
    """Starts at the first question, for writing in `rollouts.dtype` or for scoring in `target.dtype`; a process that
    died or hangs is started again."""

    first_wait_s = 1.0

    def __init__(self, recipe: Recipe):
        self.recipe, self.about = recipe, {}
        self.worker: Worker | None = None
        self.stop = threading.Event()

    def write(self, requests: list[Request], max_new_tokens: int) -> list[Response]:
        asked = [{"prompt_ids": r.prompt_ids, "temperature": r.temperature, "seed": r.seed} for r in requests]

        def ask(worker: Worker) -> list[Response]:
            answer = worker.ask("write", requests=asked, max_new_tokens=max_new_tokens, stops=sorted(self._stops))
            return [answers.written(found, request, max_new_tokens, self._stops, len(self._tokenizer))
                    for found, request in zip(_all(answer, len(asked)), requests, strict=True)]  # fmt: skip

        return self._with(ask, self.recipe.rollouts.dtype)

    def score(self, rows: Sequence[dict[str, Any]], vocab: int) -> list[TopK]:
        asked = [{"ids": row["prompt_ids"] + row["response_ids"], "prompt_len": len(row["prompt_ids"])} for row in rows]
        k = self.recipe.signal.k

        def ask(worker: Worker) -> list[TopK]:
            found = _all(worker.ask("score", rows=asked, k=k), len(asked))
            return [self._scored(answer, row, k, vocab) for answer, row in zip(found, rows, strict=True)]

        return self._with(ask, self.recipe.target.dtype)

    def _scored(self, answer: dict[str, Any], row: dict[str, Any], k: int, vocab: int) -> TopK:
        try:
            return answers.scored(answer, row, k, vocab)
        except answers.BadAnswer as error:
            raise answers.BadAnswer(f"row {row['row_id']} at temperature {row['temperature']:g}: {error}") from None

    def _with(self, ask: Callable[[Worker], list[Found]], dtype: str) -> list[Found]:
        def once() -> list[Found]:
            try:
                return ask(self._started(dtype))
            except OSError:
                self.close(patience_s=0.0)
                raise

        return answers.retrying(self.recipe.engine, "offline engine", once, self.stop, self.first_wait_s)

    def _started(self, dtype: str) -> Worker:
        if self.worker is None:
            recipe = self.recipe
            python, options = engine_python(recipe), vllm_options(recipe, dtype)
            self.worker = Worker(python, Path(recipe.output) / "engine.log", recipe.engine.timeout_s)
            known = self.worker.ask("start", options=options)
            self.about = {"kind": "offline", **known, "model": recipe.target.model,
                          "weights": weights_name(recipe.target), "options": recipe.engine.options}  # fmt: skip
        return self.worker

    def close(self, **how: float) -> None:
        if self.worker is not None:
            self.worker.close(**how)
            self.worker = None

    def __enter__(self) -> "Offline":
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop.set()
        if raised[0] is None:
            self.close()
        else:
            self.close(patience_s=0.0)  # it may be in the middle of a batch that nobody waits for


def _all(answer: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Raises: BadAnswer when it is not one answer for each question."""
    found = answer.get("answers")
    if not isinstance(found, list) or len(found) != count:
        raise answers.BadAnswer(f"{len(found or [])} answers to {count} questions")
    return found
