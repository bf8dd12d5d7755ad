"""A session's turns as a tree: find the turn that a new request continues.

The tree finds this turn by digests ("keys") of the request's conversation (`canonical`). The prompt
is the token ids of this turn, then the ids of the request's new messages. Earlier messages in the
prompt are the tree's own copies, not the client's. For each turn, the tree keeps only the messages
and ids that the turn added. The tree can be rebuilt by adding the stored turns in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from actors.environment.protocol import Message, Role, ToolSchema
from actors.types import BranchReason, TokenIds
from service.gateway.canonical import (
    Link,
    links_of,
    request_digest,
    shown_reasoning,
    tools_key,
)
from service.gateway.chat import ChatRequest, Reference, RefusalCode, Refused, unknown_item
from service.gateway.quotes import ReplyText
from service.intake.session import SessionTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A request's position in the tree: the turn that it continues, called its parent.

    A place has all that `sampling.next_prompt` needs, so the prompt is made without the tree.
    """

    parent: int | None
    """The number of the turn that the request continues; None: it begins a conversation."""
    tools: tuple[ToolSchema, ...]
    """The request's tools, in the order in which a request of the session first declared them."""
    template_options: Mapping[str, Any]
    is_instructed: bool
    """Whether the first message of the conversation came from the field `instructions` of a request
    (Responses API). A turn with a parent has the parent's value."""
    history: tuple[Message, ...]
    """Messages up to and including the parent's reply; empty without a parent."""
    new_messages: tuple[Message, ...]
    """The request's messages after `history`, with the tree's ids of calls, not the client's; may
    be empty."""
    parent_prompt: tuple[TokenIds, ...] = ()
    """The token ids of the parent's prompt, in pieces to be joined; empty without a parent."""
    parent_sampled: TokenIds | None = None
    """[A] int32, the sampled ids of the parent's reply; None without a parent."""
    request_digest: str
    """Digest of the request; the same request at the same position has the same digest."""


@dataclass(slots=True)
class Node:
    """A turn in the tree."""

    turn: SessionTurn
    parent: Node | None
    tools_key: bytes
    tools: tuple[ToolSchema, ...]
    key: bytes
    """Digest of the conversation up to and including the turn's reply."""
    num_messages: int
    """Number of the conversation's messages up to and including the turn's reply."""
    first_call: int
    """Number of the conversation's tool calls before the turn's new messages."""
    calls: tuple[tuple[str, str], ...]
    """Id and name of each tool call in the turn's new messages and its reply."""
    reason: BranchReason
    """The reason why the turn begins a training sample; used only if the turn extends no sample."""
    is_ambiguous: bool
    """Whether several turns with different token ids match, so that the turn continues none."""
    reply: ReplyText = field(init=False)
    """The turn's reply, to be searched for in later prompts."""
    root: Node = field(init=False)
    """The first turn of the conversation, which may be this turn."""
    num_in_root: int = 0
    """Number of turns that have this turn as root, including itself; 0 if it is not a root."""
    num_of_task: int = 0
    """Number of the turns in `num_in_root` that are not marked as auxiliary."""
    is_continued: bool = False
    """Whether a client sent the turn's reply back, which shows that the client received it."""
    is_quoting: bool | None = None
    """Only for a root: whether its messages quote an earlier reply. None: not checked yet."""

    def __post_init__(self) -> None:
        self.reply = ReplyText(self.turn.reply, lambda: self.history()[:-1])
        self.root = self if self.parent is None else self.parent.root
        self.root.num_in_root += 1
        self.root.num_of_task += not self.turn.is_auxiliary

    @property
    def num_calls(self) -> int:
        return self.first_call + len(self.calls)

    @property
    def is_instructed(self) -> bool:
        """Whether the first message of the conversation came from a request's `instructions`."""
        return self.root.turn.is_instructed

    @property
    def is_alone(self) -> bool:
        """Whether the turn is the only one of its conversation, and was offered no tools."""
        return self.parent is None and self.num_in_root == 1 and not self.tools

    @property
    def is_orphan(self) -> bool:
        return self.turn.is_unseen and not self.is_continued

    def path(self) -> Iterator[Node]:
        """Yield the turns from this turn back to the start of the conversation."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def prompt(self) -> tuple[TokenIds, ...]:
        """Return the token ids of the turn's whole prompt, in pieces to be joined in this order."""
        pieces = [self.turn.new_token_ids]
        node = self
        while node.turn.extends_parent:
            assert node.parent is not None, "a turn that extends nothing"
            node = node.parent
            pieces += (node.turn.sampled_token_ids, node.turn.new_token_ids)
        return tuple(reversed(pieces))

    @property
    def num_prompt_tokens(self) -> int:
        return sum(int(piece.shape[0]) for piece in self.prompt())

    def full_ids(self) -> TokenIds:
        """Return the turn's prompt and its sampled tokens, [P + A] int32."""
        return np.concatenate((*self.prompt(), self.turn.sampled_token_ids))

    def history(self) -> tuple[Message, ...]:
        turns = [node.turn for node in self.path()]
        return tuple(m for turn in reversed(turns) for m in (*turn.new_messages, turn.reply))

    def call_number(self, call_id: str) -> int | None:
        """Return the index of the newest call with this id among the conversation's tool calls.

        Only calls up to this turn's reply are searched. Return None if none of them has the id.
        """
        for node in self.path():
            for number in range(len(node.calls) - 1, -1, -1):
                if node.calls[number][0] == call_id:
                    return node.first_call + number
        return None


class RequestKeys(NamedTuple):
    """Digests of a request's tools and messages, which do not depend on the session.

    Computing them reads the request's whole text.
    """

    tools: bytes
    """Digest of the tools and the chat template's options."""
    links: list[Link]
    """A link for each message; empty if the request names the turn that it continues."""


def request_keys(request: ChatRequest) -> RequestKeys:
    """Compute the digests of a request's tools and messages; may run in a thread."""
    return RequestKeys(
        tools_key(request.tools, request.template_options),
        links_of(() if request.continues else request.messages),
    )


class SessionTree:
    """The turns of one session, each linked to the turn that it continues."""

    def __init__(self, session_id: str, *, leaves_titles_out: bool = False) -> None:
        """Make an empty tree.

        leaves_titles_out: whether turns that only make a title for a conversation are not trained
        (sessions.titles, docs/semantics.md).
        """
        self._session_id = session_id
        self.leaves_titles_out = leaves_titles_out
        self.nodes: list[Node] = []
        """The turns, in their order; only the tree changes the list."""
        # `_sampled` has turns by the key of the conversation up to and including their reply.
        # `_copies` has messages by the key of the conversation up to and including the message. The
        # value is None if the key belongs to several messages that differ.
        self._sampled: dict[bytes, list[Node]] = {}
        self._copies: dict[bytes, Message | None] = {}
        self._tools: dict[bytes, tuple[ToolSchema, ...]] = {}
        self._by_request: dict[str, int] = {}
        self._by_idempotency_key: dict[str, int] = {}
        self._by_digest: dict[str, int] = {}
        self._newest_digest = ""
        self._has_noted_requests = False

    @property
    def turns(self) -> tuple[SessionTurn, ...]:
        """The turns, in their order."""
        return tuple(node.turn for node in self.nodes)

    @property
    def num_turns(self) -> int:
        return len(self.nodes)

    def turn(self, number: int) -> SessionTurn:
        return self.nodes[number].turn

    def turn_id(self, number: int) -> str:
        return f"{self._session_id}.{number}"

    def resolved(self, request: ChatRequest) -> ChatRequest:
        """Fill in the parts of a request that its client named only by an id, and return a copy.

        A client can name the tools of an earlier turn, and parts of earlier replies. Raises:
        Refused for an id that no reply of this session has.
        """
        if request.keeps_tools:
            request = replace(request, tools=self._named(request).tools)
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
        if reference.part == "content":
            return replace(message, content=reply.content)
        if reference.part == "reasoning" and reply.reasoning:
            return replace(message, reasoning=reply.reasoning)
        if reference.part == "call" and reference.number < len(reply.tool_calls):
            calls = list(message.tool_calls)
            calls[reference.call] = reply.tool_calls[reference.number]
            return replace(message, tool_calls=tuple(calls))
        raise unknown_item(reference.where)

    def find(self, request: ChatRequest, keys: RequestKeys | None = None) -> Place:
        """Find the turn that a request continues.

        Args: keys: the result of `request_keys` for this request; None: compute them here.
        Raises: Refused if the request names a turn that this session does not have.
        """
        tools, links = keys or request_keys(request)
        messages = request.messages
        named = self._named(request) if request.continues else None
        is_new = named is not None and _has_new_instructions(request, named)
        if named is not None and named.tools_key == tools and not is_new:
            parent: Node | None = named
            links = _links_after(named, messages)
        else:
            if named is not None:
                history = _with_instructions(request, named) if is_new else named.history()
                messages = (*history, *messages)
                links = links_of(messages)
            same = self._deepest(links, tools=tools)
            # A request that names a turn's items by their ids continues that turn.
            referred = {reference.turn_id for reference in request.references}
            same = [n for n in same if self.turn_id(n.turn.number) in referred] or same
            parent = _choose_parent(same, messages)
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
            request_digest=request_digest(request, key=key, tools=tools),
        )

    def add(self, turn: SessionTurn) -> None:
        """Add the session's next turn, which was sampled now or loaded from the store.

        The calls in its reply must have unique ids. A turn with a parent gets the parent's tools
        and template options, whatever the request has.
        """
        assert turn.number == len(self.nodes), f"turn {turn.number} after {len(self.nodes)} turns"
        parent = None if turn.parent is None else self.nodes[turn.parent]
        messages = (*turn.new_messages, turn.reply)
        if parent is None:
            links = links_of(messages)
            key = tools_key(turn.tools, turn.template_options)
            tools = self._tools.setdefault(key, turn.tools)
        else:
            links = _links_after(parent, messages)
            key, tools = parent.tools_key, parent.tools
            parent.is_continued = True
        for link in links[:-1]:
            for known in self._sampled.get(link.key, ()):
                known.is_continued = True
        node = self._node(turn, parent, links, key=key, tools=tools)
        self.nodes.append(node)
        self._keep_copies(messages, links)
        self._sampled.setdefault(node.key, []).append(node)
        self._remember_request(turn)

    def mark_unseen(self, number: int, *, is_unseen: bool) -> None:
        """Record whether a turn is unseen: its client left before it received the answer."""
        node = self.nodes[number]
        node.turn = replace(node.turn, is_unseen=is_unseen)

    def note_request(self, digest: str) -> None:
        """Record the digest of the newest request.

        Call `answered` for this request first, because `answered` compares the request with the
        digest of the previous request.
        """
        self._newest_digest, self._has_noted_requests = digest, True
        # If this request fails, its retry must not get the turn of an earlier, equal request.
        self._by_digest.pop(digest, None)

    def answered(
        self, *, request_id: str, idempotency_key: str, is_retry: bool, digest: str
    ) -> SessionTurn | None:
        """Return the turn that already answers this request; None if a turn must be sampled.

        The first match is returned:
        1. The turn of an earlier request with the same id.
        2. The turn of an earlier request with the same idempotency key.
        3. Only for a retry: the turn of the session's newest request, if that request has the same
           digest and `_is_another` is false for the turn.
        Raises: Refused if a different request had the same idempotency key.
        """
        number = self._by_request.get(request_id)
        if number is None and idempotency_key in self._by_idempotency_key:
            number = self._by_idempotency_key[idempotency_key]
            if self.nodes[number].turn.request_digest != digest:
                raise Refused(
                    RefusalCode.CONFLICT,
                    "idempotency key: got the key of a different request of this session, which "
                    f"turn {self.turn_id(number)} answers; send each request with its own key",
                )
        if number is None and is_retry and digest == self._newest_digest:
            number = self._by_digest.get(digest)
            if number is not None and self._is_another(self.nodes[number], idempotency_key):
                number = None
        return None if number is None else self.nodes[number].turn

    @staticmethod
    def _is_another(node: Node, idempotency_key: str) -> bool:
        """Return whether a request that is marked as a retry still needs a new turn, not `node`."""
        own = node.turn.idempotency_key
        # If `node` is continued, a client has received the reply of `node`.
        return node.is_continued or (bool(idempotency_key) and idempotency_key != own)

    def number_of(self, request_id: str) -> int | None:
        """Return the number of the turn that answers an HTTP request; None if no turn does."""
        return self._by_request.get(request_id)

    def _of_id(self, turn_id: str) -> Node | None:
        session_id, _, number = turn_id.rpartition(".")
        is_number = number.isascii() and number.isdecimal() and len(number) < 10
        if session_id == self._session_id and is_number and int(number) < len(self.nodes):
            return self.nodes[int(number)]
        return None

    def _named(self, request: ChatRequest) -> Node:
        if (node := self._of_id(request.continues)) is not None:
            return node
        where = "thread.previous_message_id" if request.keeps_tools else "previous_response_id"
        raise Refused(
            RefusalCode.INVALID_REQUEST,
            f"{where}: no answer of this session has this id; send the id of an answer of this "
            "session, or send the whole conversation without this field",
            param=where,
        )

    def _deepest(self, links: Sequence[Link], *, tools: bytes | None = None) -> list[Node]:
        """Return the turns that sampled a conversation's newest reply by this session.

        There are several if this session sampled the same reply again after the same messages.
        links: the digests of the conversation's messages, oldest first. tools: a digest of tools;
        turns with other tools are ignored.
        """
        for link in reversed(links):
            known = self._sampled.get(link.key, ())
            if found := [node for node in known if tools is None or node.tools_key == tools]:
                return found
        return []

    def _own(
        self, messages: Sequence[Message], links: Sequence[Link], *, parent: Node | None
    ) -> tuple[Message, ...]:
        """Return a request's new messages, each replaced by the tree's copy if the tree has one.

        The copy may differ from the client's message, for example in the ids of tool calls.
        parent: the turn that the messages follow; None at the start of a conversation.
        """
        path = [] if parent is None else [*parent.path()]
        calls = [call for node in reversed(path) for call in node.calls]
        found = []
        for message, link in zip(messages, links, strict=True):
            # If the tree's copies differ from each other, the client's message stays.
            own = self._copies.get(link.key) or message
            if link.answers is not None:
                call_id, name = calls[link.answers]
                own = replace(own, tool_call_id=call_id, name=name)
            calls += _calls_of((own,))
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
            calls=_calls_of((*turn.new_messages, turn.reply)),
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


def _has_new_instructions(request: ChatRequest, named: Node) -> bool:
    if request.instructions is None:
        return False
    history = named.history()
    # A first message with the same text counts as these instructions, however it came.
    num_first = max(_num_instructions(named, history), bool(request.instructions))
    began, begins = history[:num_first], _instructions(request)
    return [link.key for link in links_of(began)] != [link.key for link in links_of(begins)]


def _with_instructions(request: ChatRequest, named: Node) -> tuple[Message, ...]:
    history = named.history()
    return (*_instructions(request), *history[_num_instructions(named, history) :])


def _instructions(request: ChatRequest) -> tuple[Message, ...]:
    text = request.instructions
    return (Message(role=Role.SYSTEM, content=text),) if text else ()


def _num_instructions(named: Node, history: tuple[Message, ...]) -> int:
    return int(named.is_instructed and history[0].role is Role.SYSTEM)


def _is_instructed(request: ChatRequest, named: Node | None) -> bool:
    """Return whether a new conversation starts with a message made from the field `instructions`.

    If the request lacks the field, the earlier turn `named`, whose id the request gives, decides.
    """
    if request.instructions is None:
        return named is not None and named.is_instructed
    return bool(request.instructions)


def _are_under_others(nodes: Sequence[Node], tools: bytes) -> bool:
    return bool(nodes) and all(node.tools_key != tools for node in nodes)


def _links_after(node: Node, messages: Sequence[Message]) -> list[Link]:
    return links_of(
        messages, after=node.key, num_calls=node.num_calls, call_before=node.call_number
    )


def _calls_of(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    return tuple((call_id, name) for m in messages for call_id, name, _ in m.call_texts)


def _choose_parent(nodes: list[Node], messages: Sequence[Message]) -> Node | None:
    """Choose, among turns with equal texts, the turn that a client continues; None if ambiguous.

    Three filters narrow the choice. A filter that would remove all turns is skipped.
    1. The tool calls in the client's `messages` have the ids that the turn gave to these calls.
    2. The reasoning in `messages` is the turn's reasoning, or is missing.
    3. A client received the turn's reply.
    If all remaining turns have the same token ids, the newest is returned.
    """
    if len(nodes) < 2:
        return nodes[0] if nodes else None
    paths = [{id(node): node for node in end.path()} for end in nodes]
    shared = set.intersection(*(set(path) for path in paths))
    # These filters also test a candidate's earlier turns, except turns that all candidates share.
    for agrees in (_has_same_ids, _has_same_reasoning):
        agreeing = [
            end
            for end in nodes
            if all(
                agrees(node.turn.reply, messages[node.num_messages - 1])
                for node in end.path()
                if id(node) not in shared
            )
        ]
        nodes = agreeing or nodes
    nodes = [node for node in nodes if not node.is_orphan] or nodes
    ids = nodes[-1].full_ids()
    is_same = all(np.array_equal(node.full_ids(), ids) for node in nodes[:-1])
    return nodes[-1] if is_same else None


def _has_same_ids(own: Message, shown: Message) -> bool:
    return _calls_of((own,)) == _calls_of((shown,))


def _has_same_reasoning(own: Message, shown: Message) -> bool:
    said = (shown_reasoning(shown) or "").strip()
    return not said or said == (shown_reasoning(own) or "").strip()
