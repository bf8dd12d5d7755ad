"""What is trained of a session that is over."""

from __future__ import annotations

from dataclasses import replace

from actors.types import (
    PLAYED_OUT,
    TRUNCATIONS,
    Outcome,
    RolloutAssignment,
    Timings,
    Trajectory,
)
from service.gateway.session import Session
from service.intake.session import SessionEnd, SessionStatus

# Outcomes of which a missing reward is an error of its own.
GRADED = PLAYED_OUT | TRUNCATIONS


def trajectory_of(
    session: Session, assignment: RolloutAssignment, *, oldest_version: int
) -> Trajectory:
    """Make the trajectory of a session's rollout; may run in a thread.

    oldest_version: that may have sampled a token of it.
    """
    stored, end = session.stored, session.stored.end
    assert end is not None, "a trajectory of a session that is not over"
    counts = session.tree.counts()
    trajectory = replace(
        Trajectory.of(assignment, end.outcome, detail=end.detail),
        samples=session.tree.samples(
            assignment.trajectory_id,
            reward=end.reward or 0.0,
            components=end.components,
            turn_rewards=end.turn_rewards,
            judged=end.judged,
        ),
        was_rewarded=end.reward is not None,
        left_out=counts.left_out,
        left_out_tokens=counts.left_out_tokens,
        num_inserted_tokens=counts.num_inserted,
        render_breaks=counts.render_breaks,
        timings=Timings(wall_s=max(0.0, end.ended_at - (stored.opened_at or end.ended_at))),
    )
    outcome, detail = _judged(trajectory, end, oldest_version)
    return replace(trajectory, outcome=outcome, detail=detail)


def _judged(trajectory: Trajectory, end: SessionEnd, oldest_version: int) -> tuple[Outcome, str]:
    """The outcome and its detail, where the end alone does not say it."""
    versions = trajectory.versions
    if end.status is SessionStatus.FINISHED and not trajectory.samples:
        return Outcome.EMPTY, end.detail or "no turn of it was sampled"
    if end.outcome in GRADED and end.reward is None:
        return Outcome.REWARD_ERROR, end.detail or "it was finished without a reward"
    if versions is not None and versions[0] < oldest_version:
        why = f"sampled by version {versions[0]}, expected at least {oldest_version}"
        return Outcome.STALE, why
    return end.outcome, end.detail
