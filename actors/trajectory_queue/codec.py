"""The storage format of trajectories in Ray's object store and in the journal.

A trajectory is stored as one MessagePack message. A sample that branched off an earlier sample is
stored without the tokens that both samples share.
Invariant: decode(encode(trajectories), row) equals trajectories[row].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.types import NO_VERSION, Sample, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryBlock:
    """R encoded trajectories."""

    data: NDArray[np.uint8]
    """The encoded messages, concatenated in one buffer, which Ray passes on without a copy."""
    offsets: tuple[int, ...]
    """[R + 1], the start of each message in `data`, and the end of the last one."""

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def row_num_bytes(self, row: int) -> int:
        return self.offsets[row + 1] - self.offsets[row]


def encode(trajectories: Sequence[Trajectory]) -> TrajectoryBlock:
    """Encode trajectories; row i of the block is trajectories[i]."""
    offsets, data = [0], bytearray()
    for trajectory in trajectories:
        _encoder.encode_into(without_shared(trajectory), data, len(data))
        offsets.append(len(data))
    return TrajectoryBlock(data=np.frombuffer(data, np.uint8), offsets=tuple(offsets))


def decode(block: TrajectoryBlock, row: int) -> Trajectory:
    """Decode one trajectory. Raises: IndexError if the block has no such row."""
    if not 0 <= row < block.num_rows:
        raise IndexError(
            f"codec: got row {row} of a block of {block.num_rows} trajectories, expected one below "
            f"{block.num_rows}"
        )
    message = block.data[block.offsets[row] : block.offsets[row + 1]]
    return with_shared(_TRAJECTORIES.decode(message.data))


def without_shared(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory, and leave out tokens that a sample shares with its parent sample.

    The parent is the earlier sample from which the sample branched off. `with_shared` restores the
    tokens.
    """
    if len(trajectory.samples) <= 1:
        return trajectory
    return replace(trajectory, samples=tuple(_cut(sample) for sample in trajectory.samples))


def with_shared(trajectory: Trajectory) -> Trajectory:
    """Restore the tokens that `without_shared` left out."""
    if len(trajectory.samples) <= 1:
        return trajectory
    whole: list[Sample] = []
    for sample in trajectory.samples:
        whole.append(sample if sample.parent is None else _joined(sample, whole[sample.parent]))
    return replace(trajectory, samples=tuple(whole))


def _cut(sample: Sample) -> Sample:
    start, rewards = sample.num_shared, sample.token_rewards
    return replace(
        sample,
        token_ids=sample.token_ids[start:],
        logprobs=sample.logprobs[start:],
        versions=sample.versions[start:],
        token_rewards=None if rewards is None else rewards[start:],
    )


def _joined(own: Sample, parent: Sample) -> Sample:
    """Put the tokens that a sample shares with its parent before the sample's own tokens."""
    number, rewards = own.num_shared, own.token_rewards
    # The shared tokens are a part of the prompt, so they have log-probability 0 and no version.
    zeros = np.zeros(number, np.float32)
    return replace(
        own,
        token_ids=np.concatenate([parent.token_ids[:number], own.token_ids]),
        logprobs=np.concatenate([zeros, own.logprobs]),
        versions=np.concatenate([np.full(number, NO_VERSION, np.int32), own.versions]),
        token_rewards=None if rewards is None else np.concatenate([zeros, rewards]),
    )


def _from_array(value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise TypeError(
        f"codec: a trajectory has a value of type {type(value).__name__}, which cannot be stored; "
        "expected texts, numbers, true, false, null, lists, objects or arrays of numpy"
    )


def _to_array(kind: type, value: Any) -> NDArray[Any]:
    """Decode an array, the only type that msgspec does not know."""
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_array)
_TRAJECTORIES = msgspec.msgpack.Decoder(Trajectory, dec_hook=_to_array)


def to_bytes(value: Any) -> bytes:
    """Encode a record: a dataclass of plain values, records and arrays."""
    return _encoder.encode(value)


def decoder_of(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of one type of record; it raises msgspec.MsgspecError or ValueError."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_to_array)
