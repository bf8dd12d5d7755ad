"""Adapter for reasoning-gym: families of procedural tasks, each with its own `score_answer`.

A task's data has `family` and either the item itself (`question`, `answer`, `metadata`, as `rayloom
tasks` writes them) or the numbers that generate it (`seed`, `index`). `config` has the family's
options. The optional package is imported only when it is first used.

The answer is the text of the last `<answer>…</answer>` or, without these tags, the whole visible
text. An empty answer, or one longer than `max_answer_chars`, scores 0 without a call of the scorer.
An answer also scores 0 if the scorer raises an exception for it, but not for the true answer. If a
task allows several attempts, the `score` of a turn is its gain over the best attempt so far.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Annotated, Any

from annotated_types import Ge

from actors.environment.protocol import (
    Action,
    Message,
    Observation,
    RewardError,
    Role,
    StepResult,
)
from actors.environment.tool_calls import visible_text
from actors.limits import STRICT, Positive
from actors.options import JsonObject
from actors.types import Task
from actors.user_code import describe

TRY_AGAIN = "Not correct. Try again."
_ANSWER_OPEN = "<answer>"
_ANSWER_CLOSE = "</answer>"

logger = logging.getLogger(__name__)

Item = Mapping[str, Any]


def import_reasoning_gym() -> ModuleType:
    """Import the optional package reasoning-gym. Raises: ImportError with the remedy."""
    try:
        _provide_pycosat()
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "environment reasoning_gym: the package reasoning-gym is not installed; "
            "install it with: pip install 'rayloom[reasoning-gym]'"
        ) from error
    return reasoning_gym


def _provide_pycosat() -> None:
    """Replace pycosat by python-sat if pycosat is not installed."""
    try:
        # The zebra puzzles import pycosat, which has no wheels and needs a C compiler.
        import pycosat  # noqa: F401
    except ImportError:
        from pysat.solvers import Solver

        # Both packages enumerate all solutions, so the puzzles are the same.
        def itersolve(clauses: Sequence[Sequence[int]]) -> Iterator[list[int]]:
            with Solver(bootstrap_with=clauses) as solver:
                yield from solver.enum_models()

        module = ModuleType("pycosat")
        vars(module)["itersolve"] = itersolve
        sys.modules["pycosat"] = module


def extract_answer(text: str) -> str:
    """Return the text of the last `<answer>…</answer>` of the visible text, else the visible text.

    Example: extract_answer("<answer>3</answer> no: <answer> 4 </answer>") -> "4"
    """
    shown = visible_text(text)
    end = shown.rfind(_ANSWER_CLOSE)
    start = shown.rfind(_ANSWER_OPEN, 0, max(end, 0))
    if start < 0:
        return shown
    return shown[start + len(_ANSWER_OPEN) : end].strip()


def _make_dataset(family: str, *, config: Mapping[str, Any], seed: int, size: int) -> Any:
    gym = import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        raise ValueError(
            f"reasoning_gym: unknown family, got {family!r}, expected one of "
            f"{', '.join(sorted(DATASETS))}"
        )
    try:
        return gym.create_dataset(family, **{**config, "seed": seed, "size": size})
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym: bad config for family {family}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymOptions:
    """Options of `reasoning_gym`: the prompt and the answers of a task."""

    __pydantic_config__ = STRICT

    max_attempts: Positive = 1
    """Maximum number of answers to one question."""
    instruction: str = ""
    """Text that is appended to the question."""
    max_answer_chars: Positive = 2_000
    """Maximum number of characters in an answer; a longer answer scores 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymData:
    """The data of a task for the environment `reasoning_gym`."""

    __pydantic_config__ = STRICT

    family: str
    """The family of tasks, such as chain_sum."""
    config: JsonObject = field(default_factory=dict)
    """Options of the family's generator."""
    index: Annotated[int, Ge(0)] = 0
    """Position of the item among the items that the seed generates, from 0."""
    seed: int | None = None
    """Seed of the items; null: the task's seed."""
    question: str | None = None
    """The question, instead of a generated one."""
    answer: Any = None
    """The answer to `question`."""
    metadata: Any = None
    """Data of `question` for the family's scorer."""


