"""An agent that plays a guessing game over the clients of OpenAI and Anthropic.

It knows nothing of Rayloom: all that it gets is the environment variables of a session.
`SessionClient` creates the sessions and rewards them.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from anthropic import Anthropic
from openai import OpenAI

LIMIT_S = 300.0
HIGHEST = 7
NUM_GUESSES = 3


def play(
    env: dict[str, str], *, number: int, speaks: Sequence[str] = ("chat",), streams: bool = False
) -> float:
    """Play one game. Return 1.0 if the number was found, else 0.0.

    speaks: the APIs of its requests in turn, each of chat, messages or responses.
    """
    ask = _speaker(env, streams=streams)
    messages: list[Any] = [
        {"role": "user", "content": f"Say one number from 1 to {HIGHEST}. Guess my number."}
    ]
    for guess in range(NUM_GUESSES):
        text = ask[speaks[guess % len(speaks)]](messages)
        messages.append({"role": "assistant", "content": text})
        found = re.search(r"\d+", text)
        if found and int(found[0]) == number:
            return 1.0
        is_low = found is not None and int(found[0]) < number
        messages.append({"role": "user", "content": "higher" if is_low else "lower"})
    return 0.0


def _speaker(env: dict[str, str], *, streams: bool) -> dict[str, Callable[[list[Any]], str]]:
    """Return, for each API, a function that sends a conversation and returns the answer's text."""
    openai = OpenAI(
        base_url=env["OPENAI_BASE_URL"],
        api_key=env["OPENAI_API_KEY"],
        max_retries=8,
        timeout=LIMIT_S,
    )
    anthropic = Anthropic(
        base_url=env["ANTHROPIC_BASE_URL"],
        api_key=env["ANTHROPIC_API_KEY"],
        max_retries=8,
        timeout=LIMIT_S,
    )

    def chat(messages: list[Any]) -> str:
        if not streams:
            answer = openai.chat.completions.create(model="any", messages=messages)
            return answer.choices[0].message.content or ""
        parts = openai.chat.completions.create(model="any", messages=messages, stream=True)
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

    def say(messages: list[Any]) -> str:
        asked: dict[str, Any] = {"model": "any", "max_tokens": 8, "messages": messages}
        if streams:
            with anthropic.messages.stream(**asked) as stream:
                blocks = stream.get_final_message().content
        else:
            blocks = anthropic.messages.create(**asked).content
        return "".join(block.text for block in blocks if block.type == "text")

    def respond(messages: list[Any]) -> str:
        if not streams:
            return openai.responses.create(model="any", input=messages).output_text
        with openai.responses.stream(model="any", input=messages) as stream:
            return stream.get_final_response().output_text

    return {"chat": chat, "messages": say, "responses": respond}


@dataclass
class SessionClient:
    """A client of the service that creates sessions and rewards them."""

    client: httpx.Client

    def create(self, name: str, *, limit_s: float, **fields: Any) -> list[dict[str, Any]]:
        """Create and return a group's sessions; repeat the request while the service starts."""
        deadline = time.monotonic() + limit_s
        while True:
            answer = self.client.post("/api/v1/sessions", json={"id": name, **fields})
            if answer.status_code not in (404, 503) or time.monotonic() > deadline:
                assert answer.status_code in (200, 201), answer.text
                found: list[dict[str, Any]] = answer.json()["sessions"]
                return found
            time.sleep(0.2)

    def finish(self, session: dict[str, Any], *, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Finish a session; repeat the request while the service is not available."""
        deadline = time.monotonic() + limit_s
        headers = {"authorization": f"Bearer {session['reward_key']}"}
        while True:
            answer = self.client.post(
                f"/api/v1/sessions/{session['id']}/finish", json=fields, headers=headers
            )
            if answer.status_code < 500 or time.monotonic() > deadline:
                assert answer.status_code == 200, answer.text
                found: dict[str, Any] = answer.json()
                return found
            time.sleep(random.uniform(0.2, 0.5))

    def play(self, session: dict[str, Any], *, number: int, limit_s: float, **how: Any) -> float:
        """Play a session's game and finish the session. Return its reward."""
        reward = play(session["env"], number=number, **how)
        self.finish(session, reward=reward, components={"found": reward}, limit_s=limit_s)
        return reward
