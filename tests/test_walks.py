"""Tests that compare the walks in docs/architecture.md with the files that the product enters."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from worlds.parts.gateway_world import NAME, Gateway
from worlds.parts.session_app import SessionRun

from service.gateway.bodies import NewSession

REPOSITORY = Path(__file__).parents[1]
DOCUMENT = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES = {"one rollout": 45, "a session's request": 9}
# A walk need not name a file of at most this number of lines.
SMALL = 150


def walk(name: str) -> list[str]:
    """Return the files of a walk's table in the order of their first occurrence."""
    section = DOCUMENT.partition(f"\n## The walk of {name}\n")[2].partition("\n## ")[0]
    named: list[str] = []
    for row in re.findall(r"^\| \d+ \|.*\| ([^|]+) \|$", section, flags=re.MULTILINE):
        folder = ""
        for file in re.findall(r"`([^`]+)`", row):
            if file.startswith(("actors/", "service/")):
                folder = file.rpartition("/")[0]
            named.append(file if file.startswith(f"{folder}/") else f"{folder}/{file}")
    return list(dict.fromkeys(named))


@contextmanager
def entered_files() -> Iterator[tuple[set[str], threading.Event]]:
    """Collect the files of the product whose functions are called while the event is set.

    Enter this before the start of threads that may call such functions.
    """
    found: set[str] = set()
    records = threading.Event()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and records.is_set() and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found, records
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def large(found: set[str], folder: str) -> set[str]:
    """Return the large files of the product below a folder, by their path in the repository."""
    paths = {Path(file) for file in found}
    return {
        path.relative_to(REPOSITORY).as_posix()
        for path in paths
        if path.is_relative_to(REPOSITORY / folder)
        and path.read_text(encoding="utf-8").count("\n") > SMALL
    }


def test_walks_name_existing_files_and_not_too_many() -> None:
    for name, most in MOST_FILES.items():
        files = walk(name)
        assert 5 < len(files) <= most, name
        assert [file for file in files if not (REPOSITORY / file).is_file()] == []
    assert f"eighteen steps in {len(walk('one rollout'))} files" in DOCUMENT


async def test_request_of_a_session_enters_the_files_of_its_walk(tmp_path: Path) -> None:
    """Compare without `client.py`: the gateway runs in this process, so it is not entered."""
    with entered_files() as (found, records):
        gateway = Gateway(tmp_path)
        await gateway.opened()
        key = NewSession.of(NAME, client_key="", address="http://localhost").agent_key
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=SessionRun(gateway).app()),
            base_url="http://localhost",
            headers={"authorization": f"Bearer {key}"},
        ) as client:
            records.set()
            answer = await client.post(
                f"/sessions/{NAME}/v1/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": "q"}]},
            )
            records.clear()
        gateway.sessions.close()
        gateway.store.close()
    assert answer.status_code == 200, answer.text
    not_entered = {"service/gateway/client.py"}
    assert large(found, "service/gateway") | not_entered == set(walk("a session's request"))
