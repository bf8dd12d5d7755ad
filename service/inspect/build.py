"""From a journal entry to its view: tokens told by the raw turns, then held against the record.

Damaged or contradicting entries are shown as far as they go, with their faults: that is what one
looks at them for. Pure. Called by `rayloom inspect`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.journal.record import JournalStep, SampleEntry, TrajectoryEntry
from actors.merge.mismatch import Mismatch
from actors.types import Trajectory
from service.inspect.facts import turn_note
from service.inspect.sampled import Origin, origins
from service.inspect.token_text import TokenText
from service.inspect.view import SampleView, Segment, Token, TokenClass, TrajectoryView
from service.visible import visible

# A log-probability is stored as it came: any difference at all is one.
NOT_SAMPLED = "trained, but nobody sampled it"
NO_LOGPROB = "sampled without a log-probability"
LEFT_OUT = "sampled with a log-probability, its trajectory is trained, and it is not"
HEADER_WRITTEN = "a role header, trained: the policy wrote it itself"
HEADER_TRAINED = "a role header, trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the trainer was given for one token."""

    token_id: int
    logprob: float
    version: int
    advantage: float


def build_view(step: JournalStep, entry: TrajectoryEntry, text: TokenText) -> TrajectoryView:
    """Lay a trajectory out for a look."""
    samples = entry.samples or _lone_turns(entry.trajectory)
    views, faults = [], []
    for number, sample in enumerate(samples):
        chain = [turn for turn in sample.turns if 0 <= turn < len(entry.trajectory.turns)]
        if not chain or len(chain) != len(sample.turns):
            faults.append(f"sample {number} names turns {list(sample.turns)}; not all are there")
        if chain:
            builder = _SampleBuilder(entry, sample, chain, text)
            views.append(builder.build(number))
            faults += [f"sample {number}: {fault}" for fault in builder.faults]
    if not entry.samples and entry.trajectory.turns:
        faults.append("its turns do not fit together; each is shown by itself")
    return TrajectoryView(
        step=step, entry=entry, samples=tuple(views), faults=tuple(faults), note=text.note
    )


def _lone_turns(trajectory: Trajectory) -> tuple[SampleEntry, ...]:
    """Each turn as a sample without a trained token, where nothing was merged."""
    no_ids, no_floats = np.empty(0, np.int32), np.empty(0, np.float32)
    return tuple(
        SampleEntry(
            turns=(index,),
            prompt_length=turn.prompt_token_ids.shape[0],
            num_tokens=turn.prompt_token_ids.shape[0] + turn.num_sampled,
            positions=no_ids,
            token_ids=no_ids,
            logprobs=no_floats,
            versions=no_ids,
            advantages=no_floats,
        )
        for index, turn in enumerate(trajectory.turns)
    )


