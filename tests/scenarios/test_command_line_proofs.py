"""Tests of unmodified agents from npm and PyPI, whose policy gives scripted answers.

Run by `make proof PART=clients`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.agents.node_programs import (
    CLAUDE_CODE,
    CODEX,
    FRAMEWORKS,
    OPENCODE,
    QWEN_CODE,
    CommandLine,
    line_of,
    work,
)
from worlds.models.published_templates import published, tokenizer_of
from worlds.parts.session_server import TITLE, ForcedPolicy, Served, serving

from actors.environment.protocol import ToolCall
from actors.types import Outcome, Trajectory
from service.config.sections import Unsupported

pytestmark = [pytest.mark.proof, pytest.mark.clients, pytest.mark.timeout(1800)]

TASK = "Write hello to note.txt"
DONE = "It is done."
WRITE = ToolCall(name="write", arguments={"text": "hello"})
TYPED = '{"said": "It is done."}'
WRITTEN = '{"text": "hello"}'


def fields_of(**fields: str) -> str:
    """Return a reply in DSPy's form: the name of each field, then its text."""
    shown = [f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()]
    return "\n\n".join([*shown, "[[ ## completed ## ]]"])


# For each program: the policy's answers, with which it writes the note, and the number of samples.
SCRIPTS: dict[str, tuple[list[str | ToolCall], int]] = {
    "agno_tools.py": ([WRITE, DONE], 1),
    "ai_sdk.mjs": ([WRITE, DONE], 1),
    # CrewAI adds the tool's result to the reply that it sends back.
    "crewai_text.py": (
        [
            f"Thought: I write.\nAction: write\nAction Input: {WRITTEN}",
            f"Thought: I now know the final answer\nFinal Answer: {DONE}",
        ],
        2,
    ),
    "crewai_tools.py": ([WRITE, DONE], 1),
    # DSPy writes each reply into the prompt of the next request.
    "dspy_react.py": (
        [
            fields_of(next_thought="I write.", next_tool_name="write", next_tool_args=WRITTEN),
            fields_of(next_thought="I am done.", next_tool_name="finish", next_tool_args="{}"),
            fields_of(reasoning="I have written it.", said=DONE),
        ],
        3,
    ),
    "google_adk_handoff.py": (
        [WRITE, ToolCall(name="transfer_to_agent", arguments={"agent_name": "reporter"}), DONE],
        2,
    ),
    "haystack_tools.py": ([WRITE, DONE], 1),
    "langgraph_react.py": ([WRITE, DONE], 1),
    "llama_index_function.py": ([WRITE, DONE], 1),
    "openai_agents.mjs": ([WRITE, DONE], 1),
    "openai_agents_typed.py": ([WRITE, TYPED], 1),
    "pydantic_ai_chat.py": ([WRITE, TYPED], 1),
    "pydantic_ai_tools.py": (
        [WRITE, ToolCall(name="final_result", arguments={"said": DONE})],
        1,
    ),
    "semantic_kernel_named.py": (
        [ToolCall(name="Notes-write", arguments=WRITE.arguments), DONE],
        1,
    ),
    # smolagents adds the code that it ran to the reply that it sends back.
    "smolagents_code.py": (
        ["<code>\nprint(write('hello'))\n</code>", f"<code>\nfinal_answer({DONE!r})\n</code>"],
        2,
    ),
    "smolagents_tools.py": (
        [WRITE, ToolCall(name="final_answer", arguments={"answer": DONE})],
        2,
    ),
    "strands_tools.py": ([WRITE, DONE], 1),
}
# Programs that request an option that a session does not support.
CONSTRAINED = {
    "openai_agents_typed.py",
    "pydantic_ai_chat.py",
    "pydantic_ai_tools.py",
    "smolagents_tools.py",
}
# Programs that send the agent's name, which the template does not show.
NAMED = {"semantic_kernel_named.py"}


def script_of(program: CommandLine, note: Path) -> list[str | ToolCall]:
    """Return the policy's answers with which a command-line agent writes `note`."""
    command, file = "printf hello > note.txt", str(note)
    calls = {
        CODEX.name: ToolCall(name="exec_command", arguments={"cmd": command}),
        CLAUDE_CODE.name: ToolCall(
            name="Bash", arguments={"command": command, "description": "Write the note"}
        ),
        OPENCODE.name: ToolCall(name="write", arguments={"filePath": file, "content": "hello"}),
        QWEN_CODE.name: ToolCall(
            name="write_file", arguments={"file_path": file, "content": "hello"}
        ),
    }
    return [calls[program.name], DONE]


