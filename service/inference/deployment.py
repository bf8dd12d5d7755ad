"""The inference deployment: one vLLM engine in each Serve replica, fed by the weight board.

    deploy_inference(settings, name="run-t1", board=board)
    ...                                    # the trainer publishes; the replicas load
    wait_ready("run-t1", timeout_s=420)
    client = ServePolicyClient("run-t1")

A replica is ready only with the current policy version: its constructor waits for it. From then on
a background task pulls new versions. A replica whose engine or whose pulling has died ends its own
process, which Serve sees sooner than failed health checks; one that lacks the current version for
too long fails its health check. Either way Serve replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError
from ray.serve.config import ProxyLocation, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ApplicationStatus

from actors.deadline import within
from actors.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
)
from actors.weights.board import POLL_GRACE_S, Command, CommandKind, Publication
from service.inference.client import Answer, AnswerChunk, as_answer
from service.inference.settings import EngineSettings

POLL_S = 5.0
RPC_TIMEOUT_S = 10.0
RETRY_S = 0.5
FETCH_TIMEOUT_S = 300.0
DEPLOYMENT_NAME = "InferenceReplica"
STATUS_POLL_S = 0.2
MAX_FAILURE_CHARACTERS = 600
# A traceback's last line, "package.module.Name: what happened", which may go on below.
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:\(\w+\))?: ", re.MULTILINE)
# For the answers, and the message to the board, that are on their way out of a replica that ends.
EXIT_DELAY_S = 0.2
# vLLM takes no greater seed.
_SEEDS = 1 << 31
# An AF_UNIX path has at most 107 bytes; vLLM names its sockets by a UUID.
MAX_DIRECTORY_BYTES = 107 - len("/") - 36

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDescription:
    """One replica, for an operator, or a test that kills it."""

    name: str
    """Serve's unique id of the replica."""
    pid: int
    engine_pids: tuple[int, ...]
    """The processes that it started."""
    term: int | None
    version: int | None


