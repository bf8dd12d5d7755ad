"""Convert token ids to bytes to show; without a tokenizer, show the ids themselves.

A token need not consist of whole characters, because byte-level tokenizers cut characters anywhere.
Each token is therefore converted to its own bytes, independent of its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from actors.environment.chat_template import RenderError
from actors.environment.protocol import Message, Role
from actors.environment.rendering import ChatRenderer
from actors.types import TokenIds

# The headers and footers are the text that a chat template writes around the messages of each role.
#
# They are found by rendering chats that contain _MARK, with any template; for a role that a
# template refuses, none are found. They only colour tokens, and never decide what was trained.
_MARK = "zqzmark"
_USER = {"role": "user", "content": "ask"}
_ASSISTANT = {"role": "assistant", "content": "reply"}
# The messages before a role's message, and the role.
_CHATS: tuple[tuple[list[dict[str, str]], str], ...] = (
    ([], "system"),
    ([_USER, _ASSISTANT], "user"),
    ([_USER], "assistant"),
    ([_USER, _ASSISTANT], "tool"),
)
# Shorter headers and footers, such as a line break, are not evidence of a template.
_SHORTEST = 3


def _chat_marks(
    tokenizer: Any, options: dict[str, Any]
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return the values of `TokenText.headers` and `TokenText.footers` for a chat template."""
    headers: set[str] = set()
    footers: set[str] = set()
    for before, role in _CHATS:
        head = _render(tokenizer, before, options) if before else ""
        following = [_USER] if role == "system" else []
        chat = [*before, {"role": role, "content": _MARK}, *following]
        whole = _render(tokenizer, chat, options)
        if head is None or whole is None or whole.count(_MARK) != 1:
            continue
        start, _, end = whole.partition(_MARK)
        if start.startswith(head):
            headers.add(start[len(head) :])
        if not following:
            footers.add(end)
    closed = _render(tokenizer, [_USER], options)
    opened = _render(tokenizer, [_USER], {**options, "add_generation_prompt": True})
    if closed is not None and opened is not None and opened.startswith(closed):
        headers.add(opened[len(closed) :])
    return _sorted(headers), _sorted(footers)


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


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A converter of token ids to bytes for display; without a tokenizer, it shows the ids."""

    note: str = ""
    """The reason why texts cannot be shown; empty if all texts can be shown."""
    tokenizer: Any = None
    """A Hugging Face tokenizer; None if there is none."""
    renderer: ChatRenderer | None = None
    """The renderer of the tokenizer's chat template."""
    added: Mapping[int, str] = field(default_factory=dict)
    is_byte_level: bool = False
    special_ids: frozenset[int] = frozenset()
    headers: tuple[bytes, ...] = ()
    """Texts of the chat template that open a message, including the generation prompt, longest
    first; they are never trained. Example: b"<|im_start|>assistant\\n" """
    footers: tuple[bytes, ...] = ()
    """Texts that close a message, longest first; the footer of a reply is sampled, and trained.
    Example: b"<|im_end|>\\n" """

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes with which to show each token."""
        return [self._piece(int(token)) for token in token_ids]

    def num_inserted(self, prompt: TokenIds, sampled: TokenIds) -> int:
        """Return how many tokens the renderer inserts after the reply `sampled` to close it."""
        if self.renderer is None:
            return 0
        try:
            extension = self.renderer.extend(
                prompt, sampled, history=(), new_messages=(_ANY_ANSWER,), tools=()
            )
        except RenderError:
            return 0
        return 0 if extension.break_reason is not None else extension.num_inserted

    def _piece(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        # Refuse a negative id, which would count from the end of the vocabulary.
        is_known = self.tokenizer is not None and token >= 0
        name = self.tokenizer.convert_ids_to_tokens(token) if is_known else None
        if name is None:
            return f"⟨{token}⟩".encode()
        if self.is_byte_level and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        match = _BYTE_TOKEN.fullmatch(name)
        if match is not None:
            return bytes([int(match[1], 16)])
        return str(name).replace(_SPACE_MARK, " ").encode("utf-8", "surrogatepass")


_ANY_ANSWER = Message(role=Role.USER, content="answer")


def token_text(
    model: str | None,
    *,
    template_options: dict[str, Any],
    chat_template: str | None,
    why_not: str,
) -> TokenText:
    """Return a converter with the tokenizer of a model, or one that shows ids if there is none.

    Args: model: directory or hub name; None if the model is not known. why_not: the reason why the
    model is not known, which becomes the converter's note.
    """
    if model is None:
        return TokenText(note=why_not)
    from actors.environment.tokenizer import load_tokenizer  # a second of imports

    try:
        tokenizer: Any = load_tokenizer(model, chat_template=chat_template)
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return TokenText(note=f"the tokenizer of {model} cannot be loaded ({first_line})")
    return text_by(tokenizer, template_options=template_options)


def text_by(tokenizer: Any, *, template_options: dict[str, Any]) -> TokenText:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    headers, footers = _chat_marks(tokenizer, template_options)
    return TokenText(
        tokenizer=tokenizer,
        renderer=ChatRenderer(tokenizer, template_options=template_options),
        special_ids=frozenset(tokenizer.all_special_ids),
        added={index: str(token) for index, token in tokenizer.added_tokens_decoder.items()},
        is_byte_level="ByteLevel" in str(getattr(backend, "decoder", "")),
        headers=headers,
        footers=footers,
    )


def _byte_alphabet() -> dict[str, int]:
    """Return a table from each character of GPT-2's byte-level vocabulary to the byte it means."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
