"""Tests of the configuration: what it accepts, and refusals that name the remedy."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

from actors.algorithm import AlgorithmSettings
from actors.environment.builtin.calculator import CalculatorOptions
from actors.environment.builtin.tools import ToolsOptions
from actors.options import read
from service.config.file import (
    ConfigError,
    config_schema,
    describe_config,
    dump_config,
    load_config,
    parse_config,
)

REPOSITORY = Path(__file__).parents[2]
VETTED = sorted((REPOSITORY / "deploy" / "configs").glob("*.yaml"))


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, **sections}


@pytest.mark.parametrize("path", VETTED, ids=lambda path: path.stem)
def test_every_vetted_configuration_is_accepted(path: Path) -> None:
    assert load_config(path).run.name == path.stem


def test_the_effective_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = parse_config(tree(algorithm={"max_lag": 2}), source="test")
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_a_section_without_keys_means_its_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree()) + "run:\n  # steps: 7\ntrainer:\n")
    expected = parse_config(tree(trainer={"num_ranks": 1}), source="test")
    assert load_config(file, ["trainer.num_ranks=1"]) == expected


def test_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree()))
    config = load_config(file, ["run.steps=7", "trainer.betas=[0.8, 0.9]", "model.tiny.seed=3"])
    assert (config.run.steps, config.trainer.betas) == (7, (0.8, 0.9))
    assert config.model.tiny is not None and config.model.tiny.seed == 3


@pytest.mark.parametrize("value", [True, False])
def test_a_removed_setting_is_ignored_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: bool
) -> None:
    """Accept the stored configuration of an older run, which names every setting, on a resume."""
    file = tmp_path / "config.yaml"
    stored = yaml.safe_load(dump_config(parse_config(tree(), source="")))
    stored["sessions"]["trains_single_turns"] = value
    file.write_text(yaml.safe_dump(stored))
    assert load_config(file) == parse_config(tree(), source="")
    assert "sessions.trains_single_turns is ignored" in caplog.text
    with pytest.raises(ConfigError, match=r"sessions\.titles"):
        load_config(file, ["sessions.titles=some"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.steps", "--set 'run.steps': expected SECTION.KEY=VALUE, such as run.steps=10"),
        ("=3", "--set '=3': expected SECTION.KEY=VALUE"),
        ("run.steps={", "--set 'run.steps={': the value is not YAML"),
    ],
)
def test_an_override_without_a_value_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_config(tree(), source="", overrides=[override])


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"run": {"stepz": 3}}, ["run.stepz", "unknown key", "'steps'"]),
        ({"runn": {}}, ["runn", "unknown key", "'run'"]),
        ({"trainer": {"lr": 1}}, ["trainer.lr: unknown key; did you mean 'learning_rate'?"]),
        (
            {"learning_rate": 1},
            ["did you mean 'algorithm.critic.learning_rate' or 'trainer.learning_rate'?"],
        ),
        ({"trainer": {"learning_rate": 1e5}}, ["trainer.learning_rate", "got 100000", "1"]),
        ({"rollouts": {"group_size": 4}}, ["did you mean 'algorithm.group_size'?"]),
        ({"algorithm": {"group_size": 1}}, ["group_size is 1", "expected at least 2", "baseline"]),
        ({"algorithm": {"group_size": 4, "min_group_size": 5}}, ["min_group_size is 5", "lower"]),
        ({"algorithm": {"window_groups": 4}}, ["window_groups is 4", "max_lag"]),
        ({"algorithm": {"loss": {"clip_low": 2}}}, ["algorithm.loss.clip_low", "got 2"]),
        ({"model": {}}, ["model.path", "neither", "tiny"]),
        ({"model": {"tiny": {}, "path": "x"}}, ["model.path", "both"]),
        ({"rollouts": {"max_tokens_per_turn": 4096}}, ["max_tokens_per_turn is 4096", "2048"]),
        ({"queue": {"max_items": 3}}, ["queue.max_items is 3", "256"]),
        ({"inference": {"weight_backend": "nccl"}}, ["weight_backend", "got 'nccl'", "collective"]),
        (
            {"inference": {"weight_backend": "collective", "gpus_per_replica": 1}},
            ["weight_backend is collective", "both on CPU or both on GPUs"],
        ),
        (
            {
                "inference": {"weight_backend": "collective", "gpus_per_replica": 0.5},
                "trainer": {"device": "cuda", "gpus_per_rank": 0.5},
            },
            ["weight_backend is collective", "whole GPUs"],
        ),
        ({"rollouts": {"outcomes": {"complete": {"disposition": "drop"}}}}, ["outcomes.complete"]),
        ({"run": {"name": "../x"}}, ["run.name", "'../x'"]),
        ({"tracing": {"endpoint": "collector:4318"}}, ["tracing.endpoint", "'collector:4318'"]),
        ({"rollouts": {"temperature": 0}}, ["rollouts.temperature", "got 0"]),
        ({"rollouts": {"temperature": 1e-30}}, ["rollouts.temperature", "got 1e-30"]),
        ({"rollouts": {"turn_deadline_s": 0.001}}, ["rollouts.turn_deadline_s", "0.1"]),
        ({"run": {"steps": None}}, ["run.steps: got null, expected a whole number"]),
        ({"run": {"steps": True}}, ["run.steps", "got True", "expected a number"]),
        ({"run": {"steps": 10**26}}, ["run.steps", "2147483647"]),
        ({"run": {"seed": 2**32}}, ["run.seed", "4294967295"]),
        ({"model": {"tiny": {"seed": 2**63}}}, ["model.tiny.seed", "4294967295"]),
        ({"trainer": {"learning_rate": True}}, ["trainer.learning_rate", "expected a number"]),
        ({"trainer": {"betas": [0.9, 1.0]}}, ["trainer.betas.1", "got 1.0"]),
        ({"trainer": {"weight_decay": float("inf")}}, ["trainer.weight_decay", "got inf"]),
        ({"trainer": {"device": "cuda"}}, ["device is cuda", "gpus_per_rank 0", "expected more"]),
        ({"trainer": {"gpus_per_rank": 1}}, ["device is cpu", "gpus_per_rank 1"]),
        ({"trainer": {"lora": {"rank": 600}}}, ["trainer.lora.rank is 600", "at most 512"]),
        ({"trainer": {"lora": {"dropout": 0.1}}}, ["trainer.lora.dropout", "got 0.1"]),
        ({"trainer": {"lora": {"targets": []}}}, ["trainer.lora.targets", "got []"]),
        ({"trainer": {"lora": {"use_dora": True}}}, ["trainer.lora", "use_dora"]),
        (
            {"trainer": {"lora": {}}, "inference": {"gpus_per_replica": 1}},
            ["trainer.lora with model.dtype float32", "expected bfloat16"],
        ),
        (
            {"trainer": {"device": "cuda", "gpus_per_rank": 0.5, "num_ranks": 2}},
            ["gpus_per_rank is 0.5 with trainer.num_ranks 2", "NCCL refuses"],
        ),
        (
            {"inference": {"tensor_parallel_size": 2, "gpus_per_replica": 1}},
            ["tensor_parallel_size is 2", "gpus_per_replica 1"],
        ),
        (
            {"rollouts": {"outcomes": {"agent_error": {"disposition": "train_penalised"}}}},
            ["rollouts.outcomes.agent_error", "penalty 0", "disposition train_penalised"],
        ),
        (
            {"rollouts": {"outcomes": {"max_turns": {"disposition": "mask", "penalty": 1}}}},
            ["rollouts.outcomes.max_turns", "penalty 1 with disposition mask"],
        ),
        (
            {"rollouts": {"outcomes": {"completed": {"disposition": "drop"}}}},
            [
                "rollouts.outcomes.completed has disposition drop",
                "expected a disposition that trains",
            ],
        ),
        (
            {"rollouts": {"outcomes": {"completed": {"disposition": "mask"}}}},
            ["rollouts.outcomes.completed has disposition mask"],
        ),
        (
            {"rollouts": {"outcomes": {"completed": {"disposition": "train", "max_retries": 1}}}},
            ["rollouts.outcomes.completed has max_retries 1", "expected 0"],
        ),
        (
            {"rollouts": {"outcomes": {"cancelled": {"disposition": "drop", "max_retries": 101}}}},
            ["max_retries", "got 101"],
        ),
        ({"inference": {"block_tokens": 40}}, ["block_tokens is 40", "multiple of 32", "set 32"]),
        (
            {"algorithm": {"turn_discount": 0.5}, "rollouts": {"max_turns": 1}},
            ["turn_discount is 0.5 with rollouts.max_turns 1"],
        ),
        (
            {"rollouts": {"outcomes": {"reward_error": {"disposition": "train"}}}},
            ["rollouts.outcomes.reward_error has disposition train", "expected drop or mask"],
        ),
        ({"algorithm": {"reference": ""}}, ["algorithm.reference", "got ''"]),
        ({"algorithm": {"critic": {"model": ""}}}, ["algorithm.critic.model", "got ''"]),
        ({"algorithm": {"reward": {"clip": [1, 1]}}}, ["algorithm.reward.clip", "lower bound"]),
        (
            {"algorithm": {"reward": {"overlong": {"max_tokens": 8, "cache_tokens": 9}}}},
            ["algorithm.reward.overlong.cache_tokens is 9", "lower"],
        ),
        (
            {"algorithm": {"reward": {"overlong": {"max_tokens": 999, "cache_tokens": 9}}}},
            ["overlong punishes from 990", "at most 512", "lower"],
        ),
        (
            {"algorithm": {"reward": {"missing_end_penalty": 0.5}}},
            ["missing_end_penalty is 0.5", "truncated_tokens"],
        ),
        (
            {"algorithm": {"max_variance_refills": 2, "baseline": "none"}},
            ["max_variance_refills is 2", "baseline none"],
        ),
        (
            {"algorithm": {"max_variance_refills": 2, "turn_discount": 0.9}},
            ["max_variance_refills is 2", "turn_discount"],
        ),
        (
            {"algorithm": {"min_usable_samples": 1}},
            ["min_usable_samples is 1, less than min_group_size 2", "raise the first"],
        ),
        (
            {"algorithm": {"baseline": "none", "scale": "std"}},
            ["algorithm.scale is std with algorithm.baseline none", "set algorithm.scale to none"],
        ),
        (
            {"algorithm": {"baseline": "critic", "scale": "mean"}},
            ["algorithm.scale is mean with algorithm.baseline critic", "needs a group baseline"],
        ),
        ({"algorithm": {"turn_discount": 1.1}}, ["algorithm.turn_discount", "got 1.1"]),
        ({"inference": {"gpus_per_replica": 1.5}}, ["gpus_per_replica is 1.5", "whole number"]),
        ({"inference": {"gpu_memory_fraction": 0}}, ["inference.gpu_memory_fraction", "got 0"]),
        ({"trainer": {"num_ranks": 0}}, ["trainer.num_ranks", "got 0"]),
        ({"trainer": {"tokens_per_micro_batch": 0}}, ["tokens_per_micro_batch", "got 0"]),
        ({"trainer": {"max_grad_norm": 0}}, ["trainer.max_grad_norm", "got 0"]),
        ({"trainer": {"adam_epsilon": -1}}, ["trainer.adam_epsilon", "got -1"]),
        ({"trainer": {"dtype": "float16"}}, ["trainer.dtype", "'float32' or 'bfloat16'"]),
        ({"run": {"seed": -1}}, ["run.seed", "got -1"]),
        ({"rollouts": {"max_turns": 0}}, ["rollouts.max_turns", "got 0"]),
        ({"rollouts": {"episode_deadline_s": float("nan")}}, ["episode_deadline_s", "finite"]),
        ({"algorithm": {"min_group_size": 0}}, ["algorithm.min_group_size", "got 0"]),
        ({"algorithm": {"max_lag": -1}}, ["algorithm.max_lag", "got -1"]),
        ({"trainer": {"lora": [16]}}, ["trainer.lora: got [16], expected a map", "rank, alpha"]),
        ({"trainer": {"lora": {"targets": "q_proj"}}}, ["targets: got 'q_proj', expected a list"]),
        (
            {"trainer": {"lora": {"targets": []}}},
            ["targets: got [], expected a list of at least 1"],
        ),
        ({"evaluation": {"sets": {"a": 5}}}, ["evaluation.sets.a: got 5, expected a map"]),
        ({"algorithm": {"max_variance_refills": -1}}, ["max_variance_refills", "got -1"]),
        ({"algorithm": {"window_groups": 0, "max_lag": 1}}, ["window_groups", "got 0"]),
        ({"algorithm": {"reward": {"missing_end_penalty": -1}}}, ["missing_end_penalty", "got -1"]),
        (
            {
                "algorithm": {
                    "reward": {"overlong": {"max_tokens": 4, "cache_tokens": 2, "factor": 0}}
                }
            },
            ["overlong.factor", "got 0"],
        ),
        (
            {"algorithm": {"reward": {"kl": {"coefficient": 1, "estimator": "k2"}}}},
            ["algorithm.reward.kl.estimator", "got 'k2'", "expected 'k1' or 'k3'"],
        ),
        (
            {"rollouts": {"outcomes": {"agent_error": {"disposition": "drop", "max_retris": 1}}}},
            ["outcomes.agent_error.max_retris: unknown key", "'max_retries'"],
        ),
        ({"rollouts": {"template_options": {"a": [1]}}}, ["template_options.a", "got a list"]),
        ({"algorithm": {"baseline": "none"}}, ["scale is std", "baseline none", "scale to none"]),
        (
            {"algorithm": {"baseline": "none", "scale": "mean"}},
            ["algorithm.scale is mean with algorithm.baseline none", "choose a group baseline"],
        ),
        (
            {
                "inference": {"weight_backend": "collective"},
                "trainer": {"device": "cuda", "gpus_per_rank": 1},
            },
            ["weight_backend is collective", "gpus_per_replica 0"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_configuration_is_refused_with_its_value_and_a_remedy(
    sections: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config(tree(**sections), source="test.yaml")
    for word in ("test.yaml", *words):
        assert word in str(refusal.value)


def test_all_wrong_values_of_a_file_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config(tree(run={"steps": 0, "seed": -1}), source="test.yaml")
    assert "run.steps" in str(refusal.value) and "run.seed" in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    ["- a\n- b\n", "a: [1,\n", "", "run: {name: 2026-11-31}"],
    ids=["list", "broken", "empty", "no date"],
)
def test_a_file_without_sections_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"expected sections|is not YAML"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run:\n  steps: 1\n  steps: 2\n", r"'steps' appears a second time, in line 3"),
        ("run: {}\nmodel: {}\nrun: {}\n", r"'run' appears a second time, in line 3"),
        ("tasks: {options: {a: 1, a: 2}}", r"'a' appears a second time"),
    ],
)
def test_a_duplicate_key_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("yes:\n  steps: 1\n", "got the key yes in line 1, which YAML reads as true or false; exp"),
        ("run: {~: 1}\n", "got the key ~ in line 1, which YAML reads as null"),
        ("", "is empty, expected sections such as run, model, tasks; write them"),
    ],
)
def test_a_key_that_is_not_text_and_an_empty_file_are_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "number"), [("010", 8), ("12:30", 750), ("-1:30", -90), ("1:30.5", 90.5)]
)
def test_an_unquoted_octal_or_sexagesimal_number_is_refused(
    tmp_path: Path, text: str, number: float
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"run:\n  steps: {text}\n")
    with pytest.raises(ConfigError, match=f"got {text} in line 2, .* reads as the number {number}"):
        load_config(path)
    tree: dict[str, Any] = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
    with pytest.raises(ConfigError, match=f"got {text} in line 1"):
        parse_config(tree, source="test", overrides=[f"tasks.options.at={text}"])
    config = parse_config(tree, source="test", overrides=[f"tasks.options.at='{text}'"])
    assert config.tasks.options["at"] == text
    # The dumped configuration of a run can be read again.
    assert parse_config(yaml.safe_load(dump_config(config)), source="test") == config
    path.write_text(dump_config(config))
    assert load_config(path).tasks.options["at"] == text


def test_an_override_below_a_value_is_refused_and_keeps_the_value() -> None:
    options = {"reward": "score.py:score"}
    tree: dict[str, Any] = {
        "model": {"tiny": {}},
        "tasks": {"environment": "single_turn", "dataset": "a.jsonl", "options": options},
    }
    with pytest.raises(ConfigError, match=r"reward is 'score\.py:score', expected a map of"):
        parse_config(tree, source="test", overrides=["tasks.options.reward.other=1"])
    with pytest.raises(ConfigError, match=r"--set .*: the value is nested too deep"):
        parse_config(tree, source="test", overrides=["run.steps=" + "[" * 20_000])


def test_aliases_that_expand_to_too_many_values_are_refused(tmp_path: Path) -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    bomb = "\n".join(["a0: &a0 [1, 1]", *levels, "run: {name: *a11}"])
    file = tmp_path / "config.yaml"
    for text in (bomb, "tasks: {options: &all {more: *all}}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"more than 100000 values"):
            load_config(file)
    with pytest.raises(ConfigError, match=r"more than 100000 values"):
        parse_config({}, source="test", overrides=[f"run.name={{{bomb.replace(chr(10), ', ')}}}"])


def test_merged_keys_may_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {tiny: {}}\ntasks: {environment: guessing}\n"
        "rollouts: {outcomes: {cancelled: &rule {disposition: drop, max_retries: 1}, "
        "agent_error: {<<: *rule, max_retries: 2}}}\n"
    )
    rules = load_config(file).rollouts.outcomes
    assert sorted(rule.max_retries for rule in rules.values()) == [1, 2]


def test_a_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory; give the path of a YAML file"):
        load_config(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("max_lag", "window_groups", "groups_per_step", "age"),
    [(1, 3, 3, 2), (3, 9, 8, 4), (0, 1, 5, 0)],
)
def test_the_age_bound_equals_the_worked_example(
    max_lag: int, window_groups: int, groups_per_step: int, age: int
) -> None:
    config = parse_config(
        tree(
            algorithm={
                "max_lag": max_lag,
                "window_groups": window_groups,
                "groups_per_step": groups_per_step,
            }
        ),
        source="test",
    )
    assert config.algorithm.max_policy_age == age


def test_scale_mean_is_accepted_with_settings_that_make_returns_negative() -> None:
    reward = {"kl": {"coefficient": 0.1}, "clip": [-2, -1], "missing_end_penalty": 1}
    outcomes = {
        "max_turns": {"disposition": "train_penalised", "penalty": 1},
        "truncated_tokens": {"disposition": "train"},
    }
    sections = tree(algorithm={"scale": "mean", "reward": reward}, rollouts={"outcomes": outcomes})
    assert parse_config(sections, source="test").algorithm.scale == "mean"


def test_every_setting_has_a_description() -> None:
    schema = config_schema()
    sections = {"config": schema, **schema["$defs"]}
    undescribed = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, setting in section.get("properties", {}).items()
        if "description" not in setting and not _section_of(setting, sections).get("description")
    ]
    assert undescribed == []


def _section_of(setting: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the section that a setting refers to; empty if it is a plain value."""
    references = [each["$ref"] for each in (setting, *setting.get("anyOf", ())) if "$ref" in each]
    return sections[references[0].rpartition("/")[2]] if references else {}


