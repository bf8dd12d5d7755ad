"""Faults of a model's directory: missing files, and a tokenizer that splits special tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.environment.tokenizer import ChatTokenizer, is_raw
from actors.trainer.settings import ADAPTER
from service.config.file import ConfigError

# What transformers loads an older form of a missing file with, and the names of that form.
_OLDER = {
    "*.safetensors": ("AutoModelForCausalLM", "pytorch_model*.bin"),
    "tokenizer.json": ("AutoTokenizer", "vocab.*", "*.model", "*.tiktoken"),
}

# Where the hub's cache and a trainer of transformers store models.
_INSIDE = ("snapshots/*/", "checkpoint-*/")


def remedy_of_missing(directory: Path, missing: Sequence[str]) -> str:
    """Return what to do about a directory that lacks files of a model, as a clause of an error.

    missing: which of config.json, tokenizer.json and *.safetensors the directory lacks.
    """
    has_torch_weights = any(directory.glob(_OLDER["*.safetensors"][1]))
    models = [file.parent for place in _INSIDE for file in directory.glob(f"{place}config.json")]
    if "config.json" not in missing:
        # A trainer may store settings and tokenizer beside its checkpoints.
        lacks_weights = "*.safetensors" in missing and not has_torch_weights
        models = [each for each in models if lacks_weights and any(each.glob("*.safetensors"))]
    if models:
        main = directory / "refs" / "main"
        commit = main.read_text("utf-8", "replace").strip() if main.is_file() else ""
        # checkpoint-1000 is newer than checkpoint-500.
        named = max(models, key=lambda model: (model.name == commit, len(model.name), model.name))
        return f"the model is in a directory inside it; name {named}"
    if adapters := [file for place in ("", *_INSIDE) for file in directory.glob(place + ADAPTER)]:
        return (
            f"it has only an adapter ({adapters[0]}); merge it into its model first "
            "(merge_and_unload of peft), save model and tokenizer (save_pretrained), and name "
            "their directory"
        )
    # A file such as mmproj-f16.gguf has only the part of a model that reads images.
    files = [file for file in sorted(directory.glob("*.gguf")) if "mmproj" not in file.name]
    # Weights in a GGUF file are often quantised, so that torch's weights are preferred.
    if files and "*.safetensors" in missing and not has_torch_weights:
        return f"name a GGUF file in it, such as {files[0]}"
    if "config.json" in missing:
        return "download the model again, or export a checkpoint of a run with `rayloom export`"
    for _, *older in (_OLDER[name] for name in missing):
        if not any(any(directory.glob(pattern)) for pattern in older):
            return (
                "its download or export is incomplete, or it has another format; repeat it, or "
                "name a model in this format"
            )
    # A new directory, because the files of a snapshot in the hub's cache are links to its blobs.
    saved = " and ".join(
        f"{loader}.from_pretrained({str(directory)!r}).save_pretrained('NEW')"
        for loader, *_ in _OLDER.values()
    )
    return f"save it in this format in a new directory with transformers: {saved}; name NEW"


def check_special_tokens(
    tokenizer: ChatTokenizer, *, was_loaded: bool, tell: Callable[[str], None]
) -> None:
    """Check that a tokenizer splits no special token that its chat template writes.

    was_loaded: whether an earlier start has already used the tokenizer. The run then continues with
    it, and `tell` is called with a warning.
    Raises: ConfigError if the tokenizer splits one and the run is new.
    """
    if is_raw(tokenizer):
        return
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    for number, token in added.items():
        text = str(token)
        is_end = number == tokenizer.eos_token_id and "eos_token" in template
        if not (token.special and (is_end or text in template)):
            continue
        if number in (ids := tokenizer.encode(text, add_special_tokens=False)):
            continue
        problem = (
            f"model.path: its tokenizer makes ids {ids} of {text!r}, which its chat template "
            f"writes; expected the special token {number}; "
        )
        remedy = "set split_special_tokens to false in tokenizer_config.json"
        if not was_loaded:
            raise ConfigError(f"{problem}{remedy}")
        tell(f"{problem}{remedy} before you start a new training")
        return