class ReasoningGymEnvironment:
    """An environment that asks one question and takes up to `max_attempts` answers."""

    data_schema = ReasoningGymData

    def __init__(self, options: ReasoningGymOptions) -> None:
        import_reasoning_gym()
        self._options = options
        self._scorer: Any = None
        self._item: Item = {}
        self._attempts_left = 0
        self._best_score = 0.0

    async def reset(self, task: Task) -> Observation:
        # A family may take long to make an item, and other episodes share the event loop.
        self._scorer, self._item = await asyncio.to_thread(_load, task)
        self._attempts_left = self._options.max_attempts
        self._best_score = 0.0
        parts = (self._item["question"], self._options.instruction)
        question = "\n".join(filter(None, parts))
        return Observation(messages=(Message(role=Role.USER, content=question),), best_return=1.0)

    async def step(self, action: Action) -> StepResult:
        answer = extract_answer(action.text)
        self._attempts_left -= 1

        async def score() -> StepResult:
            return await self._score(answer)

        try:
            return await score()
        except RewardError as error:
            raise RewardError(str(error), rescore=score) from error

    async def close(self) -> None:
        return None

    async def _score(self, answer: str) -> StepResult:
        score = 0.0
        if answer and len(answer) <= self._options.max_answer_chars:
            score = await asyncio.to_thread(_score, self._scorer, answer, self._item)
        return self._result(answer, score)

    def _result(self, answer: str, score: float) -> StepResult:
        gain = max(0.0, score - self._best_score)
        self._best_score += gain
        is_over = self._attempts_left <= 0 or score >= 1.0
        return StepResult(
            messages=() if is_over else (Message(role=Role.USER, content=TRY_AGAIN),),
            reward=gain,
            reward_components={"score": gain},
            terminated=is_over,
            answer=answer or None,
        )


class _ScorerFailed(Exception):
    """Raised if the scorer of a family raises an exception, which is `__cause__`."""


def _score(scorer: Any, answer: str, item: Item) -> float:
    try:
        return _ask_scorer(scorer, answer, item)
    except _ScorerFailed as failure:
        if not _scores_truth(scorer, item):
            raise RewardError(f"score_answer: {failure}") from failure
        logger.debug("an answer that its scorer cannot read scores 0", exc_info=failure)
        return 0.0


def _scores_truth(scorer: Any, item: Item) -> bool:
    """Return whether the scorer gives the item's true answer more than 0, without an error."""
    if item["answer"] is None:
        return False
    try:
        return _ask_scorer(scorer, item["answer"], item) > 0
    except _ScorerFailed:
        # `_score` reports its own failure; this one only shows that the scorer is at fault.
        return False


def _ask_scorer(scorer: Any, answer: str, item: Item) -> float:
    try:
        return float(scorer.score_answer(answer, entry=item))
    except Exception as error:
        # The scorers document no exceptions, but raise many kinds on odd answers.
        raise _ScorerFailed(describe(error)) from error


def _load(task: Task) -> tuple[Any, Item]:
    if "family" not in task.data:
        raise ValueError(
            f"reasoning_gym: task {task.task_id} names no family; expected data.family, such as "
            "'chain_sum'; write the task file with `rayloom tasks`"
        )
    data = ReasoningGymData(**task.data)
    if data.question is not None:
        item = {"question": data.question, "answer": data.answer, "metadata": data.metadata}
        return _scorer(data.family, json.dumps(data.config, sort_keys=True)), item
    seed = task.seed if data.seed is None else data.seed
    dataset = _make_dataset(data.family, config=data.config, seed=seed, size=data.index + 1)
    return dataset, dataset[data.index]


@lru_cache(maxsize=256)
def _scorer(family: str, config_json: str) -> Any:
    """Return a data set whose scorer can score answers to any item of the family."""
    return _make_dataset(family, config=json.loads(config_json), seed=0, size=1)


def generate_tasks(
    family: str, count: int, *, seed: int, options: Mapping[str, Any] | None = None
) -> list[Task]:
    """Make tasks of a reasoning-gym family, in the order of the family's generator.

    Args: count: number of tasks. seed: seed of the whole set. options: the family's configuration.
    Returns: tasks whose data contain the item: question, answer and metadata. If JSON would change
    an item or its score, the task's data contain the seed and the index of the item instead.
    Raises: ValueError for an unknown family or option; ImportError without the package.
    """
    if count < 1:
        raise ValueError(f"reasoning-gym tasks: got count={count}, expected 1 or more")
    config = dict(options or {})
    dataset = _make_dataset(family, config=config, seed=seed, size=count)
    return [
        Task(
            task_id=f"{family}-{seed}-{index}",
            environment="reasoning_gym",
            seed=(seed + index) % 2**31,
            data={"family": family, "config": config, **_stored(dataset, index, seed=seed)},
        )
        for index in range(count)
    ]


def _stored(dataset: Any, index: int, *, seed: int) -> dict[str, Any]:
    item = dataset[index]
    kept = {key: _without_tuples(item.get(key)) for key in ("question", "answer", "metadata")}
    try:
        survives = json.loads(json.dumps(kept, allow_nan=False)) == kept
    except (TypeError, ValueError):
        survives = False
    if survives and item["answer"] is not None:
        # Some scorers do not accept lists instead of tuples; their score of the truth shows it.
        stored_score, score = (
            dataset.score_answer(item["answer"], entry=entry) for entry in (kept, item)
        )
        survives = stored_score == score
    return kept if survives else {"seed": seed, "index": index}


def _without_tuples(value: Any) -> Any:
    """Return the value as it would be read from JSON, with lists instead of tuples."""
    if isinstance(value, list | tuple):
        return [_without_tuples(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_tuples(part) for key, part in value.items()}
    return value
