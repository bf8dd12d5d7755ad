"""Tests of the configuration of learning-rate schedules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.algorithm_checks import schedule_warnings
from service.config.file import ConfigError, parse_config
from service.config.resumable import refused_changes
from service.config.tree import Config

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def config_with(trainer: dict[str, Any], *, steps: int = 50, **algorithm: Any) -> Config:
    tree = {
        "run": {"steps": steps},
        "model": {"tiny": {}},
        "tasks": {"environment": "guessing"},
        "trainer": trainer,
        "algorithm": algorithm,
    }
    return parse_config(tree, source="test")


def with_critic(critic: dict[str, Any], **trainer: Any) -> Config:
    return config_with(trainer, baseline="critic", scale="none", critic=critic)


def test_a_schedule_without_a_length_ends_with_the_run() -> None:
    config = config_with({"schedule": {"kind": "cosine"}}, steps=50, minibatches=4, epochs=2)
    ranks = config.rank_settings(model="m", checkpoint_dir=Path("c"))
    assert ranks.trainer.schedule.updates == 50 * 4 * 2
    assert ranks.trainer.schedule.kind == "cosine"
    own = config_with({"schedule": {"kind": "linear", "updates": 30}}, minibatches=4)
    assert own.policy_schedule.updates == 30


def test_a_critics_schedule_has_one_update_for_each_step() -> None:
    config = with_critic({"schedule": {"kind": "wsd", "decay_updates": 10}})
    ranks = config.rank_settings(model="m", checkpoint_dir=Path("c"))
    assert ranks.algorithm.critic.schedule.updates == 50
    assert ranks.algorithm.critic.schedule.decay_updates == 10
    assert ranks.trainer.schedule.kind == "constant"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"kind": "exponential"}, ["trainer.schedule.kind", "constant", "cosine", "wsd"]),
        ({"kind": "linear", "min_ratio": 1.5}, ["trainer.schedule.min_ratio", "got 1.5"]),
        ({"kind": "linear", "updates": 0}, ["trainer.schedule.updates", "got 0"]),
        ({"kind": "wsd", "decay_updates": 0}, ["trainer.schedule.decay_updates", "got 0"]),
        ({"warmup": 3}, ["trainer.schedule.warmup"]),
        (
            {"min_ratio": 0.1},
            ["min_ratio is 0.1 with kind constant", "set trainer.schedule.kind"],
        ),
        ({"updates": 9}, ["updates is 9 with kind constant"]),
        ({"kind": "wsd"}, ["decay_updates is null with kind wsd"]),
        ({"decay_updates": 5}, ["decay_updates is 5 with kind constant"]),
        ({"kind": "cosine", "decay_updates": 5}, ["decay_updates is 5 with kind cosine"]),
        ({"kind": "linear", "updates": 5}, ["warmup_updates is 5", "has 5 updates"]),
        (
            {"kind": "wsd", "decay_updates": 46},
            ["warmup_updates is 5 and trainer.schedule.decay_updates 46", "has 50 updates"],
        ),
    ],
)
def test_an_impossible_schedule_is_refused(schedule: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with({"schedule": schedule})
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_schedule_may_use_all_updates() -> None:
    assert config_with({"schedule": {"kind": "wsd", "decay_updates": 45}})
    assert config_with({"schedule": {"kind": "linear", "updates": 6}})
    assert config_with({"schedule": {"kind": "linear", "updates": 1}, "warmup_updates": 0})


def test_a_critics_schedule_is_checked_in_the_same_way() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.schedule\.decay_updates is null"):
        with_critic({"schedule": {"kind": "wsd"}})
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.warmup_updates is 50"):
        with_critic({"schedule": {"kind": "linear"}, "warmup_updates": 50})
    with pytest.raises(ConfigError, match=r"algorithm\.critic is set with algorithm\.baseline"):
        config_with({}, critic={"schedule": {"kind": "linear"}})


def test_a_warmup_longer_than_the_run_is_a_warning() -> None:
    config = with_critic({"warmup_updates": 3}, warmup_updates=51)
    (warning,) = schedule_warnings(config)
    assert "trainer.warmup_updates is 51, and the run has 50 updates" in warning
    (warning,) = schedule_warnings(with_critic({"warmup_updates": 51}, warmup_updates=50))
    assert warning.startswith("algorithm.critic.warmup_updates is 51")
    assert not [*schedule_warnings(config_with({"warmup_updates": 400}, minibatches=8))]
    linear = {"schedule": {"kind": "linear", "updates": 90}, "warmup_updates": 60}
    assert not [*schedule_warnings(config_with(linear))]


def test_a_run_may_be_resumed_with_another_schedule_or_length() -> None:
    before = config_with({"schedule": {"kind": "cosine"}})
    for now in (
        config_with({"schedule": {"kind": "wsd", "decay_updates": 5}}),
        config_with({"schedule": {"kind": "cosine"}}, steps=80),
        config_with({}),
    ):
        assert refused_changes(before, now) == []


def test_the_block_on_the_page_is_a_valid_schedule() -> None:
    (block,) = re.findall(r"```yaml\n(trainer:.*?)```", PAGE.read_text(), re.DOTALL)
    config = config_with(yaml.safe_load(block)["trainer"], steps=200)
    assert config.policy_schedule.updates == 200 and config.policy_schedule.decay_updates == 100
