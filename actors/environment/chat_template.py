"""Render chats with a model's chat template, in the message format that the template needs.

Templates differ in the form of a message that calls tools: arguments are a mapping or JSON text, a
missing content is None or an empty text, text and calls are in one message or in two. The form is
found by rendering small chats. `rendering` and `template_traits` use this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import jinja2
import jinja2.meta

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.tokenizer import ChatTokenizer

_ARGUMENT = "qzprobezq"
_CONTENT = "qzbesidezq"
# Mistral's templates require an id of nine letters.
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
    """The form of messages with tool calls that a template needs; most need the default values."""

    arguments_as_text: bool = False
    """Whether arguments are JSON text; otherwise they are a mapping."""
    null_content: bool = False
    """Whether the content of a message without text is None; otherwise it is an empty text."""
    splits: bool = False
    """Whether a message with text and calls is rendered as two messages, the second with the
    calls."""


_USUAL_CALL_FORM = _CallForm()
# A template's form is the first one with which it shows a call.
_CALL_FORMS = (
    _USUAL_CALL_FORM,
    _CallForm(arguments_as_text=True),
    _CallForm(null_content=True),
    _CallForm(arguments_as_text=True, null_content=True),
)


class RenderError(Exception):
    """Raised if the chat template cannot render a chat, or does not show a part of the chat."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        """Store the message, and which part of the request is at fault: messages or tools."""
        super().__init__(message)
        self.param = param


class ChatTemplate:
    """The chat template of one model, with one set of options."""

    def __init__(self, tokenizer: ChatTokenizer, *, options: Mapping[str, Any]) -> None:
        """Store the tokenizer and the options.

        options: variables of the template, such as {"enable_thinking": False}.
        """
        self._tokenizer = tokenizer
        self._options = dict(options)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the rendering of a chat without checking it. Raises: RenderError if it fails."""
        calls = any(message.call_texts for message in messages)
        return self._apply(
            _conversation(messages, self.call_form if calls else _USUAL_CALL_FORM),
            tools=[tool.for_template() for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def source(self) -> str:
        """The template's Jinja text; if a model has several templates, the texts of all of them."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @cached_property
    def rendered_call(self) -> str:
        """The rendering of a chat that ends in a call; empty if the template refuses the chat."""
        return self._try_form(self.call_form)

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows an assistant's calls."""
        return _ARGUMENT in self.rendered_call

    def _try_form(self, form: _CallForm, probe: Sequence[Message] = _PROBE) -> str:
        """Return the rendering of a chat in this format; empty if the template refuses the chat."""
        try:
            return self._apply(_conversation(probe, form))
        except RenderError:
            return ""

    @cached_property
    def call_form(self) -> _CallForm:
        """The first format in which the template shows tool calls; the usual one if none does."""
        rendered = {form: self._try_form(form) for form in _CALL_FORMS}
        # A template that expects text shows a mapping in Python's own spelling.
        taken = [form for form, text in rendered.items() if text and "{'probe'" not in text]
        shown = [form for form in taken if _ARGUMENT in rendered[form]]
        form = next(iter(shown or taken), _USUAL_CALL_FORM)
        split = replace(form, splits=True)
        return split if shown and self._needs_split(form, split) else form

    def _needs_split(self, form: _CallForm, split: _CallForm) -> bool:
        """Return whether a message with text and calls must be split in two for the template.

        It must be split if the template leaves out a part of the whole message but shows both parts
        of the split one. form: the format of the whole message. split: that of the split one.
        """
        together, apart = (self._try_form(each, _SPEAKING_PROBE) for each in (form, split))
        marks = (_CONTENT, _ARGUMENT)
        return not all(mark in together for mark in marks) and all(mark in apart for mark in marks)

    def _apply(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        if self._wants_parts:
            conversation = [_in_parts(message) for message in conversation]
        return self._applied(conversation, **options)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows a content only if it is a list of parts.

        Some templates of models that also read images need such a list.
        """
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
                conversation, tokenize=False, **options, **self._options
            )
        except Exception as error:
            # A template computes, so that an error of any type may end it.
            is_plain = isinstance(error, jinja2.TemplateError | ValueError | TypeError)
            problem = str(error) if is_plain else f"{type(error).__name__}: {error}"
            if getattr(self._tokenizer, "chat_template", "") is None:
                problem = (
                    "the model's tokenizer has none; set model.chat_template to the path of one, "
                    "or to none for raw prompts, as base models take them"
                )
            raise RenderError(f"chat template: {problem}") from error
        return text


def template_variables(template: object) -> frozenset[str] | None:
    """Return the variables that a chat template reads from its options; None if not known.

    Args: template: Jinja's text. For anything else, such as several templates, the result is None.
    Example: template_variables("{% if enable_thinking %}…{% endif %}") -> {"enable_thinking"}
    """
    if not isinstance(template, str):
        return None
    language = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(language.parse(template)))
    except jinja2.TemplateError:
        # The template has tags that only the tokenizer's library knows.
        return None


def system_merged(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the chat with all of its system texts in the first message."""
    texts = [each.content for each in messages if each.role is Role.SYSTEM]
    if not texts or (len(texts) == 1 and messages[0].role is Role.SYSTEM):
        return tuple(messages)
    front = Message(role=Role.SYSTEM, content="\n\n".join(texts))
    return (front, *(each for each in messages if each.role is not Role.SYSTEM))


def in_call_order(
    messages: Iterable[Message], calls: Iterable[tuple[str, str]] = ()
) -> tuple[Message, ...]:
    """Return the messages with the results of parallel calls in the order of the calls.

    Many templates show no ids, so that only the order says which call a result answers.
    Args: calls: id and name of each call in the message before the given messages.
    """
    found: list[Message] = []
    order = {call_id: number for number, (call_id, _) in enumerate(calls)}
    for is_result, group in groupby(messages, key=lambda message: message.role is Role.TOOL):
        run = list(group)
        places = [order.get(each.tool_call_id or "", -1) for each in run]
        if is_result and -1 not in places and len({*places}) == len(places):
            run = [each for _, each in sorted(zip(places, run, strict=True), key=itemgetter(0))]
        found += run
        order = {call_id: number for number, (call_id, _, _) in enumerate(run[-1].call_texts)}
    return tuple(found)


def _conversation(messages: Iterable[Message], form: _CallForm) -> list[dict[str, Any]]:
    """Return messages as dicts in OpenAI's format, with tool calls as the template needs them."""
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
    """Return a message as a dict for a template.

    Absent fields are left out, because templates check whether a field is there.
    """
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
        # Some templates read `reasoning_content`, others `reasoning`.
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
