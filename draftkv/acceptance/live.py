"""Live speculative decoding: draft, verify, roll back, with a drafter cache that physically drops entries.

The proof that replay tells the truth: at temperature 0 the accepted counts are the same, block by block, and the output
is the target's own. It also runs on hybrids, whose recurrent state cannot be cropped (see `draftkv.cache.evicted`).
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from draftkv.cache.evicted import EvictedCache
from draftkv.cache.offloaded import OffloadedCache, RefreshCost, cache_for
from draftkv.cache.policy import Policy
from draftkv.cache.scene import Notes

FULL = Policy(policy="full")


@dataclass
class LiveRun:
    """What one prompt gave.

    Attributes:
        response_ids: emitted tokens, the first from the target's prefill.
        accepted: accepted drafts of each complete block (a block cut off by `max_new_tokens` is left out).
        finished: whether EOS ended the run.
        draft_s, verify_s: seconds spent drafting and verifying, prefill excluded.
        draft_steps: drafter forwards.
        entries: most entries that a layer of the drafter which the policy compresses attended to at a block start.
        cost: of selecting again; None for policies that never do. Rows that were rejected count.
        moved_bytes: between device and host store, by direction.
    """

    response_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finished: bool = False
    draft_s: float = 0.0
    verify_s: float = 0.0
    draft_steps: int = 0
    entries: int = 0
    cost: RefreshCost | None = None
    moved_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return len(self.accepted)

    def as_row(self, prompt_ids: list[int], row_id: str) -> dict[str, Any]:
        """The run as a rollout row at temperature 0 (replay needs no log-probabilities there)."""
        reason = "stop" if self.finished else "length"
        return {"prompt_ids": prompt_ids, "response_ids": self.response_ids, "temperature": 0.0,
                "finish_reason": reason, "row_id": row_id, "response_logprobs": []}  # fmt: skip


class _Side:
    """One model with its cache; feeds whatever part of the sequence the cache does not hold."""

    def __init__(
        self, model: nn.Module, policy: Policy, prompt: list[int], vocab: int | None, notes: Notes | None = None
    ):
        self.model, self.vocab, self.prompt_len = model, vocab, len(prompt)
        self.cache: EvictedCache = cache_for(model.config, policy, notes, timed=True)
        self.device = next(model.parameters()).device
        self.entries = 0  # most entries of a full-attention layer at a commit
        self.last = self.feed(prompt, keep=1)

    def feed(self, ids: list[int], keep: int) -> Tensor:
        return self.cache.forward(self.model, torch.tensor([ids], device=self.device), keep, self.vocab)

    def catch_up(self, tokens: list[int], keep: int = 1) -> Tensor:
        """Commit, then feed every token of the sequence that the cache lacks; logits of the last `keep` rows."""
        self.cache.commit()
        self._ask_trigger(tokens)
        self.entries = max([self.entries, *self.cache.entries()])
        return self.feed(tokens[self.cache.length :], keep)

    def _ask_trigger(self, tokens: list[int]) -> None:
        """A block starts: a new selection, if one is due, holds from the last emitted token's row on."""
        cache, verified = self.cache, len(tokens) - self.prompt_len
        if cache.policy.trigger.level != "block" or not cache.clock.at_check(verified):
            return
        if cache.length < len(tokens) - 1:
            self.feed(tokens[cache.length : -1], keep=1)
            cache.commit()
        cache.refresh(verified)

    def observe(self, emitted: int, q: list[Tensor]) -> None:
        """A block was verified; `q`: logits of its drafts."""
        if self.cache.policy.trigger.level == "block":
            logs = torch.stack(q[:emitted]).log_softmax(-1)
            self.cache.clock.observe(emitted, float(-(logs.exp() * logs).sum(-1).double().mean()))


