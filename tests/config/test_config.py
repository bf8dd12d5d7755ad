"""The configuration tree and what it refuses, with sentences that name the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.merge.shaping import Overlong, ReturnRange, ShapingSettings
from actors.types import Outcome
from service.config.file import ConfigError, dump_config, load_config, parse_config
from service.config.settings_of import (
    engine_settings,
    environment_settings,
    merge_settings,
    queue_settings,
    trainer_settings,
)
from service.config.tree import Config

VETTED = sorted((Path(__file__).parents[2] / "deploy" / "configs").glob("*.yaml"))


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


def test_overrides_are_laid_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree()))
    config = load_config(file, ["run.steps=7", "trainer.betas=[0.8, 0.9]", "model.tiny.seed=3"])
    assert (config.run.steps, config.trainer.betas) == (7, (0.8, 0.9))
    assert config.model.tiny is not None and config.model.tiny.seed == 3


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"run": {"stepz": 3}}, ["run.stepz", "unknown key", "'steps'"]),
        ({"runn": {}}, ["runn", "unknown key", "'run'"]),
        ({"algorithm": {"group_size": 1}}, ["group_size is 1", "expected at least 2", "baseline"]),
        ({"algorithm": {"group_size": 4, "min_group_size": 5}}, ["min_group_size is 5", "lower"]),
        ({"algorithm": {"window_groups": 4}}, ["window_groups is 4", "max_lag"]),
        ({"algorithm": {"loss": {"clip_low": 2}}}, ["algorithm.loss.clip_low", "got 2"]),
        ({"model": {}}, ["model.path", "neither", "tiny"]),
        ({"model": {"tiny": {}, "path": "x"}}, ["model.path", "both"]),
        ({"rollouts": {"max_tokens_per_turn": 4096}}, ["max_tokens_per_turn is 4096", "2048"]),
        ({"queue": {"max_items": 3}}, ["queue.max_items is 3", "256"]),
        ({"inference": {"weight_backend": "nccl"}}, ["weight_backend is nccl", "object_store"]),
        ({"rollouts": {"outcomes": {"complete": {"disposition": "drop"}}}}, ["outcomes.complete"]),
        ({"run": {"name": "../x"}}, ["run.name", "'../x'"]),
        ({"rollouts": {"temperature": 0}}, ["rollouts.temperature", "got 0"]),
        ({"rollouts": {"temperature": 1e-30}}, ["rollouts.temperature", "got 1e-30"]),
        ({"rollouts": {"turn_deadline_s": 0.001}}, ["rollouts.turn_deadline_s", "0.1"]),
        ({"run": {"steps": True}}, ["run.steps", "got True", "expected a number"]),
        ({"run": {"steps": 10**26}}, ["run.steps", "2147483647"]),
        ({"run": {"seed": 2**32}}, ["run.seed", "4294967295"]),
        ({"model": {"tiny": {"seed": 2**63}}}, ["model.tiny.seed", "4294967295"]),
        ({"trainer": {"learning_rate": True}}, ["trainer.learning_rate", "expected a number"]),
        ({"trainer": {"betas": [0.9, 1.0]}}, ["trainer.betas.1", "got 1.0"]),
        ({"trainer": {"weight_decay": float("inf")}}, ["trainer.weight_decay", "got inf"]),
        ({"trainer": {"device": "cuda"}}, ["device is cuda", "gpus_per_rank 0", "expected more"]),
        ({"trainer": {"gpus_per_rank": 1}}, ["device is cpu", "gpus_per_rank 1"]),
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
            ["rollouts.outcomes.completed has disposition drop", "expected one of those that"],
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
            {"algorithm": {"scale": "mean", "reward": {"kl": {"coefficient": 0.1}}}},
            ["algorithm.scale is mean", "with algorithm.reward.kl", "leave the other out"],
        ),
        (
            {"algorithm": {"scale": "mean", "reward": {"clip": [-2, -1]}}},
            ["algorithm.scale is mean", "with algorithm.reward.clip"],
        ),
        (
            {
                "algorithm": {"scale": "mean"},
                "rollouts": {
                    "outcomes": {"max_turns": {"disposition": "train_penalised", "penalty": 1}}
                },
            },
            ["algorithm.scale is mean", "with train_penalised"],
        ),
        ({"algorithm": {"turn_discount": 1.1}}, ["algorithm.turn_discount", "got 1.1"]),
        ({"inference": {"gpus_per_replica": 1.5}}, ["gpus_per_replica is 1.5", "whole number"]),
        (
            {
                "inference": {"weight_backend": "nccl"},
                "trainer": {"device": "cuda", "gpus_per_rank": 1},
            },
            ["weight_backend is nccl", "gpus_per_replica 0"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_configuration_is_refused_with_what_got_and_remedy(
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


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1,\n", ""], ids=["list", "broken", "empty"])
def test_a_file_that_is_no_tree_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"expected sections|is not YAML"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run:\n  steps: 1\n  steps: 2\n", r"'steps' stands a second time, in line 3"),
        ("run: {}\nmodel: {}\nrun: {}\n", r"'run' stands a second time, in line 3"),
        ("tasks: {options: {a: 1, a: 2}}", r"'a' stands a second time"),
    ],
)
def test_a_key_that_stands_there_twice_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_merged_keys_may_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {tiny: {}}\ntasks: {environment: guessing}\n"
        "rollouts: {outcomes: {cancelled: &rule {disposition: drop, max_retries: 1}, "
        "agent_error: {<<: *rule, max_retries: 2}}}\n"
    )
    rules = load_config(file).rollouts.outcomes
    assert sorted(rule.max_retries for rule in rules.values()) == [1, 2]


def test_a_directory_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory; give the path of a YAML file"):
        load_config(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("max_lag", "window_groups", "groups_per_step", "age"),
    [(1, 3, 3, 2), (3, 9, 8, 4), (0, 1, 5, 0)],
)
def test_the_age_bound_is_the_worked_example(
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


def test_the_defaults_shape_no_reward_and_credit_by_trajectory() -> None:
    found = merge_settings(parse_config(tree(), source="test"))
    assert found.shaping == ShapingSettings()
    assert found.turn_discount is None and not found.normalises


def test_prefixes_are_shared_unless_a_run_asks_for_a_comparison() -> None:
    for trainer, is_shared in (({}, True), ({"share_prefixes": False}, False)):
        config = parse_config(tree(trainer=trainer), source="test")
        assert merge_settings(config).share_prefixes is is_shared


def test_rewards_credit_and_refills_reach_their_rooms() -> None:
    overlong = {"max_tokens": 64, "cache_tokens": 16, "factor": 0.5}
    config = parse_config(
        tree(
            rollouts={
                "outcomes": {
                    "truncated_tokens": {"disposition": "train_penalised", "penalty": 0.25}
                }
            },
            algorithm={
                "turn_discount": 0.9,
                "normalise_advantages": True,
                "min_group_size": 3,
                "reward": {"clip": [-1, 2], "overlong": overlong, "missing_end_penalty": 0.5},
            },
        ),
        source="test",
    )
    found = merge_settings(config)
    assert found.shaping == ShapingSettings(
        clip=ReturnRange(low=-1, high=2),
        overlong=Overlong(max_tokens=64, cache_tokens=16, factor=0.5),
        missing_end_penalty=0.5,
    )
    assert (found.turn_discount, found.normalises, found.min_group_size) == (0.9, True, 3)
    assert found.policies["guessing"].rule(Outcome.TRUNCATED_TOKENS).penalty == 0.25
    refilled = parse_config(tree(algorithm={"max_variance_refills": 4}), source="test")
    assert queue_settings(refilled).max_variance_refills == 4
    assert queue_settings(config).max_variance_refills == 0


def test_the_trainer_scores_at_the_temperature_that_is_sampled_at(tmp_path: Path) -> None:
    config = parse_config(tree(rollouts={"temperature": 0.7}), source="test")
    assert environment_settings(config, "one").environments[0].episode.temperature == 0.7
    assert trainer_settings(config, model="m", checkpoint_dir=tmp_path).temperature == 0.7


@pytest.mark.parametrize("max_lag", [0, 1])
def test_engines_forget_their_cached_prefixes_at_a_publish_where_there_is_no_lag(
    max_lag: int,
) -> None:
    config = parse_config(tree(algorithm={"max_lag": max_lag}), source="test")
    settings = engine_settings(config, model="m", stop_token_ids=[2])
    assert settings.reset_prefix_cache_on_publish == (max_lag == 0)


def test_every_setting_has_a_description() -> None:
    def undescribed(model: Any, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            nested = [
                part
                for part in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if isinstance(part, type) and hasattr(part, "model_fields")
            ]
            if nested:
                found += undescribed(nested[0], f"{prefix}{name}.")
            elif not field.description:
                found.append(f"{prefix}{name}")
        return found

    assert undescribed(Config) == []
