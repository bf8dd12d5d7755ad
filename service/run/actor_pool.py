"""Start the actors that play a term's rollouts, watch them, and replace dead or frozen ones.

Invariant: a dead actor's rollouts are returned to the queue before a new actor takes its place, so
that no rollout is lost and none is counted twice. Environment actors also play evaluations. If an
actor dies, its rollouts of an evaluation are missing from the result. If the evaluation's file
cannot be written, the user gets one notice and the run continues.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.deadline import ActorLost, race, wait_while_moving, within
from actors.environment.actor import EnvironmentActor, PolicyFactory
from actors.environment.evaluation import Played, plays_of
from actors.environment.settings import EnvironmentActorSettings, Sampling
from actors.file_targets import regular_target
from actors.metrics import Part
from actors.types import RolloutAssignment, Task, TokenIds, TrajectorySummary
from actors.user_code import LostCalls
from service.config.tree import Config
from service.remote_calls import await_reply, reason_of
from service.run.recorder import RunRecorder
from service.run.restartable_queue import RestartableQueue

log = logging.getLogger("rayloom.pool")

STOP_DEADLINE_S = 40.0
# Number of early deaths in a row that end the term. A death is early if it occurs less than
# EARLY_DEATH_S after the actor's start.
MAX_EARLY_DEATHS = 5
EARLY_DEATH_S = 30.0
START_DEADLINE_S = 300.0
PING_EVERY_S = 5.0
# Time between two looks at the progress of an evaluation.
LOOK_S = 2.0
# Seconds to fetch one line, which may be on another node.
FETCH_LIMIT_S = 60.0
# Limit for rendering the prompts of the log-probability check.
PROMPTS_LIMIT_S = 20.0


class ActorPool:
    """A pool that replaces dead actors; each actor has the methods `run`, `ping` and `stop`.

    The constructor starts the actors; they play rollouts while `watch` runs. Each subclass
    (`GatewayPool`, `EnvironmentPool`) sets the class variables, which contain the words for the
    actors' ids and for messages.
    """

    part: Part
    kind: str
    """Name of this kind of actor in messages, such as `gateway`."""
    id_prefix: str
    """Beginning of an actor's id, before the term and a number: `gateway` in gateway-2-0."""
    resumption: str
    """Words in the message about a dead actor, between `7 rollouts` and the new actor's id.

    Example: `are played again by`
    """
    why_blocked: str
    """The likely reason, for messages, why the event loop of such an actor does not answer."""

    def __init__(
        self,
        num_actors: int,
        start_actor: Callable[[str], ActorHandle],
        *,
        term: int,
        frozen_after_s: float,
        queue: RestartableQueue,
        recorder: RunRecorder,
        show_answering: Callable[[int], None] = lambda num_answering: None,
    ) -> None:
        """Start the actors.

        start_actor: function that starts the actor with the given id. term: number that grows each
        time the run starts or continues from a checkpoint. The number is a part of each actor's id,
        so that no id is used twice. frozen_after_s: an actor is replaced if it does not answer for
        this many seconds. show_answering: function that is called with the number of answering
        actors whenever the number changes.
        """
        self._start_actor = start_actor
        self._term = term
        self._frozen_after_s = frozen_after_s
        self._queue = queue
        self._recorder = recorder
        self._show_answering = show_answering
        self._numbers = itertools.count()
        self._answering: set[str] = set()
        """Ids of the living actors that have answered at least once."""
        self.actors: dict[str, ActorHandle] = {}
        """The current actors by id; an actor may be starting, or be dead and not yet replaced."""
        for _ in range(num_actors):
            self._start_next()

    async def watch(self) -> None:
        """Run every actor and replace dead ones; never return.

        Raises: ActorLost if actors die again and again right after their start, or if the queue is
            lost.
        """
        tasks = [asyncio.create_task(self._keep_alive(actor_id)) for actor_id in self.actors]
        try:
            await asyncio.gather(*tasks)
            # Only a pool without actors reaches this line.
            await asyncio.Event().wait()
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Let the actors send their results, then end them."""
        actors = dict(self.actors)
        stops = [
            await_reply(actor.stop.remote(), name=self.kind, deadline_s=STOP_DEADLINE_S)
            for actor in actors.values()
        ]
        results = await asyncio.gather(*stops, return_exceptions=True)
        for actor_id, result in zip(actors, results, strict=True):
            if isinstance(result, BaseException):
                log.warning("an actor did not stop in order and was killed: %s", result)
            else:
                self._heard(actor_id, result)
            self._ended(actor_id)
        self.kill()

    def kill(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)

    async def _keep_alive(self, actor_id: str) -> None:
        num_early_deaths = 0
        while True:
            started = time.monotonic()
            cause = await self._run_to_death(actor_id)
            lived_s = time.monotonic() - started
            num_early_deaths = 0 if lived_s > EARLY_DEATH_S else num_early_deaths + 1
            if num_early_deaths >= MAX_EARLY_DEATHS:
                raise ActorLost(
                    f"{self.kind}s died {num_early_deaths} times in a row within "
                    f"{EARLY_DEATH_S:g} s of their start; the last: {cause}"
                )
            ray.kill(self.actors[actor_id])
            num_released = await self._queue.release_actor(actor_id)
            dead_id, actor_id = actor_id, self._start_next()
            del self.actors[dead_id]
            self._recorder.replaced(
                self.part,
                f"{self.kind} {dead_id} died ({cause}); {num_released} rollouts "
                f"{self.resumption} {actor_id}",
            )

    async def _run_to_death(self, actor_id: str) -> str:
        try:
            async with race(self._until_stopped(actor_id), self._until_frozen(actor_id)) as ends:
                cause: str = next(end for end in ends if end.done()).result()
                return cause
        finally:
            self._answering.discard(actor_id)
            self._show_answering(len(self._answering))
            self._ended(actor_id)

    async def _until_stopped(self, actor_id: str) -> str:
        try:
            await self.actors[actor_id].run.remote()
        except RayError as error:
            return reason_of(error)
        return "it stopped by itself"

    async def _until_frozen(self, actor_id: str) -> str:
        limit_s, actor = self._frozen_after_s, self.actors[actor_id]
        try:
            self._heard(actor_id, await within(START_DEADLINE_S, actor.ping.remote()))
            self._answering.add(actor_id)
            self._show_answering(len(self._answering))
            while True:
                self._heard(actor_id, await within(limit_s, actor.ping.remote()))
                await asyncio.sleep(PING_EVERY_S)
        except TimeoutError:
            return (
                f"it answered nothing for {limit_s:g} s; either its process is frozen, or "
                f"{self.why_blocked}"
            )
        except RayError as error:
            return reason_of(error)

    def _heard(self, actor_id: str, answer: Any) -> None:
        """Process an actor's answer to `ping` or `stop`. Subclasses may override this method."""

    def _ended(self, actor_id: str) -> None:
        """React to the end of an actor. Subclasses may override this method."""

    def _start_next(self) -> str:
        actor_id = f"{self.id_prefix}-{self._term}-{next(self._numbers)}"
        self.actors[actor_id] = self._start_actor(actor_id)
        return actor_id


