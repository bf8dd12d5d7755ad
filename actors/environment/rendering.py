"""From messages to token ids, by appending: history is never rendered again.

A prompt is the previous prompt + the sampled ids + the delta, the rendering of only the new
messages. A delta is rendered behind two different dummy chats and used only if both give the same
ids, the chats before it stay as they were, and it shows what every new message says; otherwise the
whole chat is rendered, and the reason is counted. A whole chat that does not show what a message
says, or its tools, is an error. The dummy chats end as the reply does: in text, after a thought,
or in calls with the same names and ids. Called by the turn loop. The model's tokenizer, and the
tokens that end a turn, are read here too.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.meta
import numpy as np

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.settings import History
from actors.environment.shown_text import (
    Said,
    holds,
    marked,
    marked_tools,
    marks_in,
    said,
    tool_mark,
    with_mark,
)
from actors.types import BranchReason, TokenIds

_CACHE_ENTRIES = 4096
_CACHED_CHARS = 2_000
_CACHED_TOKENS = 64
# How many renderers with clients' own options are kept.
_CACHED_OPTIONS = 8
_CACHED_MESSAGES = 16
_ID = re.compile(r"\bid\b|tool_call_id")

_Messages = tuple[Message, ...]
_Tools = tuple[ToolSchema, ...]


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


def load_renderer(
    model: str, *, template_options: Mapping[str, Any], history: History
) -> ChatRenderer:
    """Make the renderer of a model's chats.

    Args: model: a directory or hub name. Raises: OSError, ValueError.
    """
    tokenizer = load_tokenizer(model)
    return ChatRenderer(
        tokenizer,
        template_options=template_options,
        stop_token_ids=_stop_token_ids(model, tokenizer),
        history=history,
    )


def stop_token_ids(model: str) -> tuple[int, ...]:
    """The end-of-sequence ids of a model directory or hub name, ascending.

    Raises: ValueError for a model that names none: no answer of it would ever end.
    """
    ids = _stop_token_ids(model, load_tokenizer(model))
    if not ids:
        raise ValueError(
            f"model {model}: neither its tokenizer nor its generation settings name an "
            "end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    return ids


def _stop_token_ids(model: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
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


class BreakReason(StrEnum):
    """Why a delta could not be used."""

    TEMPLATE_REFUSED = "template_refused"
    TEMPLATE_LOOKS_BACK = "template_looks_back"
    MESSAGE_NOT_SHOWN = "message_not_shown"
    """The template does not show what a new message says after the reply."""
    RETOKENISED = "retokenised"
    SYSTEM_MERGED = "system_merged"
    """A system text of a new message was moved to the front, where the template takes it."""
    HISTORY_RENDERED = "history_rendered"
    """With `History.AS_RENDERED`: the template shows the history otherwise than it was sampled."""

    @property
    def branch_reason(self) -> BranchReason:
        """Why a prompt that was rendered anew begins a sample, should it extend none."""
        is_retokenised = self is BreakReason.RETOKENISED
        return BranchReason.RETOKENISED if is_retokenised else BranchReason.TEMPLATE


class RenderError(Exception):
    """The chat template cannot render this chat, or does not show a part of it."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        """param: what is at fault, messages or tools."""
        super().__init__(message)
        self.param = param


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
    """What follows the content or the calls of a reply, up to the next one."""

    token_ids: TokenIds
    num_closing: int
    """The first of the tokens, which end the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """What a template may look back at in the reply that a delta follows."""

    has_content: bool = True
    has_reasoning: bool = False
    calls: tuple[tuple[str, str], ...] = ()
    """The id and the name of each."""

    def without_ids(self) -> _Ending:
        if not self.calls:
            return self
        return replace(self, calls=tuple(("", name) for _, name in self.calls))


