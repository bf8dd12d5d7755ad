"""The view of a trajectory: samples, segments, tokens, each with its columns and faults.

The spans of the turns show what was sampled, the advantages that the trainer received show what was
trained, and the tokenizer shows what is template. A fault is a token where they disagree. Pure;
drawn by `terminal` and `page`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from actors.journal.record import JournalStep, TrajectoryEntry


class TokenClass(StrEnum):
    """The role of a token in training."""

    TRAINED = "trained"
    MASKED = "masked"
    PROMPT = "prompt"
    OBSERVATION = "observation"
    INSERTED = "inserted"
    TEMPLATE = "template"


MEANINGS: dict[TokenClass, str] = {
    TokenClass.TRAINED: "sampled and trained",
    TokenClass.MASKED: "sampled, not trained",
    TokenClass.PROMPT: "first prompt",
    TokenClass.OBSERVATION: "observation",
    TokenClass.INSERTED: "inserted by us",
    TokenClass.TEMPLATE: "template",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """position: in its sample. text: on one line. turn: that sampled it, None: nobody did.

    logprob: nats, of the sampler, None: not recorded. version: that sampled it. advantage: that the
    trainer was given. starts_branch: here its history leaves the sample it should extend.
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
    """A stretch of one sample: a first prompt, a reply, or what lies between two. note: a reply's
    reward, finish reason, and whether it was malformed.
    """

    title: str
    note: str
    tokens: tuple[Token, ...]
    is_reply: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """opening: why it began, and which turns it merges. parent: number of the sample that it parts
    from, None: it shares nothing. num_shared: tokens of it, from the start.
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
    """note: what could not be shown. is_refused: the trainer was given it, and refused the step's
    update.
    """

    step: JournalStep
    entry: TrajectoryEntry
    samples: tuple[SampleView, ...]
    note: str
    is_refused: bool = False

    @property
    def counts(self) -> dict[TokenClass, int]:
        found = Counter(token.kind for sample in self.samples for token in sample.tokens)
        return {kind: found[kind] for kind in TokenClass if found[kind]}

    @property
    def fault_counts(self) -> dict[str, int]:
        """Count the tokens with each fault, in the order of the tokens."""
        tokens = (token for sample in self.samples for token in sample.tokens)
        return dict(Counter(fault for token in tokens for fault in token.faults))

    @property
    def num_faulty(self) -> int:
        return sum(bool(token.faults) for sample in self.samples for token in sample.tokens)
