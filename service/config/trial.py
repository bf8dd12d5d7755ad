"""Try a user's own functions before a run starts, in a child process.

The child runs `trial_child`. If a call ends the child or does not return, a new child makes the
remaining calls. A function that can never work is refused; all other problems are warnings
(`docs/reward-functions.md`, "Tried before the start").
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import IO, Any, Literal

from actors.environment.builtin.single_turn import SINGLE_TURN
from actors.environment.builtin.tools import TOOLS
from actors.environment.protocol import Observation
from actors.environment.reward_functions import (
    EXTRAS,
    BadRewardFunction,
    RewardFunction,
    load_functions,
    load_group_functions,
)
from actors.user_code import describe
from service.config import tasks
from service.config.file import ConfigError
from service.config.sections import TasksSettings
from service.config.tree import Config

CALLS_LIMIT_S = 10.0
"""Time limit for all calls of a preflight together, in seconds."""
SHARE_OF_ONE = 0.8
"""Share of the remaining time that a call may take; the last call may take all of it."""
IMPORT_LIMIT_S = 60.0
"""Time limit for an import, in seconds."""
STEP, SCORE_GROUP = "step of ", "score_group of "
_STDERR_BYTES = 500
_TOO_SHORT_S = 0.05
_LOOK_S = 0.1
_DUMP_S = 1.0
_DUMP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The calls that `tried` makes after it has imported the user's code."""

    begins: bool = True
    """Whether to begin the first task of each environment."""
    functions: bool = True
    """Whether functions are called."""
    judges: bool = False
    """Whether judges are called too, over the network."""
    answer: str | None = None
    """Column with the reference answer; None chooses a column (`task_data.reference_of`)."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Reward functions that are only imported, each with the setting or option that names it."""


Fate = Literal["scored", "silent", "raised", "broken", "no number", "ended", "hung"]
"""The way in which a call ended.

silent: it returned None. broken: it can never work. no number: it returned something that is no
score. ended: its process ended. hung: it exceeded its time limit.
"""
# The fate of a call within a sentence.
_SAID: Mapping[Fate, str] = {
    "scored": "gave a number",
    "silent": "gave None",
    "raised": "raised",
    "broken": "cannot run:",
    "no number": "gave",
    "ended": "ended its process",
    "hung": "did not end",
}
# The fates that refuse a function, each with the remedy.
_REMEDIES: Mapping[Fate, str] = {
    "broken": "fix it",
    "no number": "correct what it returns",
    "ended": "have it raise an exception instead, or return",
    "hung": "give it a limit of its own; if it needs longer, start with --no-call",
}
_REMEDY_OF_METHOD = "return what docs/environments.md describes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A planned or finished call of a user's function; a finished call has its result."""

    environment: str
    function: str
    number: int
    """Number of the answer: 0 or 1."""
    answer: str
    """Description of the answer, for messages."""
    is_reference: bool = False
    fate: Fate | None = None
    """How the call ended; None if the call was not made."""
    text: str = ""
    """Description of what the function raised or returned, for messages."""
    value: float = 0.0
    """Weighted score of the answer."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.environment, self.function, self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The input of a child process: the configuration, time limits, and the calls to leave out."""

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
    """Return whether a configuration uses the user's own code: an environment or functions."""
    return any(is_own(each.tasks) for each in config.members.values())


def is_own(settings: TasksSettings) -> bool:
    return settings.environment in (SINGLE_TURN, TOOLS) or ":" in settings.environment


def load_shadow(name: str, *, key: str, scores_groups: bool = False) -> RewardFunction:
    """Load a reward function that scores stored answers again, such as the one in audit.shadow.

    key: the setting or option that names the function, for messages. scores_groups: whether the
    function must score the answers of a group together. Raises: ConfigError if the function cannot
    be loaded.
    """
    try:
        found = (load_group_functions if scores_groups else load_functions)(name)[0]
    except BadRewardFunction as error:
        problem = str(error).removeprefix("group_").removeprefix("reward: ")
        raise ConfigError(f"{key}: {problem}") from error
    except Exception as error:
        # Importing the user's own module may raise any exception.
        raise ConfigError(f"{key}: {name} cannot be imported: {describe(error)}") from error
    if missing := sorted(found.required & EXTRAS):
        raise ConfigError(
            f"{key}: {name} needs {', '.join(missing)}, which the journal does not hold; expected "
            "an answer and columns of the data; give the argument a default"
        )
    return found


def tried(config: Config, trial: Trial, *, tell: Callable[[str], None]) -> dict[str, Observation]:
    """Try a configuration's environments and functions before the run starts.

    tell: called with each warning.
    Returns: for each environment that `trial` lets begin, its name and its first observation.
    Raises: ConfigError if a module cannot be imported, a task cannot begin, or a function can
        never work. Also if the data lack the column for reference answers, `trial.answer`.
    """
    trials = _Trials(config, trial)
    while not trials.is_done:
        trials.follow_child()
    for warning in trials.told:
        tell(warning)
    _check_calls(trials.calls, tell=tell)
    return trials.begun


