"""Agents' command lines from npm, unchanged, over forced answers: `make proof PART=clients`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.node_programs import CODEX, OPENCODE, CommandLine, programs, work
from worlds.session_server import TITLE, ForcedPolicy, serving

from actors.types import Outcome

pytestmark = [pytest.mark.proof, pytest.mark.clients, pytest.mark.timeout(1800)]

TASK = "Write hello to note.txt"


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{text}</tool_call>"


def script_of(program: CommandLine, note: Path) -> list[str]:
    """What the policy says to have the program write `note`."""
    if program is CODEX:
        return [call("exec_command", cmd="printf hello > note.txt"), "It is done."]
    return [call("write", filePath=str(note), content="hello"), "It is done."]


@pytest.mark.parametrize(
    ("program", "num_titles"), [(CODEX, 0), (OPENCODE, 1)], ids=["codex", "opencode"]
)
async def test_a_command_line_does_a_task_and_its_session_has_what_was_sampled(
    tmp_path: Path, program: CommandLine, num_titles: int
) -> None:
    programs()
    home = tmp_path / "home"
    note = home / "work" / "note.txt"
    script = script_of(program, note)
    policy = ForcedPolicy(script=list(script))
    async with serving(tmp_path, policy) as served:
        said = await work(program, TASK, home=home, env=served.session.env)
        assert "It is done." in said and note.read_text() == "hello"
        async with httpx.AsyncClient(base_url=served.address) as client:
            answer = await client.post(
                f"/api/v1/sessions/{served.session.id}/finish",
                json={"reward": 1.0},
                headers={"authorization": f"Bearer {served.session.reward_key}"},
            )
        assert answer.status_code == 200, answer.text
        trajectory = await served.gateway.trajectory()
    asked = [policy.tokenizer.decode(each.prompt_token_ids) for each in policy.requests]
    assert len(asked) == len(script) + num_titles
    assert trajectory.outcome is Outcome.COMPLETED and trajectory.episode_return == 1.0
    # A title says nothing of the task: it is not trained.
    (sample,) = trajectory.samples
    assert answer.json()["left_out"] == num_titles
    sampled = [policy.tokenizer.decode(sample.token_ids[turn.tokens]) for turn in sample.turns]
    assert sampled == [f"{text}<|end|>" for text in script]
    assert policy.tokenizer.decode(sample.token_ids).count(TASK) and TITLE not in "".join(sampled)
