"""Credit by token from a critic's values: one line of action tokens, as they were played; pure.

Where a trajectory branched (a sub-agent, a compacted history), each token's state is the one that
it was sampled in, in its own sample: what the policy saw of the world then. Called by `credit`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actors.batch import Float32s
from actors.merge.candidates import Candidate, places_of
from actors.merge.gae import CriticSettings, TokenAdvantages, end_value, token_advantages


def credit_tokens(
    each: Candidate, values: list[Float32s], critic: CriticSettings
) -> tuple[TokenAdvantages, Float32s]:
    """Credit a trajectory of one or more trained tokens.

    Args: values: of each sample [T], of the state that ends with each token.
    Returns: advantages and value targets [N] float64, and the values that they were made from, [N]
    float32, as played. Raises: ValueError, as `token_advantages`.
    """
    bounds = each.bounds
    old_values = np.empty(int(bounds[-1]), np.float32)
    last_turn, final_value = len(each.trajectory.turns) - 1, 0.0
    for sample, of_sample in zip(each.trajectory.samples, values, strict=True):
        # The state in which a token was sampled ends with the token before it.
        old_values[places_of(sample, bounds)] = of_sample[np.flatnonzero(sample.mask) - 1]
        if sample.turns[-1].index == last_turn:
            final_value = float(of_sample[-1])
    result = token_advantages(
        _rewards(each, bounds),
        old_values.astype(np.float64),
        discount=critic.discount,
        decay=critic.decay,
        end_value=end_value(
            final_value,
            is_truncated=each.trajectory.is_truncated,
            truncation=critic.truncation,
        ),
        name=each.name,
    )
    return result, old_values


def _rewards(each: Candidate, bounds: NDArray[np.int64]) -> NDArray[np.float64]:
    """[N] rewards of the trained tokens.

    A turn's comes with its last one, but for what it recorded by token, which stands where it was
    earned. What falls on no trained token comes with the last one before it, or else the first.
    """
    rewards, of_turns = each.token_rewards.copy(), each.rewards.copy()
    for sample in each.trajectory.samples:
        if sample.token_rewards is None:
            continue
        mask = sample.mask
        for turn in sample.turns:
            earned = sample.token_rewards[turn.tokens].astype(np.float64)
            behind = bounds[turn.index] + np.cumsum(mask[turn.tokens] == 1) - 1
            np.add.at(rewards, np.maximum(behind, 0), earned)
            of_turns[turn.index] -= earned.sum()
    np.add.at(rewards, np.maximum(bounds[1:] - 1, 0), of_turns)
    return rewards
