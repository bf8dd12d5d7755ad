"""What a step is built with: small, frozen, taken from the configuration by the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.choices import take_choices
from actors.expert_records import ModelShape
from actors.merge.advantages import Baseline, CriticSettings, Scale
from actors.merge.aggregation import Aggregation
from actors.merge.shaping import ShapingSettings
from actors.outcomes import OutcomePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """baseline, scale: of the advantages. aggregation: of the loss; constant_tokens: what it
    divides by, for each trajectory, where it is constant. num_ranks: shards.

    min_group_size: members of its baseline that a group needs to be trained. turn_discount: credit
    by turn; None: by trajectory. normalises: REINFORCE++, over the step's tokens. shaping: of the
    rewards. critic: of use with the baseline critic alone.
    trains_without_signal: groups of equal returns are trained with advantage 0, because the loss
    has a term (KL, entropy) whose gradient is not 0 there.
    tokens_per_micro_batch: budget of a packed row, counted after sharing; a longer trajectory gets
    a row of its own.
    share_prefixes: compute what samples of a row have in common once.
    num_minibatches: optimiser updates a step. seed: of the split into them.
    attention_tokens: sample length at which attention costs as much as all the rest, for the
    balance between ranks. shape: of the model, which the turns have to fit; None: not
    known. policies: outcome rules by environment, the defaults where it has none.
    Raises: ValueError when a number is out of range.
    """

    baseline: Baseline = Baseline.MEAN
    scale: Scale = Scale.STD
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_tokens: int = 1024
    trains_without_signal: bool = False
    num_ranks: int = 1
    tokens_per_micro_batch: int = 4096
    share_prefixes: bool = True
    num_minibatches: int = 1
    seed: int = 0
    attention_tokens: int = 8192
    shape: ModelShape | None = None
    policies: Mapping[str, OutcomePolicy] = field(default_factory=dict)
    min_group_size: int = 1
    turn_discount: float | None = None
    normalises: bool = False
    shaping: ShapingSettings = field(default_factory=ShapingSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)

    def __post_init__(self) -> None:
        kinds = {"baseline": Baseline, "scale": Scale, "aggregation": Aggregation}
        take_choices(self, kinds, room="merge")
        for name in (
            "constant_tokens",
            "num_ranks",
            "tokens_per_micro_batch",
            "num_minibatches",
            "attention_tokens",
            "min_group_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"merge: {name} is {getattr(self, name)}, expected >= 1")
        if self.seed < 0:
            raise ValueError(f"merge: seed is {self.seed}, expected >= 0")
        if self.turn_discount is not None and not 0.0 <= self.turn_discount <= 1.0:
            raise ValueError(
                f"merge: turn_discount is {self.turn_discount}, expected a number between 0 and 1, "
                "or None for credit by trajectory"
            )
        if self.turn_discount is not None and self.baseline is Baseline.CRITIC:
            raise ValueError(
                "merge: got turn_discount with the baseline critic, whose advantages are per "
                "token; leave turn_discount out, or choose a group baseline"
            )

    @property
    def needs_values(self) -> bool:
        return self.baseline is Baseline.CRITIC

    @property
    def needs_reference(self) -> bool:
        return self.shaping.kl is not None
