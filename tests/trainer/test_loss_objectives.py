"""Tests of objectives, ratios and divergences against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.algorithm import KlEstimator
from actors.trainer.loss import objectives
from actors.trainer.loss.corrections import (
    bounded_ratio,
    sequence_log_ratio,
    token_log_ratio,
    trajectory_mean,
    trajectory_min,
    trajectory_sum,
)
from actors.trainer.loss.divergence import (
    binary_kl,
    binary_tv,
    corrected_reference_kl,
    kl_k1,
    kl_k2,
    kl_k3,
    outside_trust_region,
    reference_kl,
)

LN2, LN4 = math.log(2.0), math.log(4.0)


def logs(*probabilities: float) -> Tensor:
    """Return log-probabilities in float64, so that comparisons hold to many digits."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


def gradient_of(losses: Tensor, variable: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(losses.sum(), variable, retain_graph=True)
    return gradient.tolist()


def test_sums_means_and_minima_of_trajectories() -> None:
    values, index = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])
    assert trajectory_sum(values, index).tolist() == [5, 2, 5]
    assert trajectory_mean(values, index).tolist() == [2.5, 2, 2.5]
    assert trajectory_min(values, index).tolist() == [1, 2, 1]
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert trajectory_mean(*nothing).shape == trajectory_min(*nothing).shape == (0,)


def test_the_ratio_is_current_over_its_denominator() -> None:
    assert token_log_ratio(logs(0.3), logs(0.2)).exp().item() == pytest.approx(1.5)


def test_a_sequence_ratio_is_the_geometric_mean_over_all_tokens_of_the_trajectory() -> None:
    # Trajectory 0 has ratios 4 and 1, not adjacent in the row; trajectory 1 has ratio 1/2.
    ratio = sequence_log_ratio(logs(0.8, 0.1, 0.3), logs(0.2, 0.2, 0.3), torch.tensor([0, 1, 0]))
    assert ratio.exp().tolist() == pytest.approx([2.0, 0.5, 2.0])


def test_a_ratio_beyond_e_to_the_20_is_bounded_and_has_no_gradient() -> None:
    log_ratio = torch.tensor([math.log(2.0), 19.0, 100.0, -1e9], requires_grad=True)
    ratio = bounded_ratio(log_ratio)
    ratio.sum().backward()
    assert log_ratio.grad is not None
    expected = [2.0, math.exp(19.0), math.exp(20.0), 0.0]
    assert ratio.tolist() == pytest.approx(expected)
    assert log_ratio.grad.tolist() == pytest.approx([2.0, math.exp(19.0), 0.0, 0.0])


def test_the_straight_through_ratio_has_the_gradient_of_gspo() -> None:
    # GSPO, arXiv 2507.18071, equation 5, and its loss as written: mean over trajectories of s A.
    current, old = logs(0.8, 0.1, 0.3), logs(0.2, 0.2, 0.3)
    index, advantages = torch.tensor([0, 1, 0]), torch.tensor([2.0, -1.0, 2.0])
    weights = torch.tensor([1 / 4, 1 / 2, 1 / 4], dtype=torch.float64)
    through = current.clone().requires_grad_()
    ratio = sequence_log_ratio(through, old, index).exp()
    plain = current.clone().requires_grad_()
    first = torch.exp((plain - old)[[0, 2]].mean())
    second = torch.exp((plain - old)[1])
    expected = (2.0 * first - 1.0 * second) / 2
    assert (weights * ratio * advantages).sum().item() == pytest.approx(expected.item())
    assert gradient_of(weights * ratio * advantages, through) == pytest.approx(
        gradient_of(expected, plain)
    )


# Ratios 1.5, 1.5, .5, .5, 1.25, .9; clips .2 and .28.
RATIOS = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.25, 0.9])
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, -3.0])


def test_ppo_clip_uses_the_larger_loss_on_each_side() -> None:
    losses = objectives.ppo_clip(RATIOS, ADVANTAGES, clip_low=0.2, clip_high=0.28)
    assert losses.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.5, 2.7], abs=1e-6)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    ratio, advantages = torch.tensor([5.0, 2.0, 5.0, 0.5]), torch.tensor([-2.0, -1.0, 1.0, -1.0])
    ratio.requires_grad_()
    losses = objectives.dual_clip(ratio, advantages, clip_low=0.2, clip_high=0.28, bound=3.0)
    assert losses.tolist() == pytest.approx([6.0, 2.0, -1.28, 0.8], abs=1e-6)
    assert gradient_of(losses, ratio) == [0.0, 1.0, 0.0, 0.0]


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token() -> None:
    current = logs(0.5, 0.5, 0.5).requires_grad_()
    losses = objectives.cispo(
        torch.tensor([2.0, 0.25, 1.1]),
        torch.tensor([1.0, -2.0, 1.0]),
        current,
        clip_low=0.5,
        clip_high=0.28,
    )
    assert losses.tolist() == pytest.approx([1.28 * LN2, -LN2, 1.1 * LN2], abs=1e-6)
    assert gradient_of(losses, current) == pytest.approx([-1.28, 1.0, -1.1], abs=1e-6)