def test_the_described_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    outcomes = {"cancelled": {"disposition": "drop", "max_retries": 1}}
    reward = {"kl": {"coefficient": 0.1}, "clip": [-1, 2]}
    config = parse_config(
        tree(rollouts={"outcomes": outcomes}, algorithm={"reward": reward}), source="test"
    )
    file = tmp_path / "config.yaml"
    file.write_text(describe_config(config))
    assert load_config(file) == config
    lines = file.read_text().splitlines()
    at = lines.index("  steps: 100")
    assert lines[at - 1] == "  # Training steps; also the number of the last policy version."


def test_the_options_of_the_environment_are_described_too(tmp_path: Path) -> None:
    config = parse_config(tree(), source="test")
    file = tmp_path / "config.yaml"
    file.write_text(describe_config(config, CalculatorOptions(high=5)))
    assert load_config(file).tasks.options == {
        "max_malformed": 3, "malformed_penalty": 0.1, "low": 1, "high": 5, "num_operands": 2,
        "operators": "+", "tool_bonus": 0.0,
    }  # fmt: skip
    lines = file.read_text().splitlines()
    assert lines[lines.index("    high: 5") - 1] == "    # The largest number."
    # A field that the dataclass inherits.
    at = lines.index("    max_malformed: 3")
    expected = "    # Largest number of malformed turns in a row; one more ends the episode."
    assert lines[at - 1] == expected


