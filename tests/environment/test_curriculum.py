"""Tests of the curriculum: tasks that are solved or hopeless rest, the others are played."""

from __future__ import annotations

from collections import Counter

import pytest

from actors.environment.settings import CurriculumSettings
from actors.environment.tasks import FileTasks, GeneratedTasks, MixedTasks
from actors.merge.report import GroupReturns
from actors.trajectory_queue.messages import OpenSlot
from actors.types import Task
from service.run.task_feed import Curriculum, choose, is_resting

SETTINGS = CurriculumSettings(resting_share=0.1, window=2)


@pytest.mark.parametrize(
    ("passed", "rests"),
    [
        ([], False),
        ([1.0], False),
        ([1.0, 1.0], True),
        ([0.0, 0.0], True),
        ([0.5, 0.0], False),
        ([0.0, 1.0, 1.0], True),
        ([1.0, 1.0, 0.9], False),
    ],
)
def test_a_task_rests_once_its_newest_groups_all_passed_or_all_failed(
    passed: list[float], rests: bool
) -> None:
    assert is_resting(passed, SETTINGS) is rests


def test_the_bounds_are_shares_of_the_passed_rollouts() -> None:
    settings = CurriculumSettings(resting_share=0.1, window=1, solved_from=0.9, hopeless_to=0.1)
    found = {share: is_resting([share], settings) for share in (0.0, 0.1, 0.11, 0.89, 0.9, 1.0)}
    assert found == {0.0: True, 0.1: True, 0.11: False, 0.89: False, 0.9: True, 1.0: True}


def task(name: str) -> Task:
    return Task(task_id=name, environment="x", seed=0)


def test_the_first_task_that_does_not_rest_is_chosen_or_the_first_if_all_rest() -> None:
    results = {"a": (1.0, 1.0), "b": (0.0, 0.0), "c": (0.5, 0.5)}
    never = CurriculumSettings(resting_share=0.0, window=2)
    chosen = choose([(task(name), name) for name in "abc"], results, never, slot=7)
    assert chosen.task_id == "c"
    assert choose([(task(name), name) for name in "ab"], results, never, slot=7).task_id == "a"


def test_a_resting_task_is_played_with_its_share_and_a_slot_repeats_its_choice() -> None:
    choices = [(task("solved"), "solved"), (task("open"), "open")]
    results = {"solved": (1.0, 1.0)}
    chosen = [choose(choices, results, SETTINGS, slot=slot).task_id for slot in range(2000)]
    assert 140 < Counter(chosen)["solved"] < 260
    assert chosen == [choose(choices, results, SETTINGS, slot=slot).task_id for slot in range(2000)]


def listed(count: int) -> FileTasks:
    return FileTasks([task(f"t{number}") for number in range(count)], run_seed=0)


def returns(task_id: str, *values: float, environment: str = "x") -> GroupReturns:
    return GroupReturns(task_id=task_id, environment=environment, returns=values)


def played(curriculum: Curriculum, count: int) -> Counter[str]:
    slots = [OpenSlot(group_number=number, replacement=0) for number in range(count)]
    return Counter(curriculum.task(slot).task_id for slot in slots)


def test_each_task_of_a_list_rests_separately() -> None:
    curriculum = Curriculum(SETTINGS, listed(10))
    for _ in range(2):
        curriculum.learn(
            [returns(f"t{number}", 1.0, 1.0) for number in range(5)]
            + [returns("t5", 0.0, 0.0), returns("t6", 1.0, 0.0), returns("t7")]
        )
    found = played(curriculum, 4000)
    resting = sum(found[f"t{number}"] for number in range(6))
    # Six of ten tasks rest, with a tenth of the weight of the four others: 0.6 to 4.
    assert 0.08 < resting / 4000 < 0.18
    assert min(found[f"t{number}"] for number in (6, 7, 8, 9)) > 700


def test_generated_tasks_rest_together_with_their_source_of_the_mixture() -> None:
    sources = {name: GeneratedTasks("guessing", run_seed=0) for name in ("easy", "hard", "fit")}
    curriculum = Curriculum(SETTINGS, MixedTasks(sources, dict.fromkeys(sources, 1.0)))
    for number in range(2):
        curriculum.learn(
            [
                returns(f"easy:{number}", 1.0, 1.0, environment="easy"),
                returns(f"hard:{number}", 0.0, 0.0, environment="hard"),
                returns(f"fit:{number}", 1.0, 0.0, environment="fit"),
            ]
        )
    slots = [OpenSlot(group_number=number, replacement=0) for number in range(1000)]
    tasks = [curriculum.task(slot) for slot in slots]
    found = Counter(each.environment for each in tasks)
    assert found["fit"] > 850 and min(found["easy"], found["hard"]) > 15
    # No two slots play the same task.
    assert len({each.task_id for each in tasks}) == 1000


def test_a_resumed_run_chooses_the_same_tasks() -> None:
    one = Curriculum(SETTINGS, listed(20))
    one.learn([returns(f"t{number}", 1.0) for number in range(10)] * 2)
    two = Curriculum(SETTINGS, listed(20), results=one.results)
    assert played(two, 300) == played(one, 300)
    assert one.results["t3"] == (1.0, 1.0)


def test_groups_without_returns_are_ignored_and_the_pass_reward_is_a_setting() -> None:
    half = CurriculumSettings(resting_share=0.1, window=1, pass_reward=0.5)
    curriculum = Curriculum(half, listed(4))
    curriculum.learn([returns("t0", 0.5, 0.7), returns("t1", 0.5, 0.4), returns("t2")])
    assert curriculum.results == {"t0": (1.0,), "t1": (0.5,)}
