"""Tests of what `rayloom serve` refuses before it starts: missing keys and used ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.network import is_loopback
from service.api.settings import (
    api_address,
    api_application_name,
    api_route,
    checked_service,
    digest_of,
    http_settings,
    with_free_port,
)
from service.config.file import ConfigError, parse_config
from service.config.sections import MetricsSettings
from service.config.tree import Config

KEY = "0123456789abcdef"


def config(**service: Any) -> Config:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, "service": service}
    return parse_config(tree, source="test")


@pytest.fixture(autouse=True)
def without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYLOOM_API_KEY", raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_on_loopback_no_key_is_needed(host: str) -> None:
    assert is_loopback(host)
    assert http_settings(config(host=host)).key_digest is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_beyond_loopback_a_key_is_needed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="RAYLOOM_API_KEY"):
        http_settings(config(host=host))
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    assert http_settings(config(host=host)).key_digest == digest_of(KEY)


def test_with_haproxy_a_key_is_needed_on_loopback_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ConfigError, match=r"listen on every interface.* 127\.0\.0\.1; set RAYLOOM"):
        http_settings(config())
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    assert http_settings(config()).key_digest == digest_of(KEY)


@pytest.mark.parametrize("key", ["", "short"])
def test_a_key_that_can_be_guessed_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEY", key)
    with pytest.raises(ConfigError, match=f"got {len(key)} characters, expected at least 16"):
        http_settings(config())


def test_the_key_is_not_inherited_by_later_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEY", KEY)
    assert http_settings(config()).key_digest == digest_of(KEY)
    child = [sys.executable, "-c", "import os; print('RAYLOOM_API_KEY' in os.environ)"]
    assert subprocess.run(child, capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc on this machine")
def test_the_key_is_removed_from_the_environment_in_proc() -> None:
    code = (
        "from pathlib import Path; from service.api.settings import take_key; "
        "print(take_key(), Path('/proc/self/environ').read_text())"
    )
    environ = {**os.environ, "RAYLOOM_API_KEY": KEY}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert found.stdout.count(KEY) == 1 and "RAYLOOM_API_KEY=xxxx" in found.stdout


def test_the_routes_get_the_settings_of_the_configuration() -> None:
    settings = http_settings(config(max_body_kib=2, max_tasks_per_request=3))
    assert settings.service.max_body_kib == 2 and settings.service.max_tasks_per_request == 3
    assert settings.environments == ("guessing",)
    assert settings.algorithm.group_size == 16


def test_port_0_becomes_a_free_port_and_a_used_port_is_refused() -> None:
    chosen = with_free_port(config(port=0), is_local=True).service.port
    assert chosen > 0
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"service.port {port}: cannot listen there"):
            with_free_port(config(port=port), is_local=True)
        assert with_free_port(config(port=port), is_local=False).service.port == port


def test_the_api_and_the_metrics_need_two_ports() -> None:
    both = replace(config(port=8123), metrics=MetricsSettings(port=8123))
    with pytest.raises(ConfigError, match=r"service\.port and metrics\.port are both 8123"):
        checked_service(both, is_local=False)


def test_port_0_is_refused_on_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"service\.port is 0 with --address"):
        with_free_port(config(port=0), is_local=False)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert api_address(config(host="::1", port=80).service) == "http://[::1]:80"
    assert api_address(config(port=80).service) == "http://127.0.0.1:80"


def test_two_runs_on_a_cluster_have_different_applications_and_routes() -> None:
    service = config(port=80).service
    assert api_route("rayloom-a-1", is_local=True) == "/"
    routes = [api_route(run_id, is_local=False) for run_id in ("rayloom-a-1", "rayloom-a-2")]
    assert [api_address(service, route=route) for route in routes] == [
        "http://127.0.0.1:80/rayloom-a-1",
        "http://127.0.0.1:80/rayloom-a-2",
    ]
    assert api_application_name("rayloom-a-1") != api_application_name("rayloom-a-2")
