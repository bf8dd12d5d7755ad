"""What the trainer says of one packed row before its rewards are shaped; a plain value."""

from __future__ import annotations

from dataclasses import dataclass

from actors.batch import Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """A model's answer to one row; None: it was not asked.

    reference_logprobs: [M] float32, nats, of the row's targets. values: [T] float32, of the state
    that ends with each token.
    """

    reference_logprobs: Float32s | None = None
    values: Float32s | None = None