class _Trials:
    """The results of the child processes so far, and the supervision of the current process."""

    def __init__(self, config: Config, trial: Trial) -> None:
        self._config, self._trial = config, trial
        self.begun: dict[str, Observation] = {}
        self.calls: list[Call] = []
        self.told: dict[str, None] = {}
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
        program = "from service.config.trial_child import main; main()"
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

    def _request(self, dump: int) -> Request:
        self._what, self._doing, self._limit_s = "tasks.environment", "start", IMPORT_LIMIT_S
        self._call = None
        return Request(
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
        """Process the child's next message, and return whether more messages are expected.

        Raises: ConfigError if the child reports a refusal, or is too slow outside of a call;
        EOFError if the child has ended.
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
        match kind:
            case "refused":
                raise ConfigError(value)
            case "raised":
                text, frames = value
                # For the report that the error asks for.
                sys.stderr.write(frames)
                raise ConfigError(
                    f"{self._what}: got {text} from the attempt to {self._doing}, expected no "
                    "exception; correct the code or the data; if the place is in Rayloom or in a "
                    "library that it uses, report it"
                )
            case "doing":
                (self._what, self._doing, self._limit_s), self._call = value, None
            case "begun":
                self.begun |= value
            case "told":
                self.told[value] = None
            case "calling":
                self._call, is_last = value
                self._limit_s = self._left_s * (1.0 if is_last else SHARE_OF_ONE)
            case "called":
                self.calls.append(value)
                self._call = None
            case "done":
                self.is_done = True

    def _late(self, place: str) -> None:
        """Record the current call as "hung"; without a call, raise ConfigError.

        place: the line that the child executes, for the error.
        """
        if self._call is None:
            raise ConfigError(
                f"{self._what}: it took more than {self._limit_s:.3g} s to {self._doing}"
                f"{f' (it is at {place})' if place else ''}; expected an import and a first task "
                "that take seconds; move slow work into the function, or fix the module"
            )
        self._left_s -= self._limit_s
        self._lost(self._call, "hung", f"within {self._limit_s:.2g} s")

    def _ended(self, code: int | None) -> None:
        """Record that the current call ended the child; without a call, raise ConfigError."""
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        last = self._stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = "; ".join([how, *last])[:_STDERR_BYTES]
        if self._call is None:
            raise ConfigError(
                f"{self._what}: the process ended when it tried to {self._doing} ({why}); "
                "expected a module that raises an exception instead; fix it"
            )
        self._lost(self._call, "ended", f"({why})")

    def _lost(self, call: Call, fate: Fate, text: str) -> None:
        self.calls.append(replace(call, fate=fate, text=text))


def _check_calls(calls: Sequence[Call], *, tell: Callable[[str], None]) -> None:
    """Warn of calls that failed. Raises: ConfigError if a function can never work."""
    by_function: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        by_function.setdefault((call.environment, call.function), []).append(call)
    for own in by_function.values():
        odd = [each for each in own if each.fate not in ("scored", None)]
        if odd and all(each.fate in _REMEDIES for each in own):
            raise ConfigError(f"{_error_text(odd[0])}; {_remedy(odd[0])}")
        if odd and odd == own:
            tell(f"{_error_text(odd[0])}, as for all {len(own)} answers: check the function")
        elif odd:
            tell(f"{_error_text(odd[0])}; that may be right for this answer; {_effect(odd[0])}")
        if any(each.fate is None for each in own):
            tell(f"{own[0].function} was not called, because the calls took {CALLS_LIMIT_S:.0f} s")
    for name in dict.fromkeys(each.environment for each in calls):
        _compare([each for each in calls if each.environment == name], tell=tell)


def _own_last(path: Sequence[str]) -> list[str]:
    """Return an import path with the working directory moved to its end."""
    # Otherwise a user's file with the name of a package would be imported instead of the package.
    # A later check refuses these files.
    here = os.getcwd()
    return sorted((each or here for each in path), key=lambda each: each == here)


def _place_of(process: subprocess.Popen[bytes], dump: IO[bytes]) -> str:
    """Return the file and line of the user's code that a child executes; empty if unknown."""
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
    if call.fate == "no number" and call.function.startswith((STEP, SCORE_GROUP)):
        return _REMEDY_OF_METHOD
    return _REMEDIES[call.fate or "broken"]


def _effect(call: Call) -> str:
    """Return what a run does with an answer after such a call of a scoring function."""
    if call.function.startswith(STEP):
        return "a rollout in which it happens is an environment_error and is not trained"
    when = "and nothing else scores an answer" if call.fate == "silent" else "in a run"
    return f"if it happens {when}, the rollout is a reward_error and is not trained"


def _error_text(call: Call) -> str:
    said = _SAID[call.fate or "broken"]
    found = " ".join(part for part in (call.function, said, call.text) if part)
    # The text of "no number" ends with what was expected, so the answer must come before the text.
    is_before = call.fate == "no number"
    return f"for {call.answer}, {found}" if is_before else f"{found} for {call.answer}"


def _compare(calls: Sequence[Call], *, tell: Callable[[str], None]) -> None:
    """Warn if a task's own reference answer scores no higher than the answer of another task."""
    if not all(each.fate == "scored" for each in calls):
        return
    compared = [each for each in calls if each.is_reference]
    if {each.number for each in compared} != {0, 1}:
        return
    right, other = (sum(each.value for each in compared if each.number == n) for n in (0, 1))
    if right <= other:
        tell(
            f"{compared[0].answer} scores {right:.6g}, and {compared[-1].answer} scores "
            f"{other:.6g} for the same task; expected the right one to score higher: look at what "
            "the functions make of answers in the form of the data, or name another column by "
            "--answer"
        )
