"""Tests of the adapter for OpenEnv with a fake server that speaks its protocol."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError
from websockets.asyncio.server import ServerConnection, serve

from actors.environment.builtin.openenv_env import OpenEnvEnvironment, OpenEnvOptions
from actors.environment.protocol import (
    Action,
    MalformedCall,
    RewardError,
    StepResult,
    ToolCall,
)
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.types import Task


class Guess(BaseModel):
    """The action of the fake server; like OpenEnv's `Action`, it forbids unknown fields."""

    model_config = ConfigDict(extra="forbid")

    number: int
    metadata: dict[str, Any] = {}


@dataclass
class Server:
    """A server of a guessing game whose number is the seed of the reset.

    The field `mode` of the reset says how the server misbehaves.
    """

    url: str = ""
    room: int = 8
    resets: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    num_open: int = 0
    tools: list[dict[str, Any]] | None = None
    """The MCP tools that the server lists; None: a step takes a `Guess` and not `call_tool`."""
    called: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def talk(self, session: ServerConnection) -> None:
        assert session.request is not None
        self.paths.append(session.request.path)
        self.authorizations.append(session.request.headers.get("Authorization"))
        if self.num_open == self.room:
            text = f"Server at capacity: {self.num_open}/{self.room} sessions active"
            await session.send(_error("CAPACITY_REACHED", text))
            return
        self.num_open += 1
        try:
            async for text in session:
                asked = json.loads(text)
                if asked["type"] == "reset":
                    self.resets.append(asked["data"])
                    await session.send(_observation({"text": "guess", "left": 9}))
                elif (answer := self._step(asked["data"])) is None:
                    return
                else:
                    await session.send(answer)
        finally:
            self.num_open -= 1

    def _step(self, data: dict[str, Any]) -> str | None:
        if self.tools is not None and data.get("type") == "list_tools":
            return _observation({"tools": self.tools})
        if self.tools is not None and data.get("type") == "call_tool":
            return self._called(data["tool_name"], data["arguments"])
        try:
            guess = Guess.model_validate(data)
        except ValidationError as error:
            errors = error.errors()
            return _error("VALIDATION_ERROR", "Invalid message", errors=errors)
        mode, number = self.resets[-1].get("mode"), self.resets[-1]["seed"]
        if mode == "drops":
            return None
        if mode == "fails":
            return _error("EXECUTION_ERROR", "no such board")
        is_hit = guess.number == number
        reward = None if mode == "unscored" else float(is_hit)
        return _observation({"text": "higher", "left": 8}, reward=reward, done=is_hit)

    def _called(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the answer to a tool call in the form of OpenEnv's `MCPEnvironment`."""
        self.called.append((name, arguments))
        seen: dict[str, Any] = {"tool_name": name, "result": None, "error": None}
        number, mode = arguments["number"], self.resets[-1].get("mode")
        if number < 0:
            seen["error"] = {"error_type": mode, "message": "no such number"}
            return _observation(seen)
        is_hit = number == self.resets[-1]["seed"]
        parts = [{"type": "text", "text": "yes" if is_hit else "higher"}, {"type": "image"}, NOTE]
        seen["result"] = {"content": parts, "is_error": False}
        is_scored = is_hit if mode == "late" else mode != "unscored"
        return _observation(seen, reward=float(is_hit) if is_scored else None, done=is_hit)


def _observation(fields: dict[str, Any], **more: Any) -> str:
    data = {"observation": {**fields, "metadata": {}}, "reward": None, "done": False, **more}
    return json.dumps({"type": "observation", "data": data})


def _error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Server]:
    server = Server(**settings)
    async with serve(server.talk, "127.0.0.1", 0) as listening:
        (socket,) = listening.sockets
        server.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        yield server


def _made(server: Server, **options: Any) -> OpenEnvEnvironment:
    given = {"action_field": "number", "observation_field": "text", **options}
    return OpenEnvEnvironment(OpenEnvOptions(url=server.url, **given))


def _task(seed: int = 3, **data: Any) -> Task:
    return Task(task_id="t", environment="openenv", seed=seed, data=data)


NOTE = {"type": "resource", "resource": {"uri": "file:///note", "text": "A note."}}
GUESS = {
    "name": "guess",
    "description": "Guess the number.",
    "input_schema": {
        "type": "object",
        "title": "guessArguments",
        "properties": {"number": {"type": "integer", "title": "Number"}},
        "required": ["number"],
        "additionalProperties": False,
    },
}


async def _with_tools(
    server: Server, *turns: Sequence[ToolCall | MalformedCall], mode: str = "", **options: Any
) -> list[StepResult]:
    """Play an episode in which each turn makes tool calls, and return the results."""
    given = {"tools": True, "prompt": "Guess.", **options}
    environment = OpenEnvEnvironment(OpenEnvOptions(url=server.url, **given))
    try:
        start = await environment.reset(_task(mode=mode))
        assert [tool.name for tool in start.tools] == ["guess"]
        return [await environment.step(Action(text="", calls=tuple(calls))) for calls in turns]
    finally:
        await environment.close()


