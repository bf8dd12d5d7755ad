"""Trajectories in the order of their prefixes, and what each has in common with the others.

In that order what two trajectories share is the least that any two neighbours between them share;
so one number between neighbours tells what any selection of them takes in a row. Of trajectories
with several samples only the first samples' common prefix is counted: they may share more, never
less. Pure; called by `placing`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actors.merge.prefix_tree import common_length, prefix_order
from actors.types import TokenIds

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """num_tokens: after sharing. cost: in tokens that attend to nothing."""

    num_tokens: int
    cost: float


def measure(samples: Sequence[TokenIds], *, attention_tokens: int, share_prefixes: bool) -> Size:
    """Count what samples take in one row.

    Cost of a sample of L tokens of which the first K are shared: (L - K) + (L^2 - K^2) /
    attention_tokens, that is the linear layers, and attention to every token before.

    Example: [1, 2, 3] and [1, 2, 4, 5] with attention_tokens 10: 5 tokens, cost
    3 + .9 + 2 + 1.2 = 7.1; without sharing 7 tokens, cost 3 + .9 + 4 + 1.6 = 9.5.
    """
    num_tokens, squares = 0, 0
    previous: TokenIds = np.empty(0, np.int32)
    for index in prefix_order(samples) if share_prefixes else range(len(samples)):
        ids = samples[index]
        shared = common_length(previous, ids) if share_prefixes else 0
        num_tokens += ids.shape[0] - shared
        squares += ids.shape[0] ** 2 - shared**2
        previous = ids
    return Size(num_tokens=num_tokens, cost=num_tokens + squares / attention_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRun:
    """Neighbours in prefix order: trajectories, or bundles of them. [N] arrays.

    num_tokens, cost: of each alone. shared: tokens in common with the one before, 0 for the first.
    inner: the least that two neighbours inside a bundle share.
    """

    order: list[int]
    num_tokens: Int64s
    cost: Float64s
    shared: Int64s
    inner: Int64s
    attention_tokens: int

    def cost_of(self, shared: Int64s) -> Float64s:
        """What sharing that many leading tokens saves."""
        return shared + shared.astype(np.float64) ** 2 / self.attention_tokens

    def shared_with(self, number: int) -> Int64s:
        """[N], the tokens that each has in common with one of them: the least on the way to it."""
        shared = np.empty_like(self.shared)
        ahead = self.shared[number + 1 :].copy()
        np.minimum(ahead[1:], self.inner[number + 1 : -1], out=ahead[1:])
        shared[number + 1 :] = np.minimum.accumulate(ahead)
        behind = self.shared[1 : number + 1][::-1].copy()
        np.minimum(behind[1:], self.inner[1:number][::-1], out=behind[1:])
        shared[:number] = np.minimum.accumulate(behind)[::-1]
        shared[number] = self.num_tokens[number]
        return shared

    def between(self, left: int, right: int) -> int:
        """Tokens in common, left < right."""
        shared = int(self.shared[left + 1 : right + 1].min())
        return min(shared, int(self.inner[left + 1 : right].min(initial=shared)))

    def added(self, others: Sequence[int], one: int) -> Size:
        """What one of them adds to a row of others, which ascend: itself less what it shares."""
        place = bisect_left(others, one)
        before, after = others[place - 1 : place], others[place : place + 1]
        shared = [self.between(other, one) for other in before]
        shared += [self.between(one, other) for other in after]
        bridged = [self.between(before[0], after[0])] if before and after else []
        saved = self.cost_of(np.array(shared, np.int64)).sum()
        unsaved = self.cost_of(np.array(bridged, np.int64)).sum()
        return Size(
            num_tokens=int(self.num_tokens[one]) - sum(shared) + sum(bridged),
            cost=float(self.cost[one] - saved + unsaved),
        )


def sort_trajectories(
    trajectories: Sequence[Sequence[TokenIds]], *, attention_tokens: int, share_prefixes: bool
) -> PrefixRun:
    """Of trajectories only what their first samples share is counted: more may be, never less."""
    order = prefix_order([samples[0] for samples in trajectories])
    firsts = [trajectories[index][0] for index in order]
    shared = [common_length(*pair) if share_prefixes else 0 for pair in pairwise(firsts)]
    sizes = [
        measure(
            trajectories[index], attention_tokens=attention_tokens, share_prefixes=share_prefixes
        )
        for index in order
    ]
    return PrefixRun(
        order=order,
        num_tokens=np.array([size.num_tokens for size in sizes], np.int64),
        cost=np.array([size.cost for size in sizes], np.float64),
        shared=np.array([0, *shared], np.int64),
        inner=np.full(len(order), np.iinfo(np.int64).max),
        attention_tokens=attention_tokens,
    )


def cut_run(run: PrefixRun, *, max_tokens: int, max_cost: float) -> list[int]:
    """Cut where nothing is shared; then, while a part is too large, where the least is shared.

    Among equally good places the one nearest to the middle is taken.
    Returns: the bounds of the parts, from 0 to N.
    """
    bounds = [*np.flatnonzero(run.shared == 0).tolist(), len(run.order)]
    pending = list(pairwise(bounds))
    saved = run.cost_of(run.shared)
    while pending:
        start, stop = pending.pop()
        inner = run.shared[start + 1 : stop]
        num_tokens = run.num_tokens[start:stop].sum() - inner.sum()
        cost = run.cost[start:stop].sum() - saved[start + 1 : stop].sum()
        if stop - start == 1 or (num_tokens <= max_tokens and cost <= max_cost):
            continue
        places = np.flatnonzero(inner == inner.min()) + start + 1
        middle = int(places[np.abs(2 * places - start - stop).argmin()])
        bounds.append(middle)
        pending += [(start, middle), (middle, stop)]
    return sorted(bounds)


def bundle_run(run: PrefixRun, bounds: Sequence[int]) -> PrefixRun:
    """Put the trajectories between two bounds together; `order` then numbers the bundles."""
    starts = np.array(bounds[:-1])
    inside = run.shared.copy()
    inside[starts] = 0
    least = inside.copy()
    least[starts] = np.iinfo(np.int64).max
    return PrefixRun(
        order=list(range(len(starts))),
        num_tokens=np.add.reduceat(run.num_tokens - inside, starts),
        cost=np.add.reduceat(run.cost - run.cost_of(inside), starts),
        shared=run.shared[starts],
        inner=np.minimum.reduceat(least, starts),
        attention_tokens=run.attention_tokens,
    )
