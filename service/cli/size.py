"""`rayloom check --size`: compute the disk space and the memory that a configuration needs.

The output shows the formula of each size with its inputs. The bytes per token, event and record
were measured (`docs/deploy.md`, "Disks"). A checkpoint has float32 weights and two moments; an
export has only the weights. With LoRA, both have only adapters.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.expert_records import routed_layers
from actors.limits import GIB, MIB
from actors.types import SESSION, Dtype
from service.config.file import ConfigError
from service.config.tree import Config
from service.store.retention import MILESTONE_STEPS

# Bytes of a checkpoint for each parameter (weights and two moments in float32), and once for the
# queue's state and the files' headers.
CHECKPOINT_BYTES = 12
CHECKPOINT_STATE = MIB
EXPORT_BYTES = 4
# Bytes of a rank's memory for each parameter: weights, gradients and two moments in float32.
RANK_BYTES = 16
GRADIENT_BYTES = 4
MAX_PARAMETERS = 1e14
# Bytes of a token in the compressed journal: the larger of two measurements with random tokens, 4.2
# (8 turns of 256 sampled and 256 observed tokens) and 5.1 (40 turns of 256 and 512).
JOURNAL_BYTES = 5.1
# Bytes of a token with its share of the text and of the row, measured with random tokens of four
# letters. In an evaluation's file (JSON) they were 22 to 31. In the database's row of a session's
# turn they were 11 (turns of 512 new and 256 sampled tokens) to 18 (turns of 64 and 64).
EVALUATION_BYTES = 32
SESSION_BYTES = 20
# Bytes of a ledger event with its index: 47 were measured; the longer names of submitted tasks take
# more.
EVENT_BYTES = 100
# Bytes of a step's record; the records of all steps are kept.
RECORD_BYTES = 4200
LOG_BYTES = 4 * 32 * MIB
# Number of the tiny model's parameters.
TINY_PARAMETERS = 854_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The largest size of one part of a run, on a disk or in memory."""

    part: str
    num_bytes: float
    formula: str


def needs(config: Config, *, num_parameters: float | None = None) -> list[Need]:
    """Return the largest size of each part of a run, on a disk or in memory.

    num_parameters: number of the policy's parameters; None reads it from the model's files.
    Raises: ConfigError if a number cannot be determined.
    """
    if num_parameters is not None and not 1 <= num_parameters <= MAX_PARAMETERS:
        raise ConfigError(
            f"--parameters: got {num_parameters:g}, expected a number from 1 to "
            f"{MAX_PARAMETERS:g}, such as 8e9; correct it"
        )
    num = num_parameters or _parameters(config)
    num_adapted = _adapter_parameters(config)
    return [
        *_disks(config, num=num, num_adapted=num_adapted),
        *_memory(config, num=num, num_adapted=num_adapted),
    ]