def _guess(number: int) -> ToolCall:
    return ToolCall(name="guess", arguments={"number": number}, id=f"c{number}")


NO_JSON = MalformedCall(reason="invalid_json", message="No JSON.")


async def _play(environment: OpenEnvEnvironment, *answers: str) -> list[StepResult]:
    return [await environment.step(Action(text=answer)) for answer in answers]


async def test_an_episode_is_a_session_with_the_reward_of_the_server() -> None:
    async with served() as server:
        environment = _made(
            server, prompt="Now: {observation}.", reset={"board": "a", "size": 2}, best_return=1.0
        )
        start = await environment.reset(_task(size=4))
        assert start.messages[0].content == "Now: guess." and start.best_return == 1.0
        assert server.resets == [{"seed": 3, "board": "a", "size": 4}]
        first, last = await _play(environment, "1", "<think>4</think>3")
        assert first.messages[0].content == "higher" and not first.terminated
        assert last.terminated and last.messages == ()
        assert [each.reward for each in (first, last)] == [0.0, 1.0]
        assert last.reward_components == {"score": 1.0}
        assert server.paths == ["/ws"] and server.num_open == 1
        await environment.close()
        await _until(lambda: server.num_open == 0)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.005)


async def test_the_whole_observation_is_shown_if_no_field_is_named() -> None:
    async with served() as server:
        environment = _made(server, observation_field=None)
        start = await environment.reset(_task())
        assert start.messages[0].content == '{"text": "guess", "left": 9}'
        await environment.close()


async def test_an_action_that_the_schema_refuses_is_malformed() -> None:
    async with served() as server:
        environment = _made(server, max_malformed=1)
        await environment.reset(_task())
        results = await _play(environment, "five", "5", "", "six")
        assert [result.is_malformed for result in results] == [True, False, True, True]
        assert "number: Input should be a valid integer" in results[0].messages[0].content
        assert results[0].reward_components == {"malformed": -0.1}
        assert [result.ended_by_malformed for result in results] == [False, False, False, True]
        await environment.close()


async def test_a_policy_may_write_the_whole_action() -> None:
    async with served() as server:
        environment = _made(server, action_field=None, action={"metadata": {"from": "us"}})
        await environment.reset(_task())
        results = await _play(environment, "3", '{"digit": 3}', '{"number": 3}')
        assert [result.is_malformed for result in results] == [True, True, False]
        assert "digit: Extra inputs are not permitted" in results[1].messages[0].content
        assert results[2].terminated and results[2].reward == 1.0
        await environment.close()


@pytest.mark.parametrize("options", [{"action_field": "digit"}, {"action": {"digit": 1}}])
async def test_fields_of_the_options_that_the_server_refuses_are_an_error(
    options: dict[str, Any],
) -> None:
    async with served() as server:
        environment = _made(server, **options)
        await environment.reset(_task())
        with pytest.raises(ValueError, match="digit: Extra inputs are not permitted"):
            await _play(environment, "3")
        await environment.close()


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("fails", ValueError, "the server answers step with EXECUTION_ERROR: no such board"),
        ("drops", ConnectionError, "the session was lost: received 1000"),
        ("unscored", RewardError, "no reward in any step"),
    ],
)
async def test_a_failure_of_the_server_is_an_error_and_not_a_reward_of_0(
    mode: str, error: type[Exception], message: str
) -> None:
    async with served() as server:
        environment = _made(server)
        await environment.reset(_task(mode=mode))
        with pytest.raises(error, match=message):
            await _play(environment, "3")
        await environment.close()


async def test_the_policy_calls_the_environments_mcp_tools() -> None:
    async with served(tools=[GUESS]) as server:
        environment = OpenEnvEnvironment(
            OpenEnvOptions(url=server.url, tools=True, prompt="Guess.")
        )
        start = await environment.reset(_task())
        (tool,) = start.tools
        assert (tool.name, tool.description) == ("guess", "Guess the number.")
        assert tool.parameters["properties"] == {"number": {"type": "integer"}}
        assert start.messages[0].content == "Guess."
        first = await environment.step(Action(text="", calls=(_guess(1), _guess(2))))
        assert [message.content for message in first.messages] == ["higher\n[image]\nA note."] * 2
        assert [message.tool_call_id for message in first.messages] == ["c1", "c2"]
        assert first.reward == 0.0 and first.reward_components == {"score": 0.0}
        # The server does not get the call that follows the one that ended the episode.
        last = await environment.step(Action(text="", calls=(_guess(3), _guess(4))))
        assert last.terminated and last.reward == 1.0 and last.messages == ()
        assert [arguments["number"] for _, arguments in server.called] == [1, 2, 3]
        await environment.close()


