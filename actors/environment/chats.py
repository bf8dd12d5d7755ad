"""Make training samples of the chats in a data set, for imitation of the assistant's replies.

A row has `messages` in OpenAI's form, and may have `tools`. Each reply becomes a turn, as if an
engine had sampled the reply. The turn's prompt is the rendering of the chat before the reply. The
turn's sampled tokens are those that the reply adds to the rendering, until an engine would stop.

Invariants: a reply's tokens are found by comparing token ids, never by a search in the text. A
reply is refused if the rendering with the reply does not begin with the prompt. Each reply is
trained exactly once. If the template renders an earlier reply differently, for example without its
thought, `sample_builder` begins a new sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from actors.environment.builtin.single_turn import chat_message
from actors.environment.chat_template import RenderError, in_call_order
from actors.environment.data_sets import read_data_set
from actors.environment.protocol import Message, Role, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.environment.sample_builder import SampleBuilder
from actors.environment.shown_text import holds, said
from actors.environment.task_data import CHAT_DATA, DataCheck
from actors.environment.tasks import BadTaskFile
from actors.environment.tokenizer import ChatTokenizer, RawPrompts, is_raw
from actors.types import FinishReason, Sample, TokenIds, Turn, VersionSpan

# A message after a reply, for templates that end a reply only if another message follows.
_NEXT = Message(role=Role.USER, content="0")
# Fields by which other libraries mark replies that are not trained, such as loss and train: by 0 or
# false, by a weight, or by a list of parts.
_TRAINED_IF_TRUE = re.compile(
    r"(?:is_)?(?:loss|train|training|trainable|trained|mask)"
    r"(?:_masks?|_weight|_scale|_detail|_on_turn)?",
    re.IGNORECASE,
)
# The same, by 1 or true. Libraries read `mask` in both ways.
_TRAINED_IF_FALSE = re.compile(
    r"(?:is_|loss_)?masked|mask|(?:no|ignore|skip|mask)_(?:loss|train|training)", re.IGNORECASE
)


class BadChat(ValueError):
    """Raised if a chat cannot be trained on; the error's text names the fault and the remedy."""


