"""What becomes of each trajectory of a group: in the baseline, in the loss, or why not.

Invariant: each trajectory gets one verdict, and a verdict that is not in the loss has a reason.
Called by `step`; the rules are data (`actors.outcomes`), by environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from actors.merge.prefix import Merged
from actors.outcomes import Disposition, OutcomePolicy
from actors.trajectory import Outcome, Trajectory
from actors.trajectory_queue.ledger import EvictionReason

_DEFAULT_POLICY = OutcomePolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """baseline_return: what it brings to the group's baseline, None: it is not in it.

    reason: why it is not in the loss; None: it is (unless its group has no signal).
    """

    rollout_id: str
    baseline_return: float | None
    reason: EvictionReason | None
    is_malformed_rewarded: bool = False


def judge(
    trajectory: Trajectory, merged: Merged | None, *, policies: Mapping[str, OutcomePolicy]
) -> Verdict:
    """Apply the environment's outcome policy to one trajectory.

    train: as it is; train_clamped: with return min(r, 0); mask: in the baseline if it was graded,
    not in the loss; drop: neither. A trajectory whose turns do not fit together or whose return is
    not finite is in neither; one with nothing to train is not in the loss; each has its reason.

    Args: merged: None when the turns do not fit together.
    """
    rollout_id = trajectory.rollout_id
    episode_return = trajectory.episode_return
    if merged is None:
        return _out(rollout_id, EvictionReason.TOKEN_MISALIGNED)
    if not math.isfinite(episode_return):
        return _out(rollout_id, EvictionReason.REWARD_ERROR)
    is_malformed = trajectory.outcome is Outcome.MALFORMED_TOOL_CALL
    disposition = policies.get(trajectory.environment, _DEFAULT_POLICY).disposition(
        trajectory.outcome
    )
    baseline_return: float | None = episode_return
    reason: EvictionReason | None = None
    match disposition:
        case Disposition.TRAIN:
            reason = _nothing_to_train(merged)
        case Disposition.TRAIN_CLAMPED:
            baseline_return = min(episode_return, 0.0)
            reason = _nothing_to_train(merged)
        case Disposition.MASK:
            baseline_return = episode_return if trajectory.is_graded else None
            reason = EvictionReason.MASKED
        case Disposition.DROP:
            baseline_return = None
            reason = EvictionReason.of(trajectory.outcome)
    return Verdict(
        rollout_id=rollout_id,
        baseline_return=baseline_return,
        reason=reason,
        is_malformed_rewarded=is_malformed and episode_return > 0,
    )


def _nothing_to_train(merged: Merged) -> EvictionReason | None:
    if merged.num_trained_tokens:
        return None
    is_empty = merged.num_masked_tokens == 0
    return EvictionReason.EMPTY if is_empty else EvictionReason.TOKEN_MISALIGNED


def _out(rollout_id: str, reason: EvictionReason) -> Verdict:
    return Verdict(rollout_id=rollout_id, baseline_return=None, reason=reason)
