"""Check the journal file of each stored step for patterns of reward hacking, in a thread.

Nothing waits for this thread, and its failures do not end the run: each kind of failure causes one
notice. A shadow verifier is the user's second verifier, which gives no reward. The verifier runs
in a separate process with the lowest priority, and skips steps if it is slower than the run.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from actors.journal.files import file_name
from service.config.file import ConfigError
from service.config.tree import Config
from service.hacking.features import step_features
from service.hacking.patterns import KEPT_STEPS, Detector
from service.hacking.read import Line, append, kept_of, read_features
from service.hacking.shadow import ShadowVerifier, Verdicts
from service.inspect.reader import load_step, open_journal
from service.launch.cluster import on_this_node
from service.launch.run_dir import RunDir
from service.telemetry.records import Finding

log = logging.getLogger("rayloom.hacking")

CLOSE_LIMIT_S = 5.0
# Seconds that a call may take in addition to a turn's limit, because the verifier's process may
# first have to start and to read the tasks.
SHADOW_START_S = 120.0
# Maximum number of starts of the verifier's process.
MAX_SHADOWS = 3
LOWEST_PRIORITY = 19
_REMEDY = (
    "this may be wanted; read such trajectories with `rayloom inspect RUN_DIR ID`, and correct the "
    "reward if they exploit it (docs/hacking.md)"
)
Ask = Callable[[str], Verdicts]
"""A function that calls the shadow verifier for the journal file with the given path.

