"""The trained models as modules that score the tokens of a packed row.

`PolicyModel` returns log-probabilities, `ValueModel` the values of a critic. Both modules are roots
of FSDP2: each applies its head inside its own forward, where the weights are gathered. The Hugging
Face model inside keeps its parameters' names and its tied weights. Checkpoints, exports and
publishing use `PolicyModel.causal_lm`, never the wrapper. A model is refused when it is loaded if a
packed row gives other results than its samples in separate rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import find_adapter_config_file

from actors.batch import MicroBatch, padding_row
from actors.trainer.attention.forest import PackedLayout, build_layout
from actors.trainer.attention.interface import register_packed_attention
from actors.trainer.logprobs import token_logprobs
from actors.trainer.loss.micro_batch import MicroBatchTerms
from actors.trainer.model_check import (
    check_architecture,
    check_output_head,
    check_packing,
    hidden_states,
    longest_context,
    refusing,
)
from actors.trainer.rope import fix_rope
from actors.trainer.routing_replay import ReplayedExperts, attach_routing_replay, replayed_experts
from actors.trainer.settings import ADAPTER, ADAPTER_REFUSED
from actors.trainer.weights_check import check_finite, check_loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """A packed row on the rank's device; [T] packed tokens, [M] trained tokens."""

    token_ids: Tensor
    """[T] int64, the packed tokens."""
    position_ids: Tensor
    """[T] int64, the position of each token on its path."""
    layout: PackedLayout
    """The layout, which determines the tokens that each token attends to."""
    loss_positions: Tensor
    """[M] int64, the positions whose logits predict a trained token."""
    targets: Tensor
    """[M] int64, the trained tokens."""
    behaviour_logprobs: Tensor
    """[M] float32, nats, of the policy that sampled the tokens."""
    advantages: Tensor
    """[M] float32, the advantage of each trained token."""
    sampled_versions: Tensor
    """[M] int64, the policy version of each trained token."""
    loss_weights: Tensor
    """[M] float32, each trained token's share of the update."""
    trajectory_index: Tensor
    """[M] int64, the number of each trained token's trajectory in the row."""
    temperatures: Tensor | None
    """[M] float32; None if all are 1."""
    experts: ReplayedExperts | None
    """The recorded routing; None if no routing was recorded."""

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    def terms(
        self,
        current_logprobs: Tensor,
        entropies: Tensor,
        *,
        trainer_version: int,
        old_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
    ) -> MicroBatchTerms:
        """Return the inputs of the loss for the row's trained tokens.

        Each tensor argument has one float32 value for each trained token.
        """
        return MicroBatchTerms(
            current_logprobs=current_logprobs,
            behaviour_logprobs=self.behaviour_logprobs,
            entropies=entropies,
            advantages=self.advantages,
            loss_weights=self.loss_weights,
            trajectory_index=self.trajectory_index,
            sampled_versions=self.sampled_versions,
            trainer_version=trainer_version,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
        )


