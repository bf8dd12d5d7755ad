"""A Serve replica with one vLLM engine, which loads the weights published on the weight board.

The weight board is an actor of the run, on which the trainer publishes policy versions. A replica
is ready when its constructor has loaded the current version. A background task loads each new
version.

If the board has died, the replica waits for the board of the recovered or resumed run. If no board
appears, the replica deletes its own application, which Serve would otherwise restart forever.

The replica ends its process if its engine or background task has died, or if loading makes no
progress. It fails its health check if the board does not answer for too long. In both cases Serve
replaces the replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, OwnerDiedError, RayError

from actors.deadline import retry, within
from actors.deaths import ACTOR_DEATHS
from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
)
from actors.imports import quick_imports
from actors.limits import MIB
from actors.weights.board import MAX_FAILED_BROADCASTS, POLL_GRACE_S, Publication
from actors.weights.logprob_check import EngineScores
from service.inference.client import Answer, AnswerChunk, as_answer
from service.inference.settings import EngineSettings
from service.remote_calls import NAMESPACE
from service.telemetry.endpoint import Reading, push_forever

if TYPE_CHECKING:
    from actors.weights.buffers import Bytes

POLL_S = 5.0
RPC_TIMEOUT_S = 10.0
RETRY_S = 0.5
# Longest time in seconds to wait for the board: a live board answers within milliseconds, but it
# may be frozen, or its node may be unreachable, for a while.
BOARD_LIMIT_S = 60.0
BEAT_S = 2.0
# Seconds in which an ending replica can send its last answers and its message to the board.
EXIT_DELAY_S = 0.2
# vLLM accepts seeds below this.
_SEEDS = 1 << 31
# An AF_UNIX path has at most 107 bytes; vLLM names its sockets by a UUID.
MAX_DIRECTORY_BYTES = 107 - len("/") - 36

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDescription:
    """The state of a replica, as used by tests and by `deployment.find_leftover`."""

    name: str
    """Serve's unique id of the replica."""
    pid: int
    engine_pids: tuple[int, ...]
    """Ids of the processes that the replica has started."""
    term: int | None
    version: int | None
    settings: EngineSettings
    """The settings with which the replica was started."""


