"""Score the trajectories of a group together, once all of its rollouts have ended.

The group's reward for a trajectory is added to its last turn. If the environment cannot score the
group, each trajectory ends as `reward_error`. Called by the environment actor, for groups that the
queue hands out before they close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from msgspec.structs import replace as replace_struct

from actors.environment.protocol import RewardError, StepResult, reward_problem
from actors.types import Outcome, Task, TokenIds, Trajectory
from actors.user_code import CallFailed, CallTimedOut, bounded, closing, describe

_RETRY_DELAYS_S = (0.1, 0.5)


class GroupScorer(Protocol):
    """An environment that scores the answers of a group together."""

    async def score_group(self, task: Task, completions: Sequence[str]) -> Sequence[StepResult]: ...
    async def close(self) -> None: ...


async def score_together(
    trajectories: Sequence[Trajectory],
    task: Task,
    *,
    make_environment: Callable[[], GroupScorer],
    decode: Callable[[TokenIds], str],
    limit_s: float,
) -> list[Trajectory]:
    """Add the group's rewards to the trajectories, and return them.

    A call that raises is repeated twice. A call that exceeds its limit is not repeated. If there is
    no score after that, every trajectory has the outcome `reward_error`.

    Args:
        limit_s: Seconds that one call of `score_group` may take.
    """
    completions = [decode(_last_ids(each)) for each in trajectories]

    async def score() -> Sequence[StepResult]:
        environment = make_environment()
        async with closing(environment.close):
            return await environment.score_group(task, completions)

    try:
        results = await _with_retries(partial(bounded, score, limit_s=limit_s))
        if len(results) != len(trajectories):
            raise RewardError(
                f"score_group gave {len(results)} results for {len(trajectories)} answers, "
                "expected one for each"
            )
        return [
            _with_score(each, result) for each, result in zip(trajectories, results, strict=True)
        ]
    except RewardError as error:
        why = f"group: {error}".encode(errors="replace").decode()
        return [replace(each, outcome=Outcome.REWARD_ERROR, detail=why) for each in trajectories]


async def _with_retries(
    call: Callable[[], Awaitable[Sequence[StepResult]]],
) -> Sequence[StepResult]:
    """Return the answer of a call; repeat the call up to twice if it raises.

    Raises: RewardError if the last call raises, or if one exceeds its limit.
    """
    for delay_s in (*_RETRY_DELAYS_S, None):
        try:
            return await call()
        except CallTimedOut as error:
            raise RewardError(f"the score: {error}") from error
        except CallFailed as failure:
            if delay_s is None:
                raise RewardError(describe(failure.error)) from failure
            await asyncio.sleep(delay_s)
    raise AssertionError("unreachable: the last pass raises or returns")


def _with_score(trajectory: Trajectory, result: StepResult) -> Trajectory:
    """Return a trajectory with a result's reward and components added to its last turn, and with
    the result's metrics and extra columns.

    Raises: RewardError if the reward, a component or a metric is not a finite number.
    """
    if (problem := reward_problem(result)) is not None:
        raise RewardError(problem)
    last = trajectory.turns[-1]
    scored = replace_struct(
        last,
        reward=last.reward + float(result.reward),
        reward_components={
            **last.reward_components,
            **{name: float(value) for name, value in result.reward_components.items()},
        },
    )
    samples = tuple(
        replace(
            sample,
            turns=tuple(scored if turn.index == last.index else turn for turn in sample.turns),
        )
        for sample in trajectory.samples
    )
    return replace(
        trajectory,
        samples=samples,
        metrics={**trajectory.metrics, **result.metrics},
        extra_columns={**trajectory.extra_columns, **result.extra_columns},
    )


def _last_ids(trajectory: Trajectory) -> TokenIds:
    """Return the token ids that were sampled in the last turn."""
    last = trajectory.turns[-1]
    sample = next(
        each for each in trajectory.samples if any(turn.index == last.index for turn in each.turns)
    )
    return sample.token_ids[last.tokens]