class ChatEncoder:
    """Turns chats into samples with the tokenizer and the chat template of one model."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        stop_token_ids: Iterable[int],
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the tokenizer and its chat template.

        Args: stop_token_ids: the tokens at which the model's engine stops. template_options:
        variables of the chat template, such as {"enable_thinking": False}.
        """
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(
            tokenizer, template_options=template_options, history="as_rendered"
        )
        self._raw = RawPrompts(tokenizer) if is_raw(tokenizer) else None
        self._end_ids = frozenset(stop_token_ids)

    def samples(self, row: Mapping[str, Any], chat_id: str) -> tuple[Sample, ...]:
        """Return the samples of a chat that satisfies `CHAT_DATA`.

        Args: chat_id: unique among the chats that are trained together.
        Returns: samples without log-probabilities; their trained tokens have version 0.
        Raises: BadChat if the chat cannot be trained on.
        Example: with one token for each word and marker, user "hi" and assistant "yes" give the ids
            [<user> hi <end> <assistant> yes <end>] with the mask [0, 0, 0, 0, 1, 1].
        """
        rows = row["messages"]
        messages = tuple(_message(each, number) for number, each in enumerate(rows))
        replies = [
            number
            for number, message in enumerate(messages)
            if message.role is Role.ASSISTANT and rows[number].get("weight") != 0
        ]
        if not replies:
            raise BadChat(
                "messages: got no reply of the assistant to train, expected at least one message "
                "of role assistant with a weight other than 0; remove the row, or add the reply"
            )
        try:
            self._renderer.template.check_chat(messages[: replies[-1]])
        except RenderError as error:
            raise BadChat(f"messages: {error}") from error
        # As in `first_prompt`; the assistant's messages keep their numbers.
        messages = in_call_order(messages)
        tools = _tools(row.get("tools"))
        builder = SampleBuilder(chat_id)
        for number in replies:
            try:
                builder.add(self._turn(messages[:number], messages[number], tools))
            except (BadChat, RenderError) as error:
                raise BadChat(f"messages[{number}]: {error}") from error
        return builder.samples()

    def _turn(
        self, before: tuple[Message, ...], reply: Message, tools: tuple[ToolSchema, ...]
    ) -> Turn:
        if not (reply.content.strip() or reply.call_texts or reply.reasoning):
            raise BadChat(
                "got an empty reply of the assistant, expected a text, a thought or a call; remove "
                "the message, or give it weight 0"
            )
        if not before:
            raise BadChat(
                "got a reply of the assistant as the first message, expected a message of role "
                "user or system before it, because an engine never samples a reply to nothing; add "
                "one, or give the reply weight 0"
            )
        prompt = self._renderer.first_prompt(before, tools)
        if not prompt.shape[0]:
            raise BadChat(
                "got a reply after messages without a token, expected a token before it, from "
                "which it is predicted; write a text into the message before it"
            )
        ids = self._reply_ids(prompt, before, reply, tools)
        return Turn(
            prompt_token_ids=prompt,
            sampled_token_ids=ids,
            logprobs=np.zeros(ids.shape[0], np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(start=0, end=ids.shape[0], version=0),),
        )

    def _reply_ids(
        self,
        prompt: TokenIds,
        before: tuple[Message, ...],
        reply: Message,
        tools: tuple[ToolSchema, ...],
    ) -> TokenIds:
        """Return the tokens that an engine would sample for a reply. Raises: BadChat."""
        if self._raw is not None:
            # Raw prompts have no marker at the end of a text.
            end = self._tokenizer.eos_token_id
            text = self._renderer.template.text((reply,))
            return _int32([*self._raw.appended(text), *([] if end is None else [end])])
        whole = self._renderer.template.text((*before, reply), tools)
        tail = self._after(prompt, whole, before, tools)
        self._check_shown(reply, tail)
        end_at = next((at for at, token in enumerate(tail) if token in self._end_ids), None)
        if end_at is None:
            return _int32([*tail, self._end_after(whole, before, reply, tools)])
        rest = [token for token in tail[end_at + 1 :] if token not in self._end_ids]
        if self._decode(rest).strip():
            raise BadChat(
                f"the reply contains the token {self._decode(tail[end_at : end_at + 1])!r}, at "
                "which an engine stops, before its end; remove it from the text"
            )
        return _int32(tail[: end_at + 1])

    def _after(
        self,
        prompt: TokenIds,
        whole: str,
        before: tuple[Message, ...],
        tools: tuple[ToolSchema, ...],
    ) -> list[int]:
        """Return the token ids of a reply, and of the text that the template writes after it.

        Args: whole: the text of the chat with the reply. before: the messages before the reply.
        Raises: BadChat if `whole` does not begin with the text of the prompt.
        """
        ids = self._encode(whole)
        num_prompt = prompt.shape[0]
        if np.array_equal(prompt, ids[:num_prompt]):
            return ids[num_prompt:]
        # Encode the reply separately, if the tokenizer would join the prompt's end and the reply's
        # beginning in one token: an engine cannot sample that token.
        begun = self._renderer.template.text(before, tools, add_generation_prompt=True)
        if whole.startswith(begun):
            tail = self._encode(whole[len(begun) :])
            if self._decode([*prompt.tolist(), *tail]) == self._decode(ids):
                return tail
        raise BadChat(
            "the chat template renders the prompt of the reply differently if the reply follows, "
            "so that an engine that gets the prompt would never write the reply; choose another "
            "template in model.chat_template, or give the message weight 0"
        )

    def _end_after(
        self,
        whole: str,
        before: tuple[Message, ...],
        reply: Message,
        tools: tuple[ToolSchema, ...],
    ) -> int:
        """Find a reply's end token, which the template does not write at the end of a chat.

        whole: the text of the chat with the reply. Raises: BadChat if no engine stops at the token.
        """
        ids = self._encode(whole)
        # Some templates write the end token only before another message, so add one.
        longer = self._encode(self._renderer.template.text((*before, reply, _NEXT), tools))
        is_extended = len(longer) > len(ids) and longer[: len(ids)] == ids
        if not is_extended or longer[len(ids)] not in self._end_ids:
            known = ", ".join(repr(self._decode([token])) for token in sorted(self._end_ids))
            raise BadChat(
                "the chat template ends the reply without a token at which an engine stops "
                f"({known}); expected one, or the policy would never learn to stop; add the token "
                "to eos_token_id in the model's generation_config.json"
            )
        return longer[len(ids)]

    def _check_shown(self, reply: Message, tail: Sequence[int]) -> None:
        """Raise BadChat if the template leaves out a part of the reply. tail: the reply's ids."""
        text = self._decode(tail)
        calls = [part for each in said((reply,)) if each.is_call for part in each.texts]
        for what, parts in (
            ("content", [reply.content]),
            ("thought", [reply.reasoning or ""]),
            ("calls", calls),
        ):
            if not all(holds(text, part) for part in parts if part.strip()):
                raise BadChat(
                    f"the chat template does not show the {what} of the reply; write the reply in "
                    "another form, or choose another template in model.chat_template"
                )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


