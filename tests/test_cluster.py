"""Where a local Ray keeps its sockets, and what is said when it does not come up."""

from __future__ import annotations

import pytest

from service import cluster
from service.config.file import ConfigError, parse_config


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
    # Ray makes its session below a file.
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null")
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}}
    config = parse_config(tree, source="test")
    with (
        pytest.raises(ConfigError, match=r"a local Ray did not start \(.*expected it to come up"),
        cluster.joined(config, address=None),
    ):
        raise AssertionError("it came up")
