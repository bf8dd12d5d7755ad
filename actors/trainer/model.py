"""The models that are trained, as modules: packed row in, scores of its tokens out.

`PolicyModel` gives log-probabilities, `ValueModel` the values of a critic. Both are roots of FSDP2,
so that their heads are applied inside their forward, where the weights are gathered. Invariant: the
names and the tying of the Hugging Face model inside are untouched; checkpoints, exports and
publishing use `PolicyModel.causal_lm`, never the wrapper. A model is checked when it is loaded: one
whose packed rows would not equal their samples is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from actors.batch import Float32s, Int32s, MicroBatch
from actors.trainer.attention.forest import PackedLayout, build_layout
from actors.trainer.attention.interface import register_packed_attention
from actors.trainer.logprobs import token_logprobs
from actors.trainer.loss.micro_batch import MicroBatchTerms
from actors.trainer.routing_replay import ReplayedExperts, attach_routing_replay, replayed_experts

# The order in which two ways through the same model add. A tolerance on the model's kind, not on
# training.
_HEAD_TOLERANCE = 1e-4
# Of the largest hidden state. Measured in float32: at most 7e-6 over 28 layers of random weights;
# layers that mix tokens outside of attention give 1e-1, and 2e-4 with weights near 0.
_PACKING_TOLERANCE = 1e-4
# A mixture whose router is near a tie may route a token to other experts over a rounding: a second
# and a third row do not meet the same tie, while a model that mixes samples does so in every row.
_PACKING_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """A packed row on the rank's device; [T] packed tokens, [M] trained tokens."""

    token_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64."""
    layout: PackedLayout
    """Which tokens attend to which."""
    loss_positions: Tensor
    """[M] int64."""
    targets: Tensor
    """[M] int64."""
    behaviour_logprobs: Tensor
    """[M] float32, nats."""
    advantages: Tensor
    """[M] float32."""
    sampled_versions: Tensor
    """[M] int64."""
    loss_weights: Tensor
    """[M] float32."""
    trajectory_index: Tensor
    """[M] int64."""
    temperatures: Tensor | None
    """[M] float32; None: all are 1."""
    experts: ReplayedExperts | None
    """Recorded routing; None when there is none."""

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
        """What the loss asks about the row's trained tokens. Args: [M] float32 each."""
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
        row = scoring_row(np.zeros(1, dtype=np.int32))

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


def scoring_row(token_ids: Int32s) -> MicroBatch:
    """Make a row of one sample, in which every token but the first is scored, at temperature 1.

    Args: token_ids: [T] int32, T at least 1. Returns: a row with M = T - 1.
    """
    num_tokens = int(token_ids.shape[0])
    num_scored = num_tokens - 1
    zeros: Float32s = np.zeros(num_scored, dtype=np.float32)
    return MicroBatch(
        token_ids=token_ids,
        position_ids=np.arange(num_tokens, dtype=np.int32),
        segment_lengths=np.array([num_tokens], dtype=np.int32),
        segment_parents=np.full(1, -1, dtype=np.int32),
        loss_positions=np.arange(num_scored, dtype=np.int32),
        targets=token_ids[1:],
        behaviour_logprobs=zeros,
        advantages=zeros,
        sampled_versions=np.zeros(num_scored, dtype=np.int32),
        loss_weights=zeros,
        trajectory_index=np.zeros(num_scored, dtype=np.int32),
        temperatures=np.ones(num_scored, dtype=np.float32),
    )


class PolicyModel(nn.Module):
    """A causal model whose forward returns what the loss needs, and no logits.

    mixture: its shape where recorded experts can be replayed in it, None otherwise.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, logprob_chunk: int):
        super().__init__()
        self.causal_lm = causal_lm
        self.logprob_chunk = logprob_chunk
        self.mixture = attach_routing_replay(causal_lm)

    def forward(
        self, row: RowTensors, *, has_entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Score the targets of one packed row, each at the temperature that it was sampled at.

        Returns: current log-probabilities [M] and entropies [M], float32, nats; the entropies with
            gradient where it is asked for.
        """
        hidden = _hidden_states(
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
    """V(s_t) = w h_t + b, h_t: the body's last hidden state at token t.

    A model of its own beside the policy: it shares no weights with it, so that the two losses need
    no balance. The head starts at 0: before its first update every value is 0, and advantages are
    the returns-to-go.
    """

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, row: RowTensors) -> Tensor:
        """Value every state of one packed row.

        Returns: [T] float32, with gradient: at position t, of the state that ends with token t. The
            state in which a token was sampled ends one position before the token.
        """
        hidden = _hidden_states(self.body, row.token_ids, row.position_ids, row.layout)
        # A sum over the one number, because FSDP2 warns of a module that returns a view.
        values: Tensor = self.head(hidden).sum(-1).float()
        return values


