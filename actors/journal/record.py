"""What the journal keeps of a training step: the raw turns, and what was made of them.

Both stand side by side, so that a reader can hold the one against the other: a trajectory is what
the engine was sent and what came back, its samples are what was handed to the trainer. Made by the
merge actor of a step's result; read by `rayloom inspect`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.batch import Float32s, Int32s
from actors.merge.advantages import Baseline, Scale
from actors.merge.member import Float64s, Member
from actors.merge.mismatch import Mismatch
from actors.merge.prefix import Sample
from actors.merge.step import StepResult
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import LogProbs, TokenIds, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEntry:
    """One sample as it was handed out. M = 0 where its trajectory is not in the loss.

    turns: indices in the trajectory. prompt_length, num_tokens: tokens. positions: [M] int32,
    ascending, where its trained tokens stand. token_ids, logprobs (nats, of the sampler), versions,
    advantages: [M], of those tokens, as the trainer was given them.
    """

    turns: tuple[int, ...]
    prompt_length: int
    num_tokens: int
    positions: Int32s
    token_ids: TokenIds
    logprobs: LogProbs
    versions: Int32s
    advantages: Float32s

    @property
    def num_trained(self) -> int:
        return int(self.positions.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEntry:
    """reason: why it is not in the loss; None: trained. baseline_return: what it brought to its
    group's baseline; None: it was not in it. samples: none where the turns do not fit together.
    problem: what is wrong with the trajectory itself; mostly empty.
    """

    trajectory: Trajectory
    reason: EvictionReason | None
    baseline_return: float | None
    samples: tuple[SampleEntry, ...]
    mismatches: tuple[Mismatch, ...]
    problem: str = ""

    @property
    def num_trained(self) -> int:
        return sum(sample.num_trained for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """How advantages came of a group's returns, one number for each trajectory.

    trains_without_signal: groups of equal returns are trained, as AlgorithmSettings has it.
    """

    baseline: Baseline
    scale: Scale
    trains_without_signal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStep:
    """One training step, played in one epoch.

    step: 1, 2, ..., as in the run's records and its ledger's rows. max_policy_age: the run's bound,
    versions. group_rule: None where advantages are no function of the group's returns alone.
    num_packed_trained: trained tokens in the packed rows of all ranks.
    """

    step: int
    epoch: int
    trainer_version: int
    max_policy_age: int
    group_rule: GroupRule | None
    num_packed_trained: int
    entries: tuple[TrajectoryEntry, ...]


def journal_step(
    result: StepResult, *, epoch: int, max_policy_age: int, group_rule: GroupRule | None
) -> JournalStep:
    """Lay out a built step for the journal."""
    report = result.report
    return JournalStep(
        # The trainer holds version n - 1 when it does step n.
        step=report.trainer_version + 1,
        epoch=epoch,
        trainer_version=report.trainer_version,
        max_policy_age=max_policy_age,
        group_rule=group_rule,
        num_packed_trained=report.num_trained_tokens,
        entries=tuple(_entry(member) for member in result.members),
    )


def _entry(member: Member) -> TrajectoryEntry:
    return TrajectoryEntry(
        trajectory=member.trajectory,
        reason=member.reason,
        baseline_return=member.baseline_return,
        samples=tuple(
            _trained_sample(*each) for each in zip(member.samples, member.advantages, strict=True)
        )
        if member.is_trained
        else _untrained_samples(member.samples),
        mismatches=member.merged.mismatches if member.merged is not None else (),
        problem=member.problem,
    )


def _trained_sample(sample: Sample, advantages: Float64s) -> SampleEntry:
    return _sample(sample, np.flatnonzero(sample.mask), advantages.astype(np.float32))


def _untrained_samples(samples: Sequence[Sample]) -> tuple[SampleEntry, ...]:
    nothing, no_advantages = np.empty(0, np.int64), np.empty(0, np.float32)
    return tuple(_sample(sample, nothing, no_advantages) for sample in samples)


def _sample(sample: Sample, at: NDArray[np.int64], advantages: Float32s) -> SampleEntry:
    return SampleEntry(
        turns=sample.turns,
        prompt_length=sample.prompt_length,
        num_tokens=sample.num_tokens,
        positions=at.astype(np.int32),
        token_ids=sample.token_ids[at],
        logprobs=sample.logprobs[at],
        versions=sample.versions[at],
        advantages=advantages,
    )
