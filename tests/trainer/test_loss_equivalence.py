"""Tests that loss and gradient of a real model do not depend on the layout of an update.

For every loss and aggregation these are equal: merged and unmerged samples, packed and padded
rows, one and many micro-batches, the rows of one and of two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from worlds.builders.loss_terms import EVERY_LOSS
from worlds.builders.trajectory_builders import linear_turns, make_trajectory, replayed, whole_turns

from actors.algorithm import Aggregation, LossSettings
from actors.batch import MicroBatch
from actors.merge.packing import WeightedSample, pack_minibatch, pack_row
from actors.merge.step import trajectory_weights
from actors.trainer.loss.micro_batch import MicroBatchTerms, micro_batch_loss
from actors.trainer.model import PolicyModel, load_policy, row_tensors
from actors.types import Sample, Trajectory

CPU = torch.device("cpu")
# The rounding of float32 sums of the same numbers in another order.
TOLERANCE = 2e-5


def make_trajectories() -> list[Trajectory]:
    """Return six trajectories in three groups, with about the probabilities of the model."""
    rng = np.random.default_rng(0)
    trajectories = []
    for number in range(6):
        turns = linear_turns(1 + number % 4, sampled=1 + number, seed=number)
        turns = [
            replace(turn, logprobs=rng.normal(-6.2, 0.2, turn.num_sampled).astype(np.float32))
            for turn in turns
        ]
        trajectories.append(make_trajectory(turns, rollout_id=f"g{number // 2:06d}.0-{number % 2}"))
    return trajectories


def merged_samples(trajectory: Trajectory) -> list[Sample]:
    return list(trajectory.samples)


def unmerged_samples(trajectory: Trajectory) -> list[Sample]:
    """Return each turn as a separate sample of the same trajectory."""
    parts = [replayed(trajectory, [turn]) for turn in whole_turns(trajectory)]
    return [sample for part in parts for sample in part.samples]


def weigh(trajectory_samples: Sequence[list[Sample]], aggregation: Aggregation) -> list:
    weights = trajectory_weights(
        [sum(sample.num_trained for sample in samples) for samples in trajectory_samples],
        [samples[0].trajectory_id.rpartition("-")[0] for samples in trajectory_samples],
        aggregation=aggregation,
        without_signal=np.array([30.0, 2, 1]),
        constant_tokens=50,
    )
    advantages = np.random.default_rng(1).normal(size=len(weights))
    return [
        WeightedSample(sample=sample, advantage=float(advantage), loss_weight=float(weight))
        for samples, advantage, weight in zip(trajectory_samples, advantages, weights, strict=True)
        for sample in samples
    ]


def rows_of(weighted: list[WeightedSample], *, num_ranks: int = 1, budget: int = 10_000) -> list:
    shares = pack_minibatch(weighted, num_ranks=num_ranks, budget=budget, attention_tokens=64)
    return [row for share in shares for row in share if row.num_trained]


def terms_of(row: MicroBatch, current: Tensor, entropies: Tensor) -> MicroBatchTerms:
    """Return a row's terms; old and reference log-probabilities depend only on the token."""
    tensors = row_tensors(row, device=CPU)
    positions = tensors.position_ids[tensors.loss_positions]
    wave = torch.sin(1.3 * tensors.targets + positions)
    return tensors.terms(
        current,
        entropies,
        trainer_version=0,
        old_logprobs=tensors.behaviour_logprobs + 0.2 * wave,
        reference_logprobs=tensors.behaviour_logprobs - 0.3 * wave,
    )


def packed_terms(policy: PolicyModel, rows: Sequence[MicroBatch]) -> list[MicroBatchTerms]:
    terms = []
    for row in rows:
        tensors = row_tensors(row, device=CPU)
        current, entropies = policy(tensors, has_entropy_gradient=True)
        terms.append(terms_of(row, current, entropies))
    return terms


def padded_terms(model: torch.nn.Module, weighted: list[WeightedSample]) -> list[MicroBatchTerms]:
    """Compute the terms with right-padded samples, full logits and transformers' attention."""
    rows = [pack_row([each]) for each in weighted]
    width = max(row.num_tokens for row in rows)
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    attention = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        token_ids[number, : row.num_tokens] = torch.tensor(row.token_ids)
        attention[number, : row.num_tokens] = 1
    logits = model(input_ids=token_ids, attention_mask=attention).logits
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    whole = pack_row(weighted)
    current, entropies = [], []
    for number, row in enumerate(rows):
        at = torch.tensor(row.loss_positions, dtype=torch.int64)
        current.append(logprobs[number, at, torch.tensor(row.targets, dtype=torch.int64)])
        entropies.append(entropy[number, at])
    return [terms_of(whole, torch.cat(current), torch.cat(entropies))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The terms of a layout's micro-batches, and the parameters for the gradient."""

    terms: list[MicroBatchTerms]
    parameters: list[Tensor]

    def loss_and_gradient(self, settings: LossSettings) -> tuple[float, Tensor]:
        loss = torch.stack([micro_batch_loss(terms, settings).loss for terms in self.terms]).sum()
        gradients = torch.autograd.grad(loss, self.parameters, retain_graph=True)
        return loss.item(), torch.cat([gradient.reshape(-1) for gradient in gradients])


@pytest.fixture(scope="module", params=get_args(Aggregation))
def layouts(request: pytest.FixtureRequest, tiny_models: dict[bool, str]) -> dict[str, Layout]:
    policy = load_policy(tiny_models[True], logprob_chunk=7, gradient_checkpointing=False)
    parameters = list(policy.causal_lm.parameters())
    model = AutoModelForCausalLM.from_pretrained(tiny_models[True], dtype=torch.float32)
    trajectories = make_trajectories()
    merged = weigh([merged_samples(each) for each in trajectories], request.param)
    unmerged = weigh([unmerged_samples(each) for each in trajectories], request.param)
    assert len(unmerged) > len(merged)
    ways = {
        "merged": rows_of(merged),
        "unmerged": rows_of(unmerged),
        "many rows": rows_of(merged, budget=60),
        "two ranks": rows_of(unmerged, num_ranks=2, budget=90),
    }
    assert len(ways["many rows"]) > 2 and len(ways["merged"]) == 1
    layouts = {
        name: Layout(terms=packed_terms(policy, rows), parameters=parameters)
        for name, rows in ways.items()
    }
    padded = padded_terms(model, unmerged)
    return {**layouts, "padded": Layout(terms=padded, parameters=list(model.parameters()))}


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_loss_and_gradient_do_not_depend_on_the_layout(
    layouts: dict[str, Layout], name: str
) -> None:
    settings = EVERY_LOSS[name]
    loss, gradient = layouts["merged"].loss_and_gradient(settings)
    size = float(gradient.norm())
    assert size > 1e-3
    for way in layouts.keys() - {"merged"}:
        other_loss, other_gradient = layouts[way].loss_and_gradient(settings)
        assert other_loss == pytest.approx(loss, abs=TOLERANCE), way
        assert float((other_gradient - gradient).norm()) < TOLERANCE * max(size, 1.0), way
