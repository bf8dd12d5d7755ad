"""Columnar encoding of trajectories: how payloads lie in the object store.

Each token is stored once. A turn's prompt is (prefix shared with an earlier turn's full ids, tail);
a turn that extends the one before it shares all of it, so that the tokens of a linear trajectory
lie one behind the other and its prompts are decoded as views of one buffer: nothing is copied.
Invariant: decode(encode(trajectories), row) equals trajectories[row], whatever its content.
Arrays that come from the object store are read-only, and so are the decoded views.
Called by environment actors (encode) and the merge actor (decode).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actors.trajectory import (
    FinishReason,
    LogProbs,
    Outcome,
    Timings,
    TokenIds,
    Trajectory,
    Turn,
    VersionSpan,
)

Header: TypeAlias = tuple[Any, ...]

FINISH_CODES: tuple[FinishReason, ...] = tuple(FinishReason)

# One row a turn. parent: index in the trajectory of the turn whose full ids begin its prompt, or
# -1; shared: how many of them; tail, sampled, logprobs, spans, components: counts in the columns.
TURN_DTYPE = np.dtype(
    [
        ("parent", np.int32),
        ("shared", np.int32),
        ("tail", np.int32),
        ("sampled", np.int32),
        ("logprobs", np.int32),
        ("spans", np.int32),
        ("components", np.int32),
        ("finish", np.uint8),
        ("is_malformed", np.bool_),
        ("reward", np.float64),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryColumns:
    """A block of R trajectories with N turns.

    headers: [R] what a trajectory holds beside its turns, as plain tuples (`_header`), which
    pickle several times faster than dataclasses. row_offsets: [R + 1, 5] int64, where each row
    starts in turns, token_ids, logprobs, spans and components. turns: [N] of TURN_DTYPE.
    token_ids: int32, tail and sampled ids of each turn in order. logprobs: float32, nats.
    spans: [S, 3] int32, version, start, end. component_names: [C] int32 into name_table.
    component_values: [C] float64.
    """

    headers: tuple[Header, ...]
    row_offsets: NDArray[np.int64]
    turns: NDArray[np.void]
    token_ids: TokenIds
    logprobs: LogProbs
    spans: NDArray[np.int32]
    name_table: tuple[str, ...]
    component_names: NDArray[np.int32]
    component_values: NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        return len(self.headers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays; headers and names are not counted."""
        return self.row_offsets.nbytes + sum(self.row_num_bytes(i) for i in range(self.num_rows))

    def row_num_bytes(self, row: int) -> int:
        """Bytes that one trajectory takes in the columns."""
        sizes = self.row_offsets[row + 1] - self.row_offsets[row]
        return int(sizes @ np.array([TURN_DTYPE.itemsize, 4, 4, 12, 12]))


def encode(trajectories: Sequence[Trajectory]) -> TrajectoryColumns:
    """Lay trajectories out in columns, each token once.

    Returns: a block whose row i is trajectories[i]; contiguous arrays of its own.
    """
    writer = _Writer()
    for trajectory in trajectories:
        writer.add(trajectory)
    return writer.finish()


def decode(columns: TrajectoryColumns, row: int) -> Trajectory:
    """Read one trajectory back; ids and log-probabilities are views wherever they can be.

    Raises: IndexError when the block has no such row.
    """
    if not 0 <= row < columns.num_rows:
        raise IndexError(f"columns: row {row} of a block of {columns.num_rows} trajectories")
    turn_at, token_at, logprob_at, span_at, component_at = columns.row_offsets[row].tolist()
    turn_end = int(columns.row_offsets[row + 1, 0])
    turns: list[Turn] = []
    chain_start: list[int] = []  # where in token_ids the turn's whole prompt starts, -1: nowhere
    for record in columns.turns[turn_at:turn_end].tolist():
        parent, shared, tail, sampled, logprobs, spans, components, finish, malformed, reward = (
            record
        )
        tail_end = token_at + tail
        start = _contiguous_start(turns, chain_start, parent, shared, token_at)
        if start >= 0:
            prompt = columns.token_ids[start:tail_end]
        else:
            prompt = np.concatenate(
                [*_full_prefix(turns[parent], shared), columns.token_ids[token_at:tail_end]]
            )
        chain_start.append(start)
        span_rows = columns.spans[span_at : span_at + spans].tolist()
        turns.append(
            Turn(
                prompt_token_ids=prompt,
                sampled_token_ids=columns.token_ids[tail_end : tail_end + sampled],
                logprobs=columns.logprobs[logprob_at : logprob_at + logprobs],
                finish_reason=FINISH_CODES[finish],
                version_spans=tuple(
                    [VersionSpan(version=v, start=s, end=e) for v, s, e in span_rows]
                ),
                reward=reward,
                reward_components=_components(columns, component_at, components),
                is_malformed=malformed,
            )
        )
        token_at = tail_end + sampled
        logprob_at += logprobs
        span_at += spans
        component_at += components
    return _with_header(columns.headers[row], tuple(turns))


def _header(trajectory: Trajectory) -> Header:
    timings = trajectory.timings
    return (
        trajectory.rollout_id,
        trajectory.group_id,
        trajectory.group_number,
        trajectory.attempt,
        trajectory.task_id,
        trajectory.environment,
        trajectory.outcome.value,
        trajectory.best_return,
        trajectory.num_inserted_tokens,
        dict(trajectory.render_breaks),
        (timings.generate_s, timings.environment_s, timings.wall_s),
        trajectory.detail,
    )


