"""Teacher engines: what runs the target for rollouts and for stored signals.

    transformers    in this process                                          local.py
    server          vLLM behind its OpenAI-compatible server, over HTTP      server.py
    offline         vLLM in a process of its own environment, over pipes     offline.py, worker.py

All answer the same two questions. vLLM's answers are checked (`answers.py`) before anything is made of them: what is
short, shifted, misordered or another model's is asked for again and then refused, never stored.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from draftkv.recipe import Recipe
from draftkv.teacher.engine import Request, Response
from draftkv.teacher.signals import TopK


class TeacherEngine(Protocol):
    """A context manager that loads, starts or connects when it is first asked.

    about: what wrote the answers (kind, version, the served model), for manifests; empty before the first question.
    """

    about: dict[str, Any]

    def write(self, requests: list[Request], max_new_tokens: int) -> list[Response]:
        """One response for each request, in their order.

        Raises:
            InputError: an engine that cannot serve the recipe (another model, too short a limit, not installed).
            RunError: an engine that stays out of reach, or whose answers stay wrong.
        """

    def score(self, rows: Sequence[dict[str, Any]], vocab: int) -> list[TopK]:
        """The target's signal for each rollout row, one entry for each of its response tokens 1 .. R - 1, over the
        first `vocab` ids and as `recipe.signal` says.

        Raises: as `write`.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None): ...


def open_engine(recipe: Recipe) -> TeacherEngine:
    """The engine that `recipe.engine` names; nothing is loaded or started yet."""
    if recipe.engine.kind == "server":
        from draftkv.teacher.engines.server import Server

        return Server(recipe)
    if recipe.engine.kind == "offline":
        from draftkv.teacher.engines.offline import Offline

        return Offline(recipe)
    from draftkv.teacher.engines.local import Local

    return Local(recipe)


def engine_ingredient(recipe: Recipe) -> dict[str, Any]:
    """What the engine adds to the identity of a store. vLLM rounds otherwise than transformers, which may decide a
    token, so the two never share one; served or offline, on whichever machine, vLLM is vLLM, but for options that make
    another model of the target (a quantization)."""
    if not recipe.engine.is_vllm:
        return {}
    return {"engine": "vllm", **({"options": recipe.engine.deciding} if recipe.engine.deciding else {})}
