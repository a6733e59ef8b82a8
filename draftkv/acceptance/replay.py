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
from draftkv.acceptance.walk import Walk, walk
from draftkv.cache.architecture import shares_prompt
from draftkv.cache.parallel import lay_out, passes, predicting_rows
from draftkv.cache.policy import Policy
from draftkv.teacher.signals import head_logits

HEAD_ROWS = 256  # rows of vocabulary logits held at once


@dataclass(frozen=True, eq=False)
class Acceptance:
    """How one rollout row would be accepted under one policy.

    Attributes:
        flags: [R] probability that each response token would be accepted if drafted (entry 0 is never drafted).
        ties: positions whose two best logits are equal, so that argmax is arbitrary.
        finished: whether the rollout ended with EOS.
    """

    row_id: str
    flags: np.ndarray
    ties: int
    finished: bool

    def walk(self, draft_length: int) -> Walk:
        return walk(self.flags, draft_length, self.finished)


@torch.no_grad()
def replay_row(
    model: nn.Module, row: dict[str, Any], policies: Sequence[Policy], draft: str = "sampled", bf16: bool = False,
    vocab: int | None = None,
) -> list[Acceptance]:
    """Acceptance of one rollout row under each policy, in the order given.

    Args:
        model: the drafter, loaded with attention `draftkv`, in eval mode.
        row: a rollout row (design: prompt_ids, response_ids, response_logprobs, temperature, finish_reason, row_id).
        draft: "sampled" or "greedy", how drafts are made at temperature > 0.
        bf16: run the layers under bf16 autocast; logits are fp32 either way.
        vocab: ids that target and drafter share, the only ones it may draft; None: all rows of its head.
    """
    device = next(model.parameters()).device
    prompt, response = row["prompt_ids"], row["response_ids"]
    found: dict[str, Acceptance] = {}
    for group in passes(policies, len(prompt), shares_prompt(model.config)):
        batch = lay_out([prompt], [response], [group]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            hidden = model.get_decoder()(
                batch.input_ids, position_ids=batch.position_ids, cache_view=batch.view, use_cache=False
            ).last_hidden_state[0]
        layout = batch.view.rows[0]
        rows = predicting_rows(layout) or [[layout.prompt_len - 1]] * len(group)
        for policy, indices in zip(group, rows, strict=True):
            flags, ties = _flags(hidden[indices], model.get_output_embeddings().weight[:vocab], row, draft)
            done = row["finish_reason"] == "stop"
            found[policy.label] = Acceptance(row["row_id"], flags, ties, done)
    return [found[p.label] for p in policies]


def _flags(hidden: Tensor, head: Tensor, row: dict[str, Any], draft: str) -> tuple[np.ndarray, int]:
    emitted = torch.tensor(row["response_ids"], device=hidden.device)
    temperature = row["temperature"]
    flags, ties = [], 0
    for start in range(0, len(emitted), HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        ids = emitted[part, None]
        logits = head_logits(hidden[part], head)
        best = logits.topk(2, -1)
        ties += int((best.values[:, 0] == best.values[:, 1]).sum())
        if temperature == 0 or draft == "greedy":
            flags.append((best.indices[:, :1] == ids)[:, 0].double())
        else:
            # An id past the shared vocabulary, which only the target has, is never drafted.
            q = (logits / temperature).log_softmax(-1).gather(1, ids.clamp(max=len(head) - 1))
            q = q.masked_fill(ids >= len(head), float("-inf"))[:, 0].double()
            p = torch.tensor(row["response_logprobs"][part], device=q.device, dtype=torch.float64)
            flags.append((q - p).exp().clamp(max=1.0))
    return torch.cat(flags).cpu().numpy(), ties


def evaluate(
    model: nn.Module, rows: Sequence[dict[str, Any]], policies: Sequence[Policy], draft_length: int, *,
    draft: str = "sampled", bf16: bool = False, bootstrap: int = 2000, seed: int = 0,
    advance: Callable[[], None] = lambda: None, gather: Callable[[list], list] = lambda x: x,
    vocab: int | None = None,
) -> list[dict[str, Any]]:
    """Replay rows under each policy and score them: one record body per (temperature, policy).

    Args:
        rows: rollout rows; with several processes, this process's share.
        advance: called after each row.
        gather: collects a list over processes (identity in one process).
        vocab: see `replay_row`.

    Returns:
        Records for `acceptance.jsonl` (see `draftkv.acceptance.score`); the caller adds step and checkpoint.
    """
    was_training = model.training
    model.eval()
    start = time.perf_counter()
    seen = []
    for row in rows:
        seen.append((row["temperature"], replay_row(model, row, policies, draft, bf16, vocab)))
        advance()
    seen = gather(seen)
    wall = time.perf_counter() - start
    model.train(was_training)
    records = []
    for temperature in sorted({t for t, _ in seen}):
        group = sorted((found for t, found in seen if t == temperature), key=lambda found: found[0].row_id)
        full = [found[0].walk(draft_length) for found in group]
        for i, policy in enumerate(policies):
            mine = [found[i] for found in group]
            walks = full if i == 0 else [m.walk(draft_length) for m in mine]
            body = score(walks, [m.row_id for m in mine], None if i == 0 else full, bootstrap, seed)
            positions = sum(len(m.flags) for m in mine)
            mode = "greedy" if temperature == 0 else draft
            records.append({
                "policy": policy.label, "spec": policy.model_dump(mode="json"), "temperature": temperature,
                "draft": mode, "draft_length": draft_length, **body,
                "alpha": float(np.concatenate([m.flags for m in mine]).mean()),
                "tie_rate": sum(m.ties for m in mine) / positions, "wall_s": wall,
            })  # fmt: skip
    return records
