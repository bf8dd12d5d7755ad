"""Publishing through vLLM's own trainer-side engines: NCCL to other GPUs, CUDA IPC on the same.

vLLM's engine gathers each parameter on all ranks and sends it from rank 0; the four control calls
travel over the weight board, which hands them to every replica. Every rank calls `send` alike.
Invariant: a transfer group holds exactly the replicas that were live at its start; when replicas
come or go, it is built again. Needs CUDA; imported only where the transport asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from actors.trainer.process_group import Rendezvous, broadcast_integers
from actors.trainer.publish import gather_groups, published_shapes
from actors.trainer.settings import WeightBackend
from actors.weights.actor import BoardClient
from actors.weights.board import BoardStatus


class ShardedWeightSource(WeightSource):
    """vLLM's stream of full tensors, in the type that the trainer computes in."""

    def __init__(self, causal_lm: PreTrainedModel, *, dtype: torch.dtype) -> None:
        self._causal_lm = causal_lm
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, self._dtype, shape) for name, shape in published_shapes(self._causal_lm)
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for named in gather_groups(self._causal_lm, dtype=self._dtype):
            yield from named


class CudaPublisher:
    """One rank's end of vLLM's weight transfer."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        rank: int,
        transport: WeightBackend,
        client: BoardClient,
        read_status: Callable[[], BoardStatus],
        dtype: torch.dtype,
    ) -> None:
        """transport: nccl or ipc. client, read_status: the board's; only rank 0 calls them."""
        self._source = ShardedWeightSource(causal_lm, dtype=dtype)
        self._rank = rank
        self._transport = transport
        self._client = client
        self._read_status = read_status
        self._engine: TrainerWeightTransferEngine | None = None

    def send(self, version: int, *, rendezvous: Rendezvous) -> None:
        """Send the current weights and set `version` in every live replica.

        Args: rendezvous: a free port on rank 0's host, for NCCL when the group must meet.
        Raises: actors.weights.board.WeightCommandFailed when a replica fails; the transfer group
            is then dropped and the next call builds it again.
        """
        must_meet = self._engine is None
        num_workers = 0
        if self._rank == 0:
            status = self._read_status()
            must_meet = must_meet or status.needs_rendezvous
            num_workers = status.num_workers
        # Rank 0 alone asks, so that all ranks take the same turn.
        agreed = broadcast_integers([int(must_meet), num_workers], device=torch.device("cuda"))
        is_sent = False
        try:
            if agreed[0]:
                self._meet(agreed[1], rendezvous=rendezvous)
            self._client.version = version
            assert self._engine is not None
            self._engine.send_weights()
            is_sent = True
        finally:
            if not is_sent:
                self._drop_engine()

    def _meet(self, num_workers: int, *, rendezvous: Rendezvous) -> None:
        self._drop_engine()
        info: TrainerInitInfo
        if self._transport == WeightBackend.NCCL:
            info = NCCLTrainerInitInfo(
                rank=self._rank,
                master_address=rendezvous.address,
                master_port=rendezvous.port,
                world_size=num_workers + 1,
            )
        else:
            info = IPCTrainerInitInfo(rank=self._rank, packed=True)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=self._client, source=self._source
        )

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
