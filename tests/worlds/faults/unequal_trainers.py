"""Faults by which a trainer rank computes other values than the engines, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.nn import functional

from actors.trainer.attention.forest import build_layout
from actors.trainer.model import RowTensors
from actors.trainer.rank import TrainerRank


def take_another_rope_table(rank: TrainerRank) -> None:
    """Let the rotary angles grow 1 % faster: no error at the start, a large one at the end."""
    rank.causal_lm.base_model.rotary_emb.inv_freq.mul_(1.01)


def cast_temperatures(rank: TrainerRank) -> None:
    """Cast temperatures to bfloat16, as mixed precision casts the arguments of a forward pass."""

    def cast(row: RowTensors) -> RowTensors:
        temperatures = row.temperatures
        is_plain = temperatures is None
        return row if is_plain else replace(row, temperatures=temperatures.bfloat16().float())

    _change_rows(rank, cast)


def drop_in_layers(rank: TrainerRank) -> None:
    """Set 1 % of the output of each layer to zero, like layers that are still in training mode."""
    for layer in rank.causal_lm.base_model.layers:
        layer.register_forward_hook(lambda module, given, output: functional.dropout(output, 0.01))


def let_samples_see_each_other(rank: TrainerRank) -> None:
    """Let the samples of a packed row attend to each other, like layers that mix a row's tokens."""
    _change_rows(
        rank, lambda row: replace(row, layout=build_layout([row.num_tokens], device="cpu"))
    )


def _change_rows(rank: TrainerRank, change: Callable[[RowTensors], RowTensors]) -> None:
    model: Any = rank._policy.model
    exact = model.forward
    model.forward = lambda row, **named: exact(change(row), **named)
