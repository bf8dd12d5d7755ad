"""A training step with shared prefixes against the same step without: `python -m
benchmarks.train_step`.

Both sides are the trainer's own step (one rank, FSDP2, AdamW) on merged, packed rows of the same
samples: groups of eight whose prompt is four times as long as an answer. Prints one line of JSON:
the ratio of seconds with its quartiles over pairs run in turn, and the environment. The learning
rate is so small that the weights stay, so both sides do the same work throughout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from actors.batch import RankShard
from actors.merge.packing import WeightedSample, pack_minibatch
from actors.merge.prefix import Sample
from actors.trainer.memory import keep_freed_memory
from actors.trainer.process_group import LOOPBACK, open_store
from actors.trainer.rank import TrainerRank
from actors.trainer.settings import TrainerSettings
from actors.trainer.statistics import StepStats
from benchmarks.environment import describe_environment
from benchmarks.pairs import Seconds, Spread, time_pairs

VOCABULARY = 8192
GROUP_SIZE = 8
NUM_TRAJECTORIES = 32


def build_model(directory: Path) -> str:
    """Write a random Qwen3 of hidden size 256 and four layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def make_samples(*, num_prompt: int, num_answer: int) -> list[WeightedSample]:
    """Groups that share a prompt; every token of an answer is trained."""
    rng = np.random.default_rng(0)
    weighted = []
    weight = 1 / (NUM_TRAJECTORIES * num_answer)
    for number in range(NUM_TRAJECTORIES):
        if number % GROUP_SIZE == 0:
            prompt = rng.integers(0, VOCABULARY, num_prompt)
        token_ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, num_answer)])
        mask = (np.arange(token_ids.shape[0]) >= num_prompt).astype(np.uint8)
        sample = Sample(
            trajectory_id=str(number),
            turns=(0,),
            prompt_length=num_prompt,
            token_ids=token_ids.astype(np.int32),
            mask=mask,
            logprobs=(-9.0 * mask).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )
        weighted.append(
            WeightedSample(sample=sample, advantage=float(rng.normal()), loss_weight=weight)
        )
    return weighted


def make_shard(
    weighted: Sequence[WeightedSample], *, budget: int, share_prefixes: bool
) -> RankShard:
    """Pack one update for one rank."""
    minibatches = pack_minibatch(
        weighted,
        num_ranks=1,
        budget=budget,
        attention_tokens=8192,
        share_prefixes=share_prefixes,
    )
    return RankShard(step=0, trainer_version=0, minibatches=tuple(minibatches))


def start_rank(directory: Path, *, num_threads: int) -> TrainerRank:
    """Start the trainer's one rank in this process."""
    keep_freed_memory()
    settings = TrainerSettings(
        model=build_model(directory / "model"),
        checkpoint_dir=directory,
        num_ranks=1,
        learning_rate=1e-12,
        weight_decay=0.0,
        threads_per_rank=num_threads,
    )
    store, _ = open_store(LOOPBACK, num_ranks=1, timeout_s=60.0)
    return TrainerRank(settings, rank=0, store=store)


def train(rank: TrainerRank, shard: RankShard) -> StepStats:
    """Take one step, whatever version the rank has come to."""
    return rank.train_step(replace(shard, trainer_version=rank.version))


def measure(
    rank: TrainerRank, weighted: Sequence[WeightedSample], *, budget: int, num_pairs: int
) -> dict[str, object]:
    """Compare the rows without sharing with the rows with it."""
    flat = make_shard(weighted, budget=budget, share_prefixes=False)
    tree = make_shard(weighted, budget=budget, share_prefixes=True)
    # The first steps also warm up.
    losses = [train(rank, shard).loss for shard in (flat, tree)]
    pairs = time_pairs(lambda: train(rank, flat), lambda: train(rank, tree), num_pairs=num_pairs)
    num_tokens = [
        sum(row.num_tokens for part in shard.minibatches for row in part.micro_batches)
        for shard in (flat, tree)
    ]
    return {
        "ratio": asdict(Spread.of([a.wall_s / b.wall_s for a, b in pairs])),
        "ratio_cpu": asdict(Spread.of([a.cpu_s / b.cpu_s for a, b in pairs])),
        "ratio_tokens": round(num_tokens[0] / num_tokens[1], 3),
        "seconds": [_median(side) for side in zip(*pairs, strict=True)],
        "num_tokens": num_tokens,
        "losses": losses,
        "num_pairs": num_pairs,
    }


def _median(side: Sequence[Seconds]) -> dict[str, float]:
    return {
        "wall_s": round(statistics.median(each.wall_s for each in side), 3),
        "cpu_s": round(statistics.median(each.cpu_s for each in side), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a group's prompt")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    weighted = make_samples(num_prompt=options.prompt, num_answer=options.answer)
    with tempfile.TemporaryDirectory() as directory:
        rank = start_rank(Path(directory), num_threads=options.threads)
        measured = measure(rank, weighted, budget=options.budget, num_pairs=options.pairs)
        rank.close()
    result = {
        "benchmark": "train_step.tree_against_merged",
        "prompt_tokens": options.prompt,
        "answer_tokens": options.answer,
        **measured,
        "threads_per_rank": options.threads,
        **describe_environment("torch"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