def _disks(config: Config, *, num: float, num_adapted: int | None) -> list[Need]:
    run, algorithm, evaluation = config.run, config.algorithm, config.evaluation
    trained = [f"{CHECKPOINT_BYTES} x {_trained(num, num_adapted)}"]
    num_trained = num if num_adapted is None else num_adapted
    if algorithm.has_critic:
        trained.append(f"{CHECKPOINT_BYTES} x {num:,.0f} parameters of the critic")
        num_trained += num
    # The run keeps an older checkpoint, to return to if the reward collapses. If the newest ones
    # span too few steps, it also keeps one between the older checkpoint and the newest ones.
    num_old = 1 if run.checkpoint_every * (run.keep_checkpoints - 1) >= MILESTONE_STEPS else 2
    num_kept = run.keep_checkpoints + run.keep_best + num_old + 1
    num_rollouts = algorithm.groups_per_step * algorithm.group_size
    num_tokens = config.model.max_context_tokens
    num_steps = min(run.journal_steps, run.steps)
    of_experts = _expert_bytes(config)
    of_token = JOURNAL_BYTES + (of_experts or 0)
    journal = num_steps * num_rollouts * num_tokens * of_token
    limit = run.journal_gib * GIB
    num_event_steps = min(run.steps, run.checkpoint_every * (run.keep_checkpoints + 1))
    num_events = max(num_event_steps, num_steps)
    num_played, sets = _evaluated(config)
    exports = [
        Need(
            part="each export",
            num_bytes=EXPORT_BYTES * num,
            formula=f"{EXPORT_BYTES} x {num:,.0f} parameters",
        )
    ]
    if num_adapted is not None:
        exports.append(
            Need(
                part="each export of adapters",
                num_bytes=EXPORT_BYTES * num_adapted,
                formula=f"{EXPORT_BYTES} x {num_adapted:,} parameters of adapters",
            )
        )
    return [
        Need(
            part="checkpoints",
            num_bytes=num_kept * (CHECKPOINT_BYTES * num_trained + CHECKPOINT_STATE),
            formula=f"{num_kept} (run.keep_checkpoints + run.keep_best + {num_old} from before a "
            "collapse + one being written) x "
            f"({' + '.join(trained)} + 1 MiB)",
        ),
        Need(
            part="journal",
            num_bytes=min(journal, limit),
            formula=f"the smaller of run.journal_gib ({run.journal_gib:g} GiB) and {num_steps} "
            f"steps (run.journal_steps) x {num_rollouts} rollouts x {num_tokens} tokens "
            f"(model.max_context_tokens) x {_experts(JOURNAL_BYTES, of_experts)} = "
            f"{_shown(journal)}",
        ),
        Need(
            part="database",
            num_bytes=2 * num_rollouts * num_events * EVENT_BYTES + run.steps * RECORD_BYTES,
            formula=f"{num_events} steps x {num_rollouts} rollouts x 2 events x {EVENT_BYTES} + "
            f"{run.steps} steps x {RECORD_BYTES}",
        ),
        _service(config, num_turns_kept=num_event_steps * num_rollouts, of_experts=of_experts),
        Need(
            part="evaluations",
            num_bytes=evaluation.keep_results * num_played * num_tokens * EVALUATION_BYTES,
            formula=f"{evaluation.keep_results} files (evaluation.keep_results) x {num_played} "
            f"samples{sets} x {num_tokens} tokens x {EVALUATION_BYTES}",
        ),
        Need(part="run.log", num_bytes=LOG_BYTES, formula="4 files x 32 MiB"),
        *exports,
    ]


def _service(config: Config, *, num_turns_kept: int, of_experts: int | None) -> Need:
    """Return the additional size of the database if the run is started with `rayloom serve`.

    num_turns_kept: ended sessions whose turns are still stored. of_experts: what `_expert_bytes`
    returns.
    """
    service, num_tokens = config.service, config.model.max_context_tokens
    waiting = service.max_waiting_mib * MIB + service.keep_feed_entries * EVENT_BYTES
    formula = (
        f"{service.max_waiting_mib} MiB (service.max_waiting_mib) + {service.keep_feed_entries} "
        f"(service.keep_feed_entries) x {EVENT_BYTES}"
    )
    if any(member.tasks.environment == SESSION for member in config.members.values()):
        num_sessions = num_turns_kept + config.sessions.max_open
        of_token = SESSION_BYTES + (of_experts or 0)
        waiting += num_sessions * num_tokens * of_token
        formula += (
            f" + {num_sessions} sessions (of the steps since the oldest checkpoint, and "
            f"sessions.max_open) x {num_tokens} tokens x {_experts(SESSION_BYTES, of_experts)}"
        )
    return Need(
        part="database of `rayloom serve`, in addition",
        num_bytes=waiting,
        formula=f"{formula}; without uploads",
    )


def _memory(config: Config, *, num: float, num_adapted: int | None) -> list[Need]:
    """Return the memory for a rank of the trainer, and for the weights that the trainer publishes.

    num: parameters of the model. num_adapted: parameters of its adapters; None without LoRA.
    """
    trainer, algorithm = config.trainer, config.algorithm
    of_dtype = 4 if trainer.dtype is Dtype.FLOAT32 else 2
    trained = num if num_adapted is None else num_adapted
    parts = [(RANK_BYTES, trained, "of adapters" if num_adapted is not None else "")]
    if num_adapted is not None:
        parts.append((of_dtype, num, "that are frozen"))
    if algorithm.has_critic:
        parts.append((RANK_BYTES, num, "of the critic"))
    if algorithm.needs_reference and (num_adapted is None or algorithm.reference is not None):
        parts.append((EXPORT_BYTES, num, "of the reference"))
    summands = [f"{size} x {count:,.0f} parameters {what}".rstrip() for size, count, what in parts]
    found = [
        Need(
            part="memory of each rank for weights, gradients and moments",
            num_bytes=sum(size * count for size, count, _ in parts) / trainer.num_ranks,
            formula=f"({' + '.join(summands)}) / {trainer.num_ranks} ranks (trainer.num_ranks); "
            "without activations",
        )
    ]
    if not trainer.reshard_between_micro_batches:
        models = 2 if algorithm.has_critic else 1
        gradients = trained + num * (models - 1)
        found.append(
            Need(
                part="memory of each rank for gathered weights and gradients, in addition",
                num_bytes=of_dtype * num * models + GRADIENT_BYTES * gradients,
                formula=f"{models} x {of_dtype} x {num:,.0f} parameters + {GRADIENT_BYTES} x "
                f"{gradients:,.0f} gradients; 0 with trainer.reshard_between_micro_batches",
            )
        )
    if config.inference.weight_backend == "object_store":
        of_adapters = num_adapted if trainer.published_lora is not None else None
        published = num if of_adapters is None else of_adapters
        found.append(
            Need(
                part="memory of two publications, in each object store",
                num_bytes=2 * of_dtype * published,
                formula=f"2 x {of_dtype} x {_trained(published, of_adapters)}",
            )
        )
    return found


