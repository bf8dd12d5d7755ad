"""Tests of the OpenAPI document: it is up to date and complete, and passes a fuzzer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.builders.episode_builders import renderer
from worlds.runs.served_run import served

from actors.deadline import poll
from deploy.openapi_document import DOCUMENT, document_text, whole_document
from service.access.keys import AGENT, REWARD, session_key
from service.config.sections import ServiceSettings
from service.gateway.chat import Refused
from service.gateway.description import SMALLEST
from service.gateway.dialects import DIALECTS

KEY = "0123456789abcdef"
PROBES = {"/healthz", "/readyz"}
# Refusals that no schema can describe, only the text of a status: limits and names of the run, used
# ids, entries that are no longer kept, and parameters that sessions do not allow.
CONFIG = f"""
headers = {{ Authorization = "Bearer {KEY}" }}

[generation]
database = "none"

[[operations]]
include-path-regex = "^/api/v1/(rollouts|sessions)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "401", "409", "413", "422", "429"]

[[operations]]
include-path-regex = "^/api/v1/(feed|events)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "410"]

[[operations]]
include-path-regex = "^/api/v1/sessions/.*/(finish|reward)$"
headers = {{ Authorization = "Bearer {session_key(KEY, "other-1", REWARD)}" }}
parameters = {{ "path.name" = "other-1" }}
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "409"]
# Another's key is answered as a session that is not there, with 404.
checks.ignored_auth.enabled = false

[[operations]]
include-path-regex = "^/api/v1/keys$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "409", "422"]

# Whose fingerprint, versions and lengths no schema knows.
[[operations]]
include-path-regex = "^/api/v1/(trajectories|generate)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "409", "413", "422", "429"]

# Nothing that is committed has files here, and what is held out are a few tasks.
[[operations]]
include-path-regex = "^/api/v1/(checkpoints|evaluations|control)"
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "410", "422"]

[[operations]]
include-path-regex = "/v1/(chat/completions|messages|responses)$"
headers = {{ Authorization = "Bearer {session_key(KEY, "fuzzed-0", AGENT)}" }}
parameters = {{ "path.name" = "fuzzed-0" }}
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "409", "410", "503"]
checks.ignored_auth.enabled = false
"""


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in whole_document()["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_the_checked_in_document_is_up_to_date() -> None:
    remedy = "write it with: python -m deploy.openapi_document"
    assert DOCUMENT.read_text("utf-8") == document_text(), remedy


def test_each_operation_lists_its_answers_and_its_errors_are_problems() -> None:
    for path, method, operation in operations():
        answers = operation["responses"]
        expected = {"408", "413", "415", "421", "500", "503"}
        if operation["security"]:
            expected.add("401")
        if "requestBody" in operation:
            expected |= {"400", "422"}
        if operation.get("parameters"):
            expected.add("422")
        assert expected <= answers.keys(), (path, method, expected - answers.keys())
        assert bool(operation["security"]) == (path not in PROBES and "/models" not in path)
        for status, answer in answers.items():
            assert answer["description"] != "Validation Error"
            if int(status) >= 400:
                assert "application/problem+json" in answer["content"], (path, status)


def test_each_dialects_body_has_the_fields_of_its_table_and_a_minimal_example() -> None:
    paths = whole_document()["paths"]
    for dialect in DIALECTS:
        operation = paths[f"/sessions/{{name}}{dialect.path}"]["post"]
        body = operation["requestBody"]["content"]["application/json"]
        assert body["schema"]["properties"].keys() == dialect.parameters.keys()
        assert body["schema"]["additionalProperties"] is False
        smallest = SMALLEST[dialect.name]
        dialect.read(smallest, {})
        for name in body["schema"]["required"]:
            with pytest.raises(Refused):
                dialect.read({key: value for key, value in smallest.items() if key != name}, {})
        for status in ("400", "401", "403", "404", "409", "410", "429", "503"):
            examples = operation["responses"][status]["content"]["application/json"]["examples"]
            assert all("error" in each["value"] for each in examples.values()) and examples


def is_open(url: str, headers: dict[str, str]) -> bool | None:
    """Return True if a session is open and None if it is not open yet."""
    return httpx.get(url, headers=headers).json()["status"] == "open" or None


def with_fingerprint(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the real tokenizer fingerprint, so that uploads pass its check."""
    body = document["paths"]["/api/v1/trajectories"]["post"]["requestBody"]
    for each in body["content"].values():
        each["schema"]["properties"]["tokenizer_fingerprint"]["enum"] = [renderer().fingerprint]
    return document


def fuzz(directory: Path, *options: str) -> str:
    """Run Schemathesis over the whole document and return what it found; empty if nothing."""
    config = directory / "schemathesis.toml"
    config.write_text(CONFIG)
    document = directory / "openapi.json"
    document.write_text(json.dumps(with_fingerprint(json.loads(DOCUMENT.read_text()))))
    limits = ServiceSettings(max_waiting_tasks=100_000)
    with served(directory, limits=limits, key=KEY, hold_s=0.2, stream_s=0.05) as world:
        headers = {"authorization": f"Bearer {KEY}"}
        for name in ("fuzzed", "other"):
            url = f"{world.url}/api/v1/sessions"
            assert httpx.post(url, json={"id": name}, headers=headers).status_code == 201
        world.may_play.set()
        for name in ("fuzzed-0", "other-1"):
            assert poll(partial(is_open, f"{url}/{name}", headers), limit_s=60.0), name
        # The fuzzer's tasks are not played, because playing would slow the loop that answers.
        world.may_play.clear()
        program = str(Path(sys.executable).with_name("schemathesis"))
        done = subprocess.run(
            [
                program, "--config-file", str(config), "run", str(document), "--url", world.url,
                "--warnings", "off", *options,
            ],
            cwd=directory, env={**os.environ, "NO_COLOR": "1"},
            capture_output=True, text=True, timeout=3600, check=False,
        )  # fmt: skip
        assert httpx.get(f"{world.url}/healthz", timeout=60).status_code == 200
    print(done.stdout)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.chaos
@pytest.mark.fuzz
def test_a_fuzzer_finds_nothing_in_a_few_seconds(tmp_path: Path) -> None:
    options = ("--phases", "examples,fuzzing", "--max-examples", "3", "--max-time", "12")
    # Every run of this test sends the same requests; the proof draws new ones.
    options = (*options, "--seed", "1")
    assert fuzz(tmp_path, *options, "--no-shrink") == ""


@pytest.mark.proof
@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_a_fuzzer_finds_nothing_in_all_its_phases(tmp_path: Path) -> None:
    assert fuzz(tmp_path, "--max-examples", "100", "--max-time", "1800") == ""
