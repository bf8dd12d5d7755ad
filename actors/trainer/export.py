"""A checkpoint as a Hugging Face directory, in one process and without a process group.

The weights come from the checkpoint; configuration, tokenizer, chat template and generation
defaults come from the base model. Invariant: the directory appears whole or not at all, and
nothing is ever overwritten. Called by the command line.
"""

from __future__ import annotations

import shutil
import warnings
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from actors.trainer.checkpoint import CheckpointError, Progress, read_manifest

# What a base model's directory holds for its tokenizer travels as it is, byte for byte.
_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "*.jinja",
    "chat_template*",
    "special_tokens_map*",
    "added_tokens*",
    "generation_config.json",
    "*.model",
    "LICENSE*",
)


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    model: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Progress:
    """Write a checkpoint's policy in Hugging Face format.

    Args: output: a directory that does not exist. model: the base model, when it is no longer
        where the run found it. dtype: of the written weights.
    Returns: the checkpoint's manifest.
    Raises: FileExistsError when `output` exists; CheckpointError for a broken checkpoint or
        another base model; OSError (transformers) when the base model is not there.
    """
    if output.exists():
        raise FileExistsError(
            f"export: {output} exists, expected a new directory; choose another or remove it"
        )
    progress = read_manifest(checkpoint)
    base = progress.model if model is None else model
    causal_lm = _load_weights(checkpoint, base)
    aside = output.with_name(f".tmp-{output.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _copy_companions(base, aside)
    causal_lm.to(dtype).save_pretrained(aside)
    aside.rename(output)
    return progress


def _load_weights(checkpoint: Path, base: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(base)
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = dict(causal_lm.state_dict())
    try:
        with warnings.catch_warnings():
            # It warns of what is meant: one process, no group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # A tied head is one tensor under two names; both are read into the same storage.
            dcp.load({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    except (CheckpointException, Exception) as error:
        # torch's own is no Exception. Reading includes unpickling, and a damaged pickle raises
        # whatever its bytes come to.
        raise CheckpointError(
            f"checkpoint {checkpoint}: its weights cannot be read ({type(error).__name__}), "
            f"expected those of {base}; name the run's base model or use another checkpoint"
        ) from error
    return causal_lm


def _copy_companions(base: str, output: Path) -> None:
    source = Path(base)
    if not source.is_dir():
        AutoTokenizer.from_pretrained(base).save_pretrained(output)
        GenerationConfig.from_pretrained(base).save_pretrained(output)
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _COMPANIONS):
            shutil.copy2(path, output / path.name)
