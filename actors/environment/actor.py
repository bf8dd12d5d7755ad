"""The Ray actor that plays many episodes at once: the queue's rollouts, and evaluations.

`RolloutExchange` takes rollouts from the queue and gives the trajectories to the queue. Evaluations
are played at the same time and returned to the caller. `service.run.actor_pool` and the
command `rayloom evaluate` start and call this actor.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray

from actors.environment import workers
from actors.environment.chat_template import RenderError
from actors.environment.evaluation import Played, rollout_line
from actors.environment.fork_server import preload
from actors.environment.group_scoring import score_together
from actors.environment.policy import PolicyClient
from actors.environment.protocol import Environment, Observation
from actors.environment.registry import UnknownEnvironment, is_built_in, resolve
from actors.environment.rendering import load_renderer
from actors.environment.settings import (
    EnvironmentActorSettings,
    EnvironmentSettings,
    KeptTokens,
    rollout_settings,
)
from actors.environment.trainer_arguments import TrainerState, trainer_state
from actors.environment.turn_loop import play_episode
from actors.environment.user_names import is_importable
from actors.environment.worker_environment import WorkerEnvironment
from actors.trajectory_queue.exchange import GroupExchange, RolloutExchange, play_once
from actors.trajectory_queue.messages import GroupToScore
from actors.types import (
    Outcome,
    RolloutAssignment,
    SampledText,
    Task,
    TokenIds,
    Trajectory,
    summarize,
)
from actors.user_code import CallFailed, CallTimedOut, LostCalls, bounded, task_id

# Trajectories of an evaluation that are shown as text, and the characters of each text.
SHOWN_SAMPLES = 8
SHOWN_CHARACTERS = 2000

PolicyFactory = Callable[[], PolicyClient]


class EnvironmentActor:
    """An asynchronous Ray actor that plays rollouts from the queue, and evaluations."""

    def __init__(
        self,
        settings: EnvironmentActorSettings,
        *,
        actor_id: str,
        tokenizer_path: str,
        make_policy: PolicyFactory,
        queue: Any,
    ) -> None:
        """Load the tokenizer, and find the environments. Episodes begin in `run`.

        Args: tokenizer_path: a directory or hub name. queue: handle of the trajectory queue actor.
        Raises: UnknownEnvironment, BadEnvironmentOptions.
        """
        self._settings = settings
        self._make_policy = make_policy
        self._policy: PolicyClient | None = None
        self._renderer = load_renderer(
            tokenizer_path,
            template_options=settings.rollouts.template_options,
            history=settings.rollouts.history,
            chat_template=settings.chat_template,
        )
        workers.configure(
            size=settings.rollouts.workers, memory_mib=settings.rollouts.worker_memory_mib
        )
        self._makers = {name: self._maker_of(each) for name, each in settings.environments.items()}
        self._exchange = RolloutExchange(
            self._episode,
            actor_id=actor_id,
            queue=queue,
            environments=self._makers,
            num_slots=settings.rollouts.slots_per_actor,
        )
        scored = [name for name, each in settings.environments.items() if each.scores_groups]
        # The list is empty if no environment scores groups.
        self._scorings = [
            GroupExchange(
                self._score_group,
                actor_id=actor_id,
                queue=queue,
                environments=scored,
            )
            for _ in range(1 if scored else 0)
        ]
        self._evaluations: set[asyncio.Task[Played]] = set()
        self._num_evaluated = 0
        self._newest_step = 0
        # Imported objects live until the end: garbage collections, which stop all episodes, skip
        # them.
        gc.collect()
        gc.freeze()

    async def run(self) -> None:
        """Play rollouts of the queue, and give the queue their trajectories, until `stop`.

        Raises: QueueUnreachable; RuntimeError if `run` is running already.
        """
        scoring = [asyncio.create_task(each.run()) for each in self._scorings]
        try:
            await self._exchange.run()
        finally:
            for task in scoring:
                task.cancel()
            await asyncio.gather(*scoring, return_exceptions=True)

    async def ping(self) -> tuple[tuple[LostCalls, ...], int]:
        """Return the result of `workers.report`; any answer shows that the actor still works.

        The result is the calls of users' functions that gave no answer, and the memory of the
        largest worker. If the event loop is blocked, this method does not answer.
        """
        return workers.report()

    async def num_evaluated(self) -> int:
        """Return how many evaluation episodes have ended, to show an evaluation's progress."""
        return self._num_evaluated

    async def opening_prompts(
        self, tasks: Sequence[Task], *, num_tokens: int, limit_s: float
    ) -> tuple[TokenIds, ...]:
        """Return the first prompts of the tasks, for the trainer's check of log-probabilities.

        Make the prompts one after the other. Stop when they have num_tokens in all, or after
        limit_s. Leave out a task whose environment fails or is slow here. The run still plays it.

        Returns: for each prompt, its token ids: [P] int32.
        """
        prompts: list[TokenIds] = []
        end = time.monotonic() + limit_s
        for task in tasks:
            left_s = end - time.monotonic()
            if left_s <= 0 or sum(each.size for each in prompts) >= num_tokens:
                break
            with suppress(CallTimedOut, CallFailed, RenderError, UnknownEnvironment):
                prompts.append(await self._opening_prompt(task, limit_s=left_s))
        return tuple(prompts)

    async def _opening_prompt(self, task: Task, *, limit_s: float) -> TokenIds:
        made: list[Environment] = []

        async def reset() -> Observation:
            made.append(self._maker(task.environment)())
            return await made[0].reset(task.own_copy())

        try:
            start = await bounded(reset, limit_s=limit_s)
            if not isinstance(start, Observation):
                raise CallFailed(TypeError("reset returned no Observation"))
            return self._renderer.first_prompt(start.messages, start.tools)
        finally:
            for environment in made:
                with suppress(CallTimedOut, CallFailed):
                    await bounded(environment.close, limit_s=limit_s)

    async def stop(
        self, *, drain_s: float = 0.0, limit_s: float = 30.0
    ) -> tuple[tuple[LostCalls, ...], int]:
        """Take no more rollouts, wait drain_s for the current ones, and cancel the rest.

        Evaluations are cancelled too.

        Returns: `workers.report()`, as soon as `run` has ended, or limit_s after the drain.
        """
        await self._exchange.stop(drain_s=drain_s, limit_s=limit_s)
        for play in self._evaluations:
            # Cancel each once: a second cancellation would interrupt the environment's `close`.
            if not play.cancelling():
                play.cancel()
        return workers.report()

    async def evaluate(
        self,
        plays: Sequence[RolloutAssignment],
        *,
        temperature: float = 0.0,
        kept: KeptTokens | None = None,
        slots_share: float = 1.0,
        keeps_tokens: bool = False,
    ) -> list[Played]:
        """Play an evaluation; its trajectories do not enter the queue.

        Args: kept: the tokens that may be sampled; None allows every token. slots_share: the share
        of rollouts.slots_per_actor that the evaluation may use at a time. keeps_tokens: whether to
        put a line of JSON with all tokens of a play (`rollout_line`) into the object store as soon
        as the play has ended. The play's result then has a reference to the line.
        Returns: a result for each play, in the order of the plays; the first SHOWN_SAMPLES results
        have the sampled text.
        """
        slots = asyncio.Semaphore(
            max(1, int(slots_share * self._settings.rollouts.slots_per_actor))
        )
        tasks = [
            asyncio.create_task(
                self._evaluate_one(
                    play,
                    slots,
                    temperature=temperature,
                    kept=kept,
                    keeps_tokens=keeps_tokens,
                    shows_text=number < SHOWN_SAMPLES,
                )
            )
            for number, play in enumerate(plays)
        ]
        self._evaluations.update(tasks)
        try:
            await asyncio.wait(tasks) if tasks else None
        finally:
            self._evaluations.difference_update(tasks)
            for task in tasks:
                task.cancel()
        return [
            self._played(
                Trajectory.of(play, Outcome.CANCELLED, detail="the actor was stopped"),
                keeps_tokens=keeps_tokens,
            )
            if task.cancelled()
            else task.result()
            for play, task in zip(plays, tasks, strict=True)
        ]

    def _text_of(self, trajectory: Trajectory) -> SampledText | None:
        if not trajectory.samples:
            return None
        sample = trajectory.samples[0]
        prompt, answer = np.split(sample.token_ids, [sample.prompt_length])
        return SampledText(
            prompt=_shown(self._renderer.decode(prompt)),
            answer=_shown(self._renderer.decode(answer)),
        )

    async def _episode(
        self,
        assignment: RolloutAssignment,
        *,
        temperature: float | None = None,
        kept: KeptTokens | None = None,
    ) -> Trajectory:
        """Play one rollout. Only evaluations set `temperature` and `kept`."""
        name = assignment.task.environment
        found = self._settings.environments.get(name)
        rollouts = (found.rollouts if found else None) or self._settings.rollouts
        if temperature is not None:
            rollouts = replace(rollouts, temperature=temperature)
        trainer_state.set(self._state_of(assignment.group_number))
        return await play_episode(
            assignment,
            make_environment=self._maker(name),
            policy=self._client(),
            renderer=self._renderer,
            settings=rollouts,
            max_context_tokens=self._settings.max_context_tokens,
            keeps_last_observation=self._settings.keeps_last_observation,
            kept=kept,
        )

    async def _score_group(
        self, group: GroupToScore, trajectories: Sequence[Trajectory]
    ) -> list[Trajectory]:
        name = group.task.environment
        found = self._settings.environments.get(name)
        rollouts = (found.rollouts if found else None) or self._settings.rollouts
        trainer_state.set(self._state_of(group.group_number))
        rollout_settings.set(rollouts)
        task_id.set(group.task.task_id)
        return await score_together(
            trajectories,
            group.task,
            make_environment=self._maker(name),
            decode=self._renderer.decode,
            limit_s=rollouts.turn_deadline_s,
            stop=rollouts.stop,
        )

    def _state_of(self, group_number: int) -> TrainerState:
        """Return the state of training for the reward functions of a group."""
        step = group_number // self._settings.groups_per_step
        self._newest_step = max(self._newest_step, step)
        # Groups of evaluations (negative numbers) get the newest step that this actor knows.
        return TrainerState(
            global_step=self._newest_step if group_number < 0 else step,
            max_steps=self._settings.num_steps,
        )

    def _maker_of(self, settings: EnvironmentSettings) -> Callable[[], Environment]:
        """Return a function that makes an environment in this process, or in a worker process.

        Raises: UnknownEnvironment, BadEnvironmentOptions.
        """
        name, rollouts = settings.environment, settings.rollouts or self._settings.rollouts
        make = resolve(name, settings.options)
        is_contained = not (is_built_in(name) or rollouts.inline)
        # An environment stays in this process if a worker cannot import its module.
        if ":" in name and is_contained:
            preload(name)
            is_contained = is_importable(name)
        if not is_contained:
            return make
        preload(f"{WorkerEnvironment.__module__}:make_instance")
        return partial(WorkerEnvironment, name, settings.options)

    def _maker(self, name: str) -> Callable[[], Environment]:
        def refuse() -> Environment:
            raise UnknownEnvironment(
                f"environment actor: got a task of {name!r}, expected one of "
                f"{', '.join(self._makers)}; add it to the run's environments"
            )

        return self._makers.get(name, refuse)

    def _client(self) -> PolicyClient:
        # Make the client within the event loop that uses it, and not before the first episode.
        if self._policy is None:
            self._policy = self._make_policy()
        return self._policy

    async def _evaluate_one(
        self,
        play: RolloutAssignment,
        slots: asyncio.Semaphore,
        *,
        temperature: float,
        kept: KeptTokens | None,
        keeps_tokens: bool,
        shows_text: bool,
    ) -> Played:
        async with slots:
            episode = partial(self._episode, temperature=temperature, kept=kept)
            trajectory = await play_once(episode, play)
        played = self._played(trajectory, keeps_tokens=keeps_tokens, shows_text=shows_text)
        self._num_evaluated += 1
        return played

    def _played(
        self, trajectory: Trajectory, *, keeps_tokens: bool, shows_text: bool = False
    ) -> Played:
        line = None
        if keeps_tokens:
            decode = self._renderer.decode
            line = ray.put(rollout_line(trajectory, decode=decode))
        summary = summarize(trajectory, num_bytes=0)
        if shows_text:
            summary = replace(summary, text=self._text_of(trajectory))
        return Played(summary=summary, line=line)


def _shown(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}\n[…]\n{text[-half:]}"
