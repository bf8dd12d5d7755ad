"""Tests of the choice of a replica, its engine's sockets, and errors of a deployment."""

from __future__ import annotations

import socket
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from service.inference.client import ReplicaAffinityRouter
from service.inference.deployment import MAX_FAILURE_CHARACTERS, last_failure
from service.inference.replica import MAX_DIRECTORY_BYTES, make_engine_directory
from service.inference.settings import InferenceSettings

OPENING = "The deployment failed to start 3 times in a row. See logs for details. Error:"
TRACEBACK = f"""{OPENING}
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica:x:InferenceReplica.initialize()
  File "service/inference/engine.py", line 259, in _update
    raise PolicyUnavailable(f"inference: {{self._broken}}") from error
actors.environment.policy.PolicyUnavailable: inference: a weight update failed: ValueError: 3 of 4

"""
VALIDATION = f"""{OPENING}
  File "vllm/config/model.py", line 1, in __init__
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, max_model_len (4096) is greater than 512
    For further information visit https://errors.pydantic.dev
"""


@pytest.mark.parametrize(
    ("messages", "failure"),
    [
        (
            ["Failed to update the deployments.", TRACEBACK],
            "actors.environment.policy.PolicyUnavailable: inference: a weight update failed: "
            "ValueError: 3 of 4",
        ),
        (
            [VALIDATION],
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, max_model_len (4096) is greater than 512 For further information visit "
            "https://errors.pydantic.dev",
        ),
        (["Deploying app failed.", ""], "Deploying app failed."),
        (["", ""], "nothing is known of its replicas"),
        ([], "nothing is known of its replicas"),
    ],
)
def test_the_last_exception_is_reported_in_one_line(messages: list[str], failure: str) -> None:
    assert last_failure(messages) == failure


def test_a_long_exception_is_shortened() -> None:
    assert last_failure(["ValueError: " + "x" * 9999]) == (
        "ValueError: " + "x" * (MAX_FAILURE_CHARACTERS - len("ValueError: "))
    )


@dataclass
class Candidate:
    """A replica with the attributes that the router reads."""

    name: str

    @property
    def replica_id(self) -> Any:
        return SimpleNamespace(unique_id=self.name)


async def route(names: str, wanted: str) -> list[str]:
    """Return the names of the replicas between which Serve may choose."""
    request = SimpleNamespace(metadata=SimpleNamespace(session_id=wanted))
    router: Any = ReplicaAffinityRouter
    [chosen] = await router.choose_replicas(None, [Candidate(name) for name in names], request)
    return [each.name for each in chosen]


async def test_turns_keep_their_replica_and_those_of_a_lost_one_are_spread() -> None:
    assert [await route("abcd", name) for name in "abcd"] == [["a"], ["b"], ["c"], ["d"]]
    load = Counter(dict.fromkeys("bcd", 0))
    for _ in range(300):
        # Like Serve, choose the replica with the shorter queue.
        load[min(await route("bcd", "a"), key=lambda name: load[name])] += 1
    assert max(load.values()) - min(load.values()) <= 30


@pytest.mark.parametrize("excess", [0, 1, 40], ids=["just-fits", "one-short", "far-too-long"])
def test_a_socket_path_fits_for_any_length_of_the_session_directory(excess: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        length = MAX_DIRECTORY_BYTES - len("/engine-abcdefgh") + excess
        parent = Path(top) / ("p" * (length - len(top) - 1))
        parent.mkdir()
        directory = make_engine_directory(parent, "abcdefgh")
        try:
            assert (directory.parent == parent) == (excess == 0)
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(directory / str(uuid4())))
            (entry,) = directory.iterdir()
            entry.unlink()
        finally:
            directory.rmdir()


@pytest.mark.parametrize(
    ("settings", "block_size"),
    [
        (InferenceSettings(), 32),
        (InferenceSettings(block_tokens=64), 64),
        (InferenceSettings(gpus_per_replica=1), None),
        (InferenceSettings(gpus_per_replica=1, block_tokens=16), 16),
    ],
)
def test_the_default_block_is_small_on_cpu_to_share_short_prefixes(
    settings: InferenceSettings, block_size: int | None
) -> None:
    assert settings.block_size == block_size
