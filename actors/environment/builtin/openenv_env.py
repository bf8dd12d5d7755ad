"""Adapter for servers of OpenEnv environments. It speaks their protocol without OpenEnv's package.

An episode is one session of the server. The reward is the server's (component `score`). A malformed
action is one that the server's schema refuses. It costs `malformed_penalty` (component `malformed`)
and changes nothing. More than `max_malformed` malformed turns in a row end the episode. Other
errors end the attempt as an environment error. An episode without reward is a reward error.

With `tools` the policy calls the environment's MCP tools, and each call is a step on the server. A
turn without calls ends the episode after a step with a reward; otherwise the turn is malformed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from actors.environment.protocol import (
    Action,
    MalformedCall,
    Message,
    Observation,
    RewardError,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
)
from actors.environment.settings import rollout_settings
from actors.environment.tool_arguments import tidy
from actors.environment.tool_calls import visible_text
from actors.environment.tool_turns import ERROR, MalformedTurns, TurnOptions
from actors.limits import STRICT, NotNegative
from actors.options import JsonObject, expanded, holding
from actors.types import Task
from actors.user_code import describe

NO_ACTION = "The environment takes no such answer: {why}."
NO_OBJECT = "Answer with one JSON object."
NO_CALL = "Call one of the tools."
NO_TOOLS = (
    "openenv: got an environment without MCP tools ({why}), expected one or more; leave "
    "tasks.options.tools out, and name the action's field in action_field"
)
ACTION_FIELD = "message"
# The types of faults in a field that the configuration causes, not the policy's text.
_WRONG_FIELDS = {"missing", "extra_forbidden"}
# OpenEnv's types of failed calls: first those that the policy causes, then the server's.
_MALFORMED_CALLS = {"invalid_args", "tool_not_found"}
_TRANSPORT = "transport_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvOptions(TurnOptions):
    """Options of `openenv`: the server, the policy's actions and what the policy sees."""

    __pydantic_config__ = STRICT

    url: str
    """Address of the server: http://, https://, ws:// or wss://."""
    action_field: str | None = ACTION_FIELD
    """Field of the action that gets the policy's text; null: the text is the whole action, as
    JSON."""
    action: JsonObject | None = None
    """Further fields of the action, besides `action_field`."""
    tools: bool = False
    """Whether the policy calls the environment's MCP tools instead of writing an action."""
    observation_field: str | None = None
    """Field to show to the policy, such as text or metadata.text; null: all fields, as JSON."""
    prompt: str = "{observation}"
    """Text of the first message, with {observation}, which is optional with tools."""
    step_prompt: Annotated[str, holding("{observation}")] = "{observation}"
    """Text of later messages."""
    reset: JsonObject | None = None
    """Arguments of the environment's reset, besides the seed and a task's data."""
    headers: Mapping[str, str] | None = None
    """HTTP headers for the server; $NAME is an environment variable."""
    wait_s: NotNegative = 30.0
    """Seconds to wait for a free session."""
    best_return: float | None = None
    """The highest possible return; null: unknown."""

    def __post_init__(self) -> None:
        scheme, _, place = self.url.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not place:
            raise ValueError(
                f"url: got {self.url!r}, expected the address of a server, such as "
                "http://localhost:8000"
            )
        if self.tools and (self.action or self.action_field != ACTION_FIELD):
            raise ValueError(
                "tools: got tools together with action or action_field, expected one way to act: "
                "calls of the environment's tools, or an action made of the policy's text"
            )
        # The first observation of an environment with tools is often empty.
        if not self.tools and "{observation}" not in self.prompt:
            raise ValueError(f"prompt: got {self.prompt!r}, expected a text with {{observation}}")


