"""Call a user's own functions in the child process of a trial.

`trial.py` starts the child. The child imports the functions, begins the first task of each
environment and calls every function twice: with the reference answers of two tasks, or with made-up
answers if the data have none.
"""

from __future__ import annotations

import asyncio
import difflib
import faulthandler
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from actors.environment import protocol
from actors.environment.builtin.single_turn import SingleTurnEnvironment
from actors.environment.group_scoring import checked_results
from actors.environment.judge import Judge
from actors.environment.protocol import (
    Action,
    Environment,
    Observation,
    RewardError,
    StepResult,
    reward_problem,
)
from actors.environment.reward_functions import EXTRAS, NoScore, RewardFunction
from actors.environment.settings import GROUP_REWARD
from actors.environment.task_data import reference_of
from actors.environment.tasks import TaskSource
from actors.environment.user_names import HIDES, helpers_from_elsewhere, hides_arguments
from actors.environment.worker_process import die_with
from actors.types import Task
from actors.user_code import closing, describe, location, root_cause, type_of
from service.config import tasks
from service.config.file import ConfigError
from service.config.tree import Config
from service.config.trial import SCORE_GROUP, STEP, Call, Fate, Request, is_own, load_shadow

MADE_UP = ("I do not know.", "1")
_MAX_LOOKED_AT = 64
_OTHER_GAME = (
    "reset of {} began the same task with different messages; expected equal ones, because the "
    "members of a group play one task and are compared; derive every random choice from "
    "task.seed, and keep no state in the class or the module"
)
# Names of a number that is probably the total of the other named numbers.
_TOTALS = ("overall", "reward", "total", "total_reward", "total_score", "final_score")
# Similarity, by difflib, of two names of which one is probably a misspelling of the other.
_ALIKE = 0.8
# Exceptions that a call raises for every answer.
_IN_LOOP = re.compile("cannot be called from a running event loop|loop is( already)? running")
_OTHER_ARGUMENTS = re.compile("unexpected keyword argument|missing .* argument|multiple values for")
_BROKEN = frozenset({"ImportError", "ModuleNotFoundError", "NameError", "SyntaxError"})


def main() -> None:
    """Execute the request from standard input; send messages to the file descriptor in argv[1]."""
    with suppress(AttributeError, OSError):
        # On Linux the kernel kills this child when the command that started it dies.
        die_with(os.getppid(), signal.SIGKILL)
    said = Connection(int(sys.argv[1]), readable=False)
    request: Request = pickle.load(sys.stdin.buffer)
    sys.path[:] = request.path
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    tasks.RESET_LIMIT_S, tasks.BLOCKED_S = request.reset_limit_s, request.blocked_s
    # faulthandler writes the frames even if the user's code holds the interpreter's lock.
    faulthandler.register(signal.SIGUSR1, file=request.dump, all_threads=False)
    try:
        _try_all(request, said)
        said.send(("done", None))
    except ConfigError as error:
        said.send(("refused", str(error)))
    except Exception as error:  # noqa: BLE001  # a defect of ours, or of a library that reads data
        root = root_cause(error)
        text = f"{describe(root)} ({location(root)})"
        said.send(("raised", (text, traceback.format_exc())))
    except BaseException:  # noqa: BLE001  # os._exit ends the process, not the interpreter
        traceback.print_exc()
        os._exit(1)
    # The interpreter would wait for the threads that the user's code has started.
    os._exit(0)


def _try_all(request: Request, said: Connection) -> None:
    """Import the environments, begin their first tasks and call the user's functions.

    If a call ended an earlier child process, make only the remaining calls.
    """
    trial = request.trial
    for name, key in trial.others.items():
        said.send(("doing", (key, f"import {name}", request.import_limit_s)))
        load_shadow(name, key=key)
        _warn_of_helpers([name], said)
    for name, member in request.config.members.items():
        part = f"mixture.{name}: " if request.config.mixture else ""
        what = f"{part}tasks.environment"
        try:
            names = tasks.own_names(member.tasks)
            own = ", ".join(names) or member.tasks.environment
            said.send(("doing", (what, f"import {own}", request.import_limit_s)))
            tasks.maker(member)
            _warn_of_helpers(names, said)
            # The parent applies this limit. The limits in this child are shorter, so that they pass
            # first: their errors name the place.
            limit_s = 2 * tasks.RESET_LIMIT_S + 2 * tasks.BLOCKED_S
            if trial.begins and name not in request.begun:
                said.send(("doing", (what, f"begin the first task of {name}", limit_s)))
                _send_begun(name, tasks.first_observation(member), said)
            if trial.functions and is_own(member.tasks):
                said.send(("doing", (what, f"begin the first task of {name}", limit_s)))
                asyncio.run(_call_all(name, member, request, said, what=what))
        except ConfigError as error:
            raise ConfigError(f"{part}{error}") from error