def test_cispo_with_a_clip_low_of_one_has_no_lower_bound() -> None:
    losses = objectives.cispo(
        torch.tensor([0.001]), torch.tensor([1.0]), logs(0.5), clip_low=1.0, clip_high=0.2
    )
    assert losses.item() == pytest.approx(0.001 * LN2)


def test_reinforce_weighs_by_the_ratio_up_to_its_cap() -> None:
    current = logs(0.5, 0.5).requires_grad_()
    ratio, advantages = torch.tensor([3.0, 0.5]), torch.tensor([-1.0, 2.0])
    losses = objectives.reinforce(ratio, advantages, current, ratio_cap=2.0)
    assert losses.tolist() == pytest.approx([-2 * LN2, LN2])
    assert gradient_of(losses, current) == pytest.approx([2.0, -1.0])


def test_sapo_by_hand() -> None:
    # 4/tau sigmoid(tau(r - 1)): r 1: 2/tau. r 2, tau 1: 4 sigmoid(1) = 2.924234.
    ratio = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    losses = objectives.sapo(
        ratio, torch.tensor([1.0, -1.0, 1.0]), tau_positive=1.0, tau_negative=1.05
    )
    assert losses.tolist() == pytest.approx([-2.0, 2 / 1.05, -2.924234])
    # 4 g (1 - g) = 4 * .731059 * .268941 = .786448
    assert gradient_of(losses, ratio) == pytest.approx([-1.0, 1.0, -0.786448], abs=1e-6)


@pytest.mark.parametrize(
    ("behaviour", "current", "tv", "kl"),
    [
        # KL: .5 ln 2 + .5 ln(2/3); and .99 ln(.99/.75) + .01 ln(.01/.25).
        (0.5, 0.25, 0.25, 0.143841),
        (0.99, 0.75, 0.24, 0.242666),
        (0.3, 0.3, 0.0, 0.0),
    ],
)
def test_binary_divergences(behaviour: float, current: float, tv: float, kl: float) -> None:
    assert binary_tv(logs(current), logs(behaviour)).item() == pytest.approx(tv, abs=1e-9)
    assert binary_kl(logs(current), logs(behaviour)).item() == pytest.approx(kl, abs=1e-6)


def test_binary_kl_of_a_certain_token_is_finite() -> None:
    assert math.isfinite(binary_kl(torch.zeros(1), torch.tensor([-1e-8])).item())
    assert math.isfinite(binary_kl(torch.tensor([-1.0]), torch.zeros(1)).item())


@pytest.mark.parametrize(
    ("behaviour", "current", "advantage", "low", "high"),
    [
        (0.2, 0.4, 1.0, False, True),
        (0.2, 0.4, -1.0, False, False),
        (0.4, 0.1, -1.0, True, False),
        (0.4, 0.1, 1.0, False, False),
        # The ratio is 100, but the probability has changed by less than .01.
        (0.0001, 0.01, 1.0, False, False),
        (0.2, 0.3, 1.0, False, False),
    ],
)
def test_dppo_stops_only_tokens_that_are_pushed_further_out(
    behaviour: float, current: float, advantage: float, low: bool, high: bool
) -> None:
    outside = outside_trust_region(
        logs(current),
        logs(behaviour),
        torch.tensor([advantage]),
        divergence=binary_tv,
        bound=0.15,
    )
    assert [side.item() for side in outside] == [low, high]


def test_dppo_is_the_weighted_policy_gradient_inside_and_zero_outside() -> None:
    current = logs(0.5, 0.5).requires_grad_()
    keep = torch.tensor([True, False])
    losses = objectives.dppo(
        torch.tensor([2.0, 2.0]), torch.ones(2), current, keep=keep, ratio_cap=20.0
    )
    assert losses.tolist() == pytest.approx([2 * LN2, 0.0])
    assert gradient_of(losses, current) == [-2.0, 0.0]


