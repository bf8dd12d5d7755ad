"""Turns that only make a title, and conversations that quote earlier replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.environment.protocol import Message, Role
from service.gateway.nodes import Node
from service.gateway.quotes import PromptText, user_texts, values_of


def topics_of(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Return the roots by the first user text in them."""
    found: dict[str, list[Node]] = {}
    for root in nodes:
        if root.parent is None and (texts := user_texts(root.turn.new_messages)):
            found.setdefault(texts[0], []).append(root)
    return found


def is_title(node: Node, nodes: Sequence[Node], topics: Mapping[str, list[Node]]) -> bool:
    """Return whether a turn's only purpose is the title of a conversation that continued."""
    if not node.is_alone or _is_quoting(node, nodes) or _is_used(node, nodes):
        return False
    roots = (each for text in user_texts(node.turn.new_messages) for each in topics.get(text, ()))
    return any(
        root is not node and is_continuing(root, nodes) and not _starts_over(node, root)
        for root in roots
    )


def _starts_over(node: Node, root: Node) -> bool:
    """Return whether the conversation at `root` repeats the one that consists of `node`.

    This is true in two cases. In the first case, both have the same tools, and the messages at
    `root` begin with those of `node`, followed by nothing or by a message of the assistant. In the
    second case, an assistant message at `root` quotes the reply of `node`: the client may have
    rewritten the reply.
    """
    own, others = node.turn.new_messages, root.turn.new_messages
    if node.tools_key == root.tools_key and others[: len(own)] == own:
        rest = others[len(own) :]
        if not rest or rest[0].role is Role.ASSISTANT:
            return True
    replies = [message for message in others if message.role is Role.ASSISTANT]
    return PromptText(replies).quotes(node.reply)


def is_like_a_title(node: Node, nodes: Sequence[Node]) -> bool:
    """Return whether a turn may be a title.

    Such a turn is the only one of its conversation, was offered no tools, quotes no sampled
    reply, and its messages contain the first user text of an earlier conversation.
    """
    if not node.is_alone or _is_quoting(node, nodes):
        return False
    asked = "\n".join(user_texts(node.turn.new_messages))
    before = [each for each in nodes[: node.turn.number] if each.parent is None]
    # A conversation that begins again with the same messages is a new try of the task.
    if any(root.turn.new_messages == node.turn.new_messages for root in before):
        return False
    return any(text in asked for root in before for text in user_texts(root.turn.new_messages)[:1])


def _is_used(node: Node, nodes: Sequence[Node]) -> bool:
    """Return whether the whole reply is a later message, or a value in a later call."""
    said = node.turn.reply.content.strip()
    later = nodes[node.turn.number + 1 :]
    messages = (m for each in later for m in (*each.turn.new_messages, each.turn.reply))
    return bool(said) and any(value == said for value in values_of(messages))


def is_continuing(node: Node, nodes: Sequence[Node]) -> bool:
    """Return whether a turn's conversation has another turn, or quotes an earlier reply.

    Auxiliary turns of the conversation do not count as another turn.
    """
    return node.parent is not None or node.root.num_of_task > 1 or _is_quoting(node.root, nodes)


def _is_quoting(root: Node, nodes: Sequence[Node]) -> bool:
    if root.is_quoting is None:
        found = newest_quoted(root.turn.new_messages, nodes[: root.turn.number])
        root.is_quoting = found is not None
    return root.is_quoting


def newest_quoted(messages: Sequence[Message], nodes: Sequence[Node]) -> Node | None:
    """Return the newest turn whose reply, or a part of it, is in messages."""
    prompt = PromptText(messages)
    found = (node for node in reversed(nodes) if prompt.quotes(node.reply))
    return next(found, None)
