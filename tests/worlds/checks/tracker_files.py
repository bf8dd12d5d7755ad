"""Readers of the files that experiment trackers write, made like the trackers' own programs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32768
HEADER_BYTES = 7
# Kinds of the parts of a record in LevelDB's log format.
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def wandb_history(directory: Path) -> list[dict[str, Any]]:
    """Return the history rows of all offline wandb runs below a directory, in order."""
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.history.item}
        for file in wandb_files(directory)
        for row in wandb_records(file)
        if row.WhichOneof("record_type") == "history"
    ]


def wandb_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield wandb's messages from a file that frames them as LevelDB's log does.

    A last message that lacks parts is left out.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), HEADER_BYTES, b""
    assert content[:4] == b":W&B"
    while at + HEADER_BYTES <= len(content):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEADER_BYTES:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        part = content[at + HEADER_BYTES : at + HEADER_BYTES + length]
        at += HEADER_BYTES + length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield Record.FromString(parts)


def tensorboard_curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values that TensorBoard shows for each tag."""
    accumulator = _accumulated(directory)
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def tensorboard_texts(directory: Path) -> dict[str, list[tuple[int, str]]]:
    accumulator = _accumulated(directory)
    return {
        tag: [
            (event.step, event.tensor_proto.string_val[0].decode())
            for event in accumulator.Tensors(tag)
        ]
        for tag in accumulator.Tags()["tensors"]
    }


def _accumulated(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file, which may be missing or end in an unfinished line."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def surviving_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines that count by docs/trackers.md: no repetitions, and no replaced steps.

    A later term replaces the steps from its first step on.
    """
    begun = {line["term"]: line["first_step"] for line in lines}
    return [
        line
        for number, line in enumerate(lines)
        if line not in lines[:number]
        and not any(
            term > line["term"] and first_step <= line["step"] for term, first_step in begun.items()
        )
    ]
