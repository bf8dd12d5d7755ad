"""Check the body of an uploaded trajectory, every number once, and make what is stored of it.

Invariant: the result is a trajectory as our own producers make it, which the queue, the merge actor
and the trainer accept unchanged. Pure; called by the API's replicas, in a thread.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.branches import branch_reason, common_prefix, regions
from actors.expert_records import ExpertRecords
from actors.limits import MAX_REWARD
from actors.misalignment import LOGPROB_TOLERANCE, REWARD_TOLERANCE
from actors.types import (
    NO_VERSION,
    PLAYED_OUT,
    UNDONE,
    UPLOADED,
    LogProbs,
    Outcome,
    Sample,
    TokenIds,
    Trajectory,
    TurnSpan,
)
from service.api.problems import shown
from service.api.schemas import MAX_DEPTH, is_deeper
from service.gateway.upload_bodies import (
    ExpertsBody,
    Packed,
    SampleBody,
    SpanBody,
    TrajectoryBody,
    TurnBody,
)
from service.gateway.upload_content import stored_content
from service.intake.uploads import PolicyFacts, Upload

# Outcomes that a client may state; the run decides the others.
STATED_OUTCOMES = frozenset(Outcome) - {
    Outcome.STALE,
    Outcome.CANCELLED,
    Outcome.EMPTY,
    Outcome.TOKEN_MISALIGNED,
}
_EXPERT_TYPES = ("|u1", "<i2")
_Number = TypeVar("_Number", bound=np.generic)


class Fault(StrEnum):
    """The kinds of faults in an uploaded trajectory; stable, for programs."""

    WRONG_TYPE = "wrong-type"
    """A packed column has another type or shape, or a wrong number of bytes."""
    LENGTHS_DIFFER = "lengths-differ"
    TOKEN_OUT_OF_VOCABULARY = "token-out-of-vocabulary"
    INVALID_MASK = "invalid-mask"
    INVALID_TURNS = "invalid-turns"
    DUPLICATE_TURN = "duplicate-turn"
    """The same sampled turn is in two samples."""
    NOTHING_TRAINED = "nothing-trained"
    CONTEXT_LENGTH_EXCEEDED = "context-length-exceeded"
    INVALID_LOGPROB = "invalid-logprob"
    INVALID_VERSIONS = "invalid-versions"
    INVALID_REWARD = "invalid-reward"
    REWARD_MISSING = "reward-missing"
    REWARDS_DIFFER = "rewards-differ"
    INVALID_EXPERTS = "invalid-experts"
    UNKNOWN_OUTCOME = "unknown-outcome"
    INVALID_METADATA = "invalid-metadata"


class Violation(Exception):
    """The first fault of a trajectory."""

    def __init__(self, fault: Fault, place: Sequence[int | str], message: str) -> None:
        """Report a fault. place: its position in the trajectory's body."""
        super().__init__(message)
        self.fault, self.place, self.message = fault, tuple(place), message


_Fail = Callable[[Fault, str, str], Violation]


def checked_upload(body: TrajectoryBody, facts: PolicyFacts) -> Upload:
    """Check a trajectory and return what is stored of it. Raises: Violation."""
    if body.outcome not in STATED_OUTCOMES:
        raise Violation(
            Fault.UNKNOWN_OUTCOME,
            ["outcome"],
            f"got {shown(body.outcome)!r}, expected one of {', '.join(sorted(STATED_OUTCOMES))}",
        )
    metadata = _checked_metadata(body.metadata)
    columns = [_read(each, number, facts) for number, each in enumerate(body.samples)]
    if not any(each.mask.any() for each in columns):
        raise Violation(
            Fault.NOTHING_TRAINED,
            ["samples"],
            "no token has mask 1, expected at least one that the policy sampled",
        )
    _check_order(columns)
    _check_duplicates(columns)
    turns = _rewarded(body, columns)
    samples: list[Sample] = []
    for number, each in enumerate(columns):
        samples.append(_sample(body.id, each, turns[number], samples, body.samples[number]))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """A sample's checked columns; [T] each."""

    token_ids: TokenIds
    mask: NDArray[np.bool_]
    logprobs: LogProbs
    versions: NDArray[np.int32]
    turns: tuple[TurnSpan, ...]
    """The turns, without rewards."""
    token_rewards: NDArray[np.float32] | None
    experts: ExpertRecords | None


