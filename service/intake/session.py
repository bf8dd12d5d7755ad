"""The state, turns and changes of sessions: rollouts that external agents play over HTTP.

If the task of a submission (`service.intake.submission`) has the environment `SESSION`, each of its
rollouts is one session. A session's `member` is the number of its rollout. `service.store.sessions`
stores these records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any

from actors.environment.protocol import Message, ToolSchema
from actors.environment.rendering import BreakReason
from actors.expert_records import ExpertIndices
from actors.types import FinishReason, LeftOutReason, LogProbs, Outcome, TokenIds, VersionSpan
from service.access.keys import AGENT, REWARD, digest_of, session_key, tenant_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The settings that all sessions of a submission share, such as their time limits."""

    max_turns: int
    max_tokens_per_turn: int
    ttl_s: float
    """Seconds from a session's admission or claim after which an unfinished session ends."""
    idle_s: float
    """Seconds without a request after which the session ends."""
    reward_deadline_s: float
    """Seconds after a session's finish within which a pending reward must be given."""
    shows_tokens: bool = False
    """Whether answers contain the sampled token ids and their log-probabilities."""
    join_s: float | None = None
    """Seconds from the admission within which agents claim sessions one by one.

    Unclaimed sessions end untrained. If it is None, the client has all sessions from the start.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """The SHA-256 digests of a session's keys in hexadecimal; the keys are not stored."""

    agent: str
    reward: str

    @classmethod
    def of(cls, client_key: str, session_id: str) -> SessionKeys:
        """Derive the two keys of a session from a client's key, and return their digests."""
        return cls(
            agent=digest_of(session_key(client_key, session_id, AGENT)),
            reward=digest_of(session_key(client_key, session_id, REWARD)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """The sessions that a submission requests: their settings and the digests of their keys."""

    spec: SessionSpec
    keys: tuple[SessionKeys, ...]
    """Digests of each session's keys, in the order of the members."""
    asked: Mapping[str, int | float | bool] = field(default_factory=dict)
    """The limits that the client's request named.

    The other limits in `spec` are the run's defaults, which may change when the run is resumed.
    """


class SessionStatus(StrEnum):
    """The state of a session."""

    QUEUED = "queued"
    """The session's group waits for admission to the window; requests for turns wait too."""
    OPEN = "open"
    FINISHED = "finished"
    DISCARDED = "discarded"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTotals:
    """Counts over all turns of a session."""

    num_turns: int
    num_sampled_tokens: int
    num_ambiguous: int
    """Number of conversations that were rendered again because several turns have equal texts."""
    num_left_out: int
    """Number of turns that are left out of the training."""
    num_malformed: int
    left_out: Mapping[int, LeftOutReason] = field(default_factory=dict)
    """Reason for which each untrained turn is left out, by number; empty in older records."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Parameters that agents sent and that were ignored, with the number of turns for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The content of a client's request to end a session, such as the session's reward."""

    reward: float | None = None
    """Reward of the whole session; None if it is pending or could not be obtained."""
    is_reward_pending: bool = False
    """Whether the reward is given later."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards by the number of the turn, in addition to the session's reward."""
    turn: int | None = None
    """Number of the turn that gets the reward; if None, `service.gateway.ends` chooses it."""
    outcome: Outcome | None = None
    """The outcome that the client states; None: the gateway decides."""
    detail: str = ""

    @property
    def digest(self) -> str:
        """A digest by which a repeated request is recognized; equal requests have equal digests."""
        content = asdict(self)
        if self.turn is None:
            # Older versions had no `turn`: a request may be repeated to a newer version.
            del content["turn"]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The final state of an ended session: status, outcome and reward."""

    status: SessionStatus
    """The final status: finished, discarded or expired."""
    outcome: Outcome
    reward: float | None
    """Reward of the whole session, in addition to `turn_rewards`; None if pending or missing."""
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards by the number of the turn."""
    judged: int | None = None
    """Number of the turn that the client named as the judged one; None if it named no turn."""
    detail: str = ""
    ended_at: float
    """Seconds since 1970."""
    reward_until: float | None = None
    """Deadline of a pending reward (seconds since 1970); None if no reward is pending."""
    digest: str = ""
    """Digest of the request that ended the session; a repeat of this request changes nothing."""
    totals: SessionTotals | None = None
    """Totals, which are kept longer than the turns; None if the turns were not read at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRefusal:
    """An agent's request that was refused because of a limit or a full context.

    The agent may continue the same conversation after the refusal. If a later turn of that
    conversation is trained, the refusal has no effect on the session's outcome. Otherwise the
    refusal decides the outcome.
    """

    outcome: Outcome
    num_turns: int | None = None
    """Number of turns that were stored or in progress at the refusal; None if unknown.

    Turns with this number or a higher number came later.
    """
    follows: int | None = None
    """Number of the newest turn that the request continued or whose reply it contained; None if
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session without its turns, as the store keeps it and as clients see it."""

    id: str
    submission_id: str
    member: int
    spec: SessionSpec
    keys: SessionKeys
    key_name: str = ""
    """Name of the client's key from which the session's keys are derived.

    It is empty if this is the first admin key, or if there is no key.
    """
    created_at: float
    """Seconds since 1970."""
    opened_at: float | None = None
    """Seconds since 1970 at which the session's group was first admitted; None before that."""
    claimed_by: str = ""
    """Name that the claiming client gave; empty if the session is unclaimed or needs no claim."""
    claimed_at: float | None = None
    limit_refusal: LimitRefusal | None = None
    """The newest request that was refused because of a limit or a full context, if any."""
    end: SessionEnd | None = None
    """The session's end, or None if it has not ended."""
    totals: SessionTotals | None = None
    """Counts over the session's turns, for a client that asks for only this session.

    None in a list and in the store, which has the counts of an ended session in `end`.
    """

    @property
    def status(self) -> SessionStatus:
        if self.end is not None:
            return self.end.status
        return SessionStatus.QUEUED if self.opened_at is None else SessionStatus.OPEN

    @property
    def tenant(self) -> str:
        """The tenant that owns the session; empty if the run itself owns it."""
        return tenant_of(self.id)

    @property
    def is_taken(self) -> bool:
        """Whether an agent may use the session, because it is claimed or needs no claim."""
        return self.spec.join_s is None or bool(self.claimed_by)

    @property
    def begun_at(self) -> float | None:
        """The time from which an agent could use the session; None if no agent can use it yet."""
        if self.opened_at is None or not self.is_taken:
            return None
        return max(self.opened_at, self.claimed_at or self.opened_at)


def session_id(submission_id: str, member: int) -> str:
    """Return a session's id. Example: session_id("prompt-9", 3) -> "prompt-9-3"."""
    return f"{submission_id}-{member}"


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
    """A change of a session: it is now known whether the client received a stored turn.

    If the client disconnected before the answer, it has not received the turn (`is_unseen`).
    """

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
