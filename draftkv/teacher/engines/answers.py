"""What vLLM answers, checked: every fault of a server that a store must not hold is a `BadAnswer` here.

One form for both ways of asking. A written answer: `prompt_ids`, `ids`, `logprobs` (at temperature 1, one for each id),
`finish_reason`. A scored answer: `prompt_ids` and `positions`, one for each token of the sequence: None for the first
(nothing comes before it), else a list of (id, log-probability, rank): the k likeliest, and the token that was fed
where it is not among them.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from draftkv.errors import RunError
from draftkv.serving import Engine
from draftkv.teacher.engine import Request, Response
from draftkv.teacher.signals import TopK

# Above 0, or of a sum above 1: fp32 rounds, a fault does not.
ROUNDING = 1e-4
# Finite, because reverse KL would be infinite: the mass that fp32 log-probabilities cannot tell from none.
NO_TAIL = math.log(2.0**-24)
# Median distance of a row's log-probabilities from those in the rollouts. Dtypes and kernels move them by hundredths.
OTHER_MODEL = 0.5
LONGEST_WAIT_S = 30.0

Answer = TypeVar("Answer")


class BadAnswer(Exception):
    """An answer that must not be stored; the text says what is wrong with it."""


class Refused(Exception):
    """A request that the engine refuses whenever it is asked."""


def retrying(
    settings: Engine, what: str, ask: Callable[[], Answer], stop: threading.Event, first_wait_s: float = 1.0
) -> Answer:
    """Ask until there is an answer: waits 1, 2, 4 ... 30 seconds after a failure or a bad answer.

    Raises:
        RunError: `settings.retries` more tries failed as well, `stop` was set, or the engine refuses the request.
    """
    for tries in range(settings.retries + 1):
        try:
            return ask()
        except Refused as error:
            raise RunError(f"{what}: {error}") from error
        except (OSError, BadAnswer) as error:
            last = error
        if tries < settings.retries and stop.wait(min(first_wait_s * 2**tries, LONGEST_WAIT_S)):
            break
    reason = getattr(last, "strerror", None) or str(last) or type(last).__name__
    raise RunError(f"{what}: {reason} ({tries + 1} tries); finished shards are kept, the same command goes on")


def written(answer: dict[str, Any], request: Request, max_new_tokens: int, stops: set[int], vocab: int) -> Response:
    """A response from a written answer.

    Args:
        stops: ids that end a response.
        vocab: ids that the tokenizer knows.

    Raises:
        BadAnswer: of another prompt, cut short, running past its end, with ids or log-probabilities out of range.
    """
    ids, logprobs, reason = answer["ids"], answer["logprobs"], answer["finish_reason"]
    if answer["prompt_ids"] != request.prompt_ids:
        raise BadAnswer("it answers another prompt than was sent")
    if len(logprobs) != len(ids):
        raise BadAnswer(f"{len(ids)} tokens with {len(logprobs)} log-probabilities")
    if not 1 <= len(ids) <= max_new_tokens:
        raise BadAnswer(f"{len(ids)} tokens where 1 to {max_new_tokens} were asked for")
    if not all(0 <= i < vocab for i in ids):
        raise BadAnswer(f"token {max(ids)} is none of the tokenizer's {vocab}")
    if not all(map(_is_logprob, logprobs)):
        raise BadAnswer("a log-probability that is not a number up to 0")
    stopped = [place for place, token in enumerate(ids) if token in stops]
    if reason not in ("stop", "length"):
        raise BadAnswer(f"it ended for the reason {reason!r}")
    if stopped != ([len(ids) - 1] if reason == "stop" else []):
        raise BadAnswer(f"it ended for the reason '{reason}', and stop tokens stand at {stopped} of {len(ids)}")
    if reason == "length" and len(ids) != max_new_tokens:
        raise BadAnswer(f"it was stopped by length after {len(ids)} of {max_new_tokens} tokens")
    # At temperature 1 the two are the same, and a greedy response has no distribution of its own.
    return Response(ids, logprobs, list(logprobs), reason)


def scored(answer: dict[str, Any], row: dict[str, Any], k: int, vocab: int) -> TopK:
    """The signal [R - 1] of a rollout row from a scored answer.

    Raises:
        BadAnswer: positions missing or shifted, tokens out of range or twice, log-probabilities that are no sorted
            part of a distribution, or that are not those of the target that wrote the row.
    """
    prompt, response, positions = row["prompt_ids"], row["response_ids"], answer["positions"]
    if answer["prompt_ids"] != prompt + response:
        raise BadAnswer("it answers another sequence than was sent")
    if len(positions) != len(prompt) + len(response):
        raise BadAnswer(f"{len(positions)} positions for {len(prompt) + len(response)} tokens")
    empty = [place for place, entries in enumerate(positions) if entries is None]
    if empty != [0]:
        raise BadAnswer(f"positions without log-probabilities: {empty[:3]}; expected the first, which nothing precedes")
    ids, logprobs, fed = [], [], []
    for place in range(1, len(response)):
        try:
            top, of_fed = _top(positions[len(prompt) + place], response[place], k, vocab)
        except BadAnswer as error:
            raise BadAnswer(f"response position {place}: {error}") from None
        ids.append([token for token, _, _ in top])
        logprobs.append([logprob for _, logprob, _ in top])
        fed.append(of_fed)
    _same_target(fed, row)
    table = np.asarray(logprobs, dtype=np.float64).reshape(-1, k)
    highest = table.max(1, keepdims=True, initial=-math.inf)
    mass = highest[:, 0] + np.log(np.exp(table - highest).sum(1))
    if len(mass) and mass.max() > ROUNDING:
        raise BadAnswer(f"response position {int(mass.argmax()) + 1}: the top {k} sum to {math.exp(mass.max()):.4f}")
    # log(1 - mass) without losing a small tail's digits; a tail below what fp32 resolves is cut off at that.
    tail = np.log(np.maximum(-np.expm1(np.minimum(mass, 0.0)), math.exp(NO_TAIL)))
    return TopK(torch.tensor(ids, dtype=torch.long).view(-1, k), torch.tensor(table, dtype=torch.float32),
                torch.tensor(tail, dtype=torch.float32))  # fmt: skip


def _top(
    entries: Sequence[tuple[int, float, int]], fed: int, k: int, vocab: int
) -> tuple[list[tuple[int, float, int]], float]:
    """The k likeliest of one position, sorted, and the log-probability of the token that was fed."""
    if len(entries) not in (k, k + 1):
        raise BadAnswer(f"{len(entries)} log-probabilities, expected {k} (and one for the token fed)")
    found = {token: logprob for token, logprob, _ in entries}
    if len(found) < len(entries):
        raise BadAnswer("a token that is listed twice")
    if fed not in found:
        raise BadAnswer(f"not of the token that was fed ({fed}); shifted, or of another row")
    if min(found) < 0 or max(found) >= vocab:
        raise BadAnswer(f"token {max(found)} is past the {vocab} that target and drafter share")
    if not all(map(_is_logprob, found.values())):
        raise BadAnswer("a log-probability that is not a number up to 0")
    if not all(isinstance(rank, int) for _, _, rank in entries):
        raise BadAnswer("log-probabilities without ranks")
    ordered = sorted(entries, key=lambda entry: entry[2])
    if len(entries) == k + 1 and ordered[k][0] != fed:
        raise BadAnswer(f"{k + 1} log-probabilities, and the token fed is not the least likely")
    if [rank for _, _, rank in ordered[:k]] != list(range(1, k + 1)):
        raise BadAnswer(f"ranks that are not 1 to {k}")
    if any(a[1] < b[1] for a, b in zip(ordered, ordered[1:], strict=False)):
        raise BadAnswer("log-probabilities that are not in the order of their ranks")
    return ordered[:k], found[fed]


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= ROUNDING


def _same_target(fed: list[float], row: dict[str, Any]) -> None:
    """Raises: BadAnswer when the emitted tokens were far likelier, or less likely, to the target that wrote them."""
    if fed:
        apart = float(np.median(np.abs(np.asarray(fed) - np.asarray(row["response_logprobs_t1"][1:]))))
        if not apart <= OTHER_MODEL:
            raise BadAnswer(f"log-probabilities {apart:.2f} from those in the rollouts (median): not of the target that"
                            " wrote them")  # fmt: skip
