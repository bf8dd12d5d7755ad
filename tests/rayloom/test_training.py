"""Tests of `import rayloom`: the public names, and the command that `rayloom.train` starts."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayloom
from actors.environment.reward_functions import load_functions
from rayloom.given import in_python, name_of
from service.cli.commands.configuration import path_option, run_configuration
from service.launch.run_dir import RunDir, check_new

ROWS = [{"prompt": "Which number comes after 3?", "answer": "4"}]


def test_each_public_name_exists_and_is_documented() -> None:
    for name in rayloom.__all__:
        assert (getattr(rayloom, name).__doc__ or "").strip(), name
    assert set(rayloom.__all__) <= set(dir(rayloom))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rayloom.__getattr__("nothing")


def test_the_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, rayloom; rayloom.train; "
        "print({'ray', 'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_function_without_an_importable_module_is_stored_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bonus = 0.5

    def score(completion: str, answer: str) -> float:
        return bonus + (completion == answer)

    monkeypatch.chdir(tmp_path)
    store = RunDir(path=tmp_path / "run").functions
    module, name = name_of(score, store, what="reward").split(":")
    assert "def score(completion: str, answer: str)" in (store / f"{module}.py").read_text()
    monkeypatch.syspath_prepend(str(store))
    found = getattr(importlib.import_module(module), name)
    assert (found("4", "4"), found("5", "4")) == (1.5, 0.5)
    # The same function has the same name again, and the directory can still be used for a run.
    assert name_of(score, store, what="reward") == f"{module}:{name}"
    check_new(RunDir(path=tmp_path / "run"))


def test_a_function_of_a_module_is_passed_by_name(tmp_path: Path) -> None:
    assert name_of(check_new, tmp_path / "functions", what="reward") == (
        "service.launch.run_dir:check_new"
    )
    assert not (tmp_path / "functions").exists()


def test_a_function_that_refers_to_an_unpicklable_object_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def score(completion: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(rayloom.ConfigError, match="reward: score cannot be stored by value"):
        rayloom.train(dataset=ROWS, reward=score, run_dir=tmp_path / "run")


def test_a_refusal_of_the_command_is_raised_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rayloom.ConfigError, match=r"run\.steps: got -2, expected"):
        rayloom.train(dataset=ROWS, reward=lambda completion: 1.0, run={"steps": -2})
    with pytest.raises(rayloom.ConfigError, match="a continued run uses its own"):
        rayloom.train(resume=tmp_path, dataset=ROWS)
    for tree in ({1: {"a": 2}}, {1: 2, "run": {"name": "one"}}):
        with pytest.raises(rayloom.ConfigError, match=r"\b1: "):
            rayloom.train(tree)  # type: ignore[dict-item,arg-type]
    printed = capfd.readouterr().out
    # The progress is printed, and the reason is only raised.
    assert "rayloom: reading" in printed and "run.steps" not in printed
    assert not list(tmp_path.iterdir())


def test_a_refusal_names_every_problem_and_has_a_short_traceback(tmp_path: Path) -> None:
    wrong = {f"wrong_{number}": 1 for number in range(30)}
    with pytest.raises(rayloom.ConfigError) as refusal:
        rayloom.train(dataset=ROWS, reward="my.py:f", run_dir=tmp_path / "run", trainer=wrong)
    assert str(refusal.value).startswith("configuration for dataset and reward is refused:\n")
    assert all(f"trainer.{name}: unknown key" in str(refusal.value) for name in wrong)
    assert len(traceback.extract_tb(refusal.value.__traceback__)) == 2


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("train", {"data": ROWS}, "data: unknown argument; did you mean 'dataset'?"),
        ("train", {"rewards": check_new}, "rewards: unknown argument; did you mean 'reward'?"),
        ("train", {"train_dataset": ROWS}, "train_dataset: .* did you mean 'dataset'"),
        ("train", {"reward_funcs": check_new}, "reward_funcs: .* did you mean 'reward'"),
        ("train", {"eval_dataset": ROWS}, r'eval_dataset: .* did you mean evaluation={"sets": …}'),
        ("train", {"group_size": 8}, r'group_size: .* did you mean algorithm={"group_size": …}'),
        ("train", {"nothing": 8}, "nothing: .* expected one of config, model, .*, run, tasks, "),
        ("sft", {"reward": check_new}, "reward: unknown argument; "),
        ("evaluate", {"source": "run", "sample": 2}, "sample: .* did you mean 'samples'"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_name_that_is_probably_meant(
    call: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(rayloom.ConfigError, match=message):
        getattr(rayloom, call)(**given)
    if call == "train":
        with pytest.raises(rayloom.ConfigError, match=message), rayloom.serve(**given):
            pytest.fail("it did not start")


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (
            "got --reward without CONFIG, expected --dataset too; add --dataset or CONFIG",
            "got reward without config, expected dataset too; add dataset or config",
        ),
        ("choose another --run-dir", "choose another run_dir"),
        ("configuration for --group-reward:", "configuration for group_reward:"),
        ("--resume my run: there is none", "resume my run: there is none"),
        ("resume with --resume runs/a b\n", 'resume with the argument resume="runs/a b"\n'),
        ("to continue, add --set run.steps=N; report", 'to continue, add run={"steps": N}; report'),
        (
            "to train on, --set trainer.learning_rate=1e-5.",
            'to train on, trainer={"learning_rate": 1e-5}.',
        ),
        ("read hub/models--acme--model", "read hub/models--acme--model"),
        ("read data/x--on, a.--on", "read data/x--on, a.--on"),
        (
            "resume with --resume data/run--on/x",
            'resume with the argument resume="data/run--on/x"',
        ),
        ("with `rayloom sft --resume run`", "with `rayloom sft --resume run`"),
        ("got --model-path", "got --model-path"),
        ("tool given_e7dd6521bc582935:sc has no docstring", "tool sc has no docstring"),
    ],
)
def test_a_message_names_arguments_instead_of_options(printed: str, shown: str) -> None:
    assert in_python(printed) == in_python(shown) == shown


@pytest.mark.proof
@pytest.mark.slow
def test_a_missing_argument_and_a_tool_of_the_caller_are_named_as_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def look(where: str) -> str:
        return where

    def score(completion: str) -> float:
        return 1.0

    with pytest.raises(rayloom.ConfigError, match=r"^got reward without config, expected"):
        rayloom.train(reward=score)
    with pytest.raises(rayloom.ConfigError, match="tool look has no docstring"):
        rayloom.train(dataset=ROWS, reward=score, tools=look)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(rayloom.ConfigError, match=r"choose another run_dir$"):
        rayloom.train(dataset=ROWS, reward=score, run_dir="run")


def test_a_printed_line_names_the_argument_that_continues_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from rayloom import training

    line = "stopped\nresume with --resume runs/one\n"
    code = f"import sys; print({line!r}, end=''); sys.exit(130)"
    start = partial(subprocess.Popen, [sys.executable, "-c", code])
    started = partial(start, stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(training, "_start", lambda *_: started())
    with pytest.raises(KeyboardInterrupt):
        rayloom.train("own.yaml", run_dir=tmp_path / "run")
    assert capfd.readouterr().out == 'stopped\nresume with the argument resume="runs/one"\n'


def test_a_result_is_shown_without_its_summary() -> None:
    shown = repr(rayloom.Result(run_dir=Path("runs/one"), summary={"ledger": 3}))
    assert "runs/one" in shown and "ledger" not in shown


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"dataset": ROWS}, "run"),
        ({"dataset": "sums.jsonl"}, "sums"),
        ({"dataset": "sums.jsonl", "run": {"name": "before"}}, "before"),
        ({"dataset": ROWS, "run.name": "before"}, "before"),
        ({"dataset": ROWS, "run": {"name": "../before"}}, "..-before"),
        ({"config": {"run": {"name": "own"}}}, "own"),
        ({"config": {"run": {"name": "own"}}, "run": {"name": "before"}}, "before"),
        ({"config": "named.yaml"}, "own"),
        ({"config": "unnamed.yaml"}, "unnamed"),
    ],
)
def test_a_new_directory_begins_with_the_name_of_the_run(
    tmp_path: Path,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("named.yaml").write_text("run: {name: own}\n")
    Path("unnamed.yaml").write_text("run: {steps: 2}\n")
    with pytest.raises(rayloom.ConfigError, match="not started"):
        rayloom.train(reward="my.py:score", **given)
    directory = started[started.index("--run-dir") + 1]
    assert re.fullmatch(rf"runs/{re.escape(name)}-\d{{8}}-\d{{6}}", directory)


def test_a_directory_with_a_run_is_not_changed(tmp_path: Path) -> None:
    run_dir = RunDir(path=tmp_path / "run")
    run_dir.functions.mkdir(parents=True)
    rows = run_dir.functions / "rows.jsonl"
    rows.write_text("of the run\n")
    run_dir.database_file.write_bytes(b"")
    with pytest.raises(rayloom.ConfigError, match="holds a run and is not empty"):
        rayloom.train(dataset=ROWS, reward=lambda completion: 1.0, run_dir=run_dir.path)
    assert rows.read_text() == "of the run\n" and list(run_dir.functions.iterdir()) == [rows]


def test_a_method_is_stored_with_its_instance(tmp_path: Path) -> None:
    store = RunDir(path=tmp_path / "run").functions
    assert name_of("4".__eq__, store, what="reward").startswith("given_")
    assert name_of(RunDir(path=tmp_path).has_run, store, what="reward").startswith("given_")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of the command that `rayloom.train` would start."""
    from rayloom import training

    found: list[str] = []

    def refuse(_: str, *arguments: str) -> None:
        found[:] = arguments
        raise rayloom.ConfigError("not started")

    monkeypatch.setattr(training, "_run", refuse)
    return found


