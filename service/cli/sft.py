"""`rayloom sft`: check the chats, train on them, and export the model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from ray.exceptions import RayError

from actors.deadline import ActorLost
from actors.environment.chats import ChatEncoder, read_chats
from actors.environment.tasks import BadTaskFile
from actors.environment.tokenizer import load_tokenizer, stop_ids_of
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.group import TrainerStartFailed
from actors.types import Sample
from service.cli.artifacts import export_to
from service.cli.outlet import Stages, say, warn
from service.cli.train import EXIT_FAILED, EXIT_OK
from service.config.algorithm_checks import schedule_warnings
from service.config.disagreements import trainer_disagreements
from service.config.file import ConfigError, dump_config, load_sft
from service.config.model_faults import check_special_tokens
from service.config.preflight import (
    check_machine,
    check_model,
    check_model_sources,
    check_stop_tokens,
)
from service.config.sft import SftConfig
from service.launch.cluster import joined
from service.launch.model_directories import with_converted_models
from service.launch.run_dir import RunDir, check_new, held_alone, model_path
from service.launch.signals import EXIT_INTERRUPTED, StopSignals
from service.run.health import RunFailed
from service.run.sft import SftRun, num_steps_of

# Name of the directory of the exported model, within the training's directory.
EXPORT = "export"
# Settings of `sft` that a resumed training may change.
_CHANGEABLE = ("epochs", "checkpoint_every", "keep_checkpoints")


def run_sft(
    given: SftConfig,
    signals: StopSignals,
    stages: Stages,
    *,
    new_run: Path | None = None,
    resumed: Path | None = None,
) -> int:
    """Train on the chats until the last step, export the model, and return the exit code.

    resumed: directory of the training to resume; None starts a new one, in `new_run`.

    Raises: ConfigError if the training is refused; KeyboardInterrupt if a signal arrives. Both are
    raised only before anything starts.
    """
    signals.check()
    run = with_converted_models(given.as_run(num_steps=1), tell=partial(say, err=True))
    config = replace(given, model=run.model)
    check_machine(run, is_local=True)
    check_model_sources(run)
    if resumed is not None:
        run_dir = RunDir(path=resumed)
        _check_resumable(run_dir, config)
    else:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        run_dir = RunDir(path=new_run or Path("runs") / f"sft-{stamp}")
        _check_new(run_dir)
    with _prepared(run_dir):
        stages.next("looking for the model")
        model = model_path(run, run_dir)
        signals.check()
        stages.next("reading and rendering the chats")
        chats = _checked_chats(config, model, was_loaded=resumed is not None)
        num_steps = num_steps_of(config, len(chats))
        planned = config.as_run(num_steps=num_steps)
        if problems := list(trainer_disagreements(planned)):
            raise ConfigError(f"sft: {problems[0]}")
        for warning in schedule_warnings(planned):
            warn(warning)
        _record_chats(run_dir, config, chats)
        num_tokens = sum(sample.num_trained for chat in chats for sample in chat)
        say(f"{len(chats)} chats with {num_tokens:,} tokens of replies; {num_steps} steps")
        stages.next("starting Ray")
        signals.hold()
        with joined(run, address=None):
            signals.install()
            stages.next("starting the trainer")
            checkpoint, code = _trained(config, chats, run_dir, model, signals, stages)
    where = os.path.relpath(run_dir.path)
    if checkpoint is None:
        say(f"resume with --resume {where}", err=code == EXIT_FAILED)
        return code
    export = _exported(checkpoint, run_dir)
    say(f"trained {num_steps} steps; the model is in {os.path.relpath(export)}")
    return EXIT_OK


def _trained(
    config: SftConfig,
    chats: Sequence[Sequence[Sample]],
    run_dir: RunDir,
    model: str,
    signals: StopSignals,
    stages: Stages,
) -> tuple[Path | None, int]:
    """Train on the chats; return the checkpoint, or None and the exit code if it did not finish."""
    training = SftRun(
        config,
        chats,
        run_dir,
        model=model,
        is_stop_asked=lambda: signals.is_asked,
        tell=say,
        on_start=stages.end,
    )
    try:
        checkpoint = asyncio.run(training.run())
    except KeyboardInterrupt:
        say("interrupted: ended at once", err=True)
        return None, EXIT_INTERRUPTED
    except (ActorLost, CheckpointError, OSError, RayError, RunFailed, TrainerStartFailed) as error:
        say(f"rayloom: the training failed: {error}", err=True)
        return None, EXIT_FAILED
    finally:
        # Only Ray's end and the export remain.
        signals.ignore()
    return checkpoint, EXIT_INTERRUPTED


@contextmanager
def _prepared(run_dir: RunDir) -> Iterator[None]:
    """Lock a directory for the `with` block. Remove a new directory if the training is refused."""
    was_there = run_dir.path.exists()
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run directory {run_dir.path} cannot be used ({error.strerror or error}); expected "
            "one that can be made and written; choose another --run-dir"
        ) from error
    try:
        with held_alone(run_dir):
            yield
    except (ConfigError, KeyboardInterrupt):
        if not was_there and not run_dir.checkpoints.exists():
            shutil.rmtree(run_dir.path, ignore_errors=True)
        raise


def _check_new(run_dir: RunDir) -> None:
    if run_dir.chats_file.is_file():
        raise ConfigError(
            f"run directory {run_dir.path} holds a supervised training, expected a new directory; "
            f"choose another --run-dir, or continue it with --resume {run_dir.path}"
        )
    check_new(run_dir)


def _check_resumable(run_dir: RunDir, config: SftConfig) -> None:
    before = load_sft(run_dir.config_file)
    kept = {name: getattr(before.sft, name) for name in _CHANGEABLE}
    for section, own, now in (
        ("model", before.model, config.model),
        ("sft", before.sft, replace(config.sft, **kept)),
    ):
        if own != now:
            raise ConfigError(
                f"--resume {run_dir.path}: section {section} differs from that of the training, "
                f"expected the same (except sft.{', sft.'.join(_CHANGEABLE)}), because the order "
                f"of the chats depends on it; use {run_dir.config_file}, or start a new training"
            )
    if before.trainer.lora_shape != config.trainer.lora_shape:
        raise ConfigError(
            f"--resume {run_dir.path}: trainer.lora differs from that of the training, expected "
            f"the same, because the checkpoint holds the adapters; use {run_dir.config_file}, or "
            "start a new training"
        )


def _checked_chats(config: SftConfig, model: str, *, was_loaded: bool) -> list[tuple[Sample, ...]]:
    """Check the model's files, read the chats, and return the samples of each chat."""
    check_model(config.as_run(num_steps=1), model, was_loaded=was_loaded)
    check_stop_tokens(model)
    settings = config.sft
    try:
        tokenizer = load_tokenizer(model, chat_template=config.model.chat_template)
        check_special_tokens(tokenizer, was_loaded=was_loaded, tell=warn)
        encoder = ChatEncoder(
            tokenizer,
            stop_token_ids=stop_ids_of(model, tokenizer),
            template_options=settings.template_options,
        )
        return read_chats(
            settings.dataset,
            encoder,
            columns=settings.columns,
            split=settings.split,
            subset=settings.subset,
            max_tokens=config.model.max_context_tokens,
            leaves_out_long=settings.long_chats == "leave_out",
            section="sft",
            tell=warn,
        )
    except (BadTaskFile, OSError, ValueError) as error:
        raise ConfigError(f"sft.dataset: {error}") from error


