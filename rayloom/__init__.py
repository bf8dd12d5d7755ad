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
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

_PACKAGES = ("actors", "deploy", "rayloom", "service")
# Libraries that every run imports: a user's module with such a name would break the run.
_LIBRARIES = (
    "accelerate", "annotated_types", "cloudpickle", "datasets", "docstring_parser", "fastapi",
    "fsspec", "grpc", "httpx", "huggingface_hub", "jinja2", "jsonschema", "msgspec", "numpy",
    "opentelemetry", "prometheus_client", "psutil", "pyarrow", "pydantic", "pydantic_core", "ray",
    "referencing", "regex", "rich", "safetensors", "sqlalchemy", "starlette", "tokenizers", "torch",
    "tqdm", "transformers", "typer", "typing_extensions", "uvicorn", "vllm", "websockets", "yaml",
)  # fmt: skip
RESERVED_NAMES = (*_PACKAGES, *_LIBRARIES)
_ROOT = Path(__file__).resolve().parents[1]

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


def check_names(path: Sequence[str]) -> None:
    """Check that no module on a search path hides one of Rayloom's packages or libraries.

    A folder without `__init__.py`, such as `deploy/` with YAML files, hides no package. For the
    names of libraries, only the first directory is searched: the directory of the user's script or
    command.

    Args:
        path: Directories in search order, such as sys.path.

    Raises:
        ImportError: If a user's module would be imported in place of a package of Rayloom or of a
            library, or if the working directory was deleted.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ImportError("the working directory does not exist any more; cd to another") from None
    for name in _PACKAGES:
        found = PathFinder.find_spec(name, list(path))
        if found is None or found.origin is None:
            continue
        origin = Path(found.origin).resolve()
        if not origin.is_relative_to(_ROOT / name):
            raise ImportError(
                f"got {origin}, which hides Rayloom's package {name!r} here and in the processes "
                f"of a run; expected no module of yours that is called {', '.join(_PACKAGES)}: "
                "rename it, or start from another directory"
            )
    _check_libraries(path)


def _check_libraries(path: Sequence[str]) -> None:
    first, *others = path
    # In such a directory pip has installed packages.
    if any(Path(first).glob("*.dist-info")):
        return
    others = [each for each in others if Path(each).resolve() != Path(first).resolve()]
    for name in _LIBRARIES:
        found = PathFinder.find_spec(name, [first])
        if found is None or found.origin is None or PathFinder.find_spec(name, others) is None:
            continue
        raise ImportError(
            f"got {Path(found.origin).resolve()}, which hides the library {name!r} that Rayloom "
            "imports; expected no module of yours with the name of a library: rename it, or start "
            "from another directory"
        )


def _is_command() -> bool:
    """Return whether Python runs the command `rayloom` or `python -m rayloom`."""
    if sys.argv[:1] == ["-m"]:
        # Python is still loading the packages of the module that it will run. The module's name
        # is before the module's arguments.
        return sys.orig_argv[-len(sys.argv)] in ("rayloom", "-mrayloom")
    return Path(*sys.argv[:1]).name == "rayloom"


# The command calls `check_names` itself, to print an error as one line.
if not _is_command():
    check_names(sys.path)


def __getattr__(name: str) -> Any:
    """Import and return a public name. Raises: AttributeError for any other name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rayloom' has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
