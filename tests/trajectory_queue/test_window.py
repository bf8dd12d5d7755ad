"""Tests of the admission window: the bound on age, deadlocks, rollbacks and restarts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.queue_builders import through_json

from actors.algorithm import AlgorithmSettings
from actors.policy_age import policy_ages
from actors.trajectory_queue.window import AdmissionWindow, oldest_admitted_version

settings_strategy = st.builds(
    lambda p, s, w: AlgorithmSettings(groups_per_step=p, max_lag=s, window_groups=w),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 9),
)


class Run:
    """A run that admits and samples groups as early as possible, so that tokens are oldest."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.window = AdmissionWindow(settings)
        self.sampled_at: dict[int, int] = {}
        self.closed: set[int] = set()
        self.oldest_age = 0
        self.taken: list[int] = []

    def admit(self) -> None:
        for number in range(self.window.admissible_end):
            self.sampled_at.setdefault(number, self.window.loaded_version)

    def open_groups(self) -> list[int]:
        return sorted(set(self.sampled_at) - self.closed)

    def train(self) -> bool:
        """Take, finalise and publish one step, if it is complete."""
        result = self.window.take(self.closed.__contains__)
        if result is None:
            return False
        step, numbers = result
        self.taken += numbers
        # The trainer holds version n - 1 when it trains step n.
        self.oldest_age = max(self.oldest_age, *(step - 1 - self.sampled_at[k] for k in numbers))
        self.window.finalise(step)
        self.window.set_loaded_version(step)
        return True


@given(settings_strategy, st.data())
def test_no_token_is_older_than_the_bound_in_any_closing_order(
    settings: AlgorithmSettings, data: st.DataObject
) -> None:
    run = Run(settings)
    for _ in range(40):
        run.admit()
        if not run.train():
            # There is no deadlock: while no step is complete, an admitted group is open.
            assert run.open_groups()
            run.closed.add(data.draw(st.sampled_from(run.open_groups())))
        assert run.oldest_age <= settings.max_policy_age
    assert len(run.taken) == len(set(run.taken))


def test_the_oldest_version_of_a_group_follows_from_the_admission_formula() -> None:
    shape = AlgorithmSettings(groups_per_step=3, max_lag=1, window_groups=3)
    oldest = [oldest_admitted_version(number, shape) for number in range(10)]
    assert oldest == [0, 0, 0, 0, 0, 0, 1, 1, 1, 2]
    # Versions were 2 ahead of steps when the term began; then step 1 was republished as 4.
    oldest = [oldest_admitted_version(k, shape, num_ahead=2, republished=[4]) for k in (0, 6, 9)]
    assert oldest == [2, 3, 5]


@given(settings_strategy, st.integers(0, 40), st.data())
def test_the_oldest_admitted_version_of_a_group_is_exactly_within_the_age_bound(
    shape: AlgorithmSettings, number: int, data: st.DataObject
) -> None:
    """Compare the ages of that version and of the one before it when the group is trained."""
    num_ahead = data.draw(st.integers(0, 2))
    later = st.sets(st.integers(num_ahead + 1, num_ahead + 40), max_size=3)
    republished = sorted(data.draw(later))
    # The latest step that takes the group; the version of the previous step trains it.
    step = number // shape.groups_per_step + shape.max_policy_age - shape.max_lag
    trained_by = oldest_admitted_version(
        step * shape.groups_per_step,
        replace(shape, max_lag=0),
        num_ahead=num_ahead,
        republished=republished,
    )
    oldest = oldest_admitted_version(number, shape, num_ahead=num_ahead, republished=republished)
    ages = policy_ages(np.array([oldest, oldest - 1], np.int32), trained_by, republished)
    assert ages[0] <= shape.max_policy_age
    if oldest - 1 >= num_ahead:
        assert ages[1] > shape.max_policy_age


@given(settings_strategy)
def test_tokens_are_within_the_bound_if_the_oldest_group_always_closes_last(
    settings: AlgorithmSettings,
) -> None:
    run = Run(settings)
    for _ in range(200):
        run.admit()
        if not run.train():
            run.closed.add(run.open_groups()[-1])
    assert 0 < len(run.taken)
    assert run.oldest_age <= settings.max_policy_age


@pytest.mark.parametrize(
    ("lag", "groups", "window", "bound"),
    [(1, 3, 3, 2), (3, 8, 9, 4), (0, 4, 1, 0), (2, 4, 1, 2), (0, 1, 5, 4)],
)
def test_the_bound_of_the_worked_examples(lag: int, groups: int, window: int, bound: int) -> None:
    settings = AlgorithmSettings(groups_per_step=groups, max_lag=lag, window_groups=window)
    assert settings.max_policy_age == bound


