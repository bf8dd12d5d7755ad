"""How clients speak to a session: one module for each provider's words, all of one `Dialect`.

The ingress makes a route of each of `DIALECTS`; nothing here knows of HTTP, Ray or the session.
"""

from service.gateway.dialects.anthropic_messages import ANTHROPIC_MESSAGES
from service.gateway.dialects.openai_chat import OPENAI_CHAT
from service.gateway.dialects.openai_responses import OPENAI_RESPONSES

DIALECTS = (OPENAI_CHAT, ANTHROPIC_MESSAGES, OPENAI_RESPONSES)
