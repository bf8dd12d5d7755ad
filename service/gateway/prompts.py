"""The prompt of a request: the ids of the turn that it continues, and those of its new messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.environment.chat_template import RenderError, system_merged
from actors.environment.protocol import Message, ToolSchema
from actors.environment.rendering import BreakReason, ChatRenderer
from actors.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The turn that a request continues: a copy of all values that `next_prompt` needs."""

    parent: int | None
    """The number of the turn that the request continues; None: it begins a conversation."""
    tools: tuple[ToolSchema, ...]
    """The tools, in the order in which they were first declared."""
    template_options: Mapping[str, Any]
    is_instructed: bool
    """Whether the first message of the conversation came as a request's instructions. A turn with a
    parent has the parent's value."""
    history: tuple[Message, ...]
    """Messages up to and including the parent's reply; empty without a parent."""
    new_messages: tuple[Message, ...]
    """The request's messages after `history`, with our own ids of calls; may be empty."""
    parent_prompt: tuple[TokenIds, ...] = ()
    """Pieces of the parent's prompt, in order."""
    parent_sampled: TokenIds | None = None
    """[A] int32; None without a parent."""
    is_under_other_tools: bool = False
    """Whether turns with other tools contain more of the conversation."""
    is_ambiguous: bool = False
    """Whether several turns with different ids match, so that the request continues none."""
    request_digest: str
    """Digest of the request; equal for an equal request at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of a request's turn; the fields are those of `SessionTurn`."""

    token_ids: TokenIds
    """[P] int32, the whole prompt."""
    extends_parent: bool
    new_token_ids: TokenIds
    """[N] int32; the ids after the parent's if it is extended, else the whole prompt."""
    num_inserted: int = 0
    break_reason: BreakReason | None = None


def next_prompt(place: Place, renderer: ChatRenderer, *, merges_system: bool = False) -> Prompt:
    """Make the prompt of a request; may run in a thread.

    Args: merges_system: put all system texts into one message at the front if the chat template
    refuses the chat or does not show all of it.
    Raises: RenderError if the template still refuses the chat or does not show all of it.
    """
    renderer = renderer.under(place.template_options)
    try:
        return _prompt(place, renderer)
    except RenderError as error:
        messages = (*place.history, *place.new_messages)
        merged = system_merged(messages)
        if not merges_system or merged == messages:
            raise
        try:
            whole = renderer.first_prompt(merged, place.tools)
        except RenderError:
            raise error from None
    reason = None if place.parent is None else BreakReason.SYSTEM_MERGED
    return Prompt(token_ids=whole, extends_parent=False, new_token_ids=whole, break_reason=reason)


def _prompt(place: Place, renderer: ChatRenderer) -> Prompt:
    sampled = place.parent_sampled
    if sampled is None:
        renderer.check_tools(place.new_messages, place.tools)
        whole = renderer.first_prompt(place.new_messages, place.tools)
        return Prompt(token_ids=whole, extends_parent=False, new_token_ids=whole)
    previous = np.concatenate(place.parent_prompt)
    extension = renderer.extend(
        previous,
        sampled,
        history=place.history,
        new_messages=place.new_messages,
        tools=place.tools,
    )
    whole = extension.prompt_token_ids
    is_appended = extension.break_reason is None
    num_known = previous.shape[0] + sampled.shape[0]
    return Prompt(
        token_ids=whole,
        extends_parent=is_appended,
        # Copy the ids, because a view would keep the whole prompt in memory.
        new_token_ids=whole[num_known:].copy() if is_appended else whole,
        num_inserted=extension.num_inserted,
        break_reason=extension.break_reason,
    )
