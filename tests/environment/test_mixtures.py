"""Tests of mixtures of task sources: shares by weight, spread evenly, no task left out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.environment.settings import MIXTURE_PERIOD
from actors.environment.tasks import (
    OTHER_SOURCE,
    OTHER_TASK,
    SLOTS,
    FileTasks,
    GeneratedTasks,
    MixedTasks,
    apportioned,
    spread,
)
from actors.types import Task

weights = st.dictionaries(
    st.text("abcdef", min_size=1), st.floats(0.1, 10.0), min_size=1, max_size=6
)


def test_a_total_is_apportioned_by_largest_remainders_and_each_gets_one() -> None:
    assert apportioned({"a": 1, "b": 2}, total=10) == {"a": 3, "b": 7}
    assert apportioned({"a": 1, "b": 1, "c": 1}, total=10) == {"a": 4, "b": 3, "c": 3}
    assert apportioned({"a": 1, "b": 5000}, total=1000) == {"a": 1, "b": 999}
    assert apportioned({"a": 1, "b": 1, "c": 900}, total=5) == {"a": 1, "b": 1, "c": 3}


def test_counts_are_spread_evenly() -> None:
    assert spread({"a": 1, "b": 2}) == [("b", 0), ("a", 0), ("b", 1)]


@given(weights)
@example({"most": 700.0, **{f"few{number}": 1.0 for number in range(300)}})
def test_every_range_of_a_mixture_has_its_shares_to_within_two(shares: dict[str, float]) -> None:
    counts = apportioned(shares, total=MIXTURE_PERIOD)
    whole = sum(shares.values())
    assert sum(counts.values()) == MIXTURE_PERIOD
    assert all(
        abs(counts[name] - MIXTURE_PERIOD * share / whole) < 1 + 1e-6
        for name, share in shares.items()
    )
    names = [name for name, _ in spread(counts)]
    for first in range(0, MIXTURE_PERIOD, 97):
        for length in (7, 64, 500):
            found = Counter((names * 2)[first : first + length])
            for name, count in counts.items():
                assert abs(found[name] - length * count / MIXTURE_PERIOD) <= 2


def listed(name: str, count: int) -> FileTasks:
    tasks = [Task(task_id=f"t{number}", environment=name, seed=number) for number in range(count)]
    return FileTasks(tasks, run_seed=0, num_held_out=2)


@pytest.fixture
def mixed() -> MixedTasks:
    sources = {
        "two": listed("x", 9),
        "one": listed("x", 9),
        "made": GeneratedTasks("y", run_seed=3),
    }
    return MixedTasks(sources, {"two": 2.0, "one": 1.0, "made": 1.0})


def test_the_tasks_of_a_source_follow_in_epochs_under_its_name(mixed: MixedTasks) -> None:
    tasks = [mixed.task(number) for number in range(2 * MIXTURE_PERIOD)]
    by_source = Counter(task.environment for task in tasks)
    assert by_source == {"two": 1000, "one": 500, "made": 500}
    own = [task.task_id for task in tasks if task.environment == "two"]
    # Seven of nine tasks are for training: each epoch has every one of them.
    for first in range(0, 994, 7):
        assert len(set(own[first : first + 7])) == 7
    # Tasks of two sources that have the same id get different ids.
    assert {task.task_id for task in tasks if task.task_id.endswith(":t3")} <= {"two:t3", "one:t3"}
    assert len({task.seed for task in tasks if task.environment == "made"}) == 500


def test_a_replacement_is_another_task_of_the_same_source(mixed: MixedTasks) -> None:
    for slot in range(50):
        first = mixed.task(slot)
        again = [mixed.task(slot + number * SLOTS) for number in (1, 2)]
        again += [mixed.task(slot + number * OTHER_TASK) for number in range(1, 8)]
        assert {task.environment for task in again} == {first.environment}
        if first.environment == "made":
            assert len({task.task_id for task in (first, *again)}) == 10


def test_another_source_is_that_of_the_next_slot(mixed: MixedTasks) -> None:
    following = [mixed.task(number).environment for number in range(10, 18)]
    others = [mixed.task(10 + number * OTHER_SOURCE).environment for number in range(8)]
    assert others == following


def test_each_source_has_its_own_held_out_tasks(mixed: MixedTasks) -> None:
    held_out = mixed.held_out(2)
    assert [task.environment for task in held_out] == ["two"] * 2 + ["one"] * 2 + ["made"] * 2
    trained = {mixed.task(number).task_id for number in range(1000)}
    assert not trained & {task.task_id for task in held_out}
    assert mixed.comes_again(held_out[0]) and not mixed.comes_again(held_out[-1])


def test_the_digest_depends_on_listed_tasks_and_not_on_generated_ones() -> None:
    one, two = listed("x", 9), listed("x", 10)
    made = GeneratedTasks("y", run_seed=0)
    found = [
        MixedTasks(sources, dict.fromkeys(sources, 1.0)).digest
        for sources in ({"a": one, "b": made}, {"a": two, "b": made}, {"b": made})
    ]
    assert len(set(found)) == 3 and found[2] == ""
