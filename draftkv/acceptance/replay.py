"""Replay: the acceptance length of a drafter from the target's own rollouts, without the target.

Speculative decoding is lossless, so whatever drafter runs, the target's rollout is what comes out. One teacher-forced
forward of the drafter over prompt + rollout, under a cache policy, therefore gives the acceptance of every position:
[argmax q = x] at T = 0 and for greedy drafts (vLLM's draft_model mode), min(1, q(x) / p(x)) for sampled drafts.
Several policies share the prompt's pass: cost P + V * R rows for V policies.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftkv.acceptance.score import score
from draftkv.acceptance.sequential import sequential_flags
from draftkv.acceptance.walk import Walk, walk
from draftkv.cache.offloaded import OffloadedCache, RefreshCost
from draftkv.cache.oracle import oracle_notes
from draftkv.cache.parallel import lay_out, passes, predicting_rows
from draftkv.cache.policy import Policy
from draftkv.cache.scene import Notes
from draftkv.recipe import Recipe
from draftkv.teacher.signals import head_logits

HEAD_ROWS = 256  # rows of vocabulary logits held at once


@dataclass(frozen=True, eq=False)
class Acceptance:
    """How one rollout row would be accepted under one policy.

    Attributes:
        flags: [R] probability that each response token would be accepted if drafted (entry 0 is never drafted).
        ties: positions whose two best logits are equal, so that argmax is arbitrary.
        finished: whether the rollout ended with EOS.
        cost: of selecting again; None where the policy never does.
        captured: response position -> share of the full cache's attention mass attended to; None unless measured.
    """

    row_id: str
    flags: np.ndarray
    ties: int
    finished: bool
    cost: RefreshCost | None = None
    captured: dict[int, float] | None = None

    def walk(self, draft_length: int) -> Walk:
        return walk(self.flags, draft_length, self.finished)


@dataclass(frozen=True)
class Replay:
    """How rows are replayed.

    Attributes:
        draft_length: K; triggers that select again at block starts depend on it.
        draft: "sampled" or "greedy", how drafts are made at temperature > 0.
        bf16: run the layers under bf16 autocast; logits are fp32 either way.
        vocab: ids that target and drafter share, the only ones it may draft; None: all rows of its head.
        seed: of the path that is drawn for block triggers above temperature 0.
        measure: record the captured attention mass (every policy then runs on the offloaded executor).
        executor: makes the cache of a policy that selects again; a subclass may record what its trigger sees.
    """

    draft_length: int
    draft: str = "sampled"
    bf16: bool = False
    vocab: int | None = None
    seed: int = 0
    measure: bool = False
    executor: Callable[..., OffloadedCache] = OffloadedCache

    @classmethod
    def of(cls, recipe: Recipe, vocab: int | None, **others: Any) -> "Replay":
        """As the recipe's `eval` section says."""
        settings = recipe.eval
        return cls(settings.draft_length, settings.draft, settings.precision == "bf16", vocab, recipe.seed, **others)

    @torch.no_grad()
    def row(
        self, model: nn.Module, row: dict[str, Any], policies: Sequence[Policy], notes: Notes | None = None
    ) -> list[Acceptance]:
        """Acceptance of one rollout row under each policy, in the order given.

        Args:
            model: the drafter, loaded with attention `draftkv`, in eval mode.
            row: a rollout row (prompt_ids, response_ids, response_logprobs, temperature, finish_reason, row_id).
            notes: what an oracle knows; None: the drafter's own uncompressed attention over this row.
        """
        at_once = [p for p in policies if not (p.reselects or p.needs_answer or self.measure)]
        found: dict[str, Acceptance] = {}
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=self.bf16):
            for group in passes(at_once, len(row["prompt_ids"])):
                found |= self._parallel(model, row, group)
            for policy in policies:
                if policy.label not in found:
                    found[policy.label] = self._sequential(model, row, policy, notes)
        return [found[p.label] for p in policies]

    def _parallel(self, model: nn.Module, row: dict[str, Any], group: list[Policy]) -> dict[str, Acceptance]:
        """Policies that never select again, in one pass."""
        device = next(model.parameters()).device
        batch = lay_out([row["prompt_ids"]], [row["response_ids"]], [group]).to(device)
        hidden = model.get_decoder()(
            batch.input_ids, position_ids=batch.position_ids, cache_view=batch.view, use_cache=False
        ).last_hidden_state[0]
        layout = batch.view.rows[0]
        rows = predicting_rows(layout) or [[layout.prompt_len - 1]] * len(group)
        head = model.get_output_embeddings().weight[: self.vocab]
        result = {}
        for policy, indices in zip(group, rows, strict=True):
            parts, ties = [], 0
            for start in range(0, len(indices), HEAD_ROWS):
                part = indices[start : start + HEAD_ROWS]
                flags, same = _flags(head_logits(hidden[part], head), row, start, self.draft)
                parts.append(flags)
                ties += int(same.sum())
            result[policy.label] = Acceptance(row["row_id"], np.concatenate(parts), ties, _finished(row))
        return result

    def _sequential(
        self, model: nn.Module, row: dict[str, Any], policy: Policy, notes: Notes | None
    ) -> Acceptance:
        """A policy whose selections depend on the run, block by block."""
        if policy.needs_answer and notes is None:
            notes = oracle_notes(model, row["prompt_ids"], row["response_ids"])
        cache = self.executor(model.config, policy, notes, measure=self.measure)
        drawn = None
        if row["temperature"] > 0 and self.draft == "sampled":
            drawn = np.random.default_rng([self.seed, *row["row_id"].encode()])
        tied = np.zeros(len(row["response_ids"]), dtype=bool)  # by position: some rows are fed more than once

        def accept(logits: Tensor, first: int) -> np.ndarray:
            flags, tied[first : first + len(logits)] = _flags(logits, row, first, self.draft)
            return flags

        flags = sequential_flags(model, row, cache, self.draft_length, accept, self.vocab, drawn)
        captured = None
        if self.measure:
            prompt_len = len(row["prompt_ids"])
            mass = {} if cache.probe is None else cache.probe.mass
            captured = {at - prompt_len + 1: float(np.mean(list(shares.values()))) for at, shares in mass.items()}
        cost = cache.cost.settled() if policy.reselects else None
        return Acceptance(row["row_id"], flags, int(tied.sum()), _finished(row), cost, captured)


