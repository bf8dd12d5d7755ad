"""Start a run's supervisor and metrics endpoint, and replace a supervisor that dies.

These two actors end with the process that starts them, which is the run's command or the run's host
on Ray Serve. The supervisor starts all other actors. The endpoint outlives supervisors.
`engine_settings` derives the settings of the engines from the configuration.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from prometheus_client import Metric
from ray.exceptions import RayError

from actors.deadline import poll
from actors.deaths import ACTOR_DEATHS
from actors.environment.tokenizer import stop_token_ids
from actors.metric_registry import AtomicRegistry
from actors.metrics import RunMetrics
from service.config.tree import Config
from service.inference.settings import EngineSettings
from service.launch.cluster import alive_nodes, on_this_node
from service.launch.placement import resources_of, roles_of
from service.launch.resume import check_not_taken_over
from service.launch.run_dir import RunDir
from service.remote_calls import NAMESPACE
from service.report.document import PHASES, Phase
from service.run.health import Cursor, Ending, FaultCount, RunStatus
from service.run.supervisor import Supervisor, WhenHeld
from service.store.errors import LeaseLost
from service.store.place import sqlite_file
from service.telemetry.endpoint import SUPERVISOR, MetricsEndpoint, endpoint_name

NAME_LIMIT_S = 30.0
POLL_S = 0.5
STATUS_DEADLINE_S = 60.0


def engine_settings(config: Config, *, model: str) -> EngineSettings:
    """Return the settings of a run's engines. model: a directory or hub name."""
    return EngineSettings(
        inference=config.inference,
        model=model,
        chat_template=config.model.chat_template,
        dtype=config.model.dtype,
        max_context_tokens=config.model.max_context_tokens,
        stop_token_ids=stop_token_ids(model),
        reads_text=config.engine_reads_text,
        resets_prefix_cache=config.algorithm.is_synchronous,
        seed=config.run.seed,
        lora=config.trainer.published_lora,
    )


def start_endpoint(config: Config, *, run_id: str, place: dict[str, Any]) -> Any:
    """Start and return the actor that serves the run's metrics.

    The actor outlives supervisors, and ends with the calling process. place: Ray's scheduling
    options. Raises: TimeoutError if the actor's name remains taken.
    """
    actor_class = ray.remote(MetricsEndpoint).options(
        num_cpus=0,
        max_restarts=-1,
        name=endpoint_name(run_id),
        namespace=NAMESPACE,
        **place,
    )
    metrics = config.metrics
    return _start_named(
        lambda: actor_class.remote(config.run.name, host=metrics.host, port=metrics.port),
        name=endpoint_name(run_id),
    )


def phase_values(phase: Phase) -> tuple[Metric, ...]:
    """Return the metrics which report that a run is in the phase `phase`.

    The caller sends these metrics to the metrics endpoint while no supervisor reports the phase.
    """
    registry = AtomicRegistry()
    metrics = RunMetrics(registry)
    metrics.phase.show({each: float(each == phase) for each in PHASES})
    metrics.phase_time.set(time.time())
    return tuple(family for family in registry.collect() if family.samples)


def _start_named(start: Callable[[], Any], *, name: str, limit_s: float = NAME_LIMIT_S) -> Any:
    """Call `start` until it has started the actor; raise TimeoutError after `limit_s`."""

    def attempt() -> Any:
        # The name is still taken: Ray frees the name of a dead actor with a delay.
        with suppress(ValueError):
            return start()
        return None

    if (started := poll(attempt, limit_s=limit_s)) is None:
        raise TimeoutError(
            f"the name {name} is still taken after {limit_s:g} s, expected it to be free after "
            "its actor has ended; check the cluster's actors"
        )
    return started


def supervisor_place(run_dir: RunDir) -> dict[str, Any]:
    """Return Ray's scheduling options that select the supervisor's node.

    If the database is a file, this is the current node. Otherwise it is a node that offers the
    supervisor's role. If no node offers the role, it is the cluster's head node, from which a
    Service in Kubernetes reads the run's metrics.
    """
    if sqlite_file(run_dir.database_url) is not None:
        # The database is on this machine's disk, and the command that starts the run reads it too.
        return {"scheduling_strategy": on_this_node()}
    return {"resources": resources_of("rayloom_control", roles_of(alive_nodes()))}