def read_chats(
    source: str,
    encoder: ChatEncoder,
    *,
    columns: Mapping[str, str | None],
    split: str,
    subset: str | None,
    max_tokens: int,
    leaves_out_long: bool,
    section: str,
    tell: Callable[[str], None],
) -> list[tuple[Sample, ...]]:
    """Return the samples of each chat of a data set.

    Args: source, columns, split, subset, section: the arguments of `read_data_set`; only the
    columns `messages`, `tools`, `task_id` and `seed` are read. max_tokens: the most tokens that a
    sample of a chat may have. leaves_out_long: whether to leave out longer chats; otherwise they
    raise an error. tell: a function that is called with a warning if chats are left out.
    Raises: BadTaskFile for the first row that cannot be trained on; the error has the row's number.
    """
    chats: list[tuple[Sample, ...]] = []
    num_read = 0

    def take(row: Mapping[str, Any]) -> None:
        nonlocal num_read
        num_read += 1
        samples = encoder.samples(row, f"chat-{num_read}")
        longest = max(sample.num_tokens for sample in samples)
        if longest <= max_tokens:
            chats.append(samples)
        elif not leaves_out_long:
            raise BadChat(
                f"messages: got a chat of {longest} tokens, expected at most "
                f"model.max_context_tokens ({max_tokens}), because a chat is never cut; raise the "
                f"limit, remove the row, or set {section}.long_chats to leave_out"
            )

    read_data_set(
        source,
        environment="",
        columns=columns,
        split=split,
        subset=subset,
        check=DataCheck(CHAT_DATA, take),
        section=section,
    )
    num_long = num_read - len(chats)
    if not chats:
        raise BadTaskFile(
            f"data set {source}: all {num_read} chats are longer than model.max_context_tokens "
            f"({max_tokens}); expected a shorter one; raise the limit"
        )
    if num_long:
        tell(f"{num_long} of {num_read} chats are longer than {max_tokens} tokens and are left out")
    return chats


def _message(row: Mapping[str, Any], number: int) -> Message:
    # A reply with weight 0 is not trained, whatever its other fields say.
    is_trained = row["role"] == Role.ASSISTANT and row.get("weight") != 0
    for name, value in row.items():
        if is_trained and _is_left_out(name, value):
            reason = ", because libraries read mask in both ways" if name.lower() == "mask" else ""
            raise BadChat(
                f"messages[{number}]: got the field {name}, expected weight, which is 0 for a "
                f"reply that is context only{reason}; write weight, and remove {name} from all "
                "messages"
            )
    try:
        return chat_message(row)
    except (TypeError, ValueError) as error:
        raise BadChat(f"messages[{number}]: {error}") from error


def _is_left_out(name: str, value: Any) -> bool:
    """Return whether a field tells another library not to train a reply, or a part of it.

    Example: ("train", False) -> True; ("masked", True) -> True; ("train", True) -> False
    """
    if value in (None, "", [], {}):
        return False
    return (_TRAINED_IF_TRUE.fullmatch(name) is not None and value != 1) or (
        _TRAINED_IF_FALSE.fullmatch(name) is not None and value != 0
    )


def _tools(given: Any) -> tuple[ToolSchema, ...]:
    """Return a chat's tools, given in OpenAI's form or as the JSON text of it. Raises: BadChat."""
    try:
        rows = json.loads(given) if isinstance(given, str) and given else given or ()
        functions = [row.get("function", row) for row in rows]
        return tuple(
            ToolSchema(
                name=each["name"],
                description=each.get("description") or "",
                parameters=each.get("parameters") or {"type": "object", "properties": {}},
            )
            for each in functions
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadChat(
            f"tools: got a list that cannot be read ({type(error).__name__}: {error}), expected "
            "tools in OpenAI's form, each with a name; correct it"
        ) from error


def _int32(token_ids: Sequence[int]) -> TokenIds:
    return np.array(token_ids, np.int32)
