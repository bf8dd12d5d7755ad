"""Tests of what is refused before a start, because the machine or the files cannot run it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from worlds.models.trait_templates import TEMPLATES

from actors.environment.tokenizer import load_tokenizer
from actors.trainer.tiny.model import build_tiny_model
from service.config import preflight, tasks
from service.config.file import ConfigError, parse_config
from service.config.tree import Config
from service.launch import run_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(directory, warmup_steps=0)
    return str(directory)


def config_with(model_path: str, **sections: Any) -> Config:
    tree = {"model": {"path": model_path}, "tasks": {"environment": "guessing"}, **sections}
    return parse_config(tree, source="test")


def check_all(config: Config, model_path: str) -> None:
    observation = preflight.check_without_model(config)
    preflight.check_with_model(config, observation, model_path=model_path)


def test_a_sound_configuration_passes(model: str) -> None:
    check_all(config_with(model), model)


def cut_short(directory: Path) -> Path:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return file


def with_another_header(directory: Path) -> Path:
    file = directory / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    return file


def written(name: str, text: str) -> Callable[[Path], Path]:
    """Return a function that writes a text into a file of a model's directory."""

    def write(directory: Path) -> Path:
        (directory / name).write_text(text)
        return directory / name

    return write


def of_unknown_type(directory: Path) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "nonesuch"}))
    return file


def with_broken_settings(directory: Path) -> Path:
    file = directory / "config.json"
    file.write_text(file.read_text()[:-20])
    return file


def in_two_files_of_which_one_is_missing(directory: Path) -> Path:
    names = list(load_file(directory / "model.safetensors"))
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    weight_map[names[0]] = "model-00002-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory / "model-00002-of-00002.safetensors"


def with_a_template_in_another_encoding(directory: Path) -> Path:
    file = directory / "chat_template.jinja"
    file.write_bytes("é{{ messages[0].content }}".encode("latin-1"))
    return file


def with_a_type_in_the_settings(directory: Path) -> Path:
    return Path(with_settings(directory, rms_norm_eps="1e-6")) / "config.json"


