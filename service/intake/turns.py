"""The records of a session: its turns, and the changes of its state.

The store keeps these records (`service.store.sessions`), and the tree of a session's conversations
is built from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.environment.protocol import Message, ToolSchema
from actors.environment.rendering import BreakReason
from actors.expert_records import ExpertIndices
from actors.types import FinishReason, LogProbs, TokenIds, VersionSpan
from service.intake.session import LimitRefusal, SessionEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """One turn of a session: an agent's request, and the reply that an engine sampled.

    It has only the messages and ids that the turn added, without those of the earlier turns.
    """

    number: int
    """Number of the turn (0, 1, 2, …) in the order in which the session's turns were stored."""
    parent: int | None
    """The number of the turn that this turn continues; None if the turn begins a conversation."""
    tools: tuple[ToolSchema, ...]
    """Tools of the conversation; empty if the turn has a parent, whose tools then apply."""
    new_messages: tuple[Message, ...]
    """Messages of the request after the parent's reply; the whole chat if there is no parent."""
    reply: Message
    """The assistant's message, as the client gets it and as a later prompt's history has it."""
    extends_parent: bool
    """Whether the prompt begins with all ids of the parent; False if the chat was rendered again,
    or if there is no parent."""
    new_token_ids: TokenIds
    """[N] int32; the prompt's ids after the parent's if `extends_parent`, else all of its ids."""
    sampled_token_ids: TokenIds
    """[A] int32; the ids that the engine sampled."""
    logprobs: LogProbs
    """[A] float32, nats; the log-probabilities of the sampled ids."""
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    num_inserted: int = 0
    """Number of tokens in the new ids that Rayloom inserted to close an answer that was cut off."""
    break_reason: BreakReason | None = None
    """The reason why the chat was rendered again; None if it was not rendered again."""
    is_malformed: bool = False
    """Whether a call in the reply is unreadable or names an undeclared tool."""
    is_auxiliary: bool = False
    """Whether the client marked the turn as outside the task."""
    is_unseen: bool = False
    """Whether the client disconnected before the answer, and has not repeated the request."""
    expert_indices: ExpertIndices | None = None
    cache_salt: str = ""
    replica: str = ""
    request_id: str = ""
    """Id of the HTTP request that the turn answers; a repeat of the request has the same id."""
    request_digest: str = ""
    """Digest of the request; equal for an equal request at the same place in the conversation."""
    idempotency_key: str = ""
    created_at: float = 0.0
    """Seconds since 1970."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template that the client gave; empty if the turn has a parent.

    The parent's options then apply.
    """
    is_instructed: bool = False
    """Whether the conversation's first message was sent as a request's instructions.

    The instructions of later requests replace this message. All turns of a conversation have the
    value of its first turn.
    """
    stop_string: str = ""
    """The stop string before which the reply's text was cut; empty if it was not cut."""
    ignored: tuple[str, ...] = ()
    """Names of the parameters that the client sent and that were ignored."""

    @property
    def num_sampled(self) -> int:
        return int(self.sampled_token_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAdded:
    """A change of a session: a turn was sampled and is added."""

    session_id: str
    turn: SessionTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMarked:
    """A change of a session: the client received a stored turn, or disconnected before it did."""

    session_id: str
    number: int
    is_unseen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A change of a session: its group was admitted. Only the first such change has an effect."""

    session_id: str
    opened_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClaimed:
    """A change of a session: a client claimed it. Only the first such change has an effect."""

    session_id: str
    name: str
    """The name that the client gave with the claim."""
    claimed_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReached:
    """A change of a session: a request was refused because of a limit or a full context.

    If a session has several such refusals, only the newest is kept.
    """

    session_id: str
    refusal: LimitRefusal


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """A change of a session: it ended.

    If the session's reward was pending, a second such change may follow with the reward.
    """

    session_id: str
    end: SessionEnd


Change = TurnAdded | TurnMarked | SessionOpened | SessionClaimed | LimitReached | SessionEnded
