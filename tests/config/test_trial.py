"""Tests of the trial of a user's functions before a start: what is refused or a warning."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from actors.environment.task_data import reference_of
from actors.environment.user_names import helpers_from_elsewhere
from actors.types import Task
from service.config import trial
from service.config.file import ConfigError, parse_config
from service.config.preflight import check_without_model
from service.config.tasks import open_tasks
from service.config.tree import Config
from service.config.trial import Trial, tried

FUNCTIONS = """
import asyncio, os, sys, time
from actors.environment.protocol import Message, Observation, Role, StepResult

def right(completion, answer):
    return float(completion.strip() == answer)

def prints(completion, answer):
    print("x" * 1_000_000)
    return right(completion, answer)

def reads(completion):
    return float(input())

def dies_once(completion, answer):
    if completion == answer:
        os._exit(11)
    return 0.0

def forks(completion, answer):
    if (child := os.fork()) == 0:
        time.sleep(1000)
    with open("children", "a") as file:
        file.write(f"{child}\\n")
    return right(completion, answer)

def misspelt(completion, anwser="4", strict=True, completion_ids=None):
    return float(completion == anwser)

def counts_twice(completion, answer):
    right = float(completion.strip() == answer)
    return {"Overall": right, "format": 0.0, "accuracy": right}

def counts_twice_in_groups(completions):
    return [{"total": 1.0, "format": 1.0} for text in completions]

def of_verl(completion, answer):
    return {"score": float(completion.strip() == answer), "reward": 1.0}

def parts(completion, answer):
    return {"accuracy": float(completion.strip() == answer), "format": 0.5}

def only_total(completion, answer):
    return {"reward": float(completion.strip() == answer)}

def partly(completion, answer):
    return 1.0 if completion == answer else None

def silent(completion):
    return None

def leaves(completion):
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(4)

def exits(completion):
    sys.exit(3)

def hangs(completion):
    time.sleep(1000)

def text(completion):
    return "good"

def imports(completion):
    import no_such_package

def constant(completion):
    return 1.0

def raises(completion):
    raise KeyError("no such thing")

