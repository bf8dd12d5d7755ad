"""The routes of one session on loopback, over a gateway in this process and forced answers.

Everything from the client's request to the engine's port is real. The engine is replaced by a
script, whose answers arrive as sampled tokens: no tiny policy could say what a command-line agent
needs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from actors.environment.policy import GenerateReply, GenerateRequest, ParsedCall, ParsedReply
from actors.environment.protocol import ToolCall
from actors.environment.rendering import ChatRenderer
from actors.trainer.tiny.tokenizer import TURN_END, build_tokenizer
from actors.types import FinishReason, VersionSpan
from service.config.sections import SessionSettings, Unsupported
from service.gateway.bodies import NewSession
from worlds.parts.gateway_world import NAME, SPEC, Gateway
from worlds.parts.session_app import SessionRun

MAX_CONTEXT_TOKENS = 200_000
MAX_ANSWER_TOKENS = 1000
LIMIT_S = 60.0
TITLE = "A title"


@dataclass(kw_only=True)
class ForcedPolicy:
    """A policy that samples the texts and calls of a script, one for each request.

    has_titles: the program requests titles; a request without tools is one for a title.
    """

    script: list[str | ToolCall]
    has_titles: bool = False
    tokenizer: Any = field(default_factory=build_tokenizer)
    end: str = TURN_END
    thought: str = ""
    """Written before each answer if the prompt ends inside a thought."""
    requests: list[GenerateRequest] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)
    """The texts of the script that were sampled so far."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        is_title = self.has_titles and not request.tools
        said = TITLE if is_title else self.script.pop(0)
        text = (said if isinstance(said, str) else self._written(said)) + self.end
        prompt = self.tokenizer.decode(request.prompt_token_ids[-8:])
        thought = self.thought if prompt.endswith("<think>\n") else ""
        text = f"{thought}\n</think>\n\n{text}" if thought else text
        self.sampled += [] if is_title else [text]
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)
        if isinstance(said, str):
            parsed = ParsedReply(content=said, calls=(), reasoning=thought or None)
        else:
            arguments = json.dumps(said.arguments)
            made = ParsedCall(name=said.name, arguments=arguments, id=f"call-{len(self.requests)}")
            parsed = ParsedReply(content="", calls=(made,), reasoning=thought or None)
        return GenerateReply(
            token_ids=ids,
            logprobs=np.full(ids.shape, -0.5, np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=3, start=0, end=len(ids)),),
            cache_salt="v3",
            parsed=parsed,
        )

    def _written(self, call: ToolCall) -> str:
        """Return a call as text in the form of the chat template."""
        if "<function=" not in self.tokenizer.chat_template:
            made = json.dumps({"name": call.name, "arguments": call.arguments})
            return f"<tool_call>{made}</tool_call>"
        given = "".join(
            f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in call.arguments.items()
        )
        return f"<tool_call>\n<function={call.name}>\n{given}</function>\n</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A session with which an agent can be started."""

    session: NewSession
    address: str
    gateway: Gateway


@asynccontextmanager
async def serving(
    directory: Path, policy: ForcedPolicy, *, unsupported: Unsupported = "refuse"
) -> AsyncIterator[Served]:
    """Serve one open session until the end of the block."""
    settings = SessionSettings(hold_s=LIMIT_S, titles="leave_out", unsupported=unsupported)
    gateway = Gateway(
        directory,
        settings=settings,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        chat_renderer=ChatRenderer(policy.tokenizer),
        policy_client=policy,
    )
    await gateway.opened(spec=replace(SPEC, max_tokens_per_turn=MAX_ANSWER_TOKENS))
    # The session exists already, so no task is submitted to the run.
    app = SessionRun(gateway).app()
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off")
    )
    work = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        number = server.servers[0].sockets[0].getsockname()[1]
        address = f"http://127.0.0.1:{number}"
        session = NewSession.of(NAME, client_key="", address=address)
        yield Served(session=session, address=address, gateway=gateway)
    finally:
        server.should_exit = True
        await work
        gateway.sessions.close()
        gateway.store.close()