def without_weights(directory: Path) -> Path:
    save_file({}, directory / "model.safetensors")
    return directory / "model.safetensors"


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        with_another_header,
        of_unknown_type,
        with_broken_settings,
        pytest.param(written("generation_config.json", "[]"), id="with_settings_that_are_a_list"),
        pytest.param(written("tokenizer.json", "{}"), id="with_an_empty_tokenizer"),
        pytest.param(
            written("generation_config.json", '{"eos_token_id": ["</s>"]}'),
            id="with_an_end_that_is_no_id",
        ),
        pytest.param(written("tokenizer.json", "{"), id="with_a_broken_tokenizer"),
        pytest.param(
            written("special_tokens_map.json", "["), id="with_a_broken_map_of_special_tokens"
        ),
        with_a_template_in_another_encoding,
        with_a_type_in_the_settings,
        in_two_files_of_which_one_is_missing,
        without_weights,
    ],
)
def test_a_damaged_model_is_refused_with_the_name_of_the_file(
    model: str, tmp_path: Path, damage: Any
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    file = damage(directory)
    with pytest.raises(ConfigError, match=rf"model\.path.*{re.escape(file.name)}.*expected"):
        check_all(config_with(str(directory)), str(directory))


def with_settings(directory: Path, **changes: Any) -> str:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(directory)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "cannot be trained: .*'dynamic', whose table changes .*; remove rope_scaling",
        ),
        (
            {"head_dim": 16},
            "cannot be served: its attention has heads of 16 dimensions, expected .*; choose",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"has quantised weights \(gptq\), expected weights in .*; choose the model",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 0},
            "cannot be trained: sliding_window is 0 .*; expected a number of tokens, or null",
        ),
    ],
)
def test_a_model_that_trainer_or_engine_cannot_run_is_refused_before_anything_starts(
    model: str, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    path = with_settings(directory, **changes)
    with pytest.raises(ConfigError, match=rf"model\.path: {re.escape(path)} {expected}"):
        check_all(config_with(path), path)
    # A resumed run loaded the model before, so it skips this check and its imports.
    config = config_with(path)
    observations = preflight.check_without_model(config)
    preflight.check_with_model(config, observations, model_path=path, was_loaded=True)


def test_a_reference_that_the_trainer_cannot_run_is_refused_under_its_key(
    model: str, tmp_path: Path
) -> None:
    directory = tmp_path / "reference"
    shutil.copytree(model, directory)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    path = with_settings(directory, rope_parameters=rope)
    algorithm = {"loss": {"kl": {"coefficient": 0.1}}, "reference": path}
    with pytest.raises(ConfigError, match=rf"algorithm\.reference: {re.escape(path)} cannot be"):
        check_all(config_with(model, algorithm=algorithm), model)
    # The head size does not matter, because no engine serves a reference.
    path = with_settings(directory, rope_parameters={"rope_type": "default"}, head_dim=16)
    settings = AutoConfig.from_pretrained(path)
    AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(path)
    check_all(config_with(model, algorithm=algorithm), model)


def test_a_model_whose_answers_would_never_end_is_refused(model: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    for name, key in (("tokenizer_config", "eos_token"), ("generation_config", "eos_token_id")):
        file = directory / f"{name}.json"
        tree = json.loads(file.read_text())
        del tree[key]
        file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"model\.path: .* end-of-sequence token; set eos_token"):
        check_all(config_with(str(directory)), str(directory))


@pytest.mark.parametrize("path", ["/no/such/model", "./none", "none"])
def test_a_missing_model_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*does not exist.*rayloom model tiny"):
        preflight.check_model_source(path, key="model.path")
    # A resumed run may have lost its model too, so each start checks this.
    with pytest.raises(ConfigError, match=r"model\.path.*does not exist"):
        preflight.check_without_model(config_with(path))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json, \*\.safetensors"):
        preflight.check_model_source(str(tmp_path), key="model.path")


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"loss": {"kl": {"coefficient": 0.1}}, "reference": "/nope"}, r"algorithm\.reference"),
        (
            {"baseline": "critic", "scale": "none", "critic": {"model": "/nope"}},
            r"algorithm\.critic\.model",
        ),
    ],
)
def test_a_missing_reference_or_critic_is_refused_under_its_key(
    model: str, algorithm: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: /nope does not exist"):
        preflight.check_model_sources(config_with(model, algorithm=algorithm))


def test_a_reference_of_a_smaller_vocabulary_is_refused(model: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(model, small)
    settings = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**settings, "vocab_size": 100}))
    algorithm = {"loss": {"kl": {"coefficient": 0.1}}, "reference": str(small)}
    config = config_with(model, algorithm=algorithm)
    with pytest.raises(ConfigError, match=r"algorithm\.reference.*vocabulary of 100 ids, expected"):
        check_all(config, model)
    check_all(config_with(model, algorithm={**algorithm, "reference": model}), model)


def test_a_context_beyond_the_model_is_refused(model: str) -> None:
    config = config_with(model, model={"path": model, "max_context_tokens": 10**6})
    with pytest.raises(ConfigError, match=r"max_context_tokens is 1000000.*2048 positions"):
        check_all(config, model)


def test_a_prompt_longer_than_the_context_is_refused(model: str) -> None:
    config = config_with(
        model,
        model={"path": model, "max_context_tokens": 32},
        # The prompt contains the schema of the tool.
        tasks={"environment": "calculator"},
        rollouts={"max_tokens_per_turn": 8},
    )
    with pytest.raises(ConfigError, match=r"first prompt has \d+ tokens.*raise that"):
        check_all(config, model)


