"""Where each tensor lies in a flat weight buffer. No torch: the board handles manifests too."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Where each tensor lies in the buffer; the four tuples run in parallel.

    names: Hugging Face parameter names. dtypes: torch names without the prefix ("bfloat16").
    offsets: bytes from the buffer's start, multiples of ALIGNMENT_BYTES.
    num_bytes: length of the buffer, bytes.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    num_bytes: int
