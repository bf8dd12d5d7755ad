"""Build configurations for `rayloom train` and `rayloom sft` with --dataset in place of a file.

The result is a tree like that of a file; `--set` overrides its values. If no model is named, the
tiny model is built and trained on the CPU. Otherwise engine and trainer share a GPU if the machine
has a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from actors.environment.builtin.single_turn import SINGLE_TURN
from actors.environment.builtin.tools import TOOLS
from actors.environment.settings import GROUP_REWARD

# Maximum number of turns of an episode with tools: calls and answers.
MAX_TOOL_TURNS = 8
# Learning rates of a pretrained model: for training with rewards, and on chats.
_LEARNING_RATE, _SFT_LEARNING_RATE = 1e-6, 1e-5
# Answers that were cut off are trained and not masked, because of the measurements in
# docs/reward-functions.md, "Answers that were cut off".
_CUT_OFF: dict[str, Any] = {"truncated_tokens": {"disposition": "train_clamped"}}
# Settings with which the tiny model learns: deploy/configs/guessing-cpu.yaml says why.
_TINY: dict[str, Any] = {
    "model": {"tiny": {}},
    "rollouts": {"max_turns": 1, "max_tokens_per_turn": 16, "outcomes": _CUT_OFF},
    "algorithm": {
        "scale": "none",
        "loss": {"kl": {"coefficient": 0.01, "estimator": "k3"}},
        "minibatches": 2,
    },
    "inference": {"enforce_eager": True, "max_num_seqs": 256},
    "trainer": {
        "num_ranks": 1,
        "learning_rate": 6e-4,
        "warmup_updates": 20,
        "betas": [0.9, 0.99],
        "adam_epsilon": 1e-5,
    },
}


def sft_tree(*, model: str | None, has_gpu: bool) -> dict[str, Any]:
    """Return the sections `model` and `trainer` of a configuration of `rayloom sft`.

    model: a directory or hub name; None for the tiny model.
    """
    if model is None:
        return {"model": {"tiny": {}}, "trainer": {"num_ranks": 1, "learning_rate": 1e-3}}
    trainer: dict[str, Any] = {"num_ranks": 1, "learning_rate": _SFT_LEARNING_RATE}
    if has_gpu:
        trainer |= {
            "device": "cuda",
            "gpus_per_rank": 1,
            "dtype": "bfloat16",
            "gradient_checkpointing": True,
        }
    return {"model": {"path": model}, "trainer": trainer}


def tasks_of(
    dataset: str | None, rewards: list[str], tools: list[str], group_rewards: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the section `tasks` for a data set, functions and tools; each may be omitted."""
    tasks: dict[str, Any] = {} if dataset is None else {"dataset": dataset}
    options: dict[str, Any] = {
        name: functions[0] if len(functions) == 1 else list(functions)
        for name, functions in (("reward", rewards), (GROUP_REWARD, group_rewards))
        if functions
    }
    if options:
        tasks |= {"environment": SINGLE_TURN, "options": options}
    if tools:
        options = {**tasks.get("options", {}), "tools": tools}
        tasks |= {"environment": TOOLS, "options": options}
    return tasks


def quick_tree(
    dataset: str, *, model: str | None, has_gpu: bool, has_tools: bool
) -> dict[str, Any]:
    """Return all sections of a run's configuration except `tasks`.

    Args: dataset: data set after which the run is named. model: a directory or hub name; None for
    the tiny model.
    """
    tree = _tree(dataset, model=model, has_gpu=has_gpu)
    if has_tools:
        tree["rollouts"] |= {"max_turns": MAX_TOOL_TURNS}
        if model is None:
            # A call of a tool is longer than an answer.
            tree["rollouts"]["max_tokens_per_turn"] = 32
            tree["model"]["max_context_tokens"] = 512
    return tree


def _tree(dataset: str, *, model: str | None, has_gpu: bool) -> dict[str, Any]:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(dataset).stem).strip("-.") or "run"
    named = {"run": {"name": name[:64]}}
    if model is None:
        return {**deepcopy(_TINY), **named}
    tree: dict[str, Any] = {
        **named,
        "model": {"path": model},
        "rollouts": {
            "max_turns": 1,
            "max_tokens_per_turn": 512,
            "outcomes": deepcopy(_CUT_OFF),
        },
        "trainer": {"num_ranks": 1, "learning_rate": _LEARNING_RATE},
    }
    if has_gpu:
        tree["model"] |= {"dtype": "bfloat16"}
        tree["inference"] = {"gpus_per_replica": 0.5, "gpu_memory_fraction": 0.4}
        tree["trainer"] |= {
            "device": "cuda",
            "gpus_per_rank": 0.5,
            "dtype": "bfloat16",
            "gradient_checkpointing": True,
        }
    return tree
