"""Tests of mixtures, curricula and named evaluation sets in a configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.environment.settings import Sampling
from actors.environment.tasks import write_tasks
from actors.outcomes import Disposition
from actors.types import SESSION, Outcome, Task
from service.config.file import ConfigError, parse_config
from service.config.tasks import (
    first_observation,
    first_observations,
    held_out_tasks,
    open_sets,
    open_tasks,
)


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, **sections}


def mixture(**sections: Any) -> dict[str, Any]:
    easy = {"weight": 3, "tasks": {"environment": "guessing", "options": {"high": 3}}}
    hard = {"tasks": {"environment": "guessing", "evaluation_tasks": 2}}
    return {"model": {"tiny": {}}, "mixture": {"easy": easy, "hard": hard}, **sections}


def test_an_entry_of_a_mixture_has_its_own_limits_rules_and_sampling() -> None:
    asked = mixture(
        rollouts={
            "max_turns": 3,
            "outcomes": {"cancelled": {"disposition": "mask"}},
        }
    )
    asked["mixture"]["hard"] |= {
        "rollouts": {
            "max_turns": 5,
            "temperature": 0.7,
            "outcomes": {"max_turns": {"disposition": "mask"}},
        },
        "evaluation": {"samples": 4, "temperature": 1.0},
    }
    config = parse_config(asked, source="test")
    easy, hard = config.members.values()
    assert (easy.rollouts.max_turns, hard.rollouts.max_turns) == (3, 5)
    assert list(config.temperatures.values()) == [1.0, 0.7, 1.0, 1.0]
    found = {
        name: (policy.disposition(Outcome.MAX_TURNS), policy.disposition(Outcome.CANCELLED))
        for name, policy in config.policies.items()
    }
    clamped, mask = Disposition.TRAIN_CLAMPED, Disposition.MASK
    assert found["easy"] == found[SESSION] == (clamped, mask) and found["hard"] == (mask, mask)
    tasks = open_tasks(config)
    sets = open_sets(config, tasks)
    assert [(each.name, len(each.tasks)) for each in sets] == [("easy", 64), ("hard", 2)]
    assert [each.sampling.num_samples for each in sets] == [1, 4]
    assert [each.environment for each in held_out_tasks(config, tasks)] == ["easy"] * 64 + [
        "hard"
    ] * 2
    assert first_observations(config).keys() == {"easy", "hard"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": {"environment": "guessing"}}, "tasks and mixture are both set"),
        ({"evaluation": {"sets": {"a": {}}}}, r"evaluation\.sets is set with a mixture"),
        ({"mixture": {"a": {"weight": 0, "tasks": {"environment": "guessing"}}}}, "weight: got 0"),
        ({"mixture": {"a": {"weight": 1}}}, r"mixture\.a\.tasks: missing"),
        ({"mixture": {"a": {"tasks": {}}}}, r"mixture\.a: tasks\.environment is not set"),
        ({"mixture": {"a b": {"tasks": {"environment": "guessing"}}}}, "a b"),
        ({"mixture": {}}, "tasks.environment is not set and there is no mixture"),
        (
            {"mixture": {"session": {"tasks": {"environment": "guessing"}}}},
            "this name is taken by rollouts of clients",
        ),
        (
            {"mixture": {"a": {"tasks": {"environment": "session", "evaluation_tasks": 0}}}},
            r"mixture\.a\.tasks\.environment is session",
        ),
        (
            {"mixture": {"a": {"tasks": {"environment": "guessing", "subset": "main"}}}},
            r"mixture\.a: tasks\.subset is set without tasks\.dataset",
        ),
        (
            {"mixture": {
                name: {"weight": weight, "tasks": {"environment": "guessing"}}
                for name, weight in (("a", 1), ("b", 2000))
            }},
            r"mixture\.a\.weight is 1 of 2001, expected at least one in 1000",
        ),
        (
            {"mixture": {"a": {
                "tasks": {"environment": "guessing"}, "rollouts": {"max_tokens_per_turn": 4096},
            }}},
            r"mixture\.a: rollouts\.max_tokens_per_turn is 4096",
        ),
    ],
)  # fmt: skip
def test_a_contradictory_mixture_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(mixture(**changes), source="test")


def test_the_error_of_an_entry_that_cannot_begin_names_the_entry() -> None:
    asked = mixture()
    asked["mixture"]["hard"]["tasks"]["options"] = {"low": 9, "high": 3}
    with pytest.raises(ConfigError, match=r"mixture\.hard: tasks\.environment .*low: got 9"):
        first_observations(parse_config(asked, source="test"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resting_share": 0.1}, "the seed makes every task"),
        ({"resting_share": 0.1, "solved_from": 0.5, "hopeless_to": 0.5}, "hopeless_to is 0.5"),
        ({"resting_share": 2}, r"resting_share: got 2"),
    ],
)
def test_a_curriculum_without_a_choice_of_tasks_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(tree(curriculum=settings), source="test")
    if "solved_from" not in settings and settings["resting_share"] <= 1:
        assert parse_config(mixture(curriculum=settings), source="test").curriculum.is_on


def test_an_evaluation_set_without_tasks_is_refused_if_none_are_held_out() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.a names no tasks"):
        parse_config(
            {**tree(evaluation={"sets": {"a": {}}}), "tasks": {
                "environment": "guessing", "evaluation_tasks": 0,
            }},
            source="test",
        )  # fmt: skip


def test_evaluation_sets_are_opened_by_name_after_the_held_out_tasks(tmp_path: Path) -> None:
    file = tmp_path / "hard.jsonl"
    hard = [Task(task_id=f"h{number}", environment="guessing", seed=number) for number in range(5)]
    write_tasks(file, hard)
    sets = {
        "again": {"samples": 8, "temperature": 0.5, "tasks": 3},
        "hard": {"file": str(file), "tasks": 2, "pass_reward": 0.5},
        "all": {"file": str(file)},
    }
    config = parse_config(tree(evaluation={"sets": sets}), source="test")
    own, again, two, every = open_sets(config, open_tasks(config))
    assert [each.name for each in (own, again, two, every)] == ["", "again", "hard", "all"]
    assert len(own.tasks) == 64 and list(again.tasks) == list(own.tasks[:3])
    assert again.sampling == Sampling(num_samples=8, temperature=0.5, ks=(1, 2, 4, 8))
    assert {task.task_id for task in every.tasks} == {task.task_id for task in hard}
    assert list(two.tasks) == list(every.tasks[:2]) and two.sampling.pass_reward == 0.5
    assert config.task_places == {
        "evaluation.sets.hard.file": file, "evaluation.sets.all.file": file
    }  # fmt: skip
    write_tasks(file, [replace(hard[0], environment="calculator")])
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.hard\.file: it holds tasks of"):
        open_sets(config, open_tasks(config))
    file.unlink()
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.hard: task file .* cannot be read"):
        first_observation(config)
