"""`rayloom.train`, `sft`, `serve` and `evaluate`: the commands for scripts and notebooks.

A run has a process of its own. The caller's event loop, the caller's Ray and earlier runs do not
affect that process. Its memory is freed when the run ends. The functions that a run calls are
passed as `rayloom.given` describes.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from itertools import count
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

import yaml

from actors.options import closest
from rayloom.given import (
    WEIGHTED,
    Given,
    in_python,
    listed,
    name_of,
    own_paths,
    without_file,
    write_rows,
)
from service.api.settings import KEY_VARIABLE
from service.client import Client
from service.config.file import ConfigError, dump_config, path_text, plain_values, read_yaml
from service.config.sft import SftConfig
from service.config.tree import Config
from service.launch.run_dir import RunDir, check_new
from service.launch.signals import EXIT_INTERRUPTED

EXIT_OK, EXIT_REFUSED = 0, 2
RUNS = Path("runs")
_MAX_REASON_LINES = 20
# Sections whose keys are names that the user chooses. Below `options` all keys are.
_FREE = {"mixture", "sets", "columns"}
# What `rayloom serve` prints before the address.
_LISTENS = "the API listens on "
# How `rayloom` begins the line that says why it refuses its arguments.
_REFUSED = '{"refused": '
# Arguments of TRL whose names are not similar to the right ones.
_OTHER_NAMES = {"eval_dataset": "evaluation.sets"}

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")
ConfigLike = str | os.PathLike[str] | Mapping[str, Any] | Config | SftConfig
"""A YAML file, its content as a mapping, or a configuration that `load_config` has read."""


class TrainingFailed(Exception):
    """The run or the evaluation ended with an error; the text has the last lines of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run that has ended."""

    run_dir: Path
    """The run's directory: configuration, checkpoints, journal, report.html, summary.json."""
    summary: dict[str, Any] = field(repr=False)
    """The content of summary.json: rewards, evaluations, ledger, times, memory."""

    def trajectories(self) -> list[dict[str, Any]]:
        """Return a row for each trajectory of the run's journal, newest step first.

        The columns are those of the list in `rayloom inspect`.

        Example:
            ```python
            pandas.DataFrame(result.trajectories()).groupby("step").episode_return.mean()
            ```
        """
        # The journal's reader imports pyarrow and the tokenizer, which take seconds.
        from service.inspect.listing import Filters, journal_page

        page = journal_page(RunDir(path=self.run_dir), Filters(limit=sys.maxsize), None)
        return [asdict(line) for line in page.trajectories]


