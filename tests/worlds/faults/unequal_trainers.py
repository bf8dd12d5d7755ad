"""Faults by which a trainer is another function than its engines, to be planted in a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.nn import functional

from actors.trainer.attention.forest import build_layout
from actors.trainer.model import RowTensors
from actors.trainer.rank import TrainerRank


def take_another_rope_table(rank: TrainerRank) -> None:
    """Its angles grow by a hundredth more a token: nothing at the start, much at the far end."""
    rank.causal_lm.base_model.rotary_emb.inv_freq.mul_(1.01)


def cast_temperatures(rank: TrainerRank) -> None:
    """To bfloat16, as a policy of mixed precision casts a forward's arguments."""

    def cast(row: RowTensors) -> RowTensors:
        temperatures = row.temperatures
        is_plain = temperatures is None
        return row if is_plain else replace(row, temperatures=temperatures.bfloat16().float())

    _change_rows(rank, cast)


def drop_in_layers(rank: TrainerRank) -> None:
    """As a layer does that is still in training mode: a hundredth of what it gives is zero."""
    for layer in rank.causal_lm.base_model.layers:
        layer.register_forward_hook(lambda module, given, output: functional.dropout(output, 0.01))


def let_samples_see_each_other(rank: TrainerRank) -> None:
    """As layers do that mix tokens outside of the packed attention."""
    _change_rows(
        rank, lambda row: replace(row, layout=build_layout([row.num_tokens], device="cpu"))
    )


def _change_rows(rank: TrainerRank, change: Callable[[RowTensors], RowTensors]) -> None:
    model: Any = rank._policy.model
    exact = model.forward
    model.forward = lambda row, **named: exact(change(row), **named)
