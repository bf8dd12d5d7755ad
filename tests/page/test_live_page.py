"""Tests of the web page of a served run in headless Chromium."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.builders.journal_builders import group_of, step_of, written
from worlds.runs.served_run import ServedRun, served
from worlds.servers.browser import Browser, browser

from actors.types import Outcome

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """Serve a run that trains four tasks and has a journal of two steps."""
    directory = tmp_path_factory.mktemp("run")
    cut = group_of(1, [1, 0, 0], outcomes={2: Outcome.TRUNCATED_TOKENS})
    written(directory, step_of([group_of(0, [1, 0])]), step_of([cut], number=2))
    with served(directory, key=KEY) as world:
        submit(world, "a", "b", "c", "d")
        world.may_play.set()
        yield world


def submit(world: ServedRun, *ids: str) -> None:
    body = {"environment": "guessing", "batch": f"of-{ids[0]}", "tasks": [{"id": i} for i in ids]}
    post(world, "rollouts", body)


def post(world: ServedRun, path: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    address = f"{world.url}/api/v1/{path}"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture(scope="module")
def tab(world: ServedRun) -> Iterator[Browser]:
    """Open the page in a browser and enter a wrong key, then the right one."""
    with browser() as found:
        found.look()
        found.open(f"{world.url}/")
        found.wait_for("document.querySelector('form.key input')")
        for key, answer in (("another", ".key .wrong"), (KEY, ".tiles")):
            found.eval(f"document.querySelector('form.key input').value = '{key}'")
            found.click("form.key button")
            found.wait_for(f"document.querySelector('{answer}')")
        refusals = [text for text in found.complaints if "401" not in text]
        assert refusals == []
        found.complaints.clear()
        yield found
        assert found.complaints == []


def go(tab: Browser, route: str) -> None:
    tab.eval(f"location.hash = '#/{route}'")


def column(number: int) -> str:
    return f".list tbody td:nth-child({number})"


def test_curves_grow_while_the_page_is_open(tab: Browser, world: ServedRun) -> None:
    go(tab, "")
    tab.wait_for("document.querySelectorAll('figure canvas').length > 5")
    assert tab.texts(".pill") == ["training"]
    captions = tab.texts("caption")
    assert {"Window", "Queue", "Engines", "Ledger", "Outcomes"} <= set(captions)
    tab.eval("window.before = document.querySelector('h1').textContent")
    tab.eval("window.figure = document.querySelector('#reward canvas')")
    submit(world, "e", "f")
    tab.wait_for("document.querySelector('h1').textContent !== window.before", limit_s=20)
    # The figures add the new steps and are not created again.
    assert tab.eval("document.querySelector('#reward canvas') === window.figure")
    tab.hover("#reward .u-over", at=0.99)
    tab.wait_for("!document.querySelector('#reward .tip').hidden")
    assert tab.texts("#reward .tip .at") == ["step 3"]
    assert all(request.startswith(world.url) for request in tab.requests)


def test_tasks_are_filtered_and_lead_to_their_rollouts(tab: Browser) -> None:
    go(tab, "rollouts")
    tab.wait_for("document.querySelectorAll('.list tbody tr').length >= 4")
    tab.choose(".filters [name=batch]", "of-a")
    tab.wait_for("document.querySelectorAll('.list tbody tr').length === 4")
    assert tab.texts(column(1)) == ["a", "b", "c", "d"] and set(tab.texts(column(2))) == {"trained"}
    tab.choose(".filters [name=status]", "cancelled")
    tab.wait_for("document.querySelector('.list .missing')")
    tab.choose(".filters [name=status]", "")
    tab.wait_for("document.querySelector('.list tbody a')")
    tab.click(".list tbody a")
    tab.wait_for("document.querySelectorAll('.list tbody tr').length === 2")
    assert tab.texts("h2") == ["Task a"] and tab.texts(column(2)) == ["trained", "trained"]


def test_sessions_are_filtered(tab: Browser, world: ServedRun) -> None:
    post(world, "sessions", {"id": "played", "num_sessions": 2})
    go(tab, "sessions")
    tab.wait_for("document.querySelectorAll('.list tbody tr').length === 2")
    assert tab.texts(column(1)) == ["played-0", "played-1"]
    tab.choose(".filters [name=status]", "finished")
    tab.wait_for("document.querySelector('.list .missing')")


def test_trajectories_are_filtered_and_lead_to_their_tokens(tab: Browser) -> None:
    go(tab, "trajectories")
    tab.wait_for("document.querySelectorAll('.list tbody tr').length === 5")
    tab.choose(".filters [name=outcome]", "truncated_tokens")
    tab.wait_for("document.querySelectorAll('.list tbody tr').length === 1")
    assert tab.texts(column(2)) == ["g000001.0-2.a0"]
    tab.click(".list tbody a")
    tab.wait_for("document.querySelector('.text .t')")
    assert tab.texts("h1") == ["g000001.0-2.a0"]
    tab.hover(".text .t.masked")
    tab.wait_for("!document.querySelector('.columns-tip').hidden")
    assert "sampled, not trained · turn 0 · logprob" in tab.texts(".columns-tip")[0]


def test_an_unknown_trajectory_is_reported(tab: Browser, tmp_path: Path) -> None:
    go(tab, "trajectories/nobody")
    tab.wait_for("!document.querySelector('.banner').hidden")
    assert tab.texts(".banner")[0].startswith("the journal has no trajectory 'nobody'")
    tab.complaints.clear()
