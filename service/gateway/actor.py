"""The gateway as a Ray actor: it plays the run's sessions, as environment actors play games, and
delivers uploaded trajectories.

There is one per run, on the supervisor's node, since the run's database may be a file. Its state is
in the store: if the actor dies, its successor takes its rollouts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from actors.environment.policy import GenerateReply, GenerateRequest, PolicyClient
from actors.environment.rendering import load_renderer
from actors.metrics import GatewayMetrics
from actors.trajectory_queue.exchange import RolloutExchange
from actors.trajectory_queue.settings import ExchangeSettings
from actors.types import SESSION, UPLOADED, RolloutAssignment, Trajectory
from service.access.keys import Caller
from service.gateway.calls import ChatCall, Finish, SessionView
from service.gateway.chat import ChatReply, Refused
from service.gateway.commits import GroupCommit
from service.gateway.generation import Generation
from service.gateway.sessions import GatewaySettings, Sessions
from service.gateway.uploads import Uploads, policy_facts
from service.intake.uploads import (
    GroupPolicy,
    PolicyFacts,
    Upload,
    UploadGroup,
    UploadReply,
    UploadView,
)
from service.store.database import PATIENCE_S
from service.store.keys import read_keys
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.uploads import UploadStore
from service.telemetry.endpoint import Reading, push_forever

# Shorter than the store's own patience, after which the store gives up.
STORE_HOLD_S = PATIENCE_S / 2


class Gateway:
    """An asynchronous Ray actor; its calls are those of `Sessions`, `Uploads` and `Generation`.

    Refusals are returned instead of raised, since Ray logs raised errors.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        actor_id: str,
        tokenizer_path: str,
        make_policy: Callable[[], PolicyClient],
        queue: Any,
        database_url: str,
        run_id: str,
        term: int,
    ) -> None:
        """Connect to the store and load the tokenizer.

        Args: tokenizer_path: a directory or hub name. queue: handle of the trajectory queue actor.
        run_id: names the endpoint of its metrics. term: the term under whose lease turns are
        stored. Raises: StoreError.
        """
        store = RunStore(database_url)
        self._run_id, self._actor_id = run_id, actor_id
        self._metrics = GatewayMetrics()
        self._commits = GroupCommit(
            SessionStore(store), term=term, hold_s=min(settings.sessions.hold_s, STORE_HOLD_S)
        )
        renderer = load_renderer(
            tokenizer_path,
            template_options=settings.rollouts.template_options,
            history=settings.rollouts.history,
            chat_template=settings.chat_template,
        )
        self._facts = policy_facts(settings, renderer)
        self._uploads = Uploads(settings, store=UploadStore(store), term=term)
        self._sessions = Sessions(
            settings,
            renderer=renderer,
            make_policy=make_policy,
            store=SessionStore(store),
            commits=self._commits,
            metrics=self._metrics,
            read_keys=lambda: read_keys(store),
        )
        self._generation = Generation(make_policy, take_turn=self._sessions.take_turn)
        self._exchange = RolloutExchange(
            self._play,
            actor_id=actor_id,
            queue=queue,
            environments=(SESSION, UPLOADED),
            num_slots=settings.sessions.max_open,
            settings=ExchangeSettings(),
            is_durable=True,
        )

    async def run(self) -> None:
        """Take rollouts and hand trajectories over until `stop`.

        Raises: QueueUnreachable; StoreError, LeaseLost when nothing can be stored any more.
        """
        exchanging = asyncio.create_task(self._exchange.run())
        looking = asyncio.create_task(self._sessions.look_forever())
        pushing = asyncio.create_task(
            push_forever(self._run_id, role=self._actor_id, read=self._read_metrics)
        )
        try:
            await asyncio.wait((exchanging, looking), return_when=asyncio.FIRST_COMPLETED)
            for task in (looking, exchanging):
                if task.done():
                    task.result()
        finally:
            for task in (exchanging, looking, pushing):
                task.cancel()

    def _read_metrics(self) -> Reading:
        metrics = self._metrics
        metrics.open.set(self._sessions.num_open)
        return Reading(
            gained=list(metrics.gained.collect()), values=tuple(metrics.values.collect())
        )

    async def _play(self, assignment: RolloutAssignment) -> Trajectory:
        is_uploaded = assignment.task.environment == UPLOADED
        player = self._uploads if is_uploaded else self._sessions
        return await player.play(assignment)

    async def ping(self) -> None:
        """Return if the event loop is running: a blocked actor does not answer."""

    async def stop(self) -> None:
        """Accept nothing more, and finish storing what is queued."""
        await self._exchange.stop()
        self._sessions.close()
        await self._commits.close()

    async def chat(self, call: ChatCall) -> ChatReply | Refused:
        return await _answer(self._sessions.chat(call))

    async def check_key(self, session_id: str, key_digest: str) -> Refused | None:
        refused: Refused | None = await _answer(self._sessions.check_key(session_id, key_digest))
        return refused

    async def num_prompt_tokens(self, call: ChatCall) -> int | Refused:
        return await _answer(self._sessions.num_prompt_tokens(call))

    async def abandon(self, session_id: str, request_id: str) -> None:
        await self._sessions.abandon(session_id, request_id)

    async def finish(
        self, session_id: str, key_digest: str, finish: Finish, client: Caller | None = None
    ) -> SessionView | Refused:
        return await _answer(self._sessions.finish(session_id, key_digest, finish, client))

    async def give_reward(
        self, session_id: str, key_digest: str, given: Finish, client: Caller | None = None
    ) -> SessionView | Refused:
        return await _answer(self._sessions.give_reward(session_id, key_digest, given, client))

    async def discard(
        self, session_id: str, sees: str | None = None
    ) -> SessionView | Refused | None:
        return await _answer(self._sessions.discard(session_id, sees))

    async def claim(
        self, submission_id: str, name: str, sees: str | None = None
    ) -> int | Refused | None:
        return await _answer(self._sessions.claim(submission_id, name, sees))

    async def close_group(
        self, submission_id: str, sees: str | None = None
    ) -> int | Refused | None:
        return await _answer(self._sessions.close_group(submission_id, sees))

    async def view(self, session_id: str, sees: str | None = None) -> SessionView | Refused | None:
        return await _answer(self._sessions.view(session_id, sees))

    async def policy_facts(self) -> PolicyFacts:
        return self._facts

    async def upload(
        self, uploads: Sequence[Upload], policies: Sequence[GroupPolicy], **limits: int
    ) -> UploadReply | Refused:
        return await _answer(self._uploads.add(uploads, policies, **limits))

    async def uploaded(self, name: str) -> UploadView | Refused | None:
        return await _answer(self._uploads.view(name))

    async def drop_group(self, group: str) -> UploadGroup | Refused | None:
        return await _answer(self._uploads.drop(group))

    async def generate(self, request: GenerateRequest, key_name: str) -> GenerateReply | Refused:
        return await _answer(self._generation.generate(request, key_name))


async def _answer(work: Any) -> Any:
    try:
        return await work
    except Refused as refused:
        return refused
