"""Tests of the loss and statistics of a micro-batch, and of the sum over micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.loss_terms import EVERY_LOSS, Tokens, random_tokens, terms_of

from actors.algorithm import KlSettings, LossSettings, Objective
from actors.trainer.loss.micro_batch import (
    MicroBatchTerms,
    combine_rows,
    micro_batch_loss,
    micro_batch_statistics,
    no_statistics,
)
from actors.trainer.statistics import (
    ADDED,
    COMPARED,
    Part,
    UpdateTotals,
    summarize_step,
)
from actors.types import UNDONE


def loss_and_gradients(
    terms: MicroBatchTerms, settings: LossSettings
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the loss, and its gradients for log-probabilities and entropies."""
    loss = micro_batch_loss(terms, settings).loss
    variables = (terms.current_logprobs, terms.entropies)
    gradients = torch.autograd.grad(loss, variables, allow_unused=True)
    filled = [
        torch.zeros_like(variable) if gradient is None else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    return loss.item(), filled[0].numpy(), filled[1].numpy()


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_micro_batches_add_up_to_the_update_in_loss_and_gradient(name: str) -> None:
    settings = EVERY_LOSS[name]
    for seed in range(5):
        tokens = random_tokens(seed)
        whole, gradient, entropy_gradient = loss_and_gradients(terms_of(tokens), settings)
        rng = np.random.default_rng([seed, 1])
        row_of = rng.integers(0, 3, tokens.trajectory.max() + 1)[tokens.trajectory]
        total = 0.0
        for row in range(3):
            # Shuffle the tokens of the row's trajectories, because packing may interleave samples.
            chosen = rng.permutation(np.flatnonzero(row_of == row))
            loss, own, own_entropy = loss_and_gradients(terms_of(tokens, chosen), settings)
            total += loss
            np.testing.assert_allclose(own, gradient[chosen], atol=1e-12)
            np.testing.assert_allclose(own_entropy, entropy_gradient[chosen], atol=1e-12)
        assert total == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_every_loss_differs_from_the_default_one(name: str) -> None:
    tokens = random_tokens(7, num_trajectories=12)
    loss, gradient, _ = loss_and_gradients(terms_of(tokens), EVERY_LOSS[name])
    plain, plain_gradient, _ = loss_and_gradients(terms_of(tokens), LossSettings())
    assert math.isfinite(loss) and np.isfinite(gradient).all() and np.abs(gradient).max() > 0
    if name not in ("ppo", "entropy"):
        assert np.abs(gradient - plain_gradient).max() > 1e-4
    assert name == "ppo" or loss != plain


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_if_all_policies_agree_every_loss_is_the_policy_gradient(name: str) -> None:
    tokens = random_tokens(3)
    same = tokens.behaviour
    tokens = replace(tokens, current=same, old=same, reference=same)
    settings = EVERY_LOSS[name]
    _, gradient, _ = loss_and_gradients(terms_of(tokens), settings)
    advantage = np.where(
        tokens.advantage < 0, settings.negative_weight * tokens.advantage, tokens.advantage
    )
    expected = -tokens.weight * advantage
    # At equality, k1 times the ratio has the gradient 1.
    if name == "k1_corrected":
        expected = expected + tokens.weight * settings.kl.coefficient
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


def tokens_of(**given_values: list[float]) -> Tokens:
    num_tokens = len(given_values["current"])
    defaults = {name: [0.0] * num_tokens for name in ("old", "reference", "entropy")}
    values = {"weight": [1.0] * num_tokens, "trajectory": [0] * num_tokens, **defaults}
    values.update(given_values)
    for name in ("current", "behaviour", "old", "reference"):
        if name in given_values:
            values[name] = np.log(given_values[name]).tolist()
    integers = np.array(values.pop("trajectory"), np.int64)
    arrays = {name: np.array(numbers, np.float64) for name, numbers in values.items()}
    return Tokens(trajectory=integers, **arrays)


def test_the_default_loss_by_hand() -> None:
    tokens = tokens_of(
        current=[0.6, 0.4, 0.5], behaviour=[0.4, 0.4, 0.5], advantage=[1.0, 2.0, -3.0],
        weight=[0.25, 0.25, 0.25],
    )  # fmt: skip
    loss, gradient, _ = loss_and_gradients(terms_of(tokens), LossSettings())
    assert loss == pytest.approx((-1.28 - 2.0 + 3.0) / 4)
    # The first token is clipped.
    assert gradient.tolist() == pytest.approx([0.0, -0.5, 0.75])


def test_decoupled_ppo_clips_around_old_and_weighs_by_old_over_behaviour() -> None:
    # current / old = 1.5, clipped at 1.28; old / behaviour = 2, truncated at 1.6.
    tokens = tokens_of(current=[0.6], old=[0.4], behaviour=[0.2], advantage=[1.0])
    settings = LossSettings(denominator="old", clip_high=0.28)
    assert loss_and_gradients(terms_of(tokens), settings)[0] == pytest.approx(-1.28)
    settings = replace(settings, correction="truncate_token", correction_cap=1.6)
    assert loss_and_gradients(terms_of(tokens), settings)[0] == pytest.approx(-1.28 * 1.6)


def test_a_masked_token_is_not_in_the_loss_and_changes_no_weights() -> None:
    # Ratios 1.1 and 9: the second is outside the band. Both weights remain 1/2.
    tokens = tokens_of(
        current=[0.22, 0.9], behaviour=[0.2, 0.1], advantage=[1.0, -1.0], weight=[0.5, 0.5]
    )
    settings = LossSettings(token_band=(0.5, 5.0))
    loss, gradient, _ = loss_and_gradients(terms_of(tokens), settings)
    assert loss == pytest.approx(-0.55)
    assert gradient.tolist() == pytest.approx([-0.55, 0.0])
    result = micro_batch_loss(terms_of(tokens), settings)
    assert result.is_masked.tolist() == [False, True]
    assert result.rejected.keys() == {"token"}


@pytest.mark.parametrize("objective", list(Objective))
def test_a_masked_ratio_that_overflows_does_not_affect_loss_and_gradient(
    objective: Objective,
) -> None:
    tokens = tokens_of(current=[0.5, 0.5], behaviour=[0.5, 0.5], advantage=[1.0, -1.0])
    tokens.behaviour[1] = -5000.0
    settings = LossSettings(objective=objective, token_band=(0.5, 2.0))
    loss, gradient, _ = loss_and_gradients(terms_of(tokens), settings)
    assert math.isfinite(loss)
    assert gradient.tolist() == pytest.approx([-1.0, 0.0])


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_all_numbers_are_finite_for_a_token_the_engine_found_impossible(name: str) -> None:
    for recorded, advantage in product((-100.0, -400.0, -9999.0, -1e9), (1.0, 0.0, -1.0)):
        tokens = random_tokens(np.random.default_rng(0), num_trajectories=2)
        behaviour, advantages = tokens.behaviour.copy(), tokens.advantage.copy()
        behaviour[0], advantages[0] = recorded, advantage
        terms = terms_of(replace(tokens, behaviour=behaviour, advantage=advantages))
        result = micro_batch_loss(terms, EVERY_LOSS[name])
        gradients = torch.autograd.grad(result.loss, terms.current_logprobs)
        assert torch.isfinite(result.loss) and torch.isfinite(gradients[0]).all()
        row = micro_batch_statistics(terms, result, num_tokens=9, with_mismatch=True)
        update = UpdateTotals(row=tuple(row.tolist()), grad_norm=1.0, learning_rate=1.0)
        stats = summarize_step([update], step=1, trainer_version=3)
        known = stats.statistics
        assert not stats.is_skipped and known["mismatch_max"] > 90
        assert 0 < known["effective_sample_size"] <= 1
        # Statistics that are not finite are left out.
        assert {"mismatch_k3_mean", "ratio_mean", "unclipped_surrogate_mean"} <= known.keys()


@pytest.mark.parametrize(
    "unknown",
    [{"objective": "ppo"}, {"ratio": "word"}, {"correction": "some"}],
    ids=["objective", "ratio", "correction"],
)
def test_unknown_names_in_the_settings_of_a_loss_are_refused(unknown: dict[str, str]) -> None:
    settings = replace(LossSettings(), **unknown)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="unreachable"):
        micro_batch_loss(terms_of(random_tokens(0)), settings)