def test_only_negative_advantages_are_scaled() -> None:
    advantages = torch.tensor([2.0, -2.0, 0.0])
    assert objectives.scale_negative(advantages, negative_weight=0.25).tolist() == [2, -0.5, 0]
    assert objectives.scale_negative(advantages, negative_weight=0.0).tolist() == [2, 0, 0]


def test_k1_k2_and_k3_of_known_differences() -> None:
    delta = torch.tensor([LN2, 0.0, -LN2], dtype=torch.float64)
    assert kl_k1(delta).tolist() == pytest.approx([-LN2, 0.0, LN2])
    assert kl_k2(delta).tolist() == pytest.approx([LN2**2 / 2, 0.0, LN2**2 / 2])
    assert kl_k3(delta).tolist() == pytest.approx([1 - LN2, 0.0, LN2 - 0.5], abs=1e-12)


def test_k3_keeps_the_digits_of_a_tiny_difference() -> None:
    # To first order it is delta^2 / 2; exp(x) - 1 in float32 would give 0.
    assert kl_k3(torch.tensor([1e-6])).item() == pytest.approx(5e-13, rel=1e-3)


@given(st.floats(-20, 20))
def test_k3_is_never_negative(delta: float) -> None:
    assert kl_k3(torch.tensor([delta])).item() >= 0.0


# current .5, reference .25: delta = reference - current = -ln 2.
@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", LN2, 1.0),
        ("k2", LN2**2 / 2, LN2),
        ("k3", LN2 - 0.5, 0.5),
    ],
)
def test_the_kl_of_current_against_reference(
    estimator: KlEstimator, value: float, gradient: float
) -> None:
    current = logs(0.5).requires_grad_()
    kl = reference_kl(current, logs(0.25), estimator=estimator)
    assert kl.item() == pytest.approx(value)
    assert gradient_of(kl, current) == pytest.approx([gradient])
    # Behaviour .25: ratio 2. With k1 and k3 the ratio's own gradient is added, r k.
    corrected = corrected_reference_kl(current, logs(0.25), logs(0.25), estimator=estimator)
    through_ratio = 0.0 if estimator == "k2" else value
    assert corrected.item() == pytest.approx(2 * value)
    assert gradient_of(corrected, current) == pytest.approx([2 * (gradient + through_ratio)])


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_the_corrected_kl_has_the_gradient_of_the_exact_one(estimator: KlEstimator) -> None:
    """Compare without sampling: the expectation under the sampler is a sum over the vocabulary."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    behaviour = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    current = logits.log_softmax(-1)
    exact = (current.exp() * (current - reference)).sum()
    terms = corrected_reference_kl(current, reference, behaviour, estimator=estimator)
    estimate = (behaviour.exp() * terms).sum()
    if estimator != "k2":
        assert estimate.item() == pytest.approx(exact.item())
    assert gradient_of(estimate, logits) == pytest.approx(gradient_of(exact, logits))


@pytest.mark.parametrize(("estimator", "is_forward"), [("k2", False), ("k3", True)])
def test_the_plain_kl_term_has_the_gradient_of_a_kl_in_one_direction(
    estimator: KlEstimator, is_forward: bool
) -> None:
    """Compare on the current policy: k2 and KL(current || reference), k3 and its reverse."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    current = logits.log_softmax(-1)
    terms = reference_kl(current, reference, estimator=estimator)
    estimate = (current.detach().exp() * terms).sum()
    if is_forward:
        exact = (reference.exp() * (reference - current)).sum()
    else:
        exact = (current.exp() * (current - reference)).sum()
    assert gradient_of(estimate, logits) == pytest.approx(gradient_of(exact, logits))


@pytest.mark.parametrize(("divergence", "is_far"), [(binary_tv, True), (binary_kl, False)])
def test_the_trust_region_uses_the_given_divergence(
    divergence: Callable[[Tensor, Tensor], Tensor], is_far: bool
) -> None:
    # Total variation is .1 and KL is .08: a bound between them shows which one was computed.
    arguments = logs(0.11), logs(0.01), torch.ones(1)
    _, high = outside_trust_region(*arguments, divergence=divergence, bound=0.09)
    assert high.tolist() == [is_far]


def test_an_unknown_estimator_is_refused() -> None:
    one = logs(0.5)
    with pytest.raises(AssertionError):
        reference_kl(one, one, estimator="k4")  # type: ignore[arg-type]
