"""What a chat template writes around messages: the headers and footers of each role.

Found by rendering marked chats, so that any template will do; one that refuses a role has no marks
for it. Only used to colour tokens: what was trained is never decided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2

_MARK = "zqzmark"
_USER = {"role": "user", "content": "ask"}
_ASSISTANT = {"role": "assistant", "content": "reply"}
# A role's message, and what comes before it.
_CHATS: tuple[tuple[list[dict[str, str]], str], ...] = (
    ([], "system"),
    ([_USER, _ASSISTANT], "user"),
    ([_USER], "assistant"),
    ([_USER, _ASSISTANT], "tool"),
)
# Shorter marks, such as a line break, are not evidence of a template.
_SHORTEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMarks:
    """headers: what opens a message, generation prompt included; never to be trained. footers:
    what closes one; a reply's own is sampled, and trained. Longest first.
    """

    headers: tuple[bytes, ...] = ()
    footers: tuple[bytes, ...] = ()


NO_MARKS = ChatMarks()


def chat_marks(tokenizer: Any, *, template_options: dict[str, Any]) -> ChatMarks:
    """Find the marks of a tokenizer's chat template.

    Example: for ChatML b"<|im_start|>assistant\\n" is a header, b"<|im_end|>\\n" a footer.
    """
    headers: set[str] = set()
    footers: set[str] = set()
    for before, role in _CHATS:
        head = _render(tokenizer, before, template_options) if before else ""
        following = [_USER] if role == "system" else []
        chat = [*before, {"role": role, "content": _MARK}, *following]
        whole = _render(tokenizer, chat, template_options)
        if head is None or whole is None or whole.count(_MARK) != 1:
            continue
        start, _, end = whole.partition(_MARK)
        if start.startswith(head):
            headers.add(start[len(head) :])
        if not following:
            footers.add(end)
    closed = _render(tokenizer, [_USER], template_options)
    opened = _render(tokenizer, [_USER], {**template_options, "add_generation_prompt": True})
    if closed is not None and opened is not None and opened.startswith(closed):
        headers.add(opened[len(closed) :])
    return ChatMarks(headers=_sorted(headers), footers=_sorted(footers))


def _sorted(texts: set[str]) -> tuple[bytes, ...]:
    marks = [text.encode() for text in texts if len(text.strip()) >= _SHORTEST]
    return tuple(sorted(marks, key=lambda mark: (-len(mark), mark)))


def _render(tokenizer: Any, chat: list[dict[str, str]], options: dict[str, Any]) -> str | None:
    try:
        text: str = tokenizer.apply_chat_template(
            chat, **{"add_generation_prompt": False, **options, "tokenize": False}
        )
    except (jinja2.TemplateError, ValueError, TypeError):
        return None
    return text
