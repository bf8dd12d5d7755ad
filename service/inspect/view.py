"""The view of a trajectory: what is shown about its samples and about each of their tokens.

The turns' spans show which tokens were sampled. The advantages that the trainer received show which
tokens were trained. The tokenizer shows which tokens belong to the chat template. A token has a
fault if these sources disagree. The facts summarise the trajectory in a few lines.

The terminal shows this view; the page and the API get it as one JSON tree (`trajectory_document`).
The tree's texts are printable, and the page never shows them as markup. The API makes the view in a
separate process, because the tokenizer's import takes seconds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from actors.journal.files import JournalStep, TrajectoryEntry
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import UNDONE, Sample, TurnSpan, original_numbers
from service.inspect.reader import (
    UnknownTrajectory,
    find_entry,
    is_refused,
    journal_of,
    tokenizer_of,
)
from service.inspect.token_text import TokenText
from service.launch.run_dir import RunDir
from service.units import visible, visible_text

REFUSED = "the step's update was not finite, and was refused"


TokenClass = Literal["trained", "masked", "prompt", "observation", "inserted", "template"]
"""The role of a token in training."""
MEANINGS: dict[TokenClass, str] = {
    "trained": "sampled and trained",
    "masked": "sampled, not trained",
    "prompt": "first prompt",
    "observation": "observation",
    "inserted": "inserted by us",
    "template": "template",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of a sample.

    position: index of the token in the sample. text: the token's text on one line. turn: the turn
    that sampled the token; None if it was not sampled. logprob: the engine's log-probability in
    nats; None if not recorded. version: the policy version that sampled the token; None if logprob
    is None. advantage: the value that the trainer received; None if the token was not trained.
    starts_branch: whether the sample branches off from an earlier sample at this token: all tokens
    before this token are shared, and this token is the first that differs.
    """

    position: int
    token_id: int
    text: str
    kind: TokenClass
    turn: int | None = None
    logprob: float | None = None
    version: int | None = None
    advantage: float | None = None
    faults: tuple[str, ...] = ()
    starts_branch: bool = False
    ends_line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of one sample: the first prompt, a reply, or the tokens between two replies.

    note: for a reply, its reward, its finish reason and whether it was malformed; else empty.
    """

    title: str
    note: str
    tokens: tuple[Token, ...]
    is_reply: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """The view of one sample: one or more turns of a trajectory in one token sequence.

    opening: text that names the sample's turns, and says why the first of them began a new sample.
    parent: number of the sample from which this sample branches off; None if it shares no tokens
    with an earlier sample. num_shared: number of tokens at the start that are equal to the
    parent's.
    """

    title: str
    opening: str
    parent: int | None
    num_shared: int
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> Iterator[Token]:
        return (token for segment in self.segments for token in segment.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryView:
    """The view of a whole trajectory.

    note: why texts could not be shown; empty if all are shown. is_refused: whether the trainer
    received the trajectory, but refused the step's update because it was not finite.
    """

    step: JournalStep
    entry: TrajectoryEntry
    samples: tuple[SampleView, ...]
    note: str
    is_refused: bool = False

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(label, value) pairs on outcome, rewards, tokens and versions of the trajectory."""
        return _facts(self.step, self.entry, is_refused=self.is_refused)

    @property
    def counts(self) -> dict[TokenClass, int]:
        found = Counter(token.kind for sample in self.samples for token in sample.tokens)
        return {kind: found[kind] for kind in MEANINGS if found[kind]}

    @property
    def fault_counts(self) -> dict[str, int]:
        """Number of tokens with each fault, by the fault's text, in order of first occurrence."""
        tokens = (token for sample in self.samples for token in sample.tokens)
        return dict(Counter(fault for token in tokens for fault in token.faults))

    @property
    def num_faulty(self) -> int:
        return sum(bool(token.faults) for sample in self.samples for token in sample.tokens)


def _facts(step: JournalStep, entry: TrajectoryEntry, *, is_refused: bool) -> list[tuple[str, str]]:
    trajectory = entry.trajectory
    brought = entry.baseline_return
    detail = f": {visible_text(trajectory.detail)}" if trajectory.detail else ""
    problem = f": {visible_text(entry.problem)}" if entry.problem else ""
    tokens = f"{trajectory.num_sampled} sampled, {entry.num_trained} trained"
    if is_refused:
        problem = f": {REFUSED}"
        tokens = f"{trajectory.num_sampled} sampled, 0 trained, {entry.num_trained} handed out"
    found = [
        ("outcome", f"{trajectory.outcome.value}{detail}"),
        ("ledger", f"{exit_of(entry, is_refused=is_refused)}{problem}"),
        ("return", _with_best(trajectory.episode_return, trajectory.best_return)),
        ("in the baseline", "no" if brought is None else number(brought)),
        ("advantage", advantage(entry)),
        ("turns", f"{len(trajectory.turns)}, samples {len(trajectory.samples)}"),
        ("tokens", tokens),
        ("policy versions", _versions(step, entry)),
    ]
    if trajectory.metrics:
        named = ", ".join(f"{name} {number(value)}" for name, value in trajectory.metrics.items())
        found.append(("logged", visible_text(named)))
    found += [
        (f"logged {visible_text(column)}", visible_text(text))
        for column, text in trajectory.extra_columns.items()
    ]
    if trajectory.left_out:
        turns = ", ".join(f"{number} {why.value}" for number, why in trajectory.left_out.items())
        found.append(("turns left out", f"{turns} (numbers in the session)"))
    if trajectory.render_breaks:
        breaks = ", ".join(f"{name} {count}" for name, count in trajectory.render_breaks.items())
        found.append(("rendered again", visible_text(breaks)))
    return found


