"""`rayloom check --size`: the disks that a configuration needs, each with its formula's inputs.

The bytes of a token, an event and a record are measured (`docs/deploy.md`, "Disks"); a parameter's
follow from the code: float32 weights and two moments in a checkpoint, weights alone in an export.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from actors.limits import GIB, MIB
from service.config.file import ConfigError
from service.config.tree import Config
from service.store.retention import MILESTONE_STEPS

# Weights and two moments in float32; once a checkpoint, the queue's state and the files' headers.
CHECKPOINT_BYTES = 12
CHECKPOINT_STATE = MIB
EXPORT_BYTES = 4
# The larger of 4.2 (8 turns of 256 sampled and 256 observed tokens) and 5.1 (40 turns of 256 and
# 512), with random tokens and compressed.
JOURNAL_BYTES = 5.1
# Of a ledger event with its index: 47 measured, and more with the longer names of submitted tasks.
EVENT_BYTES = 100
# Of a step's record; those of all steps are kept.
RECORD_BYTES = 4200
LOG_BYTES = 4 * 32 * MIB
# Of the tiny model.
TINY_PARAMETERS = 854_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The bytes of one part of a run."""

    part: str
    num_bytes: float
    formula: str


def disks(config: Config, *, num_parameters: float | None = None) -> list[Disk]:
    """Return what each part of a run takes at most.

    num_parameters: of the policy; None: read from the model's files. Raises: ConfigError.
    """
    run, algorithm = config.run, config.algorithm
    num = num_parameters or _parameters(config)
    num_models = 2 if algorithm.has_critic else 1
    # From before a collapse of the reward; there is a second one between the newest and that one.
    num_old = 1 if run.checkpoint_every * (run.keep_checkpoints - 1) >= MILESTONE_STEPS else 2
    num_kept = run.keep_checkpoints + run.keep_best + num_old + 1
    num_rollouts = algorithm.groups_per_step * algorithm.group_size
    num_tokens = config.model.max_context_tokens
    num_steps = min(run.journal_steps, run.steps)
    journal = num_steps * num_rollouts * num_tokens * JOURNAL_BYTES
    limit = run.journal_gib * GIB
    num_event_steps = min(run.steps, run.checkpoint_every * (run.keep_checkpoints + 1))
    events = 2 * num_rollouts * max(num_event_steps, num_steps) * EVENT_BYTES
    return [
        Disk(
            part="checkpoints",
            num_bytes=num_kept * (num_models * CHECKPOINT_BYTES * num + CHECKPOINT_STATE),
            formula=f"{num_kept} (run.keep_checkpoints + run.keep_best + {num_old} from before a "
            "collapse + one being written) x "
            f"({num_models} x {CHECKPOINT_BYTES} x {num:,.0f} parameters + 1 MiB)"
            f"{', of policy and critic' * (num_models - 1)}",
        ),
        Disk(
            part="journal",
            num_bytes=min(journal, limit),
            formula=f"the smaller of run.journal_gib ({run.journal_gib:g} GiB) and {num_steps} "
            f"steps (run.journal_steps) x {num_rollouts} rollouts x {num_tokens} tokens "
            f"(model.max_context_tokens) x {JOURNAL_BYTES:g} = {_shown(journal)}",
        ),
        Disk(
            part="database",
            num_bytes=events + run.steps * RECORD_BYTES,
            formula=f"{max(num_event_steps, num_steps)} steps x {num_rollouts} rollouts x 2 events "
            f"x {EVENT_BYTES} + {run.steps} steps x {RECORD_BYTES}; "
            "without submissions and sessions",
        ),
        Disk(part="run.log", num_bytes=LOG_BYTES, formula="4 files x 32 MiB"),
        Disk(
            part="each export",
            num_bytes=EXPORT_BYTES * num,
            formula=f"{EXPORT_BYTES} x {num:,.0f} parameters",
        ),
    ]


def describe_disks(found: list[Disk]) -> str:
    """Return a Markdown table of the disks."""
    rows = [f"| {each.part} | {_shown(each.num_bytes)} | {each.formula} |" for each in found]
    return "\n".join(("| part | at most | formula |", "|---|---|---|", *rows))


def _shown(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _parameters(config: Config) -> float:
    if config.model.path is None:
        return TINY_PARAMETERS
    directory = Path(config.model.path).expanduser()
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        raise ConfigError(
            f"--size: model.path {config.model.path} is not a directory with safetensors files "
            "here, so its parameters cannot be counted; name their number, such as "
            "--parameters 8e9"
        )
    return sum(_elements(file) for file in files)


def _elements(file: Path) -> int:
    """Return the number of elements of all tensors, which the header lists."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        total = 0
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for size in tensor["shape"]:
                    count *= size
                total += count
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(
            f"--size: {file} is not a safetensors file ({type(error).__name__}); copy or download "
            "the model again"
        ) from error
    return total