_PLAIN_TEXT = _Ending()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dummy:
    """A chat to render a delta behind; none of its texts is a part of another."""

    before: _Messages
    content: str
    reasoning: str
    argument: str

    def chat(self, ending: _Ending, *, called_before: Iterable[str]) -> _Messages:
        """The chat up to a reply with this ending. called_before: ids of calls ahead of it."""
        values = [f"{self.content} {index}" for index in range(len(ending.calls) - 1)]
        calls = zip(ending.calls, [*values, self.argument], strict=False)
        reply = Message(
            role=Role.ASSISTANT,
            content=self.content if ending.has_content else "",
            reasoning=self.reasoning if ending.has_reasoning else None,
            tool_calls=tuple(
                ToolCall(id=call_id, name=name, arguments={"argument": value})
                for (call_id, name), value in calls
            ),
        )
        return (*_answered_calls(called_before), *self.before, reply)

    def mark(self, ending: _Ending) -> str:
        """The last text of such a reply that is the reply's own; it stands there once."""
        return self.argument if ending.calls else self.content


# Different in length, in number of turns and in their last letters, so that a template or a
# tokenizer that looks back at either shows itself.
_DUMMIES = (
    _Dummy(
        before=(Message(role=Role.USER, content="first dummy question"),),
        content="first dummy reply",
        reasoning="first dummy thought",
        argument="first dummy value",
    ),
    _Dummy(
        before=(
            Message(role=Role.USER, content="7"),
            Message(role=Role.ASSISTANT, content="a b c"),
            Message(role=Role.USER, content="second dummy question."),
        ),
        content="second dummy answer 42",
        reasoning="second dummy thought, longer.",
        argument="second dummy argument 21",
    ),
)


# Ids have nine letters, as Mistral's templates want them.
_EXTRA_CALL = "dummy0000"
_ARGUMENT = "qzprobezq"
_CONTENT = "qzbesidezq"
_PROBE = (
    Message(role=Role.USER, content="probe"),
    Message(
        role=Role.ASSISTANT,
        content="",
        tool_calls=(ToolCall(id="probe0000", name="probe", arguments={"probe": _ARGUMENT}),),
    ),
)
_SPEAKING_PROBE = (_PROBE[0], replace(_PROBE[1], content=_CONTENT))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallForm:
    """How a template wants a message that calls; most want the defaults."""

    arguments_as_text: bool = False
    """Whether arguments are JSON text; otherwise they are a mapping."""
    null_content: bool = False
    """Whether a message without text has no content; otherwise it has an empty one."""
    splits: bool = False
    """Whether a message with text and calls is rendered as two, of which the second calls."""


_USUAL_CALL_FORM = _CallForm()
# The first form with which a call is shown is the template's.
_CALL_FORMS = (
    _USUAL_CALL_FORM,
    _CallForm(arguments_as_text=True),
    _CallForm(null_content=True),
    _CallForm(arguments_as_text=True, null_content=True),
)


