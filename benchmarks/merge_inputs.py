"""Trajectories for the merge benchmark, and the file in which the peer receives the same ones.

A trajectory consists of its merged ids and, for each turn, the end of its prompt and the number of
tokens that it sampled. Each side makes its own inputs from these: Rayloom makes arrays of int32,
the peer lists of ints.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actors.types import FinishReason, Outcome, Sample, Trajectory, Turn, VersionSpan

VOCAB_SIZE = 151_936


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Numbers of tokens: of the first prompt, and of each turn's reply and observation."""

    prompt: int = 512
    sampled: int = 100
    observed: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One trajectory of K turns.

    prompts: [K] the token ids that each turn's engine call received. sampled, logprobs (nats),
    rewards: [K] arrays [A], where A is the number of tokens that the turn sampled.
    """

    prompts: list[NDArray[np.int32]]
    sampled: list[NDArray[np.int32]]
    logprobs: list[NDArray[np.float32]]
    rewards: list[NDArray[np.float32]]


def linear(num_turns: int, shape: Shape, *, seed: int) -> Play:
    """Return a play in which every turn extends the last.

    Each prompt is a separate array, like a prompt that arrives from elsewhere; the reward is on the
    last token.
    """
    rng = np.random.default_rng(seed)
    history = _ids(rng, shape.prompt)
    play = Play(prompts=[], sampled=[], logprobs=[], rewards=[])
    for _ in range(num_turns):
        reply = _ids(rng, shape.sampled)
        _take(play, rng, history, reply)
        history = np.concatenate([history, reply, _ids(rng, shape.observed)])
    play.rewards[-1][-1] = 1.0
    return play


def rewritten(num_turns: int, shape: Shape, *, seed: int) -> Play:
    """Return a play in which later prompts contain only the second half of each reply."""
    rng = np.random.default_rng(seed)
    history = _ids(rng, shape.prompt)
    play = Play(prompts=[], sampled=[], logprobs=[], rewards=[])
    for _ in range(num_turns):
        reply = _ids(rng, shape.sampled)
        _take(play, rng, history, reply)
        answer = reply[shape.sampled // 2 :]
        history = np.concatenate([history, answer, _ids(rng, shape.observed)])
    return play


def branches(num_turns: int, shape: Shape, *, seed: int) -> Play:
    """Return a play in which every turn adds its own token to one common prompt."""
    rng = np.random.default_rng(seed)
    head = _ids(rng, shape.prompt)
    play = Play(prompts=[], sampled=[], logprobs=[], rewards=[])
    for number in range(num_turns):
        _take(play, rng, np.append(head, np.int32(number)), _ids(rng, shape.sampled))
    return play


def with_sub_agent(num_turns: int, shape: Shape, *, seed: int) -> Play:
    """Return a play of two conversations, a main line and a sub-agent, whose turns alternate."""
    main = linear(num_turns // 2, shape, seed=seed)
    aside = linear(num_turns // 2, shape, seed=seed + 1)
    names = ("prompts", "sampled", "logprobs", "rewards")
    woven = {
        name: [
            each
            for pair in zip(getattr(main, name), getattr(aside, name), strict=True)
            for each in pair
        ]
        for name in names
    }
    return Play(**woven)


def as_turns(play: Play, *, number: int) -> list[Turn]:
    """Return the turns of a play, each with its whole prompt and its reply."""
    return [
        Turn(
            prompt_token_ids=prompt,
            sampled_token_ids=sampled,
            logprobs=logprobs,
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=number, start=0, end=len(sampled)),),
            reward=float(rewards.sum()),
            token_rewards=rewards,
        )
        for prompt, sampled, logprobs, rewards in zip(
            play.prompts, play.sampled, play.logprobs, play.rewards, strict=True
        )
    ]


def as_trajectory(samples: tuple[Sample, ...], *, number: int) -> Trajectory:
    """Return a trajectory with these samples, in the form of an episode's result."""
    return Trajectory(
        rollout_id=f"g-{number}",
        group_id="g",
        group_number=0,
        attempt=0,
        task_id="t",
        environment="benchmark",
        samples=samples,
        outcome=Outcome.COMPLETED,
    )


def write_for_peer(plays: list[Play], path: Path) -> None:
    """Write plays as flat arrays, because the peer can read them with numpy alone."""
    turns = [
        (number, len(prompt), len(sampled))
        for number, play in enumerate(plays)
        for prompt, sampled in zip(play.prompts, play.sampled, strict=True)
    ]
    np.savez(
        path,
        turns=np.array(turns, np.int64),
        prompts=np.concatenate([each for play in plays for each in play.prompts]),
        sampled=np.concatenate([each for play in plays for each in play.sampled]),
        logprobs=np.concatenate([each for play in plays for each in play.logprobs]),
        rewards=np.concatenate([each for play in plays for each in play.rewards]),
    )


def _ids(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    return rng.integers(0, VOCAB_SIZE, count, np.int32)


def _take(
    play: Play, rng: np.random.Generator, prompt: NDArray[np.int32], reply: NDArray[np.int32]
) -> None:
    play.prompts.append(prompt.copy())
    play.sampled.append(reply)
    play.logprobs.append(rng.uniform(-4, 0, len(reply)).astype(np.float32))
    play.rewards.append(np.zeros(len(reply), np.float32))
