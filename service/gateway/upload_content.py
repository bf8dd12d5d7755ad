"""Encode an uploaded trajectory for the store: the queue's message, with run-length versions.

A column of versions is a third of a trajectory's bytes, but consists of a few runs.
Invariant: stored_content(decoded_content(stored)) == stored, for uploads in either format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from actors.trajectory_queue.codec import decoder_of, to_bytes, with_shared, without_shared
from actors.types import Sample, Trajectory

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    trajectory: Trajectory
    """The trajectory, whose samples have no versions."""
    runs: tuple[tuple[tuple[int, int], ...], ...]
    """For each sample its runs: a version, and the number of consecutive tokens with it."""


_decoder = decoder_of(_Stored)


def stored_content(trajectory: Trajectory) -> bytes:
    bare = [replace(sample, versions=_NONE) for sample in trajectory.samples]
    return to_bytes(
        _Stored(
            trajectory=without_shared(replace(trajectory, samples=tuple(bare))),
            runs=tuple(_runs(sample) for sample in trajectory.samples),
        )
    )


def decoded_content(content: bytes) -> Trajectory:
    """Decode the output of `stored_content`."""
    found: _Stored = _decoder.decode(content)
    whole = with_shared(found.trajectory)
    samples = [
        replace(sample, versions=np.repeat(*np.array(runs, np.int32).T))
        for sample, runs in zip(whole.samples, found.runs, strict=True)
    ]
    return replace(whole, samples=tuple(samples))


def _runs(sample: Sample) -> tuple[tuple[int, int], ...]:
    borders = np.flatnonzero(sample.versions[1:] != sample.versions[:-1]) + 1
    starts = [0, *borders.tolist()]
    ends = [*starts[1:], sample.num_tokens]
    versions = sample.versions[starts].tolist()
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return tuple(zip(versions, lengths, strict=True))
