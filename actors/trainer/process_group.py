"""A rank's process: its device and memory, and the rendezvous of the ranks.

The ranks meet at a TCP store, which rank 0 opens on a port that the system chooses. The other ranks
get the store's address after that, so that no rank has to guess a free port.
"""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actors.network import gloo_interface
from actors.trainer.settings import Device

# The numbers of the parameters in glibc's malloc.h, and the largest values that glibc accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
_NEVER_TRIM = 2**31 - 1


class ByteCounter:
    """A counter of the bytes that this process has moved, which shows the progress of the
    process.
    """

    def __init__(self) -> None:
        self.total = 0

    def add(self, num_bytes: int) -> None:
        self.total += num_bytes


# One counter is enough, because a process has only one rank.
MOVED = ByteCounter()


def keep_freed_memory() -> bool:
    """Make this process's C allocator keep the memory that it frees; return whether it can.

    glibc takes blocks above a certain size directly from the kernel. The activations of a packed
    row are above that size, so each step would map, fault in, zero and unmap all of them again.
    With this setting a step took 5 to 20 % less processor time on two cores.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    is_set = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    return bool(is_set and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))


def rank_device(device: Device, *, rank: int, num_visible: int) -> torch.device:
    """Return a rank's device; on CUDA with an index, which torch needs to set the device.

    Args: num_visible: number of GPUs that this process sees. Ray shows each rank only its own GPU,
        which is then number 0; if a rank sees all GPUs, ranks take them in turn.
    Raises: RuntimeError if the device is CUDA and no GPU is visible.
    Example: rank 3 on CUDA with 2 visible -> cuda:1
    """
    if device == "cpu":
        return torch.device("cpu")
    if not num_visible:
        raise RuntimeError(
            f"trainer: rank {rank} sees no GPU, expected one for device cuda; give the node a GPU "
            "and a torch with CUDA, or set trainer.device to cpu"
        )
    return torch.device("cuda", rank % num_visible)


def open_store(address: str, *, num_ranks: int, timeout_s: float) -> dist.TCPStore:
    """Open the store on rank 0, on a port that the system chooses."""
    return _store(address, 0, num_ranks=num_ranks, timeout_s=timeout_s, is_master=True)


def connect_store(rendezvous: str, *, num_ranks: int, timeout_s: float) -> dist.Store:
    """Connect a rank other than 0 to rank 0's store. rendezvous: the store's ADDRESS:PORT."""
    address, _, port = rendezvous.rpartition(":")
    return _store(address, int(port), num_ranks=num_ranks, timeout_s=timeout_s, is_master=False)


def _store(
    address: str, port: int, *, num_ranks: int, timeout_s: float, is_master: bool
) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(
        address, port, num_ranks, is_master, timeout=timeout, wait_for_workers=False
    )


def join_group(
    store: dist.Store,
    *,
    rank: int,
    num_ranks: int,
    device: torch.device,
    timeout_s: float,
    address: str,
) -> DeviceMesh:
    """Initialise this process's group and return its one-dimensional mesh.

    address: the address at which other ranks reach this rank; loopback if all ranks share a
    machine.
    """
    os.environ.update(gloo_interface(address))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    return init_device_mesh(device.type, (num_ranks,))


def join_side_group() -> dist.ProcessGroup:
    """Create another group of the same ranks, on gloo, for use while the main group trains.

    The call is collective. If a rank dies, the group fails at once. If a rank hangs, the group
    waits for up to a day, so the caller must notice it.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


def gather_rows(row: Tensor) -> Tensor:
    """Gather one vector from every rank, [S] -> [ranks, S]; every rank gets the same result."""
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return row[None]
    flat = row.new_empty(num_ranks * row.shape[0])
    dist.all_gather_single(flat, row)
    return flat.view(num_ranks, -1)


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Gather one text from every rank, in the order of ranks."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text, group=group)
    return texts
