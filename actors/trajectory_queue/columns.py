"""Columnar encoding of trajectories: how payloads lie in the object store.

Each token is stored once: a sample's ids lie one behind the other, without what its first prompt
shares with an earlier sample, and a turn is a place in its sample. So bytes grow with the merged
tokens, not with turns times their length, and prompts are decoded as views of one buffer.
Invariant: decode(encode(trajectories), row) equals trajectories[row], whatever its content, with
its lineage: known at the source or found here, it is never looked for again.
Arrays that come from the object store are read-only, and so are the decoded views.
Called by environment actors (encode) and the merge actor (decode).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actors.expert_records import ExpertIndices
from actors.lineage import Lineage, MismatchKind, SampleLineage
from actors.merge.buffer import fill
from actors.types import (
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
KIND_CODES: tuple[MismatchKind | None, ...] = (None, *MismatchKind)

# One row a sample. parent: the sample that its first prompt shares `shared` ids with, or -1; own:
# how many ids lie in the columns; kind: of KIND_CODES.
SAMPLE_DTYPE = np.dtype(
    [("parent", np.int32), ("shared", np.int32), ("own", np.int32), ("kind", np.uint8)]
)

# One row a turn. sample: of its trajectory; prompt: tokens, from the sample's start; sampled,
# logprobs, spans, components, rewards (of tokens), expert_rows: counts in the columns, -1 for what
# was not recorded; layers, choices: of the expert indices, whose numbers take expert_bytes each.
TURN_DTYPE = np.dtype(
    [
        ("sample", np.int32),
        ("prompt", np.int32),
        ("sampled", np.int32),
        ("logprobs", np.int32),
        ("spans", np.int32),
        ("components", np.int32),
        ("rewards", np.int32),
        ("expert_rows", np.int32),
        ("layers", np.int16),
        ("choices", np.int16),
        ("expert_bytes", np.uint8),
        ("finish", np.uint8),
        ("is_malformed", np.bool_),
        ("reward", np.float64),
    ]
)
# Of turns, samples, token_ids, logprobs, spans, components, token_rewards, experts.
_ITEM_BYTES = np.array([TURN_DTYPE.itemsize, SAMPLE_DTYPE.itemsize, 4, 4, 12, 12, 4, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryColumns:
    """A block of R trajectories with N turns in S samples.

    headers: [R] what a trajectory holds beside its turns, as plain tuples (`_header`), which
    pickle several times faster than dataclasses. row_offsets: [R + 1, 8] int64, where each row
    starts in turns, samples, token_ids, logprobs, spans, components, token_rewards and experts.
    turns: [N] of TURN_DTYPE. samples: [S] of SAMPLE_DTYPE. token_ids: int32, own ids of each sample
    in order. logprobs: float32, nats, by turn. spans: [*, 3] int32, version, start, end.
    component_names: int32 into name_table. component_values: float64. token_rewards: float32.
    experts: uint8, bytes of the expert indices, by turn.
    """

    headers: tuple[Header, ...]
    row_offsets: NDArray[np.int64]
    turns: NDArray[np.void]
    samples: NDArray[np.void]
    token_ids: TokenIds
    logprobs: LogProbs
    spans: NDArray[np.int32]
    name_table: tuple[str, ...]
    component_names: NDArray[np.int32]
    component_values: NDArray[np.float64]
    token_rewards: NDArray[np.float32]
    experts: NDArray[np.uint8]

    @property
    def num_rows(self) -> int:
        return len(self.headers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays; headers and names are not counted."""
        return self.row_offsets.nbytes + sum(self.row_num_bytes(i) for i in range(self.num_rows))

    def row_num_bytes(self, row: int) -> int:
        """Bytes that one trajectory takes in the columns."""
        return int((self.row_offsets[row + 1] - self.row_offsets[row]) @ _ITEM_BYTES)


