"""An engine's acceptance length beside ours, on the texts that the engine wrote.

Rules, of both: at temperature 0 a draft is accepted when it is the target's argmax; the first token of a response comes
from the prefill and is never drafted; AL counts the bonus token. They part at the end of a response. The engine counts
a last block in full, also the accepted tokens beyond `max_tokens`; our AL leaves a block out that was cut off. So the
plain greedy texts run K tokens on, past EOS too, and replay counts them once as the engine does (equal numbers prove
that the engine serves what was trained) and once in our way (the number that all our tables show).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftkv.acceptance.walk import greedy_blocks, walk
from draftkv.errors import RunError
from draftkv.recipe import Recipe
from draftkv.teacher.engines.answers import Refused
from draftkv.teacher.engines.offline import Worker
from draftkv.teacher.engines.serve import engine_python, vllm_options

DRAFTS, DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))


@dataclass(frozen=True)
class Counted:
    """Verified blocks, and the accepted drafts in them."""

    blocks: int
    accepted: int

    @property
    def al(self) -> float:
        return 1 + self.accepted / self.blocks


def counted_as_engines_do(flags: Sequence[np.ndarray], draft_length: int, tokens: int) -> Counted:
    """What an engine's counters show for responses of `tokens` tokens.

    Args:
        flags: of each response, [at least tokens + draft_length - 1] 0/1 acceptance; entry 0 is not read.
    """
    blocks = accepted = 0
    for row in flags:
        start = 1
        for taken in greedy_blocks(row, draft_length, finished=False):
            if start >= tokens:
                break
            blocks, accepted, start = blocks + 1, accepted + taken, start + taken + 1
    return Counted(blocks, accepted)


def counted_as_we_do(flags: Sequence[np.ndarray], draft_length: int, tokens: int) -> Counted:
    """Complete blocks within the first `tokens` tokens alone."""
    walks = [walk(row[:tokens], draft_length, finished=False) for row in flags]
    blocks = round(sum(w.blocks for w in walks))
    return Counted(blocks, round(sum(w.tokens for w in walks)) - blocks)


def difference(speculative: Sequence[list[int]], plain: Sequence[list[int]]) -> str | None:
    """How the engine's speculative texts differ from its own plain greedy ones; None if they do not."""
    found = []
    for index, (ours, theirs) in enumerate(zip(speculative, plain, strict=True)):
        if ours != theirs[: len(ours)]:
            found.append((index, next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)))
    if not found:
        return None
    prompt, place = found[0]
    return f"{len(found)} of {len(plain)} texts differ from plain greedy decoding, the first (prompt {prompt}) from" \
           f" token {place} on"  # fmt: skip


class ServedTarget:
    """The recipe's target in vLLM, offline and in fp32, alone or with a drafter.

    Args:
        longest: prompt and response together, in tokens.
        drafter: folder; None: plain decoding.
        options: of vLLM; `engine.options` of the recipe come last.

    Raises:
        InputError: no engine environment.
        RunError: vLLM does not start, or dies.
    """

    def __init__(self, recipe: Recipe, longest: int, drafter: Path | None = None, **options: Any):
        options = {**vllm_options(recipe, "float32"), "max_model_len": longest, "disable_log_stats": False, **options}
        if drafter is not None:
            options["speculative_config"] = {"model": str(drafter), "method": "draft_model",
                                             "num_speculative_tokens": recipe.eval.draft_length}  # fmt: skip
        options |= recipe.engine.options
        self.worker = Worker(engine_python(recipe), recipe.run_dir / "engine.log", recipe.engine.timeout_s)
        try:
            self.version = self._ask("start", options=options)["vllm"]
        except BaseException:
            self.worker.close()
            raise

    def write(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Greedy responses of exactly `tokens` tokens."""
        requests = [{"prompt_ids": ids, "temperature": 0.0, "seed": 0} for ids in prompts]
        found = self._ask("write", requests=requests, max_new_tokens=tokens, stops=[], ignore_eos=True)["answers"]
        texts = [answer["ids"] for answer in found]
        if [len(text) for text in texts] != [tokens] * len(prompts):
            raise RunError(f"the engine wrote texts of {sorted({len(text) for text in texts})} tokens, not {tokens}")
        return texts

    def counted(self, draft_length: int) -> Counted:
        """Its counters since it started.

        Raises:
            RunError: nothing was drafted, or blocks of another length than asked for.
        """
        values = self._ask("counters")
        blocks, drafted, accepted = (values.get(name, 0) for name in (DRAFTS, DRAFTED, ACCEPTED))
        if not blocks or drafted != blocks * draft_length:
            raise RunError(f"the engine drafted {drafted} tokens in {blocks} blocks; {draft_length} in each were asked"
                           f" for (log: {self.worker.log})")  # fmt: skip
        return Counted(blocks, accepted)

    def _ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        try:
            return self.worker.ask(what, **arguments)
        except (OSError, Refused) as error:
            raise RunError(f"vLLM: {error}") from error

    def __enter__(self) -> "ServedTarget":
        return self

    def __exit__(self, *raised: object) -> None:
        self.worker.close()
