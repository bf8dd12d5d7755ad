"""The house's rules: imports point down, cores are pure, files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# What a room may import of the others.
ROOMS = {"actors": set[str](), "service": {"actors"}, "deploy": {"actors", "service"}}
# Beside every actor.py of `actors`: what starts a group of actors, and what talks to one.
RAY_FILES = {"actors/trainer/group.py", "actors/weights/client.py"}
VLLM_FILES = {"actors/trainer/publish_cuda.py"}
# Folders whose mathematics and state machines never await, outside of the files above.
PURE_FOLDERS = ("actors/merge", "actors/trajectory_queue", "actors/trainer")

SOURCES = {
    path.relative_to(REPOSITORY).as_posix(): path
    for room in ROOMS
    for path in sorted((REPOSITORY / room).rglob("*.py"))
}


def parse(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text(encoding="utf-8"), filename=name)


def imported(name: str) -> set[str]:
    """The top-level packages that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(parse(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import in line {node.lineno}"
            found.add((node.module or "").partition(".")[0])
    return found


def is_shell(name: str) -> bool:
    return name.endswith("/actor.py") or name in RAY_FILES


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    length = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        length -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return length


def test_there_is_something_to_look_at() -> None:
    assert {"actors/types.py", "actors/merge/prefix.py"} <= SOURCES.keys()


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_down(name: str) -> None:
    room = name.partition("/")[0]
    forbidden = set(ROOMS) - ROOMS[room] - {room}
    assert not imported(name) & forbidden


@pytest.mark.parametrize("name", [n for n in SOURCES if n.startswith("actors/")])
def test_ray_and_vllm_stay_in_the_shells_of_the_actors(name: str) -> None:
    packages = imported(name)
    assert "ray" not in packages or is_shell(name)
    assert "vllm" not in packages or name in VLLM_FILES


@pytest.mark.parametrize("name", [n for n in SOURCES if n.startswith(PURE_FOLDERS)])
def test_the_mathematics_and_the_state_machines_never_await(name: str) -> None:
    waits = ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith
    if not is_shell(name):
        assert not any(isinstance(node, waits) for node in ast.walk(parse(name)))


@pytest.mark.parametrize("name", SOURCES)
def test_files_and_functions_stay_small(name: str) -> None:
    num_lines = len(SOURCES[name].read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_FILE_LINES
    for function in functions(parse(name)):
        length = num_code_lines(function)
        assert length <= MAX_FUNCTION_LINES, f"{function.name} has {length} lines"


WITHOUT_RAY_AND_TORCH = """
import importlib, pkgutil, sys
for name in ("ray", "torch", "vllm"):
    sys.modules[name] = None  # an import of it raises
import actors.merge
for module in pkgutil.iter_modules(actors.merge.__path__):
    if module.name != "actor":
        importlib.import_module(f"actors.merge.{module.name}")
import numpy as np
from actors.merge.settings import StepSettings
from actors.merge.groups import TrajectoryGroup, classify_groups
from actors.merge.prefix import merge_turns
from actors.merge.step import build_step
from actors.types import FinishReason, Outcome, Trajectory, Turn, VersionSpan

def trajectory(member, reward):
    turn = Turn(
        prompt_token_ids=np.array([1, 2], np.int32),
        sampled_token_ids=np.array([3], np.int32),
        logprobs=np.array([-0.5], np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=0, start=0, end=1),),
        reward=reward,
    )
    return Trajectory(
        rollout_id=f"g-{member}", group_id="g", group_number=0, attempt=0, task_id="t",
        environment="e", samples=merge_turns([turn]), outcome=Outcome.COMPLETED,
    )

group = TrajectoryGroup(group_id="g", trajectories=(trajectory(0, 1.0), trajectory(1, 0.0)))
merged = classify_groups([group], StepSettings())
result = build_step(merged, StepSettings(), step=0, trainer_version=0)
print(result.report.num_trained_tokens)
"""


def test_merging_works_with_neither_ray_nor_torch_nor_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY_AND_TORCH],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"]
