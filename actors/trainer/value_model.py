"""The critic as a module: packed row in, the value of the state behind each token out; sharded.

A model of its own next to the policy: the body of a causal model, and a head of one number. It
shares nothing with the policy, so that the two losses need no balance. Called by whoever holds the
critic's FSDP group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModel, PreTrainedModel

from actors.trainer.attention.forest_layout import PackedLayout
from actors.trainer.attention.interface import register_packed_attention
from actors.trainer.model import shard_layers


class ValueModel(nn.Module):
    """V(s_t) = w h_t + b, h_t: the body's last hidden state at token t.

    The head starts at 0: before its first update a critic says nothing, and advantages are the
    returns-to-go.
    """

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids: Tensor, position_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Value every state of one packed row.

        Args: token_ids, position_ids: [T] int64.
        Returns: [T] float32, with gradient: at place t, of the state that ends with token t. The
            state in which a token was sampled ends one place before it.
        """
        hidden = self.body(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            packed_layout=layout,
        ).last_hidden_state[0]
        # A sum over the one number, because FSDP2 warns of a module that returns a view.
        values: Tensor = self.head(hidden).sum(-1).float()
        return values


def load_value_model(model: str, *, gradient_checkpointing: bool) -> ValueModel:
    """Load the body of a Hugging Face causal model in float32 on the CPU, with packed attention.

    Args: model: directory or hub name, the policy's own as a rule.
    Raises: OSError (transformers) when there is no such model.
    """
    body = AutoModel.from_pretrained(
        model, dtype=torch.float32, attn_implementation=register_packed_attention()
    )
    body.config.use_cache = False
    for module in body.modules():
        # What a state is worth must not depend on chance: it is compared with itself later.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if gradient_checkpointing:
        body.gradient_checkpointing_enable({"use_reentrant": False})
    critic = ValueModel(body)
    critic.train(gradient_checkpointing)
    return critic


def shard_value_model(
    critic: ValueModel,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> list[FSDPModule]:
    """Shard each decoder layer, then the rest; gradients are summed, as in `shard_policy`.

    Returns: every sharded module, the root last.
    """
    return shard_layers(
        critic,
        set(critic.body._no_split_modules or ()),
        mesh,
        param_dtype=param_dtype,
        reshard_after_forward=reshard_after_forward,
    )
