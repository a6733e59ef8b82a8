"""The two kinds of failure that a command reports in one line (see `draftkv.cli`)."""


class InputError(ValueError):
    """Something the user gave is wrong: exit status 2. The text says what, where, and what to do."""


class RunError(RuntimeError):
    """The input was fine but the run could not go on: exit status 1."""


class Interrupted(RunError):
    """The user asked to stop and everything was saved: exit status 130, as after Ctrl-C anywhere else."""
