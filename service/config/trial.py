"""Try a user's own functions before a run starts, in a child process.

The child imports the functions, begins the first task of each environment and calls every function
twice: with the reference answers of two tasks, or with made-up answers if the data have none. If a
call ends the child or does not return, another child makes the remaining calls. A function that
can never work is refused; every other finding is a warning (`docs/reward-functions.md`, "Tried
before the start"). Called by `service.config.preflight`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import IO, Any

from actors.environment.builtin.single_turn import SINGLE_TURN, SingleTurnEnvironment
from actors.environment.builtin.tools import TOOLS
from actors.environment.group_scoring import checked_results
from actors.environment.judge import JudgeReward
from actors.environment.protocol import (
    Action,
    Environment,
    Observation,
    RewardError,
    StepResult,
    reward_problem,
)
from actors.environment.reward_functions import (
    EXTRAS,
    BadRewardFunction,
    NoScore,
    RewardFunction,
    load_functions,
    load_group_functions,
)
from actors.environment.settings import GROUP_REWARD
from actors.environment.task_data import reference_of
from actors.environment.tasks import TaskSource
from actors.environment.user_names import HIDES, hides_arguments
from actors.environment.worker_process import die_with
from actors.types import Task
from actors.user_code import closing, describe, location, root_cause
from service.config import tasks
from service.config.file import ConfigError
from service.config.tree import Config, TasksSettings

CALLS_LIMIT_S = 10.0
"""Time limit for all calls of a preflight together, in seconds."""
SHARE_OF_ONE = 0.8
"""Share of the remaining time that a call may take; the last call may take all of it."""
IMPORT_LIMIT_S = 60.0
"""Time limit for an import, in seconds."""
MADE_UP = ("I do not know.", "1")
STEP, SCORE_GROUP = "step of ", "score_group of "
_MAX_LOOKED_AT = 64
_STDERR_BYTES = 500
_TOO_SHORT_S = 0.05
_LOOK_S = 0.1
_DUMP_S = 1.0
_DUMP_BYTES = 1 << 16
# Exceptions that a call raises whatever the answer is.
_IN_LOOP = re.compile("cannot be called from a running event loop|loop is( already)? running")
_OTHER_ARGUMENTS = re.compile("unexpected keyword argument|missing .* argument|multiple values for")
_BROKEN = frozenset({"ImportError", "ModuleNotFoundError", "NameError", "SyntaxError"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Selection of the user's own code that is imported and called before the start."""

    begins: bool = True
    """Whether the first task of each environment is begun."""
    functions: bool = True
    """Whether functions are called."""
    judges: bool = False
    """Whether judges are called too, over the network."""
    answer: str | None = None
    """Column with the reference answer; None: see `task_data.reference_of`."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Reward functions that are only imported, each with the setting or option that names it."""


class Fate(StrEnum):
    """The way in which a call ended. The values are parts of sentences."""

    SCORED = "gave a number"
    SILENT = "gave None"
    RAISED = "raised"
    BROKEN = "cannot run:"
    NO_NUMBER = "gave"
    ENDED = "ended its process"
    HUNG = "did not end"


_FATAL = frozenset({Fate.BROKEN, Fate.NO_NUMBER, Fate.ENDED, Fate.HUNG})
_REMEDIES = {
    Fate.BROKEN: "fix it",
    Fate.NO_NUMBER: "correct what it returns",
    Fate.ENDED: "have it raise an exception instead, or return",
    Fate.HUNG: "give it a limit of its own; if it needs longer, start with --no-call",
}
_REMEDY_OF_METHOD = "return what docs/environments.md describes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a user's function, before or after it was made."""

    environment: str
    function: str
    number: int
    """Number of the answer: 0 or 1."""
    answer: str
    """Description of the answer, for messages."""
    is_reference: bool = False
    fate: Fate | None = None
    """How the call ended; None if it was not made."""
    text: str = ""
    """Description of what the function raised or returned, for messages."""
    value: float = 0.0
    """Weighted score of the answer."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.environment, self.function, self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The input of the child process: configuration, limits, and the calls made before."""

    config: Config
    trial: Trial
    import_limit_s: float
    reset_limit_s: float
    blocked_s: float
    begun: frozenset[str]
    made: frozenset[tuple[str, str, int]]
    """Keys of the calls that earlier children made."""
    path: tuple[str, ...]
    """The child's sys.path."""
    dump: int
    """File descriptor to which the child writes its frames on SIGUSR1."""


