"""Settings and fixtures for all tests: Hypothesis's profile, a local Ray, trainer ranks, models.

The fixtures import torch and Ray only when a test uses them, because most tests need neither.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from worlds.parts.trainer_world import World
    from worlds.servers.postgresql_server import PostgresqlServer
    from xdist.remote import Producer

# torch reads this at its import. Threads do not make such small matrices faster, and on busy cores
# they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The parts that `make proof PART=…` can run.
PROOF_PARTS = {
    "training",
    "clients",
    "templates",
    "nodes",
    "release",
    "chart",
    "images",
    "chaos",
    "fuzz",
    "families",
    "settings",
    "tutorials",
    "lora",
    "demo",
    "slow",
    "pages",
}

# No deadline: machines that run tests are busy.
settings.register_profile("rayloom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rayloom")


# Collected tests and the packages that they import live as long as the process, so that garbage
# collection during pytest's collection would be useless work.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Raise UsageError if a proof belongs to no part: all proofs together take hours."""
    marks = {mark.name for mark in item.iter_markers()}
    if "proof" in marks and not marks & PROOF_PARTS:
        parts = ", ".join(sorted(PROOF_PARTS))
        raise pytest.UsageError(f"{item.nodeid}: a proof, expected a mark of one of {parts}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in a test's output, which pytest-xdist could not send."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that use `cluster` last: it keeps a Ray, and whole runs may start their own."""
    if any(item.get_closest_marker("chaos") for item in items):
        items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()))


# Fixtures that a process shares among its tests and that take long to start, by a part of the text
# of each file that uses them.
SHARED = {
    "cluster": re.compile(r'usefixtures\([^)]*"cluster"|\bcluster: None'),
    "ranks": re.compile(r"\b(one_rank|two_ranks)\b"),
    "postgresql": re.compile(r"\bpostgresql"),
}


@cache
def scope_of(file: Path) -> str:
    """Return the fixture that a file of tests shares with other files, or else the file's path."""
    text = file.read_text()
    return next((name for name, use in SHARED.items() if use.search(text)), str(file))


class FixtureScheduling(LoadFileScheduling):
    """Run all files that share a fixture in one worker, so that it starts once and not in each."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(self.config.rootpath / super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Return the scheduler of `--dist loadfile`."""
    return FixtureScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start one Ray cluster for all tests of a process; its workers can import `worlds`."""
    import ray

    from service.launch.cluster import start_ray

    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{here.parent}:{here}")
        start_ray(address="local", num_cpus=8, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Return the directories of two models, by whether input and output embeddings are tied."""
    from worlds.parts.trainer_world import tiny_model

    root = tmp_path_factory.mktemp("models")
    return {tied: tiny_model(root / f"tied-{tied}", tied=tied) for tied in (True, False)}


@pytest.fixture
def model(tiny_models: dict[bool, str]) -> str:
    """Return the directory of a tiny model."""
    return tiny_models[True]


@pytest.fixture(scope="session")
def postgresql_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresqlServer]:
    """Start a server for all tests of a process that only use it; each has its own schema."""
    from worlds.servers.postgresql_server import postgresql

    with postgresql(tmp_path_factory.mktemp("postgresql") / "server") as server:
        yield server


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Yield a mesh of one rank in this process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the model of `run_driver.SMALL` once, for all runs that need not build it."""
    from worlds.runs.run_driver import SMALL

    from service.config.sections import TinyModelSettings
    from service.launch.model_directories import build_tiny

    directory = tmp_path_factory.mktemp("small") / "model"
    build_tiny(directory, TinyModelSettings(**SMALL["model"]["tiny"]))
    return str(directory)


@pytest.fixture
def one_rank() -> World:
    from worlds.parts.trainer_world import shared_world

    return shared_world(1)


@pytest.fixture
def two_ranks() -> World:
    from worlds.parts.trainer_world import shared_world

    return shared_world(2)
