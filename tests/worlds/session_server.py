"""The routes of one session on loopback, over a gateway in this process and forced answers.

Everything between the client's request and the engine's port is the real one: what a command line
needs that no tiny policy could say is forced behind that port, as sampled tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from actors.environment.rendering import ChatRenderer
from actors.policy import GenerateReply, GenerateRequest
from actors.trainer.tiny.tokenizer import TURN_END, build_tokenizer
from actors.types import FinishReason, VersionSpan
from service.gateway.bodies import NewSession
from service.gateway.settings import SessionSettings, Titles
from worlds.episode_builders import parsed_reply
from worlds.gateway_world import NAME, SPEC, Gateway
from worlds.session_app import SessionRun

MAX_CONTEXT_TOKENS = 200_000
MAX_ANSWER_TOKENS = 1000
LIMIT_S = 60.0
TITLE = "A title"


@dataclass(kw_only=True)
class ForcedPolicy:
    """Samples the texts of a script, one a request that offers tools; a title for any other."""

    script: list[str]
    tokenizer: Any = field(default_factory=build_tokenizer)
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        text = self.script.pop(0) if request.tools else TITLE
        ids = np.array(self.tokenizer.encode(text + TURN_END, add_special_tokens=False), np.int32)
        parsed = parsed_reply(text, request.tools or ())
        return GenerateReply(
            token_ids=ids,
            logprobs=np.full(ids.shape, -0.5, np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=3, start=0, end=len(ids)),),
            cache_salt="v3",
            parsed=replace(parsed, content="") if parsed.calls else parsed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A session that an agent can be started with."""

    session: NewSession
    address: str
    gateway: Gateway


@asynccontextmanager
async def serving(directory: Path, policy: ForcedPolicy) -> AsyncIterator[Served]:
    """One session, open, as long as the block lasts."""
    settings = SessionSettings(hold_s=LIMIT_S, titles=Titles.LEAVE_OUT)
    gateway = Gateway(
        directory,
        settings=settings,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        chat_renderer=ChatRenderer(policy.tokenizer),
        policy_client=policy,
    )
    await gateway.opened(spec=replace(SPEC, max_tokens_per_turn=MAX_ANSWER_TOKENS))
    # The session is there: nothing is submitted to a run.
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
