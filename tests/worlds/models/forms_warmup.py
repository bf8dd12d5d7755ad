"""Tiny policies that know the form of an environment's answers but not their content."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.environment.protocol import Action, Environment
from actors.environment.tool_calls import parse_tool_calls
from actors.trainer.tiny.model import build_tiny_model
from actors.trainer.tiny.warmup import Conversation, imitate
from actors.types import Task


def warmed_up(
    directory: Path,
    conversation: Callable[[random.Random], Conversation],
    *,
    seed: int = 0,
    steps: int = 120,
    per_step: int = 4,
) -> Path:
    """Build the model. per_step: conversations in each training step."""
    build_tiny_model(directory, seed=seed, warmup_steps=0)
    model = AutoModelForCausalLM.from_pretrained(directory)
    dice = random.Random(seed)
    torch.manual_seed(seed)
    imitate(
        model,
        AutoTokenizer.from_pretrained(directory),
        lambda: [[conversation(dice) for _ in range(per_step)]],
        steps=steps,
        learning_rate=2e-3,
    )
    model.save_pretrained(directory)
    return directory


def random_plays(
    make: Callable[[], Environment],
    answer: Callable[[random.Random, int], str],
    *,
    data: Callable[[int], dict[str, Any]] | None = None,
    count: int = 48,
    max_turns: int = 4,
) -> Callable[[random.Random], Conversation]:
    """Play episodes of an environment at random; return a function that draws one of them.

    answer: returns a turn's text from a random generator and the turn's number from 0, without
    seeing the question. data: returns a task's data from its seed.
    """
    dice = random.Random(0)

    async def play_all() -> list[Conversation]:
        return [
            await _play(
                make(),
                partial(answer, dice),
                Task(task_id="t", environment="e", seed=seed, data=data(seed) if data else {}),
                max_turns,
            )
            for seed in range(count)
        ]

    played = asyncio.run(play_all())
    return lambda dealer: dealer.choice(played)


async def _play(
    environment: Environment, answer: Callable[[int], str], task: Task, max_turns: int
) -> Conversation:
    start = await environment.reset(task)
    messages = [(message.role.value, message.content) for message in start.messages]
    for turn in range(max_turns):
        text = answer(turn)
        messages.append(("assistant", text))
        calls = parse_tool_calls(text, start.tools) if start.tools else ()
        result = await environment.step(Action(text=text, calls=calls))
        if result.terminated or result.truncated:
            break
        messages += [(message.role.value, message.content) for message in result.messages]
    await environment.close()
    # The last message must be the policy's.
    while messages[-1][0] != "assistant":
        messages.pop()
    return Conversation(messages=tuple(messages), tools=start.tools)
