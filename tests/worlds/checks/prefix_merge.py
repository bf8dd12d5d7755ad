"""Exact-prefix merge, the rule by which turns become samples, in plain loops over lists.

Tests and benchmarks compare `actors.environment.sample_builder`, which makes the samples of a run,
with this reference.

A turn extends a sample if all ids of the sample are an exact prefix of the turn's prompt ids. The
rest of the prompt is observation, with mask 0. A turn may extend any sample: the longest match is
chosen, and the newest of equally long ones. So the turns of a sub-agent or a compacted history
branch off, and the main conversation continues its sample.

Invariants: the mask counts the sampled tokens with a finite log-probability; mask 0 means
log-probability 0 and no version; the order of turns is kept; merging the turns of one sample again
gives that sample; turns that each extend the previous one give one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.branches import branch_reason
from actors.expert_records import ExpertRecords
from actors.types import NO_VERSION, BranchReason, Sample, Turn, TurnSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """The origin of a branched sample and the reason; fields as in `Sample`."""

    parent: int | None = None
    num_shared: int = 0
    branch_reason: BranchReason | None = None


def merge_turns(turns: Sequence[Turn], *, trajectory_id: str = "") -> tuple[Sample, ...]:
    """Merge a trajectory's turns into samples, in the order in which these began.

    Example: prompts [10,20,30] and [10,20,30,40,50,60,70], actions [40,50] and [80,90] -> one
    sample: prompt [10,20,30], response [40,50,60,70,80,90], mask of the response [1,1,0,0,1,1].
    """
    chains: list[list[int]] = []
    origins: list[_Origin] = []
    for index, turn in enumerate(turns):
        prompt = turn.prompt_token_ids.tolist()
        samples = [_ids(turns[chain[-1]]) for chain in chains]
        begin = [(len(ids), n) for n, ids in enumerate(samples) if prompt[: len(ids)] == ids]
        if begin:
            chains[max(begin)[1]].append(index)
        else:
            origins.append(_origin(turns, chains, samples, prompt))
            chains.append([index])
    has_rewards = any(turn.token_rewards is not None for turn in turns)
    return tuple(
        _sample(turns, chain, origin, trajectory_id=trajectory_id, has_rewards=has_rewards)
        for chain, origin in zip(chains, origins, strict=True)
    )


def _ids(turn: Turn) -> list[int]:
    ids: list[int] = [*turn.prompt_token_ids.tolist(), *turn.sampled_token_ids.tolist()]
    return ids


def _origin(
    turns: Sequence[Turn], chains: list[list[int]], samples: list[list[int]], prompt: list[int]
) -> _Origin:
    """Find the sample from which a prompt that extends none branches off, and the reason."""
    if not samples:
        return _Origin()
    shared = [_num_common(ids, prompt) for ids in samples]
    most, nearest = max((count, number) for number, count in enumerate(shared))
    # The region of each token: 0 for the first prompt, then odd for an action, even for an
    # observation.
    regions: list[int] = []
    for place, index in enumerate(chains[nearest]):
        observed = len(turns[index].prompt_token_ids) - len(regions)
        regions += [2 * place] * observed + [2 * place + 1] * turns[index].num_sampled
    reason = branch_reason(
        np.array(samples[nearest], np.int32),
        np.array(prompt, np.int32),
        regions=np.array(regions, np.int32),
        position=most,
    )
    parent = nearest if most else None
    return _Origin(parent=parent, num_shared=most, branch_reason=reason)


def _num_common(left: list[int], right: list[int]) -> int:
    unequal = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(unequal, min(len(left), len(right)))


def _sample(
    turns: Sequence[Turn],
    chain: list[int],
    origin: _Origin,
    *,
    trajectory_id: str,
    has_rewards: bool,
) -> Sample:
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    rewards: list[float] = []
    spans: list[TurnSpan] = []
    routed: list[tuple[int, NDArray[Any]]] = []
    for index in chain:
        turn = turns[index]
        observed = turn.prompt_token_ids.tolist()[len(ids) :]
        ids += observed
        logprobs += [0.0] * len(observed)
        versions += [NO_VERSION] * len(observed)
        rewards += [0.0] * len(observed)
        start = len(ids)
        ids += turn.sampled_token_ids.tolist()
        sampled_by = [
            span.version for span in turn.version_spans for _ in range(span.start, span.end)
        ]
        for logprob, version in zip(turn.logprobs.tolist(), sampled_by, strict=True):
            is_usable = math.isfinite(logprob)
            logprobs.append(logprob if is_usable else 0.0)
            versions.append(version if is_usable else NO_VERSION)
        if turn.token_rewards is not None:
            rewards += turn.token_rewards.tolist()
        elif turn.num_sampled:
            rewards += [0.0] * (turn.num_sampled - 1) + [turn.reward]
        if turn.expert_indices is not None:
            routed += [(start + offset, each) for offset, each in enumerate(turn.expert_indices)]
        spans.append(
            TurnSpan(
                index=index,
                start=start,
                end=len(ids),
                finish_reason=turn.finish_reason,
                reward=turn.reward,
                reward_components=turn.reward_components,
                is_malformed=turn.is_malformed,
                state_key=turn.state_key,
            )
        )
    return Sample(
        trajectory_id=trajectory_id,
        turns=tuple(spans),
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
        token_rewards=np.array(rewards, np.float32) if has_rewards else None,
        experts=_experts(routed),
        parent=origin.parent,
        num_shared=origin.num_shared,
        branch_reason=origin.branch_reason,
    )


def _experts(routed: list[tuple[int, NDArray[Any]]]) -> ExpertRecords | None:
    """Collect the expert records of a sample; None if it has none.

    routed: for each token, its position in the sample and the chosen experts.
    """
    if not routed:
        return None
    return ExpertRecords(
        positions=np.array([position for position, _ in routed], np.int32),
        indices=np.stack([chosen for _, chosen in routed]),
    )
