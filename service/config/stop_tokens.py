"""Which tokens end a turn: the tokenizer's own and what the model's generation settings add."""

from __future__ import annotations

import json
from pathlib import Path

from actors.environment.rendering import load_tokenizer


def stop_token_ids(model: str) -> tuple[int, ...]:
    """The end-of-sequence ids of a model directory or hub name, ascending.

    Raises: ValueError for a model that names none: no answer of it would ever end.
    """
    found = {load_tokenizer(model).eos_token_id}
    added = _added_by_settings(model)
    found.update(added if isinstance(added, list) else [added])
    ids = tuple(sorted(token for token in found if token is not None))
    if not ids:
        raise ValueError(
            f"model {model}: neither its tokenizer nor its generation settings name an "
            "end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    return ids


def _added_by_settings(model: str) -> list[int] | int | None:
    if Path(model).is_dir():
        # As transformers reads it, without the two seconds of importing torch and its models.
        file = Path(model) / "generation_config.json"
        return json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        return None