def session_directory() -> Path:
    """The directory of the Ray session that this process has joined, on this machine."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name()


def make_engine_directory(parent: Path, name: str) -> Path:
    """Make the directory of one engine's sockets and temporary files in `parent`.

    vLLM leaves such files in the system's temporary directory, more with each kill; in a directory
    of the session they do not mix with those of other runs, and are removed with it. Where the path
    would be too long for a socket it lies in the system's temporary directory.
    """
    directory = parent / f"engine-{name}"
    if len(str(directory).encode()) > MAX_DIRECTORY_BYTES:
        return Path(tempfile.mkdtemp(prefix="rayloom-"))
    directory.mkdir(parents=True)
    return directory


class ReplicaAffinityRouter(RequestRouter):
    """Sends a call to the replica that its session id names, else to the less busy of two.

    Serve's public extension point, imported by name wherever a handle is used; requests are matched
    one by one, not first in first out.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of candidates; within a rank Serve takes the shortest queue."""
        if not candidate_replicas:
            return []
        wanted = "" if pending_request is None else pending_request.metadata.session_id
        if not wanted:
            count = min(2, len(candidate_replicas))
            return [random.sample(candidate_replicas, count)]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[home(wanted, by_name)]]]


def home(wanted: str, names: Iterable[str]) -> str:
    """The replica called `wanted`, else the one that inherits its trajectories.

    A rendezvous hash: all trajectories of a replica that is gone meet again at one survivor.
    """
    candidates = list(names)
    if wanted in candidates:
        return wanted
    return max(candidates, key=lambda name: (zlib.crc32(f"{wanted}/{name}".encode()), name))


class InferenceReplica:
    """Serve's view of one engine."""

    async def __init__(self, settings: EngineSettings, board: ActorHandle) -> None:  # type: ignore[misc]
        # vLLM takes ten seconds to import, which the process that deploys should not wait for.
        from service.inference.engine import PolicyEngine

        self._settings = settings
        self._board = board
        self._name = serve.get_replica_context().replica_id.unique_id
        # Replicas with one seed would sample the same tokens for members of a group.
        seed = (settings.seed + zlib.crc32(self._name.encode())) % _SEEDS
        directory = make_engine_directory(session_directory(), self._name)
        self._engine = PolicyEngine(replace(settings, seed=seed), directory)
        self._current_at = self._heard_at = time.monotonic()
        self._is_applying = self._is_ending = False
        await self._engine.start()
        this_actor = ray.get_runtime_context().current_actor
        await within(RPC_TIMEOUT_S, board.join.remote(self._name, this_actor))
        while self._engine.version is None:
            await self._pull()
        self._pulling = asyncio.create_task(self._pull_forever())
        self._pulling.add_done_callback(self._end_without_weights)

    # Serving

    async def generate_batch(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[AnswerChunk]:
        """Sample the turns of a batch; yield answers as they finish, those of one tick together."""
        finished: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()

        async def run(position: int, request: GenerateRequest) -> None:
            finished.put_nowait((position, await self._answer(request)))

        tasks = [asyncio.create_task(run(*numbered)) for numbered in enumerate(requests)]
        try:
            num_open = len(tasks)
            while num_open:
                chunk = [await finished.get()]
                # One engine step ends many requests; let the others of it arrive.
                await asyncio.sleep(0)
                while not finished.empty():
                    chunk.append(finished.get_nowait())
                num_open -= len(chunk)
                yield chunk
        finally:
            for task in tasks:
                task.cancel()

    async def _generate(self, request: GenerateRequest) -> GenerateReply:
        silent_s = time.monotonic() - self._heard_at
        if silent_s > POLL_S + POLL_GRACE_S and not self._is_applying:
            # The board may count this replica as gone and have published without it.
            raise PolicyUnavailable(
                f"inference: no answer of the weight board for {silent_s:.0f} s"
            )
        return replace(await self._engine.generate(request), replica=self._name)

    async def _answer(self, request: GenerateRequest) -> Answer:
        try:
            return await self._generate(request)
        except (PolicyDeadlineExceeded, ValueError) as error:
            return as_answer(error)
        except PolicyUnavailable as error:
            await self._end_if_dead()
            return as_answer(error)

    async def describe(self) -> ReplicaDescription:
        children = psutil.Process().children(recursive=True)
        return ReplicaDescription(
            name=self._name,
            pid=os.getpid(),
            engine_pids=tuple(child.pid for child in children),
            term=self._engine.term,
            version=self._engine.version,
        )

    async def check_health(self) -> None:
        """Raises: PolicyUnavailable; Serve then replaces the replica."""
        # Serve asks three times, and then waits for a graceful end that a dead engine cannot have.
        await self._end_if_dead()
        await self._engine.check_health()
        if self._pulling.done():
            raise PolicyUnavailable("inference: pulling weights has ended") from (
                None if self._pulling.cancelled() else self._pulling.exception()
            )
        limit_s = self._settings.max_staleness_s
        if (lacking_s := time.monotonic() - self._current_at) > limit_s:
            raise PolicyUnavailable(
                f"inference: not known to hold the current version for {lacking_s:.0f} s, "
                f"limit {limit_s} s"
            )

    async def _end_if_dead(self) -> None:
        """End this process when its engine is dead. Until then Serve would send it requests."""
        try:
            await self._engine.check_health()
        except PolicyUnavailable as error:
            self._end(str(error))

    def _end_without_weights(self, pulling: asyncio.Task[None]) -> None:
        if not pulling.cancelled():
            self._end(f"pulling weights has ended: {pulling.exception()}")

    def _end(self, why: str) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        logger.error("inference: this replica ends: %s", why)
        self._board.leave.remote(self._name)
        asyncio.get_running_loop().call_later(EXIT_DELAY_S, self._exit)

    def _exit(self) -> None:
        self._engine.remove_files()
        os._exit(1)

    def __del__(self) -> None:
        """Serve calls this at the end of a graceful shutdown, when the requests have drained."""
        if (pulling := getattr(self, "_pulling", None)) is not None:
            pulling.cancel()
            self._board.leave.remote(self._name)
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.shutdown()

    # Weights

    async def _pull_forever(self) -> None:
        while True:
            await self._pull()
            # Also while no request comes in.
            await self._engine.check_health()

    async def _pull(self) -> None:
        """Ask the board once and apply what it has. A board that is slow is asked again."""
        try:
            work = await self._poll()
        except (TimeoutError, ActorUnavailableError):
            logger.warning("inference: the weight board did not answer; asking again")
            await asyncio.sleep(RETRY_S)
            return
        # While it applies, the board waits for this replica.
        self._is_applying = work is not None
        match work:
            case Publication():
                await self._load(work)
            case Command():
                await self._execute(work)
        self._is_applying = False
        # After a command of an unfinished update the replica is on its way, not current.
        if not self._engine.is_updating:
            self._current_at = time.monotonic()

    async def _poll(self) -> Publication | Command | None:
        engine = self._engine
        reference = self._board.poll.remote(
            self._name, engine.term, engine.version, POLL_S, engine.num_workers
        )
        sent_at = time.monotonic()
        work = await within(POLL_S + RPC_TIMEOUT_S, reference)
        self._heard_at = sent_at
        return work

    async def _load(self, publication: Publication) -> None:
        fetching = asyncio.gather(*(group.buffer for group in publication.groups))
        buffers = await within(FETCH_TIMEOUT_S, fetching)
        await self._engine.apply(publication, buffers)
        await self._report(publication.term, publication.version)

    async def _execute(self, command: Command) -> None:
        error: str | None = None
        try:
            await self._engine.execute(command)
            if command.kind is CommandKind.FINISH and command.version is not None:
                await self._report(command.term, command.version)
        except PolicyUnavailable as failure:
            # The board gets the message, the replica's log the traceback.
            logger.exception("inference: command %s failed", command.kind.value)
            error = str(failure)
        reference = self._board.acknowledge.remote(self._name, command.sequence, error)
        await within(RPC_TIMEOUT_S, reference)

    async def _report(self, term: int, version: int) -> None:
        check_logprobs = await self._engine.check_logprobs()
        self._heard_at = time.monotonic()
        reference = self._board.report.remote(self._name, term, version, check_logprobs)
        await within(RPC_TIMEOUT_S, reference)


def deploy_inference(
    settings: EngineSettings, *, name: str, board: ActorHandle
) -> DeploymentHandle[InferenceReplica]:
    """Start (or update) the deployment under an application name; do not wait for it.

    The replicas become ready once the board has a publication, so publish, then `wait_ready`.
    Where Serve is not running it is started without any HTTP proxy; an HTTP API that shares the
    cluster starts Serve itself, on loopback, before this.
    """
    serve.start(proxy_location=ProxyLocation.Disabled)
    deployment = serve.deployment(
        name=DEPLOYMENT_NAME,
        num_replicas=settings.inference.num_replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={
            "num_cpus": settings.inference.cpus_per_replica,
            "num_gpus": settings.inference.gpus_per_replica,
        },
        request_router_config=RequestRouterConfig(request_router_class=ReplicaAffinityRouter),
        health_check_period_s=settings.health_check_period_s,
        health_check_timeout_s=settings.health_check_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.graceful_shutdown_s,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(InferenceReplica)
    target = serve.RunTarget(deployment.bind(settings, board), name=name, route_prefix=None)
    [handle] = serve.run_many([target], wait_for_applications_running=False)
    return handle


def wait_ready(name: str, *, timeout_s: float) -> None:
    """Wait until every replica holds the current version.

    Raises: PolicyUnavailable, with what a replica last failed of, when the deployment failed or is
        not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        application = serve.status().applications.get(name)
        status = None if application is None else application.status
        if status is ApplicationStatus.RUNNING:
            return
        failed = status is ApplicationStatus.DEPLOY_FAILED
        if application is None or failed or time.monotonic() > deadline:
            messages = []
            if application is not None:
                deployed = application.deployments.values()
                messages = [application.message, *[each.message for each in deployed]]
            failure = last_failure(messages)
            state = "not deployed" if status is None else status.value
            raise PolicyUnavailable(
                f"inference: {name!r} is {state}, expected {ApplicationStatus.RUNNING.value} "
                f"within {timeout_s:.0f} s; {failure}; see the replicas' logs"
            )
        time.sleep(STATUS_POLL_S)


def last_failure(messages: Sequence[str]) -> str:
    """What Serve reports of failed replicas: the last exception, from its name on, in one line.

    Args: messages: of the application and its deployments; a failed one's ends with the traceback.
    """
    texts = [message.strip() for message in messages if message.strip()]
    if not texts:
        return "nothing is known of its replicas"
    named = [*_EXCEPTION.finditer(texts[-1])]
    text = texts[-1][named[-1].start() :] if named else texts[-1]
    return " ".join(text.split())[:MAX_FAILURE_CHARACTERS]


def delete_leftovers(run_id: str) -> None:
    """End the deployments that an earlier supervisor of a run left on the cluster, if any."""
    serve.start(proxy_location=ProxyLocation.Disabled)
    for name in serve.status().applications:
        if name.rpartition("-e")[0] == run_id:
            delete_inference(name)


def delete_inference(name: str) -> None:
    """Drain and end the replicas; bounded by the settings' graceful_shutdown_s."""
    serve.delete(name)