def config_of(arguments: list[str]) -> rayloom.Config:
    """Return the configuration that the command would use."""
    values: dict[str, list[str]] = {}
    for option, value in pairwise(arguments):
        values.setdefault(option, []).append(value)
    overrides = [each.removeprefix("--set=") for each in arguments if each.startswith("--set=")]
    return run_configuration(
        None if arguments[0].startswith("-") else Path(arguments[0]),
        dataset=values.get("--dataset", [None])[0],
        rewards=values.get("--reward", []),
        group_rewards=values.get("--group-reward", []),
        tools=values.get("--tools", []),
        model=values.get("--model", [None])[0],
        overrides=overrides,
    )


def test_weights_of_functions_reach_the_run(tmp_path: Path, started: list[str]) -> None:
    weights = {"orig.py:score": 0.1, check_new: 0.2}
    with pytest.raises(rayloom.ConfigError, match="not started"):
        rayloom.train(
            dataset=ROWS,
            reward=weights,
            group_reward={"orig.py:rank": 2},
            tools="tools.py:add",
            run_dir=tmp_path / "run",
        )
    tasks = config_of(started).tasks
    assert tasks.environment == "tools" and tasks.options == {
        "reward": {"orig.py:score": 0.1, "service.launch.run_dir:check_new": 0.2},
        "group_reward": {"orig.py:rank": 2},
        "tools": ["tools.py:add"],
    }


