"""Agents over plain HTTP that store each answer, in a process that a test may kill.

    $ python -m worlds.agents.session_agents URL MEMORY NAME NUM_GROUPS

NUM_GROUPS groups of sessions are played at once; when one ends, the next begins, until the file
MEMORY.stop exists. Every event is written to the file MEMORY before the agents act on it, as a line
of JSON (`Memory`). After a kill, the same command continues the unfinished sessions: it repeats the
unanswered requests, marked as repeated, or begins a new conversation, like an agent that has
forgotten everything.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

GROUP_SIZE, NUM_ROUNDS = 4, 4
ANSWER_LIMIT_S, PAUSE_S = 120.0, 0.5
# 404: the service has not added the route yet. 5xx: the run is recovering.
COME_AGAIN = frozenset({404, 429, 500, 502, 503, 504})
FULL_CONTEXT = "context_length_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn as the service returned it to the client."""

    session: str
    turn: str
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


@dataclass
class Memory:
    """The state of all processes with one NAME, rebuilt from the lines of their file."""

    groups: dict[str, bool] = field(default_factory=dict)
    """Requested groups, and whether the service accepted each."""
    answers: list[Answer] = field(default_factory=list)
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Session and messages of each request without an answer."""
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The service's answer to the finish request of each session."""
    errors: list[str] = field(default_factory=list)
    """Answers that the service should never give."""

    @classmethod
    def read(cls, file: Path) -> Memory:
        memory = cls()
        for line in file.read_text().splitlines() if file.exists() else ():
            memory.take(json.loads(line))
        return memory

    def take(self, line: dict[str, Any]) -> None:
        match line.pop("what"):
            case "asks for":
                self.groups.setdefault(line["group"], False)
            case "accepted":
                self.groups[line["group"]] = True
            case "asks":
                self.asked[line.pop("request")] = line
            case "gives up":
                self.asked.pop(line["request"], None)
            case "saw":
                self.asked.pop(line.pop("request"), None)
                line["ids"], line["logprobs"] = tuple(line["ids"]), tuple(line["logprobs"])
                self.answers.append(Answer(**line))
            case "finished":
                self.finished[line["session"]] = line["view"]
            case "error":
                self.errors.append(line["text"])


