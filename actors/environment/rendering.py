"""Make prompts by appending tokens, so that the tokens of earlier turns stay as they are.

The next prompt is the last prompt, then the sampled tokens, then the tokens of the new messages
(the delta). The delta is found by rendering the new messages after two invented chats
(`dummy_chats`). The delta is used if

- the delta is the same after both invented chats,
- the new messages change nothing before them, except that one part may disappear,
- the delta has the text of every new message, and the rendering of the real chat ends with it.

Otherwise the whole chat is rendered, and the reason is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from actors.environment.chat_template import ChatTemplate, RenderError, in_call_order
from actors.environment.dummy_chats import DUMMIES, EXTRA_CALL, Ending, ending_of
from actors.environment.protocol import Message, Role, ToolSchema
from actors.environment.settings import History
from actors.environment.shown_text import (
    Said,
    holds,
    marked,
    marked_system,
    marked_tools,
    marks_in,
    only_moves,
    said,
    tool_mark,
    unshown,
    with_mark,
)
from actors.environment.tokenizer import (
    ChatTokenizer,
    RawPrompts,
    is_raw,
    load_tokenizer,
    stop_ids_of,
    tokenizer_fingerprint,
)
from actors.environment.tokenizer import stop_token_ids as stop_token_ids
from actors.environment.tool_calls import without_thought
from actors.types import BranchReason, TokenIds

_CACHE_ENTRIES = 4096
_CACHED_CHARS = 2_000
_CACHED_TOKENS = 64
# Number of renderers to keep that have options of clients.
_CACHED_OPTIONS = 8
_CACHED_MESSAGES = 16
# Marks the end of a reply's text; it occurs in no chat.
_REPLY_MARK = "qzreplyzq"
# A word such as /no_think, with which a text may choose the mode of a reply.
_SWITCH = re.compile(r"/\w+")
_ID = re.compile(r"\bid\b|tool_call_id")

_Messages = tuple[Message, ...]
_Tools = tuple[ToolSchema, ...]


def load_renderer(
    model: str,
    *,
    template_options: Mapping[str, Any],
    history: History,
    chat_template: str | None = None,
) -> ChatRenderer:
    """Return a renderer of a model's chats.

    Args: model: a directory or hub name. history: how earlier turns appear in a prompt.
    chat_template: Jinja text, or RAW for raw prompts; None uses the model's own.
    Raises: OSError or ValueError if the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(model, chat_template=chat_template)
    return ChatRenderer(
        tokenizer,
        template_options=template_options,
        stop_token_ids=stop_ids_of(model, tokenizer),
        history=history,
    )


