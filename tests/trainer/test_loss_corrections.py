"""Tests of importance weights and rejection masks against values computed by hand."""

from __future__ import annotations

import pytest
import torch

from actors.algorithm import KlSettings, LossSettings
from actors.trainer.loss.corrections import (
    keep_sequence_band,
    keep_token_band,
    keep_without_outlier,
    truncated_sequence_weight,
    truncated_token_weight,
)


def log_ratios(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios).log()


INDEX = torch.tensor([0, 0, 1])


def test_a_token_weight_is_its_ratio_up_to_the_cap() -> None:
    weights = truncated_token_weight(log_ratios(3.0, 0.5), cap=2.0)
    assert weights.tolist() == pytest.approx([2.0, 0.5])


def test_a_sequence_weight_is_the_product_of_the_ratios_up_to_the_cap() -> None:
    ratios = log_ratios(2.0, 2.0, 0.5)
    assert truncated_sequence_weight(ratios, INDEX, cap=3.0).tolist() == pytest.approx([3, 3, 0.5])
    assert truncated_sequence_weight(ratios, INDEX, cap=9.0).tolist() == pytest.approx([4, 4, 0.5])


def test_a_product_that_overflows_is_the_cap() -> None:
    ratios = torch.full((3,), 80.0)
    assert truncated_sequence_weight(ratios, INDEX, cap=2.0).tolist() == pytest.approx([2, 2, 2])


def test_a_token_band_keeps_tokens_inside_it() -> None:
    kept = keep_token_band(log_ratios(0.4, 1.0, 6.0), low=0.5, high=5.0)
    assert kept.tolist() == [False, True, False]


def test_a_sequence_band_applies_to_the_geometric_mean() -> None:
    # Means 2 and 1: a single token of ratio 4 excludes its whole trajectory.
    kept = keep_sequence_band(log_ratios(4.0, 1.0, 1.0), INDEX, low=0.5, high=1.5)
    assert kept.tolist() == [False, False, True]


def test_one_impossible_token_excludes_its_trajectory() -> None:
    kept = keep_without_outlier(log_ratios(1e-6, 1.0, 1.0), INDEX, below=1e-5)
    assert kept.tolist() == [False, False, True]


def test_weights_and_masks_have_no_gradient() -> None:
    ratios = log_ratios(3.0, 0.5, 1.0).requires_grad_()
    assert not truncated_token_weight(ratios, cap=2.0).requires_grad
    assert not truncated_sequence_weight(ratios, INDEX, cap=2.0).requires_grad


def test_the_settings_of_a_loss_determine_its_inputs() -> None:
    plain = LossSettings()
    assert not (plain.needs_old or plain.needs_reference or plain.needs_entropy_gradient)
    kl = KlSettings(coefficient=0.1)
    rich = LossSettings(denominator="old", kl=kl, entropy_coefficient=0.01)
    assert rich.needs_old and rich.needs_reference and rich.needs_entropy_gradient