def _read(body: SampleBody, number: int, facts: PolicyFacts) -> _Columns:
    """Check the columns of a sample. Raises: Violation."""

    def fail(fault: Fault, name: str, message: str) -> Violation:
        return Violation(fault, ["samples", number, name], message)

    token_ids = read_ids(body.token_ids, facts, fail)
    length = token_ids.shape[0]
    turns = None if body.turns is None else _turn_spans(body.turns, length, fail)
    mask = _mask(body, turns, length, fail)
    turns = turns or _runs(mask, fail)
    logprobs = _floats(body.logprobs, "logprobs", length, fail)
    if not (np.isfinite(logprobs) & (logprobs <= LOGPROB_TOLERANCE)).all():
        raise fail(
            Fault.INVALID_LOGPROB,
            "logprobs",
            "a log-probability is not finite, or above 0; give the natural logarithm of the "
            "probability of each sampled token, and mask 0 to a token without one",
        )
    if logprobs[~mask].any():
        raise fail(
            Fault.INVALID_LOGPROB,
            "logprobs",
            "a token of mask 0 has a log-probability, expected 0 there",
        )
    return _Columns(
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=_versions(body.versions, mask, fail),
        turns=turns,
        token_rewards=_token_rewards(body, turns, length, fail),
        experts=None if body.experts is None else _experts(body.experts, length, facts, fail),
    )


def read_ids(value: list[int] | Packed, facts: PolicyFacts, fail: _Fail) -> TokenIds:
    """Read token ids of the policy's vocabulary, at most its context length. Raises: Violation."""
    ids = _integers(value, "token_ids", None, fail)
    most, vocabulary = facts.max_context_tokens, facts.vocab_size or UNDONE
    if not 1 <= ids.shape[0] <= most:
        raise fail(
            Fault.CONTEXT_LENGTH_EXCEEDED,
            "token_ids",
            f"got {ids.shape[0]} tokens, expected 1 to {most} (model.max_context_tokens)",
        )
    if int(ids.view(np.uint32).max()) >= vocabulary:
        raise fail(
            Fault.TOKEN_OUT_OF_VOCABULARY,
            "token_ids",
            f"an id is outside the vocabulary, expected 0 to {vocabulary - 1}; use the "
            "policy's own tokenizer",
        )
    return ids


def _turn_spans(bodies: Sequence[TurnBody], length: int, fail: _Fail) -> tuple[TurnSpan, ...]:
    before = 1
    for turn in bodies:
        # A prompt has at least one token, and turns follow each other.
        if not before <= turn.start < turn.end <= length:
            raise fail(
                Fault.INVALID_TURNS,
                "turns",
                f"got a turn from {shown(str(turn.start))} to {shown(str(turn.end))}, expected a "
                f"turn that is not empty, from {before} at the earliest to {length} at the latest; "
                "list turns in order, the first after a prompt",
            )
        before = turn.end
    return tuple(
        TurnSpan(
            index=NO_VERSION if turn.index is None else turn.index,
            start=turn.start,
            end=turn.end,
            finish_reason=turn.finish_reason,
            is_malformed=turn.is_malformed,
            state_key=turn.state_key,
        )
        for turn in bodies
    )


def _mask(
    body: SampleBody, turns: Sequence[TurnSpan] | None, length: int, fail: _Fail
) -> NDArray[np.bool_]:
    sampled = np.zeros(length, np.bool_)
    for turn in turns or ():
        sampled[turn.tokens] = True
    if body.mask is None:
        if turns is None:
            raise fail(Fault.INVALID_MASK, "mask", "got neither mask nor turns, expected one")
        return sampled
    values = _integers(body.mask, "mask", length, fail, dtype="|u1")
    if int(values.view(np.uint32).max()) > 1:
        raise fail(Fault.INVALID_MASK, "mask", "got another number, expected only 0 and 1")
    mask = values.astype(np.bool_)
    if turns is not None and (mask & ~sampled).any():
        raise fail(
            Fault.INVALID_MASK,
            "mask",
            "a token of mask 1 is in no turn, expected turns that contain all of them",
        )
    return mask


def _runs(mask: NDArray[np.bool_], fail: _Fail) -> tuple[TurnSpan, ...]:
    """Return a turn for each run of mask 1."""
    borders = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    if not borders:
        raise fail(
            Fault.NOTHING_TRAINED, "mask", "a sample without a token of mask 1; leave it out"
        )
    if borders[0] == 0:
        raise fail(
            Fault.INVALID_TURNS,
            "mask",
            "the first token has mask 1, expected a prompt before the sampled tokens",
        )
    spans = [TurnBody(start=s, end=e) for s, e in zip(borders[::2], borders[1::2], strict=True)]
    return _turn_spans(spans, mask.shape[0], fail)


