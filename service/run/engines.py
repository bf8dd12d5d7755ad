"""Start a run's inference engines and weight board, and publish weights to the engines.

The weight board is the actor through which engines receive new weights. A term is the time from a
start or recovery of the run to the next. Board and engines keep running from term to term; only a
change of the engines' settings restarts them. A term that begins at an older checkpoint publishes
the checkpoint's weights to them. Board and engines outlive a lost supervisor by
`run.orphan_timeout_s`. If the board dies, the engines wait as long for a new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.batch import Float32s, MicroBatch
from actors.deadline import ActorLost, retry, within
from actors.deaths import ACTOR_DEATHS
from actors.environment.actor import PolicyFactory
from actors.metrics import PublishPhase
from actors.types import Dtype
from actors.weights.actor import Keeping, WeightBoard, start_board
from actors.weights.board import BoardStatus, StaleTerm, WeightError
from actors.weights.logprob_check import (
    ALONE,
    COST_SHARE,
    NO_TEXT,
    PACKED,
    SHORT_TOKENS,
    CheckSample,
    CheckText,
    Comparison,
    EngineScores,
    LogprobCheck,
    compare,
    far_end,
    packed_row,
    published_text,
    sampled_name,
    sampled_row,
    short,
    text_row,
)
from service.api.settings import api_application_name
from service.inference.client import ServePolicyClient
from service.inference.deployment import (
    application_name,
    delete_inference,
    delete_leftovers,
    deploy_inference,
    find_leftover,
    is_same_engine,
    wait_ready,
)
from service.inference.replica import board_name
from service.inference.settings import EngineSettings
from service.launch.cluster import on_this_node
from service.remote_calls import NAMESPACE, reason_of
from service.run.remote_handles import BOARD_DEADLINE_S, RPC_DEADLINE_S, remote_handle
from service.run.restartable_trainer import RestartableTrainer

log = logging.getLogger("rayloom.engines")

# Engines that were never ready have no turns to end: Serve may end them while the process exits.
END_LIMIT_S, END_UNREADY_LIMIT_S = 90.0, 1.0
NAME_LIMIT_S = 30.0
BOARD_START_S = 300.0
BEAT_EVERY_S = 2.0
LOADED_CHECK_S = 10.0


class Engines:
    """The inference engines of a run, and the weight board from which they load weights.

    `open_term` starts the engines or takes over running ones; an engine is ready once it has loaded
    published weights.
    """

    def __init__(
        self, settings: EngineSettings, *, run_id: str, orphan_timeout_s: float, has_api: bool
    ) -> None:
        """Store the settings; `open_term` starts the engines.

        has_api: whether the run has an API that outlives the supervisor. If so, `stop` leaves the
        board running. If no term calls the board for `orphan_timeout_s`, the board ends the API.
        """
        self.settings = settings
        self.app_name = ""
        self._run_id = run_id
        self._orphan_timeout_s = orphan_timeout_s
        self._has_api = has_api
        self._term = 0
        self._resources: Mapping[str, float] = {}
        self._board: ActorHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._deploying: asyncio.Future[Any] | None = None
        self._were_ready = False

    @property
    def board(self) -> ActorHandle:
        assert self._board is not None, "call open_term first"
        return self._board

    @property
    def make_policy(self) -> PolicyFactory:
        """A function that creates a client of the engines' deployment; any process may call it."""
        return partial(ServePolicyClient, self.app_name)

    async def open_term(self, term: int, *, resources: Mapping[str, float]) -> None:
        """Begin a term: start the board and the engines, or take over the running ones.

        From now on the board refuses the calls of older terms.
        resources: an engine's Ray resources other than CPUs and GPUs.
        Raises: StaleTerm if the board knows a newer term.
        """
        self._term, self._resources = term, resources
        if not await self._take_over():
            left = await asyncio.to_thread(find_leftover, self._run_id, self.settings)
            await asyncio.to_thread(delete_leftovers, self._run_id, but=left)
            self.app_name = left or application_name(self._run_id, term=term)
            self._board = await self._start_board()
            # Start the engines now: they start slowly, and at first need only the board's handle.
            await self._deploy()
            # The board may have to wait for a node, and then imports its packages.
            handle = board_handle(self._board, deadline_s=BOARD_START_S)
            await handle.open_term(term)
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat_forever())

    async def wait_ready(self) -> None:
        """Wait until the first engine is ready. Raises: PolicyUnavailable if none becomes ready."""
        limit_s = self.settings.inference.start_deadline_s
        await wait_ready(self.app_name, self._board_handle().status, quiet_limit_s=limit_s)
        self._were_ready = True

    async def status(self) -> BoardStatus | None:
        """Return the weight board's status; None if there is no board. Raises: ActorLost."""
        return None if self._board is None else await self._board_handle().status()

    async def hold(self, is_held: bool) -> None:
        """Tell all engines to stop sampling, or to continue if `is_held` is False.

        Stopped engines keep the turns that they have begun, and continue them later. Engines that
        start later receive the same order. Raises: ActorLost.
        """
        if self._board is not None:
            await self._board_handle().hold(is_held)

    async def stop(self) -> None:
        """End the engines and the board within a time limit; this also works while they start.

        If a newer term has taken over the engines and the board, leave both running. If the run has
        an API that outlives the supervisor, leave the board running.
        """
        if self._board is None:
            return
        if self._deploying is not None:
            await asyncio.wait((self._deploying,), timeout=END_LIMIT_S)
        try:
            await self._board_handle().status(self._term)
        except StaleTerm:
            self._stop_beating()
            return
        except ActorLost:
            log.info("the weight board is gone already")
        deleting = _in_thread(delete_inference, self.app_name)
        limit_s = END_LIMIT_S if self._were_ready else END_UNREADY_LIMIT_S
        await asyncio.wait((deleting,), timeout=limit_s)
        if not self._has_api:
            self._stop_beating()
            ray.kill(self._board)
            self._board = None

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def _take_over(self) -> bool:
        """Take over the board and engines of an earlier term; return whether this succeeded."""
        is_own = self._board is not None
        board = self._board or await asyncio.to_thread(_find_actor, board_name(self._run_id))
        if board is None:
            return False
        self._board = board
        try:
            # Wait longer than for a status: if a slow board is abandoned, its engines are lost.
            handle = board_handle(board, deadline_s=RPC_DEADLINE_S)
            kept = await handle.open_term(self._term)
        except ActorLost:
            ray.kill(board)
            return False
        assert kept is not None
        self.app_name = kept.applications[0]
        if is_same_engine(kept.engines, self.settings):
            if not is_own:
                # Running engines stay as they are. This sets their number, and starts the engines
                # again that an earlier supervisor had ended.
                await self._deploy()
            return True
        await asyncio.to_thread(delete_inference, self.app_name)
        ray.kill(board)
        return False

    async def _deploy(self) -> None:
        """Start the engines' deployment; if it is running, change its number of engines."""
        self._deploying = _in_thread(
            deploy_inference,
            self.settings,
            name=self.app_name,
            board=self._board,
            run_id=self._run_id,
            orphan_timeout_s=self._orphan_timeout_s,
            resources=self._resources,
        )
        # Wait for the thread, which cannot be cancelled: otherwise it could deploy engines after
        # `stop` has deleted the deployment.
        await asyncio.shield(self._deploying)

    async def _start_board(self) -> ActorHandle:
        keeping = Keeping(
            name=board_name(self._run_id),
            namespace=NAMESPACE,
            orphan_timeout_s=self._orphan_timeout_s,
            applications=(self.app_name, api_application_name(self._run_id)),
            engines=self.settings,
        )

        async def start() -> ActorHandle:
            return start_board(keeping, strategy=on_this_node())

        # Ray frees the name a moment after the death of the earlier board.
        return await retry(start, on=ValueError, limit_s=NAME_LIMIT_S)

    async def _beat_forever(self) -> None:
        while True:
            with suppress(ActorLost, StaleTerm):
                await self._board_handle().status(self._term)
            await asyncio.sleep(BEAT_EVERY_S)

    def _board_handle(self) -> WeightBoard:
        return board_handle(self.board, deadline_s=BOARD_DEADLINE_S)


