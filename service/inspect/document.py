"""A trajectory as one JSON tree, which the page shows.

This module makes all text of models and environments printable, and the page never shows it as
markup. `rayloom inspect --html` calls this module directly. The API calls it in a separate process
on the run's node, because the tokenizer's import takes seconds.
"""

from __future__ import annotations

import json
from typing import Any

from service.inspect.reader import (
    UnknownTrajectory,
    find_entry,
    is_refused,
    journal_of,
    tokenizer_of,
)
from service.inspect.view import MEANINGS, SampleView, TokenClass, TrajectoryView, build_view
from service.launch.run_dir import RunDir
from service.units import visible_text

DIGITS = 6

# The meaning of each class for training, in the legend.
EXPLANATIONS: dict[TokenClass, str] = {
    TokenClass.TRAINED: "in the loss",
    TokenClass.MASKED: "its trajectory is not in the loss, or it has no log-probability",
    TokenClass.PROMPT: "the start of the sample",
    TokenClass.OBSERVATION: "the environment's messages between two turns",
    TokenClass.INSERTED: "closes a reply without an end token",
    TokenClass.TEMPLATE: "role headers, footers and special tokens",
}
_NUMBERS = {kind: number for number, kind in enumerate(EXPLANATIONS)}


def trajectory_document(view: TrajectoryView) -> dict[str, Any]:
    """Return the data of the page; each column of a sample has a value for each token, in order."""
    trajectory, counts = view.entry.trajectory, view.counts
    return {
        "kind": "trajectory",
        "id": visible_text(trajectory.trajectory_id),
        "step": view.step.step,
        "group": visible_text(trajectory.group_id),
        "task": visible_text(trajectory.task_id),
        "environment": visible_text(trajectory.environment),
        "facts": view.facts,
        "kinds": [
            {
                "name": kind,
                "meaning": MEANINGS[kind],
                "explanation": explanation,
                "count": counts.get(kind, 0),
            }
            for kind, explanation in EXPLANATIONS.items()
        ],
        "fault_counts": list(view.fault_counts.items()),
        "num_faulty": view.num_faulty,
        "note": visible_text(view.note),
        "samples": [_sample(each) for each in view.samples],
    }


def trajectory_json(run_dir: RunDir, name: str) -> bytes | None:
    """Return the page's document on a trajectory; None if the journal does not have it.

    name: see `find_entry`. Raises: ConfigError if a file is damaged.
    """
    journal = journal_of(run_dir)
    if journal is None:
        return None
    try:
        step, entry = find_entry(journal, name)
    except UnknownTrajectory:
        return None
    view = build_view(step, entry, tokenizer_of(journal), is_refused=is_refused(journal, entry))
    # Write ASCII, because an environment's text may contain a lone surrogate.
    return json.dumps(trajectory_document(view), allow_nan=False).encode("ascii")


def _sample(view: SampleView) -> dict[str, Any]:
    tokens = list(view.tokens)
    segments, at = [], 0
    for segment in view.segments:
        end = at + len(segment.tokens)
        segments.append(
            {
                "title": segment.title,
                "note": segment.note,
                "is_reply": segment.is_reply,
                "start": at,
                "end": end,
            }
        )
        at = end
    return {
        "title": view.title,
        "opening": view.opening,
        "parent": view.parent,
        "num_shared": view.num_shared,
        "segments": segments,
        "ids": [token.token_id for token in tokens],
        "texts": [token.text for token in tokens],
        "kinds": [_NUMBERS[token.kind] for token in tokens],
        "turns": [token.turn for token in tokens],
        "logprobs": [_short(token.logprob) for token in tokens],
        "versions": [token.version for token in tokens],
        "advantages": [_short(token.advantage) for token in tokens],
        "line_ends": [token.position for token in tokens if token.ends_line],
        "faults": {str(token.position): token.faults for token in tokens if token.faults},
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
