"""`rayloom model tiny`, and the tiny model of a run."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from actors.trainer.tiny.model import WARMUP_STEPS, build_tiny_model
from service.config.file import ConfigError
from service.config.tree import TinyModelSettings


def build_tiny(directory: Path, *, seed: int, tied: bool, warmup_steps: int | None) -> str:
    """Build the tiny model; returns a sentence on it. Raises: ConfigError."""
    transformers_logging.disable_progress_bar()
    try:
        report = build_tiny_model(
            directory,
            seed=seed,
            tie_word_embeddings=tied,
            warmup_steps=WARMUP_STEPS if warmup_steps is None else warmup_steps,
        )
    except FileExistsError as error:
        raise ConfigError(f"model tiny: {error}") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model tiny: {directory} cannot be written ({error}); expected a directory that can "
            "be made; choose another"
        ) from error
    verb = "is already" if report.was_reused else "built"
    return (
        f"{verb} in {report.directory}: {report.num_parameters / 1e6:.2f} M parameters, "
        f"{report.vocab_size} tokens, {report.warmup_steps} warm-up steps"
    )


def build_tiny_for(settings: TinyModelSettings, directory: Path) -> str:
    """Build a run's tiny model where it is not there yet; returns its path."""
    build_tiny(
        directory,
        seed=settings.seed,
        tied=settings.tie_word_embeddings,
        warmup_steps=settings.warmup_steps,
    )
    return str(directory)
