"""Tests of shadow verifiers: their samples, their arguments and their errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.builders.episode_builders import tokenizer
from worlds.builders.trajectory_builders import make_trajectory, make_turn

from actors.journal.files import JournalStep, TrajectoryEntry
from actors.types import Outcome, Trajectory
from service.config.file import ConfigError, parse_config
from service.config.preflight import check_without_model
from service.config.tree import Config
from service.hacking.shadow import ShadowVerifier, Verdicts

VERIFIERS = """
EXPECTED = ("Say it: 12", "8")

def right(completion, answer):
    return float(completion.strip() == answer)

def by_lists(prompts, completions, **columns):
    return [None if completions[0] == "9" else float((prompts[0], completions[0]) == EXPECTED)]

def broken(completion):
    raise KeyError("no such thing")

def needs_more(completion, author):
    return 1.0

text = "no function"
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shadow")
    (made / "shadow_of_test.py").write_text(VERIFIERS)
    rows = [{"task_id": str(n), "prompt": f"{n}?", "answer": str(n)} for n in range(8)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer().save_pretrained(made / "model")
    return made


@pytest.fixture
def place(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    return directory


def config_of(**audit: Any) -> Config:
    tree = {
        "model": {"tiny": {}},
        "tasks": {
            "environment": "single_turn",
            "dataset": "rows.jsonl",
            "evaluation_tasks": 0,
            "options": {"reward": "shadow_of_test.py:right"},
        },
        "audit": audit,
    }
    return parse_config(tree, source="for a test")


def reply(number: int, text: str, *, task: str | None = None, **fields: Any) -> Trajectory:
    prompt, sampled = (tokenizer().encode(each) for each in ("Say it: 12", f"{text}<|im_end|>"))
    turns = [make_turn(prompt, sampled)]
    made = make_trajectory(turns, rollout_id=f"g{number:06d}.0-0", **fields)
    return replace(made, task_id=str(number) if task is None else task)


def asked(place: Path, name: str, *trajectories: Trajectory, num_samples: int = 16) -> Verdicts:
    verifier = ShadowVerifier(
        config_of(),
        model=str(place / "model"),
        name=f"shadow_of_test.py:{name}",
        num_samples=num_samples,
    )
    entries = tuple(
        TrajectoryEntry(trajectory=each, reason=None, baseline_return=0.0, advantages=())
        for each in trajectories
    )
    return verifier.verdicts(
        JournalStep(
            step=1, term=1, trainer_version=0, max_policy_age=0, group_rule=None,
            num_packed_trained=0, entries=entries,
        )
    )  # fmt: skip


def test_a_verifier_gets_the_task_columns_like_a_reward_function(place: Path) -> None:
    found = asked(place, "right", reply(3, "3"), reply(4, "5"))
    assert found == {"g000003.0-0.a0": True, "g000004.0-0.a0": False}


def test_a_task_without_data_has_its_prompt_and_none_gives_no_verdict(place: Path) -> None:
    found = asked(place, "by_lists", reply(3, "8", task="gone"), reply(4, "9", task="gone"))
    assert found == {"g000003.0-0.a0": True}


def test_a_sample_depends_on_the_ids_and_has_only_scored_trajectories(place: Path) -> None:
    replies = [reply(number, str(number)) for number in range(8)]
    cut_off = reply(8, "8", task="1", outcome=Outcome.TRUNCATED_TOKENS)
    first = asked(place, "right", *replies, cut_off, num_samples=3)
    assert len(first) == 3 and cut_off.trajectory_id not in first
    assert asked(place, "right", cut_off, *replies[::-1], num_samples=3) == first
    assert cut_off.trajectory_id not in asked(place, "right", *replies, cut_off)


@pytest.mark.parametrize(
    ("name", "words"), [("broken", "no such thing"), ("needs_more", "needs author")]
)
def test_a_failed_verification_is_an_error_and_not_a_rejection(
    place: Path, name: str, words: str
) -> None:
    found = asked(place, name, reply(3, "3"), reply(4, "4"))
    assert len(found) == 2 and all(words in str(each) for each in found.values())


@pytest.mark.parametrize(
    ("audit", "words"),
    [
        ({"shadow": "shadow_of_test.py:nothing"}, "audit.shadow"),
        ({"shadow": "shadow_of_test.py:text"}, "is a str, expected a function"),
        ({"shadow": "no colon"}, "expected FILE.py:NAME"),
    ],
)
def test_an_unusable_verifier_is_refused_before_the_start(
    place: Path, audit: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_without_model(config_of(**audit))


@pytest.mark.parametrize("change", [{"audit": {"hacking": False}}, {"run": {"journal_steps": 0}}])
def test_a_verifier_that_would_never_be_called_is_refused(change: dict[str, Any]) -> None:
    tree: dict[str, Any] = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, **change}
    tree["audit"] = {"shadow": "my.py:verify", **tree.get("audit", {})}
    with pytest.raises(ConfigError, match=r"audit.shadow is my.py:verify, and"):
        parse_config(tree, source="for a test")
