"""Export a checkpoint as a Hugging Face directory, in one process and without a process group.

The checkpoint determines the weights, and whether the head is tied to the embedding. Configuration,
tokenizer, processor, chat templates and generation defaults are copied unchanged from the base
model, so that answers end at the same tokens as in the run. A chat template of the run replaces the
base model's templates. Invariant: the directory appears complete or not at all, and nothing is ever
overwritten.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from actors.environment.tokenizer import load_tokenizer
from actors.trainer.checkpoint import (
    Adapter,
    CheckpointError,
    Progress,
    check_adapter,
    check_files,
    read_manifest,
)
from actors.trainer.lora import base_digest, merged_weight, peft_names

# Files that transformers and vLLM read in a model's directory besides configuration and weights.
_COMPANIONS = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer*",
    "vocab*",
    "merges*",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
# Files that describe the base model's own weights, or the same weights in another layout or type.
_OF_WEIGHTS = (
    "config.json",
    "*.index.json",
    "params.json",
    "adapter_config.json",
    "*quant*_config.json",
    "quantize_config.json",
)
_GENERATION = "generation_config.json"
_STORED = "model."


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    model: str | None = None,
    dtype: torch.dtype = torch.float32,
    only_adapter: bool = False,
) -> Progress:
    """Write a checkpoint's policy in Hugging Face format; adapters are merged into the weights.

    Args: output: a directory that does not exist. model: the base model, if it is no longer where
        the run found it. dtype: type of the written weights. only_adapter: write the adapters in
        PEFT's format instead of a whole model.
    Returns: the checkpoint's manifest.
    Raises: FileExistsError if `output` exists; CheckpointError if the checkpoint is broken, changed
        or of another base model, or has no adapters that could be written; OSError (transformers)
        if the base model is missing.
    """
    if os.path.lexists(output):
        raise FileExistsError(
            f"export: {output} exists, expected a new directory; choose another or remove it"
        )
    progress = read_manifest(checkpoint)
    base = progress.model if model is None else model
    if only_adapter and progress.lora is None:
        raise CheckpointError(
            f"checkpoint {checkpoint}: got whole weights, expected adapters; export it without "
            "--adapter"
        )
    check_files(checkpoint)
    aside = output.with_name(f".tmp-{output.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if progress.lora is None:
        causal_lm = _load_weights(checkpoint, base)
    else:
        causal_lm = _load_base(checkpoint, base, progress.lora)
        halves = _read_adapters(checkpoint, progress.lora, causal_lm)
        if only_adapter:
            aside.mkdir(parents=True)
            _write_adapters(aside, base, progress.lora, halves, dtype=dtype)
            aside.rename(output)
            return progress
        _merge(causal_lm, progress.lora, halves)
    aside.mkdir(parents=True)
    causal_lm.to(dtype).save_pretrained(aside)
    # transformers writes this file from the configuration; the base model's own is copied below.
    (aside / _GENERATION).unlink(missing_ok=True)
    _copy_companions(base, aside)
    if progress.chat_template is not None:
        _write_template(base, progress.chat_template, aside)
    aside.rename(output)
    return progress


def _load_base(checkpoint: Path, base: str, lora: Adapter) -> PreTrainedModel:
    causal_lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = base_digest(causal_lm, is_collective=False)
    check_adapter(checkpoint, lora, replace(lora, base=found))
    return causal_lm


def _read_adapters(
    checkpoint: Path, lora: Adapter, causal_lm: PreTrainedModel
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [rank, in] and B [out, rank] of every adapted layer, by the layer's name."""
    halves = {}
    for name in lora.layers:
        out_features, in_features = causal_lm.get_submodule(name).weight.shape
        halves[name] = (
            torch.empty(lora.rank, in_features),
            torch.empty(out_features, lora.rank),
        )
    stored = {
        f"{name}.{half}": tensor
        for name, pair in halves.items()
        for half, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    }
    _load_tensors(checkpoint, stored, base=str(causal_lm.name_or_path))
    return halves


