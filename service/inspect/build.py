"""Build the view of a journal entry, with the origin and training values of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from actors.journal.files import JournalStep, TrajectoryEntry
from actors.types import Sample, TurnSpan, original_numbers
from service.inspect.token_text import TokenText
from service.inspect.view import (
    SampleView,
    Segment,
    Token,
    TokenClass,
    TrajectoryView,
    turn_note,
)
from service.visible import visible

NOT_SAMPLED = "trained, but it was not sampled"
NO_LOGPROB = "sampled without a log-probability"
HEADER_WRITTEN = "a role header, trained: the policy sampled it"
HEADER_TRAINED = "a role header, trained"


def build_view(
    step: JournalStep, entry: TrajectoryEntry, text: TokenText, *, is_refused: bool = False
) -> TrajectoryView:
    """Return the view of a trajectory. is_refused: whether the step's update was refused."""
    samples = [
        _SampleBuilder(sample, _trained(entry, number), text).build(number)
        for number, sample in enumerate(entry.trajectory.samples)
    ]
    return TrajectoryView(
        step=step, entry=entry, samples=tuple(samples), note=text.note, is_refused=is_refused
    )


def _trained(entry: TrajectoryEntry, number: int) -> Mapping[int, float]:
    """Return the advantages that the trainer received for a sample, by the token's position."""
    if not entry.advantages:
        return {}
    positions = np.flatnonzero(entry.trajectory.samples[number].mask).tolist()
    return dict(zip(positions, entry.advantages[number].tolist(), strict=True))


class _SampleBuilder:
    """Builds the view of one sample. trained: advantages by the token's position."""

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
            return TokenClass.TRAINED
        if turn is not None:
            return TokenClass.MASKED
        if position in self._inserted:
            return TokenClass.INSERTED
        if self._ids[position] in self._text.special_ids or position in self._marked:
            return TokenClass.TEMPLATE
        is_first = position < self._sample.prompt_length
        return TokenClass.PROMPT if is_first else TokenClass.OBSERVATION

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
        """Return the positions of tokens that the renderer inserted after a reply to close it."""
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
    """Return the indices of the tokens that lie entirely within an occurrence of a mark."""
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
