"""One trainer rank as a Ray actor: holds a `TrainerRank` and makes the calls that need Ray.

Methods run one at a time, in the order of their calls, so that all ranks enter the same collectives
in the same order. Only the methods in `CONCURRENCY` run concurrently with others. Ray never
restarts these actors, because a rank that lost its process group cannot join the other ranks again.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayTaskError,
)

from actors.batch import RankShard
from actors.deaths import ACTOR_DEATHS
from actors.expert_records import ModelShape
from actors.imports import quick_imports
from actors.network import LOOPBACK
from actors.trainer.settings import RankSettings
from actors.weights.board import Publication, Seat, StaleTerm, WeightGroup

# Slow imports, such as torch, are not at the top, because processes that start the ranks do not
# need them: a rank's own process imports them in its constructor and in `join`.
if TYPE_CHECKING:
    import torch.distributed as dist

    from actors.trainer.rank import TrainerRank
    from actors.weights.collective import Sender

BOARD_TIMEOUT_S = 30.0
CONCURRENCY = {"watch": 1, "save": 1}
# During a start libraries do the work, so progress is measured by memory in MiB and by processor
# time in units of this many seconds.
_START_TICK_S = 10.0
BOARD_PAUSE_S = 1.0


class TrainerRankActor:
    """The actor that holds one `TrainerRank`: `join` creates the rank, `call` calls its methods."""

    def __init__(self, settings: RankSettings, rank: int) -> None:
        # torch reads this when it is imported. Otherwise a thread that waits for another would
        # occupy a core that the engine, or the thread for which it waits, needs.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        with quick_imports():
            from actors.trainer.process_group import MOVED

        self._moved = MOVED
        self._settings = settings
        self._rank_number = rank
        self._store: dist.Store | None = None
        self._rank: TrainerRank | None = None
        self._sender: Sender | None = None

    @ray.method(concurrency_group="watch")
    def progress(self) -> int:
        """Return a number that grows as the rank works. If it stops growing, the rank may hang."""
        if self._rank is not None:
            return self._moved.total
        # Loading a model fills memory, and checking it takes time.
        num_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return num_mib + int(time.process_time() / _START_TICK_S)

    @ray.method(concurrency_group="watch")
    def node_id(self) -> str:
        """Return the id of the node that this rank runs on."""
        return ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="watch")
    def check(self) -> int:
        """Show that this rank is alive, and return its peak memory in bytes.

        On CPU, this is the memory of the process, otherwise of the GPU.
        Raises: RuntimeError if the thread that broadcasts the rank's weights has ended.
        """
        if self._sender is not None:
            self._sender.check()
        if self._rank is not None and self._rank.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self._rank.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @ray.method(concurrency_group="watch")
    def abandon(self) -> None:
        """Request that the current step is abandoned; do nothing if the rank has not joined yet."""
        if self._rank is not None:
            self._rank.abandon()

    def open_rendezvous(self, is_local: bool) -> str:
        """Open the store at which the ranks meet, and return its ADDRESS:PORT; only on rank 0.

        Args: is_local: whether all ranks share one node.
        """
        from actors.trainer.process_group import open_store

        address = LOOPBACK if is_local else ray.util.get_node_ip_address()
        store = open_store(
            address,
            num_ranks=self._settings.trainer.num_ranks,
            timeout_s=self._settings.collective_timeout_s,
        )
        self._store = store
        return f"{address}:{store.port}"

    def join(self, rendezvous: str, is_local: bool) -> ModelShape:
        """Meet the other ranks, load the model and return its shape.

        Args: is_local: whether all ranks share one node.
        """
        with quick_imports():
            from actors.trainer.process_group import connect_store, keep_freed_memory
            from actors.trainer.rank import TrainerRank

        keep_freed_memory()
        if self._store is None:
            self._store = connect_store(
                rendezvous,
                num_ranks=self._settings.trainer.num_ranks,
                timeout_s=self._settings.collective_timeout_s,
            )
        self._rank = TrainerRank(
            self._settings,
            rank=self._rank_number,
            store=self._store,
            address=LOOPBACK if is_local else ray.util.get_node_ip_address(),
        )
        return self._rank.shape

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rank by its name."""
        return getattr(self._joined, method)(*arguments)

    @ray.method(concurrency_group="save")
    def finish_save(self) -> Path:
        """Wait for the checkpoint that was begun last; return its directory."""
        return self._joined.finish_save()

    def score_rows(self, shard: RankShard) -> ObjectRef:
        """Score rows; return a reference to a tuple with the `RowScores` of each row."""
        return ray.put(self._joined.score_rows(shard))

    def put_weights(self) -> tuple[WeightGroup, ...]:
        """Gather and pack the weights, and put them into the object store.

        Returns: on rank 0, the packed groups with references to their buffers; on other ranks, ().
        """
        return tuple(
            replace(group, buffer=ray.put(group.buffer)) for group in self._joined.pack_weights()
        )

    def keep_weights(self, board: ActorHandle, term: int, version: int) -> tuple[WeightGroup, ...]:
        """Pack the weights, keep them, and broadcast them to engines that ask the weight board.

        The broadcasts take place in a thread, after this call.

        Returns: on rank 0, the packed groups without their bytes; on other ranks, ().
        """
        from actors.weights.collective import Sender

        packed = tuple(self._joined.pack_weights())
        if packed:
            self._sender = self._sender or Sender(
                _group_former(board),
                address=ray.util.get_node_ip_address(),
                device=self._joined.device,
            )
            self._sender.offer(Publication(term=term, version=version, groups=packed))
        return tuple(replace(group, buffer=None) for group in packed)

    def close(self) -> None:
        if self._rank is not None:
            self._rank.close()

    @property
    def _joined(self) -> TrainerRank:
        if self._rank is None:
            raise RuntimeError("trainer rank: not joined yet; start the group first")
        return self._rank


def _group_former(board: ActorHandle) -> Callable[[Publication, str, float], Seat | None]:
    """Return a function for `Sender` that forms a group of engines for a broadcast of weights.

    The function blocks. It returns None if the board does not answer in time, and raises StaleTerm
    if the board died.
    """

    def form_group(offer: Publication, store: str, timeout_s: float) -> Seat | None:
        call = board.form_group.remote(offer.term, offer.version, store, timeout_s)
        try:
            seat: Seat | None = ray.get(call, timeout=timeout_s + BOARD_TIMEOUT_S)
            return seat
        except RayTaskError as error:
            raise error.cause from error
        except ACTOR_DEATHS as error:
            raise StaleTerm("the weight board is gone, so nothing can be broadcast") from error
        except (GetTimeoutError, ActorUnavailableError):
            time.sleep(BOARD_PAUSE_S)
            return None

    return form_group