def test_stored_functions_with_the_same_name_are_numbered(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def near(completion: str, k: float = 0) -> float:
        return k

    def nearer(k: float) -> Callable[..., float]:
        def near(completion: str) -> float:
            return k

        return near

    named = partial(near, k=4)
    named.__name__ = "four"  # type: ignore[attr-defined]
    given = [near, partial(near, k=1), nearer(2), partial(near, k=3), named]
    run_dir = tmp_path / "run"
    with pytest.raises(rayloom.ConfigError, match="not started"):
        rayloom.train(
            dataset=ROWS,
            reward=dict.fromkeys(given, 1.0),
            group_reward=lambda completions: [0.0] * len(completions),
            run_dir=run_dir,
        )
    options = config_of(started).tasks.options
    store = RunDir(path=run_dir).functions
    assert not store.exists()
    # The directory was removed, because the command was refused; the names stay the same.
    others: list[str] = []
    for function in given:
        others.append(name_of(function, store, what="reward", others=others))
    assert list(options["reward"]) == others
    monkeypatch.syspath_prepend(str(store))
    found = load_functions(others)
    assert [each.name for each in found] == ["near", "unnamed", "near_2", "unnamed_2", "four"]
    assert [each.function("") for each in found] == [0, 1, 2, 3, 4]
    assert options["group_reward"].endswith(":unnamed_3")
    # The same function twice has one name, and is refused by it.
    assert name_of(given[2], store, what="reward", others=others) == others[2]


class Temperature(float):
    """A number of a user's own class, which YAML cannot express."""


def test_settings_reach_the_run_with_their_keys_and_values(
    tmp_path: Path, started: list[str]
) -> None:
    with pytest.raises(rayloom.ConfigError, match="not started"):
        rayloom.train(
            dataset="after.jsonl",
            reward="my.py:score",
            run_dir=tmp_path / "run",
            run={"steps": np.int64(3), "name": "yes"},
            trainer={"learning_rate": np.float32(1e-5), "betas": np.array([0.5, 0.25])},
            tasks={"options": {"reward": {"my.py:score": 0.2, "a=b.c:f": 1}, "system": "a: [b]"}},
            evaluation={"sets": {"held": {"file": Path("held.jsonl")}}},
            rollouts={"max_turns": 1, "temperature": Temperature(0.5)},
            model=Path("models/own"),
        )
    config = config_of(started)
    assert (config.run.steps, config.run.name) == (3, "yes")
    assert config.trainer.learning_rate == pytest.approx(1e-5)
    assert config.rollouts.temperature == 0.5
    assert config.trainer.betas == (0.5, 0.25)
    reward = {"my.py:score": 0.2, "a=b.c:f": 1}
    assert config.tasks.options == {"reward": reward, "system": "a: [b]"}
    assert config.evaluation.sets["held"].file == Path("held.jsonl")
    assert config.model.path == "models/own"


def test_an_empty_mapping_of_functions_means_no_functions(
    tmp_path: Path, started: list[str]
) -> None:
    with pytest.raises(rayloom.ConfigError, match="not started"):
        rayloom.train("own.yaml", reward={}, group_reward={}, run_dir=tmp_path / "run")
    assert started == ["own.yaml", "--run-dir", str(tmp_path / "run")]


def test_dots_in_a_key_are_a_path_unless_the_user_chooses_the_keys(
    tmp_path: Path, started: list[str]
) -> None:
    with pytest.raises(rayloom.ConfigError, match="not started"):
        rayloom.train(
            dataset="after.jsonl",
            reward="my.py:score",
            run_dir=tmp_path / "run",
            trainer={"lora.rank": 8, "lora": {"alpha": 4}},
            tasks={"options.system": "Add.", "options": {"names": {"b.c": 1}}},
        )
    config = config_of(started)
    assert (config.trainer.lora.rank, config.trainer.lora.alpha) == (8, 4)
    assert config.tasks.options == {
        "reward": "my.py:score", "system": "Add.", "names": {"b.c": 1}
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"audit": {"shadow": check_new}},
        {"config": {"audit": {"shadow": check_new}}},
        {"run": {"name": b"text"}},
        {"run": {"steps": {3}}},
        {"tasks": {"options": {check_new: 1.0}}},
        {"tasks": {"options": {(1, 2): 1.0}}},
        {"config": ["run"]},
        {"config": b"run.yaml"},
        {"resume": b"run"},
        {"model": 3},
    ],
)
def test_an_invalid_setting_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(rayloom.ConfigError, match=r"got an? .*, expected "):
        rayloom.train(**settings, **({} if "resume" in settings else {"run_dir": tmp_path / "run"}))
    assert not list(tmp_path.iterdir())


