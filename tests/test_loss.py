"""The loss and its statistics against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.logprobs import chunked_token_logprobs, token_logprobs
from actors.trainer.loss import (
    MAX_NAMES,
    SUM_NAMES,
    MicroBatchTerms,
    clipped_policy_loss,
    importance_ratio,
    kl_k1,
    kl_k3,
    micro_batch_loss,
    statistic_sums,
    token_mean,
)
from actors.trainer.optimizer import learning_rate_at
from actors.trainer.statistics import PhaseSeconds, UpdateSums, summarize_step

NO_SECONDS = PhaseSeconds(total_s=0, prepare_s=0, forward_s=0, backward_s=0, optimizer_s=0)


def make_terms(current, behaviour, advantages, versions, *, trainer_version=5):
    return MicroBatchTerms(
        current_logprobs=torch.tensor(current, requires_grad=True),
        behaviour_logprobs=torch.tensor(behaviour),
        entropies=torch.full((len(current),), 0.5),
        advantages=torch.tensor(advantages),
        sampled_versions=torch.tensor(versions),
        trainer_version=trainer_version,
    )


def compute_sums(terms, *, denominator=1, with_mismatch=True):
    loss, ratio = micro_batch_loss(terms, clip_low=0.2, clip_high=0.28, denominator=denominator)
    sums, maxima = statistic_sums(
        terms,
        loss=loss,
        ratio=ratio,
        clip_low=0.2,
        clip_high=0.28,
        num_tokens=10,
        with_mismatch=with_mismatch,
    )
    return (
        dict(zip(SUM_NAMES, sums.tolist(), strict=True)),
        dict(zip(MAX_NAMES, maxima.tolist(), strict=True)),
    )


def test_clipped_loss_takes_the_worse_of_the_two_on_each_side():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.25, 0.9])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, -3.0])
    losses = clipped_policy_loss(ratio, advantages, clip_low=0.2, clip_high=0.28)
    expected = [-1.28, 1.5, -0.5, 0.8, -2.5, 2.7]
    assert losses.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_clipped_token_has_no_gradient_and_a_free_one_has_the_policy_gradient():
    terms = make_terms(
        [math.log(0.6), math.log(0.4), math.log(0.5)],
        [math.log(0.4), math.log(0.4), math.log(0.5)],
        [1.0, 2.0, -3.0],
        [5, 5, 5],
    )
    loss, ratio = micro_batch_loss(terms, clip_low=0.2, clip_high=0.28, denominator=4)
    loss.backward()
    assert ratio.tolist() == pytest.approx([1.5, 1.0, 1.0], abs=1e-6)
    assert loss.item() == pytest.approx((-1.28 - 2.0 + 3.0) / 4, abs=1e-6)
    assert terms.current_logprobs.grad.tolist() == pytest.approx([0.0, -0.5, 0.75], abs=1e-6)


def test_the_ratio_is_current_over_behaviour():
    ratio = importance_ratio(torch.tensor([math.log(0.3)]), torch.tensor([math.log(0.2)]))
    assert ratio.item() == pytest.approx(1.5, abs=1e-6)


def test_the_token_mean_divides_by_the_global_denominator():
    assert token_mean(torch.tensor([1.0, 2.0, 3.0]), denominator=12).item() == 0.5
    assert token_mean(torch.zeros(0), denominator=1).item() == 0.0


def test_k1_and_k3_of_known_differences():
    delta = torch.tensor([math.log(2.0), 0.0, -math.log(2.0)], dtype=torch.float64)
    assert kl_k1(delta).tolist() == pytest.approx([-math.log(2), 0.0, math.log(2)])
    expected = [1 - math.log(2), 0.0, math.log(2) - 0.5]
    assert kl_k3(delta).tolist() == pytest.approx(expected, abs=1e-12)


def test_k3_keeps_the_digits_of_a_tiny_difference():
    # delta^2 / 2 to first order; float32, or exp(x) - 1, would answer 0.
    assert kl_k3(torch.tensor([1e-6])).item() == pytest.approx(5e-13, rel=1e-3)


@given(st.floats(-20, 20))
def test_k3_is_never_negative(delta):
    assert kl_k3(torch.tensor([delta])).item() >= 0.0


def test_statistics_of_four_tokens():
    terms = make_terms(
        [math.log(0.6), math.log(0.2), math.log(0.5), math.log(0.25)],
        [math.log(0.4), math.log(0.4), math.log(0.5), math.log(0.5)],
        [1.0, -1.0, 3.0, 1.0],
        [5, 4, 5, 2],
    )
    sums, maxima = compute_sums(terms)
    # Ratios 1.5, .5, 1, .5: the first clips upwards, the second downwards, the last not at all.
    assert sums["ratio"] == pytest.approx(3.5, abs=1e-5)
    assert sums["ratio_squared"] == pytest.approx(3.75, abs=1e-5)
    assert sums["num_clipped"] == 2
    assert sums["advantage"] == 4.0
    assert sums["entropy"] == 2.0
    assert sums["policy_age"] == 4.0
    assert sums["num_trained"] == 4 and sums["num_tokens"] == 10 and sums["num_nonfinite"] == 0
    # Only the first and the third token come from version 5.
    assert sums["num_mismatch"] == 2
    assert sums["mismatch_k1"] == pytest.approx(-math.log(1.5), abs=1e-6)
    assert sums["mismatch_k3"] == pytest.approx(0.5 - math.log(1.5), abs=1e-6)
    assert maxima["mismatch_abs"] == pytest.approx(math.log(1.5), abs=1e-6)
    assert maxima["ratio"] == pytest.approx(1.5, abs=1e-6)
    assert maxima["policy_age"] == 3.0
    assert compute_sums(terms, with_mismatch=False)[0]["num_mismatch"] == 0


def test_statistics_of_a_row_that_trains_nothing_are_zero():
    sums, maxima = compute_sums(make_terms([], [], [], []))
    assert {name for name, value in sums.items() if value} == {"num_tokens"}
    assert set(maxima.values()) == {0.0}


def make_update(*, is_skipped=False, grad_norm=2.0, **named: float) -> UpdateSums:
    return UpdateSums(
        sums=tuple(float(named.get(name, 0.0)) for name in SUM_NAMES),
        maxima=(1.5, 2.0, 0.25),
        grad_norm=grad_norm,
        learning_rate=0.1,
        is_skipped=is_skipped,
    )


def test_a_steps_tokens_weigh_equally_whichever_update_they_were_in():
    updates = [
        make_update(num_trained=1, ratio=2.0, ratio_squared=4.0, entropy=1.0, loss=1.0),
        make_update(num_trained=3, ratio=3.0, ratio_squared=3.0, entropy=1.0, loss=2.0),
        make_update(num_trained=9, ratio=math.nan, loss=math.nan, is_skipped=True),
        make_update(grad_norm=0.0, loss=0.0),
    ]
    stats = summarize_step(updates, step=7, trainer_version=3, seconds=NO_SECONDS)
    assert stats.ratio_mean == 1.25 and stats.entropy_mean == 0.5
    assert stats.effective_sample_fraction == pytest.approx(25 / (4 * 7))
    assert stats.loss == 1.0 and stats.grad_norm == 2.0
    assert (stats.num_updates, stats.num_skipped_updates, stats.num_empty_updates) == (4, 1, 1)
    assert stats.trained_tokens == 4
    assert stats.mismatch is None
    assert stats.is_skipped


def test_a_step_without_updates_has_no_numbers_to_report():
    stats = summarize_step([], step=0, trainer_version=0, seconds=NO_SECONDS)
    assert (stats.loss, stats.trained_tokens, stats.mismatch) == (0.0, 0, None)
    assert not stats.is_skipped


def test_token_logprobs_and_entropy_by_hand_at_a_temperature():
    logits = torch.tensor([[0.0, 2.0 * math.log(3.0)], [0.0, -math.inf]])
    logprobs, entropies = token_logprobs(logits, torch.tensor([1, 0]), temperature=2.0)
    assert logprobs.tolist() == pytest.approx([math.log(0.75), 0.0], abs=1e-6)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropies.tolist() == pytest.approx([entropy, 0.0], abs=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_chunks_change_neither_log_probabilities_nor_gradients(chunk_tokens):
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 11, bias=False)
    hidden, targets = torch.randn(7, 4), torch.randint(11, (7,))
    results = []
    for size in (7, chunk_tokens):
        states = hidden.clone().requires_grad_()
        head.zero_grad()
        logprobs, entropies = chunked_token_logprobs(
            states, targets, output_head=head, temperature=0.7, chunk_tokens=size
        )
        (logprobs * torch.arange(7)).sum().backward()
        results.append((logprobs.detach(), entropies, states.grad, head.weight.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)


def test_the_learning_rate_warms_up_linearly_and_then_stays():
    rates = [learning_rate_at(done, learning_rate=1.0, warmup_steps=4) for done in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate_at(0, learning_rate=1.0, warmup_steps=0) == 1.0
