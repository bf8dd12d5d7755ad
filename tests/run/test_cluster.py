"""Where a local Ray keeps its sockets, and what is said when it does not come up."""

from __future__ import annotations

import os

import pytest
import ray

from service.config.file import ConfigError, parse_config
from service.launch import cluster


def test_a_short_temporary_directory_is_rays_own_choice() -> None:
    assert cluster.short_temp_dir("/tmp") is None
    assert cluster.short_temp_dir("/home/somebody/tmp") is None


def test_one_too_long_for_a_socket_is_replaced() -> None:
    assert cluster.short_temp_dir("/home/" + "x" * 100) == "/tmp/ray"
    # Characters are not what counts.
    assert cluster.short_temp_dir("/home/" + "ü" * 25) == "/tmp/ray"


def test_a_ray_that_does_not_come_up_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Left as it was at the end: what is started here would inherit it.
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    # Ray makes its session below a file.
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null")
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
    config = parse_config(tree, source="test")
    with (
        pytest.raises(ConfigError, match=r"a local Ray did not start \(.*expected it to come up"),
        cluster.joined(config, address=None),
    ):
        raise AssertionError("it came up")


def refuse_starts(monkeypatch: pytest.MonkeyPatch, *reasons: str) -> list[str]:
    """Ray's start fails once for each reason, and then succeeds; returns the reasons left."""
    left = list(reasons)

    def init(**options: object) -> None:
        if left:
            raise Exception(left.pop(0))

    monkeypatch.setattr(ray, "init", init)
    return left


LATE = "The current node timed out during startup."


def test_a_ray_that_was_late_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    left = refuse_starts(monkeypatch, LATE)
    cluster.start_ray()
    assert left == []


@pytest.mark.parametrize("reasons", [(LATE, LATE), ("no space left on device", LATE)])
def test_a_second_refusal_or_another_one_is_final(
    monkeypatch: pytest.MonkeyPatch, reasons: tuple[str, str]
) -> None:
    left = refuse_starts(monkeypatch, *reasons, "not asked a third time")
    with pytest.raises(Exception, match=r"timed out|no space"):
        cluster.start_ray()
    assert "not asked a third time" in left
