"""Tests of the value model: packed and sharded forms are equal to the plain one, and it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from actors.batch import scoring_row
from actors.trainer.critic import clipped_value_loss
from actors.trainer.model import RowTensors, ValueModel, load_value_model, row_tensors
from actors.trainer.sharded_model import ShardedModel, Sharding

LENGTHS = [5, 17, 1, 9]


def make_critic(model: str, *, gradient_checkpointing: bool = False) -> ValueModel:
    """Return a critic whose head is not zero."""
    critic = load_value_model(model, gradient_checkpointing=gradient_checkpointing)
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    return critic


def rows() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 500, length).astype(np.int32) for length in LENGTHS]


def packed(samples: list[np.ndarray]) -> RowTensors:
    lengths = [len(sample) for sample in samples]
    row = replace(
        scoring_row(np.concatenate(samples)),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        segment_lengths=np.array(lengths, np.int32),
        segment_parents=np.full(len(lengths), -1, np.int32),
    )
    return row_tensors(row, device=torch.device("cpu"))


def values_of(critic: ValueModel, samples: list[np.ndarray]) -> Tensor:
    values: Tensor = critic(packed(samples))
    return values


def gradients(critic: ValueModel) -> dict[str, Tensor]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in critic.named_parameters()
        if p.grad is not None
    }


def test_a_new_critic_gives_every_state_the_value_0(model: str) -> None:
    values = values_of(load_value_model(model, gradient_checkpointing=False), rows())
    assert values.dtype == torch.float32 and values.tolist() == [0.0] * sum(LENGTHS)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_packed_row_has_the_values_and_gradients_of_separate_samples(
    model: str, is_checkpointed: bool
) -> None:
    packed, alone = (make_critic(model, gradient_checkpointing=is_checkpointed) for _ in range(2))
    together = values_of(packed, rows())
    apart = torch.cat([values_of(alone, [sample]) for sample in rows()])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    assert together.std() > 0.01
    together.square().sum().backward()
    apart.square().sum().backward()
    expected = gradients(alone)
    for name, gradient in gradients(packed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)


def test_sharding_changes_neither_values_nor_gradients(model: str, mesh: DeviceMesh) -> None:
    whole, sharded = make_critic(model), make_critic(model)
    sharding = Sharding(mesh=mesh, device=torch.device("cpu"), param_dtype=torch.float32)
    ShardedModel(sharded, sharded.body, sharding)
    assert sum(isinstance(module, FSDPModule) for module in sharded.modules()) > 1
    values = [values_of(critic, rows()) for critic in (whole, sharded)]
    for each in values:
        each.square().sum().backward()
    torch.testing.assert_close(values[1], values[0])
    expected, found = gradients(whole), gradients(sharded)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_all_layers_of_a_sharded_model_share_one_plan_of_the_row(
    model: str, mesh: DeviceMesh
) -> None:
    critic = make_critic(model)
    sharding = Sharding(mesh=mesh, device=torch.device("cpu"), param_dtype=torch.float32)
    ShardedModel(critic, critic.body, sharding)
    row = packed(rows())
    critic(row)
    # The row itself has the plan, not a copy that was passed to a layer.
    assert list(row.layout.plans) == [None]


def test_minimising_the_value_loss_moves_values_to_their_targets(model: str) -> None:
    critic, samples = make_critic(model), rows()
    optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3)
    targets = torch.linspace(-1, 1, sum(LENGTHS))
    weights = torch.full_like(targets, 1 / sum(LENGTHS))
    losses = []
    for _ in range(30):
        values = values_of(critic, samples)
        loss, _ = clipped_value_loss(values, values.detach(), targets, weights, clip=0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