def test_a_clipped_token_with_an_overflowing_ratio_has_no_gradient() -> None:
    # The numbers are float32, as in the trainer, so that e^99 is infinite.
    def gradient_of(objective: Objective, advantage: float) -> list[float]:
        current = torch.tensor([-1.0, -1.0], requires_grad=True)
        terms = MicroBatchTerms(
            current_logprobs=current,
            behaviour_logprobs=torch.tensor([-100.0, -1.0]),
            entropies=torch.zeros(2),
            advantages=torch.tensor([advantage, 1.0]),
            loss_weights=torch.full((2,), 0.5),
            trajectory_index=torch.zeros(2, dtype=torch.int64),
            sampled_versions=torch.zeros(2, dtype=torch.int64),
            trainer_version=0,
        )
        micro_batch_loss(terms, LossSettings(objective=objective)).loss.backward()
        assert current.grad is not None
        return current.grad.tolist()

    assert gradient_of(Objective.PPO_CLIP, 1.0) == [0.0, -0.5]
    assert gradient_of(Objective.PPO_CLIP, 0.0) == [0.0, -0.5]
    assert gradient_of(Objective.DUAL_CLIP, -1.0) == [0.0, -0.5]
    assert gradient_of(Objective.SAPO, 1.0) == [0.0, -0.5]


