"""Rayloom's own training step as one side: merged turns, packed rows, shared prefixes.

    python -m benchmarks.side_ours MODEL SHAPE --dtype float32

The step is `TrainerRank.train_step` of one rank (FSDP2, AdamW) with all its checks, statistics and
clipping. The learning rate is so small that the weights do not change, so every step does the same
work.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from actors.algorithm import AlgorithmSettings, Denominator, LossSettings
from actors.batch import RankShard
from actors.merge.packing import WeightedSample, pack_minibatch
from actors.network import LOOPBACK
from actors.trainer.process_group import keep_freed_memory, open_store
from actors.trainer.rank import TrainerRank
from actors.trainer.settings import LoraSettings, RankSettings, TrainerSettings
from actors.trainer.statistics import StepStats
from actors.types import Dtype
from benchmarks.pairs import time_once
from benchmarks.side import StepTaken, serve
from benchmarks.train_inputs import UpdateShape, make_trajectories, weigh

LEARNING_RATE = 1e-12


def make_shard(
    weighted: Sequence[WeightedSample], *, budget: int, share_prefixes: bool = True
) -> RankShard:
    """Return one update, packed for one rank."""
    minibatches = pack_minibatch(
        weighted,
        num_ranks=1,
        budget=budget,
        attention_tokens=8192,
        share_prefixes=share_prefixes,
    )
    return RankShard(step=0, trainer_version=0, minibatches=tuple(minibatches))


def num_tokens_of(shard: RankShard) -> int:
    return sum(row.num_tokens for part in shard.minibatches for row in part)


def start_rank(
    model: str,
    directory: Path,
    *,
    num_threads: int,
    dtype: Dtype = Dtype.FLOAT32,
    loss: LossSettings | None = None,
    lora: LoraSettings | None = None,
    gradient_checkpointing: bool = False,
    reshard_between_micro_batches: bool = False,
) -> TrainerRank:
    """Start the trainer's only rank in this process, and return it."""
    keep_freed_memory()
    settings = RankSettings(
        trainer=TrainerSettings(
            num_ranks=1,
            dtype=dtype,
            learning_rate=LEARNING_RATE,
            warmup_updates=0,
            threads=num_threads,
            lora=lora,
            gradient_checkpointing=gradient_checkpointing,
            reshard_between_micro_batches=reshard_between_micro_batches,
        ),
        # Every step takes the same tokens, which become older by a version each time.
        algorithm=AlgorithmSettings(loss=loss or LossSettings(), max_lag=10_000),
        model=model,
        checkpoint_dir=directory,
        weight_backend="object_store",
        chat_template=None,
        max_context_tokens=4096,
        seed=0,
    )
    store = open_store(LOOPBACK, num_ranks=1, timeout_s=60.0)
    return TrainerRank(settings, rank=0, store=store)


def train(rank: TrainerRank, shard: RankShard) -> StepStats:
    """Make one step at the rank's current version, and return its statistics."""
    return rank.train_step(replace(shard, trainer_version=rank.version))


def main() -> None:
    """Make a step for each command until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("shape", help="of the update, as JSON")
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32)
    parser.add_argument("--denominator", choices=get_args(Denominator), default="behaviour")
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    shape = UpdateShape.from_json(options.shape)
    shard = make_shard(weigh(make_trajectories(shape)), budget=options.budget)
    with tempfile.TemporaryDirectory() as directory:
        rank = start_rank(
            options.model,
            Path(directory),
            num_threads=options.threads,
            dtype=options.dtype,
            loss=LossSettings(denominator=options.denominator),
        )
        gc.freeze()

        def step(_: str) -> StepTaken:
            taken: list[StepStats] = []
            seconds = time_once(lambda: taken.append(train(rank, shard)))
            stats = taken[0]
            return StepTaken(
                seconds=seconds,
                loss=stats.statistics["loss"],
                grad_norm=stats.statistics["grad_norm"],
                entropy=stats.statistics["entropy_mean"],
            )

        serve(step)
        rank.close()


if __name__ == "__main__":
    main()
