"""Watch a run's supervisor, and start a new one if it dies.

Both ways to start a run use this module: the command, and the host on Ray Serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from actors.deaths import ACTOR_DEATHS
from service.launch.resume import check_not_taken_over
from service.launch.run_dir import RunDir
from service.run.health import Cursor, Ending, FaultCount, RunStatus

POLL_S = 0.5
STATUS_DEADLINE_S = 60.0


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

        Args: restart: starts a supervisor in place of a dead one. show: called with each status, in
        order. is_stop_asked: returns whether to stop the run. stop_grace_s: seconds after which a
        stop abandons a step without an applied update; None sets no limit.
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

        Raises: RayTaskError with the error that ended the run; one of ACTOR_DEATHS or LeaseLost if
        no supervisor is left; KeyboardInterrupt if a stop was requested before the supervisor
        answered.
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
        """Show statuses, and pass on a request to stop, until the call `running` has ended.

        running: Ray reference of the call of the supervisor's `run`.
        """
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
