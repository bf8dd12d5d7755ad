"""Find the traits of a model's chat template, such as the form in which it writes tool calls.

A form is recognised by certain texts, its signs, in the template or in the template's rendering of
a call. The form decides which of vLLM's parsers reads the model's replies. Nothing here depends on
the name of a model. `rayloom check` prints the traits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from actors.environment.chat_template import RenderError
from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.environment.shown_text import count_unchanged
from actors.environment.tool_calls import OPEN, parse_tool_calls, visible_text

# White space as a reply has it, or as JSON writes it in a string. Repetitions are possessive (`*+`)
# so that the time of a search grows only linearly with a reply's length.
_SPACE = r"(?:\s|\\[nrt])*+"
_TAGGED = r"[{\[]|<(?!/)"
_NAMED = r"[^\s<{]++\s*+\{"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The form in which a family of models writes tool calls, and vLLM's parser of this form."""

    parser: str
    """Name of the parser in vLLM."""
    start: str | None
    """The text that begins a call; None if nothing distinguishes a call from text."""
    call_start: str | None = None
    """The text that begins each call if `start` begins a group of calls; None: `start` does."""
    body: str = r"[{\[]"
    """A pattern of what follows `start` in a call; prose that mentions the start does not fit."""
    call_body: str = ""
    """A pattern of what follows `call_start` in a call."""
    signs: tuple[str, ...]
    """Texts that identify the form: all of them occur in the chat template or its rendered call."""
    is_single_list: bool = False
    """Whether vLLM reads only the first list of calls in a reply."""
    has_json_list: bool = False
    """Whether a start may begin a JSON list of calls."""
    is_first_read: bool = False
    """Whether vLLM reads the first calls of a reply, even in a thought, and no later ones."""

    def has_unread(self, text: str, arguments: Sequence[str]) -> bool:
        """Return whether a reply starts more tool calls than vLLM's parser has read.

        text: the reply without its thinking, or the whole reply if no reasoning parser is used.
        arguments: the arguments of each call that the parser has read. A text in them that looks
        like the start of a call is not counted.
        """
        # A thought may mention the form of a call. Most parsers then still read the later calls.
        searched = text if self.is_first_read else visible_text(text)
        begun = self._num_begun(searched) - sum(map(self._num_begun, arguments))
        return begun > (1 if self.is_single_list else len(arguments))

    def _num_begun(self, text: str) -> int:
        if self.start is None:
            return 0
        start = re.escape(self.start)
        # A start that is doubled, or that begins a group, begins no call of its own.
        either = rf"{start}(?!{_SPACE}{start})(?={_SPACE}(?:{self.body}))"
        if self.call_start is not None:
            call = re.escape(self.call_start)
            either = rf"{call}(?={self.call_body})|{either}(?![^<]*{call})"
        pattern = re.compile(rf"(?:{either})\s*")
        num_begun = position = 0
        while (found := pattern.search(text, position)) is not None:
            length, position = 0, found.end()
            if self.has_json_list:
                length, position = _json_list(text, position)
            num_begun += max(1, length)
        return num_begun


