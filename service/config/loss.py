"""The part of the configuration tree that chooses the loss (docs/algorithms.md has the table)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from actors.trainer.loss.settings import (
    Correction,
    Denominator,
    KlEstimator,
    LossSettings,
    Objective,
    Ratio,
)
from service.config.fields import NotNegative, Positive, Rate, Section, Share


class KlConfig(Section):
    coefficient: NotNegative = Field(
        0.0, description="of KL(policy || reference) in the loss; 0: no reference model is loaded"
    )
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="of the KL at each token")
    corrected: bool = Field(False, description="weigh it by policy / sampler, as k1 needs")


class LossConfig(Section):
    objective: Literal[
        "ppo_clip", "dual_clip", "cispo", "reinforce", "sapo", "dppo_tv", "dppo_kl"
    ] = Field("ppo_clip", description="what stops the push of a token")
    ratio: Literal["token", "sequence"] = Field(
        "token", description="of a token, or the geometric mean of its trajectory (GSPO)"
    )
    denominator: Literal["behaviour", "old"] = Field(
        "behaviour", description="of the ratio: the sampler, or the trainer at the step's start"
    )
    aggregation: Literal["token_mean", "trajectory_mean", "prompt_mean", "constant"] = Field(
        "token_mean", description="what has equal say in the update"
    )
    constant_tokens: Positive | None = Field(
        None, description="of a trajectory, for constant; null: model.max_context_tokens"
    )
    clip_low: Share = Field(0.2, description="ratio is clipped below 1 - clip_low")
    clip_high: Rate = Field(0.28, description="ratio is clipped above 1 + clip_high")
    dual_clip: Rate = Field(3.0, description="bad tokens stop at this ratio (dual_clip)")
    ratio_cap: Rate = Field(20.0, description="largest weight of a token (reinforce, dppo_*)")
    sapo_tau_positive: Rate = Field(1.0, description="steepness of the gate, advantage above 0")
    sapo_tau_negative: Rate = Field(1.05, description="steepness of the gate, advantage below 0")
    divergence_bound: Rate = Field(0.15, description="trust region of dppo_*; 0.05 suits dppo_kl")
    negative_weight: NotNegative = Field(
        1.0, description="what negative advantages are multiplied by; 0: positive only"
    )
    correction: Literal["none", "truncate_token", "truncate_sequence"] = Field(
        "none", description="importance weight old / behaviour, beside denominator old"
    )
    correction_cap: Rate = Field(2.0, description="largest importance weight")
    token_band: tuple[Rate, Rate] | None = Field(
        None, description="tokens with another ratio trainer / sampler are not trained"
    )
    sequence_band: tuple[Rate, Rate] | None = Field(
        None, description="trajectories with another geometric-mean ratio are not trained"
    )
    outlier_below: Rate | None = Field(
        None, description="a trajectory with a token of a lower ratio is not trained"
    )
    entropy_coefficient: NotNegative = Field(0.0, description="of the entropy bonus")
    kl: KlConfig = KlConfig()

    @model_validator(mode="after")
    def _makes_sense(self) -> LossConfig:
        loss_settings(self)
        for problem in _without_use(self):
            raise ValueError(problem)
        return self


def _without_use(loss: LossConfig) -> Iterator[str]:
    """Settings that were changed and that nothing would read."""
    clips = loss.objective in ("ppo_clip", "dual_clip", "cispo")
    caps = loss.objective in ("reinforce", "dppo_tv", "dppo_kl")
    uses = {
        "clip_low": (clips, "objective ppo_clip, dual_clip or cispo"),
        "clip_high": (clips, "objective ppo_clip, dual_clip or cispo"),
        "dual_clip": (loss.objective == "dual_clip", "objective dual_clip"),
        "ratio_cap": (caps, "objective reinforce, dppo_tv or dppo_kl"),
        "sapo_tau_positive": (loss.objective == "sapo", "objective sapo"),
        "sapo_tau_negative": (loss.objective == "sapo", "objective sapo"),
        "divergence_bound": (loss.objective in ("dppo_tv", "dppo_kl"), "objective dppo_tv or _kl"),
        "correction_cap": (loss.correction != "none", "a correction"),
        "constant_tokens": (loss.aggregation == "constant", "aggregation constant"),
        "kl": (loss.kl.coefficient > 0, "kl.coefficient above 0"),
    }
    for key, (is_used, user) in uses.items():
        if not is_used and getattr(loss, key) != type(loss).model_fields[key].default:
            yield (
                f"algorithm.loss.{key} is set, but objective {loss.objective} with the other "
                f"settings does not read it; expected it together with {user}: set that, or leave "
                "it out"
            )


def loss_settings(loss: LossConfig) -> LossSettings:
    """The trainer's own settings, which refuse what makes no sense together."""
    return LossSettings(
        objective=Objective(loss.objective),
        ratio=Ratio(loss.ratio),
        denominator=Denominator(loss.denominator),
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        ratio_cap=loss.ratio_cap,
        sapo_tau_positive=loss.sapo_tau_positive,
        sapo_tau_negative=loss.sapo_tau_negative,
        divergence_bound=loss.divergence_bound,
        negative_weight=loss.negative_weight,
        correction=Correction(loss.correction),
        correction_cap=loss.correction_cap,
        token_band=loss.token_band,
        sequence_band=loss.sequence_band,
        outlier_below=loss.outlier_below,
        kl_estimator=KlEstimator(loss.kl.estimator),
        kl_coefficient=loss.kl.coefficient,
        is_kl_corrected=loss.kl.corrected,
        entropy_coefficient=loss.entropy_coefficient,
    )