def test_the_entropy_bonus_includes_masked_tokens() -> None:
    tokens = tokens_of(
        current=[0.2, 0.9], behaviour=[0.2, 0.1], advantage=[0.0, 0.0], entropy=[1.0, 3.0],
        weight=[0.5, 0.5],
    )  # fmt: skip
    settings = LossSettings(token_band=(0.5, 5.0), entropy_coefficient=0.1)
    loss, _, gradient = loss_and_gradients(terms_of(tokens), settings)
    assert loss == pytest.approx(-0.2)
    assert gradient.tolist() == pytest.approx([-0.05, -0.05])


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (LossSettings(denominator="old"), "old_logprobs"),
        (LossSettings(kl=KlSettings(coefficient=0.1)), "reference_logprobs"),
    ],
)
def test_a_loss_without_its_log_probabilities_is_refused(
    settings: LossSettings, missing: str
) -> None:
    terms = replace(terms_of(random_tokens(0)), **{missing: None})
    with pytest.raises(AssertionError):
        micro_batch_loss(terms, settings)


def test_terms_of_half_precision_are_refused() -> None:
    terms = terms_of(random_tokens(np.random.default_rng(0), num_trajectories=2))
    half = terms.advantages.to(torch.bfloat16)
    with pytest.raises(AssertionError):
        replace(terms, advantages=half)


def test_terms_of_different_lengths_are_refused() -> None:
    terms = terms_of(random_tokens(0))
    with pytest.raises(AssertionError):
        replace(terms, advantages=torch.zeros(2))


def statistics_of(
    terms: MicroBatchTerms, settings: LossSettings, *, with_mismatch: bool = True
) -> torch.Tensor:
    result = micro_batch_loss(terms, settings)
    return micro_batch_statistics(terms, result, num_tokens=10, with_mismatch=with_mismatch)


def by_name(row: torch.Tensor) -> tuple[dict[str, float], ...]:
    """Return the sums, counts, maxima and minima, each by the name of the values."""
    found: dict[Part, dict[str, float]] = {part: {} for part in get_args(Part)}
    for (values, part), number in zip((*ADDED, *COMPARED), row.tolist(), strict=True):
        found[part][values] = number
    minima = {values: -number for values, number in found["negated_min"].items()}
    return found["sum"], found["count"], found["max"], minima


