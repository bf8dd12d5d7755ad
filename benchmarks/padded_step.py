"""Train on turns in the plain way: with a padded row for each turn and full logits of each token.

Each turn is a row of its whole history and its sampled tokens. Rows are padded on the right to one
length and go through transformers' own model, a few at a time. Simple optimisations are used: no
attention mask, because no real token comes after the padding, so that the causal kernel is used;
the log-probability is the logit minus the normaliser; no entropies; the fused optimiser. Letters:
[B] rows, [L] padded length, [V] vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.types import Trajectory
from benchmarks.train_inputs import advantages_of

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """One turn with token_ids [P + A].

    The last A tokens are trained; logprobs [A] are those of the sampler.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Padded rows.

    token_ids, targets: [B, L] int64; a target is the next token's id. behaviour_logprobs (nats),
    advantages, weights: [B, L] float32, 0 if the target is not trained.
    """

    token_ids: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor


def turn_rows(trajectories: Sequence[Trajectory]) -> list[TurnRow]:
    """Return one row for each turn, in the order of trajectories."""
    return [
        TurnRow(
            token_ids=sample.token_ids[: turn.end],
            logprobs=sample.logprobs[turn.tokens],
            advantage=advantage,
        )
        for trajectory, advantage in zip(trajectories, advantages_of(trajectories), strict=True)
        for sample in trajectory.samples
        for turn in sample.turns
    ]


def pad_rows(rows: Sequence[TurnRow], *, length: int, weight: float) -> PaddedRows:
    """Return rows padded on the right. weight: the weight of each trained token."""
    token_ids = np.zeros((len(rows), length), np.int64)
    targets = np.zeros_like(token_ids)
    behaviour, advantages, weights = (np.zeros(token_ids.shape, np.float32) for _ in range(3))
    for number, row in enumerate(rows):
        end = len(row.token_ids)
        token_ids[number, :end] = row.token_ids
        targets[number, : end - 1] = row.token_ids[1:]
        trained = slice(end - 1 - len(row.logprobs), end - 1)
        behaviour[number, trained] = row.logprobs
        advantages[number, trained] = row.advantage
        weights[number, trained] = weight
    return PaddedRows(
        token_ids=torch.from_numpy(token_ids),
        targets=torch.from_numpy(targets),
        behaviour_logprobs=torch.from_numpy(behaviour),
        advantages=torch.from_numpy(advantages),
        weights=torch.from_numpy(weights),
    )


def padded_batches(rows: Sequence[TurnRow], *, rows_at_once: int) -> Iterator[PaddedRows]:
    """Yield micro-batches of the rows, all padded to the length of the longest row."""
    length = max(len(row.token_ids) for row in rows)
    weight = 1 / sum(len(row.logprobs) for row in rows)
    for start in range(0, len(rows), rows_at_once):
        yield pad_rows(rows[start : start + rows_at_once], length=length, weight=weight)


def sorted_batches(rows: Sequence[TurnRow], *, rows_at_once: int) -> Iterator[PaddedRows]:
    """Yield micro-batches of the rows sorted by length, each padded only to its own longest row."""
    ordered = sorted(rows, key=lambda row: len(row.token_ids))
    weight = 1 / sum(len(row.logprobs) for row in rows)
    for start in range(0, len(ordered), rows_at_once):
        chosen = ordered[start : start + rows_at_once]
        yield pad_rows(chosen, length=len(chosen[-1].token_ids), weight=weight)


def clip_loss(logits: Tensor, rows: PaddedRows) -> Tensor:
    """Return PPO's clipped loss against the sampler's policy, as a sum weighted by token.

    logits: [B, L, V].
    """
    logits = logits.float()
    chosen = logits.gather(-1, rows.targets[..., None])[..., 0]
    ratio = torch.exp(chosen - torch.logsumexp(logits, -1) - rows.behaviour_logprobs)
    clipped = torch.clamp(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    losses = -torch.minimum(ratio * rows.advantages, clipped * rows.advantages)
    return (losses * rows.weights).sum()


def accumulate(
    model: torch.nn.Module, batches: Iterable[PaddedRows], *, dtype: torch.dtype
) -> float:
    """Add the gradients of all micro-batches to the model's gradients, and return the loss."""
    total = 0.0
    for rows in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(input_ids=rows.token_ids, use_cache=False).logits
        loss = clip_loss(logits, rows)
        loss.backward()
        total += loss.item()
    return total
