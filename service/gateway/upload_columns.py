"""Read and check the columns of an uploaded sample: token ids, log-probabilities, mask and so on.

A column is an array, mostly with one value for each token. The functions here are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertRecords
from actors.limits import MAX_REWARD
from actors.misalignment import LOGPROB_TOLERANCE
from actors.types import NO_VERSION, UNDONE, LogProbs, Sample, TokenIds, TurnSpan
from service.api.problems import shown
from service.gateway.upload_bodies import (
    ExpertsBody,
    Fail,
    Fault,
    Packed,
    SampleBody,
    SpanBody,
    TurnBody,
    Violation,
)
from service.intake.uploads import PolicyFacts

_EXPERT_TYPES = ("|u1", "<i2")


def read_columns(
    body: SampleBody, number: int, facts: PolicyFacts, *, trajectory_id: str
) -> Sample:
    """Check the columns in a sample's body, and return the sample. Raises: Violation.

    The sample has no rewards and no parent sample yet. number: index of the sample in its
    trajectory, for error messages.
    """

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
    return Sample(
        trajectory_id=trajectory_id,
        turns=turns,
        token_ids=token_ids,
        logprobs=logprobs,
        versions=_versions(body.versions, mask, fail),
        token_rewards=_token_rewards(body, turns, length, fail),
        experts=None if body.experts is None else _experts(body.experts, length, facts, fail),
    )


def read_ids(value: list[int] | Packed, facts: PolicyFacts, fail: Fail) -> TokenIds:
    """Read token ids. Raises: Violation if they exceed the context or the vocabulary."""
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


def _turn_spans(bodies: Sequence[TurnBody], length: int, fail: Fail) -> tuple[TurnSpan, ...]:
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
    body: SampleBody, turns: Sequence[TurnSpan] | None, length: int, fail: Fail
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


def _runs(mask: NDArray[np.bool_], fail: Fail) -> tuple[TurnSpan, ...]:
    """Return a turn for each contiguous range of tokens with mask 1."""
    borders = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    if not borders:
        raise fail(Fault.NOTHING_TRAINED, "mask", "no token has mask 1; remove this sample")
    if borders[0] == 0:
        raise fail(
            Fault.INVALID_TURNS,
            "mask",
            "the first token has mask 1, expected a prompt before the sampled tokens",
        )
    spans = [TurnBody(start=s, end=e) for s, e in zip(borders[::2], borders[1::2], strict=True)]
    return _turn_spans(spans, mask.shape[0], fail)


def _versions(spans: Sequence[SpanBody], mask: NDArray[np.bool_], fail: Fail) -> NDArray[np.int32]:
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
    body: SampleBody, turns: Sequence[TurnSpan], length: int, fail: Fail
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


def _experts(body: ExpertsBody, length: int, facts: PolicyFacts, fail: Fail) -> ExpertRecords:
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


def _expert_indices(value: list[list[list[int]]] | Packed, fail: Fail) -> NDArray[Any]:
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
            "expected a nested list [tokens, layers, experts] without gaps, of expert indices from "
            f"0 to {(1 << 15) - 1}",
        )
    return wide.astype(np.uint8 if wide.max(initial=0) < 1 << 8 else np.int16)


def _integers(
    value: list[int] | Packed, name: str, length: int | None, fail: Fail, *, dtype: str = "<i4"
) -> NDArray[np.int32]:
    """Return a column of `length` whole numbers (None: any number of them) as [T] int32."""
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


def _floats(value: list[float] | Packed, name: str, length: int, fail: Fail) -> LogProbs:
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


def _check_length(column: NDArray[Any], name: str, length: int | None, fail: Fail) -> None:
    if length is not None and column.shape[0] != length:
        raise fail(
            Fault.LENGTHS_DIFFER,
            name,
            f"got {column.shape[0]} values for {length} tokens, expected one for each token",
        )


def _unpacked(value: Packed, dtype: np.dtype[Any], name: str, fail: Fail) -> NDArray[Any]:
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