@pytest.mark.parametrize(
    ("template", "parser", "refused"),
    [
        (TEMPLATES["plain"], "auto", None),
        (TEMPLATES["plain"].replace("tool_call>", "call>"), "hermes", None),
        (TEMPLATES["plain"].replace("tool_call>", "call>"), "auto", "is not known; name one"),
        (TEMPLATES["knows no tools"], "hermes", "shows no tools and no calls: calculator"),
    ],
)
def test_tools_that_a_model_cannot_use_are_refused_before_the_start(
    model: str, tmp_path: Path, template: str, parser: str, refused: str | None
) -> None:
    other = str(shutil.copytree(model, tmp_path / "model"))
    tokenizer: Any = load_tokenizer(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(other)
    config = config_with(
        other, tasks={"environment": "calculator"}, inference={"tool_parser": parser}
    )
    if refused is None:
        check_all(config, other)
        return
    with pytest.raises(ConfigError, match=refused):
        check_all(config, other)


ENVIRONMENTS = """
import asyncio, sys, time
from actors.environment.protocol import Message, Observation, Role

class Base:
    async def reset(self, task):
        return None
    async def step(self, action):
        raise NotImplementedError
    async def close(self):
        pass

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Own(BaseException):
    pass

class Nothing(Base):
    pass

class Surrogate(Base):
    async def reset(self, task):
        return Observation(messages=(Message(role=Role.USER, content="a\\ud800"),))

class Unspeakable(Base):
    async def reset(self, task):
        raise Silent

class Exits(Base):
    async def reset(self, task):
        sys.exit(3)

class Raises(Base):
    async def reset(self, task):
        raise Own("mine")

class ExitsWhenMade(Base):
    def __init__(self):
        sys.exit(4)

class Blocks(Base):
    async def reset(self, task):
        time.sleep(30)

class Hangs(Base):
    async def close(self):
        await asyncio.sleep(30)

class TimesOut(Base):
    async def reset(self, task):
        raise TimeoutError("of its own")

class Synchronous(Base):
    def step(self, action):
        return None

class TakesNothing(Base):
    async def step(self):
        return None

class NoStep:
    reset, close = Base.reset, Base.close
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nothing", "NoneType, expected a rayloom.Observation"),
        ("Surrogate", "lone surrogate .* at character 1"),
        ("Unspeakable", "Silent: its text cannot be read"),
        ("Exits", r"SystemExit: 3 \(.*hostile.py:\d+ in reset"),
        ("Raises", "Own: mine"),
        ("ExitsWhenMade", "cannot be made: SystemExit: 4"),
        ("Blocks", r"blocks the event loop \(.*hostile.py:\d+ in reset\).*use asyncio.to_thread"),
        ("Hangs", "its close took more than 1 s; shorten it"),
        ("TimesOut", r"TimeoutError: of its own \(.*hostile.py:\d+ in reset"),
        ("Synchronous", r"step is not a coroutine, expected `async def step\(self, action\)`"),
        ("TakesNothing", r"step: too many positional arguments, expected `async def step\(self, a"),
        ("NoStep", r"it has no method step, expected `async def step\(self, action\)`"),
    ],
)
def test_each_fault_of_an_environment_at_the_start_is_reported_in_a_sentence(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    (tmp_path / "hostile.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    monkeypatch.setattr(tasks, "RESET_LIMIT_S", 1.0)
    monkeypatch.setattr(tasks, "BLOCKED_S", 1.0)
    config = config_with(model, tasks={"environment": f"hostile:{name}"})
    with pytest.raises(ConfigError, match=words):
        tasks.first_observation(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"environment": "gessing"}, "guessing"),
        ({"environment": "guessing", "options": {"maximum": 3}}, "maximum"),
        ({"environment": "no.such.module:Environment"}, "no.such.module"),
        ({"environment": "my/game.py:Game"}, "did you mean my.game:Game"),
        ({"environment": "guessing", "file": "/no/tasks.jsonl"}, "tasks.file"),
        ({"environment": "guessing", "file": "tasks.csv"}, "jsonl"),
    ],
)
def test_an_environment_or_task_file_that_cannot_be_used_is_refused(
    model: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_all(config_with(model, tasks=settings), model)


def test_tasks_of_another_environment_are_refused(model: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "a", "environment": "calculator", "seed": 1}\n' * 1)
    tasks = {"environment": "guessing", "file": str(file), "evaluation_tasks": 0}
    with pytest.raises(ConfigError, match="'calculator'"):
        check_all(config_with(model, tasks=tasks), model)


def test_more_memory_than_the_machine_has_is_refused(model: str) -> None:
    config = config_with(model, inference={"kv_cache_gib": 1e6})
    with pytest.raises(ConfigError, match=r"kv_cache_gib.*GiB.*lower them"):
        check_all(config, model)


def test_more_gpus_than_the_machine_has_are_refused(model: str) -> None:
    config = config_with(model, inference={"gpus_per_replica": 512.0})
    with pytest.raises(ConfigError, match=r"asks for 512 GPUs.*--address"):
        check_all(config, model)


def test_gpus_of_a_cluster_are_not_checked_on_this_machine(model: str) -> None:
    config = config_with(model, inference={"gpus_per_replica": 512.0})
    preflight.check_without_model(config, is_local=False)


@pytest.mark.parametrize(
    "sections",
    [{"trainer": {"num_ranks": 10**6}}, {"rollouts": {"num_actors": 10**6}}],
    ids=["ranks", "actors"],
)
def test_more_processes_than_the_machine_could_hold_are_refused(
    model: str, sections: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"is 1000000, one process each; expected at most \d+"):
        preflight.check_without_model(config_with(model, **sections))


@pytest.mark.parametrize("port", [0, 9000])
@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 70])
def test_a_metrics_host_of_another_machine_is_refused(model: str, host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host: .*expected"):
        preflight.check_without_model(config_with(model, metrics={"host": host, "port": port}))


def test_a_metrics_port_in_use_is_refused(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"metrics\.port.*or 0 for any free one"):
            preflight.check_without_model(config_with(model, metrics={"port": port}))
        # On a cluster, another machine opens the port.
        preflight.check_machine(config_with(model, metrics={"port": port}), is_local=False)


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"is not empty .*old\.txt"):
        run_dir.check_new(run_dir.RunDir(path=tmp_path))
    (tmp_path / "rayloom.db").touch()
    with pytest.raises(ConfigError, match=r"is not empty.*--resume"):
        run_dir.check_new(run_dir.RunDir(path=tmp_path))


def test_the_files_of_an_interrupted_start_do_not_prevent_a_new_one(
    model: str, tmp_path: Path
) -> None:
    place = run_dir.RunDir(path=tmp_path)
    shutil.copytree(model, place.tiny_model)
    run_dir.write_config(place, config_with(model))
    run_dir.check_new(place)
    # The start would overwrite a configuration that was edited by hand.
    place.config_file.write_text("# mine\n" + place.config_file.read_text())
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        run_dir.check_new(place)


def test_a_refused_start_leaves_nothing_behind(model: str, tmp_path: Path) -> None:
    place = run_dir.RunDir(path=tmp_path / "runs" / "one")
    with pytest.raises(ConfigError, match="refused"), run_dir.prepared_directory(place):
        shutil.copytree(model, place.tiny_model)
        run_dir.write_config(place, config_with(model))
        raise ConfigError("refused")
    assert list(tmp_path.iterdir()) == []
    with run_dir.prepared_directory(place):
        place.database_file.touch()
    run_dir.write_config(place, config_with(model))
    with pytest.raises(ConfigError, match="refused"), run_dir.prepared_directory(place):
        raise ConfigError("refused")
    assert place.config_file.is_file()


def test_a_second_start_in_one_directory_is_refused_and_removes_nothing(
    model: str, tmp_path: Path
) -> None:
    place = run_dir.RunDir(path=tmp_path / "one")
    with run_dir.prepared_directory(place):
        run_dir.write_config(place, config_with(model))
        with (
            pytest.raises(ConfigError, match="another start is using it"),
            run_dir.prepared_directory(place),
        ):
            raise AssertionError("two starts at once")
        assert place.config_file.is_file()
        place.database_file.touch()
        # From here on, the run's lease decides which process may continue the run.
        with run_dir.prepared_directory(place):
            pass
    assert place.config_file.is_file()


@pytest.mark.parametrize("name", ["file/run", "x" * 300])
def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    place = run_dir.RunDir(path=tmp_path / name)
    with (
        pytest.raises(ConfigError, match=r"cannot be used.*--run-dir"),
        run_dir.prepared_directory(place),
    ):
        raise AssertionError("it was made")


def test_resuming_a_directory_without_a_run_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        run_dir.check_resumable(run_dir.RunDir(path=tmp_path), config_with(model))


@pytest.mark.parametrize(
    ("sections", "words"),
    [({"tasks": {"environment": "calculator"}}, "section tasks"), ({"run": {"seed": 1}}, "seed")],
)
def test_resuming_with_another_task_order_is_refused(
    model: str, tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    place = run_dir.RunDir(path=tmp_path)
    run_dir.write_config(place, config_with(model))
    place.database_file.touch()
    with pytest.raises(ConfigError, match=words):
        run_dir.check_resumable(place, config_with(model, **sections))
    run_dir.check_resumable(place, config_with(model, run={"steps": 500}))


@pytest.mark.parametrize(
    ("key", "name", "remedy"),
    [
        ("tool_parser", "hemes", "did you mean 'hermes'"),
        ("reasoning_parser", "thinking_aloud", "one of auto, "),
        ("tool_parser", "openai", "expected auto, none or"),
    ],
)
def test_a_parser_that_vllm_does_not_have_is_refused(
    model: str, key: str, name: str, remedy: str
) -> None:
    config = config_with(model, inference={key: name})
    with pytest.raises(ConfigError, match=f"inference.{key} is '{name}'.*{remedy}"):
        check_all(config, model)


def test_parsers_of_vllm_are_known_without_importing_it(model: str) -> None:
    chosen = {"tool_parser": "qwen3_coder", "reasoning_parser": "none"}
    check_all(config_with(model, inference=chosen), model)
    assert "vllm" not in sys.modules
