"""Find the files that answer a question about a repository, with tools to list, search and read.

A task's data: `question`, `repository` (a directory or an archive, by a path relative to the option
`root`) and `files`, the true paths within the repository. The policy answers by a call of the tool
`answer`, which has a list of paths and ends the task. The reward is the F1 over the files
(`grade_files`); `precision`, `recall` and `num_calls` (the number of executed searches) are only
reported.

A turn is malformed if

- it has no call or too many calls,
- a call cannot be read, or has an argument that is wrong for any repository (a broken pattern),
- a call of `answer` has no list of paths, or is not the only call.

A malformed turn costs `malformed_penalty` (component `malformed`) and is answered with one sentence
for each fault. More than `max_malformed` such turns in a row end the task. A call beyond
`max_calls` is not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from annotated_types import MaxLen, MinLen

from actors.environment.plugins.code_search.tools import (
    ANSWER,
    MAX_ANSWER_FILES,
    SEARCH_TOOLS,
    CodeTools,
    ToolSettings,
    read_answer,
)
from actors.environment.protocol import (
    Action,
    MalformedCall,
    Message,
    Observation,
    Role,
    StepResult,
    ToolCall,
)
from actors.environment.settings import rollout_settings
from actors.environment.task_data import DataCheck
from actors.environment.tool_turns import ERROR, Penalty, ToolTurns
from actors.limits import OPEN, STRICT, Natural, Positive
from actors.options import schema_of
from actors.types import Task

QUESTION = "Which files of the repository is this about?\n{question}\nSearch, then call answer."
NO_CALL = "Call a tool, or call answer with the files that you found."
BAD_ANSWER = f"files must be a list of at most {MAX_ANSWER_FILES} paths."
ANSWER_ALONE = "Call answer once, and nothing beside it."
TOO_MANY_AT_ONCE = "At most {most} calls in a turn."
NO_CALLS_LEFT = "No calls are left. Call answer."
MAX_QUESTION_CHARS = 20_000
MAX_TRUE_FILES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSearchOptions(ToolSettings):
    """Options of `code_search`: the repositories, the tools and the bounds of an episode."""

    __pydantic_config__ = STRICT

    max_calls: Positive = 24
    """Maximum number of calls of the search tools in an episode."""
    max_malformed: Natural = 3
    """Largest number of malformed turns in a row; one more ends the episode."""
    malformed_penalty: Penalty = 0.1
    """Subtracted from the reward for each malformed turn, as the component malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSearchData:
    """The data of a task for the environment `code_search`; other entries are allowed."""

    __pydantic_config__ = OPEN

    question: Annotated[str, MinLen(1), MaxLen(MAX_QUESTION_CHARS)]
    """The question about the repository."""
    repository: Annotated[str, MinLen(1)]
    """A directory or an archive, by its path below the option root."""
    files: Annotated[Sequence[Annotated[str, MinLen(1)]], MaxLen(MAX_TRUE_FILES)]
    """The paths within the repository that are the answer."""


_CHECK = DataCheck(schema_of(CodeSearchData))


