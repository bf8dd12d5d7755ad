"""Pack samples into rows, so that all ranks have equally many rows and about the same cost.

Each row becomes one micro-batch. Invariants: every trained token is in exactly one row. All samples
of a trajectory are in one row, because some losses need whole trajectories. A row has at most
`budget` tokens, unless a single trajectory is longer. A prefix that samples share counts once.

Trajectories with a common prefix share a row only if the ranks' costs stay equal, because a step
waits for the slowest rank. A rank with fewer rows gets padding rows, which train nothing, so that
all ranks enter the same collectives. `deal_rows` is a simpler rule, for rows without a policy loss.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.batch import Float32s, Int64s, MicroBatch, Minibatch, ValueRow, padding_row
from actors.merge.prefix_sharing import (
    SortedItems,
    build_flat,
    build_forest,
    bundle_items,
    cut_items,
    row_experts,
    sort_trajectories,
)
from actors.types import Sample, TokenIds

BALANCED = 1.05
"""Ranks count as balanced if the costliest rank costs at most this many times the mean of all
ranks.
"""
# Bounds on the work of `_even_out`: the number of all moves, and of trajectories tried per move.
_MAX_MOVES = 64
_CANDIDATES = 16
_Number = TypeVar("_Number", bound=np.generic)


def _no_floats() -> Float32s:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSample:
    """A sample, and what the loss needs for its M trained tokens, in the order of the tokens."""

    sample: Sample
    advantage: float | NDArray[np.float64] | Float32s
    """The tokens' advantages: [M] float, or one number for all M tokens."""
    loss_weight: float
    """The weight of each trained token (`trajectory_weights`); 0 in rows that are not trained."""
    temperature: float = 1.0
    """Temperature at which the sample's tokens were sampled."""
    old_values: Float32s = field(default_factory=_no_floats)
    """[M] float32, the critic's values of the states; [0] without a critic."""
    value_targets: Float32s = field(default_factory=_no_floats)
    """[M] float32, the values that the critic is trained to predict; [0] without a critic."""


def split_trajectories(
    group_ids: Sequence[str], *, num_minibatches: int, seed: int, step: int
) -> list[list[int]]:
    """Distribute a step's trajectories to its updates, each group evenly over all updates.

    Args: group_ids: [N], the group of each trajectory.
    Returns: ascending indices for each update. If there are fewer trajectories than requested
        updates, there are as many updates as trajectories, but at least one. The same seed and step
        give the same split.
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

    share_prefixes: whether a prefix that samples of a row have in common is computed only once.
    Returns: a minibatch for each rank.
    """
    members: dict[str, list[WeightedSample]] = {}
    for each in weighted:
        members.setdefault(each.sample.trajectory_id, []).append(each)
    trajectories = list(members.values())
    assigned = assign_rows(
        [[each.sample.token_ids for each in samples] for samples in trajectories],
        num_ranks=num_ranks,
        budget=budget,
        attention_tokens=attention_tokens,
        share_prefixes=share_prefixes,
    )
    return [
        tuple(
            pack_row([w for i in row for w in trajectories[i]], share_prefixes=share_prefixes)
            for row in rows
        )
        for rows in assigned
    ]


def pack_values(
    weighted: Sequence[WeightedSample], *, num_ranks: int, budget: int
) -> list[tuple[ValueRow, ...]]:
    """Pack one critic update; each trained token weighs 1 / (trained tokens of all ranks).

    Args: weighted: samples with old_values and value_targets.
    Returns: the rows of each rank.
    """
    weight = 1 / max(1, sum(each.sample.num_trained for each in weighted))
    dealt = deal_rows(
        [each.sample.num_tokens for each in weighted], num_ranks=num_ranks, budget=budget
    )
    return [
        tuple(_value_row([weighted[i] for i in row], weight=weight) for row in rows)
        for rows in dealt
    ]


def _value_row(weighted: Sequence[WeightedSample], *, weight: float) -> ValueRow:
    # A padding row has no samples.
    none = _no_floats()
    return ValueRow(
        row=pack_row([unrouted(each.sample, loss_weight=weight) for each in weighted]),
        old_values=np.concatenate([none, *(each.old_values for each in weighted)]),
        value_targets=np.concatenate([none, *(each.value_targets for each in weighted)]),
    )


def unrouted(
    sample: Sample, *, loss_weight: float = 0.0, temperature: float = 1.0
) -> WeightedSample:
    """Prepare a sample for a reference or a critic, without the sample's expert records.

    The trained policy repeats the recorded choices of experts; a reference and a critic do not.
    """
    return WeightedSample(
        sample=sample.without_experts(),
        advantage=0.0,
        loss_weight=loss_weight,
        temperature=temperature,
    )


