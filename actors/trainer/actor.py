"""One trainer rank as a Ray actor: `TrainerRank`, and what of it needs Ray.

Methods run one at a time, in the order of their calls, so that the ranks' collectives line up.
Started, watched and killed by `group.TrainerGroup`; never restarted by Ray, because a rank that
lost its process group is of no use to the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
import torch.distributed as dist
from ray import ObjectRef
from ray.actor import ActorHandle

from actors.batch import RankShard
from actors.expert_records import ModelShape
from actors.trainer.process_group import (
    Rendezvous,
    connect_store,
    free_port,
    keep_freed_memory,
    open_store,
)
from actors.trainer.settings import RankSettings
from actors.weights.board import BoardStatus, WeightGroup

if TYPE_CHECKING:
    from actors.trainer.rank import TrainerRank

BOARD_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """Where a rank runs."""

    node_id: str
    node_address: str
    """Of its node, as the other nodes reach it."""
    process_id: int


class TrainerRankActor:
    """Holds one `TrainerRank`, which `join` makes; all of its methods are reached by `call`."""

    def __init__(self, settings: RankSettings, rank: int) -> None:
        self._settings = settings
        self._rank_number = rank
        self._store: dist.Store | None = None
        self._rank: TrainerRank | None = None
        self._publisher: object | None = None

    def process(self) -> RankProcess:
        return RankProcess(
            node_id=ray.get_runtime_context().get_node_id(),
            node_address=ray.util.get_node_ip_address(),
            process_id=os.getpid(),
        )

    def open_rendezvous(self, address: str) -> Rendezvous:
        """Open the store that the ranks meet at; rank 0 alone."""
        self._store, rendezvous = open_store(
            address,
            num_ranks=self._settings.trainer.num_ranks,
            timeout_s=self._settings.collective_timeout_s,
        )
        return rendezvous

    def join(self, rendezvous: Rendezvous, is_local: bool) -> ModelShape:
        """Meet the other ranks and load the model; returns what its trajectories have to fit.

        Args: is_local: all ranks share one node.
        """
        # Three seconds of imports, which the process that starts the ranks does without.
        from actors.trainer.rank import TrainerRank

        keep_freed_memory()
        if self._store is None:
            self._store = connect_store(
                rendezvous,
                num_ranks=self._settings.trainer.num_ranks,
                timeout_s=self._settings.collective_timeout_s,
            )
        self._rank = TrainerRank(
            self._settings, rank=self._rank_number, store=self._store, is_local=is_local
        )
        return self._rank.shape

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rank by its name."""
        return getattr(self._joined, method)(*arguments)

    def score_rows(self, shard: RankShard) -> ObjectRef:
        """A reference to the answers: [rows] RowScores."""
        return ray.put(self._joined.score_rows(shard))

    def put_weights(self) -> tuple[WeightGroup, ...]:
        """Put the packed weights into the object store; rank 0 returns them, the others nothing."""
        return tuple(
            replace(group, buffer=ray.put(group.buffer)) for group in self._joined.pack_weights()
        )

    def transfer_port(self, address: str) -> Rendezvous:
        """Choose where rank 0 and the engines may meet."""
        return Rendezvous(address=address, port=free_port(address))

    def send_weights(
        self, board: ActorHandle, term: int, version: int, rendezvous: Rendezvous
    ) -> None:
        """Send the weights through vLLM's own transfer; CUDA only."""
        from actors.trainer.publish_cuda import CudaPublisher
        from actors.weights.actor import BoardClient

        def read_status() -> BoardStatus:
            return ray.get(board.status.remote(), timeout=BOARD_TIMEOUT_S)

        rank = self._joined
        if not isinstance(self._publisher, CudaPublisher):
            self._publisher = CudaPublisher(
                rank.causal_lm,
                rank=self._rank_number,
                transport=self._settings.weight_backend,
                client=BoardClient(board, term),
                read_status=read_status,
                dtype=rank.param_dtype,
            )
        self._publisher.send(version, rendezvous=rendezvous)

    def close(self) -> None:
        if self._rank is not None:
            self._rank.close()

    @property
    def _joined(self) -> TrainerRank:
        if self._rank is None:
            raise RuntimeError("trainer rank: not joined yet; start the group first")
        return self._rank
