"""Which steps a journal should hold, by what the run recorded and by how many it keeps; pure.

The file of a step is written before the step is trained, and with a lag the step before it may
not be recorded yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.inspect.audit.offence import Check, Offence

# The current step, and the one before it while the engines load its version.
MAX_UNRECORDED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The run's plan. steps: the last one planned. keep_steps: run.journal_steps."""

    steps: int
    keep_steps: int


def missing_steps(
    present: Sequence[int], recorded: Sequence[int], plan: Plan | None
) -> tuple[int, ...]:
    """Recorded steps without a file. plan: None: not known, nor then how many are kept.

    Example: present [3], recorded [1, 2, 3, 4], 3 kept -> (2, 4)
    """
    first, last = min(present), max(present)
    if plan is not None and plan.keep_steps:
        last = max(last, *recorded) if recorded else last
        first = last - plan.keep_steps + 1
    found = set(present)
    return tuple(step for step in recorded if first <= step <= last and step not in found)


def steps_beyond(
    present: Sequence[int], recorded: Sequence[int], plan: Plan | None
) -> Iterator[Offence]:
    """Steps with a file that the run cannot have begun."""
    newest = max(recorded, default=0)
    bound = newest + MAX_UNRECORDED
    if plan is not None:
        # A run whose run.steps was lowered has done what it has recorded.
        bound = min(bound, max(plan.steps, newest))
    for step in present:
        if step > bound:
            yield Offence(
                check=Check.BEGUN,
                step=step,
                subject=f"step {step}",
                text=f"the run has recorded steps up to {newest}, and can have begun none behind "
                f"{bound}",
            )