def start_supervisor(
    config: Config,
    run_dir: RunDir,
    *,
    model: str,
    run_id: str,
    endpoint: Any,
    is_service: bool = False,
    when_held: WhenHeld = "refuse",
    returns_to: str = "",
    root_process: int | None = None,
    lost: Any = None,
    lost_name: str = "",
) -> Any:
    """Start the supervisor and return it: an actor that ends with this process.

    The actor's name is the run's id. If an earlier start left an actor with this name, kill the old
    actor; if `when_held` is "wait", wait instead until it ends.
    endpoint: the result of `start_endpoint`. returns_to: directory of the checkpoint from which to
    continue; empty for the newest. root_process: the process whose memory is measured, with its
    descendants; None if the run uses a cluster. lost: the dead supervisor that the new one
    replaces; None at the first start. lost_name: HOST:PID of the dead supervisor; empty if unknown.
    Raises: LeaseLost if another process has started a supervisor since `lost` died.
    """
    # Do this here, because this process has already imported the tokenizer's packages, which takes
    # a second.
    engines = engine_settings(config, model=model)
    actor_class = ray.remote(Supervisor).options(
        num_cpus=0,
        max_restarts=0,
        name=run_id,
        namespace=NAMESPACE,
        **supervisor_place(run_dir),
    )
    notice = "" if lost is None else "the supervisor died; a new one continues under a new lease"

    def start() -> Any:
        with suppress(ValueError):
            named = ray.get_actor(run_id, namespace=NAMESPACE)
            if lost is not None and named._actor_id != lost._actor_id:
                raise LeaseLost("another process has started a supervisor of this run")
            if when_held == "wait":
                # That actor may have the lease. If the process that started it has died, it ends
                # within a moment.
                return None
            ray.kill(named)
        return actor_class.remote(
            config,
            run_dir,
            engines=engines,
            run_id=run_id,
            endpoint=endpoint,
            is_service=is_service,
            when_held=when_held if lost is None else "refuse",
            replaces=lost_name,
            # The first supervisor has already returned to the checkpoint; a second return would
            # undo the steps that it has trained since.
            returns_to=returns_to if lost is None else "",
            notice=notice,
            root_process=root_process,
        )

    limit_s = math.inf if when_held == "wait" else NAME_LIMIT_S
    started = _start_named(start, name=run_id, limit_s=limit_s)
    if lost is not None:
        # The endpoint shows this phase until the new supervisor shows its own. Not awaited, because
        # the run does not depend on the endpoint.
        endpoint.amend.remote(SUPERVISOR, phase_values("recovering"))
    return started


class SupervisorWatcher:
    """A watcher that polls the supervisor's status, shows it, and passes on a request to stop.

    A dead supervisor is replaced, at most `max_restarts` times in a row; the count starts again
    when the run commits a checkpoint of a later step (`service.run.health.FaultCount`).
    """

    def __init__(
        self,
        supervisor: Any,
        *,
        restart: Callable[..., Any],
        max_restarts: int,
        show: Callable[[RunStatus], None],
        is_stop_asked: Callable[[], bool],
        stop_grace_s: float | None = None,
    ) -> None:
        """Prepare to watch a supervisor.

        restart: starts a supervisor in place of a dead one. show: called with each status, in
        order. is_stop_asked: returns whether to stop the run. stop_grace_s: seconds that the
        current step may take after a request to stop; None sets no limit. A step that takes longer
        is abandoned, unless one of its updates was applied already.
        """
        self._supervisor = supervisor
        self._restart = restart
        self._max_restarts = max_restarts
        self._show, self._is_stop_asked = show, is_stop_asked
        self._stop_grace_s = stop_grace_s
        self._cursor = Cursor()
        # One request at a time: each answer has the cursor of the next request.
        self._question: Any = None
        self.last: RunStatus | None = None

    def run(self, run_dir: RunDir) -> Ending:
        """Run the supervisor and watch it until the run has ended; return how the run ended.

        Raises: RayTaskError with the error that ended the run; an error of ACTOR_DEATHS if the
        supervisor died and is not replaced; LeaseLost if another process has taken over the run;
        KeyboardInterrupt if a stop was requested before the supervisor answered.
        """
        faults, furthest_step = FaultCount(limit=self._max_restarts), 0
        while True:
            running = self._supervisor.run.remote()
            self._follow(running)
            try:
                ending: Ending = ray.get(running)
                return ending
            except ACTOR_DEATHS as error:
                if self.last is not None and self.last.checkpoint_step > furthest_step:
                    faults.progressed()
                    furthest_step = self.last.checkpoint_step
                faults.count()
                is_final = getattr(error, "actor_init_failed", False) or faults.are_too_many
                # If the whole node was lost, Ray would wait forever for another one.
                if is_final or self._is_stop_asked() or not _is_any_node_alive():
                    raise
            name = self.last.supervisor if self.last else ""
            check_not_taken_over(run_dir, lost=name)
            self._supervisor = self._restart(lost=self._supervisor, lost_name=name)
            self._cursor, self._question = Cursor(), None

    def kill(self) -> None:
        """Kill the supervisor, and with it the actors that it has started."""
        ray.kill(self._supervisor)

    def _follow(self, running: Any) -> None:
        """Show statuses, and pass on a request to stop, until the supervisor's `run` has ended."""
        is_stop_sent = False
        while True:
            if self._question is None:
                self._question = self._supervisor.status.remote(self._cursor)
            finished, _ = ray.wait([running], timeout=POLL_S)
            self._show_answer(limit_s=STATUS_DEADLINE_S if finished else 0.0)
            if finished:
                return
            if self._is_stop_asked() and not is_stop_sent:
                if self.last is None:
                    raise KeyboardInterrupt
                self._supervisor.stop.remote(self._stop_grace_s)
                is_stop_sent = True

    def _show_answer(self, *, limit_s: float) -> None:
        answered, _ = ray.wait([self._question], timeout=limit_s)
        if not answered:
            return
        question, self._question = self._question, None
        try:
            status: RunStatus = ray.get(question)
        except RayError:
            # `run` raises the error that explains it.
            return
        self.last = status
        self._show(status)
        self._cursor = status.cursor


def _is_any_node_alive() -> bool:
    return any(node["Alive"] for node in ray.nodes())
