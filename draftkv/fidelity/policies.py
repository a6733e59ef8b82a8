"""What a fidelity run asks of the recipe's list of policies. No model library is needed here, so a plan is quick."""

from collections.abc import Sequence

from draftkv.cache.policy import Policy
from draftkv.errors import InputError


def check_policies(policies: Sequence[Policy]) -> None:
    """Raises: InputError for a trigger that looks only at acceptance lengths, which plain generation does not have."""
    for policy in policies:
        trigger = policy.trigger
        if trigger.kind != "adaptive":
            continue
        if trigger.al_below is not None and trigger.entropy_above is None and trigger.drift_above is None:
            raise InputError(
                f"eval.policies: '{policy.label}' is adaptive by acceptance length (al_below) alone, and plain"
                " generation has no acceptance length; set entropy_above or drift_above"
            )


def reference_of(policies: Sequence[Policy]) -> Policy:
    """The policy that others are compared with, and under which drift is measured: BACON if listed, else the first
    compressed one.

    Raises:
        InputError: no policy compresses anything.
    """
    compressed = [p for p in policies if not p.is_full]
    if not compressed:
        raise InputError("eval.policies: fidelity compares compressed caches with the full one; list a compressed one")
    return next((p for p in compressed if p.policy == "bacon"), compressed[0])
