"""Leaving when a scheduler asks for it: SIGUSR1 and SIGTERM come minutes before it takes a machine."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


class Stopped(BaseException):
    """This process was asked to leave. No Exception: nothing on its way may take it for a failure of its own."""


class StopSignal:
    """Notes that this process was asked to leave, from when it is made."""

    def __init__(self):
        self.asked, self.leaves_at_once = False, False
        for name in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(name, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        if self.leaves_at_once:
            self.leaves_at_once = False  # a second signal must not break off what the first one has to clean up
            raise Stopped

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around work that may be broken off anywhere. Raises: Stopped, when or if the process is asked to leave."""
        if self.asked:
            raise Stopped
        self.leaves_at_once = True
        try:
            yield
        finally:
            self.leaves_at_once = False

    def agreed(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked; all of them must ask this together, or one waits for ever."""
        if accelerator.num_processes == 1:
            return self.asked
        flag = torch.tensor([float(self.asked)], device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum").item() > 0)

    def written_first(self, accelerator: Accelerator, write: Callable[[], Any]) -> bool:
        """Call `write`, which keeps what is complete, in the main process while the others wait.

        Returns:
            In all of them, whether it came to its end before the main process was asked to leave.
        """
        complete = True
        if accelerator.is_main_process:
            try:
                with self.at_once():
                    write()
            except Stopped:
                complete = False
        return broadcast_object_list([complete])[0]