def speculate(
    target: nn.Module, drafter: nn.Module, prompt_ids: list[int], policy: Policy, draft_length: int,
    max_new_tokens: int, eos_ids: set[int] = frozenset(), temperature: float = 0.0, draft: str = "sampled",
    generator: torch.Generator | None = None, vocab: int | None = None, notes: Notes | None = None,
) -> LiveRun:
    """Decode one prompt. Both models must be loaded with attention `draftkv`.

    Args:
        draft: at temperature > 0, "sampled" (accept with min(1, p/q)) or "greedy" (vLLM's draft_model mode: the draft
            is argmax q, accepted with probability p of it). The output follows the target's distribution either way.
        vocab: ids that target and drafter share, the only ones that either may emit; None: all rows of their heads.
        notes: what scorer `oracle` knows of the answer (`draftkv.cache.oracle`).
    """
    rules = AcceptanceRule(temperature, draft, generator)
    run = LiveRun()
    target_side = _Side(target, FULL, prompt_ids, vocab)
    draft_side = _Side(drafter, policy, prompt_ids, vocab, notes)
    tokens = [*prompt_ids, rules.pick(target_side.last[-1])]
    limit = len(prompt_ids) + max_new_tokens
    run.finished = tokens[-1] in eos_ids
    while not run.finished and len(tokens) < limit:
        start = time.perf_counter()
        drafted, q = _draft(draft_side, tokens, draft_length, rules)
        middle = time.perf_counter()
        known = len(tokens)
        logits = target_side.catch_up([*tokens, *drafted], keep=draft_length + 1)
        count, extra = rules.verify(logits, drafted, q)
        run.verify_s += time.perf_counter() - middle
        run.draft_s += middle - start
        run.draft_steps += draft_length
        _emit(run, tokens, [*drafted[:count], extra], count, limit, eos_ids)
        # The last emitted token was never fed; everything emitted before it was, on both sides, if it was accepted.
        for side in (target_side, draft_side):
            side.cache.rollback(min(known + count, len(tokens) - 1))
        draft_side.observe(count + 1, q)
    run.entries = draft_side.entries
    if isinstance(draft_side.cache, OffloadedCache):
        run.cost, run.moved_bytes = draft_side.cache.cost.settled(), draft_side.cache.moved_bytes
    run.response_ids = tokens[len(prompt_ids) :][:max_new_tokens]
    return run


def _draft(
    side: _Side, tokens: list[int], draft_length: int, rules: "AcceptanceRule"
) -> tuple[list[int], list[Tensor]]:
    drafted, dists = [], []
    logits = side.catch_up(tokens)
    for i in range(draft_length):
        if i:
            logits = side.feed([drafted[-1]], keep=1)
        drafted.append(rules.pick_draft(logits[-1]))
        dists.append(logits[-1])
    return drafted, dists


def _emit(run: LiveRun, tokens: list[int], new: list[int], count: int, limit: int, eos_ids: set[int]) -> None:
    """Append a block's tokens up to EOS, and count the block unless the length limit cuts it off."""
    stop = next((i for i, t in enumerate(new) if t in eos_ids), None)
    new = new if stop is None else new[: stop + 1]
    whole = len(tokens) + len(new) <= limit
    run.finished = stop is not None and whole
    tokens += new
    if whole:
        run.accepted.append(min(count, len(new)))


class AcceptanceRule:
    """Picking and accepting tokens at one temperature, so that the output follows the target's distribution.

    Sampled drafts are accepted with probability min(1, p/q) and rejected ones replaced by a draw from (p - q)+
    (Leviathan et al. 2023); a greedy draft is the same rule with all of q on one token. Every draw comes from
    `generator` (None: torch's global one).
    """

    def __init__(self, temperature: float, draft: str, generator: torch.Generator | None):
        if draft not in ("sampled", "greedy"):
            raise ValueError(f"draft '{draft}': sampled or greedy")
        self.temperature, self.greedy_draft = temperature, draft == "greedy"
        self.generator = generator

    def probabilities(self, logits: Tensor) -> Tensor:
        return (logits.double() / self.temperature).softmax(-1)

    def sample(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights.cpu(), 1, generator=self.generator))

    def pick(self, logits: Tensor) -> int:
        return int(logits.argmax()) if self.temperature == 0 else self.sample(self.probabilities(logits))

    def pick_draft(self, logits: Tensor) -> int:
        return int(logits.argmax()) if self.greedy_draft else self.pick(logits)

    def verify(self, target: Tensor, drafted: list[int], draft_logits: list[Tensor]) -> tuple[int, int]:
        """Number of accepted drafts and the token that follows them. target: [K + 1, vocab] logits."""
        if self.temperature == 0:
            best = target.argmax(-1).tolist()
            count = next((i for i, t in enumerate(drafted) if t != best[i]), len(drafted))
            return count, best[count]
        for i, token in enumerate(drafted):
            p = self.probabilities(target[i])
            if self.greedy_draft:
                q = torch.zeros_like(p)
                q[token] = 1.0
            else:
                q = self.probabilities(draft_logits[i]).to(p.device)
            if torch.rand((), generator=self.generator, dtype=torch.float64) < p[token] / q[token]:
                continue
            rest = (p - q).clamp(min=0)
            # p == q leaves nothing to resample from; then acceptance was certain up to rounding.
            return i, self.sample(rest if rest.sum() > 0 else p)
        return len(drafted), self.sample(self.probabilities(target[-1]))
