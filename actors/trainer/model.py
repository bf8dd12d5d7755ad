"""The policy as a module: packed row in, log-probabilities of the trained tokens out; sharded.

`PolicyModel` is the root of FSDP2, so that the output head is applied inside its forward, where
its weights are gathered. Invariant: the names and the tying of the Hugging Face model inside are
untouched; checkpoints, exports and publishing use `PolicyModel.causal_lm`, never the wrapper.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.trainer.attention.forest_layout import PackedLayout, build_layout
from actors.trainer.attention.interface import register_packed_attention
from actors.trainer.logprobs import LogitScorer, chunked_token_logprobs, token_logprobs
from actors.trainer.routing_replay import ReplayedExperts, attach_routing_replay

# One pass over a few tokens must show the head to be a plain projection; not a tolerance on
# training, only on the order in which two paths of the same model add.
_HEAD_TOLERANCE = 1e-4


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
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        loss_positions: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        score: LogitScorer = token_logprobs,
        experts: ReplayedExperts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Score the targets of one packed row.

        Args: token_ids, position_ids: [T] int64. loss_positions, targets: [M] int64.
            experts: what to replay; None: the model routes by itself.
        Returns: current log-probabilities [M] and entropies [M], float32, nats.
        """
        body = self.causal_lm.base_model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            packed_layout=layout,
            replayed_experts=experts,
        )
        return chunked_token_logprobs(
            body.last_hidden_state[0].index_select(0, loss_positions),
            targets,
            output_head=self.causal_lm.get_output_embeddings(),
            temperature=temperature,
            chunk_tokens=self.logprob_chunk,
            score=score,
        )


def load_policy(model: str, *, logprob_chunk: int, gradient_checkpointing: bool) -> PolicyModel:
    """Load a Hugging Face causal model in float32 on the CPU, with packed attention.

    Args: model: directory or hub name.
    Raises: NotImplementedError when its logits are more than a projection of the last hidden
        states; OSError (transformers) when there is no such model.
    """
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=register_packed_attention()
    )
    causal_lm.config.use_cache = False
    for module in causal_lm.modules():
        # The trained log-probabilities must be the engine's, which drops nothing and adds no noise.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.0
    check_output_head(causal_lm)
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = PolicyModel(causal_lm, logprob_chunk=logprob_chunk)
    # transformers checkpoints a layer only in training mode; without dropout the mode is else idle.
    policy.train(gradient_checkpointing)
    return policy


@torch.no_grad()
def check_output_head(causal_lm: PreTrainedModel) -> None:
    """Refuse a model that scales, caps or shifts its logits after the projection."""
    causal_lm.eval()
    token_ids = torch.arange(4)[None] % causal_lm.config.get_text_config().vocab_size
    layout = build_layout([4], device="cpu")
    logits = causal_lm(input_ids=token_ids, use_cache=False, packed_layout=layout).logits
    body = causal_lm.base_model(input_ids=token_ids, use_cache=False, packed_layout=layout)
    projected = causal_lm.get_output_embeddings()(body.last_hidden_state)
    if not torch.allclose(logits, projected, atol=_HEAD_TOLERANCE, rtol=_HEAD_TOLERANCE):
        difference = float((logits - projected).abs().max())
        raise NotImplementedError(
            f"trainer: {type(causal_lm).__name__} changes its logits after the output projection "
            f"(by {difference:.3g}), expected a plain projection; choose another architecture"
        )


def shard_policy(
    policy: PolicyModel,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> list[FSDPModule]:
    """Shard each decoder layer, then the rest (embedding, last norm, head) as the root's group.

    Tied embedding and head land in the same group, so they stay one parameter. Gradients are
    reduced in float32 and summed, not averaged: each token's loss weight is its share of the
    whole update.

    Returns: every sharded module, the root last.
    """
    return shard_layers(
        policy,
        set(policy.causal_lm._no_split_modules or ()),
        mesh,
        param_dtype=param_dtype,
        reshard_after_forward=reshard_after_forward,
    )


def shard_layers(
    root: nn.Module,
    layer_names: set[str],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> list[FSDPModule]:
    """Shard every module of these classes, then the rest as the root's group; as `shard_policy`."""
    mixed = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    layers = [module for module in root.modules() if type(module).__name__ in layer_names]
    for module in layers:
        fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    sharded = [module for module in (*layers, root) if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        # With a factor of one there is nothing to scale, and gloo knows only plain sums.
        module.set_force_sum_reduction_for_comms(True)
        # A rank whose tokens met none of an expert's weights must still join the reduction.
        module.set_reduce_scatter_unused_params(True, recurse=False)
    return sharded
