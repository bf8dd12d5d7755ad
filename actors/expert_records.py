"""Records of the experts that a mixture of experts chose for each token.

A record belongs to the token that was processed, and holds the choices of each routed layer. The
choices shape the logits of the next token and, through attention, of all later tokens. An engine
samples the last token of a turn without processing it, so that turn has no record of the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# uint8 or int16.
ExpertIndices = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """The routing of a mixture of experts.

    num_layers: number of layers with a router. num_chosen: number of experts that each such layer
    chooses for a token.
    """

    num_layers: int
    num_experts: int
    num_chosen: int

    def fault(self, indices: ExpertIndices) -> str | None:
        """Return why records [R, L, K] do not fit this mixture, with a remedy; None if they fit.

        Example: two layers of four experts, two chosen; indices of shape [5, 2, 3] -> "expert
        records for (2, 3) layers and experts, the trained model has (2, 2); ..."
        """
        if not len(indices):
            return None
        if indices.shape[1:] != (self.num_layers, self.num_chosen):
            return (
                f"expert records for {indices.shape[1:]} layers and experts, the trained model has "
                f"{(self.num_layers, self.num_chosen)}; record every choice of its routed layers, "
                "and no other layer"
            )
        ids = np.sort(indices, -1)
        if ids.min() < 0 or ids.max() >= self.num_experts:
            return (
                f"expert records of experts {int(ids.min())} to {int(ids.max())}, expected 0 to "
                f"{self.num_experts - 1}; record them with the trained model, and leave out tokens "
                "without a record"
            )
        if (ids[..., 1:] == ids[..., :-1]).any():
            return (
                "expert records that name an expert twice, expected different ones for each token; "
                "record each token's whole choice"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The properties of the trained model that limit the trajectories it can train on.

    mixture: None if the trainer cannot replay recorded experts in this model.
    """

    vocab_size: int
    mixture: MixtureShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRecords:
    """Recorded routing of a sample or row.

    positions: [R] int32, ascending, each once: the positions of the tokens that the forward pass
    processed. indices: [R, L, K] uint8 or int16, the K experts of each of L routed layers, in any
    order. A position that is not in the list has no record: the trainer's own router decides there.
    """

    positions: NDArray[np.int32]
    indices: ExpertIndices


def routed_layers(config: Any) -> tuple[int, ...]:
    """Return the decoder layers with a router that the trainer can replay, ascending.

    Args: config: Hugging Face's configuration of a language model.
    Returns: an empty tuple if the model has no routers, or only routers of kinds that
    `trainer.routing_replay` does not support.
    Example: a Qwen3-MoE of four layers with decoder_sparse_step 2 -> (1, 3)
    """
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        return tuple(layers)
    if config.model_type in ("qwen2_moe", "qwen3_moe") and config.num_experts > 0:
        dense, step = config.mlp_only_layers, config.decoder_sparse_step
        return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
    return ()


def sampled_experts(
    records: NDArray[np.uint8] | NDArray[np.uint16], *, routed: Sequence[int]
) -> ExpertIndices:
    """Convert an engine's expert records to the form of `Turn.expert_indices`.

    Args: records: [R, layers, K] of the first R sampled tokens, with an entry for every decoder
        layer; uint8, or uint16 above 256 experts. routed: the layers with a router.
    Returns: [R, L, K] of the routed layers; uint8 or int16.
    """
    indices = records[:, list(routed)]
    if indices.dtype == np.uint8:
        return indices.astype(np.uint8, copy=False)
    return indices.astype(np.int16)