def _with_header(header: Header, turns: tuple[Turn, ...]) -> Trajectory:
    generate_s, environment_s, wall_s = header[10]
    return Trajectory(
        rollout_id=header[0],
        group_id=header[1],
        group_number=header[2],
        attempt=header[3],
        task_id=header[4],
        environment=header[5],
        turns=turns,
        outcome=Outcome(header[6]),
        best_return=header[7],
        num_inserted_tokens=header[8],
        render_breaks=header[9],
        timings=Timings(generate_s=generate_s, environment_s=environment_s, wall_s=wall_s),
        detail=header[11],
    )


def _contiguous_start(
    turns: Sequence[Turn], chain_start: Sequence[int], parent: int, shared: int, token_at: int
) -> int:
    """Where the prompt starts if it lies in one piece before its tail, else -1."""
    if shared == 0:
        return token_at
    is_next = parent == len(turns) - 1
    if is_next and chain_start[parent] >= 0 and shared == _num_full(turns[parent]):
        return chain_start[parent]
    return -1


def _components(columns: TrajectoryColumns, start: int, count: int) -> Mapping[str, float]:
    if not count:
        return {}
    names = columns.component_names[start : start + count].tolist()
    values = columns.component_values[start : start + count].tolist()
    return {columns.name_table[name]: value for name, value in zip(names, values, strict=True)}


def _num_full(turn: Turn) -> int:
    return turn.prompt_token_ids.shape[0] + turn.sampled_token_ids.shape[0]


def _full_prefix(turn: Turn, length: int) -> list[TokenIds]:
    """The first `length` of a turn's prompt and sampled ids, in at most two pieces."""
    prompt = turn.prompt_token_ids
    if length <= prompt.shape[0]:
        return [prompt[:length]]
    return [prompt, turn.sampled_token_ids[: length - prompt.shape[0]]]


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many ids two sequences have in common from the start."""
    length = min(a.shape[0], b.shape[0])
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def shared_with_turn(prompt: TokenIds, turn: Turn) -> int:
    """How many ids a prompt has in common, from the start, with a turn's prompt + sampled ids."""
    num_prompt = turn.prompt_token_ids.shape[0]
    shared = common_prefix(prompt, turn.prompt_token_ids)
    if shared < num_prompt:
        return shared
    return num_prompt + common_prefix(prompt[num_prompt:], turn.sampled_token_ids)


def _find_parent(turns: Sequence[Turn], index: int) -> tuple[int, int]:
    """The earlier turn that shares most with the prompt of turn `index`, and how much."""
    prompt = turns[index].prompt_token_ids
    best, best_shared = -1, 0
    for parent in range(index - 1, -1, -1):
        shared = shared_with_turn(prompt, turns[parent])
        if shared > best_shared:
            best, best_shared = parent, shared
        if shared == _num_full(turns[parent]) and parent == index - 1:
            break
    return best, best_shared


class _Writer:
    """Collects the pieces of a block; `finish` joins them."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.offsets: list[tuple[int, int, int, int, int]] = [(0, 0, 0, 0, 0)]
        self.turns: list[tuple[int, int, int, int, int, int, int, int, bool, float]] = []
        self.ids: list[TokenIds] = []
        self.logprobs: list[LogProbs] = []
        self.spans: list[tuple[int, int, int]] = []
        self.names: dict[str, int] = {}
        self.component_names: list[int] = []
        self.component_values: list[float] = []

    def add(self, trajectory: Trajectory) -> None:
        num_ids, num_logprobs = self.offsets[-1][1:3]
        for index, turn in enumerate(trajectory.turns):
            parent, shared = _find_parent(trajectory.turns, index)
            tail = turn.prompt_token_ids[shared:]
            self.ids += [tail, turn.sampled_token_ids]
            self.logprobs.append(turn.logprobs)
            self.spans += [(span.version, span.start, span.end) for span in turn.version_spans]
            for name, value in turn.reward_components.items():
                self.component_names.append(self.names.setdefault(name, len(self.names)))
                self.component_values.append(value)
            sizes = (parent, shared, tail.shape[0], turn.num_sampled, turn.logprobs.shape[0])
            num_ids += tail.shape[0] + turn.num_sampled
            num_logprobs += turn.logprobs.shape[0]
            self.turns.append(
                (
                    *sizes,
                    len(turn.version_spans),
                    len(turn.reward_components),
                    FINISH_CODES.index(turn.finish_reason),
                    turn.is_malformed,
                    turn.reward,
                )
            )
        self.headers.append(_header(trajectory))
        self.offsets.append(
            (len(self.turns), num_ids, num_logprobs, len(self.spans), len(self.component_names))
        )

    def finish(self) -> TrajectoryColumns:
        no_ids, no_logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return TrajectoryColumns(
            headers=tuple(self.headers),
            row_offsets=np.array(self.offsets, np.int64),
            turns=np.array(self.turns, TURN_DTYPE),
            token_ids=np.concatenate([no_ids, *self.ids], dtype=np.int32),
            logprobs=np.concatenate([no_logprobs, *self.logprobs], dtype=np.float32),
            spans=np.array(self.spans, np.int32).reshape(-1, 3),
            name_table=tuple(self.names),
            component_names=np.array(self.component_names, np.int32),
            component_values=np.array(self.component_values, np.float64),
        )
