"""How an update's tokens are averaged, as a weight of each token; pure, over trajectories.

The trainer's loss is sum_t w_t loss_t and divides by nothing, so it does not change when turns are
merged, rows packed, or tokens dealt to micro-batches and ranks. Each aggregation gives the tokens
of a trajectory one weight. *Idle*: trajectories of groups without a signal; they are not computed,
but they count, so that solved groups weaken the update instead of leaving it to the few others.
Called by `step`. Letters: [N] trajectories of one update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Aggregation(StrEnum):
    """What has equal say: tokens, trajectories, prompts (groups), or tokens at a fixed rate."""

    TOKEN_MEAN = "token_mean"
    TRAJECTORY_MEAN = "trajectory_mean"
    PROMPT_MEAN = "prompt_mean"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySize:
    """num_tokens: trained tokens of the trajectory over all its samples, at least 1."""

    trajectory_id: str
    group_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCounts:
    """What counts in an update beside its own trajectories; a share of it need not be whole."""

    num_tokens: float = 0.0
    num_trajectories: float = 0.0
    num_groups: float = 0.0


def trajectory_weights(
    sizes: Sequence[TrajectorySize],
    *,
    aggregation: Aggregation,
    idle: IdleCounts,
    constant_tokens: int,
) -> NDArray[np.float64]:
    """Weigh each trained token of each trajectory of one update.

    token_mean: 1 / D, D all tokens of the update (Yu et al. 2025, DAPO, equation 8).
    trajectory_mean: 1 / (N n_i), n_i tokens of trajectory i (Shao et al. 2024, GRPO, equation 3).
    prompt_mean: 1 / (G n_g), n_g tokens of group g, G groups (DAPO's token mean within each
    prompt). constant: 1 / (N C), C constant_tokens (Liu et al. 2025, Dr. GRPO, arXiv 2503.20783,
    appendix A: the generation budget). D, N and G include what is idle, on every rank.

    Returns: [N] float64.
    Raises: ValueError for a trajectory without a trained token.
    Example: tokens [1, 3] of one group, nothing idle, C 8: token_mean [1/4, 1/4], trajectory_mean
        [1/2, 1/6], prompt_mean [1/4, 1/4], constant [1/16, 1/16]
    """
    for size in sizes:
        if size.num_tokens < 1:
            raise ValueError(
                f"merge: trajectory {size.trajectory_id} has {size.num_tokens} trained tokens in "
                "an update, expected at least 1; evict it as empty"
            )
    counts = np.array([size.num_tokens for size in sizes], np.float64)
    num_trajectories = len(sizes) + idle.num_trajectories
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return np.full(len(sizes), 1.0 / max(1.0, counts.sum() + idle.num_tokens))
        case Aggregation.TRAJECTORY_MEAN:
            return 1.0 / (num_trajectories * counts)
        case Aggregation.PROMPT_MEAN:
            in_group = _tokens_by_group(sizes)
            of_group = np.array([in_group[size.group_id] for size in sizes], np.float64)
            return 1.0 / ((len(in_group) + idle.num_groups) * of_group)
        case Aggregation.CONSTANT:
            return np.full(len(sizes), 1.0 / (max(1.0, num_trajectories) * constant_tokens))


def share_of_idle(
    idle: IdleCounts, part: Sequence[TrajectorySize], whole: Sequence[TrajectorySize]
) -> IdleCounts:
    """Give one update of a step its share of what is idle, in proportion to what it trains.

    Example: 10 idle tokens, an update of 3 of the step's 12 trained tokens -> 2.5 idle tokens
    """
    num_part, num_whole = (sum(size.num_tokens for size in sizes) for sizes in (part, whole))
    num_groups = max(1, len(_tokens_by_group(whole)))
    return IdleCounts(
        num_tokens=idle.num_tokens * num_part / max(1, num_whole),
        num_trajectories=idle.num_trajectories * len(part) / max(1, len(whole)),
        num_groups=idle.num_groups * len(_tokens_by_group(part)) / num_groups,
    )


def _tokens_by_group(sizes: Sequence[TrajectorySize]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for size in sizes:
        tokens[size.group_id] += size.num_tokens
    return tokens