def _versions(spans: Sequence[SpanBody], mask: NDArray[np.bool_], fail: _Fail) -> NDArray[np.int32]:
    versions = np.full(mask.shape, NO_VERSION, np.int32)
    end: int | None = None
    for span in spans:
        is_next = 0 <= span.start == (span.start if end is None else end)
        if not (is_next and span.start < span.end <= mask.shape[0]):
            raise fail(
                Fault.INVALID_VERSIONS,
                "versions",
                f"got a span from {shown(str(span.start))} to {shown(str(span.end))}, expected a "
                f"span that is not empty, begins at the end of the span before it, and ends at "
                f"{mask.shape[0]} at most",
            )
        if not 0 <= span.version < UNDONE:
            raise fail(
                Fault.INVALID_VERSIONS,
                "versions",
                f"got version {shown(str(span.version))}, expected the number of a policy version",
            )
        versions[span.start : span.end] = span.version
        end = span.end
    if (mask & (versions == NO_VERSION)).any():
        raise fail(
            Fault.INVALID_VERSIONS,
            "versions",
            "a token of mask 1 is in no span, expected the version that sampled it",
        )
    versions[~mask] = NO_VERSION
    return versions


def _token_rewards(
    body: SampleBody, turns: Sequence[TurnSpan], length: int, fail: _Fail
) -> NDArray[np.float32] | None:
    if body.token_rewards is None:
        return None
    rewards = _floats(body.token_rewards, "token_rewards", length, fail)
    if not (np.abs(rewards) <= MAX_REWARD).all():
        raise fail(
            Fault.INVALID_REWARD,
            "token_rewards",
            f"a reward is not finite, or its size is above {MAX_REWARD:g}",
        )
    outside = rewards.copy()
    for turn in turns:
        outside[turn.tokens] = 0
    if outside.any():
        raise fail(
            Fault.INVALID_REWARD,
            "token_rewards",
            "a token outside all turns has a reward, expected 0; reward only sampled tokens",
        )
    return rewards


def _experts(body: ExpertsBody, length: int, facts: PolicyFacts, fail: _Fail) -> ExpertRecords:
    positions = _integers(body.positions, "experts", None, fail)
    indices = _expert_indices(body.indices, fail)
    if indices.shape[0] != positions.shape[0]:
        raise fail(
            Fault.LENGTHS_DIFFER,
            "experts",
            f"got {indices.shape[0]} records at {positions.shape[0]} positions, expected one at "
            "each",
        )
    is_ascending = (np.diff(positions) > 0).all()
    if not (is_ascending and (positions >= 0).all() and (positions < length).all()):
        raise fail(
            Fault.INVALID_EXPERTS,
            "experts",
            f"positions are not ascending, expected numbers from 0 to {length - 1}, each once",
        )
    if facts.mixture is None:
        problem: str | None = "the run cannot replay this model's routing; leave the records out"
    else:
        problem = facts.mixture.fault(indices)
    if problem is not None:
        raise fail(Fault.INVALID_EXPERTS, "experts", problem)
    return ExpertRecords(positions=positions, indices=indices)


def _expert_indices(value: list[list[list[int]]] | Packed, fail: _Fail) -> NDArray[Any]:
    if isinstance(value, Packed):
        if value.dtype not in _EXPERT_TYPES or value.shape is None or len(value.shape) != 3:
            raise fail(
                Fault.WRONG_TYPE,
                "experts",
                f"got {shown(value.dtype)} with shape {shown(str(value.shape))}, expected |u1 or "
                "<i2 with shape [tokens, layers, experts]",
            )
        return _unpacked(value, np.dtype(value.dtype), "experts", fail).reshape(value.shape)
    try:
        wide = np.array(value, np.int64)
    except (ValueError, OverflowError):
        wide = np.empty(0, np.int64)
    if wide.ndim != 3 or wide.min(initial=0) < 0 or wide.max(initial=0) >= 1 << 15:
        raise fail(
            Fault.WRONG_TYPE,
            "experts",
            "expected nested lists of equal lengths, [tokens, layers, experts], of experts' "
            "numbers",
        )
    return wide.astype(np.uint8 if wide.max(initial=0) < 1 << 8 else np.int16)


