"""From samples to packed rows: the same number of micro-batches for every rank, balanced in cost.

Invariants: every trained token is in exactly one row; all samples of a trajectory are in one row,
because some losses look at whole trajectories; a row is at most `budget` tokens long, unless one
trajectory alone is longer. What a rank has less is filled with rows that train nothing, so that
collectives stay aligned. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.batch import Float32s, MicroBatch, Minibatch
from actors.merge.placing import place
from actors.merge.prefix_tree import build_flat, build_forest
from actors.merge.row_experts import row_experts
from actors.types import Sample

_Number = TypeVar("_Number", bound=np.generic)
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


def pack_minibatch(
    weighted: Sequence[WeightedSample],
    *,
    num_ranks: int,
    budget: int,
    attention_tokens: int,
    share_prefixes: bool = True,
) -> list[Minibatch]:
    """Pack the samples of one update.

    share_prefixes: whether a row computes what its samples have in common once.
    Returns: the minibatch of each rank.
    Raises: ValueError, naming the trajectory, for an advantage or a weight that is not finite.
    """
    members: dict[str, list[WeightedSample]] = {}
    for each in weighted:
        _check_finite(each)
        members.setdefault(each.sample.trajectory_id, []).append(each)
    trajectories = list(members.values())
    placed = place(
        [[each.sample.token_ids for each in samples] for samples in trajectories],
        num_ranks=num_ranks,
        budget=budget,
        attention_tokens=attention_tokens,
        share_prefixes=share_prefixes,
    )
    return [
        Minibatch(
            micro_batches=tuple(
                pack_row([w for i in row for w in trajectories[i]], share_prefixes=share_prefixes)
                if row
                else filler()
                for row in rows
            )
        )
        for rows in placed
    ]


def pack_row(weighted: Sequence[WeightedSample], *, share_prefixes: bool = True) -> MicroBatch:
    """Lay samples out in one row; the logits at a token predict the next one on its path.

    Example: prompt [1,2], response [3,4,5], mask [1,0,1], alone in its row: loss_positions [1,3],
    targets [3,5].
    Raises: ValueError, naming a trajectory, for an empty sample, or expert records of different
    shapes.
    """
    empty = [each.sample.trajectory_id for each in weighted if not each.sample.num_tokens]
    if empty or not weighted:
        whose = f"a sample without tokens, of trajectory {empty[0]}" if empty else "no sample"
        raise ValueError(f"merge: got {whose} for a row, expected a token or more; evict it")
    samples = [each.sample for each in weighted]
    build = build_forest if share_prefixes else build_flat
    forest = build([sample.token_ids for sample in samples])
    trained = [np.flatnonzero(sample.mask) for sample in samples]
    sample_of_trained = np.repeat(np.arange(len(samples)), [each.shape[0] for each in trained])
    loss_weights = np.array([each.loss_weight for each in weighted], np.float32)
    experts = row_experts(samples, forest)

    def of_trained(columns: Iterable[NDArray[_Number]], *, ahead: int = 0) -> NDArray[_Number]:
        pairs = zip(columns, trained, strict=True)
        return np.concatenate([column[positions - ahead] for column, positions in pairs])

    return MicroBatch(
        token_ids=forest.token_ids,
        position_ids=forest.position_ids,
        segment_lengths=forest.segment_lengths,
        segment_parents=forest.segment_parents,
        loss_positions=of_trained(forest.paths, ahead=1),
        targets=of_trained(sample.token_ids for sample in samples),
        behaviour_logprobs=of_trained(sample.logprobs for sample in samples),
        advantages=of_trained(each.token_advantages for each in weighted),
        sampled_versions=of_trained(sample.versions for sample in samples),
        loss_weights=loss_weights[sample_of_trained],
        trajectory_index=_number_trajectories(samples, sample_of_trained),
        experts=experts.records,
        num_overruled_records=experts.num_overruled,
    )


def filler() -> MicroBatch:
    """A row that trains nothing."""
    no_ids, no_floats = np.empty(0, np.int32), np.empty(0, np.float32)
    return MicroBatch(
        token_ids=_FILLER_TOKENS,
        position_ids=_FILLER_TOKENS,
        segment_lengths=np.ones(1, np.int32),
        segment_parents=np.full(1, -1, np.int32),
        loss_positions=no_ids,
        targets=no_ids,
        behaviour_logprobs=no_floats,
        advantages=no_floats,
        sampled_versions=no_ids,
        loss_weights=no_floats,
        trajectory_index=no_ids,
    )


def _check_finite(weighted: WeightedSample) -> None:
    # As the trainer gets them: what float32 cannot hold is infinite there.
    with np.errstate(over="ignore"):
        advantages = np.atleast_1d(weighted.advantage).astype(np.float32)
        weight = np.float32(weighted.loss_weight)
    wrong = advantages[~np.isfinite(advantages)]
    if not wrong.size and np.isfinite(weight) and weight >= 0:
        return
    shown = wrong[0] if wrong.size else advantages[0]
    raise ValueError(
        f"merge: trajectory {weighted.sample.trajectory_id} has advantage {shown} and loss weight "
        f"{weight}, expected finite float32 and a weight of 0 or more; look at its rewards"
    )


def _number_trajectories(
    samples: Sequence[Sample], sample_of_trained: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Number the trajectories that have a trained token in the row: [M] int32, from 0, no gaps."""
    first_seen: dict[str, int] = {}
    of_sample = np.array(
        [first_seen.setdefault(sample.trajectory_id, len(first_seen)) for sample in samples]
    )
    _, numbers = np.unique(of_sample[sample_of_trained], return_inverse=True)
    return numbers.astype(np.int32)