async def watch_board(board: ActorHandle) -> None:
    """Watch the board forever, and raise ActorLost once it has died.

    Do not raise if the board is only slow, frozen or unreachable. Without this check, a loop that
    waits for rollouts would not notice that the board, and the engines with it, have ended.
    """
    while True:
        await asyncio.sleep(BEAT_EVERY_S)
        try:
            await within(BOARD_DEADLINE_S, board.status.remote())
        except ACTOR_DEATHS as error:
            raise ActorLost(f"the weight board died: {reason_of(error)}") from error
        except (RayError, TimeoutError):
            continue


def _find_actor(name: str) -> ActorHandle | None:
    try:
        actor: ActorHandle = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    return actor


def board_handle(board: ActorHandle, *, deadline_s: float) -> WeightBoard:
    return remote_handle(board, WeightBoard, name="weight board", deadline_s=deadline_s)


class Publisher:
    """Publishes the trainer's weights, and compares the log-probabilities of trainer and engines.

    In a check, the trainer and the engines compute the log-probabilities of the same check text.
    The first check of a term (`check_start`) is the most thorough. The later checks, after each
    publication, take at most COST_SHARE of the time since the first check: they use a part of the
    text, or are skipped (`_next_text`).
    """

    def __init__(
        self,
        trainer: RestartableTrainer,
        board: ActorHandle,
        *,
        term: int,
        quiet_limit_s: float,
        measure: Callable[[PublishPhase], AbstractContextManager[None]],
        text: CheckText | None = None,
        most_tokens: int = 0,
        check_every: int = 0,
        dtype: Dtype = Dtype.FLOAT32,
        is_quantised: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the first publication.

        quiet_limit_s: the term ends if for this many seconds no engine makes progress, neither in
        its start nor in loading weights. measure: returns a context manager that measures the time
        of a phase. text: text of the first check; None uses a fixed text of 17 tokens in all
        checks. most_tokens: length of the longest prompt that an engine accepts. check_every: after
        this number of publications, a check of the whole text is due again; 0 for never. dtype,
        is_quantised: decide how large a difference may be (see `LogprobCheck`).
        """
        self._trainer = trainer
        self._board = board
        self._measure = measure
        self._term = term
        self._quiet_limit_s = quiet_limit_s
        self._text = text
        self._is_start = text is not None
        self._is_text_sent = False
        """Whether the board has the current check text; if not, it may have an earlier one."""
        self._later_text: CheckText | None = None
        """The check text of later publications: the first one, continued with sampled tokens.

        None before `check_start`, or if the first check had no text.
        """
        self._most_tokens, self._check_every, self._dtype = most_tokens, check_every, dtype
        self._is_quantised = is_quantised
        self._clock = clock
        self._began_at = clock()
        self._spent_s = self._spent_short_s = 0.0
        """Total seconds of all checks after publications, and total seconds of the short checks."""
        self._long_s = self._short_s = 0.0
        """Seconds of the last long check (at first, of `check_start`), and of the last short
        check."""
        self._num_published = 0
        self._is_all_due = self._was_beyond = False
        """Whether the next long check uses the whole text; whether the last exceeded its bound."""
        self._own_logprobs: Float32s = np.empty(0, np.float32)
        self._own_s = 0.0
        self._start_check: LogprobCheck | None = None
        """Result of `check_start` until the next check's result includes it; otherwise None."""

    async def publish(self, version: int) -> None:
        """Send the trainer's weights to the board as `version`; do not wait for the engines.

        The trainer then scores the check text for the log-probability check, unless that check is
        skipped for this publication to save time.

        Raises: WeightsMoved if the trainer's weights now have another version; ActorLost.
        """
        if self._later_text is not None:
            self._choose(self._next_text(self._later_text))
        with self._measure("send"):
            if not self._is_text_sent:
                await board_handle(self._board, deadline_s=RPC_DEADLINE_S).set_check(self._text)
                self._is_text_sent = True
            await self._trainer.publish(self._board, self._term, version)
        if self._text is NO_TEXT:
            return
        with self._measure("check"):
            began = self._clock()
            self._own_logprobs = await self._trainer.check_logprobs(self._rows())
            self._own_s = self._clock() - began

    def _rows(self) -> tuple[MicroBatch, ...]:
        if self._text is None:
            return ()
        return (text_row(self._text), *([packed_row(self._text)] if self._is_start else []))

    def _choose(self, text: CheckText) -> None:
        if text is not self._text:
            self._text, self._is_text_sent = text, False

    def _next_text(self, text: CheckText) -> CheckText:
        """Return the part of the check text for the current publication; NO_TEXT skips the check.

        All checks together may take only the share COST_SHARE of the time.
        """
        self._num_published += 1
        # The last difference was too large: check the same part again, whatever that costs.
        if self._was_beyond and self._text is not None:
            return self._text
        if self._check_every and self._num_published % self._check_every == 0:
            self._is_all_due = True
        allowed_s = COST_SHARE * (self._clock() - self._began_at)
        if self._spent_s + self._long_s > allowed_s:
            # Short checks use only half of the time, so that a long check becomes possible later.
            left_s = min(allowed_s - self._spent_s, allowed_s / 2 - self._spent_short_s)
            return short(text) if self._short_s <= left_s else NO_TEXT
        is_all_due, self._is_all_due = self._is_all_due, False
        # The whole text once in `check_every` publications, otherwise only its end.
        return text if is_all_due else far_end(text)

    async def check_start(self, version: int) -> LogprobCheck | None:
        """Wait until the engines have loaded `version`, then run the term's full check.

        Returns: the comparison of trainer and engines; None if no engine answered. The next result
        of `wait_until_loaded` that is not None also contains this comparison.
        Raises: the errors of `wait_until_loaded`.
        """
        with self._measure("load"):
            status = await self._until_loaded(version)
        check = self._compared(status.scores)
        samples = [sample for each in status.scores for sample in each.samples]
        if self._text is not None and check is not None:
            self._long_s = check.seconds
            # The same text is used for the whole term, whatever the engines sample later.
            self._later_text = published_text(self._text, samples, most=self._most_tokens)
            with self._measure("check"):
                own = await self._trainer.check_logprobs([sampled_row(self._text, samples)])
            check = replace(
                check,
                num_tokens=self._text.token_ids.size + self._text.num_sampled,
                comparisons=(*check.comparisons, *_compare_sampled(own, samples)),
            )
        elif self._text is not None:
            self._later_text = short(self._text)
        self._is_start = False
        self._began_at = self._clock()
        self._start_check = check
        return check

    async def wait_until_loaded(self, version: int) -> LogprobCheck | None:
        """Wait until at least one engine is live and all live engines have loaded `version`.

        Engines that join, leave or are replaced meanwhile do not end the term: a new engine loads
        the version before it is ready. If no engine is live, wait for a new one.

        Returns: the comparison of the scores of trainer and engines; None if no engine answered or
        nothing was checked. The first result that is not None also contains the comparisons from
        `check_start`.
        Raises: ActorLost if no engine makes progress (`BoardStatus.quiet_s`).
        """
        with self._measure("load"):
            status = await self._until_loaded(version)
        check = self._compared(status.scores)
        if check is None:
            return None
        self._spent_s += check.seconds
        self._was_beyond = check.is_beyond
        if check.num_tokens > SHORT_TOKENS:
            self._long_s = check.seconds
        else:
            self._short_s = check.seconds
            self._spent_short_s += check.seconds
        earlier, self._start_check = self._start_check, None
        return check.after(earlier)

    def _compared(self, scores: Sequence[EngineScores]) -> LogprobCheck | None:
        """Compare the check text's log-probabilities in each engine with those in the trainer.

        Return None if no engine answered or nothing was checked.
        """
        if not scores or self._text is NO_TEXT:
            return None
        found: list[Comparison] = []
        # At the start, the trainer scores two rows: only the text, and the text among others.
        own_by_row = np.split(self._own_logprobs, 2 if self._is_start else 1)
        for name, own in zip((ALONE, PACKED), own_by_row, strict=False):
            found += [compare(name, own, each.logprobs) for each in scores]
        num_tokens = self._own_logprobs.size + 1
        if self._text is not None:
            num_tokens = self._text.token_ids.size
        return LogprobCheck(
            num_tokens=num_tokens,
            dtype=self._dtype,
            is_quantised=self._is_quantised,
            comparisons=tuple(found),
            seconds=self._own_s + max(each.seconds for each in scores),
        )

    async def _until_loaded(self, version: int) -> BoardStatus:
        board = board_handle(self._board, deadline_s=LOADED_CHECK_S + RPC_DEADLINE_S)
        while True:
            try:
                status: BoardStatus = await board.wait_published(version, 1, LOADED_CHECK_S)
            except WeightError as error:
                raise ActorLost(str(error)) from error
            if status.is_loaded:
                return status
            # While ranks are replaced, there may be no rank that can broadcast the weights.
            if status.quiet_s > self._quiet_limit_s and not self._trainer.is_restarting:
                raise ActorLost(
                    f"{len(status.holders)} of {len(status.replicas)} engines hold version "
                    f"{version}, and for {status.quiet_s:.0f} s none has made progress with its "
                    f"start or its load, limit {self._quiet_limit_s:g} s "
                    "(inference.start_deadline_s)"
                )

    async def num_ready(self) -> int:
        """Return the number of engines that have the current version."""
        status = await board_handle(self._board, deadline_s=RPC_DEADLINE_S).status()
        return len(status.holders)


def _compare_sampled(own: Float32s, samples: Sequence[CheckSample]) -> list[Comparison]:
    """Compare each sample's log-probabilities. own: those of the trainer, sample after sample."""
    ends = np.cumsum([each.token_ids.size for each in samples])
    return [
        compare(sampled_name(each.temperature), scores, each.logprobs)
        for each, scores in zip(samples, np.split(own, ends[:-1]), strict=True)
    ]


def _in_thread(call: Callable[..., Any], *arguments: Any, **named: Any) -> asyncio.Future[Any]:
    work = asyncio.ensure_future(asyncio.to_thread(call, *arguments, **named))
    work.add_done_callback(_log_error)
    return work


def _log_error(work: asyncio.Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.info("%s", error)