def exit_of(entry: TrajectoryEntry, *, is_refused: bool) -> str:
    reason = EvictionReason.NONFINITE_STEP if is_refused else entry.reason
    return "trained" if reason is None else f"evicted: {reason.value}"


def advantage(entry: TrajectoryEntry) -> str:
    """Return the advantage of a trajectory's trained tokens as text, as a range if they differ.

    The text is empty if nothing was trained.
    """
    values = [value for of_sample in entry.advantages for value in of_sample.tolist()]
    if not values:
        return ""
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def number(value: float) -> str:
    """Return a number as text with at most four decimals, without trailing zeros."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}".rstrip("0").rstrip(".") or "0"


def turn_note(turn: TurnSpan) -> str:
    """Return a text with the turn's reward and finish reason, and whether it was malformed."""
    reward = f"reward {number(turn.reward)}"
    if turn.reward_components:
        parts = visible_text(
            ", ".join(f"{name} {number(value)}" for name, value in turn.reward_components.items())
        )
        reward += f" ({parts})"
    malformed = ", malformed" if turn.is_malformed else ""
    return f"{reward}, finished by {turn.finish_reason.value}{malformed}"


def _with_best(value: float, best: float | None) -> str:
    return number(value) + ("" if best is None else f" of {number(best)} at best")


def _versions(step: JournalStep, entry: TrajectoryEntry) -> str:
    seen = entry.trajectory.versions
    if seen is None:
        return "none"
    low, high = seen
    span = str(low) if low == high else f"{low} to {high}"
    is_undone = any((sample.versions >= UNDONE).any() for sample in entry.trajectory.samples)
    undone = ", partly by versions that a recovery has undone" if is_undone else ""
    return f"{span}{undone}, trained on by version {step.trainer_version}"


NOT_SAMPLED = "trained, but it was not sampled"
NO_LOGPROB = "sampled without a log-probability"
HEADER_WRITTEN = "a role header, trained: the policy sampled it"
HEADER_TRAINED = "a role header, trained"


def build_view(
    step: JournalStep, entry: TrajectoryEntry, text: TokenText, *, is_refused: bool = False
) -> TrajectoryView:
    """Return the view of a trajectory.

    Args: text: converts token ids to text. is_refused: whether the trainer refused the step's
    update.
    """
    samples = [
        _SampleBuilder(sample, _trained(entry, number), text).build(number)
        for number, sample in enumerate(entry.trajectory.samples)
    ]
    return TrajectoryView(
        step=step, entry=entry, samples=tuple(samples), note=text.note, is_refused=is_refused
    )


def _trained(entry: TrajectoryEntry, number: int) -> Mapping[int, float]:
    """Return the advantages of sample `number`, by the position of the trained token."""
    if not entry.advantages:
        return {}
    positions = np.flatnonzero(entry.trajectory.samples[number].mask).tolist()
    return dict(zip(positions, entry.advantages[number].tolist(), strict=True))


