"""The target behind vLLM's OpenAI-compatible server: `/v1/completions` with token ids in and out.

Requests of a batch run side by side, `engine.concurrency` of them at most; the next batch begins when this one is on
the disk. A request that fails, takes longer than `engine.timeout_s` or is answered wrongly is asked again (`answers`).
Set DRAFTKV_ENGINE_KEY where the server wants an API key.
"""

import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import Any, TypeVar
from urllib.parse import urlsplit

from draftkv import models
from draftkv.errors import InputError
from draftkv.recipe import Recipe
from draftkv.teacher.engine import Request, Response
from draftkv.teacher.engines import answers
from draftkv.teacher.engines.serve import ServedTokens, needed_length, weights_name
from draftkv.teacher.signals import TopK

# Sent in full, so that no default of the server or of the model's generation configuration shapes the distribution.
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
         "frequency_penalty": 0.0, "return_token_ids": True, "return_tokens_as_token_ids": True,
         "add_special_tokens": False}  # fmt: skip
PROBE = "def f(x):\n    return x ** 2  # na\u00efve \u4f60\u597d, the 12345th"
Item = TypeVar("Item")
Found = TypeVar("Found")


class Server(ServedTokens):
    """A client of one server; it connects, and checks what is served, at the first question."""

    first_wait_s = 1.0

    def __init__(self, recipe: Recipe):
        self.recipe, self.settings = recipe, recipe.engine
        self.about: dict[str, Any] = {}
        self.links = Links(self.settings.url, self.settings.timeout_s)
        self.stop, self.pool = threading.Event(), ThreadPoolExecutor(self.settings.concurrency)

    def write(self, requests: list[Request], max_new_tokens: int) -> list[Response]:
        self._meet()

        def one(index: int, request: Request) -> Response:
            body = {"prompt": request.prompt_ids, "max_tokens": max_new_tokens, "temperature": request.temperature,
                    "seed": request.seed, "logprobs": 0, "stop_token_ids": sorted(self._stops)}  # fmt: skip
            answer = written_answer(self._complete(body))
            return answers.written(answer, request, max_new_tokens, self._stops, len(self._tokenizer))

        return self._each(requests, "request {index} of the batch", one)

    def score(self, rows: Sequence[dict[str, Any]], vocab: int) -> list[TopK]:
        self._meet()
        k = self.recipe.signal.k

        def one(index: int, row: dict[str, Any]) -> TopK:
            # Generates one token, which nobody reads: a server answers no request without one.
            body = {"prompt": [*row["prompt_ids"], *row["response_ids"]], "max_tokens": 1, "temperature": 0.0,
                    "prompt_logprobs": k}  # fmt: skip
            choice = self._complete(body)
            return answers.scored(scored_answer(choice, len(row["prompt_ids"])), row, k, vocab)

        return self._each(rows, "row {item[row_id]} at temperature {item[temperature]:g}", one)

    def _each(self, items: Sequence[Item], name: str, one: Callable[[int, Item], Found]) -> list[Found]:
        """Answers in the order of `items`. The first failure, or Ctrl-C, ends every other request at once."""
        failures: list[Exception] = []

        def with_retries(index: int) -> Found:
            if self.stop.is_set():
                raise CancelledError
            what = f"{self.settings.url}: {name.format(index=index, item=items[index])}"
            try:
                return answers.retrying(self.settings, what, lambda: one(index, items[index]), self.stop,
                                        self.first_wait_s)  # fmt: skip
            except Exception as error:
                # Here, not where it is noticed: this thread would send the next request before that.
                failures.append(error)
                self.stop.set()
                raise

        tasks = [self.pool.submit(with_retries, index) for index in range(len(items))]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
            if failures:
                raise failures[0]
        except BaseException:
            self._end()
            raise
        return [task.result() for task in tasks]

    def _end(self) -> None:
        self.stop.set()
        self.links.cut()
        self.pool.shutdown(cancel_futures=True)

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The one choice of a completion."""
        answer = self.links.ask("POST", "/v1/completions", {"model": self.about["model"], **PLAIN, **body})
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise answers.BadAnswer("not one completion")
        return choices[0]

    # ------------------------------------------------------------------------------------------ who is being asked

    def _meet(self) -> None:
        """Once: check that the server serves the recipe's target, with its tokenizer and room for the longest row.

        Raises:
            InputError: it does not; the message says what it serves.
            RunError: out of reach.
        """
        if self.about:
            return

        def ask(method: str, path: str, body: dict | None = None) -> dict[str, Any]:
            get = lambda: self.links.ask(method, path, body)  # noqa: E731
            return answers.retrying(self.settings, f"{self.settings.url}{path}", get, self.stop, self.first_wait_s)

        cards = ask("GET", "/v1/models").get("data") or []
        card = self._served(cards)
        limit, needed = card.get("max_model_len"), needed_length(self.recipe)
        if limit is not None and limit < needed:
            raise InputError(f"{self.settings.url}: its max_model_len is {limit}; this recipe needs {needed} (prompt,"
                             " response and one token to answer with); start it with launch/serve_target.sh")
        tokens = ask("POST", "/tokenize", {"model": card["id"], "prompt": PROBE, "add_special_tokens": False})
        if tokens.get("tokens") != self._tokenizer.encode(PROBE, add_special_tokens=False):
            raise InputError(f"{self.settings.url}: its tokenizer is not that of {self.recipe.target.model}")
        version = ask("GET", "/version").get("version")
        self.about = {"kind": "server", "vllm": version, "model": card["id"], "weights": weights_of(cards),
                      "max_model_len": limit, "options": self.settings.options}  # fmt: skip

    def _served(self, cards: list[dict[str, Any]]) -> dict[str, Any]:
        """The entry of `/v1/models` to ask for. Names alone prove little, so launch/serve_target.sh adds one that is
        made of the weights' hashes; where there is one, it has to be ours."""
        target = self.recipe.target
        wanted = [self.settings.model] if self.settings.model else [target.model, models.resolve(target.model)]
        found = [card for card in cards if card.get("id") in wanted or card.get("root") in wanted]
        if not found:
            served = ", ".join(str(card.get("id")) for card in cards) or "nothing"
            raise InputError(f"{self.settings.url}: serves {served}, not {wanted[0]}; see engine.url, engine.model")
        fingerprint = weights_of(cards)
        if fingerprint not in (None, weights_name(target)):
            raise InputError(f"{self.settings.url}: serves other weights ({fingerprint}) than {target.model} has here"
                             f" ({weights_name(target)})")  # fmt: skip
        return found[0]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()


