"""The shadow verifier: a user's function that gives trajectories a second score, but no reward.

The function has the form of a reward function (`actors.environment.reward_functions`). `verdicts`
checks only a sample of a step's trajectories. The sample depends only on the trajectories' ids. A
missing score is not an error. In a run, the user's function has a separate process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from actors.environment.protocol import RewardError
from actors.environment.rendering import ChatRenderer
from actors.environment.settings import rollout_settings
from actors.environment.tasks import TaskSource, derived_seed
from actors.environment.text_patterns import before_stop
from actors.environment.tokenizer import load_tokenizer
from actors.environment.trainer_arguments import TrainerState, trainer_state
from actors.journal.files import JournalStep
from actors.types import Trajectory
from actors.user_code import (
    CallFailed,
    CallTimedOut,
    bounded,
    describe,
    location,
    root_cause,
    task_id,
)
from service.config.file import ConfigError
from service.config.tasks import open_tasks
from service.config.tree import Config
from service.config.trial import load_shadow

VERIFIED = 0.5
"""Smallest score that counts as verified."""
_Found = TypeVar("_Found")


Verdicts = Mapping[str, bool | str]
"""For each checked trajectory, by id, whether it was verified, or the reason why this is unknown.

A trajectory that the function did not score is absent.
"""


class ShadowVerifier:
    """A user's second verifier, which scores a sample of each step's trajectories again.

    Only one thread at a time may call it.
    """

    def __init__(
        self,
        config: Config,
        *,
        model: str,
        name: str,
        num_samples: int,
        key: str = "audit.shadow",
        scores_groups: bool = False,
    ) -> None:
        """Load a verifier.

        model: path or name of the model with the tokenizer. num_samples: number of trajectories of
        a step that `verdicts` checks. name, key, scores_groups: see `load_shadow`. Raises:
        ConfigError.
        """
        self._function = load_shadow(name, key=key, scores_groups=scores_groups)
        self._num_samples = num_samples
        self._config = config
        self._members = config.members
        self._tasks: TaskSource = open_tasks(config)
        try:
            tokenizer = load_tokenizer(model, chat_template=config.model.chat_template)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: the tokenizer of {model}: {error}") from error
        self._renderer = ChatRenderer(tokenizer, template_options=config.rollouts.template_options)

    def verdicts(self, step: JournalStep) -> Verdicts:
        """Let the verifier check a sample of the step's graded trajectories.

        Returns: by trajectory id, whether the score is at least VERIFIED, or a text with the reason
        if scoring failed. Trajectories for which the function returned None are left out.
        """
        graded = [e.trajectory for e in step.entries if e.trajectory.is_graded]
        chosen = sorted(
            (each for each in graded if each.samples),
            key=lambda each: derived_seed(each.trajectory_id),
        )[: self._num_samples]
        return asyncio.run(self._ask(chosen))

    async def _ask(self, chosen: list[Trajectory]) -> Verdicts:
        answers = await asyncio.gather(*(self._verdict(each) for each in chosen))
        return {
            each.trajectory_id: answer
            for each, answer in zip(chosen, answers, strict=True)
            if answer is not None
        }

    async def _verdict(self, trajectory: Trajectory) -> bool | str | None:
        score = await self.score(trajectory)
        return score >= VERIFIED if isinstance(score, float) else score

    async def score(self, trajectory: Trajectory) -> float | str | None:
        """Score a trajectory's last reply with the function.

        Returns: the score; a text with the reason if scoring failed; None if the function returned
        None.
        """
        columns = self._columns(trajectory)
        ask = partial(self._function.score, self._last_reply(trajectory), columns)
        score = await self._called(ask, trajectory, columns)
        if isinstance(score, str):
            return score
        return None if score.value is None else float(score.value)

    async def score_group(self, group: Sequence[Trajectory]) -> Sequence[float | None] | str:
        """Score the last replies of all trajectories of a group in one call of the function.

        Returns: a score for each trajectory, or None for a trajectory that the function did not
        score. If the call failed, return the reason as a text.
        """
        columns = self._columns(group[0])
        replies = [self._last_reply(each) for each in group]
        ask = partial(self._function.score_group, replies, columns)
        extras = frozenset(f"{name}s" for name in columns)
        scores = await self._called(ask, group[0], columns, extras=extras)
        if isinstance(scores, str):
            return scores
        return [None if each.value is None else float(each.value) for each in scores]

    async def _called(
        self,
        ask: Callable[[], Awaitable[_Found]],
        trajectory: Trajectory,
        columns: Mapping[str, Any],
        *,
        extras: frozenset[str] = frozenset(),
    ) -> _Found | str:
        """Await `ask`, which calls the reward function; return its result, or why the call failed.

        As in training, the call is limited to `rollouts.turn_deadline_s`, and the function can read
        the environment's settings, the task id and the step.
        """
        member = self._members.get(trajectory.environment, self._config)
        # A call that hangs in this process would keep the command from ending.
        rollout_settings.set(replace(member.rollouts, inline=False))
        task_id.set(trajectory.task_id)
        trainer_state.set(
            TrainerState(
                global_step=trajectory.group_number // self._config.algorithm.groups_per_step,
                max_steps=self._config.run.steps,
            )
        )
        name = self._function.name
        try:
            self._function.check(columns, extras=extras)
            return await bounded(ask, limit_s=member.rollouts.turn_deadline_s)
        except ValueError as error:
            return f"{error}{self._note_of_task(trajectory.task_id)}"
        except CallTimedOut as error:
            return f"{name}: {error}"
        except CallFailed as failure:
            if isinstance(failure.error, RewardError):
                return str(failure.error)
            root = root_cause(failure.error)
            at = location(root)
            return f"{name} raised {describe(root)}{f' ({at})' if at else ''}"

    def knows(self, task_id: str) -> bool:
        """Return whether the training data that the configuration names has a task with this id.

        Generated tasks are in no data. For a task that is not in the data, the function receives
        only the prompt.
        """
        return self._tasks.find(task_id) is not None

    def _note_of_task(self, task_id: str) -> str:
        if self.knows(task_id):
            return ""
        return (
            f" (task {task_id} is not in the data that the run's configuration names, so that only "
            "its prompt is known)"
        )

    def _columns(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the task's data, with the rendered prompt if the data has no prompt."""
        task = self._tasks.find(trajectory.task_id)
        first = trajectory.samples[0]
        data = {} if task is None else dict(task.data)
        if "prompt" not in data:
            data["prompt"] = self._renderer.decode(first.token_ids[: first.prompt_length])
        return data

    def _last_reply(self, trajectory: Trajectory) -> str:
        last = trajectory.turns[-1]
        sample = next(each for each in trajectory.samples if last in each.turns)
        text = self._renderer.decode(sample.token_ids[last.tokens])
        member = self._members.get(trajectory.environment, self._config)
        return before_stop(text, member.rollouts.stop)[0]
