"""Time SkyRL 0.3.0's merge_stepwise_output on command, in its own environment.

Each line of the input is a command: `load PATH SHARED` makes the inputs from a file of plays, `time
COUNT` merges all of them COUNT times and answers with the CPU seconds of one pass, and `save PATH`
writes the result. If SHARED is 1, a prompt shares the int objects of the turn before, as in a
generator that grows one list; if it is 0, every prompt has its own ints, as after parsing. The
module imports nothing of Rayloom.
"""

from __future__ import annotations

import gc
import sys
import time
import typing
from typing import Any

import typing_extensions

# ruff: noqa: E402
# Pydantic refuses typing.TypedDict on Python 3.11, and this release uses it.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]

import numpy as np
import skyrl.train.utils.trainer_utils  # noqa: F401  (imported by the first merge otherwise)
from loguru import logger
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.utils import merge_stepwise_output

# Do not measure a line of log for each call.
logger.remove()


def load(path: str, *, is_shared: bool) -> dict[str, Any]:
    """Return the plays of a file as a GeneratorOutput, with token rewards."""
    plays = np.load(path)
    found: dict[str, Any] = {
        name: []
        for name in (
            "prompt_token_ids",
            "response_ids",
            "rewards",
            "loss_masks",
            "stop_reasons",
            "rollout_logprobs",
            "trajectory_ids",
            "is_last_step",
        )
    }
    turns = plays["turns"].tolist()
    prompts, at, own = plays["prompts"], 0, 0
    columns = {name: plays[name].tolist() for name in ("sampled", "logprobs", "rewards")}
    before: list[int] = []
    for index, (number, num_prompt, num_sampled) in enumerate(turns):
        prompt = prompts[at : at + num_prompt].tolist()
        at += num_prompt
        if is_shared:
            same = _common(before, prompt)
            prompt = before[:same] + prompt[same:]
        part = slice(own, own + num_sampled)
        own += num_sampled
        found["prompt_token_ids"].append(prompt)
        found["response_ids"].append(columns["sampled"][part])
        found["rollout_logprobs"].append(columns["logprobs"][part])
        found["rewards"].append(columns["rewards"][part])
        found["loss_masks"].append([1] * num_sampled)
        found["stop_reasons"].append("stop")
        found["trajectory_ids"].append(TrajectoryID(str(number), 0))
        found["is_last_step"].append(index + 1 == len(turns) or turns[index + 1][0] != number)
        before = prompt + found["response_ids"][-1]
    return {**found, "rollout_metrics": None, "rollout_expert_indices": None}


def _common(first: list[int], second: list[int]) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(np.array(first[:length]) != np.array(second[:length]))
    return int(differs[0]) if differs.size else length


def save(merged: dict[str, Any], path: str) -> None:
    """Write merged rows as flat arrays.

    Each of `rows` has the number of its trajectory, and the numbers of tokens of prompt and
    response.
    """
    rows = [
        (int(which.instance_id), len(prompt), len(response))
        for which, prompt, response in zip(
            merged["trajectory_ids"],
            merged["prompt_token_ids"],
            merged["response_ids"],
            strict=True,
        )
    ]
    columns: dict[str, Any] = {
        name: np.array([value for row in merged[name] for value in row])
        for name in (
            "prompt_token_ids",
            "response_ids",
            "loss_masks",
            "rollout_logprobs",
            "rewards",
        )
    }
    np.savez(path, rows=np.array(rows, np.int64), **columns)


def main() -> None:
    """Answer commands until the input ends."""
    inputs: dict[str, Any] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        answer = "ok"
        if command == "load":
            inputs = load(words[0], is_shared=words[1] == "1")
            merge_stepwise_output(inputs)
            gc.collect()
            gc.freeze()
        elif command == "time":
            started = time.process_time()
            for _ in range(int(words[0])):
                merge_stepwise_output(inputs)
            answer = repr((time.process_time() - started) / int(words[0]))
        elif command == "save":
            save(merge_stepwise_output(inputs), words[0])
        print(answer, flush=True)


if __name__ == "__main__":
    main()