async def test_a_turn_without_a_call_ends_an_episode_that_was_scored() -> None:
    async with served(tools=[GUESS]) as server:
        first, scored, last = await _with_tools(server, (), (_guess(1),), ())
        assert first.is_malformed and first.messages[0].content == "Call one of the tools."
        assert scored.reward_components == {"score": 0.0} and not scored.terminated
        assert last == StepResult(terminated=True)
        silent = await _with_tools(server, (_guess(1),), (), mode="late")
        assert [each.is_malformed for each in silent] == [False, True]


async def test_a_malformed_call_does_not_prevent_the_other_calls_of_its_turn() -> None:
    async with served(tools=[GUESS]) as server:
        mixed, again, over = await _with_tools(
            server, (NO_JSON, _guess(1)), (NO_JSON,), (_guess(1),) * 9, max_malformed=2
        )
        assert [message.content for message in mixed.messages][:1] == ["error: No JSON."]
        assert mixed.reward_components == {"score": 0.0, "malformed": -0.1}
        assert mixed.is_malformed and again.is_malformed and over.ended_by_malformed
        assert len(server.called) == 1 + 8
        won = (await _with_tools(server, (NO_JSON, _guess(3))))[0]
        assert won.terminated and not won.is_malformed and won.reward == 1.0


@pytest.mark.parametrize(
    ("mode", "is_malformed"),
    [("execution_error", False), ("timeout", False), ("invalid_args", True)],
)
async def test_the_policy_is_shown_the_error_of_a_tool(mode: str, is_malformed: bool) -> None:
    async with served(tools=[GUESS]) as server:
        (result,) = await _with_tools(server, (_guess(-1),), mode=mode)
        assert result.messages[0].content == "error: no such number"
        assert result.is_malformed == is_malformed


async def test_a_call_that_the_environment_cannot_make_is_an_error() -> None:
    async with served(tools=[GUESS]) as server:
        with pytest.raises(ValueError, match="a call of guess failed: no such number"):
            await _with_tools(server, (_guess(-1),), mode="transport_error")
        with pytest.raises(RewardError, match="no reward in any step"):
            await _with_tools(server, (_guess(3),), mode="unscored", best_return=1.0)


@pytest.mark.parametrize(
    ("tools", "why"), [(None, "number: Field required"), ([], "its list is empty")]
)
async def test_an_environment_without_tools_is_refused(
    tools: list[dict[str, Any]] | None, why: str
) -> None:
    async with served(tools=tools) as server:
        with pytest.raises(ValueError, match=rf"without MCP tools \({why}.*action_field"):
            await _with_tools(server)


async def test_a_reset_waits_for_a_free_session_of_the_server() -> None:
    async with served(room=1) as server:
        first, second = _made(server), _made(server)
        await first.reset(_task())
        waiting = asyncio.create_task(second.reset(_task()))
        await _until(lambda: len(server.paths) == 3)
        assert not waiting.done()
        await first.close()
        assert (await waiting).messages[0].content == "guess"
        impatient = _made(server, wait_s=0)
        with pytest.raises(ValueError, match=r"no session was free within 0 s .*1/1 sessions"):
            await impatient.reset(_task())
        for environment in (second, impatient):
            await environment.close()


async def test_the_error_of_an_unreachable_server_has_its_address() -> None:
    async with served() as server:
        pass
    with pytest.raises(ConnectionError, match=rf"{server.url.replace('http', 'ws')}/ws: .*start"):
        await _made(server).reset(_task())


async def test_a_missing_field_of_an_observation_is_an_error_with_the_fields_found() -> None:
    async with served() as server:
        environment = _made(server, observation_field="board")
        with pytest.raises(ValueError, match=r"\['left', 'metadata', 'text'\], expected board"):
            await environment.reset(_task())
        await environment.close()
        environment = _made(server, observation_field="metadata.hint")
        with pytest.raises(ValueError, match=r"fields \[\], expected hint"):
            await environment.reset(_task())
        await environment.close()


async def test_headers_may_contain_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_KEY", "secret")
    async with served() as server:
        environment = _made(server, headers={"Authorization": "Bearer $OPENENV_KEY"})
        await environment.reset(_task())
        assert server.authorizations == ["Bearer secret"]
        await environment.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "url: got 'localhost:8000', expected the address"),
        ({}, "options.url: missing"),
        ({"url": "ws://h", "prompt": "go"}, "prompt: got 'go'"),
        ({"url": "ws://h", "tools": True, "step_prompt": "go"}, "step_prompt: got 'go'"),
        ({"url": "ws://h", "tools": True, "action_field": "number"}, "expected one way to act"),
        (
            {"url": "ws://h", "malformed_penalty": -1},
            "malformed_penalty: got -1, expected 0",
        ),
        ({"url": "ws://h", "reset": {"size": math.inf}}, "reset: got a value that cannot be sent"),
        ({"url": "ws://h", "headers": {"A": "$NOT_SET_ANYWHERE"}}, "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadEnvironmentOptions, match=message):
        resolve("openenv", options)
