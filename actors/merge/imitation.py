"""The steps of supervised training: choose the chats of a step and pack them into rows.

The loss of a step is the mean of -log p over the trained tokens of its chats, over all ranks and
micro-batches. The trainer needs no other loss for it: it uses the objective reinforce with
advantage 1 and a ratio against the policy at the step's start, which is 1 because a step has one
update. Pure: a step depends only on the seed, its number and the chats, so that a resumed run
trains the same steps. Called by `service.run.sft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actors.algorithm import AlgorithmSettings, Denominator, LossSettings, Objective
from actors.batch import RankShard
from actors.merge.packing import WeightedSample, pack_minibatch
from actors.merge.settings import StepSettings
from actors.types import NO_VERSION, Sample

# With these settings the trainer's loss is -log p for each token.
IMITATION = AlgorithmSettings(
    loss=LossSettings(objective=Objective.REINFORCE, denominator=Denominator.OLD)
)


def steps_per_epoch(num_chats: int, chats_per_step: int) -> int:
    """Return the number of steps that a pass over the chats takes; the last step may be smaller."""
    return -(-num_chats // chats_per_step)


def chats_of_step(step: int, *, num_chats: int, chats_per_step: int, seed: int) -> list[int]:
    """Return the numbers of a step's chats. Each epoch contains each chat once, in a new order.

    Args: step: counted from 1.
    """
    epoch, part = divmod(step - 1, steps_per_epoch(num_chats, chats_per_step))
    order = np.random.default_rng([seed, epoch]).permutation(num_chats)
    chosen: list[int] = order[part * chats_per_step : (part + 1) * chats_per_step].tolist()
    return chosen


def imitation_shards(
    chats: Sequence[Sequence[Sample]], *, step: int, settings: StepSettings
) -> tuple[RankShard, ...]:
    """Pack the chats of a step; every trained token has the same weight.

    Args: chats: the samples of each chat. step: counted from 1; the trainer holds version step - 1.
    Returns: a shard for each rank.
    """
    samples = [sample for chat in chats for sample in chat]
    weight = 1.0 / sum(sample.num_trained for sample in samples)
    minibatches = pack_minibatch(
        [
            WeightedSample(sample=_of_version(sample, step - 1), advantage=1.0, loss_weight=weight)
            for sample in samples
        ],
        num_ranks=settings.trainer.num_ranks,
        budget=settings.trainer.tokens_per_micro_batch,
        attention_tokens=settings.attention_tokens,
        share_prefixes=settings.trainer.share_prefixes,
    )
    return tuple(
        RankShard(step=step, trainer_version=step - 1, minibatches=(minibatch,))
        for minibatch in minibatches
    )


def _of_version(sample: Sample, version: int) -> Sample:
    """Return the sample with `version` at each trained token, which the trainer requires."""
    is_trained = sample.versions != NO_VERSION
    versions = np.where(is_trained, np.int32(version), np.int32(NO_VERSION))
    return replace(sample, versions=versions)