Raises: RayError, ConfigError.
"""


class HackingWatch:
    """The audit of a run for reward hacking, in a thread; no method but `close` blocks.

    Call `begin_term` first, `stored` after each step, and `close` last.
    """

    def __init__(self, run_dir: RunDir, *, ask: Ask | None = None) -> None:
        """Prepare the thread; the first `begin_term` starts it.

        ask: function that calls the shadow verifier; None if there is none.
        """
        self._run_dir, self._ask = run_dir, ask
        self._todo: queue.SimpleQueue[tuple[int, int | None] | None] = queue.SimpleQueue()
        """Work of the thread: (term, step) for a stored step, (term, None) for a term that begins,
        or None to end the thread."""
        self._notice: Callable[[str], None] = log.warning
        self._detector = Detector()
        self._findings: tuple[Finding, ...] = ()
        self._problems: set[str] = set()
        """The kinds of failures of the audit for which the user has had a notice."""
        self._thread = threading.Thread(target=self._run, name="hacking", daemon=True)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the audit, in the order of their discovery.

        Findings in steps that a return to a checkpoint undid are left out.
        """
        return self._findings

    def begin_term(self, term: int, notice: Callable[[str], None]) -> None:
        """Begin to audit a term. Call this at each start, resumption or recovery of the run.

        The first call starts the thread. In each term the thread first reads what earlier terms
        have stored. notice: function that shows a notice to the user; the thread calls it.
        """
        self._notice = notice
        self._todo.put((term, None))
        if self._thread.ident is None:
            self._thread.start()

    def stored(self, term: int, step: int) -> None:
        self._todo.put((term, step))

    def close(self, *, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Check the steps that wait for the audit, then end the thread.

        Block for at most `limit_s` seconds.
        """
        self._todo.put(None)
        if self._thread.is_alive():
            self._thread.join(limit_s)

    def _run(self) -> None:
        while (next_one := self._todo.get()) is not None:
            term, step = next_one
            try:
                if step is None:
                    self._resume(term)
                else:
                    self._check_step(term, step)
            except Exception as error:
                # The thread must survive any content of a file, and this is its outermost frame.
                log.info("failed", exc_info=error)
                self._notice_once(f"{type(error).__name__}", f"a step was not audited: {error}")

    def _resume(self, term: int) -> None:
        """Restore the findings of earlier terms, and show their newest steps to the detector."""
        self._detector, self._findings = Detector(), ()
        if not any(self._run_dir.journal.glob("*.journal")):
            return
        try:
            # Steps that a return to a checkpoint undid are not in the journal.
            journal = open_journal(self._run_dir.path)
        except ConfigError:
            # There is no file of a surviving step.
            return
        # `_check_step` reads this term's own files, some of which may exist already.
        earlier = tuple(file for file in journal.files if file.term < term)
        journal = replace(journal, files=earlier)
        kept = kept_of(journal)
        self._findings = tuple(line.finding for line in kept if line.finding is not None)
        for features in read_features(journal, newest=KEPT_STEPS):
            self._detector.see(features)

    def _check_step(self, term: int, number: int) -> None:
        path = self._run_dir.journal / file_name(number, term=term)
        if not path.exists():
            # The file could not be written, which caused a notice, or has been removed since.
            return
        parts = step_features(load_step(path))
        # A verifier that is slower than the run skips steps.
        is_asked = self._ask is not None and self._todo.empty()
        verdicts = self._verdicts(str(path)) if is_asked else {}
        new = self._detector.see(tuple(each.with_verified(verdicts) for each in parts))
        self._findings += tuple(new)
        for finding in new:
            self._notice(f"audit: {finding.text}{_examples(finding)}; {_REMEDY}")
        # Do this last, because it may fail.
        if verdicts:
            append(self._run_dir.path, Line(step=number, term=term, verdicts=verdicts))
        for finding in new:
            append(self._run_dir.path, Line(step=number, term=term, finding=finding))

    def _verdicts(self, path: str) -> dict[str, bool]:
        assert self._ask is not None
        try:
            found = self._ask(path)
        except (RayError, ConfigError) as error:
            # The last line of Ray's text is the error that was raised.
            cause = str(error).strip().splitlines()[-1:]
            self._notice_once("shadow", f"audit.shadow failed: {' '.join(cause)[:200]}")
            return {}
        if problem := next((each for each in found.values() if isinstance(each, str)), None):
            text = f"audit.shadow: {problem}; further problems are not shown"
            self._notice_once("verdict", text)
        return {name: each for name, each in found.items() if isinstance(each, bool)}

    def _notice_once(self, kind: str, text: str) -> None:
        if kind not in self._problems:
            self._problems.add(kind)
            self._notice(f"{text}; training continues")


def _examples(finding: Finding) -> str:
    return f"; for example {', '.join(finding.examples)}" if finding.examples else ""


class _Shadow:
    """The Ray actor that runs the user's shadow verifier with the lowest priority."""

    def __init__(self, config: Config, model: str, name: str) -> None:
        os.nice(LOWEST_PRIORITY)
        self._verifier = ShadowVerifier(
            config, model=model, name=name, num_samples=config.audit.shadow_samples
        )

    def verdicts(self, path: str) -> Verdicts:
        return self._verifier.verdicts(load_step(Path(path)))


def asking_apart(config: Config, *, model: str) -> Ask | None:
    """Return a function that calls the run's shadow verifier, which runs in a separate actor.

    The function's first call starts the actor. Returns: None if there is no shadow verifier.
    """
    name = config.audit.shadow
    if name is None:
        return None
    actors: list[Any] = []

    def ask(path: str) -> Verdicts:
        if not actors:
            actors.append(_start(config, model, name))
        limit_s = SHADOW_START_S + config.rollouts.turn_deadline_s
        try:
            found: Verdicts = ray.get(actors[-1].verdicts.remote(path), timeout=limit_s)
        except RayError:
            ray.kill(actors[-1])
            if len(actors) < MAX_SHADOWS:
                actors.append(_start(config, model, name))
            raise
        return found

    return ask


def _start(config: Config, model: str, name: str) -> Any:
    actor_class = ray.remote(_Shadow).options(num_cpus=0, scheduling_strategy=on_this_node())
    return actor_class.remote(config, model, name)


def watch_of(config: Config, run_dir: RunDir, *, model: str) -> HackingWatch | None:
    """Return the audit of a run; None if the audit is off, or if the run has no journal."""
    if not config.audit.hacking or config.run.journal_steps == 0:
        return None
    return HackingWatch(run_dir, ask=asking_apart(config, model=model))
