"""Broadcast new weights from the trainer to engines by `torch.distributed` (gloo or NCCL).

Each broadcast has its own process group. The trainer has rank 0, and the workers of those engines
that asked the weight board for a place (`Seat`) have the other ranks. If a member dies or freezes,
the group fails: the other members drop what they received, and ask for a place in the next group.
Invariant: a worker's model is changed only after the last byte has arrived.
`Sender` is the trainer's thread, and `Reception` a worker's. Ray and vLLM are not imported here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from actors.weights.board import Publication, Seat, StaleTerm, WeightManifest
from actors.weights.buffers import buffer_checksum

# Time in seconds within which a member must join the group, and each chunk must reach all members:
# a deadline of progress, independent of the size of the model.
STALL_S = 10.0
CHUNK_BYTES = 64 * 1024 * 1024
# A worker writes RECEIVED for each group of weights that it has received, and FAILED before an
# error message.
RECEIVED, FAILED = b".", b"!"
FORM_S = 5.0
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

log = logging.getLogger(__name__)


def meet(
    store: dist.Store, seat: Seat, *, rank: int, device: torch.device, address: str
) -> dist.ProcessGroup:
    """Form the process group of one broadcast, together with its other members, and return it.

    Args: seat: this member's place in the broadcast. rank: this process's rank in the group.
    address: the address at which other members reach this node.
    Raises: RuntimeError (torch) if a member does not join within STALL_S.
    """
    own, timeout = dist.PrefixStore(seat.name, store), timedelta(seconds=STALL_S)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        # Without this call, NCCL would wait for its members without a limit.
        _wait_for_all(own, "here", rank=rank, size=seat.size)
        with raising_timeouts():
            return dist.ProcessGroupNCCL(own, rank, seat.size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(own, rank, seat.size, gloo)


@contextmanager
def raising_timeouts() -> Iterator[None]:
    """Make NCCL groups that are created in the block raise an error at a timeout.

    Otherwise a timeout would end the process.
    """
    # ProcessGroupNCCL reads the variable when it is created. Without the variable, `wait` returns
    # before the work is done, and a watchdog thread ends the process at a timeout. With it, `wait`
    # blocks, and there is no watchdog. The other groups of the trainer and the groups of vLLM are
    # created earlier and keep their watchdogs.
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor, *, device: torch.device) -> None:
    """Copy rank 0's bytes into every member's buffer. buffer: [num_bytes] uint8 on the CPU."""
    for part in buffer.split(CHUNK_BYTES):
        moved = part.to(device)
        group.broadcast(moved, 0).wait()
        if moved is not part and group.rank() > 0:
            part.copy_(moved)


def connect(address: str) -> dist.TCPStore:
    """Connect to rank 0's store, and return the connection. address: HOST:PORT."""
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=STALL_S)
    return dist.TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)


def linger(store: dist.Store, seat: Seat, *, rank: int) -> None:
    """Wait until all members of a broadcast have received everything, or until STALL_S have passed.

    A member that closed its group earlier would drop data that its sockets have not sent yet.
    """
    own = dist.PrefixStore(seat.name, store)
    with suppress(RuntimeError):
        _wait_for_all(own, "through", rank=rank, size=seat.size)


def _wait_for_all(store: dist.Store, place: str, *, rank: int, size: int) -> None:
    """Wait until all members have called this function with the same `place`.

    Raises: RuntimeError (torch) if a member does not call it within STALL_S.
    """
    store.set(f"{place}/{rank}", "1")
    store.wait([f"{place}/{each}" for each in range(size)], timedelta(seconds=STALL_S))


