"""Tests of the arithmetic of an explanation: parts of a gradient and own shares."""

from __future__ import annotations

import pytest
import torch

from actors.algorithm import Baseline, Scale
from actors.journal.files import GroupRule
from actors.trainer.attribution import split_gradient
from service.explain.recompute import own_shares

PLAIN = GroupRule(baseline=Baseline.MEAN, scale=Scale.NONE)
STD = GroupRule(baseline=Baseline.MEAN, scale=Scale.STD)


def test_parts_of_a_gradient_add_up_to_it() -> None:
    """Split a gradient of two tensors; that of the third row is opposed to the others."""
    rows = [([3.0, 0.0], [0.0]), ([0.0, 0.0], [4.0]), ([-1.0, 0.0], [0.0])]

    def gradient(index: int) -> list[torch.Tensor]:
        return [torch.tensor(part) for part in rows[index]]

    found = split_gradient(["a", "a", "b"], gradient)
    # The whole gradient is G = ([2, 0], [4]).
    assert found.norm == pytest.approx(20**0.5)
    assert [part.norm for part in found.rows] == [3.0, 4.0, 1.0]
    assert [part.dot for part in found.rows] == [6.0, 16.0, -2.0]
    assert found.groups["a"].norm == 5.0 and found.groups["a"].dot == 22.0
    assert found.groups["b"].norm == 1.0 and found.groups["b"].dot == -2.0


def test_a_wrong_reward_owns_its_advantage_and_the_rest_of_its_group_does_not() -> None:
    """Compare with advantages computed by hand.

    The returns -100, 0, 1, 0 give the advantages -75.25, 24.75, 25.75, 24.75. Without the 1, the
    first would have -200/3. Without the first, the others would have -1/3, 2/3, -1/3.
    """
    expected = [200 / 3 / 75.25, 1 / 3 / 24.75, 2 / 3 / 25.75, 1 / 3 / 24.75]
    assert own_shares([-100, 0, 1, 0], PLAIN).tolist() == pytest.approx(expected)


def test_the_losers_own_nothing_if_one_trajectory_wins() -> None:
    assert own_shares([1, 0, 0, 0], STD).tolist() == pytest.approx([0.76980, 0, 0, 0], abs=1e-4)


def test_own_shares_are_one_in_a_group_of_two_or_of_equal_returns() -> None:
    assert own_shares([1, 0], PLAIN).tolist() == [1, 1]
    assert own_shares([1, 1, 1], PLAIN).tolist() == [1, 1, 1]