class OpenEnvEnvironment:
    """An environment whose episode is one session of an OpenEnv server."""

    data_schema: Mapping[str, Any] = {
        "type": "object",
        "description": "arguments of the environment's reset, besides the seed",
    }

    def __init__(self, options: OpenEnvOptions) -> None:
        scheme, _, place = options.url.partition("://")
        address = f"{scheme.replace('http', 'ws')}://{place.rstrip('/')}/ws"
        headers = {
            name: expanded(text, what=f"tasks.options.headers.{name}")
            for name, text in (options.headers or {}).items()
        }
        self._options = options
        self._session = _Session(address, headers)
        self._malformed = MalformedTurns(
            at_most=options.max_malformed, penalty=options.malformed_penalty
        )
        self._was_rewarded = False

    async def reset(self, task: Task) -> Observation:
        self._malformed.begin_anew()
        self._was_rewarded = False
        # Most generators take seeds below 2^32.
        data = {"seed": task.seed % 2**31, **(self._options.reset or {}), **task.data}
        answer = await self._session.begin(data, wait_s=self._options.wait_s)
        if answer.get("done"):
            raise ValueError("openenv: the episode ended at its reset")
        content = self._options.prompt
        if "{observation}" in content:
            content = content.replace("{observation}", self._shown(answer))
        return Observation(
            messages=(Message(role=Role.USER, content=content),),
            tools=await self._listed() if self._options.tools else (),
            best_return=self._options.best_return,
        )

    async def step(self, action: Action) -> StepResult:
        """Play a turn. Raises: RewardError if the episode ends without any reward."""
        if self._options.tools:
            return await self._call(action.calls)
        text = visible_text(action.text)
        name = self._options.action_field
        said = _read_object(text) if name is None else {name: text}
        if said is None:
            return self._refusal(NO_OBJECT)
        try:
            answer = await self._session.step({**(self._options.action or {}), **said})
        except _Refused as refused:
            if not self._is_policys(refused.faults):
                raise failed("step", INVALID, refused) from refused
            return self._refusal(NO_ACTION.format(why=refused))
        self._malformed.begin_anew()
        is_over = bool(answer.get("done"))
        seen = "" if is_over else self._shown(answer)
        content = self._options.step_prompt.replace("{observation}", seen)
        return self._scored([answer], (Message(role=Role.USER, content=content),))

    async def close(self) -> None:
        await self._session.close()

    def _refusal(self, text: str) -> StepResult:
        return self._malformed.malformed_result((Message(role=Role.USER, content=text),))

    def _scored(
        self, answers: Sequence[Mapping[str, Any]], messages: tuple[Message, ...]
    ) -> StepResult:
        """Combine the server's answers to the steps of one turn. Raises: RewardError."""
        rewards = [answer["reward"] for answer in answers if answer.get("reward") is not None]
        is_over = any(answer.get("done") for answer in answers)
        self._was_rewarded |= bool(rewards)
        if is_over and not self._was_rewarded:
            raise RewardError(
                "openenv: the episode ended, and the server sent no reward in any step, expected "
                "one in at least one step; let the environment's `step` return a reward"
            )
        reward = float(sum(rewards))
        return StepResult(
            messages=() if is_over else messages,
            reward=reward,
            reward_components={"score": reward} if rewards else {},
            terminated=is_over,
        )

    async def _listed(self) -> tuple[ToolSchema, ...]:
        try:
            answer = await self._session.step({"type": "list_tools"})
        except _Refused as refused:
            raise ValueError(NO_TOOLS.format(why=refused)) from refused
        seen = answer.get("observation") or {}
        if not seen.get("tools"):
            why = (seen.get("metadata") or {}).get("error", "its list is empty")
            raise ValueError(NO_TOOLS.format(why=why))
        return tuple(
            ToolSchema(
                name=tool["name"],
                description=tool.get("description") or tool["name"],
                parameters=tidy(tool.get("input_schema") or {}),
            )
            for tool in seen["tools"]
        )

    async def _call(self, calls: Sequence[ToolCall | MalformedCall]) -> StepResult:
        if not calls:
            return StepResult(terminated=True) if self._was_rewarded else self._refusal(NO_CALL)
        answers: list[Mapping[str, Any]] = []
        messages: list[Message] = []
        num_malformed = max(0, len(calls) - rollout_settings.get().max_calls_per_turn)
        for call in calls[: rollout_settings.get().max_calls_per_turn]:
            if isinstance(call, MalformedCall):
                num_malformed += 1
                content = ERROR.format(message=call.message)
                messages.append(Message(role=Role.TOOL, content=content))
                continue
            answer = await self._session.step(
                {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
            )
            answers.append(answer)
            content, is_malformed = _result_of(answer.get("observation") or {})
            num_malformed += is_malformed
            content = self._options.step_prompt.replace("{observation}", content)
            messages.append(
                Message(role=Role.TOOL, content=content, name=call.name, tool_call_id=call.id)
            )
            if answer.get("done"):
                break
        scored = self._scored(answers, tuple(messages))
        if not num_malformed or scored.terminated:
            self._malformed.begin_anew()
            return scored
        malformed = self._malformed.malformed_result(tuple(messages))
        return replace(
            malformed,
            reward=malformed.reward + scored.reward,
            reward_components={**scored.reward_components, **malformed.reward_components},
        )

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """Return the observation in a server's answer as text for the policy."""
        seen: Any = answer.get("observation")
        if self._options.observation_field is not None:
            for name in self._options.observation_field.split("."):
                if not isinstance(seen, Mapping) or name not in seen:
                    fields = sorted(seen) if isinstance(seen, Mapping) else "none"
                    raise ValueError(
                        f"openenv: got an observation with the fields {fields}, expected {name}; "
                        "correct tasks.options.observation_field"
                    )
                seen = seen[name]
        elif isinstance(seen, Mapping):
            seen = {name: value for name, value in seen.items() if name != "metadata"}
        return _as_text(seen)

    def _is_policys(self, faults: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the policy's text, not an option, caused all the faults in an action."""
        return self._options.action_field is None or all(
            _name_of(fault) == self._options.action_field and fault.get("type") not in _WRONG_FIELDS
            for fault in faults
        )


def _result_of(seen: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a tool call's result as text for the policy, and whether the call was malformed.

    Raises: ValueError if the environment could not reach its tool.
    """
    if error := seen.get("error"):
        kind, message = error.get("error_type"), str(error.get("message", ""))[:500]
        if kind == _TRANSPORT:
            raise ValueError(f"openenv: a call of {seen.get('tool_name')} failed: {message}")
        return ERROR.format(message=_as_text(message)), kind in _MALFORMED_CALLS
    result = seen.get("result")
    parts = result.get("content") if isinstance(result, Mapping) else None
    if not isinstance(parts, list):
        return _as_text(result), False
    # The result has MCP's form: show the text of text parts, and only the type of other parts.
    texts = [
        f"[{part.get('type')}]" if (text := _text_in(part)) is None else text for part in parts
    ]
    return _as_text("\n".join(texts)), False


def _text_in(part: Mapping[str, Any]) -> str | None:
    # The text may be in a resource.
    holder = part.get("resource", part)
    return holder.get("text") if isinstance(holder, Mapping) else None


def _as_text(seen: Any) -> str:
    text = seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)
    return text.encode(errors="replace").decode()


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


# One session of an OpenEnv server, by its protocol over a WebSocket.
#
# A server makes a new environment for each HTTP request, so that `/reset` and `/step` cannot play
# an episode: an episode is one connection to `URL/ws`.
OPEN_LIMIT_S = 10.0
CLOSE_LIMIT_S = 2.0
MAX_MESSAGE_BYTES = 16 * 2**20
INVALID = "VALIDATION_ERROR"
"""The error code with which the server refuses a message that does not fit the server's schema."""


class _Refused(Exception):
    """Raised if the server refuses a message; the text names the faulty fields and the reasons."""

    def __init__(self, message: str, faults: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(message)
        self.faults = faults
        """The faults as pydantic reports them."""


class _Full(Exception):
    """Raised if the server has no free session."""


class _Session:
    """A client of a server, with at most one open session; `begin` opens one for each episode."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`url` is a ws:// or wss:// address."""
        self._url = url
        self._headers = headers
        self._connection: ClientConnection | None = None

    async def begin(self, reset: Mapping[str, Any], *, wait_s: float) -> Mapping[str, Any]:
        """Open a session and reset its environment; wait up to wait_s for a free session.

        Returns: the first observation, with the fields observation, reward and done.
        Raises: ConnectionError; ValueError if the server reports an error or has no free session.
        """
        give_up = time.monotonic() + wait_s
        while True:
            await self.close()
            self._connection = await self._open()
            try:
                return await self._ask("reset", reset)
            except _Full as full:
                if time.monotonic() > give_up:
                    raise ValueError(
                        f"openenv: no session was free within {wait_s:g} s ({full}); expected"
                        " one for each concurrent rollout: raise the server's "
                        "max_concurrent_envs, or lower rollouts.slots_per_actor"
                    ) from full
            except _Refused as refused:
                raise failed("reset", INVALID, refused) from refused
            await asyncio.sleep(random.uniform(0.1, 0.5))

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send an action; return the next observation, with the same fields as `begin`.

        Raises: _Refused; ValueError for another error; ConnectionError.
        """
        return await self._ask("step", action)

    async def close(self) -> None:
        """End the connection; the server then frees its environment."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _open(self) -> ClientConnection:
        try:
            return await connect(
                self._url,
                additional_headers=self._headers,
                open_timeout=OPEN_LIMIT_S,
                close_timeout=CLOSE_LIMIT_S,
                max_size=MAX_MESSAGE_BYTES,
            )
        except (OSError, WebSocketException) as error:
            raise ConnectionError(
                f"openenv: {self._url}: {describe(error)}; start the server where every node can "
                "reach it"
            ) from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message of the kind "reset" or "step", and return the observation in the answer.

        Raises: _Refused, _Full; ValueError for another error of the server; ConnectionError.
        """
        assert self._connection is not None
        # A full server says so before it receives anything, and closes.
        with suppress(ConnectionClosed):
            await self._connection.send(json.dumps({"type": kind, "data": data}))
        try:
            answer = json.loads(await self._connection.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"openenv: {self._url}: the session was lost: {error}") from error
        if answer.get("type") == "observation":
            seen: Mapping[str, Any] = answer["data"]
            return seen
        refusal = answer.get("data") or {}
        code, message = refusal.get("code"), str(refusal.get("message", ""))[:200]
        if code == "CAPACITY_REACHED":
            raise _Full(message)
        faults = refusal.get("errors") or ()
        if code == INVALID and faults:
            message = "; ".join(f"{_name_of(fault)}: {fault.get('msg', '')}" for fault in faults)
            raise _Refused(message[:200], faults)
        raise failed(kind, code, message)


def _name_of(fault: Mapping[str, Any]) -> str:
    """Return the name of the field that pydantic reports as faulty."""
    return str(next(iter(fault.get("loc") or ()), ""))


def failed(kind: str, code: object, message: object) -> ValueError:
    """Return the ValueError that reports an error or an unexpected answer of the server."""
    return ValueError(f"openenv: the server answers {kind} with {code}: {message}")
