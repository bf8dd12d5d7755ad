"""Score the trajectories of a group together, once all rollouts of the group have ended.

The reward is added to the trajectory's last turn. If the group cannot be scored, each trajectory
ends as `reward_error`. The trajectory queue gives the group to an environment actor, which calls
this module, and closes the group afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec.structs import replace as replace_struct

from actors.environment.protocol import RewardError, StepResult, reward_problem
from actors.environment.text_patterns import before_stop
from actors.types import Outcome, Task, TokenIds, Trajectory
from actors.user_code import (
    CallFailed,
    CallTimedOut,
    bounded,
    closing,
    describe,
    root_cause,
    type_of,
)

_RETRY_DELAYS_S = (0.1, 0.5)


async def score_together(
    trajectories: Sequence[Trajectory],
    task: Task,
    *,
    make_environment: Callable[[], Any],
    decode: Callable[[TokenIds], str],
    limit_s: float,
    stop: Sequence[str] = (),
) -> list[Trajectory]:
    """Score a group's answers together; return the trajectories with the group's rewards added.

    A call of `score_group` that raises is repeated up to twice; a call that exceeds its limit is
    not repeated. If an answer gets no score, the outcome of its trajectory becomes `reward_error`.
    If the calls fail, the outcome of every trajectory becomes `reward_error`.

    Args:
        make_environment: Makes an environment with the method `score_group(task, completions)`. The
            method returns a StepResult for each answer, in order; None for an answer that is not
            scored.
        limit_s: Seconds that one call of `score_group` may take.
        stop: Stop strings; an answer is the text before the first of them.
    """
    completions = [before_stop(decode(_last_ids(each)), stop)[0] for each in trajectories]

    async def score() -> Sequence[StepResult | None]:
        environment = make_environment()
        async with closing(environment.close):
            found = await environment.score_group(task.own_copy(), completions)
        return checked_results(found, num_answers=len(completions))

    try:
        results = await _with_retries(partial(bounded, score, limit_s=limit_s))
        return [
            _with_score(each, result) for each, result in zip(trajectories, results, strict=True)
        ]
    except RewardError as error:
        return [_unscored(each, str(error)) for each in trajectories]


def checked_results(found: Any, *, num_answers: int) -> Sequence[StepResult | None]:
    """Check what an environment's `score_group` returned, and return it.

    Raises: RewardError if the results are not a list with a StepResult or None for each answer, or
    if a reward is not a finite number.
    """
    if not isinstance(found, list | tuple) or len(found) != num_answers:
        got = f"{len(found)} results" if isinstance(found, list | tuple) else type(found).__name__
        raise RewardError(
            f"score_group gave {got} for {num_answers} answers, expected a list with a StepResult "
            "for each, in their order; return one"
        )
    for result in found:
        if not isinstance(result, StepResult | None):
            raise RewardError(
                f"score_group gave {type_of(result)} for an answer, expected a "
                "rayloom.StepResult, or None for an answer that has no score"
            )
        if result is not None and (problem := reward_problem(result)) is not None:
            raise RewardError(problem)
    return found


def _unscored(trajectory: Trajectory, why: str) -> Trajectory:
    detail = f"group: {why}".encode(errors="replace").decode()
    return replace(trajectory, outcome=Outcome.REWARD_ERROR, detail=detail)


async def _with_retries(
    call: Callable[[], Awaitable[Sequence[StepResult | None]]],
) -> Sequence[StepResult | None]:
    """Make a call; repeat it up to twice if it raises.

    Raises: RewardError if the last call raises, or if any call exceeds its limit.
    """
    for delay_s in (*_RETRY_DELAYS_S, None):
        try:
            return await call()
        except CallTimedOut as error:
            raise RewardError(
                f"score_group: {error}; make it faster, or raise rollouts.turn_deadline_s"
            ) from error
        except CallFailed as failure:
            # A function that exceeded its own limit would take as long again.
            is_late = isinstance(root_cause(failure.error), CallTimedOut)
            if delay_s is None or is_late:
                raise RewardError(describe(failure.error)) from failure
            await asyncio.sleep(delay_s)
    raise AssertionError("unreachable: the last pass raises or returns")


def _with_score(trajectory: Trajectory, result: StepResult | None) -> Trajectory:
    """Add a result of group scoring to a trajectory, and the result's reward to the last turn.

    If there is no result, the outcome becomes `reward_error`.
    """
    if result is None:
        return _unscored(trajectory, "none of the group functions gave a number for this answer")
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
    last = trajectory.turns[-1]
    sample = next(
        each for each in trajectory.samples if any(turn.index == last.index for turn in each.turns)
    )
    return sample.token_ids[last.tokens]
