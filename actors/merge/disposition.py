"""Decide whether each trajectory is in the baseline and in the loss, and give the reason if not.

Invariant: a member that is not in the loss has a reason. The rules are data (`actors.outcomes`),
one set for each environment. Called by `groups`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from actors.algorithm import RewardSettings
from actors.limits import MAX_REWARD
from actors.merge.member import Member
from actors.merge.shaping import add_at_end, shaped_rewards, total
from actors.outcomes import Disposition, OutcomePolicy
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome, Trajectory

# Most notices of a step: many trajectories usually share one fault.
MAX_NOTICES = 3
_DEFAULT_POLICY = OutcomePolicy()
_NO_SHAPING = RewardSettings()
_REWARD_REMEDY = "check the environment's rewards, or set algorithm.reward.clip"


def classify(
    trajectory: Trajectory,
    *,
    misfit: str | None = None,
    policies: Mapping[str, OutcomePolicy],
    reward: RewardSettings = _NO_SHAPING,
    worst_completed: float | None = None,
) -> Member:
    """Shape a trajectory's rewards and apply the environment's outcome policy to it.

    train: unchanged; train_clamped: with return min(r, 0, worst_completed); train_penalised: r -
    penalty; score: unchanged if it was graded, else as mask; mask: in the baseline if it was
    graded, not in the loss; drop: in neither. A trajectory is in neither if it does not fit the
    model, or if its rewards are not finite or exceed MAX_REWARD after shaping. A trajectory with no
    tokens to train is not in the loss. Each trajectory that is not in the loss has a reason.

    Args: misfit: why its tokens do not fit the trained model; None if they fit. worst_completed:
    `worst_completed_return` of its group.
    """
    left_out = Member(
        trajectory=trajectory,
        reason=EvictionReason.TOKEN_MISALIGNED,
        problem=misfit or "",
        shaped_return=trajectory.episode_return,
    )
    if misfit is not None:
        return left_out
    if not math.isfinite(trajectory.episode_return):
        return _bad_reward(
            left_out, f"return {trajectory.episode_return}, expected a finite number"
        )
    rule = policies.get(trajectory.environment, _DEFAULT_POLICY).rule(trajectory.outcome)
    rewards = shaped_rewards(trajectory, reward)
    shaped_return = total(rewards)
    largest = max(abs(shaped_return), float(np.abs(rewards).max(initial=0.0)))
    if largest > MAX_REWARD:
        return _bad_reward(
            left_out, f"a shaped reward of {largest:g}, expected at most {MAX_REWARD:g} in size"
        )
    reason: EvictionReason | None
    if rule.masks(is_graded=trajectory.is_graded):
        reason = EvictionReason.MASKED
    elif rule.disposition is Disposition.DROP:
        reason = EvictionReason.of(trajectory.outcome)
    else:
        reason = _nothing_to_train(trajectory)
    baseline_return = rule.baseline_return(
        shaped_return, is_graded=trajectory.is_graded, worst_completed=worst_completed
    )
    if baseline_return is not None:
        rewards = add_at_end(rewards, baseline_return - shaped_return)
    return Member(
        trajectory=trajectory,
        reason=reason,
        rewards=rewards,
        baseline_return=baseline_return,
        shaped_return=shaped_return,
    )


def worst_completed_return(
    trajectories: Sequence[Trajectory], reward: RewardSettings = _NO_SHAPING
) -> float | None:
    """Return the lowest shaped return of a group's completed trajectories; None if it has none."""
    returns = [
        total(shaped_rewards(each, reward))
        for each in trajectories
        if each.outcome is Outcome.COMPLETED and math.isfinite(each.episode_return)
    ]
    return min(returns, default=None)


def _bad_reward(member: Member, problem: str) -> Member:
    return replace(
        member, reason=EvictionReason.REWARD_ERROR, problem=f"{problem}; {_REWARD_REMEDY}"
    )


def _nothing_to_train(trajectory: Trajectory) -> EvictionReason | None:
    if trajectory.num_trained:
        return None
    is_empty = trajectory.num_sampled == 0
    return EvictionReason.EMPTY if is_empty else EvictionReason.TOKEN_MISALIGNED


def problem_notices(members: Sequence[Member], *, step: int) -> tuple[str, ...]:
    """Describe each trajectory that was left out because of a fault, in at most MAX_NOTICES
    sentences.
    """
    found = [member for member in members if member.problem]
    notices = [
        f"step {step}: trajectory {member.trajectory.trajectory_id} left out as "
        f"{member.reason}: {member.problem}"
        for member in found[:MAX_NOTICES]
    ]
    if len(found) > MAX_NOTICES:
        notices.append(f"step {step}: {len(found) - MAX_NOTICES} more; see `rayloom inspect`")
    return tuple(notices)