class BreakReason(StrEnum):
    """The reason why the next prompt cannot be made by appending to the last prompt."""

    TEMPLATE_REFUSED = "template_refused"
    TEMPLATE_LOOKS_BACK = "template_looks_back"
    MESSAGE_NOT_SHOWN = "message_not_shown"
    """The template does not show, after the reply, the text of a new message."""
    RETOKENISED = "retokenised"
    SYSTEM_MERGED = "system_merged"
    """A new message's system text was moved to the front; the template accepts it only there."""
    HISTORY_RENDERED = "history_rendered"
    """The setting history is as_rendered, and the rendered history differs from the sampled
    tokens."""

    @property
    def branch_reason(self) -> BranchReason:
        """The value of `Sample.branch_reason` if the rendered prompt extends no earlier sample."""
        is_retokenised = self is BreakReason.RETOKENISED
        return BranchReason.RETOKENISED if is_retokenised else BranchReason.TEMPLATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The prompt of the next turn, and how it was made."""

    prompt_token_ids: TokenIds
    num_inserted: int = 0
    """Number of tokens that close the reply and that the policy did not sample."""
    break_reason: BreakReason | None = None
    """The reason why the whole chat was rendered again; None if the prompt was extended."""


# The tokens of new messages, from the end of a reply's content or calls to the next reply; the
# number of tokens at their start that close the reply; and the text of the tokens.
_Delta = tuple[TokenIds, int, str]


class ChatRenderer:
    """Renders one model's chats.

    template_options: variables of the chat template, such as {"enable_thinking": False}.
    stop_token_ids: tokens that end a turn, besides the tokenizer's own end of sequence.
    history: the form of earlier turns; with AS_RENDERED the whole chat is rendered at each turn.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        template_options: Mapping[str, Any] | None = None,
        stop_token_ids: Iterable[int] = (),
        history: History = "appended",
    ) -> None:
        self._tokenizer = tokenizer
        self._history = history
        self._template_options = dict(template_options or {})
        self.template = ChatTemplate(tokenizer, options=self._template_options)
        self._end_ids = frozenset((tokenizer.eos_token_id, tokenizer.pad_token_id, *stop_token_ids))
        self._raw = RawPrompts(tokenizer) if is_raw(tokenizer) else None
        template = getattr(tokenizer, "chat_template", None)
        # A template may use the ids of calls; this is not known of anything but a Jinja text.
        self._knows_ids = not isinstance(template, str) or _ID.search(template) is not None
        self._cached_prompt = lru_cache(_CACHE_ENTRIES)(self._render_prompt)
        self._cached_delta = lru_cache(_CACHE_ENTRIES)(self._render_delta)
        self._cached_marks = lru_cache(_CACHE_ENTRIES)(self._render_marks)
        self._cached_text = lru_cache(_CACHE_ENTRIES)(self._decode)
        self._cached_under = lru_cache(_CACHED_OPTIONS)(self._render_under)

    def under(self, template_options: Mapping[str, Any]) -> ChatRenderer:
        """Return a copy of this renderer with more options of the chat template.

        A given option replaces this renderer's option of the same name.

        Args: template_options: values that JSON can represent.
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
        """Return the `tokenizer_fingerprint` of the renderer's tokenizer."""
        return tokenizer_fingerprint(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Return the number of characters of the vocabulary's longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        added: Mapping[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        return tuple(str(token) for token in added.values() if token.special)

    def special_in(self, messages: Sequence[Message]) -> str | None:
        """Return the text of a special token that the messages contain; None if there is none.

        The tokenizer reads such a text as the token. For raw prompts, which are meant to contain
        these texts, the result is None.
        """
        texts = () if self._raw is not None else self._special_texts
        return next((text for text in texts if any(text in m.content for m in messages)), None)

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the token ids of a chat's first prompt, which ends with the generation prompt.

        Returns: [P] int32, read-only.
        Raises: RenderError, also if the rendering does not show the text of a message.
        """
        chat = in_call_order(messages)
        render = self._cached_prompt if _may_repeat(chat) else self._render_prompt
        return render(chat, tuple(tools))

    def check_tools(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        """Raise RenderError if the template shows neither the tools of a chat nor calls.

        A template that shows calls but no tools (DeepSeek R1) is accepted: the chat's system text
        must list the tools. messages: the beginning of the chat.
        """
        marks = self._marks(marked(messages), marked_tools(tools)) if tools else None
        if marks is None or self.template.shows_calls:
            return
        hidden = [tool.name for number, tool in enumerate(tools) if tool_mark(number) not in marks]
        if hidden:
            raise RenderError(
                f"chat template: it shows no tools and no calls: {', '.join(hidden)} would be in "
                "no prompt; remove the tools, or set model.chat_template to a template with tools",
                param="tools",
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
        """Return the prompt of the next turn.

        The prompt is previous + sampled + (the tokens that close the reply, if not sampled) + the
        tokens of the new messages. As a check, the whole chat is rendered as text too, so the time
        grows with the chat's length.

        Args: previous: [P] int32, the last prompt. sampled: [A] int32, the reply to this prompt,
        which may be cut off. history: every message so far, the reply last. With an empty history
        the reply counts as plain text, and there is no check. new_messages: may be empty.
        Raises: RenderError if the whole chat has to be rendered and the template refuses it.
        """
        if self._history == "as_rendered":
            whole = self.first_prompt((*history, *new_messages), tools)
            reason = None if _extends(whole, previous, sampled) else BreakReason.HISTORY_RENDERED
            return Extension(prompt_token_ids=whole, break_reason=reason)
        if self._raw is not None:
            # Append the text directly: raw prompts have no marker that would have to close a reply
            # that was cut off or ended at a stop string.
            new_ids = self._raw.appended(self.template.text(new_messages)) if new_messages else []
            whole = np.concatenate((previous, sampled, _frozen(new_ids)))
            return Extension(prompt_token_ids=whole)
        ending = ending_of(history)
        calls = zip(ending.call_ids, ending.call_names, strict=True)
        new = in_call_order(new_messages, calls)
        if not self._knows_ids:
            # Ids differ in every chat, so that no cached delta would ever be found.
            ending = replace(ending, call_ids=("",) * len(ending.call_ids))
            new = tuple(m if m.tool_call_id is None else replace(m, tool_call_id=None) for m in new)
        render = self._cached_delta if _may_repeat(new) else self._render_delta
        delta = render(new, tuple(tools), ending)
        if isinstance(delta, tuple) and ending.call_ids and not self._is_ended(sampled, delta[1]):
            delta = BreakReason.TEMPLATE_LOOKS_BACK
        if isinstance(delta, BreakReason):
            whole = self.first_prompt((*history, *new_messages), tools)
            return Extension(prompt_token_ids=whole, break_reason=delta)
        token_ids, num_closing, text = delta
        num_sampled = _overlap(sampled, token_ids[:num_closing], self._end_ids)
        num_inserted = num_closing - num_sampled
        if history and not self._ends_with(text, history, new_messages, tools):
            try:
                whole = self.first_prompt((*history, *new_messages), tools)
            except RenderError:
                # The template hides a text that the delta shows.
                pass
            else:
                is_kept = _extends(whole, previous, sampled)
                return Extension(
                    prompt_token_ids=whole,
                    num_inserted=num_inserted if is_kept else 0,
                    break_reason=None if is_kept else BreakReason.TEMPLATE_LOOKS_BACK,
                )
        return Extension(
            prompt_token_ids=np.concatenate((previous, sampled, token_ids[num_sampled:])),
            num_inserted=num_inserted,
        )

    def decode(self, sampled: TokenIds) -> str:
        """Return the text of a reply without the end tokens after it.

        Other special tokens stay visible, so that an environment sees all that the policy sampled.
        """
        if sampled.shape[0] > _CACHED_TOKENS:
            return self._decode(tuple(sampled.tolist()))
        return self._cached_text(tuple(sampled.tolist()))

    def _render_prompt(self, messages: _Messages, tools: _Tools) -> TokenIds:
        text = self.template.text(messages, tools, add_generation_prompt=True)
        self._check_shown(messages, tools, text)
        if self._raw is None and messages and messages[-1].role is Role.ASSISTANT:
            if text == self.template.text(messages, tools, add_generation_prompt=False):
                raise RenderError(
                    f"chat template: it begins no turn after message {len(messages) - 1}, which is "
                    "the assistant's; expected the user's or a tool's as the last message"
                )
        return _frozen(self._encode(text) if self._raw is None else self._raw.first(text))

    def _check_shown(self, messages: _Messages, tools: _Tools, text: str) -> None:
        """Raise RenderError if a rendering does not show the text of a message."""
        marks = self._marks(marked(messages), tools)

        def in_place(each: Said) -> bool:
            found = self._render_marks(with_mark(messages, each), tools)
            return found is None or each.mark in found

        for each in unshown(said(messages), text=text, marks=marks, in_place=in_place):
            remedy = next(self._switches(each, text), each.remedy)
            raise RenderError(f"chat template: it does not show {each}; {remedy}")

    def _switches(self, said: Said, text: str) -> Iterator[str]:
        """Yield advice on each switch in a text that the template removes, such as `/no_think`."""
        for part in said.texts:
            for word in _SWITCH.findall(part):
                if word in self.template.source and holds(text, part.replace(word, " ")):
                    yield (
                        f"it reads {word} as a switch and removes it; remove {word} from the text, "
                        "and set an option of the template instead: rollouts.template_options for "
                        "a run, chat_template_kwargs for a request (for example "
                        '{"enable_thinking": false})'
                    )

    def _marks(
        self, messages: _Messages, tools: _Tools, *, after: str = ""
    ) -> frozenset[str] | None:
        is_short = len(messages) <= _CACHED_MESSAGES
        render = self._cached_marks if is_short else self._render_marks
        return render(messages, tools, after)

    def _render_marks(
        self, messages: _Messages, tools: _Tools, after: str = ""
    ) -> frozenset[str] | None:
        """Return the marks that a chat's rendering shows; None if the template refuses the chat.

        A mark is a unique word in a text of the chat. after: search only after this text.
        """
        try:
            text = self.template.text(messages, tools, add_generation_prompt=True)
        except RenderError:
            return None
        return marks_in(text.rpartition(after)[2] if after else text)

    def _render_delta(
        self, new_messages: _Messages, tools: _Tools, ending: Ending
    ) -> _Delta | BreakReason:
        in_reply = set(ending.call_ids)
        answered = {message.tool_call_id for message in new_messages if message.tool_call_id}
        # Only one dummy makes these calls, so that the deltas differ if a template looks for them.
        called_before = sorted(answered - in_reply)
        if ending.call_ids or any(message.role is Role.TOOL for message in new_messages):
            # Add one more call with its result, for a template that numbers calls.
            called_before.append(EXTRA_CALL)
        deltas = []
        for dummy, called in zip(DUMMIES, ((), called_before), strict=True):
            chat = dummy.chat(ending, called_before=called)
            mark = dummy.mark(ending)
            try:
                closed = self.template.text(chat, tools, add_generation_prompt=False)
                whole = self.template.text(
                    (*chat, *new_messages), tools, add_generation_prompt=True
                )
            except RenderError:
                return BreakReason.TEMPLATE_REFUSED
            if not new_messages and whole == closed:
                # The template begins no turn after the assistant's.
                return BreakReason.TEMPLATE_REFUSED
            delta = self._delta_behind(
                mark, whole=whole, closed=closed, is_call=bool(ending.call_ids)
            )
            if isinstance(delta, BreakReason):
                return delta
            question = dummy.before[-1].content
            if not _only_loses(_head(closed, question, mark), _head(whole, question, mark)):
                return BreakReason.TEMPLATE_LOOKS_BACK
            deltas.append(delta)
        (first_ids, first_closing, _), (second_ids, second_closing, _) = deltas
        if first_closing != second_closing or not np.array_equal(first_ids, second_ids):
            return BreakReason.TEMPLATE_LOOKS_BACK
        if not self._shows_new(whole.rpartition(mark)[2], chat, new_messages, tools, mark=mark):
            return BreakReason.MESSAGE_NOT_SHOWN
        return deltas[0]

    def _shows_new(
        self, tail: str, chat: _Messages, new_messages: _Messages, tools: _Tools, *, mark: str
    ) -> bool:
        """Return whether the template shows the texts of new messages that follow a chat.

        mark: the chat's last text. tail: the rendering after `mark`.
        """

        def in_place(each: Said) -> bool:
            changed = (*chat, *with_mark(new_messages, each))
            found = self._render_marks(changed, tools, mark)
            return found is None or each.mark in found

        marks = self._marks((*chat, *marked(new_messages)), tools, after=mark)
        return not any(unshown(said(new_messages), text=tail, marks=marks, in_place=in_place))

    def _delta_behind(
        self, mark: str, *, whole: str, closed: str, is_call: bool
    ) -> _Delta | BreakReason:
        """Return the tokens after a dummy reply (the delta), or why they cannot be used.

        mark: the reply's last text. whole: the rendering with the new messages. closed: the
        rendering up to the reply. is_call: whether the reply ends in a call.
        """
        # Find the mark in each text: a template may render more text before a reply that is last.
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
                # A call ends with tokens that the policy may have sampled in another form.
                start = _num_shared(head_ids, text_ids)
            tails.append(text_ids[start:])
        whole_ids, closed_ids = tails
        start = self._num_in_call(closed_ids) if is_call else 0
        if whole_ids[:start] != closed_ids[:start]:
            return BreakReason.TEMPLATE_LOOKS_BACK
        tail_ids = whole_ids[start:]
        tail = whole.rpartition(mark)[2]
        if is_call:
            in_call = closed.rpartition(mark)[2]
            tail = tail[min(map(in_call.find, self._ends_in(in_call)), default=len(in_call)) :]
        return _frozen(tail_ids), self._num_closing(tail_ids, closed_ids[start:]), tail

    def _ends_with(
        self,
        tail: str,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> bool:
        """Return whether the rendering of the real chat ends with the text of the new messages.

        tail: this text after a dummy chat. True is returned if the template refuses the real chat.
        """
        reply = history[-1]

        def rendered(reply: Message, before: Sequence[Message] = history[:-1]) -> str:
            chat = in_call_order((*before, reply, *new_messages))
            return self.template.text(chat, tools, add_generation_prompt=True)

        try:
            text = rendered(reply)
            # An earlier message, for example with `/no_think`, may change the text.
            if not text.endswith(tail):
                try:
                    others = [each for each in history[:-1] if each.role is not Role.SYSTEM]
                    bare = rendered(reply, others)
                    marks = rendered(reply, marked_system(history[:-1]))
                except RenderError:
                    return False
                return only_moves(text, tail, history, bare=bare, with_marks=marks)
            said = without_thought(reply.content).strip()
            if reply.call_texts or (said and text.removesuffix(tail).rstrip().endswith(said)):
                return True
            # Look for new text between the reply and the delta.
            marked_text = rendered(replace(reply, content=f"{reply.content} {_REPLY_MARK}"))
        except RenderError:
            return True
        return marked_text.rpartition(_REPLY_MARK)[2] == tail or _REPLY_MARK not in marked_text

    def _ends_in(self, text: str) -> list[str]:
        """Return the texts of the end tokens that a text contains."""
        ids = (token for token in self._end_ids if token is not None)
        ends = (self._tokenizer.decode([token], skip_special_tokens=False) for token in ids)
        return [end for end in ends if end and end in text]

    def _num_in_call(self, closing_ids: Sequence[int]) -> int:
        """Return how many tokens after a call's last argument the policy samples, such as brackets.

        closing_ids: the tokens after the last argument in a chat that ends with the call.
        """
        ends = (index for index, token in enumerate(closing_ids) if token in self._end_ids)
        return next(ends, len(closing_ids))

    def _is_ended(self, sampled: TokenIds, num_closing: int) -> bool:
        """Return whether a reply with calls is ended, by its own last token or by the delta.

        num_closing: number of tokens at the start of the delta that end the reply.
        """
        # Without an end, the policy would read the new messages as the rest of a cut-off call.
        return num_closing > 0 or not self._end_ids.isdisjoint(sampled[-1:].tolist())

    def _num_closing(self, tail_ids: Sequence[int], closing_ids: Sequence[int]) -> int:
        """Return how many tokens at the start of `tail_ids` close the reply.

        `tail_ids` follow the reply if new messages come next, and `closing_ids` if none do.
        Example: ([END, NL, USER], [END, NL]) -> 2
        """
        if closing_ids:
            return _num_shared(tail_ids, closing_ids)
        # The chat ends without a token after the reply; an end token still counts.
        return int(bool(tail_ids) and tail_ids[0] in self._end_ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        end = len(token_ids)
        while end and token_ids[end - 1] in self._end_ids:
            end -= 1
        return self._tokenizer.decode(list(token_ids[:end]), skip_special_tokens=False)


def _head(text: str, question: str, mark: str) -> str:
    """Return the start of a dummy chat's rendering, which new messages must not change.

    The start ends with `question` or, if there is no question, before `mark`.
    """
    before, _, _ = text.partition(mark)
    # Text after the question may change: some templates show only the newest reply's thought.
    head, found, _ = before.rpartition(question)
    return head + found if found else before


def _only_loses(before: str, after: str) -> bool:
    """Return whether `after` is `before` with at most one contiguous part removed."""
    start = _num_shared(before, after)
    end = _num_shared(before[start:][::-1], after[start:][::-1])
    # One removed part does no harm: the real prompt keeps it, because tokens are only appended.
    return start + end == len(after)


def _may_repeat(messages: _Messages) -> bool:
    """Return whether messages are short enough to cache; long ones are seldom rendered again."""
    num_chars = 0
    for message in messages:
        num_chars += len(message.content) + len(message.reasoning or "")
        for _, _, arguments in message.call_texts:
            num_chars += len(arguments)
    return num_chars <= _CACHED_CHARS


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _overlap(sampled: TokenIds, closing: TokenIds, end_ids: Set[int | None]) -> int:
    """Return how many tokens at the start of `closing` are not needed after a sampled reply.

    closing: the tokens that the template writes to close a reply.
    Examples: ([hi, END], [END, NL]) -> 1; with white space first, ([hi, END], [NL, END, NL]) -> 2
    """
    start: list[int] = closing.tolist()
    end: list[int] = sampled[max(0, len(sampled) - len(start)) :].tolist()
    for length in range(len(end), 0, -1):
        if end[-length:] == start[:length]:
            return length
    first_end = [token for token in start if token in end_ids][:1]
    return start.index(first_end[0]) + 1 if first_end and first_end == end[-1:] else 0


def _extends(whole: TokenIds, previous: TokenIds, sampled: TokenIds) -> bool:
    """Return whether a prompt begins with the previous prompt and the sampled tokens."""
    known = np.concatenate((previous, sampled))
    return np.array_equal(whole[: known.shape[0]], known)


def _frozen(token_ids: Sequence[int]) -> TokenIds:
    array = np.array(token_ids, dtype=np.int32)
    array.flags.writeable = False
    return array
