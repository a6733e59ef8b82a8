"""One record per sample and policy in RUN/fidelity.jsonl, written as soon as it is known; what is there is not redone.

A record is found again by what decided it: the sample's key (weights, dtype, prompt, pixels), the policy's parts and
the longest output allowed. So a changed recipe in the same folder never meets another's results.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from draftkv.acceptance.score import append_jsonl, read_jsonl
from draftkv.cache.oracle import oracle_notes
from draftkv.cache.policy import Policy
from draftkv.fidelity.generate import Generation, generate
from draftkv.fidelity.policies import reference_of
from draftkv.fidelity.stats import rouge_scorer
from draftkv.fidelity.subject import Sample, Subject
from draftkv.teacher.engine import repeated_share

Record = dict[str, Any]


class Ledger:
    """The records of a file, by what decided them."""

    def __init__(self, path: Path, max_new_tokens: int):
        self.path, self.max_new_tokens = path, max_new_tokens
        self._known = {self._key(r["sample"], r["spec"], r["max_new_tokens"]): r
                       for r in (read_jsonl(path) if path.is_file() else [])}  # fmt: skip

    @staticmethod
    def _key(sample: str, spec: dict, limit: int) -> str:
        return json.dumps([sample, spec, limit], sort_keys=True)

    def find(self, sample: str, policy: Policy) -> Record | None:
        return self._known.get(self._key(sample, policy.model_dump(mode="json"), self.max_new_tokens))

    def add(self, sample: Sample, policy: Policy, made: Generation, text: str, fidelity: float, model: str) -> Record:
        record = {
            "row_id": sample.row_id, "sample": sample.key, "model": model, "policy": policy.label,
            "spec": policy.model_dump(mode="json"), "max_new_tokens": self.max_new_tokens,
            "prompt_tokens": len(sample.prompt_ids), "tokens": len(made.ids), "finished": made.finished,
            "rouge_l": fidelity, "layers": made.layers, "refreshed": made.refreshed, "reads": made.reads,
            "drift": made.drift, "evicted": made.evicted, "repeat_8": repeated_share(made.ids, 8), "ids": made.ids,
            "text": text,
        }  # fmt: skip
        append_jsonl(self.path, record)
        self._known[self._key(sample.key, record["spec"], self.max_new_tokens)] = record
        return record


def measure(
    subject: Subject, samples: Iterable[Sample | None], policies: Sequence[Policy], ledger: Ledger, together: int = 1,
    advance: Callable[[str], None] = lambda note: None,
) -> list[list[Record]]:
    """Records of each sample, in the order of `policies`; only what the ledger lacks is generated.

    Args:
        policies: the first is full.
        together: policies that decode side by side (see `draftkv.fidelity.generate`); a killed run loses so many.
    """
    score, yardstick, result = rouge_scorer(), reference_of(policies), []
    for sample in samples:
        if sample is None:
            for _ in policies:
                advance("a prompt that is too long")
            continue
        full = ledger.find(sample.key, policies[0])
        if full is None:
            made = _generate(subject, sample, policies[:1], ledger.max_new_tokens)[0]
            full = ledger.add(sample, policies[0], made, subject.decode(made.ids), 1.0, subject.name)
        advance("full")
        missing = [p for p in policies[1:] if _lacks(ledger.find(sample.key, p), p == yardstick)]
        for policy in policies[1:]:
            if policy not in missing:
                advance(policy.label)
        for start in range(0, len(missing), together):
            group = missing[start : start + together]
            for policy, made in zip(group, _generate(subject, sample, group, ledger.max_new_tokens, full["ids"],
                                                     yardstick), strict=True):  # fmt: skip
                text = subject.decode(made.ids)
                ledger.add(sample, policy, made, text, score(full["text"], text), subject.name)
                advance(policy.label)
        result.append([ledger.find(sample.key, p) for p in policies])
    return result


def _lacks(record: Record | None, is_yardstick: bool) -> bool:
    return record is None or (is_yardstick and record["evicted"] is None)


def _generate(
    subject: Subject, sample: Sample, policies: Sequence[Policy], limit: int, answer: list[int] | None = None,
    yardstick: Policy | None = None,
) -> list[Generation]:
    notes = None
    if any(p.needs_answer for p in policies):
        # The oracle's weights are those of the answer's rows; an answer of one token has only its last one.
        notes = oracle_notes(sample.model, sample.prompt_ids, answer if len(answer) > 1 else answer * 2)
    return generate(sample.model, sample.prompt_ids, policies, limit, subject.stops, vocab=len(subject.tokenizer),
                    notes=notes, measured=yardstick)  # fmt: skip
