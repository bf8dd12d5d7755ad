"""Ranks of a critic in processes of their own, with gloo between them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from actors.algorithm import CriticSettings
from actors.batch import ValueRow
from actors.network import LOOPBACK
from actors.trainer.critic import Critic
from actors.trainer.process_group import join_group
from actors.trainer.settings import TrainerSettings
from actors.trainer.sharded_model import Sharding
from actors.trainer.statistics import CriticStats

TIMEOUT_S = 300.0


def _update_twice(
    rank: int, num_ranks: int, model: str, rows: tuple[ValueRow, ...], store: str, found: object
) -> None:
    torch.set_num_threads(1)
    mesh = join_group(
        dist.FileStore(store, num_ranks),
        rank=rank,
        num_ranks=num_ranks,
        device=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
        address=LOOPBACK,
    )
    sharding = Sharding(mesh=mesh, device=torch.device("cpu"), param_dtype=torch.float32)
    settings = CriticSettings(learning_rate=1e-3, warmup_updates=0)
    critic = Critic(model, settings, TrainerSettings(), sharding)
    found.put((rank, [critic.update(rows) for _ in range(2)]))  # type: ignore[attr-defined]
    dist.destroy_process_group()


def update_twice(
    model: str, shards: Sequence[tuple[ValueRow, ...]], directory: Path
) -> list[list[CriticStats]]:
    """Update twice on the same shards, with a process for each rank.

    Returns: the statistics of each rank's two updates.
    """
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    store = str(directory / f"store-{len(shards)}")
    processes = [
        context.Process(
            target=_update_twice, args=(rank, len(shards), model, shard, store, found), daemon=True
        )
        for rank, shard in enumerate(shards)
    ]
    for process in processes:
        process.start()
    answers = dict(found.get(timeout=TIMEOUT_S) for _ in processes)
    for process in processes:
        process.join(TIMEOUT_S)
    return [answers[rank] for rank in range(len(shards))]
