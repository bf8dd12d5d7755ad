"""The parity check: one fixed text that the trainer and every engine score after each publish.

Pure. `TrainerRank` and `PolicyEngine` score the same ids, the supervisor compares. The
log-probabilities are those of the plain softmax (temperature 1), in nats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.batch import Float32s, Int32s

NUM_PARITY_TOKENS = 17


def parity_tokens(vocab_size: int) -> Int32s:
    """The fixed text, [17] int32: spread over the first tokens of any vocabulary."""
    return (7 * np.arange(NUM_PARITY_TOKENS, dtype=np.int32) + 3) % vocab_size


def parity_difference(own: Float32s, engines: Sequence[Float32s]) -> float | None:
    """Largest |trainer - engine|, nats; None where no engine has answered.

    Args: own, engines: [16] float32 each, every token but the first behind its predecessors.
    Raises: ValueError when an engine scored another number of tokens.
    """
    for logprobs in engines:
        if logprobs.shape != own.shape:
            raise ValueError(
                f"parity: got {logprobs.shape[0]} log-probabilities of an engine, expected "
                f"{own.shape[0]}; trainer and engine run different versions of Rayloom"
            )
    return max((float(np.abs(own - logprobs).max()) for logprobs in engines), default=None)
