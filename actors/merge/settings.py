"""What a step is built with: small, frozen, taken from the configuration by the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.merge.advantages import Baseline, Scale
from actors.outcomes import OutcomePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """baseline, scale: of the advantages. num_ranks: shards.

    tokens_per_micro_batch: budget of a packed row, counted after sharing; a longer trajectory gets
    a row of its own.
    share_prefixes: compute what samples of a row have in common once.
    num_minibatches: optimiser updates a step. seed: of the split into them.
    attention_tokens: sample length at which attention costs as much as all the rest, for the
    balance between ranks. policies: outcome rules by environment, the defaults where it has none.
    Raises: ValueError when a number is out of range.
    """

    baseline: Baseline = Baseline.MEAN
    scale: Scale = Scale.STD
    num_ranks: int = 1
    tokens_per_micro_batch: int = 4096
    share_prefixes: bool = True
    num_minibatches: int = 1
    seed: int = 0
    attention_tokens: int = 8192
    policies: Mapping[str, OutcomePolicy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ("num_ranks", "tokens_per_micro_batch", "num_minibatches", "attention_tokens")
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"merge: {name} is {getattr(self, name)}, expected >= 1")
        if self.seed < 0:
            raise ValueError(f"merge: seed is {self.seed}, expected >= 0")