def encode(trajectories: Sequence[Trajectory]) -> TrajectoryColumns:
    """Lay trajectories out in columns, each token once.

    Returns: a block whose row i is trajectories[i]; contiguous arrays of its own.
    Raises: ValueError, naming the trajectory, when a lineage is of other turns, or ids are not
    int32.
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
    at, end = columns.row_offsets[row].tolist(), columns.row_offsets[row + 1].tolist()
    samples = columns.samples[at[1] : end[1]].tolist()
    ids = _sample_ids(samples, columns.token_ids[at[2] : end[2]])
    chains: list[list[int]] = [[] for _ in samples]
    turns: list[Turn] = []
    reader = _Reader(columns, at)
    for index, record in enumerate(columns.turns[at[0] : end[0]].tolist()):
        chains[record[0]].append(index)
        turns.append(reader.turn(record, ids[record[0]]))
    lineage = Lineage(
        samples=tuple(
            SampleLineage(
                turns=tuple(chain),
                parent=None if parent < 0 else parent,
                shared=shared,
                kind=KIND_CODES[kind],
            )
            for chain, (parent, shared, _, kind) in zip(chains, samples, strict=True)
        )
    )
    return _with_header(columns.headers[row], tuple(turns), lineage)


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


def _with_header(header: Header, turns: tuple[Turn, ...], lineage: Lineage) -> Trajectory:
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
        lineage=lineage,
    )


def _sample_ids(
    samples: Sequence[tuple[int, int, int, int]], token_ids: TokenIds
) -> list[TokenIds]:
    """The whole ids of each sample: a view, unless it shares some with an earlier one."""
    found: list[TokenIds] = []
    at = 0
    for parent, shared, own, _ in samples:
        ids = token_ids[at : at + own]
        at += own
        found.append(np.concatenate([found[parent][:shared], ids]) if shared else ids)
    return found


class _Reader:
    """Walks the columns turn by turn; at: where the row starts in each."""

    def __init__(self, columns: TrajectoryColumns, at: Sequence[int]) -> None:
        self._columns = columns
        self._logprob, self._span, self._component, self._reward, self._expert = at[3:]

    def turn(self, record: tuple[Any, ...], ids: TokenIds) -> Turn:
        _, prompt, sampled, logprobs, spans, components, rewards, rows = record[:8]
        layers, choices, width, finish, is_malformed, reward = record[8:]
        columns, logprob, span = self._columns, self._logprob, self._span
        self._logprob += logprobs
        self._span += spans
        return Turn(
            prompt_token_ids=ids[:prompt],
            sampled_token_ids=ids[prompt : prompt + sampled],
            logprobs=columns.logprobs[logprob : self._logprob],
            finish_reason=FINISH_CODES[finish],
            version_spans=tuple(
                [
                    VersionSpan(version=v, start=s, end=e)
                    for v, s, e in columns.spans[span : self._span].tolist()
                ]
            ),
            reward=reward,
            reward_components=self._components(components) if components else {},
            is_malformed=is_malformed,
            token_rewards=None if rewards < 0 else self._token_rewards(rewards),
            expert_indices=None if rows < 0 else self._experts((rows, layers, choices), width),
        )

    def _components(self, count: int) -> Mapping[str, float]:
        start, self._component = self._component, self._component + count
        names = self._columns.component_names[start : self._component].tolist()
        values = self._columns.component_values[start : self._component].tolist()
        table = self._columns.name_table
        return {table[name]: value for name, value in zip(names, values, strict=True)}

    def _token_rewards(self, count: int) -> NDArray[np.float32]:
        start, self._reward = self._reward, self._reward + count
        return self._columns.token_rewards[start : self._reward]

    def _experts(self, shape: tuple[int, int, int], width: int) -> ExpertIndices:
        start, self._expert = self._expert, self._expert + width * int(np.prod(shape))
        found = self._columns.experts[start : self._expert]
        if width == 1:
            return found.reshape(shape)
        # A view of two-byte numbers may start at an odd byte of the column.
        return np.frombuffer(found.tobytes(), np.int16).reshape(shape)


class _Writer:
    """Collects the pieces of a block; `finish` joins them."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.offsets: list[list[int]] = [[0] * _ITEM_BYTES.size]
        self.turns: list[tuple[Any, ...]] = []
        self.samples: list[tuple[int, int, int, int]] = []
        self.ids: list[TokenIds] = []
        self.logprobs: list[LogProbs] = []
        self.spans: list[tuple[int, int, int]] = []
        self.names: dict[str, int] = {}
        self.component_names: list[int] = []
        self.component_values: list[float] = []
        self.token_rewards: list[NDArray[np.float32]] = []
        self.experts: list[bytes] = []

    def add(self, trajectory: Trajectory) -> None:
        turns = trajectory.turns
        sizes = [0] * _ITEM_BYTES.size
        sample_of = self._add_samples(turns, _lineage(trajectory), sizes)
        for turn, sample in zip(turns, sample_of, strict=True):
            self._add_turn(turn, sample, sizes)
        self.headers.append(_header(trajectory))
        self.offsets.append([a + b for a, b in zip(self.offsets[-1], sizes, strict=True)])

    def _add_samples(self, turns: Sequence[Turn], lineage: Lineage, sizes: list[int]) -> list[int]:
        """Write the ids; the sample of each turn."""
        sample_of = [0] * len(turns)
        for number, sample in enumerate(lineage.samples):
            for index in sample.turns:
                sample_of[index] = number
            last = turns[sample.turns[-1]]
            own = (last.prompt_token_ids[sample.shared :], last.sampled_token_ids)
            self.ids += own
            num_own = len(own[0]) + len(own[1])
            parent = -1 if sample.parent is None else sample.parent
            self.samples.append((parent, sample.shared, num_own, KIND_CODES.index(sample.kind)))
            sizes[2] += num_own
        sizes[1] += len(lineage.samples)
        return sample_of

    def _add_turn(self, turn: Turn, sample: int, sizes: list[int]) -> None:
        rewards, experts = turn.token_rewards, turn.expert_indices
        self.logprobs.append(turn.logprobs)
        self.spans += [(span.version, span.start, span.end) for span in turn.version_spans]
        for name, value in turn.reward_components.items():
            self.component_names.append(self.names.setdefault(name, len(self.names)))
            self.component_values.append(value)
        if rewards is not None:
            self.token_rewards.append(rewards)
        if experts is not None:
            self.experts.append(experts.tobytes())
        counts = (len(turn.logprobs), len(turn.version_spans), len(turn.reward_components))
        num_rewards = -1 if rewards is None else len(rewards)
        routing = (-1, 0, 0, 1) if experts is None else (*experts.shape, experts.itemsize)
        self.turns.append(
            (
                sample,
                len(turn.prompt_token_ids),
                turn.num_sampled,
                *counts,
                num_rewards,
                *routing,
                FINISH_CODES.index(turn.finish_reason),
                turn.is_malformed,
                turn.reward,
            )
        )
        expert_bytes = 0 if experts is None else experts.nbytes
        for column, count in enumerate((*counts, max(0, num_rewards), expert_bytes), start=3):
            sizes[column] += count
        sizes[0] += 1

    def finish(self) -> TrajectoryColumns:
        return TrajectoryColumns(
            headers=tuple(self.headers),
            row_offsets=np.array(self.offsets, np.int64),
            turns=np.array(self.turns, TURN_DTYPE),
            samples=np.array(self.samples, SAMPLE_DTYPE),
            token_ids=np.concatenate([np.empty(0, np.int32), *self.ids], dtype=np.int32),
            logprobs=np.concatenate([np.empty(0, np.float32), *self.logprobs], dtype=np.float32),
            spans=np.array(self.spans, np.int32).reshape(-1, 3),
            name_table=tuple(self.names),
            component_names=np.array(self.component_names, np.int32),
            component_values=np.array(self.component_values, np.float64),
            token_rewards=np.concatenate(
                [np.empty(0, np.float32), *self.token_rewards], dtype=np.float32
            ),
            experts=np.frombuffer(b"".join(self.experts), np.uint8),
        )


def _lineage(trajectory: Trajectory) -> Lineage:
    """Which turns continue which, found by comparison only where the source did not say."""
    known = trajectory.lineage
    if known is not None and known.num_turns == len(trajectory.turns):
        return known
    if known is not None:
        raise ValueError(
            f"columns: trajectory {trajectory.trajectory_id}: a lineage of {known.num_turns} turns "
            f"for {len(trajectory.turns)}; leave it out where turns are changed"
        )
    try:
        return fill(trajectory.turns).lineage()
    except ValueError as error:
        raise ValueError(f"columns: trajectory {trajectory.trajectory_id}: {error}") from error
