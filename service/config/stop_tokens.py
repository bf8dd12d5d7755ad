"""Which tokens end a turn: the tokenizer's own and what the model's generation settings add."""

from __future__ import annotations

from transformers import AutoTokenizer, GenerationConfig


def stop_token_ids(model: str) -> tuple[int, ...]:
    """The end-of-sequence ids of a model directory or hub name, ascending.

    Raises: ValueError for a model that names none: no answer of it would ever end.
    """
    found = {AutoTokenizer.from_pretrained(model).eos_token_id}
    try:
        added = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        added = None
    found.update(added if isinstance(added, list) else [added])
    ids = tuple(sorted(token for token in found if token is not None))
    if not ids:
        raise ValueError(
            f"model {model}: neither its tokenizer nor its generation settings name an "
            "end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    return ids
