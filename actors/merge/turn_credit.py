"""Credit by turn: each turn's advantage from its discounted return-to-go, within the group.

Defined over the turns of trajectories, in the order in which they were played; how they are cut
into samples changes nothing. Called by `credit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.merge.advantages import Baseline, GroupAdvantages, Scale, group_advantages


def discounted_suffix_sums(values: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Sum what comes from each place on: S_t = sum_k factor^k x_{t+k}.

    By doubling: after a pass with shift s each place holds the first 2s terms, so that N values
    take log2(N) passes.

    Args: values: [N] float. factor: in [0, 1].    Returns: [N] float64.
    Example: discounted_suffix_sums([1, 2, 4], .5) -> [3, 4, 4]
    """
    sums = np.array(values, np.float64)
    shift = 1
    while shift < sums.shape[0] and factor:
        sums[:-shift] = sums[:-shift] + factor**shift * sums[shift:]
        shift *= 2
    return sums


def turn_advantages(
    turn_rewards: Sequence[NDArray[np.float64]],
    *,
    discount: float,
    baseline: Baseline = Baseline.MEAN,
    scale: Scale = Scale.STD,
    names: Sequence[str] = (),
) -> tuple[list[NDArray[np.float64]], bool]:
    """Turn the rewards of a group's turns into an advantage for each turn.

    R_{i,t} = sum_k discount^k r_{i,t+k}. At turn t every member of the group stands with
    R_{i, min(t, last turn of i)}: one that has ended stands with its last turn's. On these the
    group statistics of `group_advantages` are made, for each t of its own.
    Source: discounted return-to-go of turns within a group: Kevin, arXiv 2507.11948, 3 (deviation,
    ours: the comparison is with the same turn, where Kevin's is with all turns of the group, which
    would blame the first turns of a won game for being far from the reward, and lets long
    trajectories count more often). With discount 1 and rewards at the end alone, every turn gets
    the advantage of its trajectory, whatever the numbers of turns.

    Args: turn_rewards: for each member [K_i] float, K_i >= 1. discount: in [0, 1]. names: of the
    members' trajectories, for what an error says.
    Returns: for each member [K_i] float64; and whether any turn has a signal.
    Raises: ValueError for a member without turns, a reward that is not finite, a discount out of
    range, and as `group_advantages`.
    Example: rewards [[0, 1], [0, 0]], discount .5, mean, none: R = [[.5, 1], [0, 0]] ->
        [[.25, .5], [-.25, -.5]]
    """
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"turn credit: got discount {discount}, expected one between 0 and 1")
    if names and len(names) != len(turn_rewards):
        raise ValueError(f"turn credit: got {len(names)} names for {len(turn_rewards)} members")
    for index, rewards in enumerate(turn_rewards):
        if rewards.shape[0] == 0 or not np.isfinite(rewards).all():
            name = names[index] if names else f"member {index}"
            wrong = "a reward that is not finite" if rewards.shape[0] else "no turn"
            raise ValueError(
                f"turn credit: trajectory {name} has {wrong}, expected at least one turn and "
                "finite rewards; give it the outcome empty or reward_error"
            )
    to_go = [discounted_suffix_sums(rewards, discount) for rewards in turn_rewards]
    num_turns = [values.shape[0] for values in to_go]
    columns: list[GroupAdvantages] = [
        group_advantages(
            [float(values[min(t, values.shape[0] - 1)]) for values in to_go],
            baseline=baseline,
            scale=scale,
            names=names,
        )
        for t in range(max(num_turns, default=0))
    ]
    # Beyond its own last turn a member only stands in; signal there is others', not its own.
    table = np.stack([column.values for column in columns]) if columns else np.empty((0, 0))
    advantages = [table[:length, i] for i, length in enumerate(num_turns)]
    return advantages, any(column.has_signal for column in columns)
