"""Which rank and which row each trajectory goes to: prefixes kept together, ranks equal in cost.

Invariants: all samples of a trajectory are in one row; every rank has equally many rows; a row is
at most `budget` tokens long, counted after sharing, unless one trajectory alone is longer. What
shares a prefix is packed together as long as the ranks' costs stay equal: balance is worth more
than sharing, because the slowest rank is waited for. Called by `packing`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from actors.merge.prefix_runs import (
    Int64s,
    PrefixRun,
    Size,
    bundle_run,
    cut_run,
    sort_trajectories,
)
from actors.types import TokenIds

BALANCED = 1.05
"""Largest cost of a rank over the mean that is good enough."""
_MAX_MOVES = 64
_CANDIDATES = 16


def place(
    trajectories: Sequence[Sequence[TokenIds]],
    *,
    num_ranks: int,
    budget: int,
    attention_tokens: int,
    share_prefixes: bool,
) -> list[list[list[int]]]:
    """Choose rank and row for each trajectory.

    Trajectories are sorted by their first sample and cut into bundles where the least is shared,
    until each fits a row and a rank's part of the cost. Bundles are placed longest processing time
    first: the costliest one left goes to the row with room after which its rank costs least, what
    it shares with that row counted. Where the ranks then differ by more than BALANCED, single
    trajectories are moved from the costliest rank to the cheapest; where that does not do, smaller
    bundles are tried, and the placement whose costliest rank costs least is kept. Rows a rank: the
    fewest with which all bundles fit.

    Args: trajectories: the samples of each, as token ids.
    Returns: [num_ranks][rows][trajectories of the row], rows possibly empty.
    """
    if not trajectories:
        return [[[]] for _ in range(num_ranks)]
    run = sort_trajectories(
        trajectories, attention_tokens=attention_tokens, share_prefixes=share_prefixes
    )
    best: _Placement | None = None
    num_bundles = 0
    limit = bundle_run(run, [0, len(run.order)]).cost[0] / num_ranks
    while num_bundles < len(trajectories):
        bounds = cut_run(run, max_tokens=budget, max_cost=limit)
        limit /= 2
        if len(bounds) - 1 == num_bundles:
            continue
        num_bundles = len(bounds) - 1
        placement = _place_bundles(run, bounds, num_ranks=num_ranks, budget=budget)
        _even_out(run, placement, budget=budget)
        if best is None or max(placement.costs) < max(best.costs):
            best = placement
        if placement.is_balanced:
            break
    assert best is not None
    return [[[run.order[i] for i in row] for row in rank] for rank in best.members]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """members: [ranks][rows], ascending numbers in the run. tokens: [ranks][rows]."""

    members: list[list[list[int]]]
    tokens: list[list[int]]
    costs: list[float]

    @property
    def is_balanced(self) -> bool:
        return max(self.costs) <= BALANCED * sum(self.costs) / len(self.costs)


def _place_bundles(
    run: PrefixRun, bounds: Sequence[int], *, num_ranks: int, budget: int
) -> _Placement:
    bundles = bundle_run(run, bounds)
    num_tokens = int((bundles.num_tokens - bundles.shared).sum())
    rows_each = max(1, -(-num_tokens // (budget * num_ranks)))
    while True:
        placed = _try_place(bundles, num_ranks=num_ranks, rows_each=rows_each, budget=budget)
        if placed is not None:
            break
        rows_each += 1
    parts = list(pairwise(bounds))
    members = [
        [sorted(i for bundle in row for i in range(*parts[bundle])) for row in rank]
        for rank in placed.members
    ]
    return _Placement(members=members, tokens=placed.tokens, costs=placed.costs)


def _try_place(
    bundles: PrefixRun, *, num_ranks: int, rows_each: int, budget: int
) -> _Placement | None:
    """Place bundles; None where they do not all fit."""
    num_rows = num_ranks * rows_each
    members: list[list[int]] = [[] for _ in range(num_rows)]
    tokens, rank_of = np.zeros(num_rows, np.int64), np.arange(num_rows) // rows_each
    costs = np.zeros(num_ranks)
    # What each bundle has in common with each row.
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
    return _Placement(
        members=[members[rank * rows_each :][:rows_each] for rank in range(num_ranks)],
        tokens=tokens.reshape(num_ranks, rows_each).tolist(),
        costs=costs.tolist(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """One trajectory's way from a row of the costliest rank to a row of the cheapest.

    left, added: tokens and cost that the one row loses and the other gains.
    """

    member: int
    source: int
    target: int
    left: Size
    added: Size


def _even_out(run: PrefixRun, placement: _Placement, *, budget: int) -> None:
    """Move trajectories from the costliest rank to the cheapest that gains by it, in place."""
    for _ in range(_MAX_MOVES):
        if placement.is_balanced:
            return
        *others, high = sorted(range(len(placement.costs)), key=placement.costs.__getitem__)
        is_moved = any(_improve(run, placement, high, low, budget=budget) for low in others)
        if not is_moved:
            return


def _improve(run: PrefixRun, placement: _Placement, high: int, low: int, *, budget: int) -> bool:
    """Make the best move from one rank to another; False where none lowers the higher cost."""
    costs = placement.costs

    def cost_after(move: _Move) -> float:
        return max(costs[high] - move.left.cost, costs[low] + move.added.cost)

    moves = _moves(run, placement, high, low, budget=budget)
    best = min(moves, key=cost_after, default=None)
    if best is None or cost_after(best) >= costs[high]:
        return False
    placement.members[high][best.source].remove(best.member)
    insort(placement.members[low][best.target], best.member)
    placement.tokens[high][best.source] -= best.left.num_tokens
    placement.tokens[low][best.target] += best.added.num_tokens
    costs[high] -= best.left.cost
    costs[low] += best.added.cost
    return True


def _moves(
    run: PrefixRun, placement: _Placement, high: int, low: int, *, budget: int
) -> list[_Move]:
    """The moves with room that would come nearest to halving the difference."""
    half = (placement.costs[high] - placement.costs[low]) / 2
    leaving = [
        (run.added([other for other in row if other != member], member), member, source)
        for source, row in enumerate(placement.members[high])
        for member in row
    ]
    leaving.sort(key=lambda each: (abs(each[0].cost - half), each[1]))
    moves = []
    for left, member, source in leaving[:_CANDIDATES]:
        for target, row in enumerate(placement.members[low]):
            added = run.added(row, member)
            if not row or placement.tokens[low][target] + added.num_tokens <= budget:
                moves.append(
                    _Move(member=member, source=source, target=target, left=left, added=added)
                )
    return moves