def test_statistics_of_four_tokens() -> None:
    tokens = tokens_of(
        current=[0.6, 0.2, 0.5, 0.25], behaviour=[0.4, 0.4, 0.5, 0.5],
        reference=[0.6, 0.4, 0.5, 0.25], advantage=[1.0, -1.0, 3.0, 1.0],
        entropy=[0.5, 0.5, 0.5, 0.5],
    )  # fmt: skip
    terms = replace(
        terms_of(tokens),
        sampled_versions=torch.tensor([5, UNDONE + 5, 5, 2]), trainer_version=5, old_logprobs=None,
    )  # fmt: skip
    settings = LossSettings(kl=KlSettings(coefficient=1.0), sequence_band=(0.9, 1.1))
    sums, counts, maxima, minima = by_name(statistics_of(terms, settings))
    # Ratios 1.5, .5, 1, .5: the first would be clipped high, the second low, but the geometric
    # mean .78 masks the whole trajectory.
    assert sums["masked_fraction"] == sums["masked_sequence_fraction"] == 4
    assert sums["clip_fraction_low"] == sums["clip_fraction_high"] == sums["surrogate"] == 0
    row = statistics_of(terms, replace(settings, sequence_band=None))
    sums, counts, maxima, minima = by_name(row)
    assert sums["clip_fraction_low"] == sums["clip_fraction_high"] == 1
    assert sums["masked_fraction"] == 0 and counts["masked_sequence_fraction"] == 4
    assert sums["ratio"] == pytest.approx(3.5) and maxima["ratio"] == pytest.approx(1.5)
    squares = (*ADDED, *COMPARED).index(("ratio", "squares"))
    assert row[squares].item() == pytest.approx(3.75)
    assert sums["unclipped_surrogate"] == pytest.approx(1.5 - 0.5 + 3 + 0.5)
    assert sums["surrogate"] == pytest.approx(1.28 - 0.8 + 3 + 0.5)
    assert sums["entropy"] == 2.0 and sums["importance_weight"] == 4.0
    assert sums["advantage"] == 4.0 and maxima["advantage"] == 3.0 and minima["advantage"] == -1.0
    assert sums["num_trained"] == 4 and sums["num_packed"] == 10 and sums["num_nonfinite"] == 0
    # Only the first and the third token are of version 5; the version of the second was undone,
    # and its number belongs to other weights now.
    assert counts["mismatch_k1"] == counts["mismatch_k3"] == 2
    assert sums["mismatch_k1"] == pytest.approx(-math.log(1.5))
    assert sums["mismatch_k3"] == pytest.approx(0.5 - math.log(1.5))
    assert maxima["mismatch"] == pytest.approx(math.log(1.5))
    # k3 of delta ln 2 at the second token, 0 elsewhere.
    assert sums["kl"] == pytest.approx(1 - math.log(2)) and counts["kl"] == 4
    assert maxima["kl"] == pytest.approx(1 - math.log(2)) and minima["kl"] == pytest.approx(0.0)
    assert sums["policy_logprob_positive"] == pytest.approx(math.log(0.6 * 0.5 * 0.25))
    assert counts["policy_logprob_positive"] == 3 and counts["policy_logprob_negative"] == 1
    assert maxima["policy_logprob_negative"] == pytest.approx(math.log(0.2))
    assert counts["reference_logprob"] == 4 and counts["old_logprob"] == 0
    assert maxima["old_logprob"] == -math.inf
    later = by_name(statistics_of(terms, settings, with_mismatch=False))
    assert later[1]["mismatch_k3"] == 0 and later[2]["mismatch"] == -math.inf