def _trained(num: float, num_adapted: int | None) -> str:
    if num_adapted is None:
        return f"{num:,.0f} parameters"
    return f"{num_adapted:,} parameters of adapters"


def _experts(of_token: float, of_experts: int | None) -> str:
    if of_experts is None:
        return f"{of_token:g} (and recorded experts, if the model is a mixture of experts)"
    if not of_experts:
        return f"{of_token:g}"
    return f"({of_token:g} + {of_experts} of recorded experts)"


def _evaluated(config: Config) -> tuple[int, str]:
    """Return how many rollouts the largest evaluation set has, and a note about unknown sizes."""
    own = sum(
        member.tasks.evaluation_tasks * member.evaluation.samples
        for member in config.members.values()
    )
    counts, unknown = [own], []
    for name, settings in config.evaluation.sets.items():
        if settings.tasks is not None:
            counts.append(settings.tasks * settings.samples)
        elif settings.place is None and settings.dataset is None and settings.split is None:
            counts.append(config.tasks.evaluation_tasks * settings.samples)
        else:
            unknown.append(name)
    shown = ", ".join(f"evaluation.sets.{name}.tasks" for name in unknown)
    note = f" (and all tasks of the sets whose number of tasks is not set: set {shown})"
    return max(counts), note * bool(unknown)


def describe_needs(found: list[Need]) -> str:
    """Return a Markdown table of the parts."""
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


def _architecture(config: Config) -> Any | None:
    """Return transformers' settings of the model; None if this machine lacks its config.json."""
    directory = Path(config.model.path or "").expanduser()
    if config.model.path is None or not (directory / "config.json").is_file():
        return None
    # Import this here, because it takes two seconds.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--size: {directory / 'config.json'} cannot be read ({first_line}); expected the "
            "settings of an architecture that transformers knows; download the model again"
        ) from error


def _adapter_parameters(config: Config) -> int | None:
    lora = config.trainer.lora
    if lora is None:
        return None
    from actors.trainer.lora import num_adapter_parameters

    if config.model.path is None:
        from actors.trainer.tiny.model import tiny_config
        from actors.trainer.tiny.tokenizer import build_tokenizer

        architecture = tiny_config(build_tokenizer())
    else:
        architecture = _architecture(config)
    if architecture is None:
        raise ConfigError(
            f"--size: trainer.lora adapts layers of model.path {config.model.path}, which is not "
            "a directory with a config.json here, so its adapters cannot be counted; download the "
            "model, or only its config.json, and name the directory"
        )
    try:
        return num_adapter_parameters(architecture, lora)
    except NotImplementedError as error:
        raise ConfigError(f"--size: {error}") from error


def _expert_bytes(config: Config) -> int | None:
    """Return the bytes that record a token's experts; None if the architecture is unknown."""
    if config.model.path is None:
        return 0
    architecture = _architecture(config)
    if architecture is None:
        return None
    text = architecture.get_text_config()
    layers = routed_layers(text)
    if not layers:
        return 0
    num_experts = getattr(text, "num_experts", None) or text.num_local_experts
    return len(layers) * text.num_experts_per_tok * (1 if num_experts <= 256 else 2)


def _elements(file: Path) -> int:
    """Return the number of elements of all tensors in a safetensors file, from its header."""
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
