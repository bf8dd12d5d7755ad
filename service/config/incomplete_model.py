"""Find what to do about a model's directory that lacks files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.trainer.settings import ADAPTER

# What transformers loads an older form of a missing file with, and the names of that form.
_OLDER = {
    "*.safetensors": ("AutoModelForCausalLM", "pytorch_model*.bin"),
    "tokenizer.json": ("AutoTokenizer", "vocab.*", "*.model", "*.tiktoken"),
}


def remedy(directory: Path, missing: Sequence[str]) -> str:
    """Return what to do about a directory that lacks files of a model, as a clause of an error.

    missing: which of config.json, tokenizer.json and *.safetensors the directory lacks.
    """
    if (directory / ADAPTER).is_file():
        return (
            f"it has only an adapter ({ADAPTER}); merge it into its model first "
            "(merge_and_unload of peft), save model and tokenizer (save_pretrained), and name "
            "their directory"
        )
    if snapshots := list(directory.glob("snapshots/*/config.json")):
        main = directory / "refs" / "main"
        commit = main.read_text("utf-8", "replace").strip() if main.is_file() else ""
        named = max(snapshots, key=lambda file: (file.parent.name == commit, file))
        return f"it is an entry of the hub's cache; name {named.parent}"
    if "config.json" in missing:
        return "export a checkpoint with `rayloom export`"
    saved = []
    for loader, *older in (_OLDER[name] for name in missing):
        if not any(any(directory.glob(pattern)) for pattern in older):
            return "its download or export is incomplete; repeat it"
        saved.append(
            f"{loader}.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        )
    return f"save its older files in this format with transformers: {' and '.join(saved)}"