def row_tensors(row: MicroBatch, *, device: torch.device) -> RowTensors:
    """Copy a micro-batch to the device. A row without tokens becomes one untrained token."""
    if not row.num_tokens:
        row = padding_row()

    def ints(values: NDArray[np.int32]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def floats(values: NDArray[np.float32]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return RowTensors(
        token_ids=ints(row.token_ids),
        position_ids=ints(row.position_ids),
        layout=build_layout(row.segment_lengths, row.segment_parents, device=device),
        loss_positions=ints(row.loss_positions),
        targets=ints(row.targets),
        behaviour_logprobs=floats(row.behaviour_logprobs),
        advantages=floats(row.advantages),
        sampled_versions=ints(row.sampled_versions),
        loss_weights=floats(row.loss_weights),
        trajectory_index=ints(row.trajectory_index),
        temperatures=None if (row.temperatures == 1).all() else floats(row.temperatures),
        experts=None if row.experts is None else replayed_experts(row.experts, device=device),
    )


class PolicyModel(nn.Module):
    """A causal model whose forward returns log-probabilities and entropies instead of logits.

    mixture: the numbers of layers and experts of a mixture-of-experts model. None for a dense
    model, or if the engine's choice of experts cannot be replayed in this model.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, logprob_chunk: int):
        super().__init__()
        self.causal_lm = causal_lm
        self.logprob_chunk = logprob_chunk
        self.mixture = attach_routing_replay(causal_lm)

    def forward(
        self, row: RowTensors, *, has_entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Score the targets of one packed row, each at the temperature at which it was sampled.

        Returns: current log-probabilities [M] and entropies [M], float32, nats; the entropies have
        a gradient if has_entropy_gradient.
        """
        hidden = hidden_states(
            self.causal_lm.base_model,
            row.token_ids,
            row.position_ids,
            row.layout,
            replayed_experts=row.experts,
        )
        return token_logprobs(
            hidden.index_select(0, row.loss_positions),
            self.causal_lm.get_output_embeddings(),
            row.targets,
            temperatures=row.temperatures,
            chunk_tokens=self.logprob_chunk,
            has_entropy_gradient=has_entropy_gradient,
        )


class ValueModel(nn.Module):
    """A model that predicts the value of each state: V(s_t) = w h_t + b.

    h_t is the body's last hidden state at token t. The model shares no weights with the policy, so
    that the two losses need no relative weight. The head starts at 0: before the first update every
    value is 0, and advantages are the returns-to-go.
    """

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, row: RowTensors) -> Tensor:
        """Return the value of every state of one packed row.

        Returns: [T] float32, with gradient. Entry t is the value of the state that ends with token
            t; from this state the next token of the sample was generated.
        """
        hidden = hidden_states(self.body, row.token_ids, row.position_ids, row.layout)
        # Sum over an axis of size 1, because FSDP2 warns about a module that returns a view.
        values: Tensor = self.head(hidden).sum(-1).float()
        return values


def load_policy(
    model: str,
    *,
    logprob_chunk: int,
    gradient_checkpointing: bool,
    max_context_tokens: int | None = None,
) -> PolicyModel:
    """Load a Hugging Face causal model in float32 on the CPU, with packed attention.

    Args: model: directory or hub name. max_context_tokens: the engine's longest context, on which
        the table of some kinds of RoPE depends; None for the longest that the configuration allows.
    Raises: NotImplementedError if the architecture cannot be trained packed; OSError (transformers)
        if there is no such model.
    """
    causal_lm = _load(AutoModelForCausalLM, model, max_context_tokens)
    with refusing(model):
        check_output_head(causal_lm)
    policy = PolicyModel(causal_lm, logprob_chunk=logprob_chunk).eval()
    if gradient_checkpointing:
        checkpoint_layers(causal_lm)
    return policy


def load_value_model(
    model: str, *, gradient_checkpointing: bool, max_context_tokens: int | None = None
) -> ValueModel:
    """Load the body of a Hugging Face causal model in float32 on the CPU, with packed attention.

    Args: model: directory or hub name, usually the policy's. max_context_tokens: as for
        `load_policy`.
    Raises: NotImplementedError if the architecture cannot be trained packed; OSError (transformers)
        if there is no such model.
    """
    body = _load(AutoModel, model, max_context_tokens)
    critic = ValueModel(body).eval()
    if gradient_checkpointing:
        checkpoint_layers(body)
    return critic


def _load(kind: Any, name: str, max_context_tokens: int | None) -> PreTrainedModel:
    """Load a model by the transformers class `kind`; check that it trains on packed rows."""
    config = AutoConfig.from_pretrained(name)
    check_architecture(config, max_context_tokens=max_context_tokens)
    attention = register_packed_attention()
    if find_adapter_config_file(name) is not None:
        raise NotImplementedError(f"model {name}: {ADAPTER}: {ADAPTER_REFUSED}")
    with refusing(name):
        # transformers reports weights that do not fit instead of raising an error of its own.
        model, loading = kind.from_pretrained(
            name,
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        try:
            check_loaded(model, loading)
            check_finite(model)
        except NotImplementedError as error:
            raise NotImplementedError(f"model {name}: {error}") from error
        model.config.use_cache = False
        # In training mode some layers would apply dropout and some routers would add noise, which
        # the engine does not.
        model.eval()
        fix_rope(model, max_context_tokens=max_context_tokens or longest_context(config))
        check_packing(model.base_model)
    found: PreTrainedModel = model
    return found


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Compute each layer's activations again in the backward pass, to save memory.

    transformers does this only for a layer in training mode. Hooks switch the layer to evaluation
    mode while it computes, so that, for example, no dropout is applied.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
            layer.register_forward_pre_hook(_evaluate)
            # always_call, because torch may end the second computation early by an exception.
            layer.register_forward_hook(_ask_again, always_call=True)


def _evaluate(layer: nn.Module, args: Any) -> None:
    layer.training = False


def _ask_again(layer: nn.Module, args: Any, output: Any) -> None:
    layer.training = True
