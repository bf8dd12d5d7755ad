"""Tests of rules for all files, mainly of what they may import and where Ray and vLLM are used.

The order of the packages within `actors` and `service` is in test_order.py.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

# The packages that each package may import.
ALLOWED = {
    "actors": {"actors"},
    "service": {"actors", "service"},
    "rayloom": {"actors", "service", "rayloom"},
}
# The files of `actors` that may use Ray, beside every actor.py.
RAY_FILES = {"actors/deaths.py", "actors/trainer/group.py", "actors/trajectory_queue/exchange.py"}
# Packages of mathematics and state machines, which never await except in the files above.
PURE_PACKAGES = ("actors/merge/", "actors/trajectory_queue/", "actors/trainer/")
# The files of the engine's replica. Only they use vLLM, whose import takes eleven seconds.
VLLM_FILES = {
    "service/inference/engine.py",
    "service/inference/lora.py",
    "service/inference/parsing.py",
    "service/inference/plugin.py",
    "service/inference/weight_transfer.py",
}
# A longer file probably has unrelated subjects.
MOST_LINES = 600
WAITS = ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith

TREES = {
    path.relative_to(REPOSITORY).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for package in ("actors", "service", "deploy", "rayloom", "tests")
    for path in sorted((REPOSITORY / package).rglob("*.py"))
}


def imported(tree: ast.Module) -> set[str]:
    """Return the modules that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def imported_at_once(tree: ast.Module) -> set[str]:
    """Return the modules that an import of a file imports, and names that may be modules."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    return found


def may_use_ray(file: str) -> bool:
    return file.endswith("/actor.py") or file in RAY_FILES


def test_rules_apply_to_files_that_exist() -> None:
    assert RAY_FILES <= TREES.keys()
    assert len([file for file in TREES if file.startswith(PURE_PACKAGES)]) > 20


def test_imports_point_down() -> None:
    offenders = [
        f"{file} imports {module}"
        for file, tree in TREES.items()
        for module in imported(tree)
        if (allowed := ALLOWED.get(file.partition("/")[0])) is not None
        and module.partition(".")[0]
        in {"actors", "service", "deploy", "rayloom", "tests", ""} - allowed
    ]
    assert not offenders


def test_every_imported_module_exists() -> None:
    """Check this here, because mypy treats a missing module as a library without types."""
    own = ("actors", "service", "deploy", "rayloom")
    offenders = [
        f"{file} imports {module}"
        for file, tree in TREES.items()
        for module in imported(tree)
        if module.partition(".")[0] in own
        and not (place := REPOSITORY / module.replace(".", "/")).is_dir()
        and not place.with_suffix(".py").is_file()
    ]
    assert not offenders


def test_a_program_starts_after_all_its_definitions() -> None:
    offenders = [
        f"{file}:{node.lineno}"
        for file, tree in TREES.items()
        for node in tree.body[:-1]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    assert not offenders


def test_no_file_is_long() -> None:
    offenders = [
        f"{path.relative_to(REPOSITORY)} has {num_lines} lines, expected at most {MOST_LINES}"
        for package in ("actors", "service", "deploy", "rayloom", "benchmarks", "tests")
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        if (num_lines := path.read_text(encoding="utf-8").count("\n")) > MOST_LINES
    ]
    assert not offenders


def test_the_service_does_not_import_the_command_line() -> None:
    offenders = [
        f"{file} imports {module}"
        for file, tree in TREES.items()
        if file.startswith("service/") and not file.startswith("service/cli/")
        for module in imported(tree)
        if module.startswith("service.cli")
    ]
    assert not offenders


def test_nothing_is_imported_from_a_test_module() -> None:
    offenders = [
        f"{file} imports {module}"
        for file, tree in TREES.items()
        for module in imported(tree)
        if module.rpartition(".")[2].startswith("test_")
    ]
    assert not offenders


def test_tests_that_lack_a_tool_fail_if_ci_is_set() -> None:
    """Check that tests call helpers that fail in CI: a skip there would look like a success."""
    ways = {"missing_tools.py", "prometheus_server.py"}
    # These may skip: a variable names the tool, or a kind of database does not have the feature.
    ways |= {"kube_api_server.py", "test_helm.py", "test_one_writer.py"}
    offenders = [
        file
        for file, tree in TREES.items()
        if Path(file).name not in ways
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("pytest.skip", "pytest.importorskip")
    ]
    assert not offenders


USERS_OF_PYDANTIC = (
    "actors/options.py",
    "actors/environment/function_tools.py",
    "actors/environment/tool_arguments.py",
)


def test_only_some_files_of_the_actors_import_ray_and_pydantic() -> None:
    offenders = [
        f"{file} imports {module}"
        for file, tree in TREES.items()
        if file.startswith("actors/")
        for module in imported(tree)
        if (module.partition(".")[0] == "ray" and not may_use_ray(file))
        or module.partition(".")[0] == "vllm"
        # One module uses pydantic to read settings and options, which are plain dataclasses; the
        # others make the schemas of a user's tools.
        or (module.partition(".")[0] == "pydantic" and file not in USERS_OF_PYDANTIC)
    ]
    assert not offenders


def test_only_the_engine_imports_vllm() -> None:
    assert VLLM_FILES <= TREES.keys()
    heavy = {file.removesuffix(".py").replace("/", ".") for file in VLLM_FILES}
    offenders = [
        f"{file} imports {module}"
        for file, tree in TREES.items()
        if file.startswith(("actors/", "service/")) and file not in VLLM_FILES
        for module in imported_at_once(tree)
        if module in heavy or module.partition(".")[0] == "vllm"
    ]
    assert not offenders
    # Other files do not import vLLM inside functions either: gateway and environment actors never
    # load it.
    users = {
        file
        for file, tree in TREES.items()
        if file.startswith(("actors/", "service/"))
        and any(module.partition(".")[0] == "vllm" for module in imported(tree))
    }
    assert users == VLLM_FILES


def test_the_mathematics_and_the_state_machines_never_await() -> None:
    offenders = [
        f"{file}:{node.lineno}"
        for file, tree in TREES.items()
        if file.startswith(PURE_PACKAGES) and not may_use_ray(file)
        for node in ast.walk(tree)
        if isinstance(node, WAITS)
    ]
    assert not offenders


WITHOUT_RAY_AND_TORCH = """
import importlib, pkgutil, sys
for name in ("ray", "torch", "vllm"):
    sys.modules[name] = None  # an import of it raises
import actors.merge
for module in pkgutil.iter_modules(actors.merge.__path__):
    if module.name != "actor":
        importlib.import_module(f"actors.merge.{module.name}")
import numpy as np
from actors.algorithm import AlgorithmSettings
from actors.merge.settings import StepSettings
from actors.trainer.settings import TrainerSettings
from actors.environment.sample_builder import build_samples
from actors.merge.groups import classify_groups
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
        environment="e", outcome=Outcome.COMPLETED,
        samples=build_samples([turn], trajectory_id="t"),
    )

group = (trajectory(0, 1.0), trajectory(1, 0.0))
settings = StepSettings(
    algorithm=AlgorithmSettings(), trainer=TrainerSettings(), max_context_tokens=64, seed=0
)
merged = classify_groups([group], settings)
result = build_step(merged, settings, step=0, trainer_version=0)
print(result.report.num_trained_tokens)
"""


def test_merging_works_without_ray_torch_and_vllm() -> None:
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