def test_the_bound_of_the_first_worked_example_is_reached() -> None:
    # S=1, P=3, W=3: group 5 is admitted at version 0 (5 // 3 <= 0 + 1), groups 6 and 7 overtake
    # it, and so it is trained in step 3, by version 2.
    run = Run(AlgorithmSettings(groups_per_step=3, max_lag=1, window_groups=3))
    run.admit()
    for number in (0, 1, 2, 3, 4):
        run.closed.add(number)
    assert run.train()
    run.admit()
    run.closed |= {6, 7}
    assert run.train()
    run.closed |= {5, 8}
    run.admit()
    run.closed |= {9}
    assert run.train()
    assert run.taken == [0, 1, 2, 3, 4, 6, 5, 7, 8] and run.oldest_age == 2


def test_lag_zero_and_window_one_is_synchronous() -> None:
    window = AdmissionWindow(AlgorithmSettings(groups_per_step=2, max_lag=0, window_groups=1))
    assert window.admissible_end == 2
    assert window.take({1}.__contains__) is None
    assert window.take({0, 1}.__contains__) == (1, (0, 1))
    assert window.admissible_end == 2
    window.set_loaded_version(1)
    assert window.admissible_end == 4


def test_a_version_that_goes_backwards_is_refused() -> None:
    window = AdmissionWindow(AlgorithmSettings(groups_per_step=1, max_lag=0, window_groups=1))
    window.set_loaded_version(3)
    window.set_loaded_version(3)
    with pytest.raises(ValueError, match="got version 2, expected at least 3"):
        window.set_loaded_version(2)


def test_steps_are_finalised_in_order_and_once() -> None:
    window = AdmissionWindow(AlgorithmSettings(groups_per_step=1, max_lag=3, window_groups=1))
    assert window.take(lambda _: True) == (1, (0,))
    assert window.take(lambda _: True) == (2, (1,))
    with pytest.raises(ValueError, match="step 2 cannot be finalised before step 1"):
        window.finalise(2)
    window.finalise(1)
    with pytest.raises(ValueError, match="step 1 is not taken, expected one of"):
        window.finalise(1)


@given(settings_strategy, st.data())
def test_steps_that_are_rolled_back_are_taken_again_with_the_same_groups(
    settings: AlgorithmSettings, data: st.DataObject
) -> None:
    window = AdmissionWindow(settings)
    closed = data.draw(st.sets(st.integers(0, 30)))
    first: list[tuple[int, tuple[int, ...]]] = []
    while (taken := window.take(closed.__contains__)) is not None:
        first.append(taken)
    if not first:
        return
    step = data.draw(st.integers(1, len(first)))
    assert window.roll_back(step) == tuple(range(step, len(first) + 1))
    assert window.next_step == step
    again = [window.take(closed.__contains__) for _ in first[step - 1 :]]
    assert again == first[step - 1 :]
    assert window.take(closed.__contains__) is None


@given(settings_strategy, st.data())
def test_a_restored_window_continues_after_the_last_finalised_step(
    settings: AlgorithmSettings, data: st.DataObject
) -> None:
    window = AdmissionWindow(settings)
    closed = data.draw(st.sets(st.integers(0, 30)))
    steps = []
    while (taken := window.take(closed.__contains__)) is not None:
        steps.append(taken)
    num_final = data.draw(st.integers(0, len(steps)))
    for step in range(1, num_final + 1):
        window.finalise(step)
    window.set_loaded_version(num_final)
    exact = AdmissionWindow(settings, snapshot=through_json(window.snapshot()))
    assert exact.snapshot() == window.snapshot()
    assert [exact.taken_groups(step) for step, _ in steps[num_final:]] == [
        numbers for _, numbers in steps[num_final:]
    ]
    restored = AdmissionWindow(settings, snapshot=through_json(window.snapshot()))
    restored.roll_back_all()
    assert restored.loaded_version == num_final and restored.next_step == num_final + 1
    finalised = {k for _, numbers in steps[:num_final] for k in numbers}
    assert {k for k in range(60) if restored.is_taken(k)} == finalised
    assert [restored.take(closed.__contains__) for _ in steps[num_final:]] == steps[num_final:]


def test_a_run_admits_no_group_beyond_its_last_step_and_can_finish_it() -> None:
    settings = AlgorithmSettings(groups_per_step=2, max_lag=3, window_groups=5)
    window = AdmissionWindow(settings, num_steps=2)
    assert window.admissible_end == 4
    assert window.take({0, 1, 3}.__contains__) == (1, (0, 1))
    assert window.take({2, 3}.__contains__) == (2, (2, 3))