def _check_order(columns: Sequence[_Columns]) -> None:
    """Check the order of the turns over all samples. Raises: Violation."""
    indices = [turn.index for each in columns for turn in each.turns]
    if all(index == NO_VERSION for index in indices):
        return
    firsts = [each.turns[0].index for each in columns]
    is_ordered = firsts == sorted(firsts) and all(
        [turn.index for turn in each.turns] == sorted(turn.index for turn in each.turns)
        for each in columns
    )
    if sorted(indices) != list(range(len(indices))) or not is_ordered:
        raise Violation(
            Fault.INVALID_TURNS,
            ["samples"],
            f"the turns' indices are wrong, expected 0 to {len(indices) - 1}, each once, ascending "
            "within a sample and from one sample's first turn to the next one's; leave all out if "
            "the turns are listed in the order of play",
        )


def _check_duplicates(columns: Sequence[_Columns]) -> None:
    """Check that no token would be trained twice.

    Raises: Violation if two samples have the same whole turn after the same prompt, and both train
    tokens of it with the same log-probabilities.
    """
    ends = sorted({turn.end for each in columns for turn in each.turns})
    seen: dict[bytes, list[tuple[int, TurnSpan | None]]] = {}
    for number, each in enumerate(columns):
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
                if turn is not None and _are_one(each, columns[other], turn):
                    raise Violation(
                        Fault.DUPLICATE_TURN,
                        ["samples", number],
                        f"sample {number} trains tokens of the turn from {turn.start} to "
                        f"{turn.end} that sample {other} trains too, with the same prompt, ids and "
                        "log-probabilities; expected each sampled turn in one sample; in the later "
                        "sample leave it out of `turns`, and give its tokens mask 0 and "
                        "log-probability 0, like the rest of the prompt",
                    )
            known.append((number, own))


def _is_inside(turns: Sequence[TurnSpan], position: int) -> bool:
    """Return whether a turn begins before a position and ends after it."""
    before = bisect_left(turns, position, key=lambda turn: turn.start)
    return before > 0 and turns[before - 1].end > position


def _are_one(left: _Columns, right: _Columns, turn: TurnSpan) -> bool:
    """Return whether a turn of two samples was sampled once: its log-probabilities are equal.

    Compare only tokens that both samples train. turn: a turn with equal ids in both.
    """
    trained = left.mask[turn.tokens] & right.mask[turn.tokens]
    same = left.logprobs[turn.tokens] == right.logprobs[turn.tokens]
    return bool(trained.any() and same[trained].all())


def _is_rewarded(body: TrajectoryBody) -> bool:
    """Return whether the body has any reward; a reward of 0 counts."""
    has_token_rewards = any(each.token_rewards is not None for each in body.samples)
    return (
        body.reward is not None or bool(body.turn_rewards or body.components) or has_token_rewards
    )


def _rewarded(body: TrajectoryBody, columns: Sequence[_Columns]) -> list[tuple[TurnSpan, ...]]:
    """Return the turns of each sample, numbered and with rewards. Raises: Violation."""
    spans = [turn for each in columns for turn in each.turns]
    if spans[0].index == NO_VERSION:
        spans = [msgspec.structs.replace(turn, index=i) for i, turn in enumerate(spans)]
    rewards = _turn_rewards(body, len(spans))
    by_tokens = _sums_of_tokens(columns)
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
    return [tuple(next(found) for _ in each.turns) for each in columns]


def _turn_rewards(body: TrajectoryBody, num_turns: int) -> dict[int, float]:
    """Return the rewards by turn; the last turn gets the trajectory's. Raises: Violation."""
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


def _sums_of_tokens(columns: Sequence[_Columns]) -> list[float] | None:
    """Return each turn's sum of token rewards, or None if there are none. Raises: Violation."""
    if all(each.token_rewards is None for each in columns):
        return None
    sums = []
    for number, each in enumerate(columns):
        if each.token_rewards is None:
            raise Violation(
                Fault.LENGTHS_DIFFER,
                ["samples", number, "token_rewards"],
                "got null, expected token rewards in all samples or in none",
            )
        sums += [float(each.token_rewards[t.tokens].sum(dtype=np.float64)) for t in each.turns]
    return sums


def _sample(
    trajectory_id: str,
    columns: _Columns,
    turns: tuple[TurnSpan, ...],
    earlier: Sequence[Sample],
    body: SampleBody,
) -> Sample:
    parent, num_shared, reason = _origin(columns.token_ids, turns[0], earlier)
    return Sample(
        trajectory_id=trajectory_id,
        turns=turns,
        token_ids=columns.token_ids,
        logprobs=columns.logprobs,
        versions=columns.versions,
        token_rewards=columns.token_rewards,
        experts=columns.experts,
        parent=parent,
        num_shared=num_shared,
        branch_reason=(body.branch_reason or reason) if earlier else None,
    )