def _merge(
    causal_lm: PreTrainedModel, lora: Adapter, halves: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    for name, (half_a, half_b) in halves.items():
        weight = causal_lm.get_submodule(name).weight
        weight.data = merged_weight(weight.data, half_a, half_b, scale=lora.alpha / lora.rank)


def _write_adapters(
    directory: Path,
    base: str,
    lora: Adapter,
    halves: Mapping[str, tuple[Tensor, Tensor]],
    *,
    dtype: torch.dtype,
) -> None:
    tensors = {
        name: tensor.to(dtype).contiguous()
        for layer, pair in halves.items()
        for name, tensor in zip(peft_names(layer), pair, strict=True)
    }
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.layers),
        "inference_mode": True,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")


def _load_weights(checkpoint: Path, base: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(base)
    parts = [config, config.get_text_config()]
    parts = [part for part in parts if hasattr(part, "tie_word_embeddings")]
    flags = [part.tie_word_embeddings for part in parts]
    # The trainer stores a separate head, whether or not the configuration ties it.
    _tie(parts, [False] * len(parts))
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _tie(parts, flags)
    tied = causal_lm.get_expanded_tied_weights_keys(all_submodels=True)
    weights = dict(causal_lm.state_dict())
    stored = _stored_names(checkpoint, base=base)
    for name in tied:
        if _STORED + name not in stored:
            del weights[name]
    _load_tensors(checkpoint, weights, base=base)
    # A tied head is one tensor under two names.
    if all(name not in weights or torch.equal(weights[name], weights[tied[name]]) for name in tied):
        causal_lm.all_tied_weights_keys = tied
        causal_lm.tie_weights(recompute_mapping=False)
    else:
        _tie(parts, [False] * len(parts))
    return causal_lm


def _stored_names(checkpoint: Path, *, base: str) -> Container[str]:
    with _reading(checkpoint, base=base):
        return dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata


def _load_tensors(checkpoint: Path, tensors: dict[str, Tensor], *, base: str) -> None:
    with _reading(checkpoint, base=base), warnings.catch_warnings():
        # torch warns that there is no process group, which is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"model": tensors}, checkpoint_id=checkpoint, no_dist=True)


@contextmanager
def _reading(checkpoint: Path, *, base: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, Exception) as error:
        # torch's own error is not an Exception. Reading includes unpickling, and a damaged pickle
        # may raise any error.
        raise CheckpointError(
            f"checkpoint {checkpoint}: its weights cannot be read ({type(error).__name__}), "
            f"expected those of {base}; name the run's base model or use another checkpoint"
        ) from error


def _tie(parts: Sequence[PretrainedConfig], flags: Sequence[bool]) -> None:
    for part, flag in zip(parts, flags, strict=True):
        part.tie_word_embeddings = flag


def _copy_companions(base: str, output: Path) -> None:
    source = Path(base)
    if not source.is_dir():
        source = Path(snapshot_download(base, allow_patterns=list(_COMPANIONS)))
    for path in sorted({path for pattern in _COMPANIONS for path in source.glob(pattern)}):
        is_of_weights = any(fnmatch(path.name, pattern) for pattern in _OF_WEIGHTS)
        if path.is_file() and not is_of_weights:
            target = output / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(path, target)


def _write_template(base: str, chat_template: str, output: Path) -> None:
    """Replace the model's chat templates in every file in which a tool may look for one."""
    shutil.rmtree(output / "additional_chat_templates", ignore_errors=True)
    (output / "chat_template.json").unlink(missing_ok=True)
    text: str = load_tokenizer(base, chat_template=chat_template).chat_template
    (output / "chat_template.jinja").write_text(text, encoding="utf-8")
    settings = output / "tokenizer_config.json"
    found = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    settings.write_text(
        json.dumps({**found, "chat_template": text}, ensure_ascii=False, indent=2), encoding="utf-8"
    )
