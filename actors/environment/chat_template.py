"""Render chats with a model's chat template, in the message format that the template needs.

Templates differ in the form of a message that calls tools: arguments are a mapping or JSON text, a
missing content is None or an empty text, text and calls are in one message or in two. The form is
found by rendering small chats. `rendering` and `template_traits` use this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.tokenizer import ChatTokenizer

_ARGUMENT = "qzprobezq"
_CONTENT = "qzbesidezq"
# Number of characters of a client's id in an error.
_SHOWN_ID = 64
# A key that no template reads: a rendering that contains it prints the whole part.
_UNREAD = "qzunreadzq"
# Mistral's templates require an id of nine letters.
_PROBE = (
    Message(role=Role.USER, content="probe"),
    Message(
        role=Role.ASSISTANT,
        content="",
        tool_calls=(ToolCall(id="probe0000", name="probe", arguments={"probe": _ARGUMENT}),),
    ),
)
# Two calls at once, and their results. The ids, names and contents occur nowhere else.
_SECOND_ID, _SECOND_NAME = "probe0002", "qzsecondzq"
_TWO_CALLS = tuple(
    ToolCall(id=call_id, name=name, arguments={"probe": _ARGUMENT})
    for call_id, name in (("probe0001", "qzfirstzq"), (_SECOND_ID, _SECOND_NAME))
)
_TWO_RESULTS_PROBE = (
    _PROBE[0],
    replace(_PROBE[1], tool_calls=_TWO_CALLS),
    *(
        Message(role=Role.TOOL, content=content, name=call.name, tool_call_id=call.id)
        for content, call in zip((_CONTENT, "0"), _TWO_CALLS, strict=True)
    ),
)
_SET_ONE = (
    "set model.chat_template to the path of one, or to none for raw prompts, as base models take "
    "them"
)
_SPEAKING_PROBE = (_PROBE[0], replace(_PROBE[1], content=_CONTENT))
# Chats with one named author.
_NAME = "qznamezq"
_NAMED_PROBES = {
    Role.SYSTEM: (Message(role=Role.SYSTEM, content="probe", name=_NAME), _PROBE[0]),
    Role.USER: (replace(_PROBE[0], name=_NAME),),
    Role.ASSISTANT: (_PROBE[0], replace(_SPEAKING_PROBE[1], tool_calls=(), name=_NAME), _PROBE[0]),
}

# Names that say no more than the role, in lower case.
_ROLE_NAMES = {Role.SYSTEM: ("", "system", "developer"), Role.USER: ("", "user")}

_Calls = tuple[tuple[str, str], ...]
"""Id and name of each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallForm:
    """The form in which a template needs messages with calls; most templates need the defaults."""

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
        """`param` is the part of the request that is at fault: messages or tools."""
        super().__init__(message)
        self.param = param