@dataclass
class Aliased:
    """Options of a user's environment; a field has another name in the configuration."""

    high: Annotated[int, Field(alias="max-high", description="The largest number.")] = 3


def test_options_with_an_alias_are_described_by_their_names(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(describe_config(parse_config(tree(), source="test"), Aliased(5)))
    assert "    # The largest number.\n    high: 5\n" in file.read_text()
    assert load_config(file).tasks.options == {"high": 5}


def test_the_options_of_judges_and_servers_are_described_without_their_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "a secret")
    given = {
        "judges": {
            "good": {
                "url": "http://j/v1", "model": "m", "prompt": "$completion", "json_field": "score",
                "api_key": "$KEY_OF_TEST", "scale": [1, 10], "body": {"on": date(2026, 11, 29)},
            }
        },
        "mcp": {"sums": {"url": "http://s/mcp", "headers": {"key": "$KEY_OF_TEST"}}},
    }  # fmt: skip
    options = read(ToolsOptions, given, where="options")
    file = tmp_path / "config.yaml"
    file.write_text(describe_config(parse_config(tree(), source="test"), options))
    shown = load_config(file).tasks.options
    assert read(ToolsOptions, shown, where="options") == options
    text = file.read_text()
    assert "secret" not in text and text.count("$KEY_OF_TEST") == 2
    lines = [line.strip() for line in text.splitlines()]
    assert lines[lines.index("max_retries: 3") - 1].startswith("# Number of retries after")
    assert (
        lines[lines.index("sums:") - 1]
        == "# Options of an MCP server, which has either a command or an address."
    )
    assert lines[lines.index("per: actor") - 1].startswith("# actor: all episodes of an actor")