class CodeSearchEnvironment:
    """An environment that asks one question about a repository."""

    data_schema = CodeSearchData

    def __init__(self, options: CodeSearchOptions) -> None:
        # Environments with equal tool settings share processes and repositories.
        self._settings = ToolSettings(
            **{each.name: getattr(options, each.name) for each in fields(ToolSettings)}
        )
        self._turns = ToolTurns(
            self._call,
            at_most=options.max_malformed,
            penalty=options.malformed_penalty,
            max_calls=options.max_calls,
            no_calls_left=NO_CALLS_LEFT,
        )
        self._tools: CodeTools | None = None
        self._directory = ""
        self._truth: tuple[str, ...] = ()

    async def reset(self, task: Task) -> Observation:
        data = read_task(task)
        self._truth = tuple(data.files)
        self._turns.begin_episode()
        if self._tools is None:
            self._tools = CodeTools(self._settings)
        self._directory = await self._tools.open(data.repository)
        missing = await self._tools.missing_files(self._directory, self._truth)
        if missing:
            raise ValueError(
                f"code_search: task {task.task_id}: data.files: {missing[:3]} "
                f"({len(missing)} in all) are not in {data.repository!r}; expected the paths of "
                "its files; correct the task"
            )
        asked = Message(role=Role.USER, content=QUESTION.format(question=data.question))
        return Observation(
            messages=(asked,),
            tools=(*SEARCH_TOOLS, ANSWER),
            best_return=1.0 if self._truth else 0.0,
        )

    async def step(self, action: Action) -> StepResult:
        calls = action.calls
        if not calls:
            return self._turns.malformed_result((Message(role=Role.USER, content=NO_CALL),))
        answers = [
            call for call in calls if isinstance(call, ToolCall) and call.name == ANSWER.name
        ]
        most = rollout_settings.get().max_calls_per_turn
        if len(calls) > most:
            error = ERROR.format(message=TOO_MANY_AT_ONCE.format(most=most))
            return self._turns.malformed_result((_tool_message(error, calls[0]),))
        if answers and len(calls) > 1:
            error = ERROR.format(message=ANSWER_ALONE)
            return self._turns.malformed_result(tuple(_tool_message(error, call) for call in calls))
        return self._graded(answers[0]) if answers else await self._turns.result_of(calls)

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.aclose()

    def _graded(self, call: ToolCall) -> StepResult:
        answered = read_answer(call.arguments)
        if answered is None:
            error = ERROR.format(message=BAD_ANSWER)
            return self._turns.malformed_result((_tool_message(error, call),))
        grade = grade_files(answered, self._truth)
        return StepResult(
            reward=grade["f1"],
            reward_components={**grade, "num_calls": float(self._turns.num_calls)},
            terminated=True,
            answer="\n".join(sorted({canonical_path(path) for path in answered})),
        )

    async def _call(self, call: ToolCall) -> str:
        assert self._tools is not None
        return await self._tools.call(self._directory, call.name, call.arguments)


def read_task(task: Task) -> CodeSearchData:
    """Return the data of a task. Raises: ValueError if they do not fit `CodeSearchData`."""
    what = f"code_search: task {task.task_id}: "
    if problem := _CHECK.problem(task.data):
        raise ValueError(f"{what}{problem}")
    if not all(map(is_file_path, task.data["files"])):
        raise ValueError(
            f"{what}data.files: got an entry that is not the path of a file; expected paths "
            "relative to the repository, without .."
        )
    return CodeSearchData(**{each.name: task.data[each.name] for each in fields(CodeSearchData)})


def _tool_message(content: str, call: ToolCall | MalformedCall) -> Message:
    if isinstance(call, MalformedCall):
        return Message(role=Role.TOOL, content=content)
    return Message(role=Role.TOOL, content=content, name=call.name, tool_call_id=call.id)


# Score an answer's files against the true ones, for the environment and external agents.
#
# These are the choices: a path counts once, however often it is named; `./a` is `a`, and `a//b` is
# `a/b`; upper and lower case differ. Everything else that is not the path of a true file is wrong,
# such as a directory, a missing file, an absolute path or a path with `..`. Every score is 0 if
# there are no true files, and if the answer is empty.
def canonical_path(path: str) -> str:
    """Return the canonical spelling of a file's path within a repository.

    A text that is not such a path is returned unchanged.

    Example: canonical_path("./a//b.py") -> "a/b.py"; canonical_path("../a") -> "../a"
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    is_file_path = parts and ".." not in parts and not path.startswith("/")
    if not is_file_path or path.endswith(("/", "/.")):
        return path
    return "/".join(parts)


def is_file_path(path: str) -> bool:
    """Return whether a text can name a file within a repository, in any spelling."""
    canonical = canonical_path(path)
    is_relative = bool(canonical) and not canonical.startswith("/")
    return is_relative and not set(canonical.split("/")) & {"", ".", ".."}


def grade_files(answered: Iterable[str], truth: Iterable[str]) -> dict[str, float]:
    """Score an answer from 0 to 1: precision, recall, and f1, their harmonic mean.

    f1 = 2 * hits / (number of answered files + number of true files).

    Example: grade_files(["a", "./a", "b"], ["a", "c", "d"]) -> precision 1/2, recall 1/3, f1 2/5
    """
    named = {canonical_path(path) for path in answered}
    true = {canonical_path(path) for path in truth}
    hits = len(named & true)
    if not hits:
        return {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    return {
        "precision": hits / len(named),
        "recall": hits / len(true),
        "f1": 2 * hits / (len(named) + len(true)),
    }
