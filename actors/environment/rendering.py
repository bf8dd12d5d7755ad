"""From messages to token ids, by appending: history is never rendered again.

A prompt is the previous prompt + the sampled ids + the delta, the rendering of only the new
messages. A delta is rendered behind two different dummy chats and used only if both give the same
ids; otherwise the whole chat is rendered, and the reason is counted. Called by the turn loop. The
model's tokenizer, and the tokens that end a turn, are read here too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jinja2
import jinja2.meta
import numpy as np

from actors.environment.protocol import Message, Role, ToolSchema
from actors.types import TokenIds

_CACHE_ENTRIES = 4096
_CACHED_CHARS = 2_000
_CACHED_TOKENS = 64

# Different in length, in number of turns and in their last letters, so that a template or a
# tokenizer that looks back at either shows itself.
_DUMMY_CHATS = (
    (
        Message(role=Role.USER, content="first dummy question"),
        Message(role=Role.ASSISTANT, content="first dummy reply"),
    ),
    (
        Message(role=Role.USER, content="7"),
        Message(role=Role.ASSISTANT, content="a b c"),
        Message(role=Role.USER, content="second dummy question."),
        Message(role=Role.ASSISTANT, content="second dummy answer 42"),
    ),
)

_Messages = tuple[Message, ...]
_Tools = tuple[ToolSchema, ...]
_Rendered = TypeVar("_Rendered")


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

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


class BreakReason(StrEnum):
    """Why a delta could not be used."""

    TEMPLATE_REFUSED = "template_refused"
    TEMPLATE_LOOKS_BACK = "template_looks_back"
    RETOKENISED = "retokenised"


class RenderError(Exception):
    """The chat template cannot render this chat at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The next turn's prompt."""

    prompt_token_ids: TokenIds
    num_inserted: int = 0
    """Closing tokens behind the sampled ids that the policy did not sample."""
    break_reason: BreakReason | None = None
    """Why the whole chat was rendered anew; None when the prompt was appended to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    """What follows the content of a reply, up to the next one."""

    token_ids: TokenIds
    num_closing: int
    """The first of the tokens, which end the reply."""


class ChatRenderer:
    """Renders one model's chats. template_options: passed to the chat template, such as
    {"enable_thinking": False}."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template_options = dict(template_options or {})
        self._end_ids = frozenset((tokenizer.eos_token_id, tokenizer.pad_token_id))
        self._cached_prompt = lru_cache(_CACHE_ENTRIES)(self._render_prompt)
        self._cached_delta = lru_cache(_CACHE_ENTRIES)(self._render_delta)
        self._cached_text = lru_cache(_CACHE_ENTRIES)(self._decode)

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenIds:
        """Render a chat's beginning with the generation prompt.

        Returns: [P] int32, read-only. Raises: RenderError.
        """
        return self._by_size(
            self._cached_prompt, self._render_prompt, tuple(messages), tuple(tools)
        )

    def extend(
        self,
        previous: TokenIds,
        sampled: TokenIds,
        *,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Extension:
        """Give the prompt of the turn that follows.

        previous + sampled + (the closing tokens that were not sampled) + delta(new_messages)

        Args: previous: [P] int32, the last prompt. sampled: [A] int32, its reply, also one that was
        cut off. history: every message so far, the reply's text the last; rendered only where the
        delta cannot be used. new_messages: what follows; may be empty.
        Raises: RenderError when that is needed and the template refuses.
        """
        delta = self._by_size(
            self._cached_delta, self._render_delta, tuple(new_messages), tuple(tools)
        )
        if isinstance(delta, BreakReason):
            whole = self.first_prompt((*history, *new_messages), tools)
            return Extension(prompt_token_ids=whole, break_reason=delta)
        num_sampled = _overlap(sampled, delta.token_ids[: delta.num_closing])
        return Extension(
            prompt_token_ids=np.concatenate((previous, sampled, delta.token_ids[num_sampled:])),
            num_inserted=delta.num_closing - num_sampled,
        )

    def decode(self, sampled: TokenIds) -> str:
        """Give the text of a reply without the end tokens behind it.

        Special tokens elsewhere stay visible: an environment sees what the policy said.
        """
        if sampled.shape[0] > _CACHED_TOKENS:
            return self._decode(tuple(sampled.tolist()))
        return self._cached_text(tuple(sampled.tolist()))

    def _by_size(
        self,
        cached: Callable[[_Messages, _Tools], _Rendered],
        direct: Callable[[_Messages, _Tools], _Rendered],
        messages: _Messages,
        tools: _Tools,
    ) -> _Rendered:
        """Long texts seldom repeat, and would fill the memory."""
        is_short = sum(len(message.content) for message in messages) <= _CACHED_CHARS
        return (cached if is_short else direct)(messages, tools)

    def _render_prompt(self, messages: _Messages, tools: _Tools) -> TokenIds:
        return _frozen(self._encode(self._text(messages, tools, add_generation_prompt=True)))

    def _render_delta(self, new_messages: _Messages, tools: _Tools) -> _Delta | BreakReason:
        deltas = []
        for dummy in _DUMMY_CHATS:
            try:
                delta = self._delta_behind(dummy, new_messages, tools)
            except RenderError:
                return BreakReason.TEMPLATE_REFUSED
            if isinstance(delta, BreakReason):
                return delta
            deltas.append(delta)
        first, second = deltas
        if first.num_closing != second.num_closing:
            return BreakReason.TEMPLATE_LOOKS_BACK
        if not np.array_equal(first.token_ids, second.token_ids):
            return BreakReason.TEMPLATE_LOOKS_BACK
        return first

    def _delta_behind(
        self, dummy: _Messages, new_messages: _Messages, tools: _Tools
    ) -> _Delta | BreakReason:
        closed = self._text(dummy, tools, add_generation_prompt=False)
        whole = self._text((*dummy, *new_messages), tools, add_generation_prompt=True)
        # Looked for in each: a template may render the last reply with more before it than others.
        tails = []
        for text in (whole, closed):
            if text.count(dummy[-1].content) != 1:
                return BreakReason.TEMPLATE_LOOKS_BACK
            head = text[: text.index(dummy[-1].content) + len(dummy[-1].content)]
            head_ids, text_ids = self._encode(head), self._encode(text)
            if text_ids[: len(head_ids)] != head_ids:
                return BreakReason.RETOKENISED
            tails.append(text_ids[len(head_ids) :])
        return _Delta(token_ids=_frozen(tails[0]), num_closing=self._num_closing(*tails))

    def _num_closing(self, tail_ids: Sequence[int], closing_ids: Sequence[int]) -> int:
        """How many tokens of the tail end the reply.

        What it has in common with the tail of a chat that ends there. Some templates leave a last
        reply open; then it is the end token, where the tail begins with it.
        """
        if closing_ids:
            pairs = zip(tail_ids, closing_ids, strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return int(bool(tail_ids) and tail_ids[0] in self._end_ids)

    def _text(self, messages: _Messages, tools: _Tools, *, add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=[tool.for_template() for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._template_options,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise RenderError(f"chat template: {error}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        end = len(token_ids)
        while end and token_ids[end - 1] in self._end_ids:
            end -= 1
        return self._tokenizer.decode(list(token_ids[:end]), skip_special_tokens=False)


def template_variables(template: object) -> frozenset[str] | None:
    """The variables that a chat template is given from outside; None where they cannot be found.

    Args: template: Jinja's text. None for several templates by name, or none.
    Example: template_variables("{% if enable_thinking %}…{% endif %}") -> {"enable_thinking"}
    """
    if not isinstance(template, str):
        return None
    language = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(language.parse(template)))
    except jinja2.TemplateError:
        # Tags that only the tokenizer's own library knows.
        return None


def _for_template(message: Message) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _overlap(sampled: TokenIds, closing: TokenIds) -> int:
    """How many of the closing tokens the policy sampled itself, at its reply's end."""
    if not closing.shape[0]:
        return 0
    end: list[int] = sampled[-closing.shape[0] :].tolist()
    start: list[int] = closing[: len(end)].tolist()
    for length in range(len(end), 0, -1):
        if end[-length:] == start[:length]:
            return length
    return 0


def _frozen(token_ids: Sequence[int]) -> TokenIds:
    array = np.array(token_ids, dtype=np.int32)
    array.flags.writeable = False
    return array
