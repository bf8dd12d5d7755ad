"""Invented ("dummy") chats, with which `rendering` finds the tokens of new messages.

`rendering` renders a dummy chat with the new messages at its end. The tokens after the chat are the
tokens of the new messages. A template may read the last reply when it renders new messages. So the
last reply of a dummy chat has the parts of the real reply: text, a thought, calls with the same
names and ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from actors.environment.protocol import Message, Role, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The parts of a reply that can change how a template renders the messages after it."""

    has_content: bool = True
    has_reasoning: bool = False
    call_ids: tuple[str, ...] = ()
    call_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyChat:
    """An invented chat; `rendering` renders new messages after it to learn which tokens they add.

    None of its fields' texts contains another one, so `rendering` can search for each text.
    """

    before: tuple[Message, ...]
    content: str
    reasoning: str
    argument: str

    def chat(self, ending: Ending, *, called_before: Iterable[str]) -> tuple[Message, ...]:
        """Return the chat with a reply that has the given ending.

        Args: called_before: ids of calls that are made and answered at the start of the chat.
        """
        values = [f"{self.content} {index}" for index in range(len(ending.call_names) - 1)]
        values.append(self.argument)
        calls = zip(ending.call_ids, ending.call_names, values, strict=False)
        reply = Message(
            role=Role.ASSISTANT,
            content=self.content if ending.has_content else "",
            reasoning=self.reasoning if ending.has_reasoning else None,
            tool_calls=tuple(
                ToolCall(id=call_id, name=name, arguments={"argument": value})
                for call_id, name, value in calls
            ),
        )
        return (*_answered_calls(called_before), *self.before, reply)

    def mark(self, ending: Ending) -> str:
        """Return the last text of the chat, after which new messages begin in a rendering.

        This text is the argument of the reply's last call, or the content of a reply without calls.
        The text occurs once in the chat. ending: the parts of the reply, as passed to `chat`.
        """
        return self.argument if ending.call_names else self.content


# They differ in length, in number of turns and in their last letters, so that their deltas differ
# if a template or a tokenizer looks back.
DUMMIES = (
    DummyChat(
        before=(Message(role=Role.USER, content="first dummy question"),),
        content="first dummy reply",
        reasoning="first dummy thought",
        argument="first dummy value",
    ),
    DummyChat(
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

# Mistral's templates require ids of nine letters.
EXTRA_CALL = "dummy0000"


def ending_of(history: Sequence[Message]) -> Ending:
    reply = history[-1] if history else None
    if reply is None or not (reply.call_texts or reply.reasoning):
        return Ending()
    return Ending(
        # Without a call the delta begins after the content, even if the content is empty.
        has_content=bool(reply.content) or not reply.call_texts,
        has_reasoning=bool(reply.reasoning),
        call_ids=tuple(call_id for call_id, _, _ in reply.call_texts),
        call_names=tuple(name for _, name, _ in reply.call_texts),
    )


def _answered_calls(call_ids: Iterable[str]) -> Iterator[Message]:
    """Yield messages in which the assistant makes calls with these ids, and tools answer them."""
    for call_id in call_ids:
        call = ToolCall(id=call_id, name="dummy", arguments={})
        yield Message(role=Role.USER, content="call")
        yield Message(role=Role.ASSISTANT, content="", tool_calls=(call,))
        yield Message(role=Role.TOOL, content="0", name="dummy", tool_call_id=call_id)
        yield Message(role=Role.ASSISTANT, content="called")