def _warn_of_helpers(names: Sequence[str], said: Connection) -> None:
    for name in names:
        for told in helpers_from_elsewhere(name):
            said.send(("told", told))


def _send_begun(name: str, observation: Observation, said: Connection) -> None:
    try:
        said.send(("begun", {name: observation}))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"tasks.environment: reset of {name} returned an Observation that cannot be copied to "
            f"another process ({describe(error)}); expected classes of a module, and neither "
            "lambdas nor locks; correct what it returns"
        ) from error


async def _call_all(
    name: str, config: Config, request: Request, said: Connection, *, what: str
) -> None:
    """Try an environment's functions on two sample answers, and send each result to the parent.

    what: the setting to name in messages to the user, such as "tasks.environment".
    """
    source = tasks.open_tasks(config)
    task = source.task(0)
    answers = _answers(source, task, request.trial.answer)
    environment = tasks.maker(config)()
    begun = await environment.reset(task.own_copy())
    # A group function compares answers, so its score of a single answer means nothing.
    of_groups: Sequence[RewardFunction] = ()
    if isinstance(environment, SingleTurnEnvironment):
        of_groups = environment.group_functions
        for each in environment.functions:
            for argument, column in _misspelt(each, task.data):
                told = (
                    f"reward function {each.name}: the data have no column {argument}, so that "
                    f"the argument keeps its default; did you mean the column {column}?"
                )
                said.send(("told", told))
        functions = [
            each
            for each in environment.functions
            if request.trial.judges or not isinstance(each, Judge)
        ]
        wanted: list[tuple[RewardFunction | Judge | None, str]]
        wanted = [(each, f"reward function {each.name}") for each in functions]
    else:
        wanted = [(None, f"{STEP}{config.tasks.environment}")]
        if config.tasks.options.get(GROUP_REWARD):
            wanted.append((None, f"{SCORE_GROUP}{config.tasks.environment}"))
    planned = [
        (
            function,
            Call(
                environment=name,
                function=label,
                number=number,
                answer=shown,
                is_reference=is_reference and function not in of_groups,
            ),
            text,
        )
        for function, label in wanted
        for number, (text, shown, is_reference) in enumerate(answers)
    ]
    planned = [each for each in planned if each[1].key not in request.made]
    for position, (function, call, text) in enumerate(planned, start=1):
        said.send(("calling", (call, position == len(planned))))
        if function is not None:
            assert isinstance(environment, SingleTurnEnvironment)
            fate, words, value = await _scored(environment, function, text, said)
        elif call.function.startswith(STEP):
            is_copied = not config.rollouts.inline
            made = tasks.maker(config)()
            again, found = await _stepped(made, task, text, is_copied=is_copied)
            fate, words, value = found
            if again is not None and again.messages != begun.messages:
                said.send(("told", _OTHER_GAME.format(config.tasks.environment)))
        else:
            fate, words, value = await _scored_together(tasks.maker(config)(), task, text)
        said.send(("called", replace(call, fate=fate, text=words, value=value)))
    said.send(("doing", (what, f"close the first task of {name}", tasks.RESET_LIMIT_S)))
    with suppress(Exception):
        await environment.close()


