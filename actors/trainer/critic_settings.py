"""How a critic is trained, and what one update of it says; plain values without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTraining:
    """learning_rate: after warmup_steps updates. value_clip: of a value in one step, None: no clip.

    The rest as in `TrainerSettings`. Raises: ValueError when a number is out of range.
    """

    learning_rate: float = 1e-4
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    value_clip: float | None = 0.2
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"critic: {name} is {getattr(self, name)}, expected above 0")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ValueError(
                f"critic: value_clip is {self.value_clip}, expected above 0, or None for no clip"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """What one update says, over all ranks."""

    statistics: Mapping[str, float]
    """By name, of the values that the advantages were made with; what is not known is absent."""
    num_tokens: int
    is_skipped: bool
    """A loss or gradient that was not finite; never applied."""
