"""The environment actors of one term: a pool that plays rollouts and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.deadline import within
from actors.environment.actor import EnvironmentActor, PolicyFactory
from actors.environment.evaluation import plays_of
from actors.environment.lost_calls import LostCalls
from actors.environment.settings import EnvironmentActorSettings, Sampling
from actors.types import Task, TokenIds, TrajectorySummary
from service.config.tree import Config
from service.run.actor_pool import ENVIRONMENT_ACTORS, START_DEADLINE_S, ActorPool, Member
from service.run.evaluation import EvaluationFiles, play
from service.run.recorder import RunRecorder
from service.run.restartable_queue import RestartableQueue

# Limit for rendering the prompts of the log-probability check.
PROMPTS_LIMIT_S = 20.0


class EnvironmentPool(ActorPool):
    """A pool that keeps environment actors alive, and plays evaluations on them."""

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
        """Start the actors, as ActorPool does.

        evaluation_idle_s: seconds without an ended rollout after which an evaluation is abandoned.
        files: stores the rollouts of evaluations.
        """
        super().__init__(
            num_actors,
            start_actor,
            kind=ENVIRONMENT_ACTORS,
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
        """Play tasks as `play` does, store their rollouts as `file`, and return summaries."""
        keeps_tokens = self._files.keep > 0
        played = await play(
            list(self._members),
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

    def _heard(self, member: Member, answer: tuple[tuple[LostCalls, ...], int]) -> None:
        lost, resident_bytes = answer
        self._recorder.user_calls.heard(member.actor_id, lost, resident_bytes=resident_bytes)

    def _ended(self, member: Member) -> None:
        self._recorder.user_calls.ended(member.actor_id)

    async def opening_prompts(
        self, tasks: Sequence[Task], *, num_tokens: int
    ) -> Sequence[TokenIds]:
        """Return what one actor's `opening_prompts` returns; () if the actor does not answer."""
        for actor in self.actors[:1]:
            call = actor.opening_prompts.remote(
                list(tasks), num_tokens=num_tokens, limit_s=PROMPTS_LIMIT_S
            )
            with suppress(RayError, TimeoutError):
                prompts: Sequence[TokenIds] = await within(START_DEADLINE_S, call)
                return prompts
        return ()


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
    """Return the seconds without an ended rollout after which an evaluation is abandoned.

    The time is enough for the longest episode and for the replacement of a frozen actor.
    """
    longest_s = max(each.rollouts.episode_deadline_s for each in config.members.values())
    return longest_s + config.rollouts.frozen_after_s
