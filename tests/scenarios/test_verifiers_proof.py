"""Tests of the tiny model in environments of verifiers 0.3 and 0.4, over sessions."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
from worlds.agents.agent_programs import environment_of
from worlds.models.forms_warmup import warmed_up
from worlds.runs.run_checks import check_audit, check_finished
from worlds.runs.run_driver import ROOT, START_S, STEP_S, running, small_config

from actors.environment.protocol import ToolSchema
from actors.trainer.tiny.warmup import Conversation

pytestmark = [pytest.mark.proof, pytest.mark.training, pytest.mark.timeout(900)]

STEPS, GROUPS, SIZE = 20, 16, 8
# verifiers makes this schema from the example's function.
CALCULATOR = ToolSchema(
    name="calculator",
    description="Evaluate an arithmetic expression.",
    parameters={
        "properties": {"expression": {"title": "Expression", "type": "string"}},
        "required": ["expression"],
        "title": "calculator_args",
        "type": "object",
        "additionalProperties": False,
    },
)


def _any_sum(dice: random.Random) -> Conversation:
    """Return a chat with calls and answers in the right form, but with random numbers."""
    asked, tried = ([dice.randint(1, 3), dice.randint(1, 3)] for _ in range(2))
    call = {"name": "calculator", "arguments": {"expression": f"{tried[0]}+{tried[1]}"}}
    return Conversation(
        messages=(
            ("user", f"What is {asked[0]}+{asked[1]}?"),
            ("assistant", f"<tool_call>{json.dumps(call)}</tool_call>"),
            ("tool", str(sum(tried))),
            ("assistant", str(dice.randint(2, 6))),
        ),
        tools=(CALCULATOR,),
    )


def _any_answer(dice: random.Random) -> Conversation:
    asked = [dice.randint(1, 3), dice.randint(1, 3)]
    messages = (("user", f"What is {asked[0]}+{asked[1]}?"), ("assistant", str(dice.randint(2, 6))))
    return Conversation(messages=messages)


def test_the_tiny_model_plays_twenty_steps_of_verifiers(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rewards = _played(
        tmp_path,
        _any_sum,
        environment_of("verifiers") / "bin",
        "verifiers_calculator.py",
        steps=STEPS,
        groups=GROUPS,
        size=SIZE,
    )
    record_property("first_five", mean(rewards[:5]))
    record_property("last_five", mean(rewards[-5:]))
    print("verifiers", [round(reward, 3) for reward in rewards])
    # The model must play; how much it learns in so few steps is only recorded.
    assert any(rewards)


def test_taskset_of_verifiers_0_4_is_played_by_its_own_chat_loop(tmp_path: Path) -> None:
    # The groups are few, because verifiers starts a process for each.
    rewards = _played(
        tmp_path,
        _any_answer,
        environment_of("verifiers_taskset") / "bin",
        "verifiers_taskset.py",
        steps=3,
        groups=4,
        size=4,
    )
    print("verifiers 0.4", [round(reward, 3) for reward in rewards])
    assert any(rewards)


def _played(
    place: Path,
    conversation: Callable[[random.Random], Conversation],
    programs: Path,
    script: str,
    *,
    steps: int,
    groups: int,
    size: int,
) -> list[float]:
    """Serve a run whose steps an example plays; return the mean reward of each step."""
    config = small_config(
        place,
        str(warmed_up(place / "model", conversation)),
        run={"steps": steps, "checkpoint_every": steps, "evaluate_every": steps},
        model={"max_context_tokens": 512},
        tasks={"environment": "session", "evaluation_tasks": 0},
        rollouts={"max_turns": 4, "max_tokens_per_turn": 40},
        algorithm={"groups_per_step": groups, "group_size": size, "scale": "std"},
        inference={"max_num_seqs": 128},
        trainer={"num_ranks": 1, "learning_rate": 2e-4, "betas": [0.9, 0.99]},
        service={"port": 0},
    )
    limit_s = START_S + steps * STEP_S
    with running(config, place / "run", command="serve") as run:
        address = run.api_address(limit_s=START_S)
        line = [str(programs / "python"), str(ROOT / "docs/examples" / script), "--url", address]
        done = subprocess.run(
            [*line, "--groups", str(steps * groups)],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "PATH": os.pathsep.join([str(programs), os.environ["PATH"]])},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        run.wait_for_output("the API continues to answer", limit_s=STEP_S)
        run.interrupt()
        assert run.wait(limit_s=STEP_S) == 0, run.log()
        check_finished(run, steps=steps)
        check_audit(run)
        return [step.value("reward_mean") or 0.0 for step in run.history().steps]
