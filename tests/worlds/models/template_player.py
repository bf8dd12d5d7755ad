"""Play the chats of `template_chats` through the gateway, and note which texts get lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import jinja2
import numpy as np

from actors.environment.chat_template import RenderError
from actors.environment.policy import GenerateReply, GenerateRequest, ParsedCall, ParsedReply
from actors.environment.rendering import ChatRenderer
from actors.types import FinishReason, TokenIds, VersionSpan
from service.config.sections import SessionSettings
from service.gateway.bodies import NewSession
from service.gateway.dialects.openai_chat import OPENAI_CHAT
from worlds.models.template_chats import TOOLS, Chat, Reply, Seen, TurnSeen, said, without_spaces
from worlds.parts.gateway_world import SPEC, Gateway
from worlds.parts.session_app import SessionRun

_LIMITS = replace(SPEC, max_tokens_per_turn=800, max_turns=50)
_PATH = "/v1/chat/completions"


class Player:
    """A player of chats over one template; all its sessions are in one gateway."""

    def __init__(self, tokenizer: Any, directory: Path) -> None:
        self._tokenizer = tokenizer
        self._ends = _end_tokens(tokenizer)
        ids = tokenizer.convert_tokens_to_ids(self._ends)
        self.renderer = ChatRenderer(tokenizer, stop_token_ids=ids)
        self._script = _Script(self)
        self._gateway = Gateway(
            directory,
            settings=SessionSettings(hold_s=300),
            max_context_tokens=20_000,
            chat_renderer=self.renderer,
            policy_client=self._script,
        )
        self._app = SessionRun(self._gateway).app()
        self._num_sessions = 0

    def close(self) -> None:
        self._gateway.sessions.close()
        self._gateway.store.close()

    async def play(self, chat: Chat) -> Seen:
        """Play a chat up to its end, or to the first turn that is refused."""
        task = f"task{self._num_sessions}"
        self._num_sessions += 1
        name = f"{task}-0"
        self._gateway.create(task, spec=_LIMITS, members=1)
        self._gateway.admit(name)
        session = NewSession.of(name, client_key="", address="http://localhost")
        turns: list[TurnSeen] = []
        conversation: list[dict[str, Any]] = []
        open_ids: list[str] = []
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for step in chat.steps:
                conversation += [_addressed(message, open_ids) for message in step.new]
                body = {"model": "policy", "messages": conversation}
                if chat.has_tools:
                    body["tools"] = TOOLS
                self._script.next_reply, self._script.prompt = step.reply, ""
                if not turns:
                    self._script.known = None
                self._script.has_tools = chat.has_tools
                answered = await client.post(
                    f"/sessions/{name}{_PATH}",
                    json=body,
                    headers={"authorization": f"Bearer {session.agent_key}"},
                )
                if answered.status_code != 200:
                    error = answered.json().get("error", {}).get("message", "")
                    turns.append(TurnSeen(status=answered.status_code, error=error))
                    break
                lost = tuple(_lost(conversation, self._script.prompt))
                if chat.has_tools and not ("weather" in self._script.prompt or self._shows_calls):
                    lost = ("tools", *lost)
                turns.append(
                    TurnSeen(
                        status=200,
                        lost=lost,
                        prompt=self._script.prompt,
                        appended=self._script.appended,
                        rendered=self._rendered(body),
                    )
                )
                message = answered.json()["choices"][0]["message"]
                open_ids = [call["id"] for call in message.get("tool_calls", ())]
                conversation.append(_sent_back(message, chat))
            done = await client.post(
                f"/api/v1/sessions/{name}/finish",
                json={"reward": 1.0},
                headers={"authorization": f"Bearer {session.reward_key}"},
            )
            assert done.status_code == 200, done.text
        trajectory = await self._gateway.playing[name]
        reasons = [sample.branch_reason for sample in trajectory.samples]
        return Seen(
            turns=tuple(turns),
            num_samples=len(trajectory.samples),
            breaks=dict(trajectory.render_breaks),
            branches=tuple(str(reason.value) for reason in reasons if reason is not None),
        )

    @cached_property
    def _shows_calls(self) -> bool:
        """Whether the template shows calls, even if it leaves the tools to the system text."""
        call = Reply(calls=(("weather", {"city": "Oslo"}),))
        question = said("user", "question")
        return any("Oslo" in self._template([question, each]) for each in _as_messages(call))

    def _rendered(self, body: dict[str, Any]) -> str:
        request, _ = OPENAI_CHAT.read(body, {})
        try:
            ids = self.renderer.first_prompt(request.messages, request.tools)
        except RenderError:
            return ""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def spoken(self, reply: Reply, *, has_tools: bool) -> str:
        """Return the reply as the template renders it after its generation prompt."""
        tools = TOOLS if has_tools else None
        prompt = self._template([said("user", "question")], tools, add_generation_prompt=True)
        for message in _as_messages(reply):
            whole = self._template([said("user", "question"), message], tools)
            told = whole.removeprefix(prompt)
            if told != whole and _says(told, reply):
                return _up_to_end(told, self._ends, reply)
        return self._made_up(reply, prompt)

    def _template(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any
    ) -> str:
        """Return the chat as the template renders it; empty if the template refuses it."""
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, **options
            )
        except (jinja2.TemplateError, ValueError, TypeError, AttributeError):
            return ""
        return str(text)

    def _made_up(self, reply: Reply, prompt: str) -> str:
        """Compose a reply for a template that does not render replies as its policy writes them."""
        opens = prompt.rstrip().endswith("<think>")
        thought = ("" if opens else "<think>\n") + f"{reply.reasoning}\n</think>\n\n"
        calls = "\n".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in reply.calls
        )
        return (thought if reply.reasoning or opens else "") + reply.content + calls + self._ends[0]


class _Script:
    """The engine, which answers with the next reply."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self.next_reply = Reply()
        self.has_tools = False
        self.prompt = ""
        self.appended: str | None = None
        self.known: TokenIds | None = None
        """The previous prompt and its reply; None: the next prompt is the first of a chat."""
        self._num_calls = 0

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        tokenizer, said_now = self._player._tokenizer, self.next_reply
        prompt, known = request.prompt_token_ids, self.known
        self.prompt = tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        self.appended = None
        if known is not None and np.array_equal(prompt[: len(known)], known):
            added = prompt[len(known) :].tolist()
            self.appended = tokenizer.decode(added, skip_special_tokens=False)
        text = self._player.spoken(said_now, has_tools=self.has_tools)
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        if said_now.is_cut:
            ids = ids[: max(1, len(ids) - 4)]
        self.known = np.concatenate((prompt, ids))
        calls = []
        for name, arguments in said_now.calls:
            # Mistral's templates accept only ids of nine letters.
            self._num_calls += 1
            call_id = f"call{self._num_calls:05d}"
            calls.append(ParsedCall(name=name, arguments=json.dumps(arguments), id=call_id))
        content = said_now.content
        if said_now.is_cut:
            content = self._player.renderer.decode(ids)
        return GenerateReply(
            token_ids=ids,
            logprobs=np.full(ids.shape, -0.5, np.float32),
            finish_reason=FinishReason.LENGTH if said_now.is_cut else FinishReason.STOP,
            version_spans=(VersionSpan(version=3, start=0, end=len(ids)),),
            cache_salt="v3",
            parsed=ParsedReply(
                content=content, reasoning=said_now.reasoning or None, calls=tuple(calls)
            ),
        )


