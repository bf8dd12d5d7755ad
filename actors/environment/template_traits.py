"""Find by rendering small chats what a model's chat template does with a chat.

`rayloom check` prints the findings. Nothing here depends on the name of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.environment.call_forms import USUAL, call_form, reasoning_parser
from actors.environment.chat_template import RenderError
from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.environment.tool_calls import parse_tool_calls

# Texts that occur nowhere else in a rendering.
_SYSTEM, _LATER, _QUESTION, _REPLY, _RESULT, _THOUGHT, _TEXT, _ARGUMENT = (
    f"qz{name}zq"
    for name in ("system", "later", "question", "reply", "result", "thought", "text", "argument")
)
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
    """Render small chats with a model's template, and return what it does with each by its name."""
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
    }


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


def _answered(said: str = "") -> tuple[Message, ...]:
    result = Message(role=Role.TOOL, content=_RESULT, name=_CALL.name, tool_call_id=_CALL.id)
    return _user(_QUESTION), _reply(said, _CALL), result


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
        return "shown"
    if any(shown):
        return f"shown only {'with' if shown[1] else 'without'} a system message"
    if renderer.template.shows_calls:
        return "not shown, although calls are; list the tools in the system text"
    return "not shown: sessions refuse them"


def _calls(renderer: ChatRenderer) -> str:
    form = "JSON text" if renderer.template.takes_arguments_as_text else "a mapping"
    found = _shown(renderer, (_user(_QUESTION), _reply("", _CALL)), _CALL.name, _ARGUMENT)
    return f"shown, with arguments as {form}" if found == "shown" else found


def _content(renderer: ChatRenderer) -> str:
    if not renderer.template.shows_calls:
        return "calls are not shown"
    return "none" if renderer.template.needs_null_content else "empty"


def _beside(renderer: ChatRenderer) -> str:
    messages = (_user(_QUESTION), _reply(_TEXT, _CALL))
    found = _shown(renderer, messages, _TEXT, _ARGUMENT)
    return f"{found}, as two messages" if renderer.template.splits_calls else found


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
