"""Tests of the tiny model, which plays twenty steps in each environment of docs/worlds.md."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from worlds.checks.missing_tools import need_package
from worlds.models.forms_warmup import random_plays, warmed_up
from worlds.runs.run_checks import check_audit, check_finished
from worlds.runs.run_driver import START_S, STEP_S, running, small_config
from worlds.servers.openenv_servers import real_server

from actors.environment.plugins.retrieval_qa.corpus import generated_facts
from actors.environment.registry import resolve
from actors.environment.tasks import write_tasks
from actors.types import Task

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(900)]

STEPS = 20


@dataclass(frozen=True, kw_only=True)
class World:
    """An environment's settings, and the random answers that the tiny model begins with."""

    environment: str | None = None
    """None: its name in WORLDS."""
    options: dict[str, Any]
    answer: Callable[[random.Random, int], str]
    """The model's answer, by a random generator and the turn's number."""
    rollouts: dict[str, Any]
    data: Callable[[int], dict[str, Any]] | None = None
    """A task's data, by its seed; None: a task has only a seed."""
    needs: tuple[str, str] | None = None
    """A module, and the extra that installs it."""
    server: Callable[[], AbstractContextManager[str | None]] = nullcontext
    """A server that runs meanwhile; yields its address."""


def _any_query(dice: random.Random, _turn: int) -> str:
    what = dice.choice(["count(*)", "max(price)", "min(price)", "sum(price)", "price("])
    return f"SELECT {what} FROM items"


def _any_search_and_answer(dice: random.Random, turn: int) -> str:
    document, data = dice.choice(list(generated_facts(FACTS).items()))
    if turn:
        return str(data.answers)
    query = json.dumps({"name": "search", "arguments": {"query": document.text.split()[0]}})
    return f"<tool_call>{query}</tool_call>"


def _any_guess(dice: random.Random, _turn: int) -> str:
    call = {"name": "guess", "arguments": {"number": dice.randint(1, 8)}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def _small_sum(seed: int) -> dict[str, Any]:
    first, second = seed % 3 + 1, seed // 3 % 3 + 1
    truth = {"ground_truth": str(first + second)}
    return {"prompt": f"What is {first}+{second}?", "reward_spec": truth}


FACTS = 20
WORLDS = {
    "sql": World(
        options={"max_queries": 0},
        answer=_any_query,
        rollouts={"max_turns": 1, "max_tokens_per_turn": 32},
    ),
    "retrieval_qa": World(
        options={"num_generated": FACTS, "k": 1, "has_read": False},
        answer=_any_search_and_answer,
        rollouts={"max_turns": 3, "max_tokens_per_turn": 40},
        needs=("bm25s", "retrieval"),
    ),
    "gymnasium": World(
        options={
            "id": "FrozenLake-v1",
            "kwargs": {"desc": ["SFF", "FHF", "FFG"], "is_slippery": False},
        },
        answer=lambda dice, _turn: dice.choice(["left", "down", "right", "up", "uo"]),
        rollouts={"max_turns": 8, "max_tokens_per_turn": 8},
        needs=("gymnasium", "gymnasium"),
    ),
    "textarena": World(
        options={"game": "GuessTheNumber-v0", "kwargs": {"max_number": 7, "max_turns": 3}},
        answer=lambda dice, _turn: dice.choice([f"[{dice.randint(1, 7)}]"] * 5 + ["7"]),
        rollouts={"max_turns": 6, "max_tokens_per_turn": 8},
        needs=("textarena", "textarena"),
    ),
    "skyrl_gym": World(
        options={"id": "gsm8k"},
        answer=lambda dice, _turn: dice.choice(["#### ", "#### ", "## "]) + str(dice.randint(2, 6)),
        rollouts={"max_turns": 1, "max_tokens_per_turn": 16},
        data=_small_sum,
        needs=("skyrl_gym", "skyrl-gym"),
    ),
    "openenv": World(
        options={"action_field": "number", "observation_field": "text"},
        answer=lambda dice, _turn: dice.choice([str(dice.randint(1, 8))] * 5 + ["x"]),
        rollouts={"max_turns": 6, "max_tokens_per_turn": 8},
        server=partial(real_server, "openenv_guessing.py"),
    ),
    "openenv_tools": World(
        environment="openenv",
        options={"tools": True, "observation_field": "metadata.text"},
        answer=_any_guess,
        rollouts={"max_turns": 6, "max_tokens_per_turn": 32},
        server=partial(real_server, "openenv_tools.py"),
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_tiny_model_plays_twenty_steps(
    tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    world = WORLDS[name]
    if world.needs is not None:
        need_package(*world.needs)
    environment = world.environment or name
    tasks: dict[str, Any] = {"environment": environment, "evaluation_tasks": 0}
    if world.data is not None:
        tasks["file"] = str(tmp_path / "tasks.jsonl")
        listed = [
            Task(task_id=str(seed), environment=environment, seed=seed, data=world.data(seed))
            for seed in range(90)
        ]
        write_tasks(tasks["file"], listed)
    with world.server() as url:
        options = {**world.options, **({"url": url} if url else {})}
        model = warmed_up(
            tmp_path / "model",
            random_plays(
                resolve(environment, options),
                world.answer,
                data=world.data,
                max_turns=world.rollouts["max_turns"],
            ),
        )
        config = small_config(
            tmp_path,
            str(model),
            run={"steps": STEPS, "checkpoint_every": STEPS, "evaluate_every": STEPS},
            model={"max_context_tokens": 512},
            tasks={**tasks, "options": options},
            rollouts={**world.rollouts, "slots_per_actor": 128},
            algorithm={"groups_per_step": 16, "group_size": 8, "scale": "std"},
            inference={"max_num_seqs": 128},
            trainer={"num_ranks": 1, "learning_rate": 2e-4, "betas": [0.9, 0.99]},
        )
        with running(config, tmp_path / "run") as run:
            assert run.wait(limit_s=START_S + STEPS * STEP_S) == 0, run.log()
            check_finished(run, steps=STEPS)
            check_audit(run)
            steps = run.history().steps
    rewards = [step.value("reward_mean") or 0.0 for step in steps]
    record_property("first_five", mean(rewards[:5]))
    record_property("last_five", mean(rewards[-5:]))
    print(name, [round(reward, 3) for reward in rewards])
    # The model must play; how much it learns in so few steps is only recorded.
    assert any(rewards)
