"""The gateway as a Ray actor: it plays the run's sessions, as environment actors play games, and
delivers uploaded trajectories.

Each run has one gateway, on the supervisor's node, because the run's database may be a file. The
gateway's state is in the store: if the actor dies, a new one takes its rollouts from the queue
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from actors.environment.policy import PolicyClient
from actors.environment.rendering import load_renderer
from actors.metrics import GatewayMetrics
from actors.trajectory_queue.exchange import RolloutExchange
from actors.trajectory_queue.settings import ExchangeSettings
from actors.types import SESSION, UPLOADED, RolloutAssignment, Trajectory
from service.gateway.chat import Refused
from service.gateway.commits import GroupCommit
from service.gateway.sampling import GatewaySettings
from service.gateway.sessions import Sessions
from service.gateway.uploads import Uploads
from service.store.database import PATIENCE_S
from service.store.keys import read_keys
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.uploads import UploadStore
from service.telemetry.endpoint import Reading, push_forever

# Seconds to wait for the database; shorter than the time after which the store itself gives up.
STORE_HOLD_S = PATIENCE_S / 2


class Gateway:
    """The gateway, an asynchronous Ray actor.

    `service.run.actor_pool` calls `run`, `ping` and `stop`; the API's replicas call `ask`, through
    `service.gateway.client`.
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
        self._sessions = Sessions(
            settings,
            renderer=renderer,
            make_policy=make_policy,
            store=SessionStore(store),
            commits=self._commits,
            metrics=self._metrics,
            read_keys=lambda: read_keys(store),
        )
        self._uploads = Uploads(
            settings,
            renderer=renderer,
            store=UploadStore(store),
            term=term,
            make_policy=make_policy,
            count_turn=self._sessions.count_turn,
        )
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
        """Take rollouts from the queue and return their trajectories to it, until `stop`.

        Raises: QueueUnreachable; StoreError, LeaseLost when nothing can be stored any more.
        """
        exchanging = asyncio.create_task(self._exchange.run())
        watching = asyncio.create_task(self._sessions.watch())
        pushing = asyncio.create_task(
            push_forever(self._run_id, role=self._actor_id, read=self._read_metrics)
        )
        try:
            await asyncio.wait((exchanging, watching), return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, exchanging):
                if task.done():
                    task.result()
        finally:
            for task in (exchanging, watching, pushing):
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
        """Return at once. If the event loop is blocked, the caller gets no answer."""

    async def stop(self) -> None:
        """Accept no more requests, and store all changes that are not stored yet."""
        await self._exchange.stop()
        self._sessions.close()
        await self._commits.close()

    async def ask(self, part: str, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of `Sessions` or `Uploads` and return its answer.

        Return a refusal instead of raising it, since Ray logs raised errors.

        Args: part: "sessions" or "uploads".
        """
        called = {"sessions": self._sessions, "uploads": self._uploads}[part]
        try:
            return await getattr(called, method)(*arguments, **named)
        except Refused as refused:
            return refused
