"""The main job: distil a drafter under compressed-cache views, and measure both acceptance lengths.

    accelerate launch train/distill.py RECIPE [key.sub=value ...] [--plan] [--rehearse]

rollouts and signals (written if missing) -> drafter -> training with evaluation -> export -> report. Everything lands
in runs/NAME/. A run that was killed continues where its newest checkpoint is; a finished one is left alone.
"""

import argparse
import json

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
        say("stopped by a signal; what is complete is saved, and the same command continues")


def distill(recipe: Recipe, plans: dict) -> bool:
    """Train on the rollouts of `plans`; False when a signal stopped the run early (what is complete is saved)."""
    from draftkv.distill.processes import end_together, start_accelerator
    from draftkv.distill.stopping import StopSignal

    stop = StopSignal()
    accelerator = start_accelerator(recipe)
    finished = trained(recipe, plans, accelerator, stop)
    end_together(accelerator)
    return finished


def trained(recipe: Recipe, plans: dict, accelerator, stop) -> bool:
    """As `distill`, in the processes of `accelerator`."""
    import torch
    from accelerate.utils import set_seed

    from draftkv import rundir
    from draftkv.distill.anchor import Anchor
    from draftkv.distill.hooks import Evaluation, Trackers, save_weights
    from draftkv.distill.loop import Trainer
    from draftkv.distill.processes import backend_name, check_shared_folder, is_sharded
    from draftkv.distill.schedule import Schedule
    from draftkv.distill.student import Student
    from draftkv.drafter import drafter_to_train

    check_shared_folder(recipe, accelerator)
    set_seed(recipe.seed)
    stores = rollouts_of(recipe, plans, accelerator, stop)
    if stores is None:
        return False
    train_rollouts, eval_rollouts = stores
    train_rows, eval_rows = usable_rows(recipe, train_rollouts, eval_rollouts)
    model, vocab = drafter_to_train(recipe)
    teacher = teacher_of(recipe, train_rollouts, vocab, accelerator, stop)
    if teacher is None:
        return False
    student = Student(model, recipe.loss, vocab, recipe.train.head_chunk, recipe.train.precision == "bf16")
    anchor = Anchor(model, recipe.train.initial_share, is_sharded(accelerator))
    params = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(decay_groups(params, recipe.train.weight_decay), lr=recipe.train.lr,
                                  betas=recipe.train.betas)  # fmt: skip
    millions = sum(p.numel() for p in params) / 1e6  # counted here: afterwards a process may hold a part of each
    student, optimizer = accelerator.prepare(student, optimizer)

    trackers, backend = Trackers(recipe, accelerator), backend_name(accelerator)
    evaluate = Evaluation(recipe, accelerator, eval_rows, trackers, stop, vocab)
    schedule = Schedule(train_rows, recipe)
    trainer = Trainer(recipe, accelerator, student, optimizer, teacher, schedule, evaluate, trackers.step, anchor, stop)
    if trainer.resume():
        say(f"continuing after step {trainer.progress.step}")
    say(f"{len(train_rows)} training rows, {len(eval_rows)} held-out rows, {millions:.1f} M trainable parameters, "
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}, {backend}")  # fmt: skip
    with cli.progress("train", recipe.train.steps - trainer.progress.step) as advance:
        finished = trainer.run(advance)
    if finished:
        with anchor.applied() as drafter:
            save_weights(accelerator, drafter, recipe.run_dir / "checkpoints" / "last", {"step": recipe.train.steps})
    if accelerator.is_main_process:
        rundir.write_provenance(
            recipe, processes=accelerator.num_processes, backend=backend, device=accelerator.device.type,
            rollouts={"train": train_rollouts.key, "eval": eval_rollouts.key}, train_rows=len(train_rows),
            eval_rows=len(eval_rows), supervised_tokens=trainer.progress.supervised_tokens,
            fed_tokens=trainer.progress.fed_tokens, skipped_steps=trainer.progress.bad_steps, best=evaluate.best,
        )  # fmt: skip
    trackers.close()
    return finished


def rollouts_of(recipe: Recipe, plans: dict, accelerator, stop):
    """Training and held-out rollouts, written if missing; None when a signal came first."""
    from draftkv.distill.processes import check_same
    from draftkv.teacher.rollouts import ensure_rollouts, load_rollouts

    check_same(accelerator, "rollouts", " ".join(plan.key for plan in plans.values()))
    if not stop.written_first(accelerator, lambda: [ensure_rollouts(recipe, s, plan=p) for s, p in plans.items()]):
        return None
    return [load_rollouts(recipe, split, plan=plan) for split, plan in plans.items()]


def usable_rows(recipe: Recipe, train_rollouts, eval_rollouts) -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows to evaluate on; says what was skipped."""
    from draftkv.teacher.rollouts import held_out_rows

    train_rows = train_rollouts.rows()
    eval_rows = held_out_rows(recipe, eval_rollouts)
    for split, store in (("training", train_rollouts), ("held-out", eval_rollouts)):
        for reason, number in store.counts["skipped"].items():
            say(f"{split} rows skipped: {number} {reason}")
    if not train_rows:
        raise InputError(f"{train_rollouts.path}: no usable training row; {train_rollouts.counts}")
    return train_rows, eval_rows


def teacher_of(recipe: Recipe, rollouts, vocab: int, accelerator, stop):
    """The target in process, or its stored signals, written if missing: training then does not load it. None when a
    signal came first."""
    from draftkv.distill.processes import backend_name, check_same, shard_layers
    from draftkv.distill.student import Teacher
    from draftkv.models import load_model
    from draftkv.teacher.signal_store import SignalPlan, StoredTeacher, write_signals

    if recipe.signal.source == "stored":
        plan = SignalPlan.of(recipe, rollouts, vocab)
        check_same(accelerator, "signals", plan.key)
        if not stop.written_first(accelerator, lambda: write_signals(recipe, plan)):
            return None
        return StoredTeacher(plan, recipe.signal.temperature, accelerator.device)
    target = load_model(recipe.target.model, recipe.target.revision, recipe.target.dtype)
    if backend_name(accelerator) != "fsdp2":
        return Teacher(target.to(accelerator.device))
    return Teacher(shard_layers(target, accelerator.device), recipe.train.micro_rows)


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