class GatewayPool(ActorPool):
    """The pool of the gateway, the one actor of a run that serves the sessions of clients."""

    part = "gateway"
    kind = "gateway"
    id_prefix = "gateway"
    resumption = "continue from their stored turns with"
    why_blocked = "its event loop is overloaded"


class EnvironmentPool(ActorPool):
    """A pool that keeps environment actors alive, and plays evaluations on them."""

    part = "environment_actor"
    kind = "environment actor"
    id_prefix = "environment"
    resumption = "are played again by"
    why_blocked = "an environment blocks the event loop instead of awaiting"

    def __init__(
        self,
        num_actors: int,
        start_actor: Callable[[str], ActorHandle],
        *,
        term: int,
        frozen_after_s: float,
        queue: RestartableQueue,
        recorder: RunRecorder,
        evaluation_idle_s: float,
        files: EvaluationFiles,
    ) -> None:
        """Start the actors.

        evaluation_idle_s: as `idle_s` of `play_evaluation`. files: stores the rollouts of
        evaluations. `ActorPool.__init__` explains the other arguments.
        """
        super().__init__(
            num_actors,
            start_actor,
            term=term,
            frozen_after_s=frozen_after_s,
            queue=queue,
            recorder=recorder,
            show_answering=recorder.environment_actors,
        )
        self._evaluation_idle_s = evaluation_idle_s
        self._files = files

    async def evaluate(
        self,
        tasks: Sequence[Task],
        sampling: Sampling,
        *,
        file: str,
        slots_share: float = 1.0,
    ) -> list[TrajectorySummary]:
        """Play an evaluation of `tasks`, store the rollouts in a file, and return their summaries.

        The rollouts are played by `play_evaluation`. file: name of the file without its suffix.
        slots_share: the part of rollouts.slots_per_actor that each actor plays at once (0 to 1).
        """
        keeps_tokens = self._files.keep > 0
        played = await play_evaluation(
            dict(self.actors),
            plays_of(tasks, sampling.num_samples),
            sampling,
            idle_s=self._evaluation_idle_s,
            keeps_tokens=keeps_tokens,
            notice=self._recorder.notice,
            slots_share=slots_share,
        )
        if keeps_tokens and played:
            await self._files.write(file, played)
        return [each.summary for each in played]

    def _heard(self, actor_id: str, answer: tuple[tuple[LostCalls, ...], int]) -> None:
        lost, resident_bytes = answer
        self._recorder.user_calls.heard(actor_id, lost, resident_bytes=resident_bytes)

    def _ended(self, actor_id: str) -> None:
        self._recorder.user_calls.ended(actor_id)

    async def opening_prompts(
        self, tasks: Sequence[Task], *, num_tokens: int
    ) -> Sequence[TokenIds]:
        """Return the token ids of the tasks' first prompts, at most `num_tokens` tokens in all.

        One of the actors renders the prompts. Return () if this actor does not answer.
        """
        for actor in itertools.islice(self.actors.values(), 1):
            call = actor.opening_prompts.remote(
                list(tasks), num_tokens=num_tokens, limit_s=PROMPTS_LIMIT_S
            )
            with suppress(RayError, TimeoutError):
                prompts: Sequence[TokenIds] = await within(START_DEADLINE_S, call)
                return prompts
        return ()


