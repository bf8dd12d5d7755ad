"""Tests of the critic's loss: examples by hand, sums over micro-batches, explained variance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actors.trainer.critic import clipped_value_loss, explained_variance


def loss_and_gradient(
    values: list[float], old: list[float], targets: list[float], *, clip: float | None
) -> tuple[float, list[float], int]:
    leaf = torch.tensor(values, requires_grad=True)
    loss, num_clipped = clipped_value_loss(
        leaf, torch.tensor(old), torch.tensor(targets), torch.ones(len(values)), clip=clip
    )
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad.tolist(), int(num_clipped)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient", "num_clipped"),
    [
        # Within the clip: (.1 - 1)^2 / 2.
        (0.1, 0.0, 1.0, 0.2, 0.405, -0.9, 0),
        # Beyond the clip, away from the target: the larger loss is the one without the clip.
        (1.0, 0.0, 0.0, 0.2, 0.5, 1.0, 0),
        # Beyond the clip, towards the target: (.2 - 1)^2 / 2, without a gradient.
        (0.5, 0.0, 1.0, 0.2, 0.32, 0.0, 1),
        (0.5, 0.0, 1.0, None, 0.125, -0.5, 0),
    ],
)
def test_the_value_loss_by_hand(
    value: float,
    old: float,
    target: float,
    clip: float | None,
    loss: float,
    gradient: float,
    num_clipped: int,
) -> None:
    found = loss_and_gradient([value], [old], [target], clip=clip)
    assert found[0] == pytest.approx(loss)
    assert found[1] == pytest.approx([gradient])
    assert found[2] == num_clipped


def test_weighted_losses_and_gradients_of_micro_batches_add_up() -> None:
    torch.manual_seed(0)
    values, old, targets, weights = torch.randn(4, 12).unbind()

    def of(part: slice, leaf: Tensor) -> Tensor:
        loss, _ = clipped_value_loss(
            leaf[part], old[part], targets[part], weights[part].abs(), clip=0.2
        )
        return loss

    whole, parts = (values.clone().requires_grad_() for _ in range(2))
    loss = of(slice(None), whole)
    sum_of_parts = of(slice(0, 5), parts) + of(slice(5, 12), parts)
    loss.backward()
    sum_of_parts.backward()
    torch.testing.assert_close(loss, sum_of_parts)
    torch.testing.assert_close(whole.grad, parts.grad)


def test_a_row_without_trained_tokens_has_a_loss_of_zero() -> None:
    empty = torch.empty(0)
    loss, num_clipped = clipped_value_loss(empty, empty, empty, empty, clip=0.2)
    assert float(loss) == 0 and int(num_clipped) == 0


def test_columns_of_different_lengths_are_refused() -> None:
    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(AssertionError):
        clipped_value_loss(one, one, two, one, clip=None)


@pytest.mark.parametrize(
    ("targets", "values", "expected"),
    [
        ([0.0, 2.0], [1.0, 1.0], 0.0),
        ([0.0, 2.0], [0.0, 2.0], 1.0),
        ([0.0, 2.0], [2.0, 0.0], -3.0),
        # Tiny targets have a variance too; equal ones have none, however large.
        ([0.0, 2e-7], [0.0, 1e-7], 0.5),
        ([100.1] * 1000, [0.0] * 1000, None),
        ([1e6 + 0.3] * 1000, [1e6] * 1000, None),
        ([0.0, 0.0], [1.0, 1.0], None),
    ],
)
def test_the_explained_variance_of_a_critic(
    targets: list[float], values: list[float], expected: float | None
) -> None:
    wide, off = torch.tensor(targets).double(), torch.tensor(values).double()
    count = len(targets)
    found = explained_variance(
        target_mean=float(wide.sum()) / count,
        target_mean_square=float(wide.square().sum()) / count,
        error_mean_square=float((wide - off).square().sum()) / count,
    )
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))