def _brief(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Leave the frames of this package out of the tracebacks of a public function's errors.

    A notebook shows ten lines for each frame, and the message after them.
    """

    @wraps(function)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        try:
            return function(*args, **kwargs)
        except (ConfigError, TrainingFailed) as error:
            raise error.with_traceback(None) from error.__cause__

    return called


@_brief
def train(
    config: ConfigLike | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    dataset: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | None = None,
    reward: Given = (),
    group_reward: Given = (),
    tools: Given = (),
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Result:
    """Train until the last step, show the progress, and return the result.

    Args:
        config: A YAML file, its content as a mapping, or a Config. Without it, dataset and a reward
            are required.
        model: Directory or hub name of the model. Defaults to the configuration's model, or to the
            tiny model if it has none.
        dataset: A file, a data set of a hub, or rows, such as a list of dicts.
        reward: Functions that score one rollout. The scores of several functions are added; a
            mapping {function: weight} weights them.
        group_reward: Functions that score the rollouts of a group together, or such a mapping.
        tools: Functions that the policy may call, or classes of tools.
        run_dir: Directory of a new run. Defaults to runs/NAME-TIME.
        resume: Directory of a run to continue with its own data and functions. Cannot be combined
            with dataset, functions or run_dir.
        settings: Sections of the configuration, such as run={"steps": 20}.

    Raises:
        ConfigError: If the configuration, the data or a function is refused; nothing has started.
        TrainingFailed: If the run ends with an error.
        KeyboardInterrupt: If the run was interrupted, or stopped by `rayloom stop`. A run that had
            begun has finished the current step and written a checkpoint, unless a second
            interruption ended it at once.

    Example:
        ```python
        result = rayloom.train(
            model="models/smollm2", dataset="sums.jsonl", reward=score, run={"steps": 20},
            trainer={"learning_rate": 1e-5},
        )
        ```
    """
    _check_names(train, settings)
    with _arguments(
        config, model=model, dataset=dataset, reward=reward, group_reward=group_reward,
        tools=tools, run_dir=run_dir, resume=resume, **settings,
    ) as (directory, arguments):  # fmt: skip
        _run("train", *arguments)
    summary = json.loads(RunDir(path=directory).summary_file.read_text(encoding="utf-8"))
    return Result(run_dir=directory.resolve(), summary=summary)


@_brief
def sft(
    dataset: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | None = None,
    *,
    config: ConfigLike | None = None,
    model: str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Path:
    """Train a model on chats until the last step, and show the losses.

    Args:
        dataset: Chats with a column messages: a file, a data set of a hub, or rows. Needed unless
            config or resume is given.
        config: A YAML file, its content as a mapping, or what `load_config` has read.
        model: Directory or hub name of the model. Defaults to the configuration's model, or to the
            tiny model if it has none.
        run_dir: Directory of a new training. Defaults to runs/NAME-TIME.
        resume: Directory of a training to continue.
        settings: Sections of the configuration, such as sft={"epochs": 2}.

    Returns:
        The directory of the exported model, for `train(model=...)`.

    Raises:
        ConfigError: If the configuration or a chat is refused; nothing has started.
        TrainingFailed: If the training ends with an error.
        KeyboardInterrupt: After an interruption; the finished steps are in a checkpoint.

    Example:
        ```python
        model = rayloom.sft("chats.jsonl", model="models/smollm2", sft={"epochs": 2})
        rayloom.train(model=model, dataset="sums.jsonl", reward=score)
        ```
    """
    _check_names(sft, settings, SftConfig)
    with _arguments(
        config, model=model, dataset=dataset, run_dir=run_dir, resume=resume, **settings
    ) as (directory, arguments):
        _run("sft", *arguments)
    return directory.resolve() / "export"


@contextmanager
def serve(config: ConfigLike | None = None, **options: Any) -> Iterator[Client]:
    """Train on submitted tasks, as a context manager that returns a client of the API.

    At the end of the block the run finishes the current step and writes a checkpoint.

    Args:
        config: As for `train`.
        options: The other arguments of `train`, and sections of the configuration.

    Raises:
        ConfigError: If the configuration, the data or a function is refused; nothing has started.
        TrainingFailed: If the run has ended with an error.

    Example:
        ```python
        with rayloom.serve("deploy/configs/guessing-cpu.yaml") as client:
            client.submit("guessing", [rayloom.TaskBody(id="task-1")])
            print(client.wait("task-1").reward)
        ```
    """
    _check_names(train, options)
    with _arguments(config, **options) as (_, arguments), _start("serve", *arguments) as process:
        addresses: Queue[str | None] = Queue()
        last: deque[str] = deque(maxlen=_MAX_REASON_LINES)

        def show_lines() -> None:
            for line in process.stdout or ():
                if not line.startswith(_REFUSED):
                    print(in_python(line), end="", flush=True)
                last.append(line)
                if _LISTENS in line:
                    addresses.put(line.partition(_LISTENS)[2].split()[0])
            addresses.put(None)

        showing = Thread(target=show_lines, daemon=True)
        showing.start()
        try:
            if (address := addresses.get()) is not None:
                with Client(address, key=os.environ.get(KEY_VARIABLE)) as client:
                    yield client
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            process.wait()
            showing.join()
        if process.returncode != EXIT_INTERRUPTED:
            _check(process.returncode, last)


@_brief
def evaluate(
    source: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    on: str | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    tasks: int | None = None,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Play the held-out tasks with a checkpoint or a model, without training.

    Args:
        source: A run's directory, or a YAML file.
        checkpoint: Name or directory of a checkpoint. Defaults to the run's newest checkpoint, or
            to the configuration's model for a YAML file.
        model: Directory or hub name of a model to use instead of a checkpoint.
        on: Name of one of evaluation.sets. Defaults to the held-out tasks.
        samples: Number of rollouts of each task. Defaults to the configuration's.
        temperature: Sampling temperature. Defaults to the configuration's.
        tasks: Number of tasks to play, from the first. Defaults to all.
        out: File for the rollouts and their tokens. Defaults to evaluate-….jsonl in the run's
            directory evaluations, or in the current directory.
        settings: Sections of the configuration.

    Returns:
        The results, such as reward_mean, standard_error and pass_at: the JSON that the command
        prints last.

    Raises:
        ConfigError: If an argument or the configuration is refused; nothing has started.
        TrainingFailed: If the engines do not start, rollouts are missing, or none was scored.
        KeyboardInterrupt: After an interruption, which ends the evaluation.

    Example:
        ```python
        numbers = rayloom.evaluate("runs/sums-20261128-101500", samples=8, temperature=1.0)
        print(numbers["reward_mean"], numbers["pass_at"]["8"])
        ```
    """
    _check_names(evaluate, settings)
    paths = {"checkpoint": checkpoint, "model": model, "out": out}
    options: dict[str, Any] = {
        **{what: path and path_text(path, what=what) for what, path in paths.items()},
        "on": on, "samples": samples, "temperature": temperature, "tasks": tasks,
    }  # fmt: skip
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    lines = _run("evaluate", path_text(source, what="source"), *given, *_set(settings))
    result: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return result


@contextmanager
def _arguments(
    config: ConfigLike | None,
    *,
    model: str | os.PathLike[str] | None = None,
    dataset: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | None = None,
    reward: Given = (),
    group_reward: Given = (),
    tools: Given = (),
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Iterator[tuple[Path, list[str]]]:
    """Yield a run's directory and the arguments of its command. Raises: ConfigError."""
    given = {"reward": reward, "group_reward": group_reward, "tools": tools}
    functions = {what: listed(each, what=what) for what, each in given.items()}
    if resume is not None and (dataset is not None or any(functions.values()) or run_dir):
        raise ConfigError(
            "train: got resume together with a dataset, functions or a run_dir, expected resume "
            "without them: a continued run uses its own; leave them out"
        )
    named = {"resume": resume, "run_dir": run_dir}
    paths = [path_text(path, what=what) for what, path in named.items() if path is not None]
    directory = Path(paths[0]) if any(paths) else _new_directory(config, dataset, settings)
    with tempfile.TemporaryDirectory(prefix="rayloom-train-") as scratch:
        arguments = _config_arguments(config, Path(scratch))
        arguments += ["--resume" if resume is not None else "--run-dir", str(directory)]
        if model is not None:
            arguments += ["--model", path_text(model, what="model", expected="a path or a name")]
        with _removed_if_refused(directory) as store:
            if resume is None:
                # First, because the directory may have a run, whose rows and functions would
                # change.
                check_new(RunDir(path=directory))
            if dataset is not None:
                arguments += ["--dataset", _dataset(dataset, store)]
            scoring: list[str] = []
            for what, each in functions.items():
                names: list[str] = []
                for function in each:
                    # The policy sees the name of a tool, so a tool keeps it.
                    others = [*scoring, *names] if what in WEIGHTED else []
                    names.append(name_of(function, store, what=what, others=others))
                scoring += names
                option = f"--{what.replace('_', '-')}"
                arguments += [part for name in names for part in (option, name)]
                if names and isinstance(weights := given[what], Mapping):
                    arguments.append(_weighted(what, names, weights.values()))
            # Last, because they override what the functions set.
            yield directory, arguments + _set(settings)


def _check_names(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    root: type[Config | SftConfig] = Config,
) -> None:
    """Check that each name in `settings` is a section of the configuration or an argument.

    function: the public function that takes the arguments. root: the class of its configuration.
    Raises: ConfigError that names the argument or setting that is probably meant.
    Example: {"rewards": score} -> "rewards: unknown argument; did you mean 'reward'?"
    """
    arguments = [name for name in inspect.signature(function).parameters if name != "settings"]
    known = {*arguments, *(each.name for each in fields(root))}
    for name in settings:
        if name.partition(".")[0] not in known:
            if name in _OTHER_NAMES:
                hint = f"did you mean {_OTHER_NAMES[name]!r}?"
            else:
                hint = closest(root, (name,), others=arguments)
            # A setting as the caller writes it: 'run.steps' -> run={"steps": …}
            hint = re.sub(r"'(\w+)\.([\w.]+)'", r'\1={"\2": …}', hint)
            raise ConfigError(f"{name}: unknown argument; {hint}")


def _set(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments of a command. Raises: ConfigError."""
    leaves = _leaves(plain_values(settings))
    return [f"--set={path}={_flow(value)}" for path, value in leaves]


def _flow(value: Any) -> str:
    """Return a plain value as YAML in flow style."""
    text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize, sort_keys=False)
    # After a scalar, YAML writes the end of the document.
    return str(text).removesuffix("\n").removesuffix("\n...")


def _is_whole(settings: Mapping[Any, Any], path: str) -> bool:
    """Return whether a mapping must be passed as one value, instead of one value for each key.

    Example: {"my.py:score": 0.2}, because its key cannot be part of the path of a setting.
    """
    if not all(isinstance(key, str) and "=" not in key for key in settings):
        return True
    keys = "".join(settings)
    sections = path.split(".")
    is_free = sections[-1] in _FREE or "options" in sections
    return "." in keys and (is_free or bool(set(keys) & set(":/")))


def _weighted(what: str, names: list[str], weights: Iterable[float]) -> str:
    """Return the argument of `rayloom train` that sets the weights of the reward functions.

    Example: ("reward", ["a", "b"], [1, 2]) -> "--set=tasks.options.reward={a: 1, b: 2}"
    """
    if len(set(names)) < len(names):
        raise ConfigError(f"{what}: got {', '.join(names)}, expected each function once")
    weighted = dict(zip(names, plain_values(list(weights), where=what), strict=True))
    return f"--set=tasks.options.{what}={_flow(weighted)}"


def _new_directory(
    config: ConfigLike | None,
    dataset: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
) -> Path:
    """Return a new directory runs/NAME-TIME. NAME is run.name if it is set, or a file's name."""
    named = next((each for each in (config, dataset) if isinstance(each, str | os.PathLike)), "run")
    # The command refuses a name with a slash, or a longer one.
    name = (_run_name(config, settings) or Path(named).stem).replace("/", "-")[:64]
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (RUNS / (stamp if not number else f"{stamp}-{number}") for number in count())
    return next(each for each in tries if not each.exists())


def _run_name(config: ConfigLike | None, settings: Mapping[str, Any]) -> str:
    """Return run.name as the settings or the configuration set it; empty if they do not.

    Raises: ConfigError if the configuration is a file that cannot be read.
    """
    tree: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    if isinstance(config, Config):
        tree = {"run.name": config.run.name}
    elif isinstance(config, str | os.PathLike):
        tree = read_yaml(Path(path_text(config, what="config")))
    return str({**dict(_leaves(tree)), **dict(_leaves(settings))}.get("run.name") or "")


@contextmanager
def _removed_if_refused(directory: Path) -> Iterator[Path]:
    """Yield the directory in which a run's functions are stored.

    If the block raises ConfigError, remove the directories that were created during the block.
    """
    store = RunDir(path=directory).functions
    made = [path for path in (store, *store.parents) if not path.exists()]
    try:
        yield store
    except ConfigError as error:
        text = in_python(str(error))
        if store in made:
            shutil.rmtree(store, ignore_errors=True)
            text = without_file(text, store)
        for path in made[1:]:
            # A directory that is not empty stays.
            with suppress(OSError):
                path.rmdir()
        raise ConfigError(text) from error.__cause__


def _config_arguments(config: ConfigLike | None, scratch: Path) -> list[str]:
    if config is None:
        return []
    file = scratch / "config.yaml"
    if isinstance(config, Mapping):
        file.write_text(_flow(plain_values(config)), encoding="utf-8")
        return [str(file)]
    if isinstance(config, Config | SftConfig):
        file.write_text(dump_config(config), encoding="utf-8")
        return [str(file)]
    what = "the path of a YAML file, its content as a mapping, or a Config"
    return [path_text(config, what="config", expected=what)]


def _leaves(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each setting: {"run": {"steps": 2}} -> ("run.steps", 2).

    A key may be a path: {"trainer": {"lora.rank": 8}} -> ("trainer.lora.rank", 8).
    """
    for name, value in settings.items():
        inner = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value and not _is_whole(value, inner):
            yield from _leaves(value, inner)
        else:
            yield inner, value


def _dataset(dataset: str | os.PathLike[str] | Iterable[Mapping[str, Any]], store: Path) -> str:
    """Return a data set's path or name; if it is given as rows, write them to a file in `store`."""
    if isinstance(dataset, str | os.PathLike):
        return os.fspath(dataset)
    return os.path.relpath(write_rows(dataset, store))


def _start(*arguments: str) -> subprocess.Popen[str]:
    """Start `rayloom` in a new session; it gets SIGTERM if the caller dies."""
    # Not `-m`, which puts the working directory in front of the installed packages.
    start = (
        "import signal; from actors.environment.worker_process import die_with; "
        f"die_with({os.getpid()}, signal.SIGTERM); from service.cli.main import main; "
        "main(refusal_as_json=True)"
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-c", start, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        # The terminal's interrupt goes to the caller, which passes it on.
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(own_paths()), "PYTHONUNBUFFERED": "1"},
    )


def _run(*arguments: str) -> deque[str]:
    """Run `rayloom` with arguments to its end, and print its output, except for lines of JSON.

    Returns: the last lines of the output. Raises: ConfigError, TrainingFailed, KeyboardInterrupt.
    """
    interrupted = False
    last: deque[str] = deque(maxlen=_MAX_REASON_LINES)
    with _start(*arguments) as process:
        assert process.stdout is not None
        while process.returncode is None:
            try:
                for line in process.stdout:
                    if not line.startswith("{"):
                        print(in_python(line), end="", flush=True)
                    last.append(line)
                process.wait()
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    _check(process.returncode, last)
    return last


def _check(code: int, last: Iterable[str]) -> None:
    """Raise the error for an exit code, unless it means success. last: the last printed lines."""
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    lines = list(last)
    text = "".join(lines)
    reason = in_python(text[max(text.rfind("rayloom: "), 0) :].strip())
    if code == EXIT_REFUSED:
        refused = next((line for line in lines if line.startswith(_REFUSED)), None)
        if refused is not None:
            reason = in_python(json.loads(refused)["refused"])
        raise ConfigError(reason.removeprefix("rayloom: "))
    if code != EXIT_OK:
        raise TrainingFailed(f"exit code {code}: {reason}")
