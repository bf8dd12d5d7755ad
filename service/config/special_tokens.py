"""Check that a tokenizer makes one token of each special token of its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actors.environment.tokenizer import ChatTokenizer, is_raw
from service.config.file import ConfigError


def check_special_tokens(
    tokenizer: ChatTokenizer, *, was_loaded: bool, tell: Callable[[str], None]
) -> None:
    """Check that a tokenizer splits no special token that its chat template writes.

    was_loaded: whether an earlier start has already used the tokenizer. The run then continues with
    it, and `tell` is called with a warning.
    Raises: ConfigError if the tokenizer splits one and the run is new.
    """
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    for number, token in added.items():
        text = str(token)
        is_end = number == tokenizer.eos_token_id and "eos_token" in template
        if not (token.special and (is_end or text in template)) or is_raw(tokenizer):
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
