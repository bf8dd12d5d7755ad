"""Generalised advantage estimation over action tokens, for a trajectory that has a critic.

Values and the decay by lambda step from one action token to the next and skip observations, so
that an environment's long answer does not wash credit out. Truncated is not terminated: what comes
behind s_T is worth V(s_T) there, and 0 where the episode ended. Called by `credit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from actors.limits import STRICT, Fraction, ModelName, Natural, NotNegative, Rate
from actors.merge.turn_credit import discounted_suffix_sums
from actors.outcomes import Disposition, OutcomeRule


class Truncation(StrEnum):
    """What a critic makes of a trajectory that was cut off.

    bootstrap: trained, the end is worth V(s_T). terminal: trained, the end is worth 0. mask: not in
    the loss. penalty: as terminal, with an amount off the return. drop: neither.
    """

    BOOTSTRAP = "bootstrap"
    TERMINAL = "terminal"
    MASK = "mask"
    PENALTY = "penalty"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """A value model and what is made of its values (PPO); of use with the baseline critic alone.

    What its optimiser needs beyond this it has in common with the policy's (`trainer`).
    """

    __pydantic_config__ = STRICT

    model: ModelName | None = None
    """What it begins as, directory or hub name; null: the model that training starts from."""
    discount: Fraction = 1.0
    """Gamma, from one sampled token to the next."""
    decay: Fraction = 1.0
    """Lambda of GAE, likewise."""
    truncation: Truncation = Truncation.BOOTSTRAP
    """What a trajectory that was cut off is: worth V(s_T) at its end, worth 0, out of the loss,
    worth 0 less truncation_penalty, or dropped."""
    truncation_penalty: NotNegative = 0.0
    """Taken off the return, with truncation penalty."""
    learning_rate: Rate = 1e-4
    """AdamW's learning rate after the warm-up."""
    warmup_updates: Natural = 5
    """Updates of linear warm-up, one a step."""
    value_clip: Rate | None = 0.2
    """How far a value may move in one step; null: no clip."""

    @property
    def truncation_rule(self) -> OutcomeRule:
        """What becomes of a trajectory that was cut off."""
        match self.truncation:
            case Truncation.BOOTSTRAP | Truncation.TERMINAL:
                return OutcomeRule(disposition=Disposition.TRAIN)
            case Truncation.MASK:
                return OutcomeRule(disposition=Disposition.MASK)
            case Truncation.PENALTY:
                penalised = Disposition.TRAIN_PENALISED
                return OutcomeRule(disposition=penalised, penalty=self.truncation_penalty)
            case Truncation.DROP:
                return OutcomeRule(disposition=Disposition.DROP)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """Of one trajectory's action tokens. advantages, value_targets: [N] float64."""

    advantages: NDArray[np.float64]
    value_targets: NDArray[np.float64]


def end_value(final_value: float, *, is_truncated: bool, truncation: Truncation) -> float:
    """What the state behind the last action token is worth.

    V(s_T) for a trajectory that was cut off, under bootstrap; 0 otherwise.

    Args: final_value: V(s_T), s_T ending with the last observation, or else the last action.
    is_truncated: the recorded outcome, never guessed from token ids.
    """
    is_open = is_truncated and truncation is Truncation.BOOTSTRAP
    return final_value if is_open else 0.0


def token_advantages(
    rewards: NDArray[np.float64],
    values: NDArray[np.float64],
    *,
    discount: float,
    decay: float,
    end_value: float = 0.0,
    name: str = "",
) -> TokenAdvantages:
    """Estimate the advantage of each action token of a trajectory.

    d_t = r_t + discount V_{t+1} - V_t, V_{N} = end_value; A_t = sum_k (discount decay)^k d_{t+k};
    value target: A_t + V_t.   Source: Schulman et al. 2016 (GAE), arXiv 1506.02438, equations 11
    and 16 (deviation: t counts action tokens alone, and the end of what was cut off is worth
    V(s_T)).

    Args: rewards, values: [N] float, N >= 1; values[t]: of the state in which action token t was
    sampled. name: of the trajectory, for what an error says.
    Raises: ValueError when lengths differ, nothing was sampled or a number is not finite.
    Example: rewards 0, values [.5, .6, .7], discount = decay = 1: end_value .8 -> [.3, .2, .1];
        0 -> [-.5, -.6, -.7]
    """
    subject = f"trajectory {name}" if name else "the trajectory"
    if rewards.ndim != 1 or rewards.shape != values.shape or rewards.shape[0] == 0:
        raise ValueError(
            f"gae: {subject} has rewards of shape {rewards.shape} and values of shape "
            f"{values.shape}, expected [N] each, one for each action token, N >= 1"
        )
    if not (np.isfinite(rewards).all() and np.isfinite(values).all() and np.isfinite(end_value)):
        raise ValueError(
            f"gae: {subject} has a reward or value that is not finite; give it the outcome "
            "reward_error, or look at the critic's last updates"
        )
    next_values = np.append(values[1:], end_value)
    advantages = discounted_suffix_sums(rewards + discount * next_values - values, discount * decay)
    return TokenAdvantages(advantages=advantages, value_targets=advantages + values)
