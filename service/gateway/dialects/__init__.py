"""The protocols that clients can use: a module for each protocol, with its `Dialect`.

The ingress makes routes from `DIALECTS`; nothing here depends on HTTP, Ray or the session.
"""

from collections.abc import Mapping

from service.gateway.dialects.anthropic_messages import ANTHROPIC_MESSAGES
from service.gateway.dialects.dialect import Dialect
from service.gateway.dialects.openai_chat import OPENAI_CHAT
from service.gateway.dialects.openai_responses import OPENAI_RESPONSES

DIALECTS = (OPENAI_CHAT, ANTHROPIC_MESSAGES, OPENAI_RESPONSES)


def dialect_at(path: str, headers: Mapping[str, str]) -> Dialect:
    """Return the dialect that a client uses, found by the path and headers of its request.

    headers: their names may have any case.
    """
    if any(name.lower() == "anthropic-version" for name in headers):
        return ANTHROPIC_MESSAGES
    asked = path[max(path.find("/v1/"), 0) :]
    return next((each for each in DIALECTS if asked.startswith(each.path)), OPENAI_CHAT)