class _SampleBuilder:
    """Builds the view of one sample; `faults` are those of no single token."""

    def __init__(
        self, entry: TrajectoryEntry, sample: SampleEntry, chain: Sequence[int], text: TokenText
    ) -> None:
        self._entry, self._sample, self._chain, self._text = entry, sample, chain, text
        self._trajectory = entry.trajectory
        last = self._trajectory.turns[chain[-1]]
        full = np.concatenate([last.prompt_token_ids, last.sampled_token_ids])
        self._ids: list[int] = full.tolist()
        self._pieces = text.pieces(self._ids)
        self._headers = _marked(self._pieces, text.marks.headers)
        self._marked = self._headers | _marked(self._pieces, text.marks.footers)
        self._first_prompt = self._trajectory.turns[chain[0]].prompt_token_ids.shape[0]
        self._origins, self.faults = origins(self._trajectory, chain, full)
        self._inserted = self._inserted_positions()
        self._given = _given(sample)
        beyond = [position for position in self._given if not 0 <= position < len(self._ids)]
        if beyond:
            self.faults.append(f"{len(beyond)} trained positions lie outside its tokens")

    def build(self, number: int) -> SampleView:
        mismatch = next((m for m in self._entry.mismatches if m.turn == self._chain[0]), None)
        if mismatch is None and self._chain[0] != 0 and self._entry.samples:
            self.faults.append(f"turn {self._chain[0]} begins it, and no mismatch is recorded")
        tokens = [self._token(position, mismatch) for position in range(len(self._ids))]
        return SampleView(
            title=f"sample {number}",
            opening=_opening(self._chain, mismatch),
            segments=tuple(self._segments(tokens)),
        )

    def _segments(self, tokens: Sequence[Token]) -> list[Segment]:
        found: list[Segment] = []
        at = 0
        for index in self._chain:
            turn = self._trajectory.turns[index]
            start = turn.prompt_token_ids.shape[0]
            before = tuple(tokens[at:start])
            title = "first prompt" if at == 0 else f"before turn {index}"
            found.append(Segment(title=title, note="", tokens=before, is_reply=False))
            at = start + turn.num_sampled
            reply = tuple(tokens[start:at])
            note = turn_note(turn)
            found.append(Segment(title=f"turn {index}", note=note, tokens=reply, is_reply=True))
        return found

    def _token(self, position: int, mismatch: Mismatch | None) -> Token:
        origin, given = self._origins.get(position), self._given.get(position)
        piece = self._pieces[position]
        return Token(
            position=position,
            token_id=self._ids[position],
            text=visible(piece),
            kind=self._kind(position, origin, given),
            turn=origin.turn if origin else None,
            logprob=origin.logprob if origin else None,
            version=origin.version if origin else None,
            advantage=given.advantage if given else None,
            faults=tuple(self._faults_of(position, origin, given)),
            starts_at_mismatch=mismatch is not None and mismatch.position == position,
            ends_line=b"\n" in piece,
        )

    def _kind(self, position: int, origin: Origin | None, given: Given | None) -> TokenClass:
        if given is not None:
            return TokenClass.TRAINED
        if origin is not None:
            return TokenClass.MASKED
        if position in self._inserted:
            return TokenClass.INSERTED
        if self._ids[position] in self._text.special_ids or position in self._marked:
            return TokenClass.TEMPLATE
        is_first = position < self._first_prompt
        return TokenClass.PROMPT if is_first else TokenClass.OBSERVATION

    def _faults_of(self, position: int, origin: Origin | None, given: Given | None) -> list[str]:
        found = []
        if given is not None and origin is None:
            found.append(NOT_SAMPLED)
        if given is not None and position in self._headers:
            found.append(HEADER_WRITTEN if origin is not None else HEADER_TRAINED)
        if given is not None and given.token_id != self._ids[position]:
            found.append(f"trained as token {given.token_id}")
        if origin is None:
            return found
        has_logprob = origin.logprob is not None and math.isfinite(origin.logprob)
        if not has_logprob:
            found.append(NO_LOGPROB)
        if given is None and has_logprob and self._entry.reason is None:
            found.append(LEFT_OUT)
        if given is not None and has_logprob and given.logprob != origin.logprob:
            found.append(f"the trainer was given the log-probability {given.logprob:.4f}")
        if given is not None and given.version != origin.version:
            found.append(f"the trainer was given version {given.version}")
        return found

    def _inserted_positions(self) -> frozenset[int]:
        """The first tokens behind a reply, as many as the renderer puts there to close it."""
        found: list[int] = []
        for index, following in zip(self._chain, self._chain[1:], strict=False):
            turn = self._trajectory.turns[index]
            start = turn.prompt_token_ids.shape[0] + turn.num_sampled
            end = self._trajectory.turns[following].prompt_token_ids.shape[0]
            count = self._text.num_inserted(turn.prompt_token_ids, turn.sampled_token_ids)
            found += range(start, min(start + count, end))
        return frozenset(found)


def _given(sample: SampleEntry) -> Mapping[int, Given]:
    columns = (sample.token_ids, sample.logprobs, sample.versions, sample.advantages)
    rows = zip(sample.positions.tolist(), *(column.tolist() for column in columns), strict=True)
    return {
        position: Given(token_id=token_id, logprob=logprob, version=version, advantage=advantage)
        for position, token_id, logprob, version, advantage in rows
    }


def _opening(chain: Sequence[int], mismatch: Mismatch | None) -> str:
    merged = f"turn {chain[0]}" if len(chain) == 1 else f"turns {', '.join(map(str, chain))}"
    if mismatch is None:
        return merged
    kind = mismatch.kind.value.replace("_", " ")
    at = mismatch.position
    return f"{merged}; extends no sample ({kind}): parts from the nearest at token {at}"


def _marked(pieces: Sequence[bytes], marks: Sequence[bytes]) -> frozenset[int]:
    """The tokens that lie wholly in an occurrence of a mark."""
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
