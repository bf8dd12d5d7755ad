"""`rayloom explain`: show which trajectories and groups caused a step's update.

The output is a table of at most 120 columns, or a JSON document.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers.utils import logging as transformers_logging

from service.cli.outlet import say
from service.explain.recompute import Contribution, Explanation, explain_step, find_source
from service.inspect.listing import aligned
from service.inspect.view import advantage, number
from service.units import plural, visible_text

DEFAULT_TOP = 10
# The norms agree if they differ by at most this share of the recorded norm. The order of addition
# alone changes a norm by 1e-5 of it in float32, and by 1e-2 in bfloat16.
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
Order = Literal["own", "norm", "share"]
"""The number by which trajectories are sorted; `Contribution` explains these numbers."""


def run_explain(
    run: Path,
    step: int,
    *,
    by: Order = "own",
    top: int | None = None,
    replays: bool = False,
    is_json: bool = False,
) -> None:
    """Recompute the gradients of a step and print them.

    Args: by: number by which the rows are ordered. top: number of trajectories to show; None shows
    10 in the table, or all in a JSON document. replays: start from the newest checkpoint before the
    step, and train again all steps between the checkpoint and this step. Raises: ConfigError if the
    step cannot be explained.
    """
    source = find_source(run, step)
    # torch warns that a single process reads the checkpoint, which is intended here.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    found = explain_step(source, replays=replays)
    if is_json:
        say(json.dumps(document(found, by=by, top=top), allow_nan=False))
    else:
        say(describe(found, by=by, top=top or DEFAULT_TOP))


def ranked(rows: Sequence[Contribution], by: Order) -> list[Contribution]:
    """Return the rows in descending order of the number that `by` selects.

    Rows whose number is not finite come first, because a single such row makes the whole update
    not finite.
    """

    def key(row: Contribution) -> float:
        value = row.own_norm if by == "own" else row.norm
        if by == "share" and math.isfinite(row.share):
            value = row.share
        return -value if math.isfinite(value) else -math.inf

    return sorted(rows, key=key)


def describe(found: Explanation, *, by: Order, top: int) -> str:
    """Return the text for a terminal: the notes, a table of groups and a table of trajectories.

    by: the number by which the rows are ordered, largest first. top: maximum number of
    trajectories.
    """
    step = found.source.step.step
    shown = ranked(found.trajectories, by)[:top]
    lines = [
        f"step {step}: {len(found.trajectories)} trajectories of {len(found.groups)} groups "
        f"trained, {plural(found.num_updates, 'update')}, on {found.device}",
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
        f"to see one: rayloom inspect {found.source.run} {_id(shown[0])}",
    ]
    return "\n".join(lines)


def notes(found: Explanation) -> list[str]:
    """Return notes about the numbers, one in each line.

    They say which weights were used, whether the recomputed gradient norm agrees with the recorded
    one, and what the numbers leave out.
    """
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
        "order": by,
        "notes": notes(found),
        "trajectories": [_fields(row) for row in ranked(found.trajectories, by)[:top]],
        "groups": [
            {
                "group": row.first.group_id,
                "task": row.first.task_id,
                "num_trajectories": len(row.entries),
                **_numbers(row),
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
        return f"and {plural(behind, 'step')} trained again from the journal"
    whole = len(source.between) == behind
    remedy = "; --replay trains them again first" if whole else ""
    return (
        f"of step {source.weights_step}: {plural(behind, 'step')} older than those at the start "
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
        lines.append("own: the part of |g| that remains if any other group member is left out")
    return lines


def _row(row: Contribution) -> tuple[str, ...]:
    (entry,) = row.entries
    return (
        _id(row),
        f"{row.own_norm:.4g}",
        *_shown(row),
        number(row.first.episode_return),
        advantage(entry),
        str(entry.num_trained),
        row.first.outcome.value,
    )


def _group_row(row: Contribution) -> tuple[str, ...]:
    return (
        visible_text(row.first.group_id),
        *_shown(row),
        str(len(row.entries)),
        visible_text(row.first.task_id),
    )


def _shown(row: Contribution) -> tuple[str, str, str]:
    return (f"{row.norm:.4g}", f"{row.share:.4f}", f"{row.cosine:.3f}")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    cut = [
        tuple(cell[: _WIDTHS.get(name)] for cell, name in zip(row, header, strict=True))
        for row in rows
    ]
    return aligned([header, *cut])


def _fields(row: Contribution) -> dict[str, Any]:
    trajectory, (entry,) = row.first, row.entries
    return {
        "trajectory": trajectory.trajectory_id,
        "group": trajectory.group_id,
        "task": trajectory.task_id,
        "outcome": trajectory.outcome.value,
        "return": _known(trajectory.episode_return),
        "advantage": _known(float(np.concatenate(entry.advantages).mean())),
        "num_trained_tokens": entry.num_trained,
        "own": _known(row.own_norm),
        **_numbers(row),
    }


def _numbers(row: Contribution) -> dict[str, float | None]:
    return {"norm": _known(row.norm), "share": _known(row.share), "cosine": _known(row.cosine)}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _id(row: Contribution) -> str:
    return visible_text(row.first.trajectory_id)
