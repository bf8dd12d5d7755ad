"""An external agent that is trained through a URL: code search with OpenAI's client.

It plays the tasks that `rayloom tasks code-search` writes, as the built-in environment
`code_search` does, but externally: it declares the tools, runs their calls in the same confined
processes, computes the reward with the same function, and finishes each session with the reward
key. Try it in a second terminal, on your own repository:

    $ rayloom tasks code-search PATH/TO/REPOSITORY tasks.jsonl
    $ rayloom serve deploy/configs/code-search-cpu.yaml
    $ python docs/examples/code_search_agent.py tasks.jsonl --groups 32

Everything except the address and the keys is the agent's: its prompt, its tools, its length.
Needs the package openai.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from actors.environment.plugins.code_search.environment import (
    BAD_ANSWER,
    ERROR,
    NO_CALL,
    QUESTION,
    grade_files,
    read_task,
)
from actors.environment.plugins.code_search.tools import (
    ANSWER,
    SEARCH_TOOLS,
    CodeTools,
    ToolSettings,
    read_answer,
)
from actors.environment.policy import ParsedCall
from actors.environment.protocol import MalformedCall, ToolCall
from actors.environment.tasks import read_tasks
from actors.environment.tool_calls import check_calls, with_integers
from actors.environment.tool_turns import BadArguments, ToolFailed
from actors.types import Task

TOOLS = (*SEARCH_TOOLS, ANSWER)
MAX_TURNS = 12
MAX_MALFORMED_IN_A_ROW = 3
MALFORMED_PENALTY = 0.1


@dataclass
class Played:
    """The result of a session."""

    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    outcome: str | None = None
    """None: the service decides."""


async def play(env: dict[str, str], task: Task, tools: CodeTools) -> Played:
    """Play one task. env: the variables from the service that start an agent."""
    data = read_task(task)
    directory = await tools.open(data.repository)
    # The service delays a request until it has room for it, and while weights change.
    client = openai.AsyncOpenAI(
        base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"], max_retries=5, timeout=600
    )
    messages: list[Any] = [{"role": "user", "content": QUESTION.format(question=data.question)}]
    num_calls = num_malformed = in_a_row = 0
    async with client:
        for _ in range(MAX_TURNS):
            try:
                said = await client.chat.completions.create(
                    model="policy",
                    messages=messages,
                    tools=[tool.for_template() for tool in TOOLS],  # type: ignore[misc]
                )
            except openai.APIStatusError as error:
                if error.status_code not in (400, 410):
                    raise
                # The context is full or the session is over; the service knows which of them.
                return Played(components={"num_calls": float(num_calls)})
            reply = said.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            is_malformed = not reply.tool_calls
            if is_malformed:
                messages.append({"role": "user", "content": NO_CALL})
            for asked in reply.tool_calls or []:
                assert asked.type == "function"
                parsed = ParsedCall(
                    name=asked.function.name, arguments=asked.function.arguments, id=asked.id
                )
                (call,) = with_integers(check_calls([parsed], TOOLS), TOOLS)
                if isinstance(call, MalformedCall):
                    content, is_malformed = ERROR.format(message=call.message), True
                elif call.name == ANSWER.name:
                    answered = read_answer(call.arguments)
                    if answered is not None:
                        grade = grade_files(answered, data.files)
                        parts = {**grade, "num_calls": float(num_calls)}
                        penalty = -MALFORMED_PENALTY * num_malformed
                        return Played(
                            reward=grade["f1"] + penalty,
                            components={**parts, "malformed": penalty},
                            outcome="completed",
                        )
                    content, is_malformed = ERROR.format(message=BAD_ANSWER), True
                else:
                    num_calls += 1
                    content, is_refused = await search(tools, directory, call)
                    is_malformed |= is_refused
                messages.append({"role": "tool", "tool_call_id": asked.id, "content": content})
            num_malformed += is_malformed
            in_a_row = in_a_row + 1 if is_malformed else 0
            if in_a_row > MAX_MALFORMED_IN_A_ROW:
                penalty = -MALFORMED_PENALTY * num_malformed
                return Played(
                    reward=penalty,
                    components={"malformed": penalty},
                    outcome="malformed_tool_call",
                )
    penalty = -MALFORMED_PENALTY * num_malformed
    return Played(reward=penalty, components={"malformed": penalty}, outcome="max_turns")


async def search(tools: CodeTools, directory: str, call: ToolCall) -> tuple[str, bool]:
    """Make a search; return its answer, and whether the call was malformed."""
    try:
        return await tools.call(directory, call.name, call.arguments), False
    except ToolFailed as error:
        return ERROR.format(message=error), isinstance(error, BadArguments)


async def ask(client: httpx.AsyncClient, method: str, path: str, **how: Any) -> dict[str, Any]:
    """Send one request; repeat it if the service says so or does not answer."""
    for delay_s in (1, 2, 4, 8, 16, 32, None):
        try:
            answer = await client.request(method, path, **how)
        except httpx.TransportError:
            if delay_s is None:
                raise
        else:
            if answer.status_code not in (429, 503) or delay_s is None:
                if answer.is_error:
                    raise SystemExit(f"{method} {path}: {answer.status_code} {answer.text}")
                found: dict[str, Any] = answer.json()
                return found
            delay_s = int(answer.headers.get("retry-after", delay_s))
        await asyncio.sleep(delay_s)
    raise AssertionError("unreachable: the last pass returns or raises")


async def play_group(
    client: httpx.AsyncClient, name: str, task: Task, tools: CodeTools, size: int | None
) -> list[float]:
    """Play a task in the sessions of a group, which share a baseline."""
    shown = {"question": task.data["question"], "repository": task.data["repository"]}
    body = {"id": name, "task": shown, "num_sessions": size}
    made = await ask(client, "POST", "/api/v1/sessions", json=body)

    async def one(session: dict[str, Any]) -> float:
        played = await play(session["env"], task, tools)
        body = {"reward": played.reward, "components": played.components, "outcome": played.outcome}
        # The agent's key cannot give a reward.
        headers = {"authorization": f"Bearer {session['reward_key']}"}
        await ask(
            client, "POST", f"/api/v1/sessions/{session['id']}/finish", json=body, headers=headers
        )
        return played.reward

    return await asyncio.gather(*(one(session) for session in made["sessions"]))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--root", type=Path, help="where the repositories lie; beside the tasks")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--sessions", type=int, help="of a group; the run's own group size")
    parser.add_argument("--at-once", type=int, default=8, help="groups that are played")
    parser.add_argument("--prefix", default="code-search", help="of the groups' ids")
    options = parser.parse_args()
    tasks = read_tasks(options.tasks)
    key = os.environ.get("RAYLOOM_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    places = asyncio.Semaphore(options.at_once)
    rewards: dict[int, list[float]] = defaultdict(list)

    async with (
        CodeTools(ToolSettings(root=str(options.root or options.tasks.parent))) as tools,
        httpx.AsyncClient(base_url=options.url, headers=headers, timeout=120) as client,
    ):

        async def group(number: int) -> None:
            async with places:
                task = tasks[number % len(tasks)]
                name = f"{options.prefix}-{number}"
                found = await play_group(client, name, task, tools, options.sessions)
                rewards[number] = found
                print(f"group {number}: reward {sum(found) / len(found):.3f}", flush=True)

        await asyncio.gather(*(group(number) for number in range(options.groups)))
    tenth = max(1, options.groups // 10)
    for what, numbers in (("first", range(tenth)), ("last", range(options.groups)[-tenth:])):
        found = [reward for number in numbers for reward in rewards[number]]
        print(f"{what} groups: reward {sum(found) / len(found):.3f}")


if __name__ == "__main__":
    asyncio.run(main())
