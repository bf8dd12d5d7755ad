"""Format an explanation as a table of at most 120 columns, and as a JSON document. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from actors.journal.files import TrajectoryEntry
from service.explain.order import Order
from service.explain.recompute import Contribution, Explanation, GroupContribution, Share
from service.inspect.view import advantage, number
from service.visible import visible_text

# Share of the recorded norm. The order of addition alone changes 1e-5 in float32, 1e-2 in bfloat16.
AGREES_WITHIN = 0.02
_COLUMNS = (
    "trajectory",
    "own",
    "norm",
    "share",
    "cosine",
    "return",
    "advantage",
    "tokens",
    "outcome",
)
_WIDTHS = {"trajectory": 24, "group": 24, "advantage": 16, "task": 40}
_ROW = TypeVar("_ROW", Contribution, GroupContribution)


def ranked(rows: Sequence[_ROW], by: Order) -> list[_ROW]:
    """Sort rows by size, the largest first, after all rows with a number that is not finite.

    One row that is not finite makes the whole update not finite. Groups are always sorted by share
    or norm.
    """

    def key(row: _ROW) -> float:
        value = row.share.norm
        if by is Order.SHARE and math.isfinite(row.share.share):
            value = row.share.share
        elif by is Order.OWN and isinstance(row, Contribution):
            value = row.own_norm
        return -value if math.isfinite(value) else -math.inf

    return sorted(rows, key=key)


def describe(found: Explanation, *, by: Order, top: int) -> str:
    """Return lines for people: the weights, both norms, and the first groups and trajectories."""
    step = found.source.step.step
    shown = ranked(found.trajectories, by)[:top]
    lines = [
        f"step {step}: {len(found.trajectories)} trajectories of {len(found.groups)} groups "
        f"trained, {_plural(found.num_updates, 'update')}, on {found.device}",
        *notes(found),
        "",
        *_table(
            ("group", "norm", "share", "cosine", "trained", "task"),
            [_group_row(row) for row in ranked(found.groups, by)[: max(1, min(top, 5))]],
        ),
        "",
        *_table(
            _COLUMNS,
            [_row(row) for row in shown],
        ),
        "",
        *_legend(found, by),
        f"to see one: rayloom inspect {found.source.run} {_id(shown[0].entry)}",
    ]
    return "\n".join(lines)


def notes(found: Explanation) -> list[str]:
    """Return notes: the weights used, whether the norm agrees, and what the numbers leave out."""
    source = found.source
    name = "the model that training started from"
    if source.checkpoint is not None:
        name = f"checkpoint {source.checkpoint.name}"
    lines = [f"weights: {name}, {_weights(found)}", f"gradient norm: {_norms(found)}"]
    if found.num_updates > 1:
        lines.append(f"the step made {found.num_updates} updates: all numbers are their means")
    if source.config.algorithm.has_critic:
        lines.append("the critic's own update is not in these numbers")
    if source.is_of_older_term:
        lines.append(
            "the settings are those of a later term of the run: the step may have had others"
        )
    return lines


def document(found: Explanation, *, by: Order, top: int | None) -> dict[str, Any]:
    """Return a document for programs; a number that is not finite becomes null.

    top: maximum number of rows; None for all.
    """
    source = found.source
    return {
        "step": source.step.step,
        "weights_step": source.weights_step,
        "checkpoint": None if source.checkpoint is None else source.checkpoint.name,
        "replayed_steps": found.replayed_steps,
        "is_exact": found.is_exact,
        "grad_norm": _known(found.grad_norm),
        "recorded_grad_norm": _known(source.recorded_grad_norm),
        "num_updates": found.num_updates,
        "order": by.value,
        "notes": notes(found),
        "trajectories": [_fields(row) for row in ranked(found.trajectories, by)[:top]],
        "groups": [
            {
                "group": row.group_id,
                "task": row.task_id,
                "num_trajectories": row.num_trajectories,
                **_numbers(row.share),
            }
            for row in ranked(found.groups, by)[:top]
        ],
    }


def _weights(found: Explanation) -> str:
    source = found.source
    step, behind = source.step.step, source.num_behind
    if not behind:
        return f"exactly those at the start of step {step}"
    if found.is_exact:
        return f"and {_plural(behind, 'step')} trained again from the journal"
    whole = len(source.between) == behind
    remedy = "; --replay trains them again first" if whole else ""
    return (
        f"of step {source.weights_step}: {_plural(behind, 'step')} older than those at the start "
        f"of step {step}{remedy}"
    )


def _norms(found: Explanation) -> str:
    now, then = found.grad_norm, found.source.recorded_grad_norm
    if math.isnan(then):
        return f"{now:.6g} recomputed; the step's record has none"
    both = f"{now:.6g} recomputed, {then:.6g} recorded"
    if abs(now - then) <= AGREES_WITHIN * then:
        return f"{both}: they agree"
    why = "other settings, or another machine's arithmetic" if found.is_exact else "other weights"
    return f"{both}: THEY DIFFER ({why}); the table below uses the recomputed gradient"


def _legend(found: Explanation, by: Order) -> list[str]:
    lines = [
        f"by {by}; norm |g|, share g·G/|G|² (all add up to 1), cosine of g and the whole gradient G"
    ]
    if found.source.step.group_rule is None:
        lines.append("own is the norm: advantages do not depend on the group's returns here")
    else:
        lines.append("own: the part of |g| that stays whichever other group member is left out")
    return lines


def _row(row: Contribution) -> tuple[str, ...]:
    trajectory = row.entry.trajectory
    return (
        _id(row.entry),
        f"{row.own_norm:.4g}",
        *_shown(row.share),
        number(trajectory.episode_return),
        advantage(row.entry),
        str(row.entry.num_trained),
        trajectory.outcome.value,
    )


def _group_row(row: GroupContribution) -> tuple[str, ...]:
    return (
        visible_text(row.group_id),
        *_shown(row.share),
        str(row.num_trajectories),
        visible_text(row.task_id),
    )


def _shown(share: Share) -> tuple[str, str, str]:
    return (f"{share.norm:.4g}", f"{share.share:.4f}", f"{share.cosine:.3f}")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align columns with two spaces between them; the first and the last to the left."""
    cut = [
        tuple(cell[: _WIDTHS.get(name)] for cell, name in zip(row, header, strict=True))
        for row in rows
    ]
    every = [header, *cut]
    widths = [max(len(row[column]) for row in every) for column in range(len(header))]
    last = len(header) - 1
    return [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in every
    ]


def _fields(row: Contribution) -> dict[str, Any]:
    trajectory = row.entry.trajectory
    return {
        "trajectory": trajectory.trajectory_id,
        "group": trajectory.group_id,
        "task": trajectory.task_id,
        "outcome": trajectory.outcome.value,
        "return": _known(trajectory.episode_return),
        "advantage": _known(float(np.concatenate(row.entry.advantages).mean())),
        "num_trained_tokens": row.entry.num_trained,
        "own": _known(row.own_norm),
        **_numbers(row.share),
    }


def _numbers(share: Share) -> dict[str, float | None]:
    return {
        "norm": _known(share.norm),
        "share": _known(share.share),
        "cosine": _known(share.cosine),
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _id(entry: TrajectoryEntry) -> str:
    return visible_text(entry.trajectory.trajectory_id)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
