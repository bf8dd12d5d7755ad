"""Tests of the guessing game: its rules, its best strategy, and malformed guesses."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environment.builtin.guessing import (
    GuessingEnvironment,
    GuessingOptions,
    best_win_rate,
    parse_guess,
)
from actors.environment.protocol import Action, StepResult
from actors.options import BadOptions, read
from actors.types import Task


def _task(seed: int) -> Task:
    return Task(task_id=f"t{seed}", environment="guessing", seed=seed)


async def _play(seed: int, *texts: str, **options: Any) -> list[StepResult]:
    environment = GuessingEnvironment(GuessingOptions(**options))
    await environment.reset(_task(seed))
    return [await environment.step(Action(text=text)) for text in texts]


async def _secret(seed: int) -> int:
    for guess in range(1, 8):
        (result,) = await _play(seed, str(guess))
        if result.reward == 1.0:
            return guess
    raise AssertionError("no number of the range is the secret")


async def _binary_search(seed: int, *, low: int, high: int, max_guesses: int) -> float:
    environment = GuessingEnvironment(GuessingOptions(low=low, high=high, max_guesses=max_guesses))
    await environment.reset(_task(seed))
    total = 0.0
    while True:
        guess = (low + high) // 2
        result = await environment.step(Action(text=str(guess)))
        total += result.reward
        if result.terminated:
            return total
        if result.messages[0].content == "higher":
            low = guess + 1
        else:
            high = guess - 1


async def test_the_first_message_names_the_range_and_the_number_of_guesses() -> None:
    start = await GuessingEnvironment(GuessingOptions(low=1, high=7, max_guesses=3)).reset(_task(0))
    assert start.messages[0].content == "Guess my number from 1 to 7. You have 3 guesses."
    assert start.best_return == 1.0
    assert start.tools == ()


async def test_the_right_guess_is_rewarded_with_1_and_ends_the_game() -> None:
    secret = await _secret(5)
    (result,) = await _play(5, f" {secret}\n")
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert result.reward_components == {"hit": 1.0} and result.answer == str(secret)


async def test_the_hint_points_from_the_guess_to_the_secret() -> None:
    secret = await _secret(5)
    (first,) = await _play(5, str(secret - 1)) if secret > 1 else await _play(5, str(secret + 1))
    assert first.messages[0].content == ("higher" if secret > 1 else "lower")


async def test_a_guess_that_the_hints_rule_out_has_the_cost_of_the_option() -> None:
    secret = await _secret(5)
    assert 2 <= secret <= 6
    # The first guess rules out itself and all lower numbers, the third itself and all higher.
    below, above = str(secret - 1), str(secret + 1)
    texts = (below, below, above, "7", "what?", "99", str(secret))
    results = await _play(5, *texts, max_guesses=9, ruled_out_cost=0.25)
    assert [result.reward for result in results] == [0, -0.25, 0, -0.25, 0, 0, 1]
    assert results[1].reward_components == {"hit": 0.0, "ruled_out": -0.25}
    assert results[-1].terminated
    free = await _play(5, *texts, max_guesses=9)
    assert sum(result.reward for result in free) == 1.0
    assert free[1].reward_components == {"hit": 0.0}


async def test_a_reset_forgets_the_ruled_out_numbers() -> None:
    environment = GuessingEnvironment(GuessingOptions(max_guesses=2, ruled_out_cost=0.5))
    for _ in range(2):
        await environment.reset(_task(5))
        secret = await _secret(5)
        wrong = str(secret - 1)
        rewards = [(await environment.step(Action(text=wrong))).reward for _ in range(2)]
        assert rewards == [0.0, -0.5]


async def test_running_out_of_guesses_is_a_lost_game_not_a_truncation() -> None:
    secret = await _secret(1)
    wrong = str(secret % 7 + 1)
    results = await _play(1, wrong, wrong, wrong)
    assert [result.terminated for result in results] == [False, False, True]
    assert not any(result.truncated or result.reward for result in results)
    assert results[-1].messages == ()


async def test_binary_search_always_wins_the_default_game() -> None:
    wins = [await _binary_search(seed, low=1, high=7, max_guesses=3) for seed in range(100)]
    assert wins == [1.0] * 100


async def test_binary_search_wins_as_often_as_the_formula_says() -> None:
    wins = [await _binary_search(seed, low=1, high=10, max_guesses=2) for seed in range(3000)]
    assert best_win_rate(10, max_guesses=2) == 0.3
    assert abs(sum(wins) / len(wins) - 0.3) < 0.03


@pytest.mark.parametrize(
    ("num_numbers", "max_guesses", "rate"),
    [(7, 3, 1.0), (8, 3, 0.875), (1, 1, 1.0), (100, 1, 0.01)],
)
def test_best_win_rate_by_hand(num_numbers: int, max_guesses: int, rate: float) -> None:
    assert best_win_rate(num_numbers, max_guesses=max_guesses) == rate


@settings(deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_the_same_seed_gives_the_same_secret(seed: int) -> None:
    async def both() -> tuple[list[StepResult], list[StepResult]]:
        return await _play(seed, "4", "2", "6"), await _play(seed, "4", "2", "6")

    first, second = asyncio.run(both())
    assert first == second


async def test_secrets_are_distributed_evenly() -> None:
    counts = Counter([await _secret(seed) for seed in range(700)])
    assert set(counts) == set(range(1, 8))
    assert min(counts.values()) > 60


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "higher",
        "4 or 5",
        "0",
        "8",
        "-3",
        "3.5",
        "\u0663",
        "9" * 5000,
        "1e3",
        "\x00",
        "four",
    ],
)
async def test_a_malformed_guess_is_answered_and_costs_a_guess(text: str) -> None:
    (result,) = await _play(3, text)
    assert result.is_malformed and not result.terminated
    assert result.reward == 0.0 and result.answer is None
    assert result.messages[0].content == "Say one number from 1 to 7."
    last = (await _play(3, text, text, text))[-1]
    assert last.terminated and not last.ended_by_malformed


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("4", 4),
        (" 4.\n", 4),
        ("The answer is 4!", 4),
        ("<think>1 or 2?</think>\n5", 5),
        ("-2", -2),
        ("2.", 2),
        ("2.5", None),
        ("999999999", 999999999),
        ("1000000000", None),
    ],
)
def test_a_guess_is_parsed_from_text(text: str, guess: int | None) -> None:
    assert parse_guess(text) == guess


@settings(deadline=None)
@given(text=st.text())
def test_parsing_a_guess_never_raises(text: str) -> None:
    guess = parse_guess(text)
    assert guess is None or abs(guess) < 10**9


@pytest.mark.parametrize(
    "options",
    [
        {"low": 5, "high": 4},
        {"max_guesses": 0},
        {"low": -1},
        {"ruled_out_cost": -0.1},
        {"ruled_out_cost": float("nan")},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadOptions, match="expected"):
        read(GuessingOptions, options, where="options")
