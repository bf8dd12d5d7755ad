"""Check every number of an uploaded trajectory's body, and make the record that is stored.

Invariant: the queue, the merge actor and the trainer accept the result unchanged, like a trajectory
that the run itself has sampled. Pure; called by the API's replicas, in a thread.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from actors.branches import branch_reason, common_prefix, regions
from actors.limits import MAX_REWARD
from actors.misalignment import REWARD_TOLERANCE
from actors.types import (
    NO_VERSION,
    PLAYED_OUT,
    UPLOADED,
    BranchReason,
    Outcome,
    Sample,
    Trajectory,
    TurnSpan,
)
from service.api.problems import shown
from service.api.schemas import MAX_DEPTH, is_deeper
from service.gateway.upload_bodies import Fault, TrajectoryBody, Violation
from service.gateway.upload_columns import read_columns
from service.intake.uploads import PolicyFacts, Upload, stored_content

# Outcomes that a client may state; the run decides the others.
STATED_OUTCOMES = frozenset(Outcome) - {
    Outcome.STALE,
    Outcome.CANCELLED,
    Outcome.EMPTY,
    Outcome.TOKEN_MISALIGNED,
}


def checked_upload(body: TrajectoryBody, facts: PolicyFacts) -> Upload:
    """Check a trajectory; return the record to be stored. Raises: Violation."""
    if body.outcome not in STATED_OUTCOMES:
        raise Violation(
            Fault.UNKNOWN_OUTCOME,
            ["outcome"],
            f"got {shown(body.outcome)!r}, expected one of {', '.join(sorted(STATED_OUTCOMES))}",
        )
    metadata = _checked_metadata(body.metadata)
    read = [
        read_columns(each, number, facts, trajectory_id=body.id)
        for number, each in enumerate(body.samples)
    ]
    if not any(each.num_trained for each in read):
        raise Violation(
            Fault.NOTHING_TRAINED,
            ["samples"],
            "no token has mask 1, expected at least one that the policy sampled",
        )
    _check_order(read)
    _check_duplicates(read)
    samples: list[Sample] = []
    for sample, turns, each in zip(read, _rewarded(body, read), body.samples, strict=True):
        samples.append(_branched(replace(sample, turns=turns), samples, each.branch_reason))
    trajectory = Trajectory(
        rollout_id=body.id,
        group_id=body.group,
        group_number=0,
        attempt=0,
        task_id=body.group,
        environment=UPLOADED,
        outcome=Outcome(body.outcome),
        detail=body.detail,
        samples=tuple(samples),
        was_rewarded=_is_rewarded(body),
    )
    content = stored_content(trajectory)
    versions = trajectory.versions
    assert versions is not None, "a trajectory without a trained token"
    return Upload(
        id=body.id,
        group=body.group,
        digest=sha256(content + metadata.encode()).hexdigest(),
        content=content,
        oldest_version=versions[0],
        newest_version=versions[1],
        metadata=body.metadata,
    )


def _check_order(samples: Sequence[Sample]) -> None:
    indices = [turn.index for each in samples for turn in each.turns]
    if all(index == NO_VERSION for index in indices):
        return
    firsts = [each.turns[0].index for each in samples]
    is_ordered = firsts == sorted(firsts) and all(
        [turn.index for turn in each.turns] == sorted(turn.index for turn in each.turns)
        for each in samples
    )
    if sorted(indices) != list(range(len(indices))) or not is_ordered:
        raise Violation(
            Fault.INVALID_TURNS,
            ["samples"],
            f"the turns have the indices {shown(repr(indices))}, expected each of 0 to "
            f"{len(indices) - 1} once, ascending within a sample, and the samples ordered by the "
            "index of their first turn; leave every index out if the turns are listed in the order "
            "of play",
        )


def _check_duplicates(samples: Sequence[Sample]) -> None:
    """Check that no sampled token is trained in two samples. Raises: Violation.

    Two samples may contain the same turn (`_are_one`), but only one of them may train it.
    """
    ends = sorted({turn.end for each in samples for turn in each.turns})
    seen: dict[bytes, list[tuple[int, TurnSpan | None]]] = {}
    for number, each in enumerate(samples):
        hashed, at = sha256(), 0
        ending = {turn.end: turn for turn in each.turns}
        for end in ends[: bisect_right(ends, each.token_ids.shape[0])]:
            hashed.update(each.token_ids[at:end].tobytes())
            at = end
            # Skip a position before the sample's first turn, or inside of one of its turns.
            if end <= each.turns[0].start or _is_inside(each.turns, end):
                continue
            known, own = seen.setdefault(hashed.digest(), []), ending.get(end)
            for other, theirs in known:
                # A mask may have split the turn in one sample: the longer span is the turn.
                found = [turn for turn in (own, theirs) if turn is not None]
                turn = min(found, key=lambda turn: turn.start, default=None)
                if turn is not None and _are_one(each, samples[other], turn):
                    raise Violation(
                        Fault.DUPLICATE_TURN,
                        ["samples", number],
                        f"samples {other} and {number} train the same turn (tokens {turn.start} to "
                        f"{turn.end}; prompt, ids and log-probabilities are equal); expected each "
                        "sampled turn in one sample; remove the turn from `turns` of the later "
                        "sample, and give its tokens mask 0 and log-probability 0, like the rest "
                        "of the prompt",
                    )
            known.append((number, own))


def _is_inside(turns: Sequence[TurnSpan], position: int) -> bool:
    """Return whether a token position is inside one of the turns, and not at a border."""
    before = bisect_left(turns, position, key=lambda turn: turn.start)
    return before > 0 and turns[before - 1].end > position


def _are_one(left: Sample, right: Sample, turn: TurnSpan) -> bool:
    """Return whether a turn in two samples is the same turn, not two turns with equal token ids.

    The turn is the same if the tokens that both samples train have equal log-probabilities.
    """
    versions = left.versions[turn.tokens], right.versions[turn.tokens]
    trained = (versions[0] != NO_VERSION) & (versions[1] != NO_VERSION)
    same = left.logprobs[turn.tokens] == right.logprobs[turn.tokens]
    return bool(trained.any() and same[trained].all())


def _is_rewarded(body: TrajectoryBody) -> bool:
    has_token_rewards = any(each.token_rewards is not None for each in body.samples)
    return (
        body.reward is not None or bool(body.turn_rewards or body.components) or has_token_rewards
    )


def _rewarded(body: TrajectoryBody, samples: Sequence[Sample]) -> list[tuple[TurnSpan, ...]]:
    """Return the turns of each sample, with their indices and rewards."""
    spans = [turn for each in samples for turn in each.turns]
    if spans[0].index == NO_VERSION:
        spans = [msgspec.structs.replace(turn, index=i) for i, turn in enumerate(spans)]
    rewards = _turn_rewards(body, len(spans))
    by_tokens = _sums_of_tokens(samples)
    if by_tokens is not None:
        sums = {turn.index: total for turn, total in zip(spans, by_tokens, strict=True)}
        stated = rewards if body.reward is not None or body.turn_rewards else None
        rewards = sums if stated is None else stated
        for number, total in sums.items():
            if abs(total - rewards[number]) > REWARD_TOLERANCE * max(1.0, abs(rewards[number])):
                raise Violation(
                    Fault.REWARDS_DIFFER,
                    ["samples"],
                    f"the token rewards of turn {number} sum to {total:g}, its reward is "
                    f"{rewards[number]:g}; make them agree, or leave reward and turn_rewards out",
                )
    elif body.reward is None and Outcome(body.outcome) in PLAYED_OUT:
        raise Violation(
            Fault.REWARD_MISSING,
            ["reward"],
            f"got null with outcome {body.outcome}, expected a number",
        )
    last = len(spans) - 1
    components = {name: body.components[name] for name in sorted(body.components)}
    found = iter(
        msgspec.structs.replace(
            turn,
            reward=rewards[turn.index],
            reward_components=components if turn.index == last else {},
        )
        for turn in spans
    )
    return [tuple(next(found) for _ in each.turns) for each in samples]


def _turn_rewards(body: TrajectoryBody, num_turns: int) -> dict[int, float]:
    """Return each turn's reward by its number. The last turn also gets the trajectory's reward."""
    named: Mapping[str, Mapping[Any, float]] = {
        "reward": {} if body.reward is None else {"reward": body.reward},
        "components": body.components,
        "turn_rewards": body.turn_rewards,
    }
    for name, values in named.items():
        for key, value in values.items():
            if not (math.isfinite(value) and abs(value) <= MAX_REWARD):
                raise Violation(
                    Fault.INVALID_REWARD,
                    [name] if key == name else [name, shown(str(key))],
                    f"the number is not finite, or its size is above {MAX_REWARD:g}",
                )
    unknown = [number for number in body.turn_rewards if not 0 <= number < num_turns]
    if unknown:
        raise Violation(
            Fault.INVALID_REWARD,
            ["turn_rewards", shown(str(unknown[0]))],
            f"got an unknown turn, expected numbers from 0 to {num_turns - 1}",
        )
    rewards = {number: body.turn_rewards.get(number, 0.0) for number in range(num_turns)}
    rewards[num_turns - 1] += body.reward or 0.0
    return rewards


def _sums_of_tokens(samples: Sequence[Sample]) -> list[float] | None:
    """Return each turn's sum of token rewards, or None if no sample has token rewards."""
    if all(each.token_rewards is None for each in samples):
        return None
    sums = []
    for number, each in enumerate(samples):
        if each.token_rewards is None:
            raise Violation(
                Fault.LENGTHS_DIFFER,
                ["samples", number, "token_rewards"],
                "got null, expected token rewards in all samples or in none",
            )
        sums += [float(each.token_rewards[t.tokens].sum(dtype=np.float64)) for t in each.turns]
    return sums