class Agents:
    """The agents of one process."""

    def __init__(self, url: str, file: Path, name: str, key: str) -> None:
        self._name = name
        self._stop = file.with_suffix(".stop")
        self._memory = Memory.read(file)
        # A line that a kill cut off would spoil the next one, so each line is one write.
        self._out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._headers = {"authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(
            base_url=url, timeout=ANSWER_LIMIT_S, limits=httpx.Limits(max_connections=None)
        )
        self._number = len(self._memory.groups)

    async def work(self, num_groups: int) -> None:
        left = [
            group
            for group in self._memory.groups
            if any(f"{group}-{n}" not in self._memory.finished for n in range(GROUP_SIZE))
        ]
        await asyncio.gather(
            *(self._slot(left[place] if place < len(left) else None) for place in range(num_groups))
        )

    async def _slot(self, group: str | None) -> None:
        while True:
            if group is None:
                if self._stop.exists():
                    return
                group, self._number = f"{self._name}-{self._number}", self._number + 1
                self._note("asks for", group=group)
            await self._play(group)
            group = None

    async def _play(self, group: str) -> None:
        body = {"id": group, "num_sessions": GROUP_SIZE, "shows_tokens": True}
        made = await self._ask("POST", "/api/v1/sessions", body, self._headers)
        self._note("accepted", group=group)
        await asyncio.gather(*(self._session(each) for each in made["sessions"]))

    async def _session(self, session: dict[str, Any]) -> None:
        name, rng = session["id"], random.Random()
        if name in self._memory.finished:
            return
        finish = f"finish {name}"
        if finish not in self._memory.asked:
            await self._converse(session, rng)
            # A group with equal rewards would not be trained, so the rewards of a group differ.
            body = {"reward": float(int(name[-1]) % 2)}
            self._note("asks", request=finish, session="", messages=body)
        # After a finish request the session takes no more turns. Because nobody knows whether the
        # service received it, it is sent again.
        body = self._memory.asked[finish]["messages"]
        headers = {"authorization": f"Bearer {session['reward_key']}"}
        for _ in range(2):
            view = await self._ask("POST", f"/api/v1/sessions/{name}/finish", body, headers)
        self._note("finished", session=name, view=view)

    async def _converse(self, session: dict[str, Any], rng: random.Random) -> None:
        chats: list[list[dict[str, str]]] = []
        for request, asked in list(self._memory.asked.items()):
            if asked["session"] == session["id"]:
                self._note("gives up", request=request)
                if rng.random() < 0.7:
                    await self._turn(session, asked["messages"], chats, num_tries=1)
        for _ in range(NUM_ROUNDS):
            # Sometimes a sub-agent asks at the same time.
            num_asked = rng.choice((1, 1, 2))
            asked_now = [_next(chats, rng) for _ in range(num_asked)]
            await asyncio.gather(*(self._turn(session, each, chats) for each in asked_now))

    async def _turn(
        self,
        session: dict[str, Any],
        messages: list[dict[str, str]],
        chats: list[list[dict[str, str]]],
        *,
        num_tries: int = 0,
    ) -> None:
        request = uuid.uuid4().hex
        self._note("asks", request=request, session=session["id"], messages=messages)
        url = f"/sessions/{session['id']}/v1/chat/completions"
        headers = {"authorization": f"Bearer {session['agent_key']}"}
        body = {"model": "any", "messages": messages}
        asks = self._streamed if random.random() < 0.5 else self._whole
        while True:
            # OpenAI's client marks repeated requests with this header.
            marked = {**headers, "x-stainless-retry-count": str(num_tries)}
            try:
                status, found = await asks(url, body, marked)
            except (httpx.HTTPError, json.JSONDecodeError, _Broken):
                status, found = 503, {}
            if status == 200:
                break
            if FULL_CONTEXT in json.dumps(found):
                self._note("gives up", request=request)
                return
            if status not in COME_AGAIN:
                self._fail(f"POST {url}: {status} {found}")
            num_tries += 1
            await asyncio.sleep(random.uniform(0.5, 1.0) * PAUSE_S)
        self._note(
            "saw",
            request=request,
            session=session["id"],
            turn=found["id"],
            ids=found["token_ids"],
            logprobs=found["token_logprobs"],
        )
        chats.append([*messages, {"role": "assistant", "content": found["content"]}])

    async def _whole(
        self, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, dict[str, Any]]:
        answer = await self._client.post(url, json=body, headers=headers)
        tree = answer.json()
        if answer.status_code != 200:
            return answer.status_code, tree
        (choice,) = tree["choices"]
        return 200, {"id": tree["id"], **choice, "content": choice["message"]["content"] or ""}

    async def _streamed(
        self, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, dict[str, Any]]:
        body = {**body, "stream": True}
        found: dict[str, Any] = {"content": ""}
        async with self._client.stream("POST", url, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return answer.status_code, json.loads(await answer.aread())
            async for chunk in _events(answer):
                if "error" in chunk:
                    code = chunk["error"]["code"]
                    return (400 if code == FULL_CONTEXT else 503), chunk
                (choice,) = chunk["choices"]
                found["id"] = chunk["id"]
                found["content"] += choice["delta"].get("content") or ""
                found |= {key: choice[key] for key in choice if key.startswith("token")}
        return 200, found

    async def _ask(
        self, method: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any]:
        """Send a request until it is answered."""
        while True:
            try:
                answer = await self._client.request(method, path, json=body, headers=headers)
                status, text = answer.status_code, answer.text
            except httpx.HTTPError as error:
                status, text = 503, repr(error)
            if status < 300:
                found: dict[str, Any] = json.loads(text)
                return found
            if status not in COME_AGAIN:
                self._fail(f"{method} {path}: {status} {text}")
            await asyncio.sleep(PAUSE_S)

    def _note(self, what: str, **fields: Any) -> None:
        line = {"what": what, **fields}
        os.write(self._out, json.dumps(line).encode() + b"\n")
        self._memory.take(line)

    def _fail(self, text: str) -> None:
        self._note("error", text=text[:2000])
        raise SystemExit(text)


class _Broken(Exception):
    """Raised if a stream ends without its last event."""


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream.

    Raises: _Broken if the stream ends without its last event.
    """
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            found = json.loads(line.removeprefix("data: "))
            yield found
            if "error" in found:
                return
    raise _Broken


def _next(chats: list[list[dict[str, str]]], rng: random.Random) -> list[dict[str, str]]:
    """Draw the next request.

    It extends a conversation, begins a new one, shortens one, or repeats the last question of one.
    """
    kind = rng.random()
    word = {"role": "user", "content": rng.choice(("higher", "lower"))}
    if not chats or kind < 0.2:
        return [{"role": "user", "content": f"Guess my number from 1 to {rng.randrange(2, 9)}."}]
    chat = rng.choice(chats)
    if kind < 0.35:
        return chat[:-1]
    if kind < 0.45:
        return [chat[0], word]
    return [*chat, word]


def main() -> None:
    url, file, name, num_groups = sys.argv[1:]
    key = os.environ["RAYLOOM_API_KEY"]
    asyncio.run(Agents(url, Path(file), name, key).work(int(num_groups)))


if __name__ == "__main__":
    main()
