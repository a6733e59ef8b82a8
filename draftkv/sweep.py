"""A sweep: one base recipe, many points, one `accelerate launch` each, one collated report.

A sweep file is YAML:

    name: rho                      # runs are named rho.POINT
    base: ../quickstart.yaml       # relative to the sweep file
    set: {train.steps: 20}         # overrides of every point
    grid: {views.1.rho: [0.25, 0.5], seed: [0, 1]}    # the product of these lists,
    points: [{loss.0.name: tv}, {name: soft, loss.0.temperature: 2}]    # crossed with each of these

A later source wins: base, `set`, the point, the command line. All points are validated before the first one runs.
"""

import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from draftkv.cli import say
from draftkv.errors import InputError, Interrupted, RunError
from draftkv.recipe import Recipe, load_recipe
from draftkv.settings import Section, validate

DISTILL = Path(__file__).parents[1] / "train" / "distill.py"
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--quiet")  # quiet: no stack trace of its own


class SweepFile(Section):
    """The contents of a sweep file; see the module's docstring."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    base: str
    set: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    points: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Point:
    """One run of a sweep: `changes` are what sets it apart, `overrides` all that the command is given."""

    slug: str
    changes: dict[str, Any]
    overrides: tuple[str, ...]
    recipe: Recipe

    @property
    def log(self) -> Path:
        return self.recipe.run_dir / "log.txt"

    @property
    def finished(self) -> bool:
        """Whether this very recipe has run to its end here (`done.json` is the last file that a run writes)."""
        done = self.recipe.run_dir / "done.json"
        if not done.is_file() or not (self.recipe.run_dir / "export" / "config.json").is_file():
            return False
        try:
            return json.loads(done.read_text(encoding="utf-8")).get("recipe_hash") == recipe_hash(self.recipe)
        except (json.JSONDecodeError, AttributeError):
            return False


@dataclass(frozen=True)
class Sweep:
    name: str
    base: Path
    points: tuple[Point, ...]
    rehearsal: bool

    @property
    def folder(self) -> Path:
        """Where the collated report goes: the folder that a run of the sweep's own name would have."""
        return self.points[0].recipe.run_dir.parent / (self.name + ("-rehearsal" if self.rehearsal else ""))

    def command(self, point: Point, launch: Sequence[str] = ()) -> list[str]:
        """`accelerate launch` of one point; `launch` holds further arguments of the launcher."""
        flags = ["--rehearse"] if self.rehearsal else []
        return [*LAUNCH, *launch, str(DISTILL), str(self.base), *point.overrides, *flags]