class Reception:
    """A thread that receives the weights of one broadcast for a worker of an engine.

    The thread writes its progress to a file, which `read_progress` reads in another process.
    `buffers` is complete when all groups of weights have arrived.
    """

    def __init__(
        self,
        seat: Seat,
        manifests: Sequence[WeightManifest],
        checksums: Sequence[str],
        *,
        rank: int,
        device: torch.device,
        address: str,
        progress: Path,
    ) -> None:
        """Start the thread.

        Args:
            seat: The engine's place in the broadcast.
            manifests: A manifest for each group of weights.
            checksums: A checksum for each group of weights.
            rank: This worker's rank in the broadcast. The engine's workers have consecutive ranks,
                from `seat.rank` on.
            address: The address at which other members reach this node.
            progress: The file to which the thread writes its progress.
        """
        self.buffers = [torch.empty(each.num_bytes, dtype=torch.uint8) for each in manifests]
        self.manifests = tuple(manifests)
        self._seat, self._rank, self._device, self._address = seat, rank, device, address
        self._checksums = tuple(checksums)
        self._progress = progress
        # Create the file before the thread starts, so that a reader of the progress finds it.
        progress.touch()
        threading.Thread(target=self._run, daemon=True, name=f"weights-{seat.name}").start()

    def _run(self) -> None:
        with self._progress.open("ab", buffering=0) as progress:
            try:
                for _ in self._receive():
                    progress.write(RECEIVED)
            except (RuntimeError, ValueError, OSError) as error:
                # torch has no type for the error of a lost peer.
                first_line = (str(error).splitlines() or [type(error).__name__])[0]
                progress.write(FAILED + first_line.encode())

    def _receive(self) -> Iterator[None]:
        store = connect(self._seat.store)
        group = meet(store, self._seat, rank=self._rank, device=self._device, address=self._address)
        for buffer, checksum in zip(self.buffers, self._checksums, strict=True):
            broadcast(group, buffer, device=self._device)
            if (found := buffer_checksum(buffer.numpy())) != checksum:
                raise ValueError(
                    f"weights: got checksum {found}, expected {checksum}; the buffer changed "
                    "during the transfer"
                )
            yield
        linger(store, self._seat, rank=self._rank)


def read_progress(path: Path) -> tuple[int, str | None]:
    """Return the number of groups that a worker has received, and its error message or None."""
    received, failed, reason = path.read_bytes().partition(FAILED)
    return len(received), reason.decode() if failed else None


class Sender:
    """A thread of the trainer's rank 0 that broadcasts the current version to engines that ask."""

    def __init__(
        self,
        form_group: Callable[[Publication, str, float], Seat | None],
        *,
        address: str,
        device: torch.device,
    ) -> None:
        """Start the thread.

        Args: form_group: calls `WeightBoard.form_group` with the version, the store's HOST:PORT
        and a timeout. address: the address at which engines reach this node.
        """
        self._form_group = form_group
        self._address, self._device = address, device
        self._offered = threading.Condition()
        self._offer: Publication | None = None
        self._ended_by: Exception | None = None
        threading.Thread(target=self._run, daemon=True, name="weights-sender").start()

    def offer(self, offer: Publication | None) -> None:
        """Broadcast a version from now on to all engines that ask, even if they start later.

        Args: offer: the version; None to broadcast nothing from now on. The version's buffers must
        be arrays, not references to Ray objects.
        Raises: RuntimeError if the thread has ended.
        """
        self.check()
        with self._offered:
            self._offer = offer
            self._offered.notify()

    def check(self) -> None:
        """Raise RuntimeError if the thread has ended, because engines would then wait forever."""
        if (error := self._ended_by) is not None:
            raise RuntimeError(
                f"weights: the broadcasting thread has ended after {type(error).__name__}: {error}"
            ) from error

    def _run(self) -> None:
        try:
            self._serve_forever()
        except Exception as error:
            # This is the outermost frame of the thread: an error would otherwise be lost.
            log.exception("weights: the broadcasting thread has ended")
            self._ended_by = error

    def _serve_forever(self) -> None:
        store: dist.TCPStore | None = None
        while True:
            with self._offered:
                while (offer := self._offer) is None:
                    self._offered.wait()
            try:
                store = store or open_store(self._address)
                seat = self._form_group(offer, f"{self._address}:{store.port}", FORM_S)
                if seat is None:
                    continue
                self._send(offer, store, seat)
            except StaleTerm:
                self.offer(None)
            except (RuntimeError, OSError) as error:
                # Engines that missed the broadcast ask again. torch has no type for a lost peer.
                log.warning("weights: broadcast of version %d failed: %s", offer.version, error)
            # A new store for each group, so that its keys do not pile up.
            store = None

    def _send(self, offer: Publication, store: dist.Store, seat: Seat) -> None:
        group = meet(store, seat, rank=0, device=self._device, address=self._address)
        for each in offer.groups:
            broadcast(group, torch.from_numpy(each.buffer), device=self._device)
        linger(store, seat, rank=0)


def open_store(address: str) -> dist.TCPStore:
    """Open and return a store for one group, on a port that the system chooses."""
    timeout = timedelta(seconds=STALL_S)
    return dist.TCPStore(address, 0, None, True, timeout=timeout, wait_for_workers=False)