def pack_row(weighted: Sequence[WeightedSample], *, share_prefixes: bool = True) -> MicroBatch:
    """Lay samples out in one row; the logits at a token predict the next token of its sample.

    Without samples the row is `padding_row`.
    Example: prompt [1,2], response [3,4,5], mask [1,0,1], alone in its row: loss_positions [1,3],
        targets [3,5].
    """
    if not weighted:
        return padding_row()
    samples = [each.sample for each in weighted]
    build = build_forest if share_prefixes else build_flat
    forest = build([sample.token_ids for sample in samples])
    trained = [np.flatnonzero(sample.mask) for sample in samples]
    counts = [positions.shape[0] for positions in trained]
    sample_of_trained = np.repeat(np.arange(len(samples)), counts)
    advantages = [
        np.broadcast_to(np.asarray(each.advantage, np.float32), (count,))
        for each, count in zip(weighted, counts, strict=True)
    ]
    loss_weights = np.array([each.loss_weight for each in weighted], np.float32)
    temperatures = np.array([each.temperature for each in weighted], np.float32)
    experts, num_overruled = row_experts(samples, forest)

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
        advantages=np.concatenate(advantages),
        sampled_versions=of_trained(sample.versions for sample in samples),
        loss_weights=loss_weights[sample_of_trained],
        trajectory_index=_number_trajectories(samples, sample_of_trained),
        temperatures=temperatures[sample_of_trained],
        experts=experts,
        num_overruled_records=num_overruled,
    )


