"""Tests of the loss settings: their defaults, where they are used, and what is refused."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from actors.algorithm import LossSettings, Objective
from service.config.file import ConfigError, parse_config
from service.config.tree import Config


def config_with(**loss: Any) -> Config:
    tree = {
        "model": {"tiny": {}, "max_context_tokens": 512},
        "tasks": {"environment": "guessing"},
        "algorithm": {"loss": loss},
    }
    return parse_config(tree, source="test")


def test_every_key_of_the_loss_is_read_from_the_configuration() -> None:
    given = {
        "objective": "cispo", "ratio": "sequence", "denominator": "old", "clip_low": 1.0,
        "clip_high": 0.5, "negative_weight": 0.5,
        "correction": "truncate_sequence", "correction_cap": 5.0, "token_band": [0.5, 5.0],
        "sequence_band": [0.9, 1.1], "outlier_below": 1e-5, "entropy_coefficient": 0.001,
        "kl": {"coefficient": 0.1, "estimator": "k1", "corrected": True},
        "aggregation": "constant", "constant_tokens": 7,
    }  # fmt: skip
    of_one = (
        {"objective": "dual_clip", "dual_clip": 4.0},
        {"objective": "reinforce", "ratio_cap": 9.0},
        {"objective": "sapo", "sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0},
        {"objective": "dppo_kl", "divergence_bound": 0.05},
    )
    read = [config_with(**loss).algorithm.loss for loss in (given, *of_one)]
    assert read[0].objective is Objective.CISPO and read[0].kl.estimator == "k1"
    assert read[0].token_band == (0.5, 5.0)
    unchanged = {
        field.name
        for field in fields(LossSettings)
        if all(getattr(each, field.name) == getattr(LossSettings(), field.name) for each in read)
    }
    assert unchanged == set()


@pytest.mark.parametrize(
    ("loss", "trains"),
    [({}, False), ({"kl": {"coefficient": 0.1}}, True), ({"entropy_coefficient": 0.1}, True)],
)
def test_groups_without_a_signal_are_trained_if_a_loss_term_is_not_zero(
    loss: dict[str, Any], trains: bool
) -> None:
    assert config_with(**loss).algorithm.trains_without_signal is trains


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"objective": "ppo"}, ["algorithm.loss.objective", "ppo_clip"]),
        ({"objektive": "sapo"}, ["algorithm.loss.objektive", "unknown key"]),
        ({"clip_low": 0}, ["algorithm.loss.clip_low", "got 0"]),
        ({"clip_low": 1.5}, ["algorithm.loss.clip_low", "got 1.5"]),
        ({"clip_high": 0.0}, ["algorithm.loss.clip_high", "got 0"]),
        ({"dual_clip": 1.0}, ["algorithm.loss.dual_clip", "more than 1"]),
        ({"ratio_cap": 0.0}, ["algorithm.loss.ratio_cap", "got 0"]),
        ({"correction_cap": math.inf}, ["algorithm.loss.correction_cap", "got inf"]),
        ({"sapo_tau_negative": -1.0}, ["algorithm.loss.sapo_tau_negative", "got -1"]),
        ({"divergence_bound": math.nan}, ["algorithm.loss.divergence_bound", "got nan"]),
        ({"negative_weight": -0.1}, ["algorithm.loss.negative_weight", "got -0.1"]),
        ({"kl": {"coefficient": math.nan}}, ["algorithm.loss.kl.coefficient", "got nan"]),
        ({"outlier_below": 1.0}, ["algorithm.loss.outlier_below", "got 1.0"]),
        ({"sequence_band": [0.5, 0.9]}, ["sequence_band is [0.5, 0.9]", "expected 0 < low"]),
        ({"token_band": [2.0, 3.0]}, ["token_band", "2.0", "expected 0 < low <= 1 <= high"]),
        ({"token_band": [1.0, 1.0]}, ["token_band", "and low < high"]),
        ({"entropy_coefficient": -1}, ["entropy_coefficient", "got -1"]),
        ({"objective": "dppo_tv", "divergence_bound": 1.5}, ["divergence_bound", "less than 1"]),
        ({"dual_clip": 5}, ["algorithm.loss.dual_clip is set", "objective ppo_clip", "leave"]),
        ({"objective": "sapo", "clip_low": 0.1}, ["algorithm.loss.clip_low is set", "sapo"]),
        ({"ratio_cap": 5}, ["algorithm.loss.ratio_cap is set", "reinforce"]),
        ({"correction_cap": 5}, ["algorithm.loss.correction_cap is set", "a correction"]),
        ({"constant_tokens": 5}, ["algorithm.loss.constant_tokens is set", "constant"]),
        ({"kl": {"estimator": "k2"}}, ["algorithm.loss.kl is set", "coefficient above 0"]),
        ({"correction": "truncate_token"}, ["count twice", "set denominator to old"]),
        ({"objective": "sapo", "ratio": "sequence"}, ["expected ratio token"]),
        ({"objective": "dppo_kl", "ratio": "sequence"}, ["expected ratio token"]),
        ({"objective": "dppo_tv", "denominator": "old"}, ["around the behaviour policy"]),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, ["k1 without importance correction"]),
    ],
)
def test_a_contradictory_loss_is_refused(loss: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(**loss)
    for word in words:
        assert word in str(caught.value)
