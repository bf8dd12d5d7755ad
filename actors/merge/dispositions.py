"""What becomes of each trajectory of a group: in the baseline, in the loss, or why not.

Invariant: each trajectory gets one verdict, and a verdict that is not in the loss has a reason.
Called by `step`; the rules are data (`actors.outcomes`), by environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.bounds import MAX_REWARD
from actors.merge.shaping import ShapingSettings, add_at_end, shaped_rewards, total
from actors.outcomes import Disposition, OutcomePolicy
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome, Trajectory

_DEFAULT_POLICY = OutcomePolicy()
_NO_SHAPING = ShapingSettings()
_REWARD_REMEDY = "look at what the environment gave, or set algorithm.reward.clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """baseline_return: what it brings to the group's baseline, None: it is not in it.

    reason: why it is not in the loss; None: it is (unless its group has no signal).
    rewards: [K] float64, one a turn, whose sum is baseline_return: shaped, and what the outcome's
    rule takes off comes with the last one. shaped_return: their sum before the rule. problem: what
    is wrong with the trajectory itself, with a remedy; mostly empty.
    """

    rollout_id: str
    baseline_return: float | None
    reason: EvictionReason | None
    is_malformed_rewarded: bool = False
    rewards: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    shaped_return: float | None = None
    problem: str = ""


def judge(
    trajectory: Trajectory,
    *,
    misfit: str | None = None,
    policies: Mapping[str, OutcomePolicy],
    shaping: ShapingSettings = _NO_SHAPING,
) -> Verdict:
    """Shape a trajectory's rewards and apply the environment's outcome policy to it.

    train: as it is; train_clamped: with return min(r, 0); train_penalised: r - penalty; mask: in
    the baseline if it was graded, not in the loss; drop: neither. A trajectory that does not fit
    the model, or whose rewards are not finite or, once shaped, beyond MAX_REWARD, is in neither;
    one with nothing to train is not in the loss; each has its reason.

    Args: misfit: why its tokens do not fit the model that is trained; None: they do.
    """
    rollout_id, outcome = trajectory.rollout_id, trajectory.outcome
    if misfit is not None:
        return _out(rollout_id, EvictionReason.TOKEN_MISALIGNED, misfit)
    if not math.isfinite(trajectory.episode_return):
        problem = f"return {trajectory.episode_return}, expected a finite number"
        return _out(rollout_id, EvictionReason.REWARD_ERROR, f"{problem}; {_REWARD_REMEDY}")
    rule = policies.get(trajectory.environment, _DEFAULT_POLICY).rule(outcome)
    rewards = shaped_rewards(trajectory, shaping)
    shaped_return = total(rewards)
    largest = max(abs(shaped_return), float(np.abs(rewards).max(initial=0.0)))
    if largest > MAX_REWARD:
        problem = f"a shaped reward of {largest:g}, expected at most {MAX_REWARD:g} in size"
        return _out(rollout_id, EvictionReason.REWARD_ERROR, f"{problem}; {_REWARD_REMEDY}")
    baseline_return = rule.baseline_return(shaped_return, is_graded=trajectory.is_graded)
    match rule.disposition:
        case Disposition.MASK:
            reason: EvictionReason | None = EvictionReason.MASKED
        case Disposition.DROP:
            reason = EvictionReason.of(outcome)
        case _:
            reason = _nothing_to_train(trajectory)
    if baseline_return is not None:
        rewards = add_at_end(rewards, baseline_return - shaped_return)
    is_malformed = outcome is Outcome.MALFORMED_TOOL_CALL
    return Verdict(
        rollout_id=rollout_id,
        baseline_return=baseline_return,
        reason=reason,
        is_malformed_rewarded=is_malformed and trajectory.episode_return > 0,
        rewards=rewards,
        shaped_return=shaped_return,
    )


def _nothing_to_train(trajectory: Trajectory) -> EvictionReason | None:
    if trajectory.num_trained:
        return None
    is_empty = trajectory.num_sampled == 0
    return EvictionReason.EMPTY if is_empty else EvictionReason.TOKEN_MISALIGNED


def _out(rollout_id: str, reason: EvictionReason, problem: str) -> Verdict:
    return Verdict(rollout_id=rollout_id, baseline_return=None, reason=reason, problem=problem)