def weights_of(cards: list[dict[str, Any]]) -> str | None:
    """The name made of the weights' hashes, if the server has one."""
    return next((card["id"] for card in cards if str(card.get("id")).startswith("weights:")), None)


def written_answer(choice: dict[str, Any]) -> dict[str, Any]:
    """Raises: BadAnswer for a choice without the fields of a completion with ids and log-probabilities."""
    try:
        if choice["logprobs"]["tokens"] != [f"token_id:{token}" for token in choice["token_ids"]]:
            raise answers.BadAnswer("log-probabilities of other tokens than those it wrote")
        return {"prompt_ids": choice["prompt_token_ids"], "ids": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"], "finish_reason": choice["finish_reason"]}  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise answers.BadAnswer(f"a completion without token ids or log-probabilities ({error})") from None


def scored_answer(choice: dict[str, Any], prompt_len: int) -> dict[str, Any]:
    """Entries of the prompt's positions are left empty: nothing reads them.

    Raises:
        BadAnswer: no log-probabilities of the prompt, or none in vLLM's form.
    """
    try:
        positions = [
            None if entries is None else [] if place < prompt_len
            else [(int(token), entry["logprob"], entry["rank"]) for token, entry in entries.items()]
            for place, entries in enumerate(choice["prompt_logprobs"])
        ]  # fmt: skip
        return {"prompt_ids": choice["prompt_token_ids"], "positions": positions}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise answers.BadAnswer(f"an answer without log-probabilities of the prompt ({error})") from None


class Links:
    """One connection for each request, so that all can be cut. No proxy: an engine is a machine of the same cluster."""

    def __init__(self, url: str, timeout_s: float):
        parts = urlsplit(url)
        self.make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.address, self.base, self.timeout_s = parts.netloc, parts.path.rstrip("/"), timeout_s
        self.open: set[http.client.HTTPConnection] = set()

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request and its JSON.

        Raises:
            OSError: no connection, a timeout, or a server that says it cannot answer now.
            BadAnswer: no JSON object.
            Refused: a request that the server will never answer.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("DRAFTKV_ENGINE_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        link = self.make(self.address, timeout=self.timeout_s)
        self.open.add(link)
        try:
            link.request(method, self.base + path, None if body is None else json.dumps(body), headers)
            response = link.getresponse()
            status, text = response.status, response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"not a whole answer ({type(error).__name__})") from error
        except TimeoutError as error:
            raise TimeoutError(f"no answer in {self.timeout_s:g} s") from error
        finally:
            self.open.discard(link)
            link.close()
        if status >= 500 or status in (408, 429):
            raise ConnectionError(f"status {status}: {_message(text)}")
        if status != 200:
            raise answers.Refused(f"status {status}: {_message(text)}")
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise answers.BadAnswer("not a JSON object")
        return answer

    def cut(self) -> None:
        """Close every connection, also those that a thread waits on."""
        for link in list(self.open):
            # None while it connects; closed by the other side, or by its thread, in the meantime.
            with contextlib.suppress(OSError, AttributeError):
                link.sock.shutdown(socket.SHUT_RDWR)


def _message(text: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.decode(errors="replace").split())[:200] or "no reason given"