def test_a_configuration_is_equal_after_pickling() -> None:
    config = parse_config(tree(algorithm={"max_lag": 2, "scale": "mean"}), source="test")
    assert pickle.loads(pickle.dumps(config)) == config


def _repeated_settings(path: Path, declared: set[str]) -> Iterator[str]:
    """Yield fields of other settings classes that repeat a setting's name and have a default.

    The default None is allowed: it means that the setting was not given.
    """
    for component in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(component, ast.ClassDef):
            continue
        is_leaf = any("__pydantic_config__" in ast.unparse(line) for line in component.body)
        if is_leaf or not component.name.endswith(("Settings", "Limits")):
            continue
        for line in component.body:
            if isinstance(line, ast.AnnAssign) and line.value is not None:
                if ast.unparse(line.value) != "None" and ast.unparse(line.target) in declared:
                    yield f"{path.name}: {component.name}.{ast.unparse(line.target)}"


def test_no_setting_is_declared_twice(tmp_path: Path) -> None:
    """Check that a default is declared only in the section of the tree that has the setting."""
    sections = config_schema()["$defs"].values()
    declared = {key for section in sections for key in section.get("properties", {})}
    assert {"num_ranks", "max_lag", "enforce_eager", "seed"} <= declared
    sources = [*(REPOSITORY / "actors").rglob("*.py"), *(REPOSITORY / "service").rglob("*.py")]
    assert [found for path in sources for found in _repeated_settings(path, declared)] == []
    copy = tmp_path / "copy.py"
    copy.write_text(
        "class EngineSettings:\n    num_replicas: int\n    enforce_eager: bool = True\n"
    )
    assert list(_repeated_settings(copy, declared)) == ["copy.py: EngineSettings.enforce_eager"]


def test_a_run_without_lag_is_synchronous() -> None:
    assert AlgorithmSettings(max_lag=0).is_synchronous
    assert not AlgorithmSettings(max_lag=1).is_synchronous


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"samples": 4}, "evaluation.samples is 4 with temperature 0"),
        ({"sets": {"a": {"samples": 4}}}, "evaluation.sets.a.samples is 4 with temperature 0"),
        ({"sets": {"a": {"file": "f.jsonl", "dataset": "d"}}}, "are both set"),
        ({"sets": {"a": {"split": "test"}}}, "or columns without a dataset"),
        ({"sets": {"a": {"file": "f.jsonl", "subset": "main"}}}, "or columns without a dataset"),
        ({"sets": {"a b": {}}}, "expected a text that matches"),
    ],
)
def test_meaningless_evaluation_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(tree(evaluation=settings), source="test")
