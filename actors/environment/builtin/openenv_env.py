"""Adapter for OpenEnv: environments behind its servers, by their protocol; no package of theirs.

An episode is one WebSocket session at `URL/ws` (`reset`, then `step` by `step`): a server makes a
new environment for each HTTP request, so that `/reset` and `/step` play no episode. The reward is
the server's own (component `score`). An action that its schema does not take is malformed: it costs
`malformed_penalty` (component `malformed`), moves nothing, and ends the episode after
`max_malformed` in a row. Any other error of the server, or its loss, ends the attempt as an
environment error, and an episode without any reward as a reward error.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from actors.environment.malformed import MalformedTurns
from actors.environment.protocol import (
    Action,
    Message,
    Observation,
    RewardError,
    Role,
    StepResult,
)
from actors.environment.tool_calls import visible_text
from actors.environment.user_code import describe
from actors.environment.variables import expanded
from actors.types import Task

NO_ACTION = "The environment takes no such answer: {why}."
NO_OBJECT = "Answer with one JSON object."
OPEN_LIMIT_S = 10.0
CLOSE_LIMIT_S = 2.0
MAX_MESSAGE_BYTES = 16 * 2**20
# Errors of a field that are the configuration's, and not what the policy said in it.
_WRONG_FIELDS = {"missing", "extra_forbidden"}


class _Refused(Exception):
    """An action does not fit the server's schema; the message is for the policy."""


class _Full(Exception):
    """All sessions of the server are taken."""


