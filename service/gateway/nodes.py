"""A turn in a session's tree, and which of several equal turns a request continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.environment.protocol import Message, ToolSchema
from actors.types import BranchReason, TokenIds
from service.gateway.canonical import Link, links_of, shown_reasoning
from service.gateway.quotes import ReplyText
from service.intake.turns import SessionTurn


@dataclass(slots=True)
class Node:
    """A turn in the tree."""

    turn: SessionTurn
    parent: Node | None
    tools_key: bytes
    tools: tuple[ToolSchema, ...]
    key: bytes
    """Key of the conversation up to and including the turn's reply."""
    num_messages: int
    """Number of the conversation's messages up to and including the turn's reply."""
    first_call: int
    """Number of the conversation's calls before the turn's new messages."""
    calls: tuple[tuple[str, str], ...]
    """Id and name of each call in its new messages and its reply."""
    reason: BranchReason
    """The reason why the turn begins a sample; None if it extends one."""
    is_ambiguous: bool
    reply: ReplyText = field(init=False)
    """The turn's reply, to be searched for in later prompts."""
    root: Node = field(init=False)
    """The first turn of its conversation; it may be this turn."""
    num_in_root: int = 0
    """For a root: number of turns that continue from it, including itself."""
    num_of_task: int = 0
    """For a root: number of these turns that are not marked as auxiliary."""
    is_continued: bool = False
    """Whether a client sent its reply back, which shows that it received it."""
    is_quoting: bool | None = None
    """For a root: whether its messages quote a reply sampled before; None: not checked yet."""

    def __post_init__(self) -> None:
        self.reply = ReplyText(message=self.turn.reply, history=lambda: self.history()[:-1])
        self.root = self if self.parent is None else self.parent.root
        self.root.num_in_root += 1
        self.root.num_of_task += not self.turn.is_auxiliary

    @property
    def num_calls(self) -> int:
        return self.first_call + len(self.calls)

    @property
    def is_instructed(self) -> bool:
        """Whether the first message of its conversation came as a request's instructions."""
        return self.root.turn.is_instructed

    @property
    def is_alone(self) -> bool:
        """Whether it is the only turn of its conversation and was offered no tools."""
        return self.parent is None and self.num_in_root == 1 and not self.tools

    @property
    def is_orphan(self) -> bool:
        return self.turn.is_unseen and not self.is_continued

    def path(self) -> Iterator[Node]:
        """Yield the turns from this one back to the start of its conversation."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def prompt(self) -> tuple[TokenIds, ...]:
        """Return the pieces of its prompt."""
        pieces = [self.turn.new_token_ids]
        node = self
        while node.turn.extends_parent:
            assert node.parent is not None, "a turn that extends nothing"
            node = node.parent
            pieces += (node.turn.sampled_token_ids, node.turn.new_token_ids)
        return tuple(reversed(pieces))

    def full_ids(self) -> TokenIds:
        return np.concatenate((*self.prompt(), self.turn.sampled_token_ids))

    def history(self) -> tuple[Message, ...]:
        turns = [node.turn for node in self.path()]
        return tuple(m for turn in reversed(turns) for m in (*turn.new_messages, turn.reply))

    def call_number(self, call_id: str) -> int | None:
        """Return the number of the newest call with this id up to this turn's reply, or None."""
        for node in self.path():
            for number in range(len(node.calls) - 1, -1, -1):
                if node.calls[number][0] == call_id:
                    return node.first_call + number
        return None


def links_after(node: Node, messages: Sequence[Message]) -> list[Link]:
    return links_of(
        messages, after=node.key, num_calls=node.num_calls, call_before=node.call_number
    )


def calls_of(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    return tuple((call_id, name) for m in messages for call_id, name, _ in m.call_texts)


def choose_parent(nodes: list[Node], messages: Sequence[Message]) -> Node | None:
    """Choose the turn that a client continues among turns with equal texts; None if ambiguous.

    Three criteria are used, in this order: the client sends back the ids of the turn's calls; it
    sends back its reasoning; a client received the turn. If all remaining turns have the same token
    ids, the newest is returned.
    """
    if len(nodes) < 2:
        return nodes[0] if nodes else None
    paths = [{id(node): node for node in end.path()} for end in nodes]
    shared = set.intersection(*(set(path) for path in paths))
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
    return calls_of((own,)) == calls_of((shown,))


def _has_same_reasoning(own: Message, shown: Message) -> bool:
    said = (shown_reasoning(shown) or "").strip()
    return not said or said == (shown_reasoning(own) or "").strip()
