"""What the loop calls when something is due: evaluation, logging, trackers."""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import broadcast_object_list, gather_object

from draftkv.acceptance.replay import Replay, evaluate
from draftkv.acceptance.score import append_jsonl, read_acceptance
from draftkv.cli import progress, say
from draftkv.distill.stopping import Stopped, StopSignal
from draftkv.models import quiet
from draftkv.recipe import Recipe
from draftkv.rundir import writing


class Evaluation:
    """Full-cache and compressed acceptance of the drafter on held-out rollouts; keeps the best weights.

    Records go to `acceptance.jsonl` and the trackers. The best step is the one with the highest T = 0 AL under
    `eval.policies[eval.select]`; its weights are kept in `checkpoints/best/`.
    """

    def __init__(self, recipe: Recipe, accelerator: Accelerator, rows: Sequence[dict[str, Any]], trackers: "Trackers",
                 stop: StopSignal, vocab: int | None = None):  # fmt: skip
        self.recipe, self.accelerator, self.stop = recipe, accelerator, stop
        self.rows, self.trackers, self.vocab = rows, trackers, vocab
        self.path = recipe.run_dir / "acceptance.jsonl"
        self.best: dict[str, Any] = broadcast_object_list([read_step(recipe.run_dir / "checkpoints" / "best")])[0]

    def __call__(self, model: torch.nn.Module, step: int) -> None:
        """Raises: Stopped in every process, with nothing recorded, when one of them was asked to leave."""
        settings, accelerator = self.recipe.eval, self.accelerator
        share = list(self.rows[accelerator.process_index :: accelerator.num_processes])
        with progress(f"evaluate at step {step}", len(share)) as advance:
            records = evaluate(
                model, share, settings.policies, Replay.of(self.recipe, self.vocab),
                bootstrap=settings.bootstrap, advance=lambda: advance(""), gather=self._gather,
                leave=lambda: self.stop.asked,
            )  # fmt: skip
        # Best weights first: a step that has its records is never evaluated again.
        self._keep_best(model, step, records)
        if accelerator.is_main_process:
            for record in records:
                append_jsonl(self.path, {"step": step, "checkpoint": f"step {step}", "split": "held_out", **record})
            self.trackers.log(_flat(records), step)
        self._report(step, records)

    def _gather(self, mine: list) -> list:
        found = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        if self.stop.agreed(self.accelerator):
            raise Stopped
        return found

    def done(self, step: int) -> bool:
        """Whether an earlier start recorded every policy and temperature of this step. The main process decides for
        all: the others may not see its files."""
        expected = len(self.recipe.eval.policies) * len(set(self.recipe.rollouts.eval_temperatures))
        found = read_acceptance(self.path) if self.accelerator.is_main_process and self.path.is_file() else []
        return broadcast_object_list([sum(r["step"] == step for r in found) >= expected])[0]

    def _report(self, step: int, records: list[dict[str, Any]]) -> None:
        for record in records:
            kept = "" if record["retention"] is None else f"  retention {record['retention']:.1%}"
            interval = f"[{_show(record['al_low'])}, {_show(record['al_high'])}]"
            say(f"  step {step}  T={record['temperature']:g}  {record['policy']:<32} AL {_show(record['al'])} "
                f"{interval}{kept}")  # fmt: skip

    def _keep_best(self, model: torch.nn.Module, step: int, records: list[dict[str, Any]]) -> None:
        """Remember the best weights, those of an untrained drafter excepted."""
        policy = self.recipe.eval.policies[self.recipe.eval.select].label
        coldest = min(r["temperature"] for r in records)
        al = next(r["al"] for r in records if r["policy"] == policy and r["temperature"] == coldest)
        if step == 0 or al is None or al <= self.best.get("al", 0.0):
            return
        self.best = {"step": step, "al": al, "policy": policy}
        save_weights(self.accelerator, model, self.recipe.run_dir / "checkpoints" / "best", self.best)


def save_weights(accelerator: Accelerator, model: torch.nn.Module, path: Path, facts: dict[str, Any]) -> None:
    """Save the drafter's weights as a Hugging Face folder with `facts` (the step) in it, written beside and renamed."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        draft = path.with_name(f".{path.name}")
        shutil.rmtree(draft, ignore_errors=True)
        with writing(path, draft), quiet():
            model.save_pretrained(draft)
            (draft / "step.json").write_text(json.dumps(facts))
        # Moved aside, not removed first: a run killed in between still has the weights that were best before.
        aside = _aside(path)
        shutil.rmtree(aside, ignore_errors=True)
        if path.exists():
            path.rename(aside)
        draft.rename(path)
        shutil.rmtree(aside, ignore_errors=True)
    accelerator.wait_for_everyone()


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}-before")


def read_step(path: Path) -> dict[str, Any]:
    """The facts that `save_weights` left, or nothing; weights that a killed run had moved aside come back first."""
    if not path.exists():
        with suppress(FileNotFoundError):  # there are none, or another process was quicker
            _aside(path).rename(path)
    file = path / "step.json"
    return json.loads(file.read_text()) if file.is_file() else {}


class Trackers:
    """`metrics.jsonl` always; wandb, trackio or tensorboard when asked for. A tracker that is missing, offline or that
    fails is announced once and left out; the others and the run go on."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator):
        self.path = recipe.run_dir / "metrics.jsonl"
        self.is_main = accelerator.is_main_process
        self.active: dict[str, GeneralTracker] = {}
        if self.is_main:
            for name in dict.fromkeys(recipe.trackers):
                self._start(name, recipe)

    def _start(self, name: str, recipe: Recipe) -> None:
        if importlib.util.find_spec(name) is None:
            say(f"tracker {name} is not installed (pip install 'draftkv[{name}]'); the run goes on without it")
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        if not os.environ.get("WANDB_API_KEY") and not (Path.home() / ".netrc").is_file():
            os.environ.setdefault("WANDB_MODE", "offline")
        kind = LOGGER_TYPE_TO_CLASS[name]
        folder = [str(recipe.run_dir / name)] if kind.requires_logging_directory else []
        place = {"dir": str(recipe.run_dir)} if name == "wandb" else {}
        with self._spared(name):
            tracker = kind(recipe.name, *folder, **place)
            tracker.start()
            self.active[name] = tracker
            tracker.store_init_configuration({"recipe": recipe.as_yaml()})

    @contextmanager
    def _spared(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker raises
            reason = " ".join(str(error).split())[:200]
            say(f"tracker {name} is off: {type(error).__name__}: {reason}")
            self.active.pop(name, None)

    def step(self, record: dict[str, Any]) -> None:
        if self.is_main:
            append_jsonl(self.path, record)
            self.log({k: v for k, v in record.items() if k != "step" and v is not None}, record["step"])

    def log(self, values: dict[str, Any], step: int) -> None:
        for name, tracker in list(self.active.items()):
            with self._spared(name):
                tracker.log(values, step=step)

    def close(self) -> None:
        for name, tracker in list(self.active.items()):
            with self._spared(name):
                tracker.finish()


def _flat(records: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{name}/T{r['temperature']:g}/{r['policy']}": r[name]
        for r in records for name in ("al", "retention") if r[name] is not None
    }  # fmt: skip


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
