"""Train language-model agents by reinforcement learning from a script or a notebook.

    import rayloom

    def score(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

    result = rayloom.train(model="models/smollm2", dataset="sums.jsonl", reward=score)
    result.summary["evaluation"]["last"]["reward_mean"]

Names are imported at their first use, so that `import rayloom` takes milliseconds.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from rayloom.names import check_names

if TYPE_CHECKING:
    from actors.environment.protocol import (
        Action,
        Environment,
        Message,
        Observation,
        RewardError,
        Role,
        StepResult,
        ToolCall,
        ToolSchema,
    )
    from actors.types import Task
    from rayloom.training import Result, TrainingFailed, evaluate, serve, sft, train
    from service.api.schemas import TaskBody
    from service.client import ApiError, Client, NoAnswer
    from service.config.file import ConfigError, load_config
    from service.config.tree import Config

_MODULES = {
    "actors.environment.protocol": (
        "Action", "Environment", "Message", "Observation", "RewardError", "Role", "StepResult",
        "ToolCall", "ToolSchema",
    ),
    "actors.types": ("Task",),
    "rayloom.training": ("Result", "TrainingFailed", "evaluate", "serve", "sft", "train"),
    "service.api.schemas": ("TaskBody",),
    "service.client": ("ApiError", "Client", "NoAnswer"),
    "service.config.file": ("ConfigError", "load_config"),
    "service.config.tree": ("Config",),
}  # fmt: skip
check_names(sys.path)
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Action",
    "ApiError",
    "Client",
    "Config",
    "ConfigError",
    "Environment",
    "Message",
    "NoAnswer",
    "Observation",
    "Result",
    "RewardError",
    "Role",
    "StepResult",
    "Task",
    "TaskBody",
    "ToolCall",
    "ToolSchema",
    "TrainingFailed",
    "evaluate",
    "load_config",
    "serve",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import and return a public name. Raises: AttributeError for any other name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rayloom' has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
