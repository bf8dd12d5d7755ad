"""A gateway without Ray: real sessions, tree, renderer and store, and a policy of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.algorithm import AlgorithmSettings
from actors.deadline import within
from actors.environment.policy import GenerateReply, GenerateRequest, PolicyClient
from actors.environment.protocol import Message, Role, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.environment.settings import RolloutSettings
from actors.types import SESSION, RolloutAssignment, Task, Trajectory
from service.access.keys import AGENT, REWARD, digest_of, session_key
from service.config.sections import SessionSettings
from service.gateway.chat import ChatCall, ChatReply, ChatRequest
from service.gateway.commits import GroupCommit
from service.gateway.sampling import GatewaySettings
from service.gateway.sessions import Sessions
from service.intake.session import (
    Finish,
    SessionKeys,
    SessionRequest,
    SessionSpec,
    StoredSession,
    session_id,
)
from service.intake.submission import RolloutRequest
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.submissions import SubmissionStore, packed
from worlds.builders.episode_builders import parsed_reply, renderer, reply

SPEC = SessionSpec(max_turns=8, max_tokens_per_turn=16, ttl_s=100, idle_s=50, reward_deadline_s=20)
DEADLINE_S = 10.0
NAME = "task-0"


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def said(content: str, **fields: Any) -> Message:
    return Message(role=Role.ASSISTANT, content=content, **fields)


@dataclass
class Policy:
    """A policy that answers each request with its number: 0, 1, 2, …

    before: awaited before each answer.
    """

    answers: Callable[[int], GenerateReply] = lambda number: reply(f"{number}<|im_end|>")
    before: Callable[[], Awaitable[None]] | None = None
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        number = len(self.requests)
        self.requests.append(request)
        if self.before is not None:
            await self.before()
        answer = self.answers(number)
        text = renderer().decode(answer.token_ids)
        return replace(answer, parsed=parsed_reply(text, request.tools or ()))


@dataclass
class Gateway:
    """One gateway over a run's directory; `restart` returns its successor after a kill -9.

    A restart ends the requests of clients that are in progress.
    """

    directory: Path
    policy: Policy = field(default_factory=Policy)
    settings: SessionSettings = field(default_factory=lambda: SessionSettings(hold_s=DEADLINE_S))
    max_context_tokens: int = 400
    clock: float = 1000.0
    chat_renderer: ChatRenderer = field(default_factory=renderer)
    finds_parser: bool = False
    stop: tuple[str, ...] = ()
    policy_client: PolicyClient | None = None
    """Used instead of `policy`."""
    playing: dict[str, asyncio.Task[Trajectory]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = RunStore(f"sqlite:///{self.directory / 'run.db'}")
        self.term = self.store.acquire_lease(owner="gateway").term
        self.sessions_store = SessionStore(self.store)
        self.commits = GroupCommit(self.sessions_store, term=self.term, hold_s=self.settings.hold_s)
        self.sessions = Sessions(
            GatewaySettings(
                sessions=self.settings,
                rollouts=RolloutSettings(max_turns=8, max_tokens_per_turn=16, stop=self.stop),
                algorithm=AlgorithmSettings(group_size=2, groups_per_step=2),
                chat_template=None,
                max_context_tokens=self.max_context_tokens,
                finds_parser=self.finds_parser,
            ),
            renderer=self.chat_renderer,
            make_policy=lambda: self.policy_client or self.policy,
            store=self.sessions_store,
            commits=self.commits,
            now=lambda: self.clock,
        )

    def create(self, name: str = "task", *, spec: SessionSpec = SPEC, members: int = 2) -> None:
        task = Task(task_id=name, environment=SESSION, seed=1)
        keys = tuple(SessionKeys.of("", session_id(name, member)) for member in range(members))
        wanted = RolloutRequest.of(
            task,
            asked_samples=members,
            default_samples=members,
            sessions=SessionRequest(spec=spec, keys=keys),
        )
        SubmissionStore(self.store).add([packed(wanted)], term=self.term)

    def admit(self, name: str = NAME, *, group_number: int = 0, attempt: int = 0) -> None:
        """Hand the session's rollout to the gateway."""
        task_id, _, member = name.rpartition("-")
        assignment = RolloutAssignment(
            rollout_id=f"g{group_number:06d}.0-{member}",
            group_id=f"g{group_number:06d}.0",
            group_number=group_number,
            attempt=attempt,
            task=Task(task_id=task_id, environment=SESSION, seed=1),
        )
        self.playing[name] = asyncio.create_task(self.sessions.play(assignment))

    async def opened(self, **fields: Any) -> Gateway:
        """Create a group of sessions and admit the first one; return this gateway."""
        self.create(**fields)
        self.admit()
        await asyncio.sleep(0.05)
        return self

    async def restart(self, *names: str) -> Gateway:
        """Kill this gateway and return its successor.

        names: the sessions whose rollouts the successor is handed.
        """
        for task in self.playing.values():
            task.cancel()
        self.sessions.close()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)
        self.store.close()
        after = Gateway(
            self.directory,
            policy=self.policy,
            settings=self.settings,
            max_context_tokens=self.max_context_tokens,
            clock=self.clock,
            chat_renderer=self.chat_renderer,
            policy_client=self.policy_client,
        )
        for name in names:
            after.admit(name, attempt=1)
        return after

    async def ask(
        self,
        *messages: Message,
        name: str = NAME,
        request_id: str = "",
        deadline_s: float = DEADLINE_S,
        tools: Iterable[ToolSchema] = (),
        **fields: Any,
    ) -> ChatReply:
        """Send a request with the agent's key."""
        call = ChatCall(
            session_id=name,
            key_digest=self.key(AGENT, name),
            request_id=request_id or f"request-{len(self.policy.requests)}-{id(messages)}",
            request=ChatRequest(messages=messages, tools=tuple(tools), **fields),
            deadline_s=deadline_s,
        )
        return await self.sessions.chat(call)

    async def finish(self, reward: float | None = 1.0, **fields: Any) -> StoredSession:
        return await self.sessions.finish(NAME, self.key(REWARD), Finish(reward=reward, **fields))

    async def trajectory(self, name: str = NAME) -> Trajectory:
        return await within(DEADLINE_S, self.playing[name])

    def key(self, scope: str, name: str = NAME) -> str:
        return digest_of(session_key("", name, scope))