def _record_chats(run_dir: RunDir, config: SftConfig, chats: Sequence[Sequence[Sample]]) -> None:
    """Write the configuration and the digest of the chats; refuse to resume with other chats."""
    file, digest = run_dir.chats_file, _digest(chats)
    try:
        if file.is_file() and json.loads(file.read_text())["digest"] != digest:
            raise ConfigError(
                f"--resume {run_dir.path}: the tokens of the chats are not those that the training "
                "began with; expected the same data set, tokenizer and chat template; restore "
                "them, or start a new training"
            )
        run_dir.config_file.write_text(dump_config(config), encoding="utf-8")
        file.write_text(json.dumps({"digest": digest, "num_chats": len(chats)}) + "\n")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"run directory {run_dir.path} cannot be used ({error})") from error


def _digest(chats: Sequence[Sequence[Sample]]) -> str:
    hashed = blake2b(digest_size=16)
    for number, chat in enumerate(chats):
        for sample in chat:
            hashed.update(f"{number} {sample.num_tokens}\n".encode())
            hashed.update(sample.token_ids.tobytes() + sample.mask.tobytes())
    return hashed.hexdigest()


def _exported(checkpoint: Path, run_dir: RunDir) -> Path:
    export = run_dir.path / EXPORT
    aside = run_dir.path / f"{EXPORT}.new"
    shutil.rmtree(aside, ignore_errors=True)
    export_to(checkpoint, aside, command="sft")
    shutil.rmtree(export, ignore_errors=True)
    aside.rename(export)
    return export