def test_statistics_of_three_tokens_by_name() -> None:
    # Ratios 1/2, 1/2 and 2: two are clipped low, one high, and all statistics differ.
    tokens = tokens_of(
        current=[0.2, 0.1, 0.6], behaviour=[0.4, 0.2, 0.3], old=[0.4, 0.2, 0.3],
        reference=[0.3, 0.1, 0.5], advantage=[-1.0, -2.0, 4.0], entropy=[0.5, 0.25, 0.0],
    )  # fmt: skip
    settings = LossSettings(
        kl=KlSettings(coefficient=1.0),
        denominator="old",
        outlier_below=0.01,
        token_band=(0.1, 10.0),
    )
    row = statistics_of(terms_of(tokens), settings)
    update = UpdateTotals(row=tuple(row.tolist()), grad_norm=7.0, learning_rate=1.0)
    found = summarize_step([update], step=1, trainer_version=3).statistics
    ln = math.log
    kl = [0.5 - ln(1.5), 0.0, ln(1.2) - 1 / 6]
    k3 = [ln(2) - 0.5, ln(2) - 0.5, 1 - ln(2)]
    assert found == pytest.approx(
        {
            "policy_logprob_mean": ln(0.2 * 0.1 * 0.6) / 3,
            "policy_logprob_max": ln(0.6),
            "policy_logprob_positive_mean": ln(0.6),
            "policy_logprob_positive_max": ln(0.6),
            "policy_logprob_negative_mean": ln(0.2 * 0.1) / 2,
            "policy_logprob_negative_max": ln(0.2),
            "old_logprob_mean": ln(0.4 * 0.2 * 0.3) / 3,
            "old_logprob_max": ln(0.4),
            "old_logprob_positive_mean": ln(0.3),
            "old_logprob_positive_max": ln(0.3),
            "old_logprob_negative_mean": ln(0.4 * 0.2) / 2,
            "old_logprob_negative_max": ln(0.4),
            "reference_logprob_mean": ln(0.3 * 0.1 * 0.5) / 3,
            "reference_logprob_max": ln(0.5),
            "reference_logprob_positive_mean": ln(0.5),
            "reference_logprob_positive_max": ln(0.5),
            "reference_logprob_negative_mean": ln(0.3 * 0.1) / 2,
            "reference_logprob_negative_max": ln(0.3),
            # The ratios are clipped at 0.8 and 1.28; the KL is added.
            "loss": 0.8 + 1.6 - 5.12 + sum(kl),
            "surrogate_mean": (-0.8 - 1.6 + 5.12) / 3,
            "unclipped_surrogate_mean": (-0.5 - 1.0 + 8.0) / 3,
            "kl_mean": sum(kl) / 3,
            "kl_min": 0.0,
            "kl_max": kl[0],
            "entropy_mean": 0.25,
            "grad_norm": 7.0,
            "ratio_mean": 1.0,
            "ratio_max": 2.0,
            "effective_sample_size": 9 / (3 * 4.5),
            "clip_fraction_low": 2 / 3,
            "clip_fraction_high": 1 / 3,
            "masked_fraction": 0.0,
            "masked_token_fraction": 0.0,
            "masked_sequence_fraction": 0.0,
            "masked_outlier_fraction": 0.0,
            "importance_weight_mean": 1.0,
            "importance_weight_max": 1.0,
            "mismatch_k1_mean": ln(2) / 3,
            "mismatch_k3_mean": sum(k3) / 3,
            "mismatch_max": ln(2),
            "advantage_mean": 1 / 3,
            "advantage_min": -2.0,
            "advantage_max": 4.0,
        },
        abs=1e-12,
    )


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_statistics_of_a_row_without_trained_tokens_are_neutral(name: str) -> None:
    row = statistics_of(terms_of(random_tokens(0), []), EVERY_LOSS[name])
    neutral = no_statistics()
    neutral[ADDED.index(("num_packed", "sum"))] = 10
    assert row.tolist() == neutral.tolist()


@given(st.sampled_from(sorted(EVERY_LOSS)), st.integers(0, 1000))
def test_statistics_combine_over_rows_and_ranks(name: str, seed: int) -> None:
    tokens, settings = random_tokens(seed), EVERY_LOSS[name]
    whole = statistics_of(terms_of(tokens), settings)
    row_of = np.random.default_rng(seed).integers(0, 3, tokens.trajectory.max() + 1)
    parts = [
        statistics_of(terms_of(tokens, np.flatnonzero(row_of[tokens.trajectory] == row)), settings)
        for row in range(3)
    ]
    first_rank = combine_rows(torch.stack([no_statistics(), parts[0], parts[1]]))
    combined = combine_rows(torch.stack([first_rank, parts[2]]))
    # Each of the three parts counts a row of 10 packed tokens.
    whole[ADDED.index(("num_packed", "sum"))] = 30
    torch.testing.assert_close(combined, whole)
