"""The main job: distil a drafter under compressed-cache views, and measure both acceptance lengths.

    accelerate launch train/distill.py RECIPE [key.sub=value ...] [--plan] [--rehearse]

rollouts (written if missing) -> drafter -> training with evaluation -> export -> report. Everything lands in
runs/NAME/. A run that was killed continues where its newest checkpoint is; a finished one is left alone.
"""

import argparse
import json
import os

from draftkv import cli
from draftkv.cli import say
from draftkv.errors import InputError
from draftkv.recipe import Recipe


def main(args: argparse.Namespace) -> None:
    recipe = cli.recipe_from(args)
    if args.rehearse:
        from draftkv.rehearsal import rehearse

        recipe = rehearse(recipe)
    if args.plan:
        from draftkv.plan import print_plan

        print_plan(recipe)
        return
    from draftkv import rundir
    from draftkv.sweep import recipe_hash

    done = recipe.run_dir / "done.json"
    if done.is_file() and json.loads(done.read_text()).get("recipe_hash") == recipe_hash(recipe):
        say(f"{recipe.run_dir}: finished before; nothing to do (remove the folder to run again)")
        return
    from draftkv.drafter import preflight
    from draftkv.teacher.rollouts import plan_rollouts

    rundir.check_claim(recipe)
    # Before the folder is claimed: a recipe that is refused and then mended is not a changed one.
    preflight(recipe)
    plans = plan_rollouts(recipe)
    if not cli.is_main_process():
        finished = distill(recipe, plans)
    else:
        with rundir.lock(recipe.run_dir):
            rundir.claim(recipe)
            finished = distill(recipe, plans)
            if finished:
                conclude(recipe)
    if not finished:
        say("stopped by a signal after saving a checkpoint; the same command continues")


def distill(recipe: Recipe, plans: dict) -> bool:
    """Train on the rollouts of `plans`; False when a signal stopped the run early (its checkpoint is saved)."""
    import torch
    from accelerate.utils import set_seed

    from draftkv import rundir
    from draftkv.distill.anchor import Anchor
    from draftkv.distill.hooks import Evaluation, Trackers, save_weights
    from draftkv.distill.loop import Trainer
    from draftkv.distill.schedule import Schedule
    from draftkv.distill.student import Student
    from draftkv.drafter import drafter_to_train
    from draftkv.teacher.rollouts import ensure_rollouts, held_out_rows

    accelerator = start_accelerator(recipe)
    set_seed(recipe.seed)
    with accelerator.main_process_first():
        train_rollouts, eval_rollouts = (ensure_rollouts(recipe, s, plan=plan) for s, plan in plans.items())
    train_rows = train_rollouts.rows()
    eval_rows = held_out_rows(recipe, eval_rollouts)
    for split, store in (("training", train_rollouts), ("held-out", eval_rollouts)):
        for reason, number in store.counts["skipped"].items():
            say(f"{split} rows skipped: {number} {reason}")
    if not train_rows:
        raise InputError(f"{train_rollouts.path}: no usable training row; {train_rollouts.counts}")

    model, vocab = drafter_to_train(recipe)
    teacher = teacher_of(recipe, train_rollouts, vocab, accelerator.device)
    student = Student(model, recipe.loss, vocab, recipe.train.head_chunk)
    params = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(decay_groups(params, recipe.train.weight_decay), lr=recipe.train.lr,
                                  betas=recipe.train.betas)  # fmt: skip
    student, optimizer = accelerator.prepare(student, optimizer)

    trackers = Trackers(recipe, accelerator)
    drafter = accelerator.unwrap_model(student).model
    evaluate = Evaluation(recipe, accelerator, drafter, eval_rows, trackers, vocab)
    schedule = Schedule(train_rows, recipe)
    anchor = Anchor(params, recipe.train.initial_share)
    trainer = Trainer(recipe, accelerator, student, optimizer, teacher, schedule, evaluate, trackers.step, anchor)
    if trainer.resume():
        say(f"continuing after step {trainer.progress.step}")
    millions = sum(p.numel() for p in params) / 1e6
    say(f"{len(train_rows)} training rows, {len(eval_rows)} held-out rows, {millions:.1f} M trainable parameters, "
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}")  # fmt: skip
    with cli.progress("train", recipe.train.steps - trainer.progress.step) as advance:
        finished = trainer.run(advance)
    if finished:
        with anchor.applied():
            save_weights(accelerator, drafter, recipe.run_dir / "checkpoints" / "last", {"step": recipe.train.steps})
    if accelerator.is_main_process:
        rundir.write_provenance(
            recipe, processes=accelerator.num_processes, device=accelerator.device.type,
            rollouts={"train": train_rollouts.key, "eval": eval_rollouts.key}, train_rows=len(train_rows),
            eval_rows=len(eval_rows), supervised_tokens=trainer.progress.supervised_tokens,
            fed_tokens=trainer.progress.fed_tokens, skipped_steps=trainer.progress.bad_steps, best=evaluate.best,
        )  # fmt: skip
    trackers.close()
    return finished


def teacher_of(recipe: Recipe, rollouts, vocab: int, device):
    """The target in process, or what data/signals.py stored of it: then the target is not loaded at all."""
    from draftkv.distill.student import Teacher
    from draftkv.models import load_model
    from draftkv.teacher.signal_store import SignalPlan, StoredTeacher

    if recipe.signal.source == "stored":
        return StoredTeacher(SignalPlan.of(recipe, rollouts, vocab), recipe.signal.temperature, device)
    target = load_model(recipe.target.model, recipe.target.revision, recipe.target.dtype)
    return Teacher(target.to(device))


def start_accelerator(recipe: Recipe):
    """One process, or data parallel: what the loop was proven on.

    Raises:
        InputError: another backend, or accumulation in accelerate's own configuration, which would rescale the loss.
    """
    from datetime import timedelta

    from accelerate import Accelerator, InitProcessGroupKwargs

    # Other processes wait while the first one writes rollouts, which may take hours.
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    handlers = [InitProcessGroupKwargs(timeout=timedelta(days=1))] if many else []
    accelerator = Accelerator(
        mixed_precision=recipe.train.precision, project_dir=str(recipe.run_dir), kwargs_handlers=handlers
    )
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise InputError(f"accelerate is configured for {kind}; supported: one process, or data parallel (MULTI_GPU)")
    if accelerator.gradient_accumulation_steps != 1:
        raise InputError("accelerate's configuration sets gradient_accumulation_steps; set train.rows and "
                         "train.micro_rows in the recipe instead")  # fmt: skip
    return accelerator


def decay_groups(params: list, weight_decay: float) -> list[dict]:
    """Weight decay for matrices only, as usual: norms and biases are left alone."""
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def conclude(recipe: Recipe) -> None:
    """Export, report, and mark the run as finished."""
    from draftkv import rundir
    from draftkv.acceptance.report import write_report
    from draftkv.distill.export import export_run
    from draftkv.sweep import recipe_hash

    say(f"exported to {', '.join(map(str, export_run(recipe)))}")
    say(f"report: {write_report(recipe.run_dir)}")
    rundir.write_atomic(recipe.run_dir / "done.json", json.dumps({"recipe_hash": recipe_hash(recipe)}))


if __name__ == "__main__":
    arguments = cli.parser(__doc__.splitlines()[0])
    arguments.add_argument("--rehearse", action="store_true", help="tiny random models of the same architectures")
    cli.run(main, arguments)