def _misspelt(
    function: RewardFunction | Judge, columns: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield each argument whose name is probably a misspelt column, and this column.

    Example: `def score(completion, anwser=None)` and a column answer yield ("anwser", "answer").
    """
    if not isinstance(function, RewardFunction) or function.named is None:
        return
    lists = {f"{name}s" for name in columns} if function.takes_lists else set()
    others = {name.lower(): name for name in columns if name not in function.named}
    # These arguments would always get their default value.
    unset = function.named - function.required - {*columns, *EXTRAS, *lists}
    for argument in sorted(unset):
        for name in difflib.get_close_matches(argument.lower(), others, n=1, cutoff=_ALIKE):
            yield argument, others[name]


def _answers(source: TaskSource, task: Task, column: str | None) -> list[tuple[str, str, bool]]:
    """Return the reference answers of the task and of another task, or made-up answers instead.

    column: the column with the reference answers; None to choose one.
    Returns: for each answer its text, a description, and whether it is a reference answer.
    Raises: ConfigError if `column` is given but gives no answer for the task.
    """
    found = reference_of(task, column)
    if found is None and column is not None:
        raise ConfigError(
            f"--answer {column}: got the columns {', '.join(sorted(task.data))}, expected one of "
            "them, of texts or numbers; correct it"
        )
    if found is None:
        return [(text, f"the made-up answer {text!r}", False) for text in MADE_UP]
    others = (
        reference_of(source.task(index), column)
        for index in range(1, _MAX_LOOKED_AT if source.comes_again(task) else 1)
    )
    other = next((each for each in others if each not in (None, found)), None)
    own = (found, f"the reference answer of {task.task_id}", True)
    if other is None:
        return [own, (MADE_UP[0], f"the made-up answer {MADE_UP[0]!r}", False)]
    return [own, (other, "the reference answer of another task", True)]


async def _scored(
    environment: SingleTurnEnvironment,
    function: RewardFunction | Judge,
    text: str,
    said: Connection,
) -> tuple[Fate, str, float]:
    """Score an answer with a function; return `Call.fate`, `Call.text` and `Call.value`.

    Send a warning if one of several named numbers is probably the total of the others.
    """
    try:
        score = await environment.score_by(function, text)
    except NoScore as error:
        words = str(error).removeprefix(f"reward function {function.name} gave ")
        return "no number", words, 0.0
    except BaseException as error:  # noqa: BLE001  # the user's code may raise any type
        return _fate_of(error, function)
    if score.value is None:
        return "silent", "", 0.0
    # The score is the sum of the numbers. Example: {"style": 1, "content": 2, "total": 3}.
    total = next((name for name in score.parts if name.lower() in _TOTALS), None)
    if total is not None and len(score.parts) > 1 and "score" not in score.parts:
        told = (
            f"reward function {function.name}: the reward is the sum of {', '.join(score.parts)}, "
            f"and {total} is probably their total already; expected numbers to add up, or the "
            f"total under the name score; return {total} as score"
        )
        said.send(("told", told))
    return "scored", "", function.weight * score.value


async def _stepped(
    environment: Environment, task: Task, text: str, *, is_copied: bool
) -> tuple[Observation | None, tuple[Fate, str, float]]:
    """Try an environment's `reset`, and then its `step` with the answer `text`.

    is_copied: whether the result must be picklable, as in a run with worker processes.
    Returns: the observation of `reset` (None if `reset` raised); and the values of `Call.fate`,
    `Call.text` and `Call.value` (always 0.0).
    """
    begun = None
    try:
        async with closing(environment.close):
            begun = await environment.reset(task.own_copy())
            found = await environment.step(Action(text=text))
    except BaseException as error:  # noqa: BLE001  # the user's code may raise any type
        return begun, _fate_of(error)
    return begun, _fate_of_step(found, is_copied=is_copied)


def _fate_of_step(found: object, *, is_copied: bool) -> tuple[Fate, str, float]:
    if not isinstance(found, StepResult):
        words = f"{type_of(found)}, expected a rayloom.StepResult"
        return "no number", words, 0.0
    if (problem := reward_problem(found)) is not None:
        return "no number", f"({problem})", 0.0
    try:
        if is_copied:
            pickle.dumps(found)
    except Exception as error:  # noqa: BLE001  # objects may raise any type
        words = f"a result that cannot be copied to another process ({describe(error)})"
        return "no number", words, 0.0
    return "scored", "", 0.0


async def _scored_together(environment: Any, task: Task, text: str) -> tuple[Fate, str, float]:
    """Call an environment's `score_group` with two equal answers.

    Returns: the values of `Call.fate`, `Call.text` and `Call.value` (always 0.0).
    """
    try:
        async with closing(environment.close):
            found = await environment.score_group(task.own_copy(), [text, text])
    except BaseException as error:  # noqa: BLE001  # the user's code may raise any type
        return _fate_of(error)
    try:
        result = checked_results(found, num_answers=2)[0]
    except RewardError as error:
        return "no number", f"({error})", 0.0
    return ("silent", "", 0.0) if result is None else ("scored", "", 0.0)


def _fate_of(
    error: BaseException, function: RewardFunction | Judge | None = None
) -> tuple[Fate, str, float]:
    root = root_cause(error)
    at = location(root)
    is_misused = at.startswith(f"{protocol.__file__}:")
    problem = describe(root)
    if is_misused:
        at = location(root, outside=protocol.CHECKING_FILES)
    words = f"{problem}{f' ({at})' if at else ''}"
    # Compare names: an error from another process has no type to compare.
    match problem.partition(":")[0]:
        case "SystemExit":
            return "ended", f"({words})", 0.0
        case "WorkerLost":
            return "ended", f"({root})", 0.0
        case "CallTimedOut":
            return "hung", f"({words})", 0.0
        case "RuntimeError" if _IN_LOOP.search(problem):
            return "broken", f"{words} (await the coroutine in place of running it)", 0.0
        case "TypeError" if (
            isinstance(function, RewardFunction)
            and hides_arguments(function.function)
            and _OTHER_ARGUMENTS.search(problem)
        ):
            return "broken", f"{words} ({HIDES})", 0.0
        case name:
            # A value that one of our types refuses, such as a number for terminated.
            is_broken = is_misused or name in _BROKEN
            return ("broken" if is_broken else "raised"), words, 0.0