class ChatTemplate:
    """The chat template of one model, with one set of options."""

    def __init__(self, tokenizer: ChatTokenizer, *, options: Mapping[str, Any]) -> None:
        """`options` are variables of the template, such as {"enable_thinking": False}."""
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

    def shows_author(self, role: Role) -> bool:
        """Return whether the template shows the `name` of a system, user or assistant message."""
        return role in self._named_roles

    @cached_property
    def _named_roles(self) -> frozenset[Role]:
        probes = _NAMED_PROBES.items()
        return frozenset(
            role for role, probe in probes if _NAME in self._try_form(_USUAL_CALL_FORM, probe)
        )

    def check_chat(self, messages: Sequence[Message], *, history: Sequence[Message] = ()) -> None:
        """Check that the policy can see who speaks, and which call each result answers.

        If two user messages, or two system messages, have different names, the template must show
        names. A name that only repeats the role does not count, such as "user". The names of
        assistant messages are not checked, because the policy's own replies have no names.
        Args: history: the chat before `messages`; empty, or it ends with the policy's reply.
        Raises: RenderError if a check fails. `check_results` makes the check of the results.
        """
        for role, no_names in _ROLE_NAMES.items():
            given = [each.name or "" for each in (*history, *messages) if each.role is role]
            names = {each.casefold(): each for each in given if each.casefold() not in no_names}
            if len(names) > 1 and not self.shows_author(role):
                shown = " and ".join(repr(name[:_SHOWN_ID]) for name in [*names.values()][:2])
                raise RenderError(
                    f"got the names {shown} of messages of role {role}, but the chat template does "
                    "not show who speaks; write the names into content, or remove them"
                )
        reply = history[-1] if history else None
        calls = reply.call_texts if reply else ()
        self.check_results(messages, [(call_id, name) for call_id, name, _ in calls])

    def check_results(
        self, messages: Iterable[Message], calls: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Check that the policy can see which call each result answers.

        If the template shows no ids, the policy takes the first result as the answer to the first
        call. Examples for such a template:
        - Calls a and b, and a result only for b: RenderError, as the policy would read b's as a's.
        - Calls a and b, and results with the unknown ids x and y: accepted, as there is one for
          each call.
        Args: calls: id and name of each call in the message before `messages`.
        """
        for known, answer, num_earlier in _answers(messages, calls):
            results, rest = _paired(known, answer)
            missing = [n for n in range(num_earlier, len(known)) if n not in results]
            strays = [each.tool_call_id for each in rest if each.role is Role.TOOL]
            later = [n for n in sorted(results) if missing and n > missing[0]]
            if not missing or not (later or strays) or self._tells_apart(known):
                continue
            name = known[missing[0]][1]
            misread = (
                f"call {later[0] + 1 - num_earlier} ({known[later[0]][1]})"
                if later
                else f"id {(strays[0] or '')[:_SHOWN_ID]!r}, which no open call of the reply has"
            )
            reading = (
                "would read this result as the missing one"
                if len(known) > 1
                else "could not see which result answers the call"
            )
            raise RenderError(
                f"got no result for call {missing[0] + 1 - num_earlier} ({name}) of the reply, but "
                f"one for {misread}; the chat template shows no ids of calls, so the policy "
                f"{reading}; send one result for each call of the reply, with the call's id"
            )

    def _tells_apart(self, calls: _Calls) -> bool:
        """Return whether the template shows, by id or by name, which call each result answers."""
        names = [name for _, name in calls]
        return self._shows_ids or (self._shows_names and len({*names}) == len(names))

    @cached_property
    def _shows_ids(self) -> bool:
        calls, results = self._two_results
        return _SECOND_ID in results and _SECOND_ID in calls

    @cached_property
    def _shows_names(self) -> bool:
        return _SECOND_NAME in self._two_results[1]

    @cached_property
    def _two_results(self) -> tuple[str, str]:
        """The rendering of two calls with results: up to the first result, and the rest."""
        try:
            text = self.text(_TWO_RESULTS_PROBE)
        except RenderError:
            # Callers search for the id and the name: count a template that refuses as showing both.
            return (f"{_SECOND_ID} {_SECOND_NAME}",) * 2
        before, _, after = text.partition(_CONTENT)
        return before, after

    def _try_form(self, form: _CallForm, probe: Sequence[Message] = _PROBE) -> str:
        try:
            return self._apply(_conversation(probe, form))
        except RenderError:
            return ""

    @cached_property
    def call_form(self) -> _CallForm:
        """The format in which the template gets tool calls.

        It is the first format in which the template shows a call's arguments; otherwise the first
        that the template accepts; otherwise the usual one.
        """
        rendered = {form: self._try_form(form) for form in _CALL_FORMS}
        # A template that expects text shows a mapping in Python's own spelling.
        taken = [form for form, text in rendered.items() if text and "{'probe'" not in text]
        shown = [form for form in taken if _ARGUMENT in rendered[form]]
        form = next(iter(shown or taken), _USUAL_CALL_FORM)
        split = replace(form, splits=True)
        return split if shown and self._needs_split(form, split) else form

    def _needs_split(self, form: _CallForm, split: _CallForm) -> bool:
        """Return whether the template shows a reply's text and calls only in two messages.

        form: the format with one message. split: the same format with two messages.
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
        """Whether the template needs a message's content as a list of parts, and not as a text."""
        # Some templates of models that also read images need a list.
        # A template that prints the list itself shows the key _UNREAD; it does not read parts.
        part = {_UNREAD: "", "type": "text", "text": _CONTENT}
        for content, wants in ((_CONTENT, False), ([part], True)):
            try:
                rendered = self._applied([{"role": "user", "content": content}])
                if _CONTENT in rendered and _UNREAD not in rendered:
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
            raise RenderError(f"chat template: {self._problem(error)}") from error
        if not text and not self.source.strip():
            raise RenderError(f"chat template: {self._place} is empty, expected one; {_SET_ONE}")
        return text

    def _problem(self, error: Exception) -> str:
        """Return why a rendering failed, with the remedy if it is known."""
        template = getattr(self._tokenizer, "chat_template", "")
        if template is None:
            return f"the model's tokenizer has none; {_SET_ONE}"
        if isinstance(template, dict) and "default" not in template:
            return (
                f"the model's tokenizer has the templates {', '.join(sorted(template))}, expected "
                "one that is named default; set model.chat_template to the path of a file with the "
                "one that you want"
            )
        if isinstance(error, jinja2.TemplateSyntaxError):
            return (
                f"{self._place}, line {error.lineno}: {error.message}, expected a Jinja template; "
                "correct it"
            )
        # A template's own raise_exception gives a TemplateError, whose text is for readers.
        is_plain = isinstance(error, jinja2.TemplateError | ValueError)
        return str(error) if is_plain else f"{type(error).__name__}: {error}"

    @property
    def _place(self) -> str:
        """The template's name in error texts: a file in the model's directory, or the setting."""
        directory = Path(str(getattr(self._tokenizer, "name_or_path", "")))
        with suppress(OSError, ValueError, AttributeError):
            if (file := directory / "chat_template.jinja").read_text("utf-8") == self.source:
                return str(file)
        with suppress(OSError, ValueError, AttributeError):
            file = directory / "tokenizer_config.json"
            if json.loads(file.read_text("utf-8")).get("chat_template") == self.source:
                return str(file)
        return "model.chat_template"


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
    """Move the results of calls directly after the calls, in the order of the calls.

    Many templates show no ids, so that only the order says which call a result answers. Other
    messages between calls and results, such as a user's text, come after the results.
    Args: calls: id and name of each call in the message before `messages`.
    """
    found: list[Message] = []
    for known, answer, _ in _answers(messages, calls):
        results, rest = _paired(known, answer)
        found += [*(results[number] for number in sorted(results)), *rest]
    return tuple(found)


def _answers(
    messages: Iterable[Message], calls: Iterable[tuple[str, str]]
) -> Iterator[tuple[_Calls, list[Message], int]]:
    """Split a chat after each assistant message, and find the calls that each part may answer.

    If several assistant messages come directly before a part, the part may answer all their calls.
    calls: id and name of each call in the message before `messages`.
    Yields: (calls, messages of the part, number of calls from before the last of these messages).
    Example: assistant message A (call a), assistant message B (call b), result R
        -> ((), [A], 0), ((a,), [B], 0), ((a, b), [R], 1)
    """
    known, answer, num_earlier = tuple(calls), list[Message](), 0
    for message in messages:
        answer.append(message)
        if message.role is Role.ASSISTANT:
            yield known, answer, num_earlier
            earlier = known if len(answer) == 1 else ()
            own = tuple((call_id, name) for call_id, name, _ in message.call_texts)
            known, answer, num_earlier = (*earlier, *own), [], len(earlier)
    yield known, answer, num_earlier


def _paired(
    calls: _Calls, answer: Sequence[Message]
) -> tuple[dict[int, Message], tuple[Message, ...]]:
    """Find the result of each call among the messages that follow the calls.

    A result answers the call that has the result's id. Without usable ids, the order decides.
    Example: calls (a, b), results (x, y) -> x answers a, y answers b.
    Returns: the result of each call, by the call's index; and all other messages, in order.
    """
    indices: dict[str, list[int]] = {}
    for index, (call_id, _) in enumerate(calls):
        if call_id:
            indices.setdefault(call_id, []).append(index)
    answered = [each.tool_call_id or "" for each in answer if each.role is Role.TOOL]
    # If there are as many results as calls, but no id fits, the ids are not usable.
    if len(answered) == len(calls) and indices.keys().isdisjoint(answered):
        indices = {}
    results: dict[int, Message] = {}
    rest = []
    for message in answer:
        same = indices.get(message.tool_call_id or "") if message.role is Role.TOOL else None
        if same:
            results[same.pop(0)] = message
        else:
            rest.append(message)
    others = []
    for message in rest:
        # A result without a usable id answers the first call that has no result.
        is_nameless = message.role is Role.TOOL and not (indices and message.tool_call_id)
        unanswered = [index for index in range(len(calls)) if index not in results]
        if is_nameless and unanswered:
            results[unanswered[0]] = message
        else:
            others.append(message)
    return results, tuple(others)


def _conversation(messages: Iterable[Message], form: _CallForm) -> list[dict[str, Any]]:
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
    """Return a message as a dict for a template."""
    is_null = form.null_content and message.call_texts and not message.content
    rendered: dict[str, Any] = {
        "role": message.role.value,
        "content": None if is_null else message.content,
    }
    # Absent fields are left out: templates check whether a field is there.
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
