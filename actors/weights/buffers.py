"""Flat weight buffers, which the trainer publishes and the engines load.

A group of named tensors is packed into one contiguous byte buffer with a manifest of the tensors'
positions. So a group needs one object in the object store, one copy and one checksum. Equal tensors
give equal bytes and an equal checksum. Unpacking makes views and no copies.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from actors.weights.board import WeightGroup, WeightManifest

ALIGNMENT_BYTES = 64

Bytes = NDArray[np.uint8]


def pack_group(named: Sequence[tuple[str, torch.Tensor]]) -> WeightGroup:
    """Copy tensors, which may be on any device, into one buffer, and return it as a group.

    Args: named: full (unsharded) tensors under their Hugging Face names, in load order.
    Raises: ValueError if a name repeats.
    """
    names = tuple(name for name, _ in named)
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"weights: names repeat in one group: {repeated}; expected each once")
    offsets, num_bytes = _offsets([tensor for _, tensor in named])
    # Begin with zeros, because the gaps between tensors are part of the checksum.
    buffer = np.zeros(num_bytes, dtype=np.uint8)
    flat = torch.from_numpy(buffer)
    for offset, (_, tensor) in zip(offsets, named, strict=True):
        _view(flat, offset, tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
    manifest = WeightManifest(
        names=names,
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
        offsets=offsets,
        num_bytes=num_bytes,
    )
    return WeightGroup(manifest=manifest, buffer=buffer, checksum=buffer_checksum(buffer))


def unpack_group(manifest: WeightManifest, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return views of the tensors in a buffer, without a copy; the views keep the buffer alive.

    Args: buffer: [num_bytes] uint8 on the CPU (`torch.from_numpy` or `torch.frombuffer`).
    Raises: ValueError if the buffer's length differs from the manifest's.
    """
    if buffer.numel() != manifest.num_bytes:
        raise ValueError(
            f"weights: got a buffer of {buffer.numel()} bytes, expected {manifest.num_bytes}; "
            "buffer and manifest are not of the same group"
        )
    named: list[tuple[str, torch.Tensor]] = []
    rows = zip(manifest.names, manifest.dtypes, manifest.shapes, manifest.offsets, strict=True)
    for name, dtype_name, shape, offset in rows:
        named.append((name, _view(buffer, offset, shape, getattr(torch, dtype_name))))
    return named


def buffer_checksum(buffer: Bytes) -> str:
    """Return the CRC-32 of the bytes as eight hex digits; it detects mistakes, not attacks."""
    return f"{zlib.crc32(buffer.data):08x}"


def layer_groups(names: Sequence[str]) -> list[list[str]]:
    """Return parameter names in groups: one before the layers, one for each layer, one after them.

    A layer is identified by the first number in the name, so that a layer's experts stay together.
    Each group keeps the given order.
    Example: [embed.w, layers.0.a, layers.1.a, layers.0.b, norm.w] -> [[embed.w], [layers.0.a,
        layers.0.b], [layers.1.a], [norm.w]]
    """
    before: list[str] = []
    after: list[str] = []
    layers: dict[tuple[str, int], list[str]] = {}
    for name in names:
        key = _layer_key(name)
        if key is not None:
            layers.setdefault(key, []).append(name)
        elif layers:
            after.append(name)
        else:
            before.append(name)
    return [group for group in [before, *layers.values(), after] if group]


def _view(
    buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    return buffer[offset : offset + num_bytes].view(dtype).view(shape)


def _layer_key(name: str) -> tuple[str, int] | None:
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:index]), int(part)
    return None


def _offsets(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], int]:
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        end = start + tensor.nbytes
    return tuple(offsets), end
