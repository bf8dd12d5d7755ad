"""Tests of the reasoning-gym adapter with several families of items and kinds of answers."""

import pytest

from actors.environment.builtin.reasoning_gym_env import (
    ReasoningGymEnvironment,
    ReasoningGymOptions,
    extract_answer,
    generate_tasks,
)
from actors.environment.protocol import Action, RewardError
from actors.environment.registry import resolve
from actors.types import Task

# Families whose metadata survive JSON, contain tuples, or need the item to be generated again.
FAMILIES = [
    "chain_sum",
    "basic_arithmetic",
    "countdown",
    "sokoban",
    "arc_1d",
    "word_ladder",
    "rearc",
]


def _task(family: str = "chain_sum", *, answer: str = "7", question: str = "3 + 4?") -> Task:
    data = {"family": family, "question": question, "answer": answer, "metadata": {}}
    return Task(task_id="t", environment="reasoning_gym", seed=1, data=data)


async def _score(task: Task, text: str, **options: object) -> float:
    environment = ReasoningGymEnvironment(ReasoningGymOptions(**options))  # type: ignore[arg-type]
    await environment.reset(task)
    result = await environment.step(Action(text=text))
    assert result.terminated and not result.truncated
    assert result.reward_components == {"score": result.reward}
    return result.reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("  7\n", "7"),
        ("<answer>1</answer> no <answer> 7 </answer>.", "7"),
        ("<think><answer>1</answer></think>7", "7"),
        ("<answer></answer>", ""),
        ("<answer>7", "<answer>7"),
        ("7</answer>", "7</answer>"),
        ("</answer>7<answer>", "</answer>7<answer>"),
        ("<answer>1<answer>7</answer>", "7"),
        ("<answer>1</answer><answer>7", "1"),
        ("", ""),
    ],
)
def test_the_answer_is_the_last_closed_element_or_the_whole_text(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_true_answer_scores_1_and_nonsense_less(family: str) -> None:
    for task in generate_tasks(family, 3, seed=5):
        environment = ReasoningGymEnvironment(ReasoningGymOptions())
        await environment.reset(task)
        truth = environment._item["answer"]
        assert await _score(task, f"<answer>{truth}</answer>") == 1.0
        assert await _score(task, "nonsense") < 1.0


async def test_an_item_generated_again_from_its_seed_is_the_stored_one() -> None:
    (stored,) = generate_tasks("chain_sum", 1, seed=5)
    data = {"family": "chain_sum", "seed": 5}
    again = Task(task_id="t", environment="reasoning_gym", seed=9, data=data)
    start = await ReasoningGymEnvironment(ReasoningGymOptions()).reset(again)
    assert start.messages[0].content == stored.data["question"]
    assert start.best_return == 1.0


@pytest.mark.parametrize("text", ["", "  ", "<answer> </answer>"])
async def test_an_empty_answer_scores_0_even_if_the_truth_is_empty(text: str) -> None:
    assert await _score(_task(), text) == 0.0
    assert await _score(_task(answer=""), text) == 0.0


async def test_a_too_long_answer_scores_0() -> None:
    assert await _score(_task(), "7" + " " * 10 + "7" * 3000) == 0.0
    assert await _score(_task(), "7", max_answer_chars=1) == 1.0


async def test_an_answer_that_the_scorer_cannot_read_scores_0() -> None:
    (task,) = generate_tasks("prime_factorization", 1, seed=5)
    for text in ("abc", "[", "1/0", "\x00"):
        assert await _score(task, text) == 0.0


async def test_a_scorer_that_fails_also_on_the_truth_gives_no_score() -> None:
    task = _task("prime_factorization", answer="not a factorization")
    environment = ReasoningGymEnvironment(ReasoningGymOptions())
    await environment.reset(task)
    with pytest.raises(RewardError) as caught:
        await environment.step(Action(text="abc"))
    assert caught.value.rescore is not None
    with pytest.raises(RewardError):
        await caught.value.rescore()


async def test_several_attempts_return_the_best_score() -> None:
    environment = ReasoningGymEnvironment(ReasoningGymOptions(max_attempts=3))
    await environment.reset(_task())
    first = await environment.step(Action(text="<answer>the 7 of it</answer>"))
    assert 0 < first.reward < 1 and not first.terminated
    assert first.messages[0].content == "Not correct. Try again."
    second = await environment.step(Action(text="nothing"))
    assert second.reward == 0 and not second.terminated
    assert (first.answer, second.answer) == ("the 7 of it", "nothing")
    third = await environment.step(Action(text="7"))
    assert third.terminated and first.reward + second.reward + third.reward == pytest.approx(1.0)


async def test_a_right_answer_ends_the_task_before_the_last_attempt() -> None:
    environment = ReasoningGymEnvironment(ReasoningGymOptions(max_attempts=3))
    await environment.reset(_task())
    assert (await environment.step(Action(text="7"))).terminated


async def test_the_instruction_follows_the_question() -> None:
    environment = ReasoningGymEnvironment(ReasoningGymOptions(instruction="Only the number."))
    start = await environment.reset(_task())
    assert start.messages[0].content == "3 + 4?\nOnly the number."


@pytest.mark.parametrize("data", [{}, {"family": "no_such"}, {"family": 3}])
async def test_a_task_without_a_known_family_is_refused(data: dict[str, object]) -> None:
    environment = ReasoningGymEnvironment(ReasoningGymOptions())
    with pytest.raises(ValueError, match="family"):
        await environment.reset(Task(task_id="t", environment="r", seed=0, data=data))


def test_reasoning_gym_is_registered() -> None:
    assert isinstance(resolve("reasoning_gym", {"max_attempts": 2})(), ReasoningGymEnvironment)
