"""Tests of log-probabilities, entropies and the statistics of a step, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from actors.trainer.logprobs import token_logprobs
from actors.trainer.statistics import (
    ADDED,
    COMPARED,
    Part,
    UpdateTotals,
    summarize_step,
)


def make_update(*, grad_norm: float = 2.0, num_trained: int = 0, **parts: float) -> UpdateTotals:
    """Return the totals of an update.

    parts: the sum of values by their name, and other parts by the name with the prefix count_,
    squares_, max_ or negated_min_. Without a count, values are those of all trained tokens.
    """

    def part(values: str, part: Part) -> float:
        if part == "sum":
            return parts.get(values, 0.0)
        if part == "count":
            return parts.get(f"count_{values}", num_trained if values in parts else 0.0)
        return parts.get(f"{part}_{values}", 0.0 if part == "squares" else -math.inf)

    parts |= {"num_trained": num_trained}
    return UpdateTotals(
        row=tuple(float(part(*key)) for key in (*ADDED, *COMPARED)),
        grad_norm=grad_norm,
        learning_rate=0.1,
    )


def test_the_tokens_of_a_step_weigh_equally_whatever_their_update():
    updates = [
        make_update(num_trained=1, ratio=2.0, squares_ratio=4.0, entropy=1.0, loss=1.0),
        make_update(num_trained=3, ratio=3.0, squares_ratio=3.0, entropy=1.0, loss=2.0),
        make_update(num_trained=9, ratio=math.nan, loss=math.nan, num_nonfinite=1),
        make_update(grad_norm=0.0, loss=0.0),
    ]
    stats = summarize_step(updates, step=7, trainer_version=3)
    assert stats.statistics == pytest.approx(
        {
            "loss": 1.0,
            "entropy_mean": 0.5,
            "grad_norm": 2.0,
            "ratio_mean": 1.25,
            "effective_sample_size": 25 / (4 * 7),
        }
    )
    assert (stats.num_updates, stats.num_skipped_updates, stats.num_empty_updates) == (4, 1, 1)
    assert stats.trained_tokens == 4
    assert stats.is_skipped


def test_statistics_of_the_loss_include_only_finite_updates():
    updates = [
        make_update(
            num_trained=4, clip_fraction_low=1, clip_fraction_high=2, masked_fraction=2,
            masked_token_fraction=2, masked_sequence_fraction=0, masked_outlier_fraction=0,
            advantage=2.0, max_advantage=3.0, negated_min_advantage=1.0, surrogate=2.0,
            importance_weight=6.0, max_importance_weight=2.0,
            policy_logprob=-8.0, max_policy_logprob=-0.5,
            policy_logprob_positive=-8.0, max_policy_logprob_positive=-0.5,
            policy_logprob_negative=0.0, count_policy_logprob_negative=0,
            kl=2.0, max_kl=1.0, negated_min_kl=-0.25,
        ),
        make_update(num_trained=4, grad_norm=math.inf, max_advantage=9.0),
    ]  # fmt: skip
    found = summarize_step(updates, step=0, trainer_version=0).statistics
    assert found == {
        "policy_logprob_mean": -2.0,
        "policy_logprob_max": -0.5,
        "policy_logprob_positive_mean": -2.0,
        "policy_logprob_positive_max": -0.5,
        "loss": 0.0,
        "surrogate_mean": 0.5,
        "kl_mean": 0.5,
        "kl_min": 0.25,
        "kl_max": 1.0,
        "grad_norm": 2.0,
        "clip_fraction_low": 0.25,
        "clip_fraction_high": 0.5,
        "masked_fraction": 0.5,
        "masked_token_fraction": 0.5,
        "masked_sequence_fraction": 0.0,
        "masked_outlier_fraction": 0.0,
        "importance_weight_mean": 1.5,
        "importance_weight_max": 2.0,
        "advantage_mean": 0.5,
        "advantage_min": -1.0,
        "advantage_max": 3.0,
    }


def test_ratios_whose_squares_round_to_zero_have_the_smallest_effective_sample_size():
    update = make_update(num_trained=2, ratio=1e-170, squares_ratio=0.0)
    stats = summarize_step([update], step=0, trainer_version=0)
    assert stats.statistics["effective_sample_size"] == 0.0


def test_a_step_without_updates_has_no_statistics():
    stats = summarize_step([], step=0, trainer_version=0)
    assert (stats.statistics, stats.trained_tokens) == ({}, 0)
    assert not stats.is_skipped


def head_of(logits: list[list[float]], *, bias: list[float] | None = None) -> torch.nn.Linear:
    """Return a head that has these logits, plus the bias, for the rows of an identity matrix."""
    weight = torch.tensor(logits).t()
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(torch.tensor(bias))
    return head


def test_token_logprobs_and_entropy_by_hand_at_a_temperature():
    head = head_of([[0.0, 2.0 * math.log(3.0)], [200.0, -200.0]])
    logprobs, entropies = token_logprobs(
        torch.eye(2), head, torch.tensor([1, 0]), temperatures=torch.full((2,), 2.0), chunk_tokens=4
    )
    assert logprobs.tolist() == pytest.approx([math.log(0.75), 0.0], abs=1e-6)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropies.tolist() == pytest.approx([entropy, 0.0], abs=1e-6)


def test_the_entropy_with_gradient_has_the_same_value_and_an_exact_gradient():
    # dH/dz_j = -p_j (log p_j + H) / temperature, with p (.25, .75).
    head = head_of([[0.0, 2.0 * math.log(3.0)]])
    plain, entropies = (
        token_logprobs(
            torch.eye(1),
            head,
            torch.tensor([1]),
            temperatures=torch.tensor([2.0]),
            chunk_tokens=4,
            has_entropy_gradient=has_gradient,
        )[1]
        for has_gradient in (False, True)
    )
    assert not plain.requires_grad and plain.item() == entropies.item()
    (gradient,) = torch.autograd.grad(entropies.sum(), head.weight)
    slope = -0.75 * (math.log(0.75) + entropies.item()) / 2.0
    assert gradient[:, 0].tolist() == pytest.approx([-slope, slope], abs=1e-7)


def test_a_token_excluded_by_a_bias_does_not_enter_entropy_or_gradient():
    head = head_of([[0.0, 5.0, 0.0]], bias=[0.0, -math.inf, 0.0])
    _, entropies = token_logprobs(
        torch.eye(1),
        head,
        torch.tensor([0]),
        chunk_tokens=4,
        has_entropy_gradient=True,
    )
    (gradient,) = torch.autograd.grad(entropies.sum(), head.weight)
    assert entropies.item() == pytest.approx(math.log(2.0))
    assert gradient[:, 0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)
