"""Parts of an answer in any dialect: server-sent events, pieces of a text, calls, tokens."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from service.gateway.chat import ChatReply, RefusalCode

COMMENT = b": keep-alive\n\n"
# Number of pieces of a streamed text: enough to test how a client reads streams, and cheap.
NUM_PIECES = 4

ERROR_TYPES = {
    RefusalCode.INVALID_KEY: "authentication_error",
    RefusalCode.FORBIDDEN: "permission_error",
    RefusalCode.UNKNOWN_SESSION: "not_found_error",
    RefusalCode.NOT_FOUND: "not_found_error",
    RefusalCode.TOO_MANY_REQUESTS: "rate_limit_error",
}
"""The error types that OpenAI and Anthropic share; each dialect chooses those of other codes."""


def event(data: Mapping[str, Any], *, name: str = "") -> bytes:
    """Return a server-sent event, in ASCII: some clients end a line at U+0085 or U+2028."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    first = f"event: {name}\n" if name else ""
    return f"{first}data: {text}\n\n".encode("ascii")


def pieces(text: str) -> Iterator[str]:
    """Yield the pieces in which a streamed answer sends a text that is already complete.

    There are at most NUM_PIECES pieces, none of them empty. Example: "abc" -> a, b, c.
    """
    size = math.ceil(len(text) / NUM_PIECES)
    return (text[start : start + size] for start in range(0, len(text), size or 1))


def shown_calls(reply: ChatReply) -> list[tuple[str, str, str]]:
    """Return the id, the name and the arguments (JSON text) of each tool call in a reply."""
    turn = re.sub(r"[^A-Za-z0-9]", "_", reply.turn_id)
    return [
        (call_id or f"call_{turn}_{index}", name, arguments)
        for index, (call_id, name, arguments) in enumerate(reply.message.call_texts)
    ]


def shown_tokens(reply: ChatReply) -> dict[str, Any]:
    """Return the answer's fields `token_ids` and `token_logprobs`; {} if the session hides them.

    A log-probability that was not recorded is null.
    """
    shown: dict[str, Any] = {}
    if reply.sampled_token_ids is not None:
        shown["token_ids"] = reply.sampled_token_ids.tolist()
    if reply.logprobs is not None:
        shown["token_logprobs"] = [
            each if math.isfinite(each) else None for each in reply.logprobs.tolist()
        ]
    return shown