class OpenEnvEnvironment:
    """url: of the server, http(s):// or ws(s)://. headers: sent to it; `$NAME` is a variable.

    action_field: of the action, which the policy's text becomes; None: the text is the action, as
    JSON. action: its other fields. observation_field: what the policy is shown; None: all, as JSON.
    prompt, step_prompt: of the first message and of later ones, with {observation}.
    reset: what it is called with beside the seed and a task's data. wait_s: for a free session.
    """

    data_schema: Mapping[str, Any] = {
        "type": "object",
        "description": "what the environment's reset is called with, beside the seed",
    }

    def __init__(
        self,
        *,
        url: str,
        action_field: str | None = "message",
        action: Mapping[str, Any] | None = None,
        observation_field: str | None = None,
        prompt: str = "{observation}",
        step_prompt: str = "{observation}",
        reset: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 30.0,
        best_return: float | None = None,
        max_malformed: int = 3,
        malformed_penalty: float = 0.1,
    ) -> None:
        scheme, _, place = url.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not place:
            raise ValueError(
                f"openenv: got url={url!r}, expected the address of a server, such as "
                "http://localhost:8000"
            )
        if max_malformed < 0 or not 0 <= malformed_penalty < 10 or wait_s < 0:
            raise ValueError(
                f"openenv: got max_malformed={max_malformed}, wait_s={wait_s}, "
                f"malformed_penalty={malformed_penalty}; expected 0 or more, and a penalty below 10"
            )
        for name, template in (("prompt", prompt), ("step_prompt", step_prompt)):
            if "{observation}" not in template:
                raise ValueError(
                    f"openenv: {name}: got {template!r}, expected a text that holds {{observation}}"
                )
        self._url = f"{scheme.replace('http', 'ws')}://{place.rstrip('/')}/ws"
        self._headers = {
            name: expanded(text, what=f"tasks.options.headers.{name}")
            for name, text in (headers or {}).items()
        }
        self._action_field = action_field
        self._action = dict(action or {})
        self._observation_field = observation_field
        self._prompt = prompt
        self._step_prompt = step_prompt
        self._reset = dict(reset or {})
        self._wait_s = wait_s
        self._best_return = best_return
        self._malformed = MalformedTurns(at_most=max_malformed, penalty=malformed_penalty)
        self._session: ClientConnection | None = None
        self._was_rewarded = False

    async def reset(self, task: Task) -> Observation:
        self._malformed.begin_anew()
        self._was_rewarded = False
        # Most generators take seeds below 2^32.
        data = {"seed": task.seed % 2**31, **self._reset, **task.data}
        answer = await self._begin({"type": "reset", "data": data})
        if answer.get("done"):
            raise ValueError("openenv: the episode is over with its reset")
        content = self._prompt.replace("{observation}", self._shown(answer))
        return Observation(
            messages=(Message(role=Role.USER, content=content),), best_return=self._best_return
        )

    async def step(self, action: Action) -> StepResult:
        text = visible_text(action.text)
        said = _read_object(text) if self._action_field is None else {self._action_field: text}
        if said is None:
            return self._told(NO_OBJECT)
        try:
            answer = await self._ask({"type": "step", "data": {**self._action, **said}})
        except _Refused as refused:
            return self._told(NO_ACTION.format(why=refused))
        self._malformed.begin_anew()
        return self._result(answer)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            # The server frees its environment when the connection ends, however it does.
            await session.close()

    def _told(self, text: str) -> StepResult:
        return self._malformed.result((Message(role=Role.USER, content=text),))

    def _result(self, answer: Mapping[str, Any]) -> StepResult:
        """Raises: RewardError for an episode that ends without any reward."""
        reward, is_over = answer.get("reward"), bool(answer.get("done"))
        self._was_rewarded |= reward is not None
        if is_over and not self._was_rewarded:
            raise RewardError("openenv: the episode ended, and no step had a reward")
        content = "" if is_over else self._step_prompt.replace("{observation}", self._shown(answer))
        return StepResult(
            messages=() if is_over else (Message(role=Role.USER, content=content),),
            reward=0.0 if reward is None else float(reward),
            reward_components={} if reward is None else {"score": float(reward)},
            terminated=is_over,
        )

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """Raises: ValueError where the observation has no such field."""
        observation = answer.get("observation")
        seen: Any = observation
        if self._observation_field is not None:
            if not isinstance(observation, Mapping) or self._observation_field not in observation:
                told = sorted(observation) if isinstance(observation, Mapping) else "none"
                raise ValueError(
                    f"openenv: got an observation with the fields {told}, expected "
                    f"{self._observation_field}; correct tasks.options.observation_field"
                )
            seen = observation[self._observation_field]
        elif isinstance(observation, Mapping):
            seen = {name: value for name, value in observation.items() if name != "metadata"}
        text = seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)
        return text.encode(errors="replace").decode()

    async def _begin(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open a session and ask for its first observation, waiting where all are taken."""
        give_up = time.monotonic() + self._wait_s
        while True:
            await self.close()
            self._session = await self._open()
            try:
                return await self._ask(message)
            except _Full as full:
                if time.monotonic() > give_up:
                    raise ValueError(
                        f"openenv: no session was free within {self._wait_s:g} s ({full}); expected"
                        " one for each rollout that is played at once: raise the server's "
                        "max_concurrent_envs, or lower rollouts.slots_per_actor"
                    ) from full
            await asyncio.sleep(random.uniform(0.1, 0.5))

    async def _open(self) -> ClientConnection:
        """Raises: ConnectionError."""
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
                f"openenv: {self._url}: {describe(error)}; start the server, and let every node "
                "reach it"
            ) from error

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises: _Refused, _Full; ValueError for another error of the server; ConnectionError."""
        assert self._session is not None
        # A server that is full says so before it is asked, and closes.
        with suppress(ConnectionClosed):
            await self._session.send(json.dumps(message))
        try:
            answer = json.loads(await self._session.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"openenv: {self._url}: the session was lost: {error}") from error
        if answer.get("type") == "observation":
            data: Mapping[str, Any] = answer["data"]
            return data
        refusal = answer.get("data") or {}
        code, told = refusal.get("code"), str(refusal.get("message", ""))[:200]
        if code == "CAPACITY_REACHED":
            raise _Full(told)
        faults = refusal.get("errors") or ()
        if code == "VALIDATION_ERROR" and faults:
            told = "; ".join(f"{_place(fault)}: {fault.get('msg', '')}" for fault in faults)[:200]
            if message["type"] == "step" and self._is_policys(faults):
                raise _Refused(told)
        raise ValueError(f"openenv: the server answers {message['type']} with {code}: {told}")

    def _is_policys(self, faults: Sequence[Mapping[str, Any]]) -> bool:
        """Whether what the policy said is at fault, and not the fields that are configured."""
        return self._action_field is None or all(
            _place(fault) == self._action_field and fault.get("type") not in _WRONG_FIELDS
            for fault in faults
        )


def _place(fault: Mapping[str, Any]) -> str:
    """The field that an error of pydantic is about."""
    return str(next(iter(fault.get("loc") or ()), ""))


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None