class _SampleBuilder:
    """Builds a sample's view. trained: the advantage of each trained token, by its position."""

    def __init__(self, sample: Sample, trained: Mapping[int, float], text: TokenText) -> None:
        self._sample, self._trained, self._text = sample, trained, text
        self._ids: list[int] = sample.token_ids.tolist()
        self._mask = sample.mask.tolist()
        self._versions = original_numbers(sample.versions)
        self._pieces = text.pieces(self._ids)
        self._headers = _marked(self._pieces, text.headers)
        self._marked = self._headers | _marked(self._pieces, text.footers)
        self._inserted = self._inserted_positions()
        self._turn_at: dict[int, TurnSpan] = {
            position: turn for turn in sample.turns for position in range(turn.start, turn.end)
        }

    def build(self, number: int) -> SampleView:
        return SampleView(
            title=f"sample {number}",
            opening=_opening(self._sample),
            parent=self._sample.parent,
            num_shared=self._sample.num_shared,
            segments=tuple(self._segments([self._token(each) for each in range(len(self._ids))])),
        )

    def _segments(self, tokens: Sequence[Token]) -> list[Segment]:
        found: list[Segment] = []
        at = 0
        for turn in self._sample.turns:
            before, reply = tuple(tokens[at : turn.start]), tuple(tokens[turn.tokens])
            title = "first prompt" if at == 0 else f"before turn {turn.index}"
            found.append(Segment(title=title, note="", tokens=before, is_reply=False))
            title, note = f"turn {turn.index}", turn_note(turn)
            found.append(Segment(title=title, note=note, tokens=reply, is_reply=True))
            at = turn.end
        if at < len(tokens):
            title, rest = f"after {title}", tuple(tokens[at:])
            found.append(Segment(title=title, note="", tokens=rest, is_reply=False))
        return found

    def _token(self, position: int) -> Token:
        sample, piece = self._sample, self._pieces[position]
        turn, advantage = self._turn_at.get(position), self._trained.get(position)
        is_known = turn is not None and bool(self._mask[position])
        return Token(
            position=position,
            token_id=self._ids[position],
            text=visible(piece),
            kind=self._kind(position, turn, is_trained=advantage is not None),
            turn=turn.index if turn else None,
            logprob=float(sample.logprobs[position]) if is_known else None,
            version=int(self._versions[position]) if is_known else None,
            advantage=advantage,
            faults=tuple(self._faults_of(position, turn, is_trained=advantage is not None)),
            starts_branch=sample.branch_reason is not None and sample.num_shared == position,
            ends_line=b"\n" in piece,
        )

    def _kind(self, position: int, turn: TurnSpan | None, *, is_trained: bool) -> TokenClass:
        if is_trained:
            return "trained"
        if turn is not None:
            return "masked"
        if position in self._inserted:
            return "inserted"
        if self._ids[position] in self._text.special_ids or position in self._marked:
            return "template"
        is_first = position < self._sample.prompt_length
        return "prompt" if is_first else "observation"

    def _faults_of(self, position: int, turn: TurnSpan | None, *, is_trained: bool) -> list[str]:
        found = []
        if is_trained and turn is None:
            found.append(NOT_SAMPLED)
        if is_trained and position in self._headers:
            found.append(HEADER_WRITTEN if turn is not None else HEADER_TRAINED)
        if turn is not None and not self._mask[position]:
            found.append(NO_LOGPROB)
        return found

    def _inserted_positions(self) -> frozenset[int]:
        found: list[int] = []
        ids, turns = self._sample.token_ids, self._sample.turns
        next_starts = [*(turn.start for turn in turns[1:]), self._sample.num_tokens]
        for turn, next_start in zip(turns, next_starts, strict=True):
            count = self._text.num_inserted(ids[: turn.start], ids[turn.tokens])
            found += range(turn.end, min(turn.end + count, next_start))
        return frozenset(found)


def _opening(sample: Sample) -> str:
    numbers = ", ".join(str(turn.index) for turn in sample.turns)
    merged = f"turn {numbers}" if len(sample.turns) == 1 else f"turns {numbers}"
    if sample.branch_reason is None:
        return merged
    reason = sample.branch_reason.value.replace("_", " ")
    at = sample.num_shared
    return f"{merged}; extends no sample ({reason}): differs from the nearest at token {at}"


def _marked(pieces: Sequence[bytes], marks: Sequence[bytes]) -> frozenset[int]:
    """Return the indices of the tokens that are inside an occurrence of a chat template's text.

    pieces: the bytes of each token. marks: the template's texts, such as b"<|im_end|>\\n".
    """
    whole = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = ends - [len(piece) for piece in pieces] if pieces else ends
    found: set[int] = set()
    for mark in marks:
        at = whole.find(mark)
        while at >= 0:
            inside = (starts >= at) & (ends <= at + len(mark)) & (ends > starts)
            found.update(np.flatnonzero(inside).tolist())
            at = whole.find(mark, at + len(mark))
    return frozenset(found)


DIGITS = 6

# The meaning of each class for training, in the legend.
EXPLANATIONS: dict[TokenClass, str] = {
    "trained": "in the loss",
    "masked": "its trajectory is not in the loss, or it has no log-probability",
    "prompt": "the start of the sample",
    "observation": "the environment's messages between two turns",
    "inserted": "closes a reply without an end token",
    "template": "role headers, footers and special tokens",
}
_NUMBERS = {kind: number for number, kind in enumerate(EXPLANATIONS)}


def trajectory_document(view: TrajectoryView) -> dict[str, Any]:
    """Return the view as the JSON tree that the page and the API show.

    Each column of a sample, such as `ids`, has one value for each token, in order.
    """
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
    """Return the trajectory's document as JSON; None if the journal lacks the trajectory.

    Args: name: see `find_entry`. Raises: ConfigError if a file is damaged.
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