def _json_list(text: str, position: int) -> tuple[int, int]:
    """Return the length and the end of a JSON list at a position; 0 and the position if none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, position)
    except (ValueError, RecursionError):
        return 0, position
    return (len(value), end) if isinstance(value, list) else (0, position)


_functions = partial(CallForm, call_start="<function=", body=_TAGGED, call_body=r"[^\s<>]++>")
_DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_deepseek = partial(
    CallForm,
    start=_DEEPSEEK,
    call_start="<\uff5ctool\u2581call\u2581begin\uff5c>",
    body=_TAGGED,
    call_body=rf"\s*+(?:{_NAMED}|[^\s<{{]++\s*+<\uff5ctool\u2581sep\uff5c>)",
)
USUAL = CallForm(parser="hermes", start=OPEN, signs=(OPEN,))
# The first form whose signs are all present is taken, so a special case precedes its general form.
CALL_FORMS = (
    CallForm(
        parser="minimax_m2",
        start="<minimax:tool_call>",
        call_start="<invoke",
        body=_TAGGED,
        call_body=r"\s++[^\s<>]++(?:>|\s*+<parameter)",
        signs=("<minimax:tool_call>",),
    ),
    _functions(parser="seed_oss", start="<seed:tool_call>", signs=("<seed:tool_call>",)),
    _functions(parser="qwen3_xml", start=OPEN, signs=(OPEN, "<function=")),
    CallForm(
        parser="glm47",
        start=OPEN,
        body=rf"[{{\[]|<arg_key>|[^\s<\\]++{_SPACE}(?:<arg_key>|</tool_call>)",
        signs=(OPEN, "<arg_key>"),
    ),
    USUAL,
    CallForm(
        parser="mistral",
        start="[TOOL_CALLS]",
        body=r"[{\[]|[^\s\[{]++\s*+(?:\[ARGS\]|\{)",
        signs=("[TOOL_CALLS]",),
        has_json_list=True,
        is_first_read=True,
    ),
    CallForm(
        parser="kimi_k2",
        start="<|tool_calls_section_begin|>",
        call_start="<|tool_call_begin|>",
        body=_TAGGED,
        call_body=rf"\s*+(?:{_NAMED}|[^\s<{{]++\s*+<\|tool_call_argument_begin\|>)",
        signs=("<|tool_calls_section_begin|>",),
    ),
    _deepseek(parser="deepseek_v3", signs=(_DEEPSEEK, "```json")),
    _deepseek(parser="deepseek_v31", signs=(_DEEPSEEK,)),
    CallForm(parser="cohere_command3", start="<|START_ACTION|>", signs=("<|START_ACTION|>",)),
    CallForm(
        parser="lfm2",
        start="<|tool_call_start|>",
        signs=("<|tool_call_start|>",),
        is_single_list=True,
        is_first_read=True,
    ),
    CallForm(
        parser="gemma4", start="<|tool_call>", body=rf"call:|{_NAMED}", signs=("<|tool_call>",)
    ),
    CallForm(parser="granite", start="<|tool_call|>", signs=("<|tool_call|>",), has_json_list=True),
    CallForm(
        parser="functiongemma",
        start="<start_function_call>",
        body=rf"call:|{_NAMED}",
        signs=("<start_function_call>",),
    ),
    CallForm(
        parser="apertus",
        start="<|tools_prefix|>",
        signs=("<|tools_prefix|>",),
        has_json_list=True,
        is_first_read=True,
    ),
    CallForm(parser="longcat", start="<longcat_tool_call>", signs=("<longcat_tool_call>",)),
    CallForm(
        parser="olmo3",
        start="<function_calls>",
        body=r"[\w.]++\s*+\(",
        signs=("<function_calls>",),
        is_single_list=True,
        is_first_read=True,
    ),
    CallForm(
        parser="llama3_json",
        start="<|python_tag|>",
        body=r"\{|[\w.]++\s*+\(",
        signs=('{"name": function name, "parameters": ',),
    ),
    CallForm(parser="pythonic", start=None, signs=("[func_name1(params_name1=params_value1",)),
)
_JSON_CALL = re.compile(rf"{re.escape(OPEN)}\s*\{{")
_BARE_JSON_CALL = re.compile(r'\{\s*"name": *"probe", *"parameters": *\{')
# A text in the template, and its parser. vLLM's `qwen3` lets a call end the thought around it;
# `deepseek_r1` splits at the end of the thought, so that a call inside a thought is ignored.
_THINKING = (("[THINK]", "mistral"), ("</think>", "deepseek_r1"))


def call_form(renderer: ChatRenderer) -> CallForm | None:
    """Return the form of a model's calls; None if it is not known."""
    rendered = renderer.template.rendered_call
    text = f"{renderer.template.source}\n{rendered}"
    for form in CALL_FORMS:
        if all(sign in text for sign in form.signs):
            # Other families use the same marks without JSON between them.
            is_other = form is USUAL and OPEN in rendered and not _JSON_CALL.search(rendered)
            return None if is_other else form
    if _BARE_JSON_CALL.search(rendered):
        return form_of("llama3_json")
    return None


def form_of(parser: str | None) -> CallForm | None:
    """Return the form of calls that a parser of vLLM reads; None if that form is not known."""
    return next((form for form in CALL_FORMS if form.parser == parser), None)


def reasoning_parser(renderer: ChatRenderer) -> str | None:
    """Return the name of vLLM's parser for a model's thoughts; None if none fits the template."""
    text = renderer.template.source
    return next((name for sign, name in _THINKING if sign in text), None)


