"""What a scheduler's signal does to work that only the main process does."""

import os
import signal

import pytest
from accelerate import Accelerator

from draftkv.distill.stopping import Stopped, StopSignal

USUAL = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGUSR1)}


@pytest.fixture
def stop():
    yield StopSignal()
    for name, handler in USUAL.items():
        signal.signal(name, handler)


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_breaks_off_what_is_written_and_not_its_cleaning_up(stop, name):
    done = []

    def write():
        try:
            os.kill(os.getpid(), name)
            done.append("written")
        finally:
            os.kill(os.getpid(), name)
            done.append("cleaned up")

    assert stop.written_first(Accelerator(cpu=True), write) is False
    assert done == ["cleaned up"] and stop.asked


def test_what_is_asked_before_and_after_counts(stop):
    done, accelerator = [], Accelerator(cpu=True)
    assert stop.written_first(accelerator, lambda: done.append("first")) and not stop.agreed(accelerator)
    os.kill(os.getpid(), signal.SIGTERM)  # noted, no more
    assert stop.agreed(accelerator) and not stop.written_first(accelerator, lambda: done.append("second"))
    assert done == ["first"]
    with pytest.raises(Stopped), stop.at_once():
        done.append("third")
    assert done == ["first"]


def test_a_failure_stays_a_failure(stop):
    def write():
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        stop.written_first(Accelerator(cpu=True), write)
    assert not stop.leaves_at_once
