"""One rank's critic: a value model with its own optimiser, sharded beside the policy.

Every method is collective: all ranks call it with their own rows, in the same order. A token's
weight is its share of the whole update's loss, so the losses of micro-batches and ranks only need
to be added. Letters: [T] tokens, [M] action tokens of one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.algorithm import CriticSettings
from actors.batch import Float32s, MicroBatch, ValueRow
from actors.statistics import only_known
from actors.trainer.model import load_value_model, row_tensors
from actors.trainer.settings import TrainerSettings
from actors.trainer.sharded_model import Sharding, TrainedModel
from actors.trainer.statistics import CriticStats

# If all targets are equal, the mean square and the square of the mean differ only by the rounding
# of their sums.
_EQUAL_TOLERANCE = 1e-9


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    value_targets: Tensor,
    loss_weights: Tensor,
    *,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of values against their targets; `clip` limits the change in one step.

    loss = sum_t w_t / 2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); without a clip
    sum_t w_t / 2 (V - R)^2.   Source: the value loss of OpenAI Baselines' ppo2, described as detail
    9 in Huang et al. 2022, "The 37 implementation details of PPO".

    Args: values: [M] float32, with gradient. old_values: [M] float32, of the critic at the step's
        start. value_targets: [M] float32, GAE's A + V_old. loss_weights: [M] float32. clip: c > 0.
    Returns: the loss, a scalar with gradient; and the number of tokens to which the clip applied,
        without gradient.
    Example: V [1, .1], V_old 0, R [0, 1], c .2, w 1: losses [.5, .405] -> .905
    """
    assert values.shape == old_values.shape == value_targets.shape == loss_weights.shape
    square = (values - value_targets).square()
    if clip is None:
        return 0.5 * (loss_weights * square).sum(), values.new_zeros((), dtype=torch.int64)
    moved = torch.clamp(values, old_values - clip, old_values + clip)
    clipped = (moved - value_targets).square()
    num_clipped = (clipped > square).sum().detach()
    return 0.5 * (loss_weights * torch.maximum(square, clipped)).sum(), num_clipped


def explained_variance(
    *, target_mean: float, target_mean_square: float, error_mean_square: float
) -> float | None:
    """Return the share of the value targets' variance that the values explain.

    1 - E[(R - V)^2] / Var[R].   Source: OpenAI Baselines, `explained_variance` (deviation: the
    mean of the error R - V is not subtracted; values that are wrong by a constant explain less).

    Args: float64 means over the same tokens.    Returns: at most 1; None if the targets do not vary
    beyond rounding.
    Example: R [0, 2], V [1, 1]: explained_variance(1, 2, 1) -> 0; V = R -> 1
    """
    variance = target_mean_square - target_mean**2
    if variance <= _EQUAL_TOLERANCE * target_mean_square:
        return None
    return 1.0 - error_mean_square / variance


class Critic:
    """A critic that predicts the values of states and learns from the returns that followed."""

    def __init__(
        self,
        model: str,
        settings: CriticSettings,
        trainer: TrainerSettings,
        sharding: Sharding,
        *,
        max_context_tokens: int | None = None,
    ) -> None:
        """Load the value model and shard it. Raises: as `load_value_model`.

        Args: model, max_context_tokens: as for `load_value_model`. settings: of the critic.
            trainer: settings that the critic's optimiser shares with the policy's.
        """
        value_model = load_value_model(
            model,
            gradient_checkpointing=trainer.gradient_checkpointing,
            max_context_tokens=max_context_tokens,
        )
        self.settings = settings
        own = replace(
            trainer,
            learning_rate=settings.learning_rate,
            warmup_updates=settings.warmup_updates,
            schedule=settings.schedule,
        )
        self.trained = TrainedModel(value_model, value_model.body, sharding, own)

    @torch.no_grad()
    def score(self, rows: tuple[MicroBatch, ...]) -> tuple[Float32s, ...]:
        """Return the values of each row's states, [T] float32.

        Entry t is the value of the state that ends with token t.
        """
        values = tuple(self._values(row).cpu().numpy() for row in rows)
        self.trained.free_weights()
        return values

    def update(self, rows: Sequence[ValueRow]) -> CriticStats:
        """Apply one optimiser update towards the targets.

        Change no weight if no row has a target.
        """
        sums = torch.zeros(7, dtype=torch.float64, device=self.trained.device)
        for number, row in enumerate(rows):
            self.trained.begin_micro_batch(is_last=number == len(rows) - 1)
            sums += self._accumulate(row)
        gathered, grad_norm = self.trained.gather(sums)
        stats = _stats(
            gathered.sum(0).tolist(),
            grad_norm=grad_norm,
            learning_rate=self.trained.learning_rate,
        )
        is_applied = not stats.is_skipped and stats.num_tokens > 0
        self.trained.finish_update(grad_norm=grad_norm, is_applied=is_applied)
        return stats

    def _values(self, row: MicroBatch) -> Tensor:
        values: Tensor = self.trained.model(row_tensors(row, device=self.trained.device))
        return values

    def _accumulate(self, value_row: ValueRow) -> Tensor:
        """Run a row forward and backward; return its sums in the order that `_stats` reads."""
        old, targets, weights, positions = (
            torch.tensor(numbers, device=self.trained.device)
            for numbers in (
                value_row.old_values,
                value_row.value_targets,
                value_row.row.loss_weights,
                value_row.row.loss_positions,
            )
        )
        values = self._values(value_row.row).index_select(0, positions)
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


def _stats(sums: list[float], *, grad_norm: float, learning_rate: float) -> CriticStats:
    loss, num_tokens, values, targets, targets_squared, errors_squared, num_clipped = sums
    count = max(num_tokens, 1.0)
    target_mean = targets / count
    statistics = {
        "critic_loss": loss,
        "critic_grad_norm": grad_norm,
        "critic_learning_rate": learning_rate,
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