# Texts that occur nowhere else in a rendering.
_SYSTEM, _LATER, _QUESTION, _REPLY, _RESULT, _THOUGHT, _TEXT, _ARGUMENT = (
    f"qz{name}zq"
    for name in ("system", "later", "question", "reply", "result", "thought", "text", "argument")
)
# A text with capital letters and white space, and a pattern of the same words in any spelling.
SPACED = "First Line  has\n\n\tTwo Spaces"
_ANY_SPACED = re.compile(r"\s*".join(SPACED.split()), re.IGNORECASE)
_TOOL = ToolSchema(
    name="look_up",
    description="Look a title up.",
    parameters={
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
    },
)
# Mistral's templates require an id of nine letters.
_CALL = ToolCall(id="lookup001", name="look_up", arguments={"title": _ARGUMENT})


def template_traits(renderer: ChatRenderer) -> dict[str, str]:
    """Render small chats with a model's template, and return the template's traits by name."""
    return {
        "first system message": _system_first(renderer),
        "second system message": _placed(
            renderer, (_system(_SYSTEM), _system(_LATER), _user(_QUESTION)), _LATER, behind=_SYSTEM
        ),
        "system message in mid-conversation": _placed(
            renderer,
            (_system(_SYSTEM), _user(_QUESTION), _reply(_REPLY), _system(_LATER), _user("go on")),
            _LATER,
            behind=_REPLY,
        ),
        "tools": _tools(renderer),
        "calls": _calls(renderer),
        "content of a message that only calls": _content(renderer),
        "text beside a call": _beside(renderer),
        "results of calls": _shown(renderer, _answered(), _RESULT),
        "calls read back": _read_back(renderer),
        "reasoning of the newest reply": _shown(
            renderer, (_user(_QUESTION), _reply(_REPLY, reasoning=_THOUGHT)), _THOUGHT
        ),
        "reasoning of earlier replies": _shown(
            renderer,
            (_user(_QUESTION), _reply(_REPLY, reasoning=_THOUGHT), _user("go on")),
            _THOUGHT,
        ),
        "parser of calls": _parser(renderer),
        "parser of reasoning": reasoning_parser(renderer) or "none: the template has no thoughts",
        "text at the end of a reply": repr(end_of_reply(renderer)),
    }


def end_of_reply(renderer: ChatRenderer) -> str:
    """Return the text that a template writes after each reply, whether or not a message follows.

    The result is empty if there is no such text, or if the template refuses or hides the reply.
    """
    chat = (_user(_QUESTION), _reply(_REPLY))
    try:
        last, earlier = (
            renderer.template.text(each).partition(_REPLY)[2] for each in (chat, (*chat, chat[0]))
        )
    except RenderError:
        return ""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(last, earlier, strict=False))
    return "".join(letter for letter, _ in pairs)


def missing_header(renderer: ChatRenderer) -> str:
    """Return the header of a reply that a template fails to write at the end of a prompt.

    A template with this fault ignores add_generation_prompt, so the policy would have to sample the
    header. The result is empty for a template without the fault.
    """
    question = (_user(_QUESTION),)
    try:
        prompt, shorter = (
            renderer.template.text(question, add_generation_prompt=each) for each in (True, False)
        )
        before, found, _ = renderer.template.text((*question, _reply(_REPLY))).partition(_REPLY)
    except RenderError:
        return ""
    is_ignored = prompt == shorter and found and before.startswith(prompt)
    header = before[len(prompt) :] if is_ignored else ""
    return header if header.strip() else ""


def changed_text(renderer: ChatRenderer) -> str:
    """Check whether a template changes spaces or the case of letters in a user's text.

    The template renders the text SPACED. If it changes SPACED, return the changed text. Return ""
    if SPACED appears unchanged or escaped, or does not appear at all.
    """
    try:
        rendered = renderer.template.text((_user(SPACED),), add_generation_prompt=True)
    except RenderError:
        return ""
    found = _ANY_SPACED.search(rendered)
    return "" if found is None or count_unchanged(rendered, SPACED) else found[0]