# Markers that end some of these models' replies and that no template adds after a text.
_OTHER_ENDS = ("<|call|>", "<|return|>", "<|eom_id|>", "<|observation|>")


def _end_tokens(tokenizer: Any) -> list[str]:
    """Return the tokens that end a reply: the first marker after its text, and the EOS token."""
    chat = [said("user", "question"), said("assistant", "answer"), said("user", "more")]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (jinja2.TemplateError, ValueError, TypeError, AttributeError):
        text = ""
    behind = text.rpartition("answer")[2].rpartition("more")[0]
    known = {token.content for token in tokenizer.added_tokens_decoder.values()} - {""}
    places = [(behind.index(each), -len(each), each) for each in known if each in behind]
    first = [min(places)[2]] if places else []
    others = [each for each in _OTHER_ENDS if each in known]
    return list(dict.fromkeys([*first, tokenizer.eos_token, *others]))


def _as_messages(reply: Reply) -> Iterator[dict[str, Any]]:
    """Yield the forms of a message in which templates accept a reply."""
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reply.reasoning)
    message = {"role": "assistant", **(thought if reply.reasoning else {})}
    if not reply.calls:
        yield {**message, "content": reply.content}
        return
    for content in (reply.content or None, reply.content):
        for as_text in (False, True):
            calls = [
                {
                    "id": f"probe{number:04d}",
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(arguments) if as_text else dict(arguments),
                    },
                }
                for number, (name, arguments) in enumerate(reply.calls)
            ]
            yield {**message, "content": content, "tool_calls": calls}