def _finished(row: dict[str, Any]) -> bool:
    return row["finish_reason"] == "stop"


def _flags(logits: Tensor, row: dict[str, Any], first: int, draft: str) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance of response tokens first .. first + n - 1 from the [n, vocab] logits that predict them, and which of
    them have two best logits."""
    part, vocab = slice(first, first + len(logits)), logits.shape[1]
    temperature = row["temperature"]
    ids = torch.tensor(row["response_ids"][part], device=logits.device)[:, None]
    best = logits.topk(2, -1)
    ties = (best.values[:, 0] == best.values[:, 1]).cpu().numpy()
    if temperature == 0 or draft == "greedy":
        return (best.indices[:, :1] == ids)[:, 0].double().cpu().numpy(), ties
    # An id past the shared vocabulary, which only the target has, is never drafted.
    q = (logits / temperature).log_softmax(-1).gather(1, ids.clamp(max=vocab - 1))
    q = q.masked_fill(ids >= vocab, float("-inf"))[:, 0].double()
    p = torch.tensor(row["response_logprobs"][part], device=q.device, dtype=torch.float64)
    return (q - p).exp().clamp(max=1.0).cpu().numpy(), ties


def evaluate(
    model: nn.Module, rows: Sequence[dict[str, Any]], policies: Sequence[Policy], how: Replay, *,
    bootstrap: int = 2000, advance: Callable[[], None] = lambda: None, gather: Callable[[list], list] = lambda x: x,
    leave: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Replay rows under each policy and score them: one record body per (temperature, policy).

    Args:
        rows: rollout rows; with several processes, this process's share.
        advance: called after each row.
        gather: collects a list over processes (identity in one process).
        leave: asked before each row, whether to leave the rest out; `gather` then has to raise.

    Returns:
        Records for `acceptance.jsonl` (see `draftkv.acceptance.score`); the caller adds step and checkpoint.
    """
    was_training = model.training
    model.eval()
    start = time.perf_counter()
    seen = []
    for row in rows:
        if leave():
            break
        seen.append((row["temperature"], how.row(model, row, policies)))
        advance()
    seen = gather(seen)
    wall = time.perf_counter() - start
    model.train(was_training)
    records = []
    for temperature in sorted({t for t, _ in seen}):
        group = sorted((found for t, found in seen if t == temperature), key=lambda found: found[0].row_id)
        full = [found[0].walk(how.draft_length) for found in group]
        for i, policy in enumerate(policies):
            mine = [found[i] for found in group]
            walks = full if i == 0 else [m.walk(how.draft_length) for m in mine]
            body = score(walks, [m.row_id for m in mine], None if i == 0 else full, bootstrap, how.seed)
            positions = sum(len(m.flags) for m in mine)
            mode = "greedy" if temperature == 0 else how.draft
            records.append({
                "policy": policy.label, "spec": policy.model_dump(mode="json"), "temperature": temperature,
                "draft": mode, "draft_length": how.draft_length, **body,
                "alpha": float(np.concatenate([m.flags for m in mine]).mean()),
                "tie_rate": sum(m.ties for m in mine) / positions, "wall_s": wall, **_costs(mine),
            })  # fmt: skip
    return records


def _costs(found: Sequence[Acceptance]) -> dict[str, float]:
    """Refresh rate (share of layer-steps) and reads per step and KV head over rows; nothing for one-shot policies."""
    costs = [f.cost for f in found if f.cost is not None and f.cost.steps]
    steps = sum(c.steps for c in costs)
    if not steps:
        return {}
    return {"refresh_rate": float(sum(c.refreshes for c in costs)) / steps,
            "reads_per_step": float(sum(c.reads for c in costs)) / steps}  # fmt: skip
