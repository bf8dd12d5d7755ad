"""Measure the share of each trajectory in an update's gradient.

The update's gradient G is the sum of its trajectories' gradients g_i, because the loss is a sum
over tokens. The first pass gives every norm |g_i| and adds up G. The second pass computes every g_i
again, and gives its dot product with G. So only two gradients are kept: G and the sum over the
current group. To keep every g_i would take too much memory. Random projections would save one pass,
but give every dot product an error of about |g_i||G| / sqrt(dimensions). Letters: [N] rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from actors.trainer.sharded_model import squared_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """The part g of an update's gradient G that comes from one row or one group."""

    norm: float
    """|g|, the Euclidean norm of the part."""
    dot: float
    """g . G, the dot product of the part with the whole gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGradient:
    """An update's gradient G, before clipping, and its parts."""

    norm: float
    """|G|, the Euclidean norm of the gradient."""
    rows: tuple[GradientPart, ...]
    """[N], the part of each row; their dot products add up to |G|^2."""
    groups: Mapping[str, GradientPart]
    """The part of each group, by the group's id."""


def split_gradient(
    group_ids: Sequence[str], gradient: Callable[[int], list[Tensor]]
) -> SplitGradient:
    """Measure the gradient of each row, of each group and of all rows together.

    Args: group_ids: [N], the group of each row; the rows of a group are adjacent. gradient:
    computes the gradient of a row; it is called twice for each row, and its result may be changed
    in place.
    """
    norms: list[float] = []
    group_norms: dict[str, float] = {}
    whole: list[Tensor] = []
    for group_id, indices in groupby(range(len(group_ids)), key=group_ids.__getitem__):
        assert group_id not in group_norms, "the rows of a group are adjacent"
        of_group: list[Tensor] = []
        for index in indices:
            own = gradient(index)
            norms.append(_norm(own))
            of_group = _add(of_group, own)
        group_norms[group_id] = _norm(of_group)
        whole = _add(whole, of_group)
    dots = [_dot(gradient(index), whole) for index in range(len(group_ids))]
    of_groups = dict.fromkeys(group_norms, 0.0)
    for group_id, dot in zip(group_ids, dots, strict=True):
        of_groups[group_id] += dot
    return SplitGradient(
        norm=_norm(whole),
        rows=tuple(GradientPart(norm=norm, dot=dot) for norm, dot in zip(norms, dots, strict=True)),
        groups={
            group_id: GradientPart(norm=norm, dot=of_groups[group_id])
            for group_id, norm in group_norms.items()
        },
    )


def _add(total: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    if not total:
        return more
    assert len(total) == len(more), "gradients of one model have one layout"
    torch._foreach_add_(total, more)
    return total


def _norm(gradient: list[Tensor]) -> float:
    return math.sqrt(float(squared_norm(gradient, device=torch.device("cpu"))))


def _dot(left: list[Tensor], right: list[Tensor]) -> float:
    pairs = zip(left, right, strict=True)
    dots = [torch.dot(a.flatten(), b.flatten()) for a, b in pairs]
    return float(torch.stack(dots).double().sum()) if dots else 0.0