def load_policy(model: str, *, logprob_chunk: int, gradient_checkpointing: bool) -> PolicyModel:
    """Load a Hugging Face causal model in float32 on the CPU, with packed attention.

    Args: model: directory or hub name.
    Raises: NotImplementedError for an architecture that cannot be trained packed; OSError
        (transformers) when there is no such model.
    """
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=register_packed_attention()
    )
    causal_lm.eval()
    check_output_head(causal_lm)
    _prepare(causal_lm, gradient_checkpointing=gradient_checkpointing)
    policy = PolicyModel(causal_lm, logprob_chunk=logprob_chunk)
    # transformers checkpoints a layer only in training mode, which changes nothing else here.
    policy.train(gradient_checkpointing)
    return policy


def load_value_model(model: str, *, gradient_checkpointing: bool) -> ValueModel:
    """Load the body of a Hugging Face causal model in float32 on the CPU, with packed attention.

    Args: model: directory or hub name, mostly the policy's own.
    Raises: as `load_policy`.
    """
    body = AutoModel.from_pretrained(
        model, dtype=torch.float32, attn_implementation=register_packed_attention()
    )
    _prepare(body, gradient_checkpointing=gradient_checkpointing)
    critic = ValueModel(body)
    critic.train(gradient_checkpointing)
    return critic


def _prepare(model: PreTrainedModel, *, gradient_checkpointing: bool) -> None:
    """Make a model the same function in training as in scoring and in the engine, and check it."""
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # A mixture's noise on what its router sees: jitter_noise, router_jitter_noise, ...
        for name in [name for name in vars(module) if name.endswith("jitter_noise")]:
            setattr(module, name, 0.0)
    check_packing(model.base_model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


@torch.no_grad()
def check_output_head(causal_lm: PreTrainedModel) -> None:
    """Refuse a model that scales, caps or shifts its logits after the projection."""
    token_ids = torch.arange(4) % causal_lm.config.get_text_config().vocab_size
    layout = build_layout([4], device="cpu")
    logits = causal_lm(input_ids=token_ids[None], use_cache=False, packed_layout=layout).logits[0]
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise NotImplementedError(
            f"trainer: the output head of {type(causal_lm).__name__} is a {type(head).__name__}, "
            "expected a linear projection; choose another architecture"
        )
    projected = head(_hidden_states(causal_lm.base_model, token_ids, torch.arange(4), layout))
    if not torch.allclose(logits, projected, atol=_HEAD_TOLERANCE, rtol=_HEAD_TOLERANCE):
        difference = float((logits - projected).abs().max())
        raise NotImplementedError(
            f"trainer: {type(causal_lm).__name__} changes its logits after the output projection "
            f"(by {difference:.3g}), expected a plain projection; choose another architecture"
        )


@torch.no_grad()
def check_packing(body: PreTrainedModel) -> None:
    """Refuse a model in which the samples of a packed row see each other.

    Two short random samples with a common start are run as one packed row and each alone. Layers
    that mix tokens outside the attention interface (convolutions, state-space models, linear
    attention) do not know where a sample ends. Every rank checks alike, before it shards.

    Raises: NotImplementedError when hidden states differ by more than rounding.
    """
    body.eval()
    vocab_size = body.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    difference = 0.0
    for _ in range(_PACKING_ATTEMPTS):
        start, first, second = (
            torch.randint(vocab_size, (length,), generator=generator) for length in (6, 5, 7)
        )
        packed = _run(body, [start, first, second], parents=[-1, 0, 0])
        one = _run(body, [torch.cat([start, first])], parents=[-1])
        other = _run(body, [torch.cat([start, second])], parents=[-1])
        alone = torch.cat([one, other[len(start) :]])
        difference = float((packed - alone).abs().max() / alone.abs().max())
        if difference <= _PACKING_TOLERANCE:
            return
    raise NotImplementedError(
        f"trainer: {type(body).__name__} gives tokens of a packed row other hidden states than "
        f"their sample alone (by {difference:.2g} of the largest, expected at most "
        f"{_PACKING_TOLERANCE:g}), because its layers mix tokens outside of transformers' "
        "attention interface; choose an architecture that mixes tokens in attention alone"
    )


def _run(body: PreTrainedModel, segments: list[Tensor], *, parents: list[int]) -> Tensor:
    layout = build_layout([len(segment) for segment in segments], parents, device="cpu")
    positions = torch.from_numpy(layout.segments.token_positions())
    return _hidden_states(body, torch.cat(segments), positions, layout)


def _hidden_states(
    body: nn.Module,
    token_ids: Tensor,
    position_ids: Tensor,
    layout: PackedLayout,
    **extra: ReplayedExperts | None,
) -> Tensor:
    """Run one packed row through a model's body: the last hidden states, [T, D]."""
    output = body(
        input_ids=token_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        packed_layout=layout,
        **extra,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden
