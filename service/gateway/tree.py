"""A session's conversations as a tree of sampled turns: it matches requests and makes samples.

A request is matched to the turns by the keys of its conversation (`canonical`). Its prompt consists
of the ids of the turn that it continues and the ids of its new messages. A prompt contains the
tree's own copies of earlier messages, not the client's. The tree keeps only the messages and ids
that each turn added, so that its memory does not grow with the number of turns times their length.
The tree can be rebuilt by adding the stored turns in their order. Called by the gateway actor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from actors.environment.protocol import Message, Role, ToolSchema
from actors.environment.sample_builder import SampleBuilder
from actors.types import BranchReason, LeftOutReason, Sample, TokenIds, Turn
from service.gateway.canonical import Link, links_of, request_digest, tools_key
from service.gateway.chat import ChatRequest, Part, Reference, RefusalCode, Refused, unknown_item
from service.gateway.nodes import Node, calls_of, choose_parent, links_after
from service.gateway.titles import (
    is_continuing,
    is_like_a_title,
    is_title,
    newest_quoted,
    topics_of,
)
from service.intake.session import LimitRefusal
from service.intake.turns import SessionTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The turn that a request continues: a copy of all values from which its prompt is made."""

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
class SessionCounts:
    """The turns of a session by their use; each turn is counted in one of the first two fields."""

    num_counted: int
    """Number of trained turns."""
    left_out: Mapping[int, LeftOutReason]
    """Untrained turns, by number and in order."""
    left_out_tokens: Mapping[LeftOutReason, int]
    """Sampled tokens of the untrained turns."""
    num_malformed: int
    """Number of trained turns whose reply is malformed."""
    num_inserted: int
    render_breaks: Mapping[str, int]
    """Number of breaks by `BreakReason`."""
    num_ambiguous: int
    """Number of conversations of trained turns that were rendered again because several turns with
    equal texts match."""


class RequestKeys(NamedTuple):
    """A request's keys, which do not depend on the session. Making them reads its whole text."""

    tools: bytes
    """Key of the tools and the template's options."""
    links: list[Link]
    """A link for each message; not used if the request names the turn that it continues."""


def request_keys(request: ChatRequest) -> RequestKeys:
    """Compute the keys of a request; may run in a thread."""
    return RequestKeys(
        tools_key(request.tools, request.template_options),
        links_of(() if request.continues else request.messages),
    )


class SessionTree:
    """The turns of one session.

    Example: if turn 1 continues turn 0, and turn 2 begins another conversation, there are two
    samples: one of turns 0 and 1, one of turn 2.
    """

    def __init__(self, session_id: str, *, leaves_titles_out: bool = False) -> None:
        """Make an empty tree.

        leaves_titles_out: titles, as docs/semantics.md describes them, are not trained.
        """
        self._session_id = session_id
        self._leaves_titles_out = leaves_titles_out
        self._nodes: list[Node] = []
        self._sampled: dict[bytes, list[Node]] = {}  # by the key up to their reply
        self._copies: dict[bytes, Message | None] = {}  # None: several that differ
        self._tools: dict[bytes, tuple[ToolSchema, ...]] = {}
        self._by_request: dict[str, int] = {}
        self._by_idempotency_key: dict[str, int] = {}
        self._by_digest: dict[str, int] = {}
        self._newest_digest = ""
        self._has_noted_requests = False

    @property
    def turns(self) -> tuple[SessionTurn, ...]:
        """The turns, in their order."""
        return tuple(node.turn for node in self._nodes)

    @property
    def num_turns(self) -> int:
        return len(self._nodes)

    @property
    def num_counted(self) -> int:
        """Number of turns that are trained if the session ends now."""
        return len(self._counted())

    def turn(self, number: int) -> SessionTurn:
        return self._nodes[number].turn

    def turn_id(self, number: int) -> str:
        return f"{self._session_id}.{number}"

    def resolved(self, request: ChatRequest) -> ChatRequest:
        """Return a request in which the parts of replies that its client named by ids are inserted.

        Raises: Refused for an id that no reply of this session has.
        """
        messages = list(request.messages)
        for reference in request.references:
            at = reference.message
            messages[at] = self._with_part(messages[at], reference)
        return replace(request, messages=tuple(messages)) if request.references else request

    def _with_part(self, message: Message, reference: Reference) -> Message:
        node = self._of_id(reference.turn_id)
        if node is None:
            raise unknown_item(reference.where)
        reply = node.turn.reply
        if reference.part is Part.CONTENT:
            return replace(message, content=reply.content)
        if reference.part is Part.REASONING and reply.reasoning:
            return replace(message, reasoning=reply.reasoning)
        if reference.part is Part.CALL and reference.number < len(reply.tool_calls):
            calls = list(message.tool_calls)
            calls[reference.call] = reply.tool_calls[reference.number]
            return replace(message, tool_calls=tuple(calls))
        raise unknown_item(reference.where)

    def find(self, request: ChatRequest, keys: RequestKeys | None = None) -> Place:
        """Find the turn that a request continues.

        Args: keys: the request's `request_keys`; None computes them here.
        Raises: Refused if the request names a turn that this session does not have.
        """
        tools, links = keys or request_keys(request)
        messages, is_ambiguous = request.messages, False
        named = self._named(request.continues) if request.continues else None
        is_new = named is not None and _has_new_instructions(request, named)
        if named is not None and named.tools_key == tools and not is_new:
            parent: Node | None = named
            links = links_after(named, messages)
        else:
            if named is not None:
                history = _with_instructions(request, named) if is_new else named.history()
                messages = (*history, *messages)
                links = links_of(messages)
            same = self._deepest(links, tools=tools)
            # A request that names a turn's items by their ids continues that turn.
            referred = {reference.turn_id for reference in request.references}
            same = [n for n in same if self.turn_id(n.turn.number) in referred] or same
            parent = choose_parent(same, messages)
            is_ambiguous = bool(same) and parent is None
            depth = 0 if parent is None else parent.num_messages
            messages, links = messages[depth:], links[depth:]
        if links:
            key = links[-1].key
        else:
            assert parent is not None, "a request without messages"
            key = parent.key
        return Place(
            parent=None if parent is None else parent.turn.number,
            tools=self._tools.get(tools, request.tools),
            template_options=request.template_options,
            is_instructed=_is_instructed(request, named)
            if parent is None
            else parent.is_instructed,
            history=() if parent is None else parent.history(),
            new_messages=self._own(messages, links, parent=parent),
            parent_prompt=() if parent is None else parent.prompt(),
            parent_sampled=None if parent is None else parent.turn.sampled_token_ids,
            is_under_other_tools=_are_under_others(self._deepest(links), tools),
            is_ambiguous=is_ambiguous,
            request_digest=request_digest(request, key=key, tools=tools),
        )

    def add(self, turn: SessionTurn) -> None:
        """Add the session's next turn, new or loaded; the calls of its reply have unique ids.

        A turn with a parent has the parent's tools and template options, whatever the request has.
        """
        assert turn.number == len(self._nodes), f"turn {turn.number} after {len(self._nodes)} turns"
        parent = None if turn.parent is None else self._nodes[turn.parent]
        messages = (*turn.new_messages, turn.reply)
        if parent is None:
            links = links_of(messages)
            key = tools_key(turn.tools, turn.template_options)
            tools = self._tools.setdefault(key, turn.tools)
        else:
            links = links_after(parent, messages)
            key, tools = parent.tools_key, parent.tools
            parent.is_continued = True
        for link in links[:-1]:
            for known in self._sampled.get(link.key, ()):
                known.is_continued = True
        node = self._node(turn, parent, links, key=key, tools=tools)
        self._nodes.append(node)
        self._keep_copies(messages, links)
        self._sampled.setdefault(node.key, []).append(node)
        self._remember_request(turn)

    def mark_unseen(self, number: int, *, is_unseen: bool) -> SessionTurn:
        """Mark whether a turn's client left before the answer; return the turn to be stored."""
        node = self._nodes[number]
        node.turn = replace(node.turn, is_unseen=is_unseen)
        return node.turn

    def note_request(self, digest: str) -> None:
        """Record a request as the newest. Call `answered` first: it needs the previous one."""
        self._newest_digest, self._has_noted_requests = digest, True

    def answered(
        self, *, request_id: str, idempotency_key: str, is_retry: bool, digest: str
    ) -> SessionTurn | None:
        """Return the turn that already answers this request; None if a turn must be sampled.

        A marked retry gets the turn of the newest request if both are equal, unless the two have
        different idempotency keys or a client has already sent the turn's reply back.
        Raises: Refused if another request had the same idempotency key.
        """
        number = self._by_request.get(request_id)
        if number is None and idempotency_key in self._by_idempotency_key:
            number = self._by_idempotency_key[idempotency_key]
            if self._nodes[number].turn.request_digest != digest:
                raise Refused(
                    RefusalCode.CONFLICT,
                    "idempotency key: got the key of a different request of this session, which "
                    f"turn {self.turn_id(number)} answers; send each request with its own key",
                )
        if number is None and is_retry and digest == self._newest_digest:
            number = self._by_digest.get(digest)
            if number is not None and self._is_another(self._nodes[number], idempotency_key):
                number = None
        return None if number is None else self._nodes[number].turn

    @staticmethod
    def _is_another(node: Node, idempotency_key: str) -> bool:
        """Return whether a marked retry is a retry of another turn than this one.

        It is if a client has sent this turn's reply back, or if the idempotency keys differ.
        """
        own = node.turn.idempotency_key
        return node.is_continued or (bool(idempotency_key) and idempotency_key != own)

    def number_of(self, request_id: str) -> int | None:
        """Return the number of the turn that answers an HTTP request, or None."""
        return self._by_request.get(request_id)

    def left_out(self) -> dict[int, LeftOutReason]:
        """Return the turns that are not trained if the session ends now, by number and in order."""
        topics = topics_of(self._nodes) if self._leaves_titles_out else {}
        found: dict[int, LeftOutReason] = {}
        for node in self._nodes:
            if node.turn.is_auxiliary:
                found[node.turn.number] = LeftOutReason.AUXILIARY
            elif node.is_orphan:
                found[node.turn.number] = LeftOutReason.UNSEEN
            elif topics and is_title(node, self._nodes, topics):
                found[node.turn.number] = LeftOutReason.TITLE
        return found

    def judged(self, named: int | None = None) -> int | None:
        """Return the number of the turn that gets the session's reward; None if nothing is trained.

        This is the named turn if it is trained. Otherwise it is the newest trained turn of a
        conversation that has another turn, or whose prompt quotes a sampled reply. If there is no
        such turn, it is the newest trained turn with the longest prompt.
        """
        node = self._judged(self._counted(), named)
        return None if node is None else node.turn.number

    def last_of_main(self, named: int | None = None) -> SessionTurn | None:
        """Return the newest trained turn of the judged turn's conversation, or None."""
        counted = self._counted()
        judged = self._judged(counted, named)
        if judged is None:
            return None
        return next(n.turn for n in reversed(counted) if n.root is judged.root)

    def follows(self, place: Place) -> int | None:
        """Return the number of the turn that a request continues or whose reply its messages quote.

        Of several quoted turns, return the newest. Return None if the request follows no turn.
        """
        if place.parent is not None:
            return place.parent
        found = newest_quoted(place.new_messages, self._nodes)
        return None if found is None else found.turn.number

    def is_ended_by(self, refusal: LimitRefusal, named: int | None = None) -> bool:
        """Return whether a refused request is the last event of the judged conversation.

        named: as in `judged`.
        """
        if refusal.num_turns is None:
            return True
        counted = self._counted()
        judged = self._judged(counted, named)
        later = [node for node in counted if node.turn.number >= refusal.num_turns]
        if judged is None or not all(is_like_a_title(node, self._nodes) for node in later):
            return False
        if named is not None:
            return refusal.follows is not None and self._nodes[refusal.follows].root is judged.root
        return refusal.follows is not None or not is_continuing(judged, self._nodes)

    def num_prompt_tokens(self, number: int) -> int:
        return sum(int(piece.shape[0]) for piece in self._nodes[number].prompt())

    def prompt_ids(self, number: int) -> TokenIds:
        """Return the whole prompt of a turn, [P] int32."""
        return np.concatenate(self._nodes[number].prompt())

    def full_ids(self, number: int) -> TokenIds:
        """Return the prompt and the sampled tokens of a turn, [P + A] int32."""
        return self._nodes[number].full_ids()

    def samples(
        self,
        trajectory_id: str,
        *,
        reward: float | None = None,
        components: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        judged: int | None = None,
    ) -> tuple[Sample, ...]:
        """Return the training samples of the trained turns.

        Args: reward, components: the session's; the judged turn gets them, in addition to its own
        reward. turn_rewards: by the number of the turn; those of untrained turns are ignored.
        judged: the number that the client named, as in `judged`.
        """
        builder = SampleBuilder(trajectory_id)
        counted, by_turn = self._counted(), turn_rewards or {}
        judged_node = self._judged(counted, judged)
        for node in counted:
            turn, is_judged = node.turn, node is judged_node
            builder.add(
                Turn(
                    prompt_token_ids=np.concatenate(node.prompt()),
                    sampled_token_ids=turn.sampled_token_ids,
                    logprobs=turn.logprobs,
                    finish_reason=turn.finish_reason,
                    version_spans=turn.version_spans,
                    reward=by_turn.get(turn.number, 0.0) + ((reward or 0.0) if is_judged else 0.0),
                    reward_components=dict(components or {}) if is_judged else {},
                    is_malformed=turn.is_malformed,
                    expert_indices=turn.expert_indices,
                ),
                reason=node.reason,
            )
        return builder.samples()

    def counts(self) -> SessionCounts:
        """Count the turns by their use, as if the session ended now."""
        counted = self._counted()
        breaks = [n.turn.break_reason for n in counted if n.turn.break_reason is not None]
        left_out = self.left_out()
        left_out_tokens: Counter[LeftOutReason] = Counter()
        for node in self._nodes:
            if (reason := left_out.get(node.turn.number)) is not None:
                left_out_tokens[reason] += node.turn.sampled_token_ids.shape[0]
        return SessionCounts(
            num_counted=len(counted),
            left_out=left_out,
            left_out_tokens=dict(left_out_tokens),
            num_malformed=sum(node.turn.is_malformed for node in counted),
            num_inserted=sum(node.turn.num_inserted for node in counted),
            render_breaks=Counter(reason.value for reason in breaks),
            num_ambiguous=sum(node.is_ambiguous for node in counted),
        )

    def _of_id(self, turn_id: str) -> Node | None:
        session_id, _, number = turn_id.rpartition(".")
        is_number = number.isascii() and number.isdecimal() and len(number) < 10
        if session_id == self._session_id and is_number and int(number) < len(self._nodes):
            return self._nodes[int(number)]
        return None

    def _named(self, turn_id: str) -> Node:
        if (node := self._of_id(turn_id)) is not None:
            return node
        raise Refused(
            RefusalCode.INVALID_REQUEST,
            "previous_response_id: no response of this session has this id; send the id of a "
            "response of this session, or leave it out and send the whole conversation",
            param="previous_response_id",
        )

    def _deepest(self, links: Sequence[Link], *, tools: bytes | None = None) -> list[Node]:
        """Return the turns whose reply is the last sampled reply of a conversation.

        Several turns are returned if their conversations have equal texts.
        Args: links: the messages. tools: key of the tools that a turn must have; None accepts any
        tools.
        """
        for link in reversed(links):
            known = self._sampled.get(link.key, ())
            if found := [node for node in known if tools is None or node.tools_key == tools]:
                return found
        return []

    def _own(
        self, messages: Sequence[Message], links: Sequence[Link], *, parent: Node | None
    ) -> tuple[Message, ...]:
        """Return the tree's copies of a client's messages, with the tree's own ids of calls."""
        path = [] if parent is None else [*parent.path()]
        calls = [call for node in reversed(path) for call in node.calls]
        found = []
        for message, link in zip(messages, links, strict=True):
            own = self._copies.get(link.key) or message
            if link.answers is not None:
                call_id, name = calls[link.answers]
                own = replace(own, tool_call_id=call_id, name=name)
            calls += calls_of((own,))
            found.append(own)
        return tuple(found)

    def _node(
        self,
        turn: SessionTurn,
        parent: Node | None,
        links: Sequence[Link],
        *,
        key: bytes,
        tools: tuple[ToolSchema, ...],
    ) -> Node:
        known = self._deepest(links[:-1])
        if turn.break_reason is not None:
            reason = turn.break_reason.branch_reason
        elif _are_under_others(known, key):
            reason = BranchReason.TOOLS_CHANGED
        else:
            reason = BranchReason.HISTORY_REWRITTEN
        return Node(
            turn=turn,
            parent=parent,
            tools_key=key,
            tools=tools,
            key=links[-1].key,
            num_messages=len(links) + (0 if parent is None else parent.num_messages),
            first_call=0 if parent is None else parent.num_calls,
            calls=calls_of((*turn.new_messages, turn.reply)),
            reason=reason,
            is_ambiguous=parent is None and any(node.tools_key == key for node in known),
        )

    def _keep_copies(self, messages: Sequence[Message], links: Sequence[Link]) -> None:
        for message, link in zip(messages, links, strict=True):
            self._copies.setdefault(link.key, message)
        if self._copies[links[-1].key] != messages[-1]:
            self._copies[links[-1].key] = None

    def _remember_request(self, turn: SessionTurn) -> None:
        for names, name in (
            (self._by_request, turn.request_id),
            (self._by_idempotency_key, turn.idempotency_key),
            (self._by_digest, turn.request_digest),
        ):
            if name:
                names[name] = turn.number
        if not self._has_noted_requests:
            self._newest_digest = turn.request_digest

    def _counted(self) -> list[Node]:
        left_out = self.left_out()
        return [node for node in self._nodes if node.turn.number not in left_out]

    def _judged(self, counted: Sequence[Node], named: int | None) -> Node | None:
        for node in counted:
            if node.turn.number == named:
                return node
        for node in reversed(counted):
            if is_continuing(node, self._nodes):
                return node
        return max(
            counted,
            key=lambda node: (self.num_prompt_tokens(node.turn.number), node.turn.number),
            default=None,
        )


def _has_new_instructions(request: ChatRequest, named: Node) -> bool:
    """Return whether a request replaces the instructions of the conversation that it continues."""
    if request.instructions is None:
        return False
    history = named.history()
    # A first message with the same text counts as these instructions, however it came.
    num_first = max(_num_instructions(named, history), bool(request.instructions))
    began, begins = history[:num_first], _instructions(request)
    return [link.key for link in links_of(began)] != [link.key for link in links_of(begins)]


def _with_instructions(request: ChatRequest, named: Node) -> tuple[Message, ...]:
    """Return the history of a turn with the request's instructions instead of its own."""
    history = named.history()
    return (*_instructions(request), *history[_num_instructions(named, history) :])


def _instructions(request: ChatRequest) -> tuple[Message, ...]:
    text = request.instructions
    return (Message(role=Role.SYSTEM, content=text),) if text else ()


def _num_instructions(named: Node, history: tuple[Message, ...]) -> int:
    """Return the number of first messages that come from a request's `instructions`: 0 or 1."""
    return int(named.is_instructed and history[0].role is Role.SYSTEM)


def _is_instructed(request: ChatRequest, named: Node | None) -> bool:
    """Return whether a conversation that a request begins has instructions as its first message.

    named: the turn that the request continues, or None.
    """
    if request.instructions is None:
        return named is not None and named.is_instructed
    return bool(request.instructions)


def _are_under_others(nodes: Sequence[Node], tools: bytes) -> bool:
    return bool(nodes) and all(node.tools_key != tools for node in nodes)