def session_directory() -> Path:
    """Return the directory of the current Ray session on this machine."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name()


def make_engine_directory(parent: Path, name: str) -> Path:
    """Create and return a directory in `parent` for one engine's sockets and temporary files.

    By default vLLM creates such files in the system's temporary directory, and a killed engine
    leaves them there. If `parent` is the directory of the Ray session, the files are separate from
    those of other runs and are removed with the session. If the path would be too long for a
    socket, create the directory in the system's temporary directory instead.
    """
    directory = parent / f"engine-{name}"
    if len(str(directory).encode()) > MAX_DIRECTORY_BYTES:
        return Path(tempfile.mkdtemp(prefix="rayloom-"))
    directory.mkdir(parents=True)
    return directory


class InferenceReplica:
    """A Serve replica with one vLLM engine, which samples turns and loads published weights."""

    async def __init__(  # type: ignore[misc]
        self, settings: EngineSettings, board: ActorHandle, run_id: str, orphan_timeout_s: float
    ) -> None:
        """Join the weight board, start the engine and load the current policy version.

        run_id: names the weight board, and the endpoint that gets vLLM's metrics. orphan_timeout_s:
        seconds to wait for a new weight board if the board has died; then the replica deletes its
        application.
        """
        self._settings = settings
        self._board = board
        self._run_id, self._orphan_timeout_s = run_id, orphan_timeout_s
        self._name = serve.get_replica_context().replica_id.unique_id
        self._heard_at = self._progress_at = time.monotonic()
        self._is_loading = self._is_ending = False
        self._num_failed_broadcasts = self._num_loaded = 0
        await self._meet_board()
        os.environ.update(settings.environment)
        began = time.time()
        with _StartReports(board, self._name):
            # The import takes seven seconds, for which the deploying process should not wait.
            with quick_imports():
                from service.inference.engine import PolicyEngine

            # With the same seed, replicas would sample equal tokens for the members of a group.
            imported = time.time()
            seed = (settings.seed + zlib.crc32(self._name.encode())) % _SEEDS
            directory = make_engine_directory(session_directory(), self._name)
            self._engine = PolicyEngine(replace(settings, seed=seed), directory)
            stages = await self._engine.start()
        self._board.started.remote(self._name, (("engine: packages", imported - began), *stages))
        self._pushing = asyncio.create_task(
            push_forever(run_id, role=self._name, read=self._read_metrics)
        )
        while self._engine.version is None:
            await self._pull_from_any_board()
        self._pulling = asyncio.create_task(self._pull_forever())
        self._pulling.add_done_callback(self._end_without_weights)

    async def _meet_board(self) -> None:
        try:
            await retry(self._join, on=(TimeoutError, ActorUnavailableError), limit_s=BOARD_LIMIT_S)
        except ACTOR_DEATHS:
            await self._meet_next_board()

    async def _meet_next_board(self) -> None:
        """Join the next weight board, which the run starts when it recovers or is resumed.

        If no board appears in time, delete this replica's application and raise PolicyUnavailable.
        """
        logger.warning("inference: the weight board is gone; waiting for the next one")

        async def find_and_join() -> None:
            self._board = await asyncio.to_thread(
                ray.get_actor, board_name(self._run_id), namespace=NAMESPACE
            )
            await self._join()

        try:
            # `ray.get_actor` raises ValueError if there is no actor of this name.
            errors = (ValueError, RayError, TimeoutError)
            await retry(find_and_join, on=errors, limit_s=self._orphan_timeout_s)
        except (ValueError, RayError, TimeoutError) as error:
            serve.delete(serve.get_replica_context().app_name, _blocking=False)
            raise PolicyUnavailable(
                f"inference: no weight board for {self._orphan_timeout_s:g} s "
                "(run.orphan_timeout_s); this application is deleted"
            ) from error

    async def _join(self) -> None:
        this_actor = ray.get_runtime_context().current_actor
        await within(RPC_TIMEOUT_S, self._board.join.remote(self._name, this_actor))
        self._heard_at = time.monotonic()

    # Serving

    async def generate_batch(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[AnswerChunk]:
        """Sample the turns of a batch; yield the answers in chunks, as the turns finish."""
        finished: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()

        async def run(position: int, request: GenerateRequest) -> None:
            finished.put_nowait((position, await self._answer(request)))

        tasks = [asyncio.create_task(run(*numbered)) for numbered in enumerate(requests)]
        try:
            num_open = len(tasks)
            while num_open:
                chunk = [await finished.get()]
                # One engine step ends many requests; let the answers of the other ones arrive.
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
        if silent_s > POLL_S + POLL_GRACE_S and not self._is_loading:
            # The board may consider this replica lost, and may have published a version without it.
            raise PolicyUnavailable(
                f"inference: no answer from the weight board for {silent_s:.0f} s"
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
            settings=self._settings,
        )

    async def check_health(self) -> None:
        """Raise PolicyUnavailable if the replica is unhealthy; Serve then replaces it."""
        # Do not leave this to Serve: it repeats a failed check three times, and then waits for a
        # graceful end, which a dead engine never reaches.
        await self._end_if_dead()
        await self._engine.check_health()
        if self._pulling.done():
            raise PolicyUnavailable("inference: pulling weights has ended") from (
                None if self._pulling.cancelled() else self._pulling.exception()
            )
        limit_s = max(self._settings.max_silence_s, self._orphan_timeout_s)
        silent_s = time.monotonic() - self._heard_at
        if silent_s > limit_s and not self._is_loading:
            raise PolicyUnavailable(
                f"inference: no answer from the weight board for {silent_s:.0f} s, limit {limit_s} "
                "s"
            )

    async def _end_if_dead(self) -> None:
        """End this process if the engine is dead, so that Serve sends it no more requests."""
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
        """Shut the engine down; Serve calls this in a graceful shutdown, after the last request."""
        if (pulling := getattr(self, "_pulling", None)) is not None:
            pulling.cancel()
            self._pushing.cancel()
            self._board.leave.remote(self._name, is_in_order=True)
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.shutdown()

    def _read_metrics(self) -> Reading:
        return Reading(values=engine_metrics(replica=self._name))

    # Weights

    async def _pull_forever(self) -> None:
        while True:
            await self._pull_from_any_board()
            # Check the engine even if there are no requests.
            await self._engine.check_health()

    async def _pull_from_any_board(self) -> None:
        try:
            await self._pull()
        except (*ACTOR_DEATHS, OwnerDiedError):
            # The board and the owner of its weights are the same process.
            await self._meet_next_board()

    async def _pull(self) -> None:
        """Ask the weight board what to do, and do it: load a version, hold or resume turns."""
        try:
            publication = await self._poll()
        except (TimeoutError, ActorUnavailableError):
            logger.warning("inference: the weight board did not answer; trying again")
            await asyncio.sleep(RETRY_S)
            return
        if publication is None:
            return
        if isinstance(publication, bool):
            await self._engine.hold(publication)
            return
        # The board waits for this replica while it loads.
        self._is_loading, self._progress_at = True, time.monotonic()
        self._num_loaded = 0
        try:
            await self._load_with_beats(publication)
        finally:
            self._is_loading = False

    async def _poll(self) -> Publication | bool | None:
        engine = self._engine
        reference = self._board.poll.remote(
            self._name, engine.term, engine.version, POLL_S, engine.num_workers, engine.is_held
        )
        sent_at = time.monotonic()
        publication: Publication | bool | None = await within(POLL_S + RPC_TIMEOUT_S, reference)
        self._heard_at = sent_at
        return publication

    async def _load_with_beats(self, publication: Publication) -> None:
        limit_s = self._settings.inference.publish_deadline_s
        loading = asyncio.create_task(self._load(publication))
        try:
            while not (await asyncio.wait({loading}, timeout=BEAT_S))[0]:
                if time.monotonic() - self._progress_at > limit_s:
                    raise PolicyUnavailable(
                        f"inference: loading version {publication.version} has made no progress "
                        f"for {limit_s:g} s (inference.publish_deadline_s)"
                    )
                self._board.beat.remote(self._name, self._num_loaded)
            loading.result()
        finally:
            loading.cancel()

    def _mark_progress(self) -> None:
        self._progress_at = time.monotonic()
        self._num_loaded += 1

    async def _load(self, publication: Publication) -> None:
        if publication.is_broadcast:
            if not await self._load_broadcast(publication):
                return
        else:
            buffers = await asyncio.gather(
                *(self._fetched(group.buffer) for group in publication.groups)
            )
            await self._engine.apply(publication, buffers, on_progress=self._mark_progress)
        await self._report(publication)

    async def _fetched(self, buffer: Awaitable[Bytes]) -> Bytes:
        fetched = await buffer
        self._mark_progress()
        return fetched

    async def _load_broadcast(self, publication: Publication) -> bool:
        """Load a version from the next broadcast; return False if there was none or it failed."""
        from service.inference.engine import BroadcastFailed

        waiting = self._board.take_seat.remote(self._name, POLL_S)
        try:
            seat = await within(POLL_S + RPC_TIMEOUT_S, waiting)
        except (TimeoutError, ActorUnavailableError):
            return False
        # No progress is recorded while this waits for the trainer; the run limits that wait
        # (`BoardStatus.quiet_s`).
        if seat is None:
            return False
        self._progress_at = time.monotonic()
        try:
            await self._engine.apply_broadcast(
                publication,
                seat,
                address=ray.util.get_node_ip_address(),
                on_progress=self._mark_progress,
            )
        except BroadcastFailed as error:
            self._num_failed_broadcasts += 1
            logger.warning("inference: a broadcast failed, waiting for the next: %s", error)
            if self._num_failed_broadcasts >= MAX_FAILED_BROADCASTS:
                raise PolicyUnavailable(
                    f"inference: {self._num_failed_broadcasts} broadcasts in a row have failed; "
                    f"the last: {error}"
                ) from error
            return False
        self._num_failed_broadcasts = 0
        return True

    async def _report(self, publication: Publication) -> None:
        scores = await self._checked(publication)
        self._heard_at = time.monotonic()

        async def report() -> None:
            call = self._board.report.remote(
                self._name, publication.term, publication.version, scores
            )
            await within(RPC_TIMEOUT_S, call)

        await retry(report, on=(TimeoutError, ActorUnavailableError), limit_s=BOARD_LIMIT_S)

    async def _checked(self, publication: Publication) -> EngineScores | None:
        """Return the engine's log-probabilities of the check text, for the trainer to compare.

        Return None if they did not arrive in time, or if the publication has no text (`NO_TEXT`).
        """
        if publication.check is not None and not publication.check.token_ids.size:
            return None
        checking = asyncio.create_task(self._engine.check_logprobs(publication.check))
        try:
            while not (await asyncio.wait({checking}, timeout=BEAT_S))[0]:
                # Scoring a text that fills the context may take longer than loading is allowed to.
                self._mark_progress()
            return checking.result()
        finally:
            checking.cancel()


class _StartReports:
    """Reports the progress of an engine's start to the weight board."""

    def __init__(self, board: ActorHandle, name: str) -> None:
        self._board, self._name = board, name
        self._ended = threading.Event()
        # A thread, because the start blocks the event loop.
        self._thread = threading.Thread(target=self._report_until_ended, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _report_until_ended(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._board.starting.remote(self._name, _work_so_far())


def _work_so_far() -> float:
    """Return a number that grows while an engine starts: CPU seconds plus MiB read."""
    this = psutil.Process()
    work = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            work += times.user + times.system + process.io_counters().read_chars / MIB
    return work


def board_name(run_id: str) -> str:
    """Return the actor name of a run's weight board; a run has one board at a time."""
    return f"{run_id}-board"


# The metrics of vLLM that a run shows, with vLLM's names, so that vLLM's dashboards work.
SHOWN = frozenset(
    {
        "vllm:generation_tokens",
        "vllm:inter_token_latency_seconds",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits",
        "vllm:prefix_cache_queries",
        "vllm:prompt_tokens",
        "vllm:request_queue_time_seconds",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
    }
)


def engine_metrics(*, replica: str, registry: CollectorRegistry = REGISTRY) -> list[Metric]:
    """Return vLLM's metrics of this process that are in SHOWN, with the replica as a label.

    Args: registry: the Prometheus registry to read; vLLM uses only the default one.
    """
    found = []
    for family in registry.collect():
        if family.name in SHOWN:
            shown = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    shown.add_sample(
                        sample.name, {**sample.labels, "replica": replica}, sample.value
                    )
            found.append(shown)
    return found
