"""Replies of a session that tests translate into the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.environment.protocol import Message, Role, ToolCall
from service.gateway.chat import ChatReply, RefusalCode, Refused, StopReason

LOOKED_UP = ToolCall(name="look_up", arguments={"title": "Ærø 🏝", "deep": False}, id="call_a")
COUNTED = ToolCall(name="count", arguments={}, id="")


def chat_reply(
    content: str = "",
    *calls: ToolCall,
    reasoning: str | None = None,
    stop_reason: StopReason = "stop",
    **rest: Any,
) -> ChatReply:
    """Return the reply of turn 4 of session "prompt-9-3", which samples three tokens."""
    if calls and stop_reason == "stop":
        stop_reason = "calls"
    return ChatReply(
        turn_id="prompt-9-3.4",
        message=Message(
            role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning
        ),
        stop_reason=stop_reason,
        num_prompt_tokens=11,
        num_sampled_tokens=3,
        policy_version=2,
        created_at=1_700_000_000.5,
        **rest,
    )


REPLIES = {
    "text": chat_reply("Good morning."),
    "characters": chat_reply("👩‍👩‍👧 é\u2028\x85 data: [DONE]\n\nevent: x 漢字🏝"),
    "thinking": chat_reply("Six.", reasoning="Two and two,\nand two."),
    "call": chat_reply("", LOOKED_UP),
    "all": chat_reply("I look.", LOOKED_UP, COUNTED, reasoning="Where is it? 🏝"),
    "length": chat_reply("It is a", stop_reason="length"),
    "length in thinking": chat_reply("", reasoning="Hm", stop_reason="length"),
    "length after a call": chat_reply("", LOOKED_UP, stop_reason="length"),
    "nothing": chat_reply(""),
    "tokens": chat_reply(
        "Ja",
        sampled_token_ids=np.array([5, 6, 7], np.int32),
        logprobs=np.array([-0.5, np.nan, -0.25], np.float32),
    ),
}


def refusal(code: RefusalCode, **rest: Any) -> Refused:
    return Refused(code, f"this is {code}", **rest)


def without_nulls(tree: Any) -> Any:
    """Return what an SDK parsed, without the fields that it adds although they were not sent."""
    if isinstance(tree, dict):
        return {
            name: without_nulls(value)
            for name, value in tree.items()
            if value is not None and not name.startswith("parsed")
        }
    return [without_nulls(each) for each in tree] if isinstance(tree, list) else tree