def logged(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

@logged
def hidden(completion, answer):
    return float(completion.strip() == answer)

@logged
def hidden_all(completion, answer, **columns):
    return float(completion.strip() == answer)

async def looked_up(completion):
    return 1.0

async def nests(completion):
    return asyncio.run(looked_up(completion))

def runs(completion, answer):
    return asyncio.run(looked_up(completion)) * (completion.strip() == answer)

class Game:
    async def reset(self, task):
        return Observation(messages=(Message(role=Role.USER, content="Go."),))
    async def step(self, action):
        return 1.0
    async def close(self): ...

class FailsTwice(Game):
    async def reset(self, task):
        raise KeyError("no such board")
    async def step(self, action):
        raise KeyError("no such move")
    async def close(self):
        raise OSError("already closed")

class StepsOnce(FailsTwice):
    reset = Game.reset

class Scores(Game):
    def __init__(self, group_reward=False):
        pass
    async def step(self, action):
        return StepResult(reward=1.0, terminated=True)
    async def score_group(self, task, completions):
        return [1.0 for text in completions]

class Blocks(Scores):
    def score_group(self, task, completions):
        return [StepResult() for text in completions]

class Own(Game):
    async def reset(self, task):
        class Observed(Observation): ...
        return Observed(messages=(Message(role=Role.USER, content="Go."),))

class Misuses(Game):
    async def step(self, action):
        return StepResult(reward=1.0, terminated=1)

class Repeats(Game):
    async def step(self, action):
        reply = Message(role=Role.ASSISTANT, content=action.text)
        return StepResult(messages=(reply, Message(role=Role.USER, content="Another.")))

class Counts(Scores):
    games = []
    async def reset(self, task):
        self.games.append(task)
        return Observation(messages=(Message(role=Role.USER, content=str(len(self.games))),))

class SaysNothing(Scores):
    async def reset(self, task):
        return Observation(messages=())

class Deals(Scores):
    async def reset(self, task):
        task.data["deals"] = task.data.get("deals", 0) + 1
        return Observation(
            messages=(Message(role=Role.USER, content=str(task.data["deals"])),)
        )

class Keeps(Scores):
    async def step(self, action):
        return StepResult(terminated=True, extra_columns={"how": lambda: "so"})

def ranks(completions):
    return [0.5 for text in completions]

class Ends(Game):
    def __init__(self):
        os._exit(7)
"""


CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "of_trial.py").write_text(FUNCTIONS)
    rows = [{"task_id": str(n), "prompt": f"{n}?", "answer": str(n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# A zombie process has ended too.
GONE = ("", "Z")


def state_of(process: str) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


STARTS = """
import subprocess

child = subprocess.Popen(["sleep", "1000"])
with open("children", "a") as file:
    file.write(f"{child.pid}\\n")

def one(completion):
    return 1.0
"""


def config_of(*names: str, **tasks: Any) -> Config:
    options = {"reward": [f"of_trial.py:{name}" for name in names]}
    tree = {
        "model": {"tiny": {}},
        "tasks": {
            "environment": "single_turn", "dataset": "rows.jsonl", "evaluation_tasks": 0,
            "options": options, **tasks,
        },
    }  # fmt: skip
    return parse_config(tree, source="for a test")


SCORES = """
import json, helper, other, colorsys

def one(completion, answer):
    return helper.SCORE * (completion == answer)
"""


def test_a_helper_imported_from_another_directory_is_a_warning(
    place: Path,
) -> None:
    (place / "own").mkdir()
    (place / "own" / "scores.py").write_text(SCORES)
    # helper.py exists twice. The others exist once, or have the name of a standard module.
    for name in ("helper.py", "own/helper.py", "other.py", "own/unused.py", "own/colorsys.py"):
        (place / name).write_text("SCORE = 1.0\n")
    reported: list[str] = []
    tried(config_of(options={"reward": "own/scores.py:one"}), Trial(), tell=reported.append)
    (warning,) = reported
    imported = f"{place}/own/scores.py imports helper, which is {place}/helper.py"
    assert warning.startswith(f"{imported}, and {place}/own/helper.py is not used")
    assert f"start the command in {place}/own, or import the file by its name" in warning
    (place / "own" / "scores.py").write_text(SCORES.replace("helper,", "own.helper as helper,"))
    tried(config_of(options={"reward": "own/scores.py:one"}), Trial(), tell=reported.append)
    assert reported == [warning]


def test_a_missing_helper_file_and_an_unloaded_module_raise_no_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "own").mkdir()
    for name in ("own/imports_archive.py", "own/of_archive.py"):
        (place / name).write_text("import of_archive\n")
    own, helper = ModuleType("own.imports_archive"), ModuleType("of_archive")
    own.__file__ = f"{place}/own/imports_archive.py"
    helper.__file__ = f"{place}/archive.zip/of_archive.py"
    monkeypatch.setitem(sys.modules, own.__name__, own)
    monkeypatch.setitem(sys.modules, helper.__name__, helper)
    (warning,) = helpers_from_elsewhere("own/imports_archive.py:score")
    assert f"which is {helper.__file__}, and {place}/own/of_archive.py is not used" in warning
    assert list(helpers_from_elsewhere("not_loaded:score")) == []


def test_a_failure_for_one_answer_is_a_warning_and_leaves_no_process(place: Path) -> None:
    reported: list[str] = []
    names = ("right", "prints", "forks", "reads", "dies_once", "silent", "partly")
    (place / "starts.py").write_text(STARTS)
    functions = [*(f"of_trial.py:{name}" for name in names), "starts.py:one"]
    begun = tried(config_of(options={"reward": functions}), Trial(), tell=reported.append)
    assert begun["single_turn"].messages[0].content.endswith("?")
    reads, dies, silent, partly = reported
    assert "reads raised EOFError: EOF when reading a line" in reads and "2 answers" in reads
    assert "dies_once ended its process (its process ended itself with status 11) for" in dies
    assert "silent gave None for the reference answer of" in silent
    effect = "the rollout is a reward_error and is not trained"
    assert dies.endswith(f"for this answer; if it happens in a run, {effect}")
    assert "partly gave None for the reference answer of another task; that may" in partly
    assert partly.endswith(f"; if it happens and nothing else scores an answer, {effect}")
    for child in (place / "children").read_text().split():
        end = time.monotonic() + 10
        while (state := state_of(child)) not in GONE:
            assert time.monotonic() < end, f"process {child} is left in state {state}"
            time.sleep(0.05)


def test_named_numbers_whose_sum_counts_a_total_twice_are_a_warning(place: Path) -> None:
    reported: list[str] = []
    config = config_of(
        options={
            "reward": [
                f"of_trial.py:{name}" for name in ("counts_twice", "of_verl", "parts", "only_total")
            ],
            "group_reward": "of_trial.py:counts_twice_in_groups",
        }
    )
    tried(config, Trial(), tell=reported.append)
    of_one, of_group = reported
    assert of_one == (
        "reward function counts_twice: the reward is the sum of Overall, format, accuracy, and "
        "Overall is probably their total already; expected numbers to add up, or the total under "
        "the name score; return Overall as score"
    )
    assert "counts_twice_in_groups: the reward is the sum of total, format" in of_group


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("leaves", r"leaves ended its process \(.* status 4\) for .*; have it raise"),
        ("hangs", "hangs did not end within .*--no-call"),
        ("exits", r"exits ended its process \(SystemExit: 3 .*of_trial.py:\d+ in exits"),
        (
            "text",
            r"for the .* of 3, reward function text gave 'good', expected .* numbers; correct",
        ),
        (
            "hidden",
            r"hidden cannot run: TypeError: .* unexpected keyword .*hides its .*functools\.wraps",
        ),
        (
            "nests",
            "nests cannot run: RuntimeError: .*running event loop.*await the coroutine",
        ),
        ("imports", "imports cannot run: ModuleNotFoundError: .*no_such_package.*fix it"),
    ],
)
def test_a_function_that_can_never_work_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setattr(trial, "CALLS_LIMIT_S", 0.5 if name == "hangs" else 60.0)
    with pytest.raises(ConfigError, match=words):
        tried(config_of(name), Trial(), tell=lambda _: None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "Game",
            "step of of_trial:Game gave a float, expected a rayloom.StepResult.*environments.md",
        ),
        ("Keeps", "a result that cannot be copied to another process .*lambda"),
        ("Misuses", r"cannot run: TypeError: .*terminated: got an int, .*trial\.py:\d+ in step"),
        ("Repeats", r"cannot run: ValueError: .*role 'assistant', expected only new messages"),
        ("Own", r"reset of of_trial:Own returned an Observation that cannot be copied .*Observed"),
        ("Ends", "exit code 7"),
        ("FailsTwice", r"KeyError: 'no such board'; its close failed too: OSError: already closed"),
    ],
)
def test_a_users_environment_is_tried_too(place: Path, name: str, words: str) -> None:
    config = config_of(environment=f"of_trial:{name}", options={}, dataset=None)
    with pytest.raises(ConfigError, match=words):
        check_without_model(config)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "Scores",
            "score_group of of_trial:Scores gave .*a float for an answer, expected a rayloom.Step",
        ),
        ("Blocks", "score_group is not a coroutine, expected `async def score_group"),
    ],
)
def test_an_environments_group_score_is_tried_too(place: Path, name: str, words: str) -> None:
    config = config_of(environment=f"of_trial:{name}", options={"group_reward": True}, dataset=None)
    with pytest.raises(ConfigError, match=words):
        check_without_model(config)


# This test waits for the time limits of two trials: 13 s.
@pytest.mark.proof
@pytest.mark.slow
def test_an_import_that_does_not_end_is_refused_with_its_file_and_the_limit(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "waits.py").write_text("import time\n\ntime.sleep(1000)\n")
    (place / "uses_waits.py").write_text("import waits\n")
    monkeypatch.setattr(trial, "IMPORT_LIMIT_S", 6.0)
    config = config_of(options={"reward": "uses_waits.py:score"})
    words = r"it took more than 6 s to import uses_waits\.py:score \(it is at .*/waits\.py:3 in"
    with pytest.raises(ConfigError, match=words):
        tried(config, Trial(), tell=lambda _: None)
    others = {"waits.py:score": "--reward"}
    with pytest.raises(ConfigError, match=r"--reward: it took more than 6 s to import waits\.py"):
        tried(config_of("right"), Trial(begins=False, others=others), tell=lambda _: None)


def test_a_file_with_the_name_of_an_imported_module_is_refused(place: Path) -> None:
    (place / "json.py").write_text("def score(completion): return 1.0")
    config = config_of(options={"reward": "json.py:score"})
    with pytest.raises(ConfigError, match=r"json\.py: by this name Python imports .*rename"):
        tried(config, Trial(), tell=lambda _: None)


def test_an_exception_of_the_reader_is_reported_as_an_exception(place: Path) -> None:
    (place / "breaks.py").write_text(
        "from actors.environment import data_sets\n\n"
        "def _open(*args, **options):\n    return {}['rows']\n\n"
        "data_sets._open = _open\n\n"
        "def one(completion):\n    return 1.0\n"
    )
    words = (
        r"tasks\.environment: got KeyError: 'rows' \(.*breaks\.py:4 in _open\) from the attempt to "
        "begin the first task of single_turn, expected no exception"
    )
    with pytest.raises(ConfigError, match=words):
        tried(config_of(options={"reward": "breaks.py:one"}), Trial(), tell=lambda _: None)


def test_the_error_of_an_environment_that_begins_without_a_message_names_it(place: Path) -> None:
    words = r"of_trial:SaysNothing' could .*messages: got none, .*of_trial\.py:\d+ in reset\)"
    config = config_of(environment="of_trial:SaysNothing", options={}, dataset=None)
    with pytest.raises(ConfigError, match=words):
        check_without_model(config)


def test_an_environment_may_change_its_own_copy_of_the_data(place: Path) -> None:
    reported: list[str] = []
    config = config_of(environment="of_trial:Deals", options={}, dataset=None)
    tried(config, Trial(), tell=reported.append)
    assert not reported


def test_an_environment_that_begins_a_task_differently_each_time_is_reported(place: Path) -> None:
    reported: list[str] = []
    config = config_of(environment="of_trial:Counts", options={}, dataset=None)
    tried(config, Trial(), tell=reported.append)
    assert [text.partition("; ")[0] for text in reported] == [
        "reset of of_trial:Counts began the same task with different messages"
    ]


def test_the_error_of_a_step_is_shown_before_that_of_its_close(place: Path) -> None:
    reported: list[str] = []
    config = config_of(environment="of_trial:StepsOnce", options={}, dataset=None)
    with pytest.raises(ConfigError, match="OSError: already closed"):
        tried(config, Trial(), tell=reported.append)
    tried(config, Trial(begins=False), tell=reported.append)
    assert "KeyError: 'no such move'; its close failed too: OSError: already closed" in reported[0]


def test_decorated_functions_work_if_they_accept_every_column(place: Path) -> None:
    reported: list[str] = []
    tried(config_of("hidden_all", "runs"), Trial(), tell=reported.append)
    assert not reported


def test_a_reference_answer_that_scores_no_more_than_another_is_reported(place: Path) -> None:
    reported: list[str] = []
    tried(config_of("constant"), Trial(), tell=reported.append)
    assert (
        len(reported) == 1
        and "scores 1, and the reference answer of another task scores 1" in reported[0]
    )
    # A group function compares answers, so equal ones may have the same score.
    options = {"reward": "of_trial.py:right", "group_reward": "of_trial.py:ranks"}
    tried(config_of(options=options), Trial(), tell=reported.append)
    tried(config_of(options={"group_reward": "of_trial.py:ranks"}), Trial(), tell=reported.append)
    assert len(reported) == 1
    # No function is called, so there is nothing to report.
    assert "single_turn" in tried(config_of("raises"), Trial(functions=False), tell=reported.append)
    assert len(reported) == 1


def test_an_argument_that_is_probably_a_misspelt_column_is_reported(place: Path) -> None:
    reported: list[str] = []
    tried(config_of("misspelt"), Trial(), tell=reported.append)
    assert "misspelt: the data have no column anwser, so" in reported[0]
    assert reported[0].endswith("did you mean the column answer?")
    assert not [each for each in reported if "strict" in each or "completion_ids" in each]


def test_a_missing_column_of_reference_answers_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="--answer rihgt: got the columns answer, prompt"):
        tried(config_of("right"), Trial(answer="rihgt"), tell=lambda _: None)


@pytest.mark.parametrize(
    ("data", "column", "found"),
    [
        ({"solution": "4"}, None, "4"),
        ({"answer": ["a", "b"], "solution": "c"}, None, "a"),
        ({"reward_model": {"ground_truth": 7}}, "reward_model.ground_truth", "7"),
        ({"answer": True}, None, None),
        ({"author": "x"}, None, None),
        ({"author": "x"}, "author", "x"),
    ],
)
def test_the_reference_answer_is_found_by_its_column(
    data: dict[str, Any], column: str | None, found: str | None
) -> None:
    task = Task(task_id="t", environment="single_turn", seed=0, data=data)
    assert reference_of(task, column) == found


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"prompt": "4?"}, "row 5: reward function right needs answer"),
        ({"answer": "4"}, "row 5: data: prompt missing"),
        (
            {"prompt": [CALL], "answer": "4"},
            r"row 5: prompt\[0\]: the arguments of a call of f are not a JSON object",
        ),
    ],
)  # fmt: skip
def test_the_error_of_a_bad_last_row_names_the_row(
    place: Path, last: dict[str, Any], words: str
) -> None:
    with (place / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"task_id": "last", **last}) + "\n")
    with pytest.raises(ConfigError, match=words):
        open_tasks(config_of("right"))


@pytest.mark.parametrize("form", ["dataset", "file"])
def test_nulls_in_a_column_that_a_function_requires_are_counted(
    place: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    (place / "of_nulls.py").write_text(
        "def typed(completion, answer: str, source): ...\n"
        "def lists(completions, answer, **columns): ...\n"
        "def careful(completion, answer: str | None, level=None): ...\n"
        "def takes_all(completion, answer: object): ...\n"
    )
    rows = [{"prompt": f"{n}?", "answer": "4" if n else None, "level": None} for n in range(3)]
    rows = [{**row, "source": None} for row in rows]
    tasks = [
        {"task_id": str(n), "environment": "single_turn", "seed": n, "data": row}
        for n, row in enumerate(rows)
    ]
    given = rows if form == "dataset" else tasks
    (place / "nulls.jsonl").write_text("".join(json.dumps(each) + "\n" for each in given))

    def warned(function: str) -> list[str]:
        caplog.clear()
        own = {"options": {"reward": f"of_nulls.py:{function}"}, "dataset": None}
        open_tasks(config_of(**{**own, form: "nulls.jsonl"}))
        return [each.split("column ")[1].split(", and")[0] for each in caplog.messages]

    assert warned("typed") == ["answer is null in 1 of 3 rows", "source is null in 3 of 3 rows"]
    assert warned("lists") == ["answer is null in 1 of 3 rows"]
    assert warned("careful") == warned("takes_all") == []


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_empty_texts_in_a_column_that_a_function_requires_are_counted(
    place: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    (place / "of_texts.py").write_text(
        "def typed(completion, answer: str): ...\n"
        "def careful(completion, answer: str | None): ...\n"
    )
    rows = [("1?", "1"), ("2?", ""), ("3?", "3"), ("4?", "")]
    separator = "\t" if suffix == ".tsv" else ","
    lines = [separator.join(row) for row in (("prompt", "answer"), *rows)]
    if suffix == ".jsonl":
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    (place / f"texts{suffix}").write_text("\n".join(lines))
    for function in ("typed", "careful"):
        options = {"reward": f"of_texts.py:{function}"}
        open_tasks(config_of(options=options, dataset=f"texts{suffix}"))
    [warning] = caplog.messages
    assert "column answer is an empty text in 2 of 4 rows" in warning
    assert "if the function accepts empty texts" in warning
