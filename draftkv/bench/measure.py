"""What every comparison shares: versions measured in memory each run in a process of their own, so that none warms up
or fragments it for another."""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from draftkv.errors import InputError

Row = dict[str, Any]


class Bench(NamedTuple):
    help: str
    rows: Callable[[argparse.Namespace], list[Row]]
    options: Callable[[argparse.ArgumentParser], None]


def measure(worker: str, **settings: Any) -> Row:
    """Run the script's WORKERS[worker](**settings) in a fresh process; it returns what `timed` does.

    Raises:
        InputError: what the worker found wrong with the settings.
    """
    command = [sys.executable, sys.argv[0], "_worker", worker, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 2:
        raise InputError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    if done.returncode:
        sys.exit(f"{worker} {settings}: status {done.returncode}\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def timed(step: Callable[[], Any], repeats: int, device: str) -> Row:
    """Best wall and CPU time of `repeats` calls, and the peak of memory above what was held before the first one.

    On a machine that others use too, compare CPU times (all threads, system time included). CPU memory is the process's
    high-water mark (getrusage), so inputs must have been made without a larger transient.
    """
    cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": min(seconds), "cpu_seconds": min(cpu_seconds), "peak_bytes": peak - before}


def clock(call: Callable[[], Any], repeats: int, device: str = "cpu") -> tuple[Any, float]:
    """What a call returns, and the seconds of the best of `repeats` calls: CPU time, on a GPU wall time to its end."""
    cuda, seconds = device == "cuda", []
    now = time.perf_counter if cuda else time.process_time
    for _ in range(repeats):
        start = now()
        result = call()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(now() - start)
    return result, min(seconds)