def _origin(token_ids: TokenIds, first: TurnSpan, earlier: Sequence[Sample]) -> Any:
    """Return the sample from which a new one branches, how many tokens they share, and the reason.

    Of the earlier samples, as they were when the new sample's first prompt was sent, the one with
    the longest shared prefix is chosen; of equal ones the newest. `SampleBuilder` does the same.
    """
    if not earlier:
        return None, 0, None
    prompt, nearest, most = token_ids[: first.start], len(earlier) - 1, -1
    for number in range(len(earlier) - 1, -1, -1):
        sample = earlier[number]
        known = _known_before(sample, first.index)
        # Compare one id first: it rules out most samples.
        is_less = most >= 0 and (
            most >= min(known, len(prompt)) or sample.token_ids[most] != prompt[most]
        )
        if not is_less and (shared := common_prefix(sample.token_ids[:known], prompt)) > most:
            nearest, most = number, shared
    sample = earlier[nearest]
    turns = [turn for turn in sample.turns if turn.index < first.index]
    ids = sample.token_ids[: turns[-1].end]
    reason = branch_reason(ids, prompt, regions=regions(turns), position=most)
    return nearest if most else None, most, reason


def _known_before(sample: Sample, index: int) -> int:
    """Return the number of a sample's tokens that existed when turn `index` was sampled."""
    return max(turn.end for turn in sample.turns if turn.index < index)


def _integers(
    value: list[int] | Packed, name: str, length: int | None, fail: _Fail, *, dtype: str = "<i4"
) -> NDArray[np.int32]:
    """Return a column as [T] int32. length: T; None: any. dtype: of a packed column."""
    if isinstance(value, Packed):
        if value.dtype != dtype or value.shape is not None:
            raise fail(Fault.WRONG_TYPE, name, _wrong_type(value, dtype))
        column = _unpacked(value, np.dtype(dtype), name, fail).astype(np.int32, copy=False)
    else:
        try:
            wide = np.array(value, np.int64)
        except OverflowError:
            wide = np.array([-1], np.int64)
        if wide.min(initial=0) < 0 or wide.max(initial=0) >= 1 << 31:
            raise fail(
                Fault.TOKEN_OUT_OF_VOCABULARY if name == "token_ids" else Fault.WRONG_TYPE,
                name,
                "got a number below 0, or of more than 31 bits; expected natural numbers",
            )
        column = wide.astype(np.int32)
    _check_length(column, name, length, fail)
    return column


def _floats(value: list[float] | Packed, name: str, length: int, fail: _Fail) -> LogProbs:
    """Return a column as [T] float32; numbers too large for float32 become infinite."""
    if isinstance(value, Packed):
        if value.dtype != "<f4" or value.shape is not None:
            raise fail(Fault.WRONG_TYPE, name, _wrong_type(value, "<f4"))
        column = _unpacked(value, np.dtype("<f4"), name, fail).astype(np.float32, copy=False)
    else:
        with np.errstate(over="ignore"):
            column = np.array(value, np.float64).astype(np.float32)
    _check_length(column, name, length, fail)
    return column


def _check_length(column: NDArray[Any], name: str, length: int | None, fail: _Fail) -> None:
    if length is not None and column.shape[0] != length:
        raise fail(
            Fault.LENGTHS_DIFFER,
            name,
            f"got {column.shape[0]} values for {length} tokens, expected one for each token",
        )


def _unpacked(value: Packed, dtype: np.dtype[Any], name: str, fail: _Fail) -> NDArray[Any]:
    num_bytes = math.prod(value.shape or ()) * dtype.itemsize if value.shape is not None else None
    if len(value.data) % dtype.itemsize or num_bytes not in (None, len(value.data)):
        raise fail(
            Fault.WRONG_TYPE,
            name,
            f"got {len(value.data)} bytes, expected {dtype.itemsize} for each number, and as many "
            "numbers as in the shape",
        )
    return np.frombuffer(value.data, dtype)


def _wrong_type(value: Packed, dtype: str) -> str:
    return (
        f"got a column packed as {shown(value.dtype)} with shape {shown(str(value.shape))}, "
        f"expected {dtype} without a shape"
    )


def _checked_metadata(metadata: dict[str, Any]) -> str:
    """Return metadata as JSON text, equal for equal metadata. Raises: Violation."""
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
