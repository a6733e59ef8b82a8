"""The training loop: readable top to bottom.

step -> items (rows and views) -> forward passes -> one optimiser step -> log -> evaluate / checkpoint when due.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from draftkv.distill import checkpoints
from draftkv.distill.anchor import Anchor
from draftkv.distill.hooks import Evaluation
from draftkv.distill.processes import Updater
from draftkv.distill.schedule import Item, Schedule, learning_rate
from draftkv.distill.stopping import Stopped, StopSignal
from draftkv.distill.student import Student, Teacher, build_batch, supervised_rows
from draftkv.errors import RunError
from draftkv.flops import published_peak
from draftkv.recipe import Recipe


@dataclass
class Progress:
    """What a checkpoint remembers beside weights and optimiser."""

    step: int = 0
    supervised_tokens: int = 0
    fed_tokens: int = 0
    bad_steps: int = 0
    bad_in_a_row: int = 0


class Trainer:
    """Trains one drafter.

    Args:
        student: prepared by `accelerator` with `optimizer`.
        teacher: the target; stays outside `prepare`, it is never updated.
        evaluate: called with the number of finished steps; remembers the best.
        log: called with one dictionary per step.
        anchor: the initial weights, of which what is evaluated and kept takes a share.
        stop: what a scheduler asks of this process.
    """

    def __init__(
        self, recipe: Recipe, accelerator: Accelerator, student: Student, optimizer: torch.optim.Optimizer,
        teacher: Teacher, schedule: Schedule, evaluate: Evaluation, log: Callable[[dict[str, Any]], None],
        anchor: Anchor, stop: StopSignal,
    ):
        self.recipe, self.accelerator, self.student = recipe, accelerator, student
        self.updater = Updater(accelerator, student, optimizer)
        self.teacher, self.schedule, self.evaluate, self.log = teacher, schedule, evaluate, log
        self.anchor, self.stop, self.progress = anchor, stop, Progress()
        self.flops = accelerator.unwrap_model(student).flops

    def resume(self) -> bool:
        """Continue from the newest complete checkpoint, if there is one."""
        state = checkpoints.load_newest(self.accelerator, self.recipe.run_dir)
        if state:
            self.progress = Progress(**state)
        return bool(state)

    def run(self, advance: Callable[[str], None] = lambda note: None) -> bool:
        """Train to the last step. Returns False when a signal stopped it (after saving)."""
        train, step = self.recipe.train, self.progress.step
        if self._due(step) and not self.evaluate.done(step) and not self._evaluate(step):
            return False
        while self.progress.step < train.steps:
            note = self.step()
            step = self.progress.step
            advance(note)
            last, leaving = step == train.steps, self.stop.agreed(self.accelerator)
            saving = last or leaving or step % train.checkpoint_every == 0
            # Saved first: an evaluation is long, and a scheduler's patience after a signal is not.
            if saving:
                self.save()
            if leaving and not last:
                return False
            if self._due(step) and not self._evaluate(step):
                if not saving:
                    self.save()
                return False
        return True

    def _evaluate(self, step: int) -> bool:
        """False when a signal broke it off; the next start makes up for it."""
        with self.anchor.applied() as drafter:
            try:
                self.evaluate(drafter, step)
            except Stopped:
                return False
        return True

    def _due(self, step: int) -> bool:
        """Whether step `step` is evaluated: every `eval.every`, on every regular checkpoint, first and last."""
        train = self.recipe.train
        return step == train.steps or step % self.recipe.eval.every == 0 or step % train.checkpoint_every == 0

    def save(self) -> None:
        state = vars(self.progress).copy()
        step = state.pop("step")
        checkpoints.save(self.accelerator, self.recipe.run_dir, step, state, self.recipe.train.keep_checkpoints)

    def step(self) -> str:
        """One optimiser step; returns a short note for the progress bar."""
        start = time.perf_counter()
        progress, step = self.progress, self.progress.step
        items = self.schedule.items(step)
        self.teacher.expect(self._share(step + 1))
        supervised = sum(item.supervised for item in items)
        lr = learning_rate(self.recipe.train, step)
        self.updater.set_learning_rate(lr)
        sums = self._accumulate(items, sum(item.weight for item in items))
        norm, updated = self.updater.update(self.recipe.train.clip, math.isfinite(sums["loss"]))
        progress.step += 1
        self._count(items, supervised, updated)
        wall = time.perf_counter() - start
        padding = self.schedule.padding(items, self.accelerator.num_processes)
        means = {k: v / max(1, sums["rows"]) for k, v in sums.items() if k not in ("rows", "loss")}
        record = {"step": progress.step, "loss": sums["loss"], "lr": lr, "grad_norm": norm, **means,
                  "supervised_tokens": progress.supervised_tokens, "skipped": progress.bad_steps, "padding": padding,
                  "tokens_per_s": sum(i.fed for i in items) / wall, **self._reached(items, wall),
                  "step_s": wall}  # fmt: skip
        self.log({k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in record.items()})
        return f"loss {sums['loss']:.4f}  alpha {means.get('alpha', 0):.3f}  lr {lr:.1e}"

    def _reached(self, items: list[Item], wall: float) -> dict[str, float]:
        """Model TFLOP/s of one process, and where the device's peak is published its share (MFU)."""
        rate = self.flops.training(items) / wall / self.accelerator.num_processes
        peak = published_peak(self.accelerator.device)
        return {"tflops": rate / 1e12, **({"mfu": rate / peak} if peak else {})}

    def _share(self, step: int) -> list[Item]:
        """This process's rows of a step."""
        process = self.accelerator.process_index, self.accelerator.num_processes
        return [item for micro in self.schedule.micro_batches(self.schedule.items(step), *process) for item in micro]

    def _accumulate(self, items: list[Item], denominator: float) -> dict[str, float]:
        """Forward and backward of every pass of this process. Gradients and the returned `loss` are those of the sum
        over all rows of all processes divided by `denominator`, however rows fall into passes and processes."""
        accelerator = self.accelerator
        world = accelerator.num_processes
        passes = self.schedule.micro_batches(items, accelerator.process_index, world)
        sums: dict[str, Tensor] = {}
        for i, micro in enumerate(passes):
            # A process without rows repeats one with weight 0: collectives inside the model must match.
            weight, micro = (1.0, micro) if micro else (0.0, items[:1])
            with self.updater.accumulating(last=i + 1 == len(passes)):
                result = self._forward(micro)
                # Gradients are averaged over processes; their sum is wanted.
                self.updater.backward(result.total * (weight * world / denominator))
            found = {**result.metrics, "loss": result.total.detach() / denominator}
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + weight * value.double()
        names = sorted(sums)
        total = accelerator.reduce(torch.stack([sums[n].float() for n in names]), "sum")
        return dict(zip(names, total.tolist(), strict=True))

    def _forward(self, items: list[Item]) -> Any:
        batch, owners = build_batch(items)
        rows, lengths = supervised_rows(batch)
        device = self.accelerator.device
        signal = self.teacher.signal(items, owners)
        return self.student(batch.to(device), rows.to(device), signal, lengths, [weight for *_, weight in owners])

    def _count(self, items: list[Item], supervised: int, updated: bool) -> None:
        progress = self.progress
        if updated:
            progress.bad_in_a_row = 0
            progress.supervised_tokens += supervised
            progress.fed_tokens += sum(item.fed for item in items)
            return
        progress.bad_steps += 1
        progress.bad_in_a_row += 1
        if progress.bad_in_a_row >= self.recipe.train.max_bad_steps:
            names = ", ".join(sorted({item.row["row_id"] for item in items}))
            raise RunError(
                f"{progress.bad_in_a_row} steps in a row gave a non-finite loss or gradient; last rows: {names};"
                " lower train.lr, or look at these rows"
            )
