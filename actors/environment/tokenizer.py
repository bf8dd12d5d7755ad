"""A model's tokenizer, and the tokens that end a turn.

Called by `rendering`, by the engines' parsers, and by the checks before a start.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    @property
    def chat_template(self) -> Any: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...


def load_tokenizer(path: str) -> ChatTokenizer:
    """Load a model's tokenizer.

    Args: path: a directory or hub name. Raises: OSError, ValueError.
    """
    import transformers  # a second of imports, which rendering does without

    # AutoTokenizer imports torch: seconds and 200 MB that a plain fast tokenizer does without.
    config = Path(path) / "tokenizer_config.json"
    is_plain = config.is_file() and json.loads(config.read_text()).get("tokenizer_class") in (
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    )
    loader = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
    tokenizer: ChatTokenizer = loader.from_pretrained(path)
    return tokenizer


def tokenizer_fingerprint(tokenizer: ChatTokenizer) -> str:
    """Tell tokenizers apart: equal for equal vocabularies, added tokens included, and templates.

    Who samples elsewhere computes it alike, from a Hugging Face tokenizer.
    Returns: "sha256:" and the digest, hexadecimal, of the JSON text that stands here.
    """
    content = {"chat_template": tokenizer.chat_template, "vocab": tokenizer.get_vocab()}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{sha256(text.encode()).hexdigest()}"


def stop_token_ids(model: str) -> tuple[int, ...]:
    """The end-of-sequence ids of a model directory or hub name, ascending.

    Raises: ValueError for a model that names none: no answer of it would ever end.
    """
    ids = stop_ids_of(model, load_tokenizer(model))
    if not ids:
        raise ValueError(
            f"model {model}: neither its tokenizer nor its generation settings name an "
            "end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    return ids


def stop_ids_of(model: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Return the end-of-sequence ids of a model whose tokenizer is loaded; may be empty."""
    found = {tokenizer.eos_token_id}
    added = _added_by_settings(model)
    found.update(added if isinstance(added, list) else [added])
    return tuple(sorted(token for token in found if token is not None))


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
