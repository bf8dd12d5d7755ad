"""The providers' SDKs as clients of the dialects' routes, each with the same few methods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import anthropic
import openai

from service.gateway.chat import RefusalCode, StopReason

USER = {"role": "user", "content": "Hello"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An answer as an SDK returns it."""

    head: tuple[str, str, set[str]]
    """The answer's id, its model, and the roles that it names."""
    content: str
    reasoning: str | None
    calls: list[tuple[str, object]]
    """Each call's name and arguments."""
    call_ids: list[str]
    end: str
    """Why the answer ended, in the provider's words."""
    usage: tuple[int, int, int]
    """Tokens of the prompt, sampled tokens, and their sum."""
    tokens: Mapping[str, Any]
    """The fields that the SDK does not know: the sampled tokens."""


class OpenAi:
    """The client and the errors that OpenAI's two dialects share."""

    error: ClassVar[type[openai.APIError]] = openai.APIError
    status_error: ClassVar[type[openai.APIStatusError]] = openai.APIStatusError
    full_context = "this model's maximum context length is exceeded: "

    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="k")

    def reason(self, error: Any) -> tuple[str, str, str]:
        """Return a refusal's code, parameter and message."""
        return error.code, error.param, error.message


class ChatSdk(OpenAi):
    """OpenAI's SDK, chat completions."""

    name, prefix, turns = "openai-chat", "chatcmpl-", "messages"
    passing = RefusalCode.NOT_AVAILABLE
    image: ClassVar[Mapping[str, Any]] = {"type": "image_url", "image_url": {"url": "data:"}}
    ends: ClassVar[Mapping[StopReason, str]] = {
        "stop": "stop", "length": "length", "calls": "tool_calls"
    }  # fmt: skip

    def whole(self, turns: Sequence[Any] = (USER,)) -> Any:
        return self.client.chat.completions.create(model="m", messages=list(turns))

    def streamed(self) -> Any:
        asked: dict[str, Any] = {"model": "m", "messages": [USER]}
        usage = {"include_usage": True}
        with self.client.chat.completions.stream(**asked, stream_options=usage) as stream:
            stream.until_done()
            found = stream.current_completion_snapshot
        # The SDK's helper for streams adds an index.
        calls: Any = found.choices[0].message.tool_calls or []
        for call in calls:
            del call.index
        return found

    def shown(self, answer: Any) -> Shown:
        [choice] = answer.choices
        message, usage = choice.message, answer.usage
        calls = message.tool_calls or []
        return Shown(
            head=(answer.id, answer.model, {message.role}),
            content=message.content or "",
            reasoning=(message.model_extra or {}).get("reasoning_content"),
            calls=[(each.function.name, json.loads(each.function.arguments)) for each in calls],
            call_ids=[each.id for each in calls],
            end=choice.finish_reason,
            usage=(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
            tokens=choice.model_extra,
        )

    def back(self, answer: Any) -> list[Any]:
        """Return the answer as a part of the next request."""
        return [answer.choices[0].message]


class MessagesSdk:
    """Anthropic's SDK."""

    name, prefix, turns = "anthropic-messages", "msg_", "messages"
    error = status_error = anthropic.APIStatusError
    full_context, passing = "prompt is too long: ", RefusalCode.NOT_AVAILABLE
    image: ClassVar[Mapping[str, Any]] = {"type": "image", "source": {"type": "base64", "data": ""}}
    ends: ClassVar[Mapping[StopReason, str]] = {
        "stop": "end_turn", "length": "max_tokens", "calls": "tool_use"
    }  # fmt: skip

    def __init__(self, url: str) -> None:
        self.client = anthropic.Anthropic(base_url=url, api_key="k")

    def whole(self, turns: Sequence[Any] = (USER,)) -> Any:
        return self.client.messages.create(model="m", messages=list(turns), max_tokens=9)

    def streamed(self) -> Any:
        asked: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 9}
        with self.client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    def shown(self, answer: Any) -> Shown:
        blocks, usage = answer.content, answer.usage
        thoughts = [each.thinking for each in blocks if each.type == "thinking"]
        calls = [each for each in blocks if each.type == "tool_use"]
        return Shown(
            head=(answer.id, answer.model, {answer.role}),
            content="".join(each.text for each in blocks if each.type == "text"),
            reasoning="|".join(thoughts) or None,
            calls=[(each.name, each.input) for each in calls],
            call_ids=[each.id for each in calls],
            end=answer.stop_reason,
            usage=(
                usage.input_tokens, usage.output_tokens, usage.input_tokens + usage.output_tokens
            ),
            tokens=answer.model_extra,
        )  # fmt: skip

    def back(self, answer: Any) -> list[Any]:
        """Return the answer as a part of the next request."""
        return [{"role": "assistant", "content": answer.content}]

    def reason(self, error: Any) -> tuple[str, str, str]:
        """Return a refusal's code, parameter and message."""
        found = error.body["error"]
        return found["code"], found["param"], found["message"]


class ResponsesSdk(OpenAi):
    """OpenAI's SDK, responses."""

    name, prefix, turns = "openai-responses", "resp_", "input"
    passing = RefusalCode.TOO_MANY_REQUESTS
    image: ClassVar[Mapping[str, Any]] = {"type": "input_image", "image_url": "data:"}
    ends: ClassVar[Mapping[StopReason, str]] = {
        "stop": "completed",
        "length": "incomplete: max_output_tokens",
        "calls": "completed",
    }

    def whole(self, turns: Sequence[Any] = (USER,)) -> Any:
        return self.client.responses.create(model="m", input=list(turns))

    def streamed(self) -> Any:
        asked: Any = [USER]
        with self.client.responses.stream(model="m", input=asked) as stream:
            *_, last = stream
            found: Any = last
            return found.response

    def shown(self, answer: Any) -> Shown:
        cut, usage = answer.incomplete_details, answer.usage
        roles = [each.role for each in answer.output if each.type == "message"]
        thoughts = [each for each in answer.output if each.type == "reasoning"]
        calls = [each for each in answer.output if each.type == "function_call"]
        return Shown(
            head=(answer.id, answer.model, {"assistant", *roles}),
            content=answer.output_text,
            reasoning="|".join(part.text for each in thoughts for part in each.content) or None,
            calls=[(each.name, json.loads(each.arguments)) for each in calls],
            call_ids=[each.call_id for each in calls],
            end=f"{answer.status}: {cut.reason}" if cut else answer.status,
            usage=(usage.input_tokens, usage.output_tokens, usage.total_tokens),
            tokens=answer.model_extra,
        )

    def back(self, answer: Any) -> list[Any]:
        """Return the answer as a part of the next request."""
        return [each.to_dict() for each in answer.output]


Sdk = ChatSdk | MessagesSdk | ResponsesSdk
SDKS: dict[str, type[Sdk]] = {each.name: each for each in (ChatSdk, MessagesSdk, ResponsesSdk)}
