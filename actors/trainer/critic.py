"""One rank's critic: a value model with its own optimiser, an FSDP group beside the policy's.

Every method is collective: all ranks call it with their own rows, in the same order. Invariant: all
ranks take every decision from the same gathered numbers. Called by `TrainerRank`, which owns the
process group and its mesh.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from actors.batch import Float32s, MicroBatch, ValueRow, ValueShard
from actors.merge.advantages import CriticSettings
from actors.statistics import only_known
from actors.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate_at,
    local_gradients,
    set_learning_rate,
    squared_norm,
)
from actors.trainer.process_group import gather_rows
from actors.trainer.row import RowTensors, row_tensors
from actors.trainer.settings import TrainerSettings
from actors.trainer.statistics import CriticStats
from actors.trainer.value_loss import clipped_value_loss, explained_variance
from actors.trainer.value_model import load_value_model, shard_value_model

_LOG = logging.getLogger(__name__)


class Critic:
    """num_updates: applied so far; warm-up counts them."""

    def __init__(
        self,
        model: str,
        settings: CriticSettings,
        trainer: TrainerSettings,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        param_dtype: torch.dtype,
    ) -> None:
        """Load the value model and shard it.

        trainer: what its optimiser has in common with the policy's. Raises: OSError (transformers).
        """
        self.settings = settings
        self._max_grad_norm = trainer.max_grad_norm
        self.device = device
        self.num_updates = 0
        self.value_model = load_value_model(
            model, gradient_checkpointing=trainer.gradient_checkpointing
        )
        self._sharded = shard_value_model(
            self.value_model, mesh, param_dtype=param_dtype, reshard_after_forward=False
        )
        self._parameters = list(self.value_model.parameters())
        self.optimizer = build_optimizer(
            self._parameters, replace(trainer, learning_rate=settings.learning_rate)
        )

    def score(self, rows: tuple[MicroBatch, ...]) -> tuple[Float32s, ...]:
        """Value every state of each row: [T] float32, at place t of the state ending there."""
        with torch.no_grad():
            values = tuple(self._values(self._tensors(row)).cpu().numpy() for row in rows)
        for module in self._sharded:
            # No backward pass frees the gathered weights, and the next forward would read them.
            module.reshard()
        return values

    def update(self, shard: ValueShard) -> CriticStats:
        """Take one step towards the targets; nothing moves where there are none."""
        sums = torch.zeros(7, dtype=torch.float64, device=self.device)
        for number, row in enumerate(shard.rows):
            is_last = number == len(shard.rows) - 1
            self.value_model.set_requires_gradient_sync(is_last)
            self.value_model.set_is_last_backward(is_last)
            sums += self._accumulate(row)
        gradients = local_gradients(self._parameters)
        square = squared_norm(gradients, device=self.device)
        gathered = gather_rows(torch.cat([sums, square[None]])).sum(0).tolist()
        grad_norm = math.sqrt(gathered.pop())
        stats = _stats(gathered, grad_norm=grad_norm)
        if not stats.is_skipped and stats.num_tokens:
            clip_gradients(gradients, grad_norm=grad_norm, max_grad_norm=self._max_grad_norm)
            rate = learning_rate_at(
                self.num_updates,
                learning_rate=self.settings.learning_rate,
                warmup_updates=self.settings.warmup_updates,
            )
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.num_updates += 1
        if stats.is_skipped:
            _LOG.warning("step %d: the critic's update is not finite, skipped", shard.step)
        self.optimizer.zero_grad(set_to_none=True)
        return stats

    def _tensors(self, row: MicroBatch) -> RowTensors:
        return row_tensors(row, device=self.device)

    def _values(self, row: RowTensors) -> Tensor:
        values: Tensor = self.value_model(row.token_ids, row.position_ids, row.layout)
        return values

    def _accumulate(self, value_row: ValueRow) -> Tensor:
        """Forward and backward of one row; its sums, in the order that `_stats` reads."""
        row = self._tensors(value_row.row)
        values = self._values(row).index_select(0, row.loss_positions)
        old, targets, weights = (
            torch.as_tensor(numbers, dtype=torch.float32, device=self.device)
            for numbers in (
                value_row.old_values,
                value_row.value_targets,
                value_row.row.loss_weights,
            )
        )
        loss, num_clipped = clipped_value_loss(
            values, old, targets, weights, clip=self.settings.value_clip
        )
        loss.backward()
        with torch.no_grad():
            wide, wide_old = targets.double(), old.double()
            return torch.stack(
                [
                    loss.detach().double(),
                    values.new_tensor(values.shape[0], dtype=torch.float64),
                    wide_old.sum(),
                    wide.sum(),
                    wide.square().sum(),
                    (wide - wide_old).square().sum(),
                    num_clipped.double(),
                ]
            )


def _stats(sums: list[float], *, grad_norm: float) -> CriticStats:
    loss, num_tokens, values, targets, targets_squared, errors_squared, num_clipped = sums
    count = max(num_tokens, 1.0)
    target_mean = targets / count
    statistics = {
        "critic_loss": loss,
        "critic_grad_norm": grad_norm,
        "critic_explained_variance": explained_variance(
            target_mean=target_mean,
            target_mean_square=targets_squared / count,
            error_mean_square=errors_squared / count,
        ),
        "critic_value_mean": values / count,
        "critic_target_mean": target_mean,
        "critic_clip_fraction": num_clipped / count,
    }
    return CriticStats(
        statistics=only_known(statistics) if num_tokens else {},
        num_tokens=int(num_tokens),
        is_skipped=not (math.isfinite(loss) and math.isfinite(grad_norm)),
    )
