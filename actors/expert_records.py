"""Which experts a mixture chose, and for which tokens; a plain value.

A record belongs to the token that went in: it is what each routed layer chose in the forward pass
that processed the token. So it shapes the logits that predict the next token, and through attention
all later ones. An engine samples the last token of a turn without processing it, and has no record
of it in that turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ExpertIndices = NDArray[np.uint8] | NDArray[np.int16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRecords:
    """positions: [R] int32, ascending, each once: where in the sample or row the token stands that
    the forward pass processed.

    indices: [R, L, K] uint8 or int16, the K experts of each of L routed layers, in any order. A
    position that is not in the list has no record: the trainer's own router decides there.
    """

    positions: NDArray[np.int32]
    indices: ExpertIndices