def num_repeated(renderer: ChatRenderer, tools: Sequence[ToolSchema]) -> int:
    """Return how many tokens a template spends on showing the tools again with each user message.

    The result is 0 for a template that shows the tools once. Mistral's templates show them before
    the newest user message. In a prompt that grows by appending, earlier copies stay, so each user
    message adds one more copy.
    """

    def num_added(shown: Sequence[ToolSchema]) -> int | None:
        first = renderer.first_prompt((_user(_QUESTION),), shown)
        found = renderer.extend(
            first,
            first[:0],
            history=(_user(_QUESTION), _reply(_REPLY)),
            new_messages=(_user("go on"),),
            tools=shown,
        )
        is_appended = found.break_reason is None
        return found.prompt_token_ids.shape[0] - first.shape[0] if is_appended else None

    try:
        with_tools, without = num_added(tools), num_added(())
    except RenderError:
        return 0
    return 0 if with_tools is None or without is None else with_tools - without


def describe_traits(traits: Mapping[str, str]) -> str:
    """Return the traits as a table of two columns."""
    width = max(map(len, traits))
    return "\n".join(f"{name:<{width}}  {finding}" for name, finding in traits.items())


def _user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def _system(content: str) -> Message:
    return Message(role=Role.SYSTEM, content=content)


def _reply(content: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning)


def _answered() -> tuple[Message, ...]:
    result = Message(role=Role.TOOL, content=_RESULT, name=_CALL.name, tool_call_id=_CALL.id)
    return _user(_QUESTION), _reply("", _CALL), result


def _shown(renderer: ChatRenderer, messages: Sequence[Message], *texts: str) -> str:
    try:
        text = renderer.template.text(messages)
    except RenderError as error:
        return f"refused ({error})"
    return "shown" if all(each in text for each in texts) else "not shown"


def _system_first(renderer: ChatRenderer) -> str:
    return _shown(renderer, (_system(_SYSTEM), _user(_QUESTION)), _SYSTEM)


def _placed(renderer: ChatRenderer, messages: Sequence[Message], text: str, *, behind: str) -> str:
    merged = "" if _system_first(renderer) != "shown" else "; sessions merge it into the first"
    found = _shown(renderer, messages, text)
    if found != "shown":
        return f"{found}{merged}"
    rendered = renderer.template.text(messages)
    is_behind = rendered.find(text) > rendered.find(behind) >= 0
    return "shown" if is_behind else "moved to the front: a new sample begins"


def _tools(renderer: ChatRenderer) -> str:
    shown = []
    for messages in ((_user(_QUESTION),), (_system(_SYSTEM), _user(_QUESTION))):
        try:
            text = renderer.template.text(messages, (_TOOL,), add_generation_prompt=True)
        except RenderError as error:
            return f"refused ({error})"
        shown.append(_TOOL.name in text)
    if all(shown):
        is_again = num_repeated(renderer, (_TOOL,)) > 0
        return "shown again with each user's message" if is_again else "shown"
    if any(shown):
        return f"shown only {'with' if shown[1] else 'without'} a system message"
    if renderer.template.shows_calls:
        return "not shown, although calls are; list the tools in the system text"
    return "not shown: sessions refuse them"


def _calls(renderer: ChatRenderer) -> str:
    form = "JSON text" if renderer.template.call_form.arguments_as_text else "a mapping"
    found = _shown(renderer, (_user(_QUESTION), _reply("", _CALL)), _CALL.name, _ARGUMENT)
    return f"shown, with arguments as {form}" if found == "shown" else found


def _content(renderer: ChatRenderer) -> str:
    if not renderer.template.shows_calls:
        return "calls are not shown"
    return "none" if renderer.template.call_form.null_content else "empty"


def _beside(renderer: ChatRenderer) -> str:
    messages = (_user(_QUESTION), _reply(_TEXT, _CALL))
    found = _shown(renderer, messages, _TEXT, _ARGUMENT)
    return f"{found}, as two messages" if renderer.template.call_form.splits else found


def _read_back(renderer: ChatRenderer) -> str:
    form = call_form(renderer)
    if form is None or not renderer.template.shows_calls:
        return "no"
    if form is not USUAL:
        return f"not tried here; vLLM's {form.parser} reads them in the engine"
    text = renderer.template.text((_user(_QUESTION), _reply("", _CALL)))
    calls = parse_tool_calls(text.rpartition(_QUESTION)[2], (_TOOL,))
    return (
        "yes" if [getattr(each, "arguments", None) for each in calls] == [_CALL.arguments] else "no"
    )


def _parser(renderer: ChatRenderer) -> str:
    form = call_form(renderer)
    if form is None:
        return "none known: tools are refused until inference.tool_parser names one"
    return form.parser