def _number_trajectories(
    samples: Sequence[Sample], sample_of_trained: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the number of each trained token's trajectory, counted from 0 within the row: [M]."""
    first_seen: dict[str, int] = {}
    of_sample = np.array(
        [first_seen.setdefault(sample.trajectory_id, len(first_seen)) for sample in samples]
    )
    # Trajectories without trained tokens get no number.
    _, numbers = np.unique(of_sample[sample_of_trained], return_inverse=True)
    return numbers.astype(np.int32)


def deal_rows(lengths: Sequence[int], *, num_ranks: int, budget: int) -> list[list[list[int]]]:
    """Put samples into rows of at most `budget` tokens, longest first, and deal the rows to ranks.

    Used for rows without a policy loss, which are not split into updates and may separate the
    samples of a trajectory. A sample longer than the budget gets a row of its own.

    Args: lengths: tokens of each sample.
    Returns: [num_ranks][rows][indices of the row's samples]; the same number of rows for each rank,
        some empty.
    Example: lengths [4, 9, 5], 2 ranks, budget 10 -> [[[1]], [[2, 0]]]
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, left in enumerate(free) if lengths[index] <= left), None)
        if row is None:
            rows.append([index])
            free.append(budget - lengths[index])
        else:
            rows[row].append(index)
            free[row] -= lengths[index]
    num_rows = max(1, -(-len(rows) // num_ranks))
    rows += [[] for _ in range(num_rows * num_ranks - len(rows))]
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def assign_rows(
    trajectories: Sequence[Sequence[TokenIds]],
    *,
    num_ranks: int,
    budget: int,
    attention_tokens: int,
    share_prefixes: bool,
) -> list[list[list[int]]]:
    """Choose a rank and a row for each trajectory, so that all ranks have about the same cost.

    1. Sort the trajectories by their first sample, so that trajectories with a common prefix become
       neighbours. Cut the sorted list into bundles, where the neighbours share least. Each bundle
       fits into a row and costs at most one rank's share of the total cost.
    2. Put the bundles into rows, the costliest first. Of the rows with room for a bundle, take the
       row whose rank then has the lowest cost. A prefix that the row already has costs nothing.
       Each rank has as few rows as possible.
    3. If the ranks' costs differ by more than BALANCED, move single trajectories from the costliest
       rank to the cheapest.
    4. If the costs still differ by more than BALANCED, repeat steps 1 to 3 with smaller bundles.
       Keep the assignment whose costliest rank costs least.

    Args: trajectories: for each trajectory, its samples as token ids.
    Returns: [num_ranks][rows][trajectories of the row], rows possibly empty.
    """
    if not trajectories:
        return [[[]] for _ in range(num_ranks)]
    items = sort_trajectories(
        trajectories, attention_tokens=attention_tokens, share_prefixes=share_prefixes
    )
    best: _Assignment | None = None
    num_bundles = 0
    limit = bundle_items(items, [0, len(items.order)]).cost[0] / num_ranks
    while num_bundles < len(trajectories):
        bounds = cut_items(items, max_tokens=budget, max_cost=limit)
        limit /= 2
        if len(bounds) - 1 == num_bundles:
            continue
        num_bundles = len(bounds) - 1
        assignment = _assign_bundles(items, bounds, num_ranks=num_ranks, budget=budget)
        _even_out(items, assignment, budget=budget)
        if best is None or max(assignment.costs) < max(best.costs):
            best = assignment
        if assignment.is_balanced:
            break
    assert best is not None
    return [[[items.order[i] for i in row] for row in rank] for rank in best.members]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assignment:
    """An assignment of trajectories to rows; `_even_out` changes it in place."""

    members: list[list[list[int]]]
    """[ranks][rows][trajectories of the row], ascending indices into the sorted items."""
    tokens: list[list[int]]
    """[ranks][rows], the tokens of each row after sharing prefixes."""
    costs: list[float]
    """[ranks], the cost of each rank, in the unit of `Size.cost`."""

    @property
    def is_balanced(self) -> bool:
        return max(self.costs) <= BALANCED * sum(self.costs) / len(self.costs)


def _assign_bundles(
    items: SortedItems, bounds: Sequence[int], *, num_ranks: int, budget: int
) -> _Assignment:
    bundles = bundle_items(items, bounds)
    num_tokens = int((bundles.num_tokens - bundles.shared).sum())
    rows_each = max(1, -(-num_tokens // (budget * num_ranks)))
    while True:
        assigned = _try_assign(bundles, num_ranks=num_ranks, rows_each=rows_each, budget=budget)
        if assigned is not None:
            break
        rows_each += 1
    parts = list(pairwise(bounds))
    members = [
        [sorted(i for bundle in row for i in range(*parts[bundle])) for row in rank]
        for rank in assigned.members
    ]
    return _Assignment(members=members, tokens=assigned.tokens, costs=assigned.costs)


def _try_assign(
    bundles: SortedItems, *, num_ranks: int, rows_each: int, budget: int
) -> _Assignment | None:
    """Assign each bundle to the row whose rank then costs least; None if one fits in no row."""
    num_rows = num_ranks * rows_each
    members: list[list[int]] = [[] for _ in range(num_rows)]
    tokens, rank_of = np.zeros(num_rows, np.int64), np.arange(num_rows) // rows_each
    costs = np.zeros(num_ranks)
    # Number of leading tokens that each bundle has in common with each row.
    shared: Int64s = np.zeros((num_rows, len(bundles.order)), np.int64)
    for bundle in np.argsort(-bundles.cost, kind="stable").tolist():
        known = shared[:, bundle]
        new_tokens = tokens + bundles.num_tokens[bundle] - known
        new_costs = costs[rank_of] + bundles.cost[bundle] - bundles.cost_of(known)
        new_costs[(tokens > 0) & (new_tokens > budget)] = np.inf
        row = int(new_costs.argmin())
        if math.isinf(new_costs[row]):
            return None
        members[row].append(bundle)
        tokens[row], costs[rank_of[row]] = new_tokens[row], new_costs[row]
        np.maximum(shared[row], bundles.shared_with(bundle), out=shared[row])
    return _Assignment(
        members=[members[rank * rows_each :][:rows_each] for rank in range(num_ranks)],
        tokens=tokens.reshape(num_ranks, rows_each).tolist(),
        costs=costs.tolist(),
    )


def _even_out(items: SortedItems, assignment: _Assignment, *, budget: int) -> None:
    """Move trajectories, in place, from the costliest rank to cheaper ranks to balance costs."""
    for _ in range(_MAX_MOVES):
        if assignment.is_balanced:
            return
        *others, high = sorted(range(len(assignment.costs)), key=assignment.costs.__getitem__)
        is_moved = any(_improve(items, assignment, high, low, budget=budget) for low in others)
        if not is_moved:
            return


def _improve(
    items: SortedItems, assignment: _Assignment, high: int, low: int, *, budget: int
) -> bool:
    """Move a trajectory to rank `low` if that lowers the higher cost; return whether one moved."""
    costs = assignment.costs
    half = (costs[high] - costs[low]) / 2
    leaving = [
        (items.added([other for other in row if other != member], member), member, source)
        for source, row in enumerate(assignment.members[high])
        for member in row
    ]
    # Moving this much cost would make both ranks equal.
    leaving.sort(key=lambda each: (abs(each[0].cost - half), each[1]))
    best, best_cost = None, costs[high]
    for removed, member, source in leaving[:_CANDIDATES]:
        for target, row in enumerate(assignment.members[low]):
            added = items.added(row, member)
            fits = not row or assignment.tokens[low][target] + added.num_tokens <= budget
            cost = max(costs[high] - removed.cost, costs[low] + added.cost)
            if fits and cost < best_cost:
                best, best_cost = (member, source, target, removed, added), cost
    if best is None:
        return False
    member, source, target, removed, added = best
    assignment.members[high][source].remove(member)
    insort(assignment.members[low][target], member)
    assignment.tokens[high][source] -= removed.num_tokens
    assignment.tokens[low][target] += added.num_tokens
    costs[high] -= removed.cost
    costs[low] += added.cost
    return True