def _says(text: str, reply: Reply) -> bool:
    texts = [reply.content, reply.reasoning, *(name for name, _ in reply.calls)]
    texts += [str(value) for _, arguments in reply.calls for value in arguments.values()]
    return all(_is_in(each, text) for each in texts)


def _up_to_end(text: str, ends: Sequence[str], reply: Reply) -> str:
    """Return the text up to and including the first end token after the reply.

    An engine stops there.
    """
    texts = [reply.content, *(str(v) for _, each in reply.calls for v in each.values())]
    forms = {form for each in texts if each for form in _forms(each)}
    start = max(text.rfind(form) + len(form) for form in forms if form in text)
    found = [(text.index(end, start), end) for end in ends if end in text[start:]]
    if not found:
        return text.rstrip() + ends[0]
    place, end = min(found)
    return text[: place + len(end)]


def _addressed(message: dict[str, Any], open_ids: Sequence[str]) -> dict[str, Any]:
    if "answers" not in message:
        return message
    call_id = open_ids[message["answers"]]
    return {"role": "tool", "content": message["content"], "tool_call_id": call_id}


def _sent_back(message: dict[str, Any], chat: Chat) -> dict[str, Any]:
    back = {key: value for key, value in message.items() if key != "reasoning_content"}
    thought = message.get("reasoning_content")
    if thought and chat.thoughts == "kept":
        back["reasoning_content"] = thought
    elif thought and chat.thoughts == "inlined":
        back["content"] = f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}"
    if back.get("tool_calls") and not back.get("content"):
        back["content"] = chat.content_of_calls
    return back


def _lost(conversation: Sequence[dict[str, Any]], prompt: str) -> Iterator[str]:
    """Yield the texts of a conversation that a prompt has less often than the conversation."""
    texts: dict[str, list[str]] = {}
    for number, message in enumerate(conversation):
        content = message.get("content") or ""
        if message["role"] == "assistant":
            content = re.sub(r"^<think>.*?</think>\s*", "", content, flags=re.DOTALL)
        where = f"{message['role']} {number}"
        texts.setdefault(content, []).append(where)
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            for value in (call["function"]["name"], *map(str, arguments.values())):
                texts.setdefault(value, []).append(f"call of {where}")
    for text, places in texts.items():
        if text and (wanted := len(places)) > (found := _num_in(text, prompt)):
            yield f"{places[-1]}: {found} of {wanted}"


def _is_in(text: str, whole: str) -> bool:
    return not text or _num_in(text, whole) > 0


def _num_in(text: str, whole: str) -> int:
    """Count a text in another one, as it is or as a part of JSON; ignore spaces."""
    within = without_spaces(whole)
    return max(within.count(without_spaces(form)) for form in _forms(text))


def _forms(text: str) -> set[str]:
    return {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