async def play_evaluation(
    actors: Mapping[str, ActorHandle],
    rollouts: Sequence[RolloutAssignment],
    sampling: Sampling,
    *,
    idle_s: float,
    keeps_tokens: bool,
    notice: Callable[[str], None],
    slots_share: float = 1.0,
) -> list[Played]:
    """Divide an evaluation's rollouts among the actors, and return their results.

    actors: the environment actors by id. idle_s: an actor's rollouts are abandoned if none of them
    ends for this many seconds. keeps_tokens: whether each result also has the line (`Played.line`)
    that the evaluation's file stores, with the rollout's tokens. notice: called with a message if
    an actor's rollouts are lost. slots_share: the part of rollouts.slots_per_actor that each actor
    plays at once, from 0 to 1.

    Returns: a result for each rollout, in the order of `rollouts`; lost rollouts are left out.
    """
    size = len(actors)
    shares = [range(index, len(rollouts), size) for index in range(size)]

    def playing(actor: ActorHandle, share: Sequence[int]) -> Any:
        return actor.evaluate.remote(
            [rollouts[number] for number in share],
            temperature=sampling.temperature,
            kept=sampling.kept,
            slots_share=slots_share,
            keeps_tokens=keeps_tokens,
        )

    answers = await asyncio.gather(
        *(
            _results_of_actor(actor_id, actor, playing(actor, share), idle_s=idle_s)
            for (actor_id, actor), share in zip(actors.items(), shares, strict=True)
            if share
        ),
        return_exceptions=True,
    )
    found: dict[int, Played] = {}
    for share, result in zip(shares, answers, strict=False):
        if isinstance(result, ActorLost):
            notice(f"part of an evaluation is missing: {result}")
        elif isinstance(result, BaseException):
            raise result
        else:
            found.update(zip(share, result, strict=True))
    return [found[number] for number in sorted(found)]


