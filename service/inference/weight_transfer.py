"""The two weight-transfer backends in vLLM's worker, which load packed groups of tensors.

The groups hold the whole weights or, in an engine with LoRA, only the tensors of the adapter, which
`install_adapter` gives to vLLM.

collective: the worker receives the groups in a broadcast (`actors.weights.collective`).
object_store: the replica writes each weight group into an anonymous memory file (`StagedBuffer`).
The worker maps the file by its path (/proc/PID/fd/N), checks the checksum and loads the tensors as
views.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from actors.weights.board import Seat, WeightManifest
from actors.weights.buffers import Bytes, buffer_checksum, unpack_group
from actors.weights.collective import Reception
from service.inference import plugin
from service.inference.lora import install_adapter

_Init = TypeVar("_Init", bound=WeightTransferInitInfo)
_Update = TypeVar("_Update", bound=WeightTransferUpdateInfo)


class StagedBuffer:
    """An anonymous memory file with the bytes of a weight group; `close` removes it."""

    def __init__(self, buffer: Bytes) -> None:
        self.num_bytes = int(buffer.nbytes)
        # Not in /dev/shm: no file remains after a kill, and a container's limit does not apply.
        self._fd = os.memfd_create("rayloom-weights")
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            view = buffer.data
            written = 0
            while written < self.num_bytes:
                written += os.write(self._fd, view[written:])
            on_failure.pop_all()

    @property
    def path(self) -> str:
        """The path by which other processes of the same user on this machine can open the file."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_buffer(path: str, *, num_bytes: int) -> Bytes:
    """Map the file of a `StagedBuffer` into memory, and return its bytes.

    The file stays mapped as long as the returned array or a view of the array exists.
    Raises: ValueError if the file is not num_bytes long.
    """
    with open(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) != num_bytes:
            raise ValueError(f"weights: {path} has {size} bytes, expected {num_bytes}")
        # Private and writable, because torch refuses read-only memory; nothing is ever written.
        mapped = mmap.mmap(
            file.fileno(), num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    return np.frombuffer(mapped, dtype=np.uint8)


@dataclass
class ObjectStoreUpdateInfo(WeightTransferUpdateInfo):
    """The arguments with which a worker loads one weight group by the object_store backend."""

    path: str
    checksum: str
    manifest: dict[str, Any]
    """The fields of the group's `WeightManifest`; vLLM's serializer turns tuples into lists."""


@dataclass
class CollectiveInitInfo(WeightTransferInitInfo):
    """The arguments with which an engine's workers join a broadcast and check its weight groups."""

    seat: dict[str, Any]
    """The fields of the engine's `Seat`; `rank` is the rank of the engine's first worker."""
    address: str
    """The address at which other members of the broadcast reach this node."""
    progress: str
    """Prefix of the paths of the progress files; worker N writes to the prefix + ".N"."""
    manifests: list[dict[str, Any]]
    checksums: list[str]


@dataclass
class CollectiveUpdateInfo(WeightTransferUpdateInfo):
    """The argument with which a worker loads one weight group that it received in a broadcast."""

    index: int
    """Index of the weight group in the publication."""


class WorkerExtension:
    """Methods that vLLM adds to its worker class: they report start times and install adapters."""

    vllm_config: VllmConfig
    weight_transfer_engine: WeightTransferEngine[Any, Any]

    def start_marks(self) -> tuple[float, float, float]:
        """Return when vLLM was imported, when the model was loaded, and the compile duration.

        The two times are in seconds since 1970, the duration is in seconds.
        """
        transfer = self.weight_transfer_engine
        assert isinstance(transfer, _LayerwiseReload)
        compilation = self.vllm_config.compilation_config
        return plugin.registered_at, transfer.made_at, compilation.compilation_time

    def install_adapter(self) -> None:
        """Replace the policy's adapter by the adapter that the last weight update transferred.

        Call this after `finish_weight_update`, in which vLLM removes all adapters.
        Raises: ValueError as in `service.inference.lora.install_adapter`.
        """
        transfer = self.weight_transfer_engine
        assert isinstance(transfer, _LayerwiseReload)
        install_adapter(transfer.model.lora_manager, transfer.take_adapter())


class _LayerwiseReload(WeightTransferEngine[_Init, _Update]):
    """Base class of both backends: it loads packed weight groups by vLLM's layerwise reload."""

    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        """Record the time in `made_at`; vLLM creates the object right after loading the model."""
        super().__init__(*arguments)
        self.made_at = time.time()
        self._adapter: dict[str, Tensor] | None = None
        """The adapter's tensors received in the current update; None in an engine without LoRA."""

    def start_weight_update(self) -> None:
        if hasattr(self.model, "lora_manager"):
            self._adapter = {}
        else:
            initialize_layerwise_reload(self.model)

    def load(self, manifest: WeightManifest, buffer: Tensor) -> None:
        """Load a group's weights into the model; with LoRA, keep the group for `take_adapter`."""
        tensors = unpack_group(manifest, buffer)
        if self._adapter is None:
            self.model.load_weights(tensors)
        else:
            # Copy the tensors, because the buffer is unmapped when its last view is deleted.
            self._adapter |= {name: tensor.clone() for name, tensor in tensors}

    def take_adapter(self) -> dict[str, Tensor]:
        """Return the adapter's transferred tensors by PEFT's names, and forget them."""
        adapter, self._adapter = self._adapter, None
        return adapter or {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one weight group. Raises: ValueError if the group differs from the trainer's."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            # Wait for the copies to the device, because the buffer may be unmapped afterwards.
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        if self._adapter is not None:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_kept_weights(self.model)

    def shutdown(self) -> None:
        """Do nothing, because this class holds no resources between two weight updates."""


class ObjectStoreWeightTransferEngine(
    _LayerwiseReload[WeightTransferInitInfo, ObjectStoreUpdateInfo]
):
    """The object_store backend: it loads weight groups from memory that the replica shares."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = ObjectStoreUpdateInfo

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: this backend has no process group to join."""

    def receive_weights(self, update_info: ObjectStoreUpdateInfo) -> None:
        manifest = WeightManifest(**update_info.manifest)
        buffer = map_buffer(update_info.path, num_bytes=manifest.num_bytes)
        if (checksum := buffer_checksum(buffer)) != update_info.checksum:
            raise ValueError(
                f"weights: got checksum {checksum}, expected {update_info.checksum} for the group "
                f"of {manifest.names[0]}; the buffer was changed in transit"
            )
        self.load(manifest, torch.from_numpy(buffer))


class CollectiveWeightTransferEngine(_LayerwiseReload[CollectiveInitInfo, CollectiveUpdateInfo]):
    """The collective backend: it loads weight groups that this worker has received in a broadcast.

    The worker receives the groups during sampling, into the host's memory; the model is changed
    only after all groups have arrived.
    """

    init_info_cls = CollectiveInitInfo
    update_info_cls = CollectiveUpdateInfo
    _reception: Reception | None = None

    def init_transfer_engine(self, init_info: CollectiveInitInfo) -> None:
        """Start to receive the weight groups of a broadcast in the background."""
        seat, worker = Seat(**init_info.seat), self.parallel_config.rank
        self._reception = Reception(
            seat,
            [WeightManifest(**fields) for fields in init_info.manifests],
            init_info.checksums,
            rank=seat.rank + worker,
            device=self.device,
            address=init_info.address,
            progress=Path(f"{init_info.progress}.{worker}"),
        )

    def receive_weights(self, update_info: CollectiveUpdateInfo) -> None:
        assert self._reception is not None
        manifest = self._reception.manifests[update_info.index]
        buffer = self._reception.buffers[update_info.index]
        self.load(manifest, buffer)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._reception = None


def repack_kept_weights(model: torch.nn.Module) -> None:
    """Pack weights again after a reload, for those CPU kernels of vLLM that read packed weights.

    The reload leaves two kinds of modules wrong. An output head that shares its weight with the
    embedding keeps an old packed copy. Layers with a mixture of experts are packed only when the
    engine starts; after a reload their kernel would read the plain weights as packed ones.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
