"""The rules by which sessions end, and by which an ended session becomes a trajectory; pure.

Used by `service.gateway.session`, and by `service.gateway.sessions` for the trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from actors.types import (
    PLAYED_OUT,
    TRUNCATIONS,
    FinishReason,
    LeftOutReason,
    Outcome,
    RolloutAssignment,
    Timings,
    Trajectory,
)
from service.api.problems import shown
from service.gateway.chat import RefusalCode, Refused, unavailable
from service.gateway.tree import SessionTree
from service.intake.session import (
    LimitRefusal,
    SessionEnd,
    SessionStatus,
    SessionTotals,
    StoredSession,
)

# Largest number of stored names of ignored parameters, because clients choose the names freely.
MAX_IGNORED_NAMES = 64
# Outcomes with which a missing reward is an error.
GRADED = PLAYED_OUT | TRUNCATIONS
_WHY_LEFT_OUT = {
    LeftOutReason.AUXILIARY: "the agent marked the call as auxiliary",
    LeftOutReason.UNSEEN: "its client left before the answer",
    LeftOutReason.TITLE: "it is a title, and sessions.titles is leave_out",
}


def broken_off(status: SessionStatus, why: str, *, at: float) -> SessionEnd:
    """Return the end of a session that its client did not finish. at: seconds since 1970."""
    is_expired = status is SessionStatus.EXPIRED
    return SessionEnd(
        status=status,
        outcome=Outcome.WALL_TIMEOUT if is_expired else Outcome.CANCELLED,
        reward=None,
        detail=why,
        ended_at=at,
    )


def overdue(
    stored: StoredSession, *, last_request_at: float, is_sampling: bool, now: float
) -> SessionEnd | None:
    """Return the end of a session whose time limit has passed, or None if it has time left.

    last_request_at, now: seconds since 1970.
    """
    if stored.end is not None:
        until = stored.end.reward_until
        if until is None or now < until:
            return None
        return replace(stored.end, reward_until=None, detail="no reward came in time")
    if stored.opened_at is None:
        return None
    join_s, begun_at = stored.spec.join_s, stored.begun_at
    if begun_at is None:
        if join_s is None or now < stored.opened_at + join_s:
            return None
        why = f"no agent claimed it within {join_s:g} s"
        return broken_off(SessionStatus.DISCARDED, why, at=now)
    if now >= begun_at + stored.spec.ttl_s:
        why = f"it was not finished within {stored.spec.ttl_s:g} s"
    elif not is_sampling and now >= last_request_at + stored.spec.idle_s:
        why = f"it had no request for {stored.spec.idle_s:g} s"
    else:
        return None
    return broken_off(SessionStatus.EXPIRED, why, at=now)


def seen_outcome(tree: SessionTree, refusal: LimitRefusal | None, judged: int | None) -> Outcome:
    """Return the outcome of a session for which the client states no outcome.

    Args: refusal: the session's newest refusal for a limit, if any. judged: number of the turn
    that the client named for the reward, or None.
    """
    last = tree.last_of_main(judged)
    if last is None:
        return Outcome.EMPTY
    if refusal is not None and tree.is_ended_by(refusal, judged):
        return refusal.outcome
    if last.finish_reason is FinishReason.LENGTH:
        return Outcome.TRUNCATED_TOKENS
    return Outcome.COMPLETED


def check_turns(
    tree: SessionTree, *, turn_rewards: Mapping[int, float], judged: int | None
) -> None:
    """Check that the session has the named turns and trains them. Raises: Refused."""
    num_turns, left_out = tree.num_turns, tree.left_out()
    for param, named in (
        ("turn_rewards", sorted(turn_rewards)),
        ("turn", [] if judged is None else [judged]),
    ):
        if unknown := [number for number in named if not 0 <= number < num_turns]:
            raise Refused(
                RefusalCode.INVALID_REQUEST,
                f"{param} names turns {unknown[:8]}, expected turns of the session, whose numbers "
                f"are below {num_turns}",
                param=param,
            )
        for number in named:
            if (reason := left_out.get(number)) is not None:
                raise Refused(
                    RefusalCode.INVALID_REQUEST,
                    f"{param} names turn {number}, which is not trained ({reason}: "
                    f"{_WHY_LEFT_OUT[reason]}), expected trained turns; reward another turn",
                    param=param,
                )


def totals_of(tree: SessionTree) -> SessionTotals:
    """Return the totals of a session's turns."""
    counts = tree.counts()
    ignored = Counter(name for turn in tree.turns for name in turn.ignored)
    return SessionTotals(
        num_turns=tree.num_turns,
        num_sampled_tokens=sum(turn.num_sampled for turn in tree.turns),
        num_ambiguous=counts.num_ambiguous,
        num_left_out=len(counts.left_out),
        num_malformed=counts.num_malformed,
        left_out=counts.left_out,
        ignored=dict(ignored.most_common(MAX_IGNORED_NAMES)),
    )


def closed(stored: StoredSession) -> Refused:
    """Return the refusal of a request to a session that has ended or is ending."""
    how = f"is {stored.end.status}" if stored.end else "is being ended"
    return Refused(
        RefusalCode.SESSION_CLOSED,
        f"session {stored.id} {how} and takes no more requests; create another",
    )


def ended_otherwise(stored: StoredSession) -> Refused:
    """Return the refusal of an end or reward if the session has ended, or is being ended,
    differently.
    """
    end = stored.end
    how = (
        f"is {end.status} already, with another content"
        if end
        else "is being ended by another request"
    )
    if end is not None and end.detail:
        how += f" ({shown(end.detail)})"
    return Refused(
        RefusalCode.CONFLICT,
        f"session {stored.id} {how}; a session ends once, and gets one reward",
    )


def stopping() -> Refused:
    """Return the refusal of a gateway that is being stopped; the next gateway answers a retry."""
    return unavailable("the gateway is being stopped; send the request again")


def trajectory_of(
    stored: StoredSession,
    tree: SessionTree,
    assignment: RolloutAssignment,
    *,
    oldest_version: int,
) -> Trajectory:
    """Make the trajectory of a session's rollout; may run in a thread.

    oldest_version: the oldest version that may have sampled its tokens.
    """
    end = stored.end
    assert end is not None, "a trajectory of a session that is not over"
    counts = tree.counts()
    trajectory = replace(
        Trajectory.of(assignment, end.outcome, detail=end.detail),
        samples=tree.samples(
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
    outcome, detail = _final_outcome(trajectory, end, oldest_version)
    return replace(trajectory, outcome=outcome, detail=detail)


def _final_outcome(
    trajectory: Trajectory, end: SessionEnd, oldest_version: int
) -> tuple[Outcome, str]:
    """Return the outcome of a session's trajectory, and a detail for people.

    The session's own outcome is replaced if nothing can be trained, a reward is missing, or a
    sample is older than oldest_version.
    """
    versions = trajectory.versions
    if end.status is SessionStatus.FINISHED and not trajectory.samples:
        return Outcome.EMPTY, end.detail or "it has no trained turn"
    if end.outcome in GRADED and end.reward is None:
        return Outcome.REWARD_ERROR, end.detail or "it was finished without a reward"
    if versions is not None and versions[0] < oldest_version:
        why = f"sampled by version {versions[0]}, expected at least {oldest_version}"
        return Outcome.STALE, why
    return end.outcome, end.detail