def has_own_code(config: Config) -> bool:
    """Return whether an environment is the user's own class or calls functions of the user."""
    return any(_is_own(each.tasks) for each in config.members.values())


def _is_own(settings: TasksSettings) -> bool:
    return settings.environment in (SINGLE_TURN, TOOLS) or ":" in settings.environment


def tried(config: Config, trial: Trial, *, tell: Callable[[str], None]) -> dict[str, Observation]:
    """Try the functions of a configuration, and begin each environment's first task.

    tell: called with each warning. Returns: the first observation of each environment, by name.
    Raises: ConfigError if an import, a first task or a function can never work, or if the data lack
    the column that `trial` names.
    """
    trials = _Trials(config, trial)
    while not trials.is_done:
        trials.follow_child()
    _check_calls(trials.calls, tell=tell)
    return trials.begun


class _Trials:
    """The results of the child processes so far, and the supervision of the current one."""

    def __init__(self, config: Config, trial: Trial) -> None:
        self._config, self._trial = config, trial
        self.begun: dict[str, Observation] = {}
        self.calls: list[Call] = []
        self.is_done = False
        self._left_s = CALLS_LIMIT_S
        self._what, self._doing, self._limit_s = "tasks.environment", "start", IMPORT_LIMIT_S
        self._call: Call | None = None
        self._stderr = b""

    def follow_child(self) -> None:
        """Start a child and read its messages until it finishes or is killed.

        Raises: ConfigError if the child reports a refusal, or fails outside of a call.
        """
        with tempfile.TemporaryFile() as dump:
            self._follow_child(dump)

    def _follow_child(self, dump: IO[bytes]) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        program = "from service.config.trial import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), dump.fileno()),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_own_last(sys.path))},
            # Processes that the functions start are in its group and are killed with it.
            start_new_session=True,
        )
        theirs.close()
        reading = threading.Thread(target=self._read_stderr, args=(process,), daemon=True)
        reading.start()
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                pickle.dump(self._request(dump.fileno()), stdin)
            while self._take(ours, process, dump):
                pass
        except EOFError:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            reading.join(timeout=1)
            self._ended(process.returncode)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ours.close()

    def _request(self, dump: int) -> _Request:
        self._what, self._doing, self._limit_s = "tasks.environment", "start", IMPORT_LIMIT_S
        self._call = None
        return _Request(
            config=self._config,
            trial=self._trial,
            import_limit_s=IMPORT_LIMIT_S,
            reset_limit_s=tasks.RESET_LIMIT_S,
            blocked_s=tasks.BLOCKED_S,
            begun=frozenset(self.begun),
            made=frozenset(each.key for each in self.calls),
            path=tuple(sys.path),
            dump=dump,
        )

    def _read_stderr(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            while part := stream.read1(1 << 16):  # type: ignore[attr-defined]
                self._stderr = (self._stderr + part)[-_STDERR_BYTES:]

    def _take(self, ours: Connection, process: subprocess.Popen[bytes], dump: IO[bytes]) -> bool:
        """Process the child's next message. Returns: whether more messages are expected.

        Raises: ConfigError, as `follow_child`; EOFError if the child has ended.
        """
        started = time.monotonic()
        end = started + self._limit_s
        while not ours.poll(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            # A process that the child forked may keep the child's end of the pipe open.
            if process.poll() is not None and not ours.poll():
                raise EOFError
            if time.monotonic() >= end:
                self._late("" if self._call else _place_of(process, dump))
                return False
        if self._call is not None:
            self._left_s -= time.monotonic() - started
        self._hear(*ours.recv())
        if self._call is not None and self._limit_s < _TOO_SHORT_S:
            # Too little time is left for this call and all later ones.
            self.calls.append(self._call)
            self.is_done = True
        return not self.is_done

    def _hear(self, kind: str, value: Any) -> None:
        """Process one message of the child. Raises: ConfigError if the child reports a refusal."""
        match kind:
            case "refused":
                raise ConfigError(value)
            case "doing":
                (self._what, self._doing, self._limit_s), self._call = value, None
            case "begun":
                self.begun |= value
            case "calling":
                self._call, is_last = value
                self._limit_s = self._left_s * (1.0 if is_last else SHARE_OF_ONE)
            case "called":
                self.calls.append(value)
                self._call = None
            case "done":
                self.is_done = True

    def _late(self, place: str) -> None:
        """Record that the child took too long for the current call.

        place: the line that the child executes, for the error. Raises: ConfigError if no call is
        running.
        """
        if self._call is None:
            raise ConfigError(
                f"{self._what}: it took more than {self._limit_s:.3g} s to {self._doing}"
                f"{f' (it is at {place})' if place else ''}; expected an import and a first task "
                "that take seconds; move slow work into the function, or fix the module"
            )
        self._left_s -= self._limit_s
        self._lost(self._call, Fate.HUNG, f"within {self._limit_s:.2g} s")

    def _ended(self, code: int | None) -> None:
        """Record that the child ended during a call. Raises: ConfigError if there is no call."""
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        last = self._stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = "; ".join([how, *last])[:_STDERR_BYTES]
        if self._call is None:
            raise ConfigError(
                f"{self._what}: the process ended while it was to {self._doing} ({why}); "
                "expected a module that raises an exception instead; fix it"
            )
        self._lost(self._call, Fate.ENDED, f"({why})")

    def _lost(self, call: Call, fate: Fate, text: str) -> None:
        self.calls.append(replace(call, fate=fate, text=text))


def _check_calls(calls: Sequence[Call], *, tell: Callable[[str], None]) -> None:
    """Warn of calls that failed. Raises: ConfigError if a function can never work."""
    by_function: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        by_function.setdefault((call.environment, call.function), []).append(call)
    for own in by_function.values():
        odd = [each for each in own if each.fate not in (Fate.SCORED, None)]
        if odd and all(each.fate in _FATAL for each in own):
            raise ConfigError(f"{_error_text(odd[0])}; {_remedy(odd[0])}")
        if odd and odd == own:
            tell(f"{_error_text(odd[0])}, and so for all {len(own)} answers: check the function")
        elif odd:
            tell(f"{_error_text(odd[0])}; that may be right for this answer")
        if any(each.fate is None for each in own):
            tell(f"{own[0].function} was not called: {CALLS_LIMIT_S:.0f} s had passed")
    for name in dict.fromkeys(each.environment for each in calls):
        _compare([each for each in calls if each.environment == name], tell=tell)


def _own_last(path: Sequence[str]) -> list[str]:
    """Return an import path with the working directory last.

    A user's file may have the name of a module that the child imports. The child finds its own
    module first, and the user's file is refused with a sentence later.
    """
    here = os.getcwd()
    return sorted((each or here for each in path), key=lambda each: each == here)


def _place_of(process: subprocess.Popen[bytes], dump: IO[bytes]) -> str:
    """Return the line of the user's code that a child executes; empty if unknown."""
    process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + _DUMP_S
    frames: list[str] = []
    while not frames and time.monotonic() < end:
        time.sleep(_LOOK_S)
        text = os.pread(dump.fileno(), _DUMP_BYTES, 0).decode(errors="replace")
        # The innermost frame is the first: '  File "/path/my.py", line 2 in <module>'.
        frames = [line.strip() for line in text.splitlines() if line.startswith("  File ")]
    found = next((each for each in frames if os.getcwd() in each), "".join(frames[:1]))
    return found.removeprefix("File ").replace('"', "").replace(", line ", ":")


def _remedy(call: Call) -> str:
    if call.fate is Fate.NO_NUMBER and call.function.startswith((STEP, SCORE_GROUP)):
        return _REMEDY_OF_METHOD
    return _REMEDIES[call.fate or Fate.BROKEN]


def _error_text(call: Call) -> str:
    return f"{call.function} {call.fate} {call.text} for {call.answer}".replace("  ", " ")


def _compare(calls: Sequence[Call], *, tell: Callable[[str], None]) -> None:
    """Warn if a task's reference answer scores no higher than that of another task."""
    if not all(each.fate is Fate.SCORED for each in calls):
        return
    compared = [each for each in calls if each.is_reference]
    if {each.number for each in compared} != {0, 1}:
        return
    right, other = (sum(each.value for each in compared if each.number == n) for n in (0, 1))
    if right <= other:
        tell(
            f"{compared[0].answer} scores {right:.6g}, and {compared[-1].answer} scores "
            f"{other:.6g} for the same task; expected the right one to score higher: look at what "
            "the functions make of answers as the data have them, or name another column by "
            "--answer"
        )


# The rest of this file runs in the child.


def main() -> None:
    """Execute the request on standard input and send messages to the given file descriptor."""
    with suppress(AttributeError, OSError):
        # On Linux the kernel kills this child when the command that started it dies.
        die_with(os.getppid(), signal.SIGKILL)
    said = Connection(int(sys.argv[1]), readable=False)
    request: _Request = pickle.load(sys.stdin.buffer)
    sys.path[:] = request.path
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    tasks.RESET_LIMIT_S, tasks.BLOCKED_S = request.reset_limit_s, request.blocked_s
    # Works even if the user's code holds the interpreter's lock.
    faulthandler.register(signal.SIGUSR1, file=request.dump, all_threads=False)
    try:
        _try_all(request, said)
        said.send(("done", None))
    except ConfigError as error:
        said.send(("refused", str(error)))
    except BaseException:  # noqa: BLE001  # os._exit ends the process, not the interpreter
        traceback.print_exc()
        os._exit(1)
    # The interpreter would wait for the threads that the user's code has started.
    os._exit(0)


def _try_all(request: _Request, said: Connection) -> None:
    """Import the environments, and make the calls that earlier children did not make.

    Raises: ConfigError.
    """
    trial = request.trial
    for name, key in trial.others.items():
        said.send(("doing", (key, f"import {name}", request.import_limit_s)))
        load_shadow(name, key=key)
    for name, member in request.config.members.items():
        part = f"mixture.{name}: " if request.config.mixture else ""
        what = f"{part}tasks.environment"
        try:
            own = ", ".join(tasks.own_names(member.tasks)) or member.tasks.environment
            said.send(("doing", (what, f"import {own}", request.import_limit_s)))
            tasks.maker(member)
            # The limits inside of the child pass first, and their errors name the place.
            limit_s = 2 * tasks.RESET_LIMIT_S + 2 * tasks.BLOCKED_S
            if trial.begins and name not in request.begun:
                said.send(("doing", (what, f"begin the first task of {name}", limit_s)))
                said.send(("begun", {name: tasks.first_observation(member)}))
            if trial.functions and _is_own(member.tasks):
                said.send(("doing", (what, f"begin the first task of {name}", limit_s)))
                asyncio.run(_call_all(name, member, request, said, what=what))
        except ConfigError as error:
            raise ConfigError(f"{part}{error}") from error


async def _call_all(
    name: str, config: Config, request: _Request, said: Connection, *, what: str
) -> None:
    """Call the functions of one environment with two answers each.

    what: the settings that name the environment, for messages. Raises: ConfigError.
    """
    source = tasks.open_tasks(config)
    task = source.task(0)
    answers = _answers(source, task, request.trial.answer)
    environment = tasks.maker(config)()
    await environment.reset(task)
    # A group function compares answers, so that its score of one says nothing about that answer.
    of_groups: Sequence[RewardFunction] = ()
    if isinstance(environment, SingleTurnEnvironment):
        of_groups = environment.group_functions
        functions = [
            each
            for each in environment.functions
            if request.trial.judges or not isinstance(each, JudgeReward)
        ]
        wanted: list[tuple[RewardFunction | JudgeReward | None, str]]
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
                answer=told,
                is_reference=is_reference and function not in of_groups,
            ),
            text,
        )
        for function, label in wanted
        for number, (text, told, is_reference) in enumerate(answers)
    ]
    planned = [each for each in planned if each[1].key not in request.made]
    for position, (function, call, text) in enumerate(planned, start=1):
        said.send(("calling", (call, position == len(planned))))
        if function is not None:
            assert isinstance(environment, SingleTurnEnvironment)
            fate, words, value = await _scored(environment, function, text)
        elif call.function.startswith(STEP):
            is_copied = not config.rollouts.inline
            made = tasks.maker(config)()
            fate, words, value = await _stepped(made, task, text, is_copied=is_copied)
        else:
            fate, words, value = await _scored_together(tasks.maker(config)(), task, text)
        said.send(("called", replace(call, fate=fate, text=words, value=value)))
    said.send(("doing", (what, f"close the first task of {name}", tasks.RESET_LIMIT_S)))
    with suppress(Exception):
        await environment.close()