def recipe_hash(recipe: Recipe) -> str:
    """Identity of a resolved recipe: 16 hexadecimal digits that change when any key does."""
    plain = json.dumps(recipe.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def load_sweep(path: str | Path, overrides: Sequence[str] = (), rehearse: bool = False) -> Sweep:
    """Read a sweep file and resolve every point.

    Raises:
        InputError: a malformed file, or a point whose recipe is refused; the message names the point.
    """
    file = _read(Path(path))
    base = Path(path).parent / file.base
    if not base.is_file():
        raise InputError(f"{path}: base: {base}: no such recipe file; the path is relative to the sweep file")
    names = [o.removeprefix("name=") for o in overrides if o.startswith("name=")]
    name = names[-1] if names else file.name
    rest = [o for o in overrides if not o.startswith("name=")]
    points = []
    for changes in _changes(file, str(path)):
        slug = changes.pop("name", None) or _slug(changes)
        own = [_override(k, v) for k, v in {**file.set, **changes}.items()]
        points.append(_resolve(base, name, str(slug), changes, [*own, *rest], rehearse))
    _all_different(points, str(path))
    return Sweep(name, base, tuple(points), rehearse)


def _read(path: Path) -> SweepFile:
    if not path.is_file():
        raise InputError(f"{path}: no such sweep file; see recipes/sweeps/ for examples")
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(plain, dict):
        raise InputError(f"{path}: a sweep file is a mapping with name, base, and grid or points")
    return validate(plain, SweepFile, str(path))


def _changes(file: SweepFile, where: str) -> list[dict[str, Any]]:
    """The points as mappings of recipe keys: the product of `grid`, crossed with `points`."""
    empty = [key for key, values in file.grid.items() if not values]
    if empty or not (file.grid or file.points):
        raise InputError(f"{where}: {f'grid.{empty[0]}: no values' if empty else 'needs a grid or a list of points'}")
    grid = [dict(zip(file.grid, values, strict=True)) for values in itertools.product(*file.grid.values())]
    result = []
    for point, cell in itertools.product(file.points or [{}], grid):
        changes = {**point, **cell}
        if "name" in point and file.grid:
            changes["name"] = f"{point['name']}-{_slug(cell)}"
        result.append(changes)
    return result


def _resolve(base: Path, sweep: str, slug: str, changes: dict, overrides: list[str], rehearse: bool) -> Point:
    overrides = [*overrides, f"name={sweep}.{slug}"]
    try:
        recipe = load_recipe(base, overrides)
        if rehearse:
            from draftkv.rehearsal import rehearse as shrink

            recipe = shrink(recipe)
    except InputError as error:
        raise InputError(f"point {sweep}.{slug}: {error}") from error
    return Point(slug, changes, tuple(overrides), recipe)


def _all_different(points: list[Point], where: str) -> None:
    by_name: dict[str, Point] = {}
    by_content: dict[str, Point] = {}
    for point in points:
        content = recipe_hash(point.recipe.model_copy(update={"name": "-"}))
        if point.slug in by_name:
            raise InputError(f"{where}: two points are named '{point.slug}'")
        if content in by_content:
            raise InputError(f"{where}: points '{by_content[content].slug}' and '{point.slug}' are the same experiment")
        by_name[point.slug] = by_content[content] = point


def _override(key: str, value: Any) -> str:
    """`key=value` as the command line takes it; the value is YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return f"{key}={text.removesuffix('...' + chr(10)).strip()}"


def _slug(changes: dict[str, Any]) -> str:
    """`{views.1.rho: 0.25, seed: 1}` -> `rho0.25-seed1`; keys with the same last part are written in full."""
    tails = [key.rpartition(".")[2] for key in changes]
    words = []
    for key, tail in zip(changes, tails, strict=True):
        value = changes[key]
        text = re.sub(r"[^A-Za-z0-9.-]+", "_", str(value))
        if isinstance(value, list | dict) or len(text) > 24:
            text = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:6]
        words.append((tail if tails.count(tail) == 1 else key.replace(".", "")) + text)
    return "-".join(words)


def plan_sweep(sweep: Sweep, launch: Sequence[str] = ()) -> str:
    """What `run_sweep` would do: one command a point, finished ones marked."""
    lines = [f"sweep {sweep.name}: {len(sweep.points)} points, report in {sweep.folder / 'report'}"]
    for point in sweep.points:
        lines.append(f"# {point.recipe.name}: {'finished, would be skipped' if point.finished else 'to run'}")
        lines.append(shlex.join(sweep.command(point, launch)))
    return "\n".join(lines)


def check_points(sweep: Sweep) -> None:
    """Check models and prompts of every point that is not finished, each different set of them once.

    Raises:
        InputError: see `draftkv.drafter.preflight` and `plan_rollouts`; the message names the point.
    """
    from draftkv.drafter import preflight
    from draftkv.teacher.rollouts import plan_rollouts

    seen = set()
    for point in sweep.points:
        recipe = point.recipe
        same = recipe.model_dump_json(include={"target", "drafter", "prompts", "rollouts", "export", "eval", "train"})
        data = recipe.model_dump_json(include={"target", "drafter", "prompts", "rollouts"})
        if point.finished:
            continue
        try:
            if same not in seen:
                preflight(recipe)
            if data not in seen:
                plan_rollouts(recipe)
        except InputError as error:
            raise InputError(f"point {recipe.name}: {error}") from error
        seen |= {same, data}


Runner = Callable[[list[str], Path], int]


def run_sweep(sweep: Sweep, launch: Sequence[str] = (), runner: Runner | None = None) -> None:
    """Run the points that are not finished, in turn, then write one report over all that are.

    Raises:
        RunError: when a point failed; the others have run and are in the report. The message names every log.
    """
    failed = []
    for number, point in enumerate(sweep.points, 1):
        title = f"[{number}/{len(sweep.points)}] {point.recipe.name}"
        if point.finished:
            say(f"{title}: finished before, skipped")
            continue
        say(f"{title}: running, log {point.log}")
        start = time.monotonic()
        status = (runner or run_logged)(sweep.command(point, launch), point.log)
        seconds = time.monotonic() - start
        if point.finished:
            say(f"{title}: done in {seconds:.0f} s")
        else:
            failed.append(point)
            say(f"{title}: FAILED after {seconds:.0f} s with status {status}: {_last_line(point.log)}")
    if any(p.finished for p in sweep.points):
        _report(sweep)
    if failed:
        logs = ", ".join(f"{p.recipe.name} ({p.log})" for p in failed)
        raise RunError(f"{len(failed)} of {len(sweep.points)} points failed: {logs}; run again to retry only those")


def _report(sweep: Sweep) -> None:
    from draftkv.acceptance.report import write_sweep_report

    # An unfinished point is listed as missing. It is given by its log, not by its folder, which may hold records of
    # half a run or of an earlier recipe.
    points = [(p.changes, p.recipe.run_dir if p.finished else p.log) for p in sweep.points]
    say(f"sweep report: {write_sweep_report(points, sweep.folder / 'report')}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it wrote nothing")


def run_logged(command: list[str], log: Path) -> int:
    """Run a command with its output appended to `log`; on SIGINT or SIGTERM let it save and end first.

    The command gets a process group of its own, since the launcher dies of a signal that its child survives.

    Raises:
        Interrupted: this process was asked to stop.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                 start_new_session=True)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return child.wait()
    except KeyboardInterrupt:
        _end_group(child)
        raise Interrupted(f"stopped; run again to go on (log {log})") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _end_group(child: subprocess.Popen, patience: float = 600.0) -> None:
    """SIGTERM to the child's group, then wait until all of it is gone; SIGKILL after `patience` seconds."""
    deadline = time.monotonic() + patience
    signum: int = signal.SIGTERM
    try:
        while True:
            os.killpg(child.pid, signum)
            child.poll()
            signum = 0 if time.monotonic() < deadline else signal.SIGKILL
            time.sleep(0.1)
    except ProcessLookupError:
        child.wait()