def test_a_configuration_may_be_a_mapping_or_loaded_before(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree: dict[str, Any] = {"model": {"path": Path("own")}, "run": {"steps": np.int64(7)}}
    tree["tasks"] = {"environment": "guessing"}
    read = rayloom.load_config(tree, ["run.name=one"])
    assert (read.model.path, read.run.steps, read.run.name) == ("own", 7, "one")
    configs: list[rayloom.Config] = []

    def keep(_: str, *arguments: str) -> None:
        # `train` removes the file of a mapping when it returns, so copy its text.
        configs.append(config_of(list(arguments)))
        raise rayloom.ConfigError("not started")

    monkeypatch.setattr("rayloom.training._run", keep)
    for given in (tree, read):
        with pytest.raises(rayloom.ConfigError, match="not started"):
            rayloom.train(given, run_dir=tmp_path / "run", run={"name": "one"})
    assert configs == [read, read]
    for wrong in (None, b"config.yaml", read, 3):
        with pytest.raises(
            rayloom.ConfigError, match=r"config: got an? .*, expected a YAML file's"
        ):
            rayloom.load_config(wrong)  # type: ignore[arg-type]


def test_paths_may_begin_with_the_home_directory(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rayloom.ConfigError, match="not started"):
        rayloom.train(
            "~/run.yaml", dataset="~/rows.jsonl", model="~/model", run_dir="~/run", reward="my.py:f"
        )
    home = str(tmp_path / "home")
    assert started[:5] == [
        f"{home}/run.yaml",
        "--run-dir",
        f"{home}/run",
        "--model",
        f"{home}/model",
    ]
    assert not list(tmp_path.glob("~"))
    with pytest.raises(rayloom.ConfigError, match="not started"):
        rayloom.evaluate(Path("~/run"), checkpoint="~/step", out="~/out.jsonl")
    assert started == [f"{home}/run", f"--checkpoint={home}/step", f"--out={home}/out.jsonl"]
    assert path_option("--run-dir", "~/run") == tmp_path / "home" / "run"
    assert path_option("--run-dir", "~nouser/run") == Path("~nouser/run")


@pytest.mark.parametrize("what", ["reward", "group_reward", "tools"])
@pytest.mark.parametrize("given", [3, object(), rayloom, b"my.py:score", {check_new}, [3], None])
def test_a_value_that_is_not_a_function_is_refused(tmp_path: Path, what: str, given: Any) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(rayloom.ConfigError, match=f"^{what}: got an? .*, expected a function, "):
        rayloom.train(dataset=ROWS, run_dir=run_dir, **{what: given})
    assert not run_dir.exists()


def test_tools_with_weights_and_functions_with_two_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(rayloom.ConfigError, match="tools: got a dict, expected a function"):
        rayloom.train(dataset=ROWS, tools={"t.py:add": 1.0}, run_dir=tmp_path / "run")  # type: ignore[arg-type]
    twice = {check_new: 1.0, "service.launch.run_dir:check_new": 2.0}
    with pytest.raises(rayloom.ConfigError, match="expected each function once"):
        rayloom.train(dataset=ROWS, reward=twice, run_dir=tmp_path / "run")


@pytest.mark.proof
@pytest.mark.slow
def test_serve_and_evaluate_refuse_what_their_commands_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rayloom.ConfigError, match=r"run\.stepz"):
        with rayloom.serve({"run": {"stepz": 1}}):
            pytest.fail("it did not start")
    with pytest.raises(rayloom.ConfigError, match=r"nothing\.yaml does not exist"):
        rayloom.evaluate("nothing.yaml", tasks=2)
    assert not list(tmp_path.iterdir())
