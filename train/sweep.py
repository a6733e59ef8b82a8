"""Run a base recipe at many points: python train/sweep.py recipes/sweeps/rho.yaml [key.sub=value ...] [--plan]

Every point is one `accelerate launch train/distill.py`, in turn. Rollouts are shared, finished points are skipped,
failed ones are reported at the end (status 1) after all the others have run, and one report collates the results.
"""

import argparse
from pathlib import Path

from draftkv.cli import parser, run, say
from draftkv.errors import InputError
from draftkv.sweep import check_points, load_sweep, plan_sweep, run_sweep


def main(args: argparse.Namespace) -> None:
    if args.config_file and not Path(args.config_file).is_file():
        raise InputError(f"--config_file: {args.config_file}: no such file; `accelerate config` writes one")
    launch = ["--config_file", args.config_file] if args.config_file else []
    sweep = load_sweep(args.recipe, args.overrides, rehearse=args.rehearse)  # validates every point
    if args.plan:
        say(plan_sweep(sweep, launch))
        return
    check_points(sweep)
    run_sweep(sweep, launch)


if __name__ == "__main__":
    arguments = parser(__doc__.splitlines()[0], recipe="SWEEP")
    arguments.add_argument("--rehearse", action="store_true", help="run every point as a dress rehearsal")
    arguments.add_argument("--config_file", help="configuration of `accelerate launch`")
    run(main, arguments)
