"""Tests of the adapter for games of textarena, for one player and against an opponent."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from typing import Any

import pytest
from worlds.checks.missing_tools import need_package

from actors.environment.builtin.textarena_env import TextArenaEnvironment, TextArenaOptions
from actors.environment.protocol import Action, Observation, StepResult
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.types import Task


@pytest.fixture(autouse=True)
def _package() -> None:
    need_package("textarena", "textarena")


def _task(seed: int) -> Task:
    return Task(task_id="t", environment="textarena", seed=seed, data={})


def first_free(shown: str) -> str:
    """Return the move of the opponent: the first square that the board shows as free."""
    free: list[str] = re.findall(r"'(\[\d\])'", shown.rpartition("Available Moves:")[2])
    return free[0]


def any_free(shown: str) -> str:
    return random.choice(re.findall(r"'(\[\d\])'", shown.rpartition("Available Moves:")[2]))


def wrong(_shown: str) -> str:
    return "I pass"


HERE = "tests/environment/test_textarena_env.py"
GUESS: dict[str, Any] = {"game": "GuessTheNumber-v0", "kwargs": {"max_number": 4, "max_turns": 4}}


async def _guessed(environment: TextArenaEnvironment, seed: int) -> list[StepResult]:
    await environment.reset(_task(seed))
    results = []
    for number in range(1, 5):
        results.append(await environment.step(Action(text=f"<think>[9]</think>[{number}]")))
        if results[-1].terminated:
            break
    return results


async def test_a_game_for_one_is_played_to_its_end() -> None:
    environment = TextArenaEnvironment(TextArenaOptions(**GUESS, best_return=1.0))
    start = await environment.reset(_task(5))
    assert start.best_return == 1.0
    (prompt,) = start.messages
    assert prompt.content.startswith("You are Player 0.") and "between 1 and 4" in prompt.content
    results = await _guessed(environment, 5)
    assert [result.messages[0].content for result in results[:-1]] == [
        "The target number is higher."
    ] * (len(results) - 1)
    assert results[-1].reward == 1.0
    assert results[-1].reward_components == {"score": 1.0} and results[-1].messages == ()
    assert not any(result.is_malformed for result in results)
    await environment.close()


async def test_a_refused_move_is_answered_and_a_second_in_a_row_ends_the_game() -> None:
    environment = TextArenaEnvironment(TextArenaOptions(**GUESS))
    await environment.reset(_task(0))
    results = [await environment.step(Action(text=text)) for text in ("4", "[2]", "[9]", "")]
    assert "invalid move" in results[0].messages[0].content
    assert [result.is_malformed for result in results] == [True, False, True, True]
    assert [result.ended_by_malformed for result in results] == [False, False, False, True]
    # After malformed moves, the game's own reward for a near guess does not count.
    assert results[-1].reward == 0.0 and results[-1].reward_components == {"score": 0.0}


async def test_concurrent_games_depend_only_on_their_seeds() -> None:
    async def length(seed: int) -> int:
        return len(await _guessed(TextArenaEnvironment(TextArenaOptions(**GUESS)), seed))

    seeds = [*range(12), 2**31 + 1] * 2
    state = random.getstate()
    lengths = await asyncio.gather(*map(length, seeds))
    assert lengths[:13] == lengths[13:] and len(set(lengths)) > 2
    assert random.getstate() == state


async def _against(opponent: str, seed: int, *moves: str) -> tuple[Observation, list[StepResult]]:
    environment = TextArenaEnvironment(
        TextArenaOptions(game="TicTacToe-v0", opponent=f"{HERE}:{opponent}")
    )
    start = await environment.reset(_task(seed))
    results = [await environment.step(Action(text=move)) for move in moves]
    await environment.close()
    return start, results


async def test_games_that_draw_from_numpy_depend_on_the_seed() -> None:
    boards = [
        [
            (
                await TextArenaEnvironment(TextArenaOptions(game="Sokoban-v0")).reset(_task(seed))
            ).messages
            for seed in (1, 2)
        ]
        for _ in range(2)
    ]
    assert boards[0] == boards[1] and boards[0][0] != boards[0][1]


async def test_an_opponent_moves_after_each_move_of_the_policy() -> None:
    start, results = await _against("first_free", 0, "[3]", "[4]", "[5]")
    assert start.messages[0].content.startswith("You are Player 0 in Tic Tac Toe.")
    shown = results[0].messages[0].content
    assert "Player 1: [0]" in shown and "[3]" not in shown.partition("Player 1")[0].split("\n")
    assert results[-1].terminated and results[-1].reward == 1.0


async def test_the_policy_is_the_second_player_if_the_seed_is_odd() -> None:
    start, results = await _against("first_free", 1, "[4]", "[3]", "[5]")
    assert "Player 0: [0]" in start.messages[0].content
    # The opponent won by filling the first row.
    assert results[-1].terminated and results[-1].reward == -1.0


async def test_a_random_opponent_depends_on_the_seed() -> None:
    first, second = [
        [(await _against("any_free", seed, "[0]"))[1][0] for seed in (2, 4, 6, 8)] for _ in range(2)
    ]
    assert first == second
    assert len({result.messages[0].content for result in first if result.messages}) > 1


async def test_an_opponent_that_breaks_the_rules_loses() -> None:
    _, results = await _against("wrong", 0, "[0]")
    assert results[0].terminated and results[0].reward == 1.0
    assert not results[0].is_malformed


async def test_a_game_for_two_needs_an_opponent() -> None:
    with pytest.raises(AssertionError, match="players has to be 2"):
        await TextArenaEnvironment(TextArenaOptions(game="TicTacToe-v0")).reset(_task(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": "Nothing-v0"}, "game: got 'Nothing-v0', expected a name of its registry"),
        ({}, "options.game: missing"),
        ({"game": "TicTacToe-v0", "opponent": "first_free"}, "expected FILE.py:NAME"),
        ({"game": "TicTacToe-v0", "opponent": f"{HERE}:HERE"}, "of type str, expected a function"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadEnvironmentOptions, match=message):
        resolve("textarena", options)


def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=r"pip install 'rayloom\[textarena\]'"):
        resolve("textarena", {"game": "GuessTheNumber-v0"})