async def _results_of_actor(
    actor_id: str, actor: ActorHandle, playing: Any, *, idle_s: float
) -> list[Played]:
    """Return the results of the rollouts that one actor plays for an evaluation.

    playing: Ray reference of the actor's call of `evaluate`.
    Raises: ActorLost if the actor dies, or if no rollout ends for `idle_s`.
    """
    answer = asyncio.ensure_future(playing)
    name = f"{EnvironmentPool.kind} {actor_id}"

    async def progress() -> dict[int, int]:
        with suppress(RayError, TimeoutError):
            return {0: await within(LOOK_S, actor.num_evaluated.remote())}
        return {}

    try:
        await wait_while_moving([answer], progress, idle_s=idle_s, look_s=LOOK_S)
        if not answer.done():
            raise ActorLost(f"the {name} has ended no rollout for {idle_s:g} s")
        return await await_reply(answer, name=name, deadline_s=idle_s)
    finally:
        answer.cancel()
        # If the actor has not answered yet, this ends the rollouts that it still plays.
        ray.cancel(playing)


class EvaluationFiles:
    """The files of a run's newest evaluations, one file of JSON lines for each evaluation."""

    def __init__(self, directory: Path, *, keep: int, notice: Callable[[str], None]) -> None:
        """Store the settings, without writing a file.

        keep: number of newest files to keep; if it is 0, no file is written. notice: called once if
        a file cannot be written.
        """
        self._directory = directory
        self.keep = keep
        self._notice = notice
        self._has_failed = False

    async def write(self, name: str, played: Sequence[Played]) -> None:
        """Write an evaluation's rollouts to the file `name`.jsonl, and remove the oldest files.

        If the file cannot be written, give a notice the first time.
        """
        try:
            await asyncio.to_thread(self._write, name, played)
        except (OSError, RayError) as error:
            if not self._has_failed:
                self._has_failed = True
                self._notice(
                    f"evaluation {name} is not in {self._directory}: it cannot be written "
                    f"({str(error).splitlines()[0]}); its numbers are recorded; free space there, "
                    "or set evaluation.keep_results to 0"
                )

    def _write(self, name: str, played: Sequence[Played]) -> None:
        # If the run's directory is not visible on this node, fail instead of making one.
        self._directory.mkdir(exist_ok=True)
        write_lines(self._directory / f"{name}.jsonl", played)
        files = sorted(self._directory.glob("step-*.jsonl"), key=lambda file: file.stat().st_mtime)
        for file in files[: -self.keep]:
            file.unlink(missing_ok=True)


def write_lines(path: Path, played: Sequence[Played]) -> int:
    """Write an evaluation's file to `path`, with one line of JSON for each rollout in `played`.

    Rollouts without a line are left out. The lines are written to a temporary file. It is renamed
    to `path` at the end, or removed after an error.

    Returns: the number of lines.
    Raises: OSError; RayError if the actor that owns a line has died.
    """
    path = regular_target(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    lines = [each.line for each in played if each.line is not None]
    try:
        with aside.open("wb") as file:
            for line in lines:
                file.write(ray.get(line, timeout=FETCH_LIMIT_S) + b"\n")
        aside.replace(path)
    except (OSError, RayError):
        with suppress(OSError):
            aside.unlink()
        raise
    return len(lines)


def start_environment_actor(
    config: Config,
    *,
    actor_id: str,
    model: str,
    make_policy: PolicyFactory,
    queue: ActorHandle | None,
    resources: Mapping[str, float],
) -> ActorHandle:
    """Start an environment actor, and return its handle.

    model: the model whose tokenizer the actor uses. queue: the source of the actor's rollouts; None
    for an actor that only plays evaluations.
    """
    actor_class = ray.remote(EnvironmentActor).options(
        num_cpus=1,
        max_concurrency=1000,
        resources=dict(resources),
        scheduling_strategy="SPREAD",
    )
    return actor_class.remote(
        EnvironmentActorSettings(
            rollouts=config.rollouts,
            environments=config.environments,
            max_context_tokens=config.model.max_context_tokens,
            chat_template=config.model.chat_template,
            keeps_last_observation=config.algorithm.bootstraps,
            num_steps=config.run.steps,
            groups_per_step=config.algorithm.groups_per_step,
        ),
        actor_id=actor_id,
        tokenizer_path=model,
        make_policy=make_policy,
        queue=queue,
    )


def evaluation_idle_s(config: Config) -> float:
    """Return how many seconds an evaluation waits for an actor to end another rollout.

    After this time the evaluation abandons the actor's rollouts. The time is enough for the longest
    episode and for the replacement of a frozen actor.
    """
    longest_s = max(each.rollouts.episode_deadline_s for each in config.members.values())
    return longest_s + config.rollouts.frozen_after_s