def policy_over(template: str, script: list[str | ToolCall], **options: Any) -> ForcedPolicy:
    """Return a policy with the tiny model's template or a published one of a thinking model."""
    if not template:
        return ForcedPolicy(script=list(script), **options)
    (found,) = (each for each in published() if each.name == template)
    tokenizer = tokenizer_of(found)
    return ForcedPolicy(
        script=list(script), tokenizer=tokenizer, end="<|im_end|>", thought="I know.", **options
    )


async def finished(served: Served) -> tuple[dict[str, Any], Trajectory]:
    async with httpx.AsyncClient(base_url=served.address) as client:
        answer = await client.post(
            f"/api/v1/sessions/{served.session.id}/finish",
            json={"reward": 1.0},
            headers={"authorization": f"Bearer {served.session.reward_key}"},
        )
    assert answer.status_code == 200, answer.text
    return answer.json(), await served.gateway.trajectory()


def check_trained(policy: ForcedPolicy, trajectory: Trajectory, *, num_samples: int) -> None:
    """Check that each text of the script is trained once, in order, and that the last is judged."""
    assert not policy.script
    assert trajectory.outcome is Outcome.COMPLETED and trajectory.episode_return == 1.0
    assert len(trajectory.samples) == num_samples
    turns = {
        turn.index: policy.tokenizer.decode(sample.token_ids[turn.tokens])
        for sample in trajectory.samples
        for turn in sample.turns
    }
    assert [turns[index] for index in sorted(turns)] == policy.sampled
    rewards = {turn.index: turn.reward for sample in trajectory.samples for turn in sample.turns}
    assert {index for index, reward in rewards.items() if reward} == {max(turns)}
    for sample in trajectory.samples:
        assert TASK in policy.tokenizer.decode(sample.token_ids)


@pytest.mark.parametrize(
    ("program", "template"),
    [
        pytest.param(program, template, id=f"{program.name} {template or 'tiny'}")
        for program, template in (
            (CODEX, ""),
            (CODEX, "qwen3_5_think"),
            (CODEX, "qwen3_6"),
            (CLAUDE_CODE, ""),
            (CLAUDE_CODE, "qwen3_5_nothink"),
            (CLAUDE_CODE, "qwen3_6"),
            (OPENCODE, ""),
            (QWEN_CODE, ""),
        )
    ],
)
async def test_session_of_a_command_line_agent_has_its_sampled_turns(
    tmp_path: Path, program: CommandLine, template: str
) -> None:
    line_of(program)
    home = tmp_path / "home"
    note = home / "work" / "note.txt"
    policy = policy_over(template, script_of(program, note), has_titles=True)
    async with serving(tmp_path, policy) as served:
        said = await work(program, TASK, home=home, env=served.session.env)
        assert DONE in said and note.read_text() == "hello"
        answer, trajectory = await finished(served)
    # A request for a title does not belong to the task, so that it is not trained.
    assert answer["left_out"] == int(program is OPENCODE)
    assert len(policy.requests) == len(policy.sampled) + answer["left_out"]
    check_trained(policy, trajectory, num_samples=1)
    (sample,) = trajectory.samples
    assert TITLE not in "".join(
        policy.tokenizer.decode(sample.token_ids[t.tokens]) for t in sample.turns
    )


@pytest.mark.parametrize("program", FRAMEWORKS, ids=lambda program: program.name)
async def test_session_of_a_framework_agent_has_its_sampled_turns(
    tmp_path: Path, program: CommandLine
) -> None:
    line_of(program)
    home, (script, num_samples) = tmp_path / "home", SCRIPTS[program.name]
    policy = policy_over("", script)
    is_constrained = program.name in CONSTRAINED
    mode: Unsupported = "ignore" if is_constrained else "refuse"
    async with serving(tmp_path, policy, unsupported=mode) as served:
        said = await work(program, TASK, home=home, env=served.session.env)
        assert DONE in said and (home / "work" / "note.txt").read_text() == "hello"
        answer, trajectory = await finished(served)
    is_ignored = is_constrained or program.name in NAMED
    assert bool(answer["ignored"]) == is_ignored, answer["ignored"]
    check_trained(policy, trajectory, num_samples=num_samples)
