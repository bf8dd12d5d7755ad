"""Trajectories for tests, and Hypothesis strategies that draw trajectories of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from actors.environment.sample_builder import build_samples
from actors.types import (
    NO_VERSION,
    FinishReason,
    Outcome,
    Sample,
    Task,
    Timings,
    Trajectory,
    TrajectorySummary,
    Turn,
    TurnSpan,
    VersionSpan,
    summarize,
)


def ids(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def make_turn(
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    reward: float = 0.0,
    **fields: object,
) -> Turn:
    values = [-0.5] * len(sampled) if logprobs is None else logprobs
    spans = (VersionSpan(version=version, start=0, end=len(sampled)),) if len(sampled) else ()
    return Turn(
        prompt_token_ids=ids(prompt),
        sampled_token_ids=ids(sampled),
        logprobs=np.array(values, np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=spans,
        reward=reward,
        **fields,  # type: ignore[arg-type]
    )


def make_trajectory(
    turns: Sequence[Turn],
    *,
    rollout_id: str = "g000000.0-0",
    outcome: Outcome = Outcome.COMPLETED,
    attempt: int = 0,
    **fields: object,
) -> Trajectory:
    """Return a trajectory whose samples are built from turns with their whole prompts."""
    group_id = rollout_id.rpartition("-")[0]
    return Trajectory(
        rollout_id=rollout_id,
        group_id=group_id,
        group_number=int(group_id[1:7]),
        attempt=attempt,
        task_id=f"task-{group_id}",
        environment="game",
        samples=build_samples(turns, trajectory_id=f"{rollout_id}.a{attempt}"),
        outcome=outcome,
        **fields,  # type: ignore[arg-type]
    )


def whole_turns(trajectory: Trajectory) -> list[Turn]:
    """Rebuild the turns from which a trajectory's samples were made, with their whole prompts."""
    found = [(turn.index, _whole_turn(s, turn)) for s in trajectory.samples for turn in s.turns]
    return [turn for _, turn in sorted(found, key=lambda each: each[0])]


def _whole_turn(sample: Sample, turn: TurnSpan) -> Turn:
    logprobs, versions = sample.logprobs[turn.tokens].copy(), sample.versions[turn.tokens].copy()
    # In a sample, a token without a log-probability has no version. In a turn it may have any.
    logprobs[versions == NO_VERSION] = np.nan
    versions[versions == NO_VERSION] = 0
    rewards, experts = sample.token_rewards, sample.experts
    routed = experts is not None and [
        record
        for position, record in zip(experts.positions.tolist(), experts.indices, strict=True)
        if turn.start <= position < turn.end
    ]
    return Turn(
        prompt_token_ids=sample.token_ids[: turn.start],
        sampled_token_ids=sample.token_ids[turn.tokens],
        logprobs=logprobs,
        finish_reason=turn.finish_reason,
        version_spans=tuple(
            VersionSpan(version=version, start=at, end=at + 1)
            for at, version in enumerate(versions.tolist())
        ),
        reward=turn.reward,
        reward_components=turn.reward_components,
        is_malformed=turn.is_malformed,
        state_key=turn.state_key,
        token_rewards=None if rewards is None else rewards[turn.tokens],
        expert_indices=np.stack(routed) if routed else None,
    )


def replayed(trajectory: Trajectory, turns: Sequence[Turn]) -> Trajectory:
    """Return the trajectory with samples that are built from other turns."""
    samples = build_samples(turns, trajectory_id=trajectory.trajectory_id)
    return replace(trajectory, samples=samples)


def linear_turns(
    num_turns: int,
    *,
    prompt: int = 9,
    sampled: int = 6,
    observed: int = 6,
    version: int = 0,
    reward: float = 0.0,
    seed: int = 0,
) -> list[Turn]:
    """Return turns that each extend the previous one; the last one gets the reward."""
    rng = np.random.default_rng(seed)
    history = rng.integers(5, 100, prompt)
    turns: list[Turn] = []
    for index in range(num_turns):
        action = rng.integers(5, 100, sampled)
        is_last = index == num_turns - 1
        logprobs = rng.uniform(-2, -0.01, sampled)
        turns.append(
            make_turn(
                history.tolist(),
                action.tolist(),
                logprobs=logprobs.tolist(),
                version=version,
                reward=reward if is_last else 0.0,
                reward_components={"game": reward} if is_last else {},
            )
        )
        history = np.concatenate([history, action, rng.integers(5, 100, observed)])
    return turns


def make_summary(
    rollout_id: str,
    *,
    attempt: int = 0,
    outcome: Outcome = Outcome.COMPLETED,
    num_bytes: int = 100,
    reward: float = 0.0,
    version: int = 0,
) -> TrajectorySummary:
    turns = linear_turns(1, prompt=2, sampled=2, reward=reward, version=version)
    trajectory = make_trajectory(turns, rollout_id=rollout_id, outcome=outcome, attempt=attempt)
    return summarize(trajectory, num_bytes=num_bytes)


def make_task(number: int) -> Task:
    return Task(task_id=f"task-{number}", environment="game", seed=number, data={"secret": number})


def random_turns(rng: np.random.Generator, *, max_turns: int = 6) -> list[Turn]:
    """Draw turns that extend an earlier turn, share a part of it, or begin a new conversation.

    There are few distinct ids, so that turns also share prefixes by chance.
    """
    turns: list[Turn] = []
    for _ in range(rng.integers(0, max_turns + 1)):
        prompt = rng.integers(0, 4, rng.integers(1, 6)).tolist()
        if turns and rng.random() < 0.75:
            base = turns[-rng.integers(1, min(3, len(turns)) + 1)]
            full = [*base.prompt_token_ids.tolist(), *base.sampled_token_ids.tolist()]
            keep = len(full) if rng.random() < 0.6 else rng.integers(1, len(full) + 1)
            prompt = full[:keep] + rng.integers(0, 4, rng.integers(0, 6)).tolist()
        sampled = rng.integers(0, 4, rng.integers(0, 6)).tolist()
        logprobs = rng.uniform(-5, 0, len(sampled))
        logprobs[rng.random(len(sampled)) < 0.2] = rng.choice([np.nan, -np.inf])
        turns.append(
            make_turn(
                prompt,
                sampled,
                logprobs=logprobs.tolist(),
                version=int(rng.integers(0, 4)),
                reward=float(rng.choice([0.0, 0.25, 1.0, -1.0])),
                reward_components={"hit": 0.25, "ü": -1.0} if rng.random() < 0.5 else {},
                is_malformed=bool(rng.random() < 0.2),
                state_key="st"[rng.integers(0, 2)] if rng.random() < 0.2 else None,
            )
        )
    return turns


# Turns are drawn from a seed, which is many times faster than drawing each part. A failing example
# shows the seed.
turns_strategy = st.integers(0, 2**32 - 1).map(
    lambda seed: random_turns(np.random.default_rng(seed))
)


@st.composite
def trajectories_strategy(draw: st.DrawFn) -> Trajectory:
    number, member = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return make_trajectory(
        draw(turns_strategy),
        rollout_id=f"g{number:06d}.0-{member}",
        outcome=draw(st.sampled_from(Outcome)),
        attempt=draw(st.integers(0, 3)),
        best_return=draw(st.none() | st.floats(0.5, 2)),
        num_inserted_tokens=draw(st.integers(0, 3)),
        render_breaks=draw(st.dictionaries(st.sampled_from(["dummy", "tools"]), st.integers(1, 3))),
        timings=Timings(generate_s=draw(st.floats(0, 9)), step_s=0.5, wall_s=1.0),
        detail=draw(st.text(max_size=5)),
    )