def _branched(sample: Sample, earlier: Sequence[Sample], stated: BranchReason | None) -> Sample:
    """Return a copy of a sample with its parent, the earlier sample from which it branches off.

    The parent agrees longest with the sample's prompt; of equals, the newer, as in `SampleBuilder`.
    Only tokens that existed before the sample's first turn are compared.
    stated: the client's reason for the branch; None derives the reason from the token ids.
    """
    if not earlier:
        return sample
    first = sample.turns[0].index
    prompt, nearest, most = sample.token_ids[: sample.prompt_length], len(earlier) - 1, -1
    for number in range(len(earlier) - 1, -1, -1):
        other = earlier[number]
        known = _known_before(other, first)
        # Compare one id first: it rules out most samples.
        is_less = most >= 0 and (
            most >= min(known, len(prompt)) or other.token_ids[most] != prompt[most]
        )
        if not is_less and (shared := common_prefix(other.token_ids[:known], prompt)) > most:
            nearest, most = number, shared
    turns = [turn for turn in earlier[nearest].turns if turn.index < first]
    ids = earlier[nearest].token_ids[: turns[-1].end]
    return replace(
        sample,
        parent=nearest if most else None,
        num_shared=most,
        branch_reason=stated or branch_reason(ids, prompt, regions=regions(turns), position=most),
    )


def _known_before(sample: Sample, index: int) -> int:
    """Return how many of a sample's tokens existed when turn `index` was sampled."""
    return max(turn.end for turn in sample.turns if turn.index < index)


def _checked_metadata(metadata: dict[str, Any]) -> str:
    try:
        if is_deeper(metadata, MAX_DEPTH):
            raise ValueError(f"objects and lists are nested more than {MAX_DEPTH} deep")
        return json.dumps(metadata, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise Violation(
            Fault.INVALID_METADATA,
            ["metadata"],
            f"expected JSON with finite numbers, at most {MAX_DEPTH} levels deep "
            f"({shown(str(error))})",
        ) from None