def _answers(source: TaskSource, task: Task, column: str | None) -> list[tuple[str, str, bool]]:
    """Return two answers, each as its text, its description and whether it is a reference answer.

    Raises: ConfigError if the first task has no such column.
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
    environment: SingleTurnEnvironment, function: RewardFunction | JudgeReward, text: str
) -> tuple[Fate, str, float]:
    try:
        score = await environment.score_by(function, text)
    except NoScore as error:
        return (
            Fate.NO_NUMBER,
            str(error).removeprefix(f"reward function {function.name} gave "),
            0.0,
        )
    except BaseException as error:  # noqa: BLE001  # the user's code may raise any type
        return _fate_of(error, function)
    if score.value is None:
        return Fate.SILENT, "", 0.0
    return Fate.SCORED, "", function.weight * score.value


async def _stepped(
    environment: Environment, task: Task, text: str, *, is_copied: bool
) -> tuple[Fate, str, float]:
    """Take the first step of a task with the answer `text`; return how it ended.

    is_copied: whether a run copies the step's result from a worker to the actor.
    """
    try:
        async with closing(environment.close):
            await environment.reset(task)
            found = await environment.step(Action(text=text))
    except BaseException as error:  # noqa: BLE001  # the user's code may raise any type
        return _fate_of(error)
    if not isinstance(found, StepResult):
        words = f"a {type(found).__name__}, expected a StepResult of actors.environment.protocol"
        return Fate.NO_NUMBER, words, 0.0
    if (problem := reward_problem(found)) is not None:
        return Fate.NO_NUMBER, f"({problem})", 0.0
    try:
        if is_copied:
            pickle.dumps(found)
    except Exception as error:  # noqa: BLE001  # objects may raise any type
        words = f"a result that cannot be copied to another process ({describe(error)})"
        return Fate.NO_NUMBER, words, 0.0
    return Fate.SCORED, "", 0.0


async def _scored_together(environment: Any, task: Task, text: str) -> tuple[Fate, str, float]:
    """Have an environment score a group of two equal answers; return how the call ended."""
    try:
        async with closing(environment.close):
            found = await environment.score_group(task, [text, text])
    except BaseException as error:  # noqa: BLE001  # the user's code may raise any type
        return _fate_of(error)
    try:
        result = checked_results(found, num_answers=2)[0]
    except RewardError as error:
        return Fate.NO_NUMBER, f"({error})", 0.0
    return (Fate.SILENT, "", 0.0) if result is None else (Fate.SCORED, "", 0.0)


def _fate_of(
    error: BaseException, function: RewardFunction | JudgeReward | None = None
) -> tuple[Fate, str, float]:
    root = root_cause(error)
    at = location(root)
    told = describe(root)
    words = f"{told}{f' ({at})' if at else ''}"
    # Compare names: an error from another process has no type to compare.
    match told.partition(":")[0]:
        case "SystemExit":
            return Fate.ENDED, f"({words})", 0.0
        case "WorkerLost":
            return Fate.ENDED, f"({root})", 0.0
        case "CallTimedOut":
            return Fate.HUNG, f"({words})", 0.0
        case "RuntimeError" if _IN_LOOP.search(told):
            return Fate.BROKEN, f"{words} (await the coroutine in place of running it)", 0.0
        case "TypeError" if (
            isinstance(function, RewardFunction)
            and hides_arguments(function.function)
            and _OTHER_ARGUMENTS.search(told)
        ):
            return Fate.BROKEN, f"{words} ({HIDES})", 0.0
        case name:
            return (Fate.BROKEN if name in _BROKEN else Fate.RAISED), words, 0.0


def load_shadow(
    name: str, *, key: str = "audit.shadow", scores_groups: bool = False
) -> RewardFunction:
    """Return the reward function of a name. Raises: ConfigError if it cannot be loaded.

    key: the setting or option that names the function, for messages. scores_groups: whether the
    function has to score the answers of a group together.
    """
    try:
        found = (load_group_functions if scores_groups else load_functions)(name)[0]
    except BadRewardFunction as error:
        told = str(error).removeprefix("group_").removeprefix("reward: ")
        raise ConfigError(f"{key}: {told}") from error
    except Exception as error:
        # Importing the user's own module may raise any type.
        raise ConfigError(f"{key}: {name} cannot be imported: {describe(error)}") from error
    if missing := sorted(found.required & EXTRAS):
        raise ConfigError(
            f"{key}: {name} needs {', '.join(missing)}, which the journal does not hold; expected "
            "an answer and columns of the data; give the argument a default"
        )
    return found
