"""Rows that carry no policy loss: to be scored, or to train a critic. Equally many for each rank.

Simpler than the packing of training rows: nothing is split into updates, and no trajectory has to
stay together. Called by `scoring` and `value_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal_rows(lengths: Sequence[int], *, num_ranks: int, budget: int) -> list[list[list[int]]]:
    """Put samples into rows of at most `budget` tokens, longest first, and deal these to ranks.

    A sample longer than the budget gets a row of its own.

    Args: lengths: tokens of each sample.
    Returns: [num_ranks][rows][samples of the row]; as many rows for each rank, some empty.
    Example: lengths [4, 9, 5], 2 ranks, budget 10 -> [[[1]], [[2, 0]]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((r for r, left in enumerate(room) if lengths[index] <= left), None)
        if place is None:
            rows.append([index])
            room.append(budget - lengths[index])
        else:
            rows[place].append(index)
            room[place] -= lengths[index]
    num_rows = max(1, -(-len(rows) // num_ranks))
    rows += [[] for _ in range(num_rows * num_ranks - len(rows))]
    return [rows[rank::num_ranks] for rank in range(num_ranks)]
