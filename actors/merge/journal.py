"""Write a built step to the journal; rebuild the step's members from the journal's record.

Called by the merge actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.journal.files import GroupRule, JournalStep, TrajectoryEntry, prune, write_file
from actors.merge.member import Member
from actors.merge.step import StepResult
from actors.policy_age import oldest_version
from actors.trajectory_queue.ledger import EvictionReason

# Reasons why a group gives no training signal. Its members are not in the rows, but count in the
# loss weights.
_NO_SIGNAL = (EvictionReason.ZERO_VARIANCE, EvictionReason.NEGATIVE_RETURN)


def journal_step(
    result: StepResult, *, term: int, max_policy_age: int, group_rule: GroupRule | None
) -> JournalStep:
    """Convert a built step to the journal's record."""
    report = result.report
    return JournalStep(
        step=report.step,
        term=term,
        trainer_version=report.trainer_version,
        max_policy_age=max_policy_age,
        group_rule=group_rule,
        num_packed_trained=report.num_trained_tokens,
        entries=tuple(
            TrajectoryEntry(
                trajectory=member.trajectory,
                reason=member.reason,
                baseline_return=member.baseline_return,
                advantages=tuple(values.astype(np.float32) for values in member.advantages)
                if member.is_trained
                else (),
                problem=member.problem,
            )
            for member in result.members
        ),
    )


def members_of(step: JournalStep) -> tuple[Member, ...]:
    """Return the trajectories of a recorded step as members, the input of `weigh_updates`."""
    return tuple(
        Member(
            trajectory=entry.trajectory,
            reason=entry.reason,
            baseline_return=entry.baseline_return,
            shaped_return=entry.trajectory.episode_return,
            advantages=tuple(values.astype(np.float64) for values in entry.advantages),
            no_signal=entry.reason if entry.reason in _NO_SIGNAL else None,
        )
        for entry in step.entries
    )


@dataclass(slots=True, kw_only=True)
class Journal:
    """A writer of the steps of one term; each start or recovery of a run begins a new term."""

    directory: Path
    """The journal's directory in the run directory, as the merge actor's node sees it."""
    term: int
    keep_steps: int
    """Number of the newest steps whose files are kept."""
    keep_bytes: int
    """Limit on the total size of all files, above which the oldest files are removed."""
    max_policy_age: int
    group_rule: GroupRule | None
    """The rule of the run's advantages; None if advantages depend on more than a group's returns.
    Each file stores the rule and max_policy_age.
    """
    _has_warned: bool = False

    def write(self, result: StepResult, *, republished: Sequence[int] = ()) -> str:
        """Write a step; return a warning the first time it cannot be written, else an empty string.

        republished: policy versions that belong to the same training step as the version before
        them (`actors.policy_age`).
        """
        version = result.report.trainer_version
        step = journal_step(
            result,
            term=self.term,
            max_policy_age=version - oldest_version(version, self.max_policy_age, republished),
            group_rule=self.group_rule,
        )
        try:
            write_file(self.directory, step)
            prune(
                self.directory,
                newest=step.step,
                keep_steps=self.keep_steps,
                keep_bytes=self.keep_bytes,
            )
        except OSError as error:
            return self._warning(step.step, error)
        return ""

    def _warning(self, step: int, error: OSError) -> str:
        if self._has_warned:
            return ""
        self._has_warned = True
        return (
            f"step {step} is not in the journal: {self.directory} cannot be written "
            f"({error.strerror or error}); training continues, `rayloom inspect` lacks such steps; "
            "free space there, or set run.journal_steps to 0"
        )
