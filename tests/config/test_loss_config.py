"""The configuration's part of the loss: its defaults, its way to the rooms, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.merge.aggregation import Aggregation
from actors.trainer.loss.settings import Correction, Denominator, LossSettings, Objective, Ratio
from service.config.file import ConfigError, parse_config
from service.config.settings_of import merge_settings, trainer_settings
from service.config.tree import Config


def config_with(**loss: Any) -> Config:
    tree = {
        "model": {"tiny": {}, "max_context_tokens": 512},
        "tasks": {"environment": "guessing"},
        "algorithm": {"loss": loss},
    }
    return parse_config(tree, source="test")


def trainer_loss(config: Config) -> LossSettings:
    return trainer_settings(config, model="m", checkpoint_dir=Path("c")).loss


def test_the_defaults_are_ppo_against_the_behaviour_policy_with_a_token_mean() -> None:
    config = config_with()
    assert trainer_loss(config) == LossSettings()
    assert trainer_loss(config).clip_low == 0.2 and trainer_loss(config).clip_high == 0.28
    assert merge_settings(config).aggregation is Aggregation.TOKEN_MEAN


def test_every_key_reaches_the_room_that_it_is_for() -> None:
    given = {
        "objective": "cispo", "ratio": "sequence", "denominator": "old", "clip_low": 1.0,
        "clip_high": 0.5, "negative_weight": 0.5,
        "correction": "truncate_sequence", "correction_cap": 5.0, "token_band": [0.5, 5.0],
        "sequence_band": [0.9, 1.1], "outlier_below": 1e-5, "entropy_coefficient": 0.001,
        "kl": {"coefficient": 0.1, "estimator": "k1", "corrected": True},
        "aggregation": "constant",
    }  # fmt: skip
    config = config_with(**given)
    loss = trainer_loss(config)
    assert (loss.objective, loss.ratio) == (Objective.CISPO, Ratio.SEQUENCE)
    assert (loss.denominator, loss.correction) == (Denominator.OLD, Correction.TRUNCATE_SEQUENCE)
    assert (loss.token_band, loss.sequence_band) == ((0.5, 5.0), (0.9, 1.1))
    assert (loss.kl_coefficient, loss.is_kl_corrected) == (0.1, True)
    of_one = (
        {"objective": "dual_clip", "dual_clip": 4.0},
        {"objective": "reinforce", "ratio_cap": 9.0},
        {"objective": "sapo", "sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0},
        {"objective": "dppo_kl", "divergence_bound": 0.05},
    )
    plain, all_of_them = LossSettings(), [loss, *(trainer_loss(config_with(**o)) for o in of_one)]
    unchanged = {
        name
        for name in loss.__slots__
        if all(getattr(each, name) == getattr(plain, name) for each in all_of_them)
    }
    assert unchanged == set()
    merge = merge_settings(config)
    assert (merge.aggregation, merge.constant_tokens) == (Aggregation.CONSTANT, 512)
    assert merge_settings(config_with(**given, constant_tokens=7)).constant_tokens == 7


@pytest.mark.parametrize(
    ("loss", "trains"),
    [({}, False), ({"kl": {"coefficient": 0.1}}, True), ({"entropy_coefficient": 0.1}, True)],
)
def test_groups_without_a_signal_are_trained_where_a_term_of_the_loss_is_not_zero(
    loss: dict[str, Any], trains: bool
) -> None:
    assert merge_settings(config_with(**loss)).trains_without_signal is trains


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"objective": "ppo"}, ["algorithm.loss.objective", "ppo_clip"]),
        ({"objektive": "sapo"}, ["algorithm.loss.objektive", "unknown key"]),
        ({"clip_low": 0}, ["algorithm.loss.clip_low", "got 0"]),
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
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, ["k1 without importance correction"]),
    ],
)
def test_a_loss_that_makes_no_sense_is_refused(loss: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(**loss)
    for word in words:
        assert word in str(caught.value)
