"""Load a model's tokenizer. Called by the environment actor, and by `rayloom inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from actors.environment.rendering import ChatTokenizer


def load_tokenizer(path: str) -> ChatTokenizer:
    """Args: path: a directory or hub name. Raises: OSError, ValueError."""
    # AutoTokenizer imports torch: seconds and 200 MB that a plain fast tokenizer does without.
    config = Path(path) / "tokenizer_config.json"
    is_plain = config.is_file() and json.loads(config.read_text()).get("tokenizer_class") in (
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    )
    loader = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
    tokenizer: ChatTokenizer = loader.from_pretrained(path)
    return tokenizer
