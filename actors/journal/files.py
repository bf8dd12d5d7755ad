"""The journal: files that record the newest training steps, with all of their trajectories.

A trajectory's samples are stored as they were packed for the trainer, with the log-probability and
the version of every sampled token, and the advantages of the trained tokens. The merge actor writes
the journal. `rayloom inspect` and `rayloom explain` read it; training and resuming do not. So a
failure to write is reported once and never ends a run, and old files may be removed at any time.

A run begins a new term when it starts, resumes, recovers or returns to a checkpoint. A step that is
played again in a later term gets another file; `service.store.lineage` decides which file counts.

A file has a line with the format's number, then two sections, each with its length and a checksum:
the index of the step's trajectories, and the compressed step.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec

from actors.algorithm import Baseline, Scale
from actors.batch import Float32s
from actors.trajectory_queue.codec import decoder_of, to_bytes, with_shared, without_shared
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEntry:
    """A step's trajectory, its advantages, and its return as it counts in the group's baseline."""

    trajectory: Trajectory
    reason: EvictionReason | None
    """The reason why the trajectory is not in the loss; None if it is trained."""
    baseline_return: float | None
    """The trajectory's return in its group's baseline; None if the baseline does not use it."""
    advantages: tuple[Float32s, ...]
    """One array for each sample, [M] float32: the advantages of its trained tokens in order, as the
    trainer received them. Empty if the trajectory is not in the loss.
    """
    problem: str = ""
    """A sentence on the trajectory's fault; empty if the trajectory has no fault."""

    @property
    def num_trained(self) -> int:
        """The number of the trajectory's tokens that were trained."""
        return sum(int(each.shape[0]) for each in self.advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """The rule that turns a group's returns into one advantage for each trajectory."""

    baseline: Baseline
    scale: Scale
    trains_without_signal: bool = False
    """Whether groups of equal returns are trained (`AlgorithmSettings.trains_without_signal`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStep:
    """The journal's record of a training step, as one term of the run carried it out.

    A term is the time from a start or recovery of the run to the next start or recovery.
    """

    step: int
    """The step's number, counted from 1, as in the run's records and its ledger."""
    term: int
    trainer_version: int
    max_policy_age: int
    """The largest age of a trained token, in versions, including versions that were published again
    for the same step.
    """
    group_rule: GroupRule | None
    """The rule of the step's advantages; None if advantages depend on more than a group's
    returns.
    """
    num_packed_trained: int
    """Number of trained tokens in the packed rows of all ranks."""
    entries: tuple[TrajectoryEntry, ...]


FORMAT = 2
_FIRST_WORDS = b"rayloom journal "
_SECTION = struct.Struct("<QI")
# Use the fastest level, because the training step waits for the compression.
_COMPRESSION = 1
_NAME = re.compile(r"step-([0-9]+)-term-([0-9]+)\.journal")


class JournalDamaged(ValueError):
    """Raised if bytes are not a journal step of this format; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIndex:
    """The ids of a step's trajectories, in the order of the step's entries."""

    step: int
    term: int
    trajectory_ids: tuple[str, ...]


_STEPS, _INDICES = decoder_of(JournalStep), decoder_of(StepIndex)


def write_step(file: IO[bytes], step: JournalStep) -> None:
    """Write a step to an open file. Raises: OSError if that fails."""
    index = StepIndex(
        step=step.step,
        term=step.term,
        trajectory_ids=tuple(entry.trajectory.trajectory_id for entry in step.entries),
    )
    entries = (replace(e, trajectory=without_shared(e.trajectory)) for e in step.entries)
    body = to_bytes(replace(step, entries=tuple(entries)))
    file.write(_FIRST_WORDS + f"{FORMAT}\n".encode())
    for section in (to_bytes(index), zlib.compress(body, _COMPRESSION)):
        file.write(_SECTION.pack(len(section), zlib.crc32(section)) + section)


def read_step(file: IO[bytes]) -> JournalStep:
    """Return the step in an open file. Raises: JournalDamaged; OSError if reading fails."""
    _check_format(file)
    _read_section(file)
    body = _read_section(file)
    try:
        step: JournalStep = _STEPS.decode(zlib.decompress(body))
    except (zlib.error, msgspec.MsgspecError, ValueError) as error:
        raise JournalDamaged(f"its content is not a step: {error}") from error
    entries = (replace(e, trajectory=with_shared(e.trajectory)) for e in step.entries)
    return replace(step, entries=tuple(entries))


def read_index(file: IO[bytes]) -> StepIndex:
    """Return the ids of the trajectories of a step in an open file, without reading the step.

    Raises: JournalDamaged; OSError if reading fails.
    """
    _check_format(file)
    try:
        index: StepIndex = _INDICES.decode(_read_section(file))
    except (msgspec.MsgspecError, ValueError) as error:
        raise JournalDamaged(f"its content is not an index: {error}") from error
    return index


def _check_format(file: IO[bytes]) -> None:
    expected = _FIRST_WORDS + f"{FORMAT}\n".encode()
    line = file.read(len(expected))
    if line == expected:
        return
    if line.startswith(_FIRST_WORDS):
        found = line.removeprefix(_FIRST_WORDS).split(b"\n")[0].decode(errors="replace")
        raise JournalDamaged(
            f"format {found}, expected {FORMAT}: another version of Rayloom wrote it"
        )
    raise JournalDamaged(
        f"no journal of format {FORMAT}: it is damaged, or another version of Rayloom wrote it"
    )


def _read_section(file: IO[bytes]) -> bytes:
    head = file.read(_SECTION.size)
    if len(head) < _SECTION.size:
        raise JournalDamaged("it was cut short")
    length, checksum = _SECTION.unpack(head)
    try:
        section = file.read(length)
    except (MemoryError, OverflowError):
        raise JournalDamaged("it has a section that does not fit in memory") from None
    if len(section) < length:
        raise JournalDamaged("it was cut short")
    if zlib.crc32(section) != checksum:
        raise JournalDamaged("its checksum does not match its content")
    return section


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFile:
    path: Path
    step: int
    term: int


def file_name(step: int, *, term: int) -> str:
    """Return the name of a step's file.

    Example: file_name(12, term=2) -> step-000012-term-0002.journal
    """
    return f"step-{step:06d}-term-{term:04d}.journal"


def named_file(path: Path) -> JournalFile | None:
    """Return the step and term in a journal file's name; None for another name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    return JournalFile(path=path, step=int(match[1]), term=int(match[2]))


def list_files(directory: Path) -> list[JournalFile]:
    """Return the journal's files, sorted by step and term; none if the directory is missing."""
    found = [file for path in directory.glob("step-*.journal") if (file := named_file(path))]
    return sorted(found, key=lambda file: (file.step, file.term))


def write_file(directory: Path, step: JournalStep) -> Path:
    """Write a step under a temporary name and rename the file; return its path.

    Raises: OSError if that fails, after removing the temporary file.
    """
    # Do not create parents: if the run's directory is not visible on this machine, creating it
    # would hide that.
    directory.mkdir(exist_ok=True)
    path = directory / file_name(step.step, term=step.term)
    aside = directory / f".{path.name}.{os.getpid()}.tmp"
    try:
        # The file is not synced to the disk: a power failure may damage it, and reading it detects
        # the damage.
        with aside.open("wb") as file:
            write_step(file, step)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
    return path


def prune(directory: Path, *, newest: int, keep_steps: int, keep_bytes: int) -> None:
    """Remove the files of old steps, and the oldest files until at most keep_bytes remain.

    A step is old if it is at most newest - keep_steps. The files of the step `newest` are kept,
    however large they are. Raises: OSError if a file cannot be removed.
    """
    num_bytes = 0
    for file in reversed(list_files(directory)):
        try:
            num_bytes += file.path.stat().st_size
        except FileNotFoundError:
            continue
        is_above = num_bytes > keep_bytes and file.step < newest
        if is_above or file.step <= newest - keep_steps:
            file.path.unlink(missing_ok=True)
