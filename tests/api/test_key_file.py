"""Tests of the first admin key in a file that Kubernetes replaces while the API serves."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.parts.tenant_world import SETTINGS, client_of, tenants

from actors.metrics import ApiMetrics
from service.access.keys import digest_of
from service.access.secret_files import FRESH_S, MAX_BYTES, SecretFile, read_secret
from service.api.app import create_app
from service.api.settings import http_settings
from service.config.file import ConfigError, parse_config
from service.config.tree import Config

OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"


def a_config(**service: object) -> Config:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, "service": service}
    return parse_config(tree, source="of the test")


class MountedSecret:
    """A directory as the kubelet mounts a Secret: ..data is a link that it replaces."""

    def __init__(self, directory: Path, text: str) -> None:
        self._directory, self._num = directory, 0
        self.file = directory / "api-key"
        self.write(text)
        self.file.symlink_to("..data/api-key")

    def write(self, text: str | None) -> None:
        """Replace all files at once; if text is None, the Secret no longer has the key."""
        self._num += 1
        dated = self._directory / f"..2026_{self._num}"
        dated.mkdir(parents=True)
        if text is not None:
            (dated / "api-key").write_text(text)
        (self._directory / "..data_tmp").symlink_to(dated.name)
        os.replace(self._directory / "..data_tmp", self._directory / "..data")


@pytest.mark.proof
@pytest.mark.slow
async def test_a_replaced_key_is_valid_without_a_restart_and_a_deleted_one_stays_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounted = MountedSecret(tmp_path / "secrets", f"{OLD}\n")
    monkeypatch.delenv("RAYLOOM_API_KEY", raising=False)
    monkeypatch.setenv("RAYLOOM_API_KEY_FILE", str(mounted.file))
    given = http_settings(a_config(host="0.0.0.0"))
    assert given.key_digest == digest_of(OLD)
    settings = replace(SETTINGS, key_digest=given.key_digest, key_file=given.key_file)
    metrics = ApiMetrics()

    def failures() -> float | None:
        name, labels = "rayloom_secret_read_failures_total", {"secret": "api_key"}
        return metrics.gained.get_sample_value(name, labels)

    async with tenants(tmp_path) as run:
        app = create_app(run, settings, metrics=metrics)

        async def statuses() -> list[int]:
            found = []
            for key in (OLD, NEW):
                async with client_of(app, key) as client:
                    found.append((await client.get("/api/v1/keys")).status_code)
            return found

        assert await statuses() == [200, 401]
        mounted.write(NEW)
        time.sleep(FRESH_S)
        assert await statuses() == [401, 200]
        assert failures() == 0
        for num, text in enumerate(("", None), start=1):
            mounted.write(text)
            time.sleep(FRESH_S)
            assert await statuses() == [401, 200]
            assert failures() == num
    shown = [record.getMessage() for record in caplog.records if record.name == "rayloom.secrets"]
    assert [message.split(": ")[-1].split(",")[0] for message in shown] == [
        f"{mounted.file} has changed",
        "got an empty file",
    ]
    assert OLD not in caplog.text and NEW not in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "RAYLOOM_API_KEY_FILE .*api-key: No such file or directory"),
        (b"", "got an empty file"),
        (b" \n\t\n", "got an empty file"),
        (b"short", "got 5 characters, expected at least 16"),
        (b"\xff\xfe0123456789abcdef", "not UTF-8"),
        (b"x" * (MAX_BYTES + 1), "more than 65536 bytes"),
    ],
)
def test_a_file_without_a_usable_key_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    file = tmp_path / "api-key"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.delenv("RAYLOOM_API_KEY", raising=False)
    monkeypatch.setenv("RAYLOOM_API_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=message) as caught:
        http_settings(a_config())
    assert "0123456789abcdef" not in str(caught.value)


def test_a_key_and_a_key_file_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEY", OLD)
    monkeypatch.setenv("RAYLOOM_API_KEY_FILE", str(tmp_path / "api-key"))
    with pytest.raises(ConfigError, match="got both, expected one of them"):
        http_settings(a_config())


def test_a_file_is_read_at_most_every_two_seconds(tmp_path: Path) -> None:
    file, num_failures = tmp_path / "secret", 0

    def count() -> None:
        nonlocal num_failures
        num_failures += 1

    secret = SecretFile(file, str, value="first", count_failure=count)
    for _ in range(100):
        assert secret.value() == "first"
    assert num_failures == 1
    file.write_text("  second\n")
    assert read_secret(file) == "second"
    time.sleep(FRESH_S)
    assert secret.value() == "second" and num_failures == 1
