"""A stand-in for vLLM's OpenAI-compatible server: a tiny model's true answers in vLLM's form, and faults on demand."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from draftkv.models import load_model, load_tokenizer
from draftkv.teacher.engine import Engine, Request


class FakeEngine(ThreadingHTTPServer):
    """Serves at `url` until it is closed.

    Attributes:
        fault: given (path, request body, answer), returns the answer to send; None: the true one. A number is a
            status, bytes are sent as they are.
        asked: bodies of the completions that were asked for.
        peak: most requests that were in work at one time.
    """

    daemon_threads = True

    def __init__(self, model_id: str, port: int = 0, **card):
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.tokenizer, self.model = load_tokenizer(model_id), load_model(model_id)
        self.cards = [{"id": model_id, "root": model_id, "max_model_len": 4096, **card}]
        self.fault: Callable | None = None
        self.asked: list[dict] = []
        self.work = self.peak = 0
        self.pause, self.guard, self.one_at_a_time = 0.0, threading.Lock(), threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *raised) -> None:
        self.close()

    def answer(self, path: str, body: dict | None):
        if path == "/v1/models":
            return {"object": "list", "data": self.cards}
        if path == "/version":
            return {"version": "fake"}
        if path == "/tokenize":
            return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        self.asked.append(body)
        with self.one_at_a_time:
            return {"choices": [score(self.model, body) if "prompt_logprobs" in body else self.write(body)]}

    def write(self, body: dict) -> dict:
        engine = Engine(self.model, len(self.tokenizer), set(body["stop_token_ids"]))
        found = engine.write([Request(body["prompt"], body["temperature"], body["seed"])], body["max_tokens"])[0]
        logprobs = {"tokens": [f"token_id:{i}" for i in found.ids], "token_logprobs": found.logprobs_t1}
        return {"prompt_token_ids": body["prompt"], "token_ids": found.ids, "logprobs": logprobs,
                "finish_reason": found.finish_reason}  # fmt: skip


@torch.no_grad()
def score(model, body: dict) -> dict:
    """As vLLM: the fed token's own entry first, then the top k, a token's own rank behind those where it is not one."""
    ids, k = body["prompt"], body["prompt_logprobs"]
    table = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    positions: list[dict | None] = [None]
    for row, fed in zip(table[:-1], ids[1:], strict=True):
        top = row.topk(k)
        rank = int((row >= row[fed]).sum())
        entries = {fed: {"logprob": row[fed].item(), "rank": rank}}
        best = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        entries |= {token: {"logprob": x, "rank": place} for place, (token, x) in enumerate(best, start=1)}
        positions.append({str(token): entry for token, entry in entries.items()})
    return {"prompt_token_ids": ids, "prompt_logprobs": positions, "token_ids": [0]}


class _Handler(BaseHTTPRequestHandler):
    server: FakeEngine

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict | None) -> None:
        server = self.server
        with server.guard:
            server.work += 1
            server.peak = max(server.peak, server.work)
        try:
            time.sleep(server.pause)
            answer = server.answer(self.path, body)
            if server.fault is not None:
                answer = server.fault(self.path, body, answer)
        finally:
            with server.guard:
                server.work -= 1
        status, text = (answer, b'{"error": {"message": "as told"}}') if isinstance(answer, int) else (200, answer)
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        except OSError:
            pass  # the client did not wait

    def log_message(self, *words) -> None:
        """Nothing on stderr."""
