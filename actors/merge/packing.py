"""From samples to packed rows: the same number of micro-batches for every rank, balanced in cost.

Invariants: every trained token is in exactly one row; all samples of a trajectory are in one row,
because some losses look at whole trajectories; a row is at most `budget` tokens long, unless one
trajectory alone is longer. What a rank has less is filled with rows that train nothing, so that
collectives stay aligned. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.batch import Float32s, MicroBatch, Minibatch
from actors.merge.prefix import Sample

# A filler is one token: nothing is predicted from it.
_FILLER_TOKENS = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSample:
    """A sample, what its trained tokens are credited with, and the loss weight of each.

    advantage: one number for all of them, or [T] float32, of which mask 0 is not read.
    loss_weight: of `aggregation`; 0 in rows that are not trained.
    Raises: ValueError when there are neither one nor T advantages.
    """

    sample: Sample
    advantage: float | Float32s
    loss_weight: float

    def __post_init__(self) -> None:
        shape = np.shape(self.advantage)
        if shape not in ((), (self.sample.num_tokens,)):
            raise ValueError(
                f"packing: trajectory {self.sample.trajectory_id} has advantages of shape {shape} "
                f"for a sample of {self.sample.num_tokens} tokens, expected one for each, or one "
                "number for all"
            )

    @property
    def token_advantages(self) -> Float32s:
        """[T] float32."""
        values = np.asarray(self.advantage, np.float32)
        return np.broadcast_to(values, (self.sample.num_tokens,))


@dataclass(slots=True)
class _Row:
    trajectories: list[int]
    num_tokens: int = 0

    def has_room(self, length: int, *, budget: int) -> bool:
        return not self.trajectories or self.num_tokens + length <= budget

    def add(self, index: int, length: int) -> None:
        self.trajectories.append(index)
        self.num_tokens += length


def split_trajectories(
    group_ids: Sequence[str], *, num_minibatches: int, seed: int, step: int
) -> list[list[int]]:
    """Deal a step's trajectories out to its updates, each group evenly over all of them.

    Args: group_ids: [N], the group of each trajectory. Returns: indices for each update, ascending
    in it; fewer updates than asked for where there are fewer trajectories, but at least one. The
    same seed and step give the same split.
    """
    rng = np.random.default_rng([seed, step])
    members: dict[str, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    groups = list(members.values())
    order = [int(i) for g in rng.permutation(len(groups)) for i in rng.permutation(groups[g])]
    num_parts = max(1, min(num_minibatches, len(order)))
    return [sorted(order[part::num_parts]) for part in range(num_parts)]


def place_trajectories(
    lengths: Sequence[Sequence[int]], *, num_ranks: int, budget: int, attention_tokens: int
) -> list[list[list[int]]]:
    """Choose rank and row for each trajectory.

    First fit decreasing within a rank, longest processing time first between ranks: the longest
    trajectory left goes to the rank of least cost that has room. Cost of a sample of L tokens:
    L + L^2 / attention_tokens. Rows a rank: the fewest with which all fit, the same for each.

    Args: lengths: the tokens of each sample of each trajectory.
    Returns: [num_ranks][rows][trajectories of the row], rows possibly empty.
    """
    totals = [sum(samples) for samples in lengths]
    costs = [sum(n + n * n / attention_tokens for n in samples) for samples in lengths]
    rows_each = max(1, -(-sum(totals) // (budget * num_ranks)))
    while True:
        placed = _try_place(totals, costs, num_ranks=num_ranks, rows_each=rows_each, budget=budget)
        if placed is not None:
            return placed
        rows_each += 1


def pack_minibatch(
    weighted: Sequence[WeightedSample], *, num_ranks: int, budget: int, attention_tokens: int
) -> list[Minibatch]:
    """Pack the samples of one update.

    Returns: the minibatch of each rank.
    Raises: ValueError, naming the trajectory, for an advantage or a weight that is not finite.
    """
    trajectories: dict[str, list[WeightedSample]] = {}
    for each in weighted:
        _check_finite(each)
        trajectories.setdefault(each.sample.trajectory_id, []).append(each)
    members = list(trajectories.values())
    placed = place_trajectories(
        [[each.sample.num_tokens for each in samples] for samples in members],
        num_ranks=num_ranks,
        budget=budget,
        attention_tokens=attention_tokens,
    )
    return [
        Minibatch(
            micro_batches=tuple(
                pack_row([each for index in row for each in members[index]]) if row else filler()
                for row in rows
            )
        )
        for rows in placed
    ]


def pack_row(weighted: Sequence[WeightedSample]) -> MicroBatch:
    """Lay samples one behind the other; the logits at p predict the token at p + 1.

    Example: prompt [1,2], response [3,4,5], mask [1,0,1], alone in its row: loss_positions [1,3],
    targets [3,5].
    """
    samples = [each.sample for each in weighted]
    lengths = np.array([sample.num_tokens for sample in samples], np.int32)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    token_ids = np.concatenate([sample.token_ids for sample in samples], dtype=np.int32)
    trained = np.flatnonzero(np.concatenate([sample.mask for sample in samples]))
    loss_weights = np.array([each.loss_weight for each in weighted], np.float32)
    row_of_token = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
    sample_of_trained = row_of_token[trained]
    return MicroBatch(
        token_ids=token_ids,
        position_ids=np.arange(token_ids.shape[0], dtype=np.int32) - starts[row_of_token],
        sample_lengths=lengths,
        loss_positions=(trained - 1).astype(np.int32),
        targets=token_ids[trained],
        behaviour_logprobs=np.concatenate([sample.logprobs for sample in samples])[trained],
        advantages=np.concatenate([each.token_advantages for each in weighted])[trained],
        sampled_versions=np.concatenate([sample.versions for sample in samples])[trained],
        loss_weights=loss_weights[sample_of_trained],
        trajectory_index=_number_trajectories(samples, sample_of_trained),
    )


def filler() -> MicroBatch:
    """A row that trains nothing."""
    no_ids, no_floats = np.empty(0, np.int32), np.empty(0, np.float32)
    return MicroBatch(
        token_ids=_FILLER_TOKENS,
        position_ids=_FILLER_TOKENS,
        sample_lengths=np.ones(1, np.int32),
        loss_positions=no_ids,
        targets=no_ids,
        behaviour_logprobs=no_floats,
        advantages=no_floats,
        sampled_versions=no_ids,
        loss_weights=no_floats,
        trajectory_index=no_ids,
    )


def _check_finite(weighted: WeightedSample) -> None:
    if np.isfinite(weighted.advantage).all() and np.isfinite(weighted.loss_weight):
        return
    raise ValueError(
        f"merge: trajectory {weighted.sample.trajectory_id} has advantage {weighted.advantage} and "
        f"loss weight {weighted.loss_weight}, expected finite ones; look at its rewards"
    )


def _number_trajectories(
    samples: Sequence[Sample], sample_of_trained: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Number the trajectories that have a trained token in the row: [M] int32, from 0, no gaps."""
    first_seen: dict[str, int] = {}
    of_sample = np.array(
        [first_seen.setdefault(sample.trajectory_id, len(first_seen)) for sample in samples]
    )
    _, numbers = np.unique(of_sample[sample_of_trained], return_inverse=True)
    return numbers.astype(np.int32)


def _try_place(
    totals: Sequence[int],
    costs: Sequence[float],
    *,
    num_ranks: int,
    rows_each: int,
    budget: int,
) -> list[list[list[int]]] | None:
    ranks = [[_Row([]) for _ in range(rows_each)] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for index in sorted(range(len(totals)), key=lambda i: (-totals[i], i)):
        for rank in sorted(range(num_ranks), key=loads.__getitem__):
            row = next((r for r in ranks[rank] if r.has_room(totals[index], budget=budget)), None)
            if row is not None:
                row.add(index, totals[index])
                loads[rank] += costs[index]
                break
        else:
            return None
    return [[row.trajectories for row in rows] for rows in ranks]
