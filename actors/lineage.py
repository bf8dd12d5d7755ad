"""Which turns of a trajectory continue which: what merging follows, known at the source or found.

A lineage is found once, where turns are appended (`actors.merge.buffer`), and travels with the
trajectory, so that nobody compares its tokens again. Plain frozen values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MismatchKind(StrEnum):
    """What changed between a sample and the prompt that should have extended it."""

    RETOKENISED = "retokenised"
    TEMPLATE = "template"
    HISTORY_REWRITTEN = "history_rewritten"
    TOOLS_CHANGED = "tools_changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """turn: index of the turn that began a sample. position: first divergence, in tokens from the
    start of its prompt, from the sample that it shares most with.
    """

    turn: int
    position: int
    kind: MismatchKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLineage:
    """One sample: its turns in order, each extending the one before.

    parent: the earlier sample that the first turn's prompt shares most with; None when it shares
    nothing. shared: how many tokens, from the start. kind: why it began; None for the first.
    """

    turns: tuple[int, ...]
    parent: int | None = None
    shared: int = 0
    kind: MismatchKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """samples: in the order in which they began; every turn is in exactly one."""

    samples: tuple[SampleLineage, ...]

    @property
    def num_turns(self) -> int:
        return sum(len(sample.turns) for sample in self.samples)

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """One for each sample but the first, in order."""
        return tuple(
            Mismatch(turn=sample.turns[0], position=sample.shared, kind=sample.kind)
            for sample in self.samples
            if sample.kind is not None
        )