class ChatRenderer:
    """Renders one model's chats.

    template_options: passed to the chat template, such as {"enable_thinking": False}.
    stop_token_ids: what ends a turn beside the tokenizer's own end of sequence.
    history: as_rendered renders the whole chat at each turn.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        template_options: Mapping[str, Any] | None = None,
        stop_token_ids: Iterable[int] = (),
        history: History = History.APPENDED,
    ) -> None:
        self._tokenizer = tokenizer
        self._history = history
        self._template_options = dict(template_options or {})
        self._end_ids = frozenset((tokenizer.eos_token_id, tokenizer.pad_token_id, *stop_token_ids))
        self._knows_ids = _may_know_ids(getattr(tokenizer, "chat_template", None))
        self._cached_prompt = lru_cache(_CACHE_ENTRIES)(self._render_prompt)
        self._cached_delta = lru_cache(_CACHE_ENTRIES)(self._render_delta)
        self._cached_marks = lru_cache(_CACHE_ENTRIES)(self._render_marks)
        self._cached_text = lru_cache(_CACHE_ENTRIES)(self._decode)
        self._cached_under = lru_cache(_CACHED_OPTIONS)(self._render_under)

    def under(self, template_options: Mapping[str, Any]) -> ChatRenderer:
        """Return a renderer with these options added to its own; they replace equal names.

        Args: template_options: JSON.
        """
        if not template_options:
            return self
        return self._cached_under(json.dumps(dict(template_options), sort_keys=True))

    def _render_under(self, options: str) -> ChatRenderer:
        return ChatRenderer(
            self._tokenizer,
            template_options={**self._template_options, **json.loads(options)},
            stop_token_ids=(token for token in self._end_ids if token is not None),
            history=self._history,
        )

    @cached_property
    def fingerprint(self) -> str:
        """As `tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """No token of the vocabulary stands for more characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenIds:
        """Render a chat's beginning with the generation prompt.

        Returns: [P] int32, read-only. Raises: RenderError, also if the rendering does not show
        what a message says.
        """
        chat = tuple(messages)
        render = self._cached_prompt if _may_repeat(chat) else self._render_prompt
        return render(chat, tuple(tools))

    def check_tools(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        """Check that the template shows the tools of a chat that begins with these messages.

        Some templates show calls, and leave the tools to the system text (DeepSeek R1).
        Raises: RenderError for one that shows neither.
        """
        marks = self._marks(marked(messages), marked_tools(tools)) if tools else None
        if marks is None or self.shows_calls:
            return
        hidden = [tool.name for number, tool in enumerate(tools) if tool_mark(number) not in marks]
        if hidden:
            raise RenderError(
                f"chat template: it shows no tools and no calls: {', '.join(hidden)} would be in "
                "no prompt; leave the tools out, or train a model whose template shows them",
                param="tools",
            )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a chat without checking what the rendering shows. Raises: RenderError."""
        return self._text(
            tuple(messages), tuple(tools), add_generation_prompt=add_generation_prompt
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
        cut off. history: every message so far, the reply the last; rendered only where the delta
        cannot be used. Empty: the reply is plain text. new_messages: what follows; may be empty.
        Raises: RenderError when that is needed and the template refuses.
        """
        if self._history is History.AS_RENDERED:
            whole = self.first_prompt((*history, *new_messages), tools)
            known = previous.shape[0] + sampled.shape[0]
            is_kept = np.array_equal(whole[:known], np.concatenate((previous, sampled)))
            reason = None if is_kept else BreakReason.HISTORY_RENDERED
            return Extension(prompt_token_ids=whole, break_reason=reason)
        ending, new = _ending(history), tuple(new_messages)
        if not self._knows_ids:
            # They differ in every chat, and would leave nothing to be rendered once.
            ending, new = ending.without_ids(), tuple(_without_id(each) for each in new)
        render = self._cached_delta if _may_repeat(new) else self._render_delta
        delta = render(new, tuple(tools), ending)
        if isinstance(delta, _Delta) and ending.calls and not self._is_ended(sampled, delta):
            delta = BreakReason.TEMPLATE_LOOKS_BACK
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

    def _render_prompt(self, messages: _Messages, tools: _Tools) -> TokenIds:
        text = self._text(messages, tools, add_generation_prompt=True)
        self._check_shown(messages, tools, text)
        return _frozen(self._encode(text))

    def _check_shown(self, messages: _Messages, tools: _Tools, text: str) -> None:
        """Raises: RenderError for a rendering without a message's text."""
        marks = self._marks(marked(messages), tools)

        def in_place(each: Said) -> bool:
            found = self._render_marks(with_mark(messages, each), tools)
            return found is None or each.mark in found

        for each in _unshown(said(messages), text=text, marks=marks, in_place=in_place):
            raise RenderError(f"chat template: it does not show {each}; {_remedy(each)}")

    def _marks(
        self, messages: _Messages, tools: _Tools, *, after: str = ""
    ) -> frozenset[str] | None:
        is_short = len(messages) <= _CACHED_MESSAGES
        render = self._cached_marks if is_short else self._render_marks
        return render(messages, tools, after)

    def _render_marks(
        self, messages: _Messages, tools: _Tools, after: str = ""
    ) -> frozenset[str] | None:
        """Return the marks of a chat that the template shows; None if it refuses the chat.

        after: the text that precedes the marks.
        """
        try:
            text = self._text(messages, tools, add_generation_prompt=True)
        except RenderError:
            return None
        return marks_in(text.rpartition(after)[2] if after else text)

    def _render_delta(
        self, new_messages: _Messages, tools: _Tools, ending: _Ending
    ) -> _Delta | BreakReason:
        in_reply = {call_id for call_id, _ in ending.calls}
        answered = {message.tool_call_id for message in new_messages if message.tool_call_id}
        # Only one of the dummies has made these calls: a template that looks for them shows itself.
        called_before = sorted(answered - in_reply)
        if ending.calls or any(message.role is Role.TOOL for message in new_messages):
            # And one more call with its result, for a template that numbers them.
            called_before.append(_EXTRA_CALL)
        deltas = []
        for dummy, called in zip(_DUMMIES, ((), called_before), strict=True):
            chat = dummy.chat(ending, called_before=called)
            mark = dummy.mark(ending)
            try:
                closed = self._text(chat, tools, add_generation_prompt=False)
                whole = self._text((*chat, *new_messages), tools, add_generation_prompt=True)
            except RenderError:
                return BreakReason.TEMPLATE_REFUSED
            delta = self._delta_behind(mark, whole=whole, closed=closed, is_call=bool(ending.calls))
            if isinstance(delta, BreakReason):
                return delta
            question = dummy.before[-1].content
            if not _only_loses(_head(closed, question, mark), _head(whole, question, mark)):
                return BreakReason.TEMPLATE_LOOKS_BACK
            deltas.append(delta)
        first, second = deltas
        if first.num_closing != second.num_closing:
            return BreakReason.TEMPLATE_LOOKS_BACK
        if not np.array_equal(first.token_ids, second.token_ids):
            return BreakReason.TEMPLATE_LOOKS_BACK
        if not self._shows_new(whole.rpartition(mark)[2], chat, new_messages, tools, mark=mark):
            return BreakReason.MESSAGE_NOT_SHOWN
        return first

    def _shows_new(
        self, tail: str, chat: _Messages, new_messages: _Messages, tools: _Tools, *, mark: str
    ) -> bool:
        """Whether new messages are shown after a chat.

        tail: what follows the mark, which is the last text of the chat.
        """

        def in_place(each: Said) -> bool:
            changed = (*chat, *with_mark(new_messages, each))
            found = self._render_marks(changed, tools, mark)
            return found is None or each.mark in found

        marks = self._marks((*chat, *marked(new_messages)), tools, after=mark)
        return not any(_unshown(said(new_messages), text=tail, marks=marks, in_place=in_place))

    def _delta_behind(
        self, mark: str, *, whole: str, closed: str, is_call: bool
    ) -> _Delta | BreakReason:
        """mark: the last text that is the reply's own. closed: the chat that ends there."""
        # Looked for in each: a template may render the last reply with more before it than others.
        tails = []
        for text in (whole, closed):
            if text.count(mark) != 1:
                return BreakReason.TEMPLATE_LOOKS_BACK
            head = text[: text.index(mark) + len(mark)]
            head_ids, text_ids = self._encode(head), self._encode(text)
            start = len(head_ids)
            if text_ids[:start] != head_ids:
                if not is_call:
                    return BreakReason.RETOKENISED
                # Within a call: it ends with tokens that the policy samples as it likes.
                start = _num_shared(head_ids, text_ids)
            tails.append(text_ids[start:])
        whole_ids, closed_ids = tails
        start = self._num_in_call(closed_ids) if is_call else 0
        if whole_ids[:start] != closed_ids[:start]:
            return BreakReason.TEMPLATE_LOOKS_BACK
        return _Delta(
            token_ids=_frozen(whole_ids[start:]),
            num_closing=self._num_closing(whole_ids[start:], closed_ids[start:]),
        )

    def _num_in_call(self, closing_ids: Sequence[int]) -> int:
        """How many tokens behind a call's last argument end the call, and not yet the turn.

        The policy samples these with the call. The turn ends with the first token that stops the
        engine; without one, the chat is left open behind the call.
        """
        ends = (index for index, token in enumerate(closing_ids) if token in self._end_ids)
        return next(ends, len(closing_ids))

    def _is_ended(self, sampled: TokenIds, delta: _Delta) -> bool:
        """Whether a turn is ended: by the policy, or by tokens that can be inserted.

        Where it is not, the delta would stand in a call that may be cut off.
        """
        return delta.num_closing > 0 or not self._end_ids.isdisjoint(sampled[-1:].tolist())

    def _num_closing(self, tail_ids: Sequence[int], closing_ids: Sequence[int]) -> int:
        """How many tokens of the tail end the reply.

        What it has in common with the tail of a chat that ends there. Some templates leave a last
        reply open; then it is the end token, where the tail begins with it.
        """
        if closing_ids:
            return _num_shared(tail_ids, closing_ids)
        return int(bool(tail_ids) and tail_ids[0] in self._end_ids)

    def _text(self, messages: _Messages, tools: _Tools, *, add_generation_prompt: bool) -> str:
        calls = any(message.call_texts for message in messages)
        return self._apply(
            _conversation(messages, self._call_form if calls else _USUAL_CALL_FORM),
            tools=[tool.for_template() for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def template_text(self) -> str:
        """Of the chat template; some models have several by name, one of them for tools."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @cached_property
    def rendered_call(self) -> str:
        """The rendering of a chat that ends in a call; empty if the template refuses it."""
        return self._try_form(self._call_form)

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows what an assistant calls."""
        return _ARGUMENT in self.rendered_call

    @property
    def needs_null_content(self) -> bool:
        """Whether the template shows a call only if the content is None."""
        return self._call_form.null_content

    @property
    def takes_arguments_as_text(self) -> bool:
        """Whether the template wants a call's arguments as JSON text."""
        return self._call_form.arguments_as_text

    @property
    def splits_calls(self) -> bool:
        """Whether a message with text and calls is rendered as two, so that all of it is shown."""
        return self._call_form.splits

    def _try_form(self, form: _CallForm, probe: _Messages = _PROBE) -> str:
        """Return the rendering of a call in this form; empty if the template refuses it."""
        try:
            return self._apply(_conversation(probe, form))
        except RenderError:
            return ""

    @cached_property
    def _call_form(self) -> _CallForm:
        """Find the form of a message that calls, by how the template renders one."""
        rendered = {form: self._try_form(form) for form in _CALL_FORMS}
        # A template that takes a mapping for text shows it in Python's own spelling.
        taken = [form for form, text in rendered.items() if text and "{'probe'" not in text]
        shown = [form for form in taken if _ARGUMENT in rendered[form]]
        form = next(iter(shown or taken), _USUAL_CALL_FORM)
        split = replace(form, splits=True)
        return split if shown and self._needs_split(form, split) else form

    def _needs_split(self, form: _CallForm, split: _CallForm) -> bool:
        """Whether a message with text and calls is shown in full only as two messages."""
        together, apart = (self._try_form(each, _SPEAKING_PROBE) for each in (form, split))
        marks = (_CONTENT, _ARGUMENT)
        return not all(mark in together for mark in marks) and all(mark in apart for mark in marks)

    def _apply(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        if self._wants_parts:
            conversation = [_in_parts(message) for message in conversation]
        return self._applied(conversation, **options)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows a content only if it is a list of parts (some that also
        take images)."""
        probe: dict[str, Any] = {"role": "user", "content": _CONTENT}
        for message, wants in ((probe, False), (_in_parts(probe), True)):
            try:
                if _CONTENT in self._applied([message]):
                    return wants
            except RenderError:
                continue
        return False

    def _applied(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, **options, **self._template_options
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


def system_merged(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the chat with all of its system texts in one message, the first."""
    texts = [each.content for each in messages if each.role is Role.SYSTEM]
    if not texts or (len(texts) == 1 and messages[0].role is Role.SYSTEM):
        return tuple(messages)
    front = Message(role=Role.SYSTEM, content="\n\n".join(texts))
    return (front, *(each for each in messages if each.role is not Role.SYSTEM))


def _unshown(
    said: Iterable[Said],
    *,
    text: str,
    marks: frozenset[str] | None,
    in_place: Callable[[Said], bool],
) -> Iterator[Said]:
    """What a rendering does not show.

    marks: those that replace the texts and are shown; None: not known. in_place: whether the mark
    after the text itself is shown, for templates that read the text.
    """
    times: Counter[tuple[str, ...]] = Counter()
    for each in said:
        # A template may leave out what was said before.
        times[each.texts] += not each.is_call
        # Templates may remove the thought from a reply, whatever its form.
        is_reply = each.message.role is Role.ASSISTANT and not each.is_call
        is_shown = is_reply or all(
            holds(text, part, times=times[each.texts] or 1) for part in each.texts
        )
        if is_shown and marks is not None and each.mark not in marks:
            is_shown = not each.is_call and in_place(each)
        if not is_shown:
            yield each


def _remedy(said: Said) -> str:
    if said.message.role is Role.SYSTEM:
        return "send system texts as the first message, or as one of the user"
    if said.message.role is Role.TOOL or said.is_call:
        return "train a model whose template shows calls and their results"
    return "send it otherwise, or train a model whose template shows it"


def _head(text: str, question: str, mark: str) -> str:
    """What precedes a dummy's reply: its end may be rendered anew when another message follows."""
    before, _, _ = text.partition(mark)
    head, found, _ = before.rpartition(question)
    return head + found if found else before


def _only_loses(before: str, after: str) -> bool:
    """Whether a part of a text was taken out, and nothing came in: what is lost stays appended."""
    start = _num_shared(before, after)
    end = _num_shared(before[start:][::-1], after[start:][::-1])
    return start + end == len(after)


def _conversation(messages: Iterable[Message], form: _CallForm) -> list[dict[str, Any]]:
    """The form that chat templates expect: OpenAI's, but for the arguments of calls."""
    found = []
    for message in messages:
        if form.splits and message.call_texts and message.content:
            found.append(_for_template(replace(message, tool_calls=()), form))
            message = replace(message, content="", reasoning=None)
        found.append(_for_template(message, form))
    return found


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


def _for_template(message: Message, form: _CallForm) -> dict[str, Any]:
    """A field that a message lacks is left out: templates check whether it is present."""
    is_null = form.null_content and message.call_texts and not message.content
    rendered: dict[str, Any] = {
        "role": message.role.value,
        "content": None if is_null else message.content,
    }
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        # Templates know it under either name.
        rendered["reasoning_content"] = rendered["reasoning"] = message.reasoning
    if message.call_texts:
        rendered["tool_calls"] = [
            {
                **({"id": call_id} if call_id else {}),
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if form.arguments_as_text else json.loads(arguments),
                },
            }
            for call_id, name, arguments in message.call_texts
        ]
    return rendered


def _may_know_ids(template: object) -> bool:
    """Whether a template may look at the ids of calls; only of Jinja's text it is known."""
    return not isinstance(template, str) or _ID.search(template) is not None


def _without_id(message: Message) -> Message:
    return message if message.tool_call_id is None else replace(message, tool_call_id=None)


def _ending(history: Sequence[Message]) -> _Ending:
    reply = history[-1] if history else None
    if reply is None or not (reply.call_texts or reply.reasoning):
        return _PLAIN_TEXT
    return _Ending(
        # Without a call the delta is measured from the content's end, also where there is none.
        has_content=bool(reply.content) or not reply.call_texts,
        has_reasoning=bool(reply.reasoning),
        calls=tuple((call_id, name) for call_id, name, _ in reply.call_texts),
    )


def _answered_calls(call_ids: Iterable[str]) -> Iterator[Message]:
    """A chat's beginning, in which these calls are made and answered."""
    for call_id in call_ids:
        call = ToolCall(id=call_id, name="dummy", arguments={})
        yield Message(role=Role.USER, content="call")
        yield Message(role=Role.ASSISTANT, content="", tool_calls=(call,))
        yield Message(role=Role.TOOL, content="0", name="dummy", tool_call_id=call_id)
        yield Message(role=Role.ASSISTANT, content="called")


def _may_repeat(messages: _Messages) -> bool:
    """Long texts seldom repeat, and would fill the memory of what was rendered."""
    num_chars = 0
    for message in messages:
        num_chars += len(message.content) + len(message.reasoning or "")
        for _, _, arguments in message.call_texts:
            num_chars += len(arguments)
    return num_chars <= _CACHED_CHARS


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


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
