"""Build the tiny model, or copy it from the user's cache directory."""

from __future__ import annotations

from pathlib import Path

from actors.trainer.tiny.built import MARKER, WARMUP_STEPS, build_name, copy_built, read_marker
from service.config.file import ConfigError
from service.config.tree import TinyModelSettings
from service.launch.gguf_models import models_directory


def build_tiny(directory: Path, settings: TinyModelSettings) -> str:
    """Put the tiny model into the directory if it is not there yet; return a phrase on where it is.

    The model is built once, in the user's cache directory, and copied from there. Raises:
    ConfigError.
    """
    warmup_steps = WARMUP_STEPS if settings.warmup_steps is None else settings.warmup_steps
    cached = models_directory() / build_name(
        seed=settings.seed,
        tie_word_embeddings=settings.tie_word_embeddings,
        warmup_steps=warmup_steps,
    )
    try:
        if not (cached / MARKER).is_file() and not _is_built(cached, settings, warmup_steps):
            was_reused = _built(directory, settings, warmup_steps)
        else:
            was_reused = copy_built(cached, directory)
        built = read_marker(directory)
    except FileExistsError as error:
        raise ConfigError(f"model tiny: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"model tiny: {directory} cannot be written ({error}); expected a directory that can "
            "be made; choose another"
        ) from error
    assert built is not None, "the directory has the model"
    report, verb = built["report"], "is already" if was_reused else "built"
    return (
        f"{verb} in {directory}: {report['num_parameters'] / 1e6:.2f} M parameters, "
        f"{report['vocab_size']} tokens, {report['warmup_steps']} warm-up steps"
    )


def _is_built(cached: Path, settings: TinyModelSettings, warmup_steps: int) -> bool:
    """Build the tiny model in the cache, and return whether the cache now has it."""
    try:
        _built(cached, settings, warmup_steps)
    except OSError:
        # The cache cannot be written, or another process has built the model meanwhile.
        return (cached / MARKER).is_file()
    return True


def _built(directory: Path, settings: TinyModelSettings, warmup_steps: int) -> bool:
    """Build the tiny model, and return whether the directory held it already.

    Raises: FileExistsError if the directory has other files; OSError.
    """
    # Imported here, because a copy does not need these two seconds of imports.
    from safetensors import SafetensorError
    from transformers.utils import logging

    from actors.trainer.tiny.model import build_tiny_model

    logging.disable_progress_bar()
    try:
        return build_tiny_model(
            directory,
            seed=settings.seed,
            tie_word_embeddings=settings.tie_word_embeddings,
            warmup_steps=warmup_steps,
        )
    except SafetensorError as error:
        raise OSError(str(error)) from error
