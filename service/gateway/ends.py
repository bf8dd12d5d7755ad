"""The rules by which sessions end, and by which an ended session becomes a trajectory.

The rules decide the outcome, which turns are trained, and which of them gets the session's reward.
The rules compare texts to find turns that only make a title, and conversations that quote a reply.
The functions have no effects, except that `_is_quoting` stores its result in the node.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from actors.environment.protocol import Message, Role
from actors.environment.sample_builder import SampleBuilder
from actors.types import (
    PLAYED_OUT,
    TRUNCATIONS,
    FinishReason,
    LeftOutReason,
    Outcome,
    RolloutAssignment,
    Sample,
    Timings,
    Trajectory,
    Turn,
)
from service.api.problems import shown
from service.gateway.chat import RefusalCode, Refused, unavailable
from service.gateway.quotes import PromptText, strings_of, user_texts, values_of
from service.gateway.tree import Node, Place, SessionTree
from service.intake.session import (
    LimitRefusal,
    SessionEnd,
    SessionStatus,
    SessionTotals,
    StoredSession,
)

# Largest number of stored names of ignored parameters, because clients choose the names freely.
MAX_IGNORED_NAMES = 64
# Outcomes with which a missing reward is an error.
GRADED = PLAYED_OUT | TRUNCATIONS
_WHY_LEFT_OUT = {
    LeftOutReason.AUXILIARY: "the agent marked the call as auxiliary",
    LeftOutReason.UNSEEN: "its client left before the answer",
    LeftOutReason.TITLE: "it is a title, and sessions.titles is leave_out",
}


def broken_off(status: SessionStatus, why: str, *, at: float) -> SessionEnd:
    """Return the end of a session that expired or was discarded before its client finished it.

    why: text for people. at: time of the end, in seconds since 1970.
    """
    is_expired = status is SessionStatus.EXPIRED
    return SessionEnd(
        status=status,
        outcome=Outcome.WALL_TIMEOUT if is_expired else Outcome.CANCELLED,
        reward=None,
        detail=why,
        ended_at=at,
    )


def overdue(
    stored: StoredSession, *, last_request_at: float, is_sampling: bool, now: float
) -> SessionEnd | None:
    """Return the end of a session that has exceeded a time limit, or None if it has not.

    last_request_at, now: seconds since 1970. is_sampling: whether a turn is being sampled; the
    session is then not idle.
    """
    if stored.end is not None:
        until = stored.end.reward_until
        if until is None or now < until:
            return None
        return replace(stored.end, reward_until=None, detail="no reward came in time")
    if stored.opened_at is None:
        return None
    join_s, begun_at = stored.spec.join_s, stored.begun_at
    if begun_at is None:
        if join_s is None or now < stored.opened_at + join_s:
            return None
        why = f"no agent claimed it within {join_s:g} s"
        return broken_off(SessionStatus.DISCARDED, why, at=now)
    if now >= begun_at + stored.spec.ttl_s:
        why = f"it was not finished within {stored.spec.ttl_s:g} s"
    elif not is_sampling and now >= last_request_at + stored.spec.idle_s:
        why = f"it had no request for {stored.spec.idle_s:g} s"
    else:
        return None
    return broken_off(SessionStatus.EXPIRED, why, at=now)


def settled(end: SessionEnd, tree: SessionTree) -> SessionEnd:
    """Return a session's end with the outcome that its trajectory gets.

    The outcome becomes EMPTY if a finished session has no trained turn. It becomes REWARD_ERROR if
    a graded session has no reward, and none is pending.
    """
    if end.status is SessionStatus.FINISHED and not trained(tree):
        why = end.detail or "it has no trained turn"
        return replace(end, outcome=Outcome.EMPTY, detail=why)
    if end.outcome in GRADED and end.reward is None and end.reward_until is None:
        why = end.detail or "it was finished without a reward"
        return replace(end, outcome=Outcome.REWARD_ERROR, detail=why)
    return end


def seen_outcome(tree: SessionTree, refusal: LimitRefusal | None, named: int | None) -> Outcome:
    """Derive a session's outcome from its turns. Use this if the client states no outcome.

    Args: refusal: the session's newest request that was refused because of a limit, if any. named:
    number of the turn to which the client gave the session's reward; None if the client named no
    turn.
    """
    counted = trained(tree)
    judged = judged_of(tree, counted, named)
    if judged is None:
        return Outcome.EMPTY
    if refusal is not None and _is_ended_by(tree, refusal, counted, judged, named):
        return refusal.outcome
    last = next(node.turn for node in reversed(counted) if node.root is judged.root)
    if last.finish_reason is FinishReason.LENGTH:
        return Outcome.TRUNCATED_TOKENS
    return Outcome.COMPLETED


def _is_ended_by(
    tree: SessionTree,
    refusal: LimitRefusal,
    counted: Sequence[Node],
    judged: Node,
    named: int | None,
) -> bool:
    """Return whether a refused request ended the session, and so decides the session's outcome.

    A request does not end the session if a later trained turn is not a title. A request outside the
    rewarded conversation does not end the session either.
    counted: the trained turns. judged: the rewarded turn. named: the number that the client gave.
    """
    if refusal.num_turns is None:
        return True
    later = [node for node in counted if node.turn.number >= refusal.num_turns]
    alone = refusal.follows is None
    if not all(_is_like_a_title(node, tree.nodes, is_shorter=alone) for node in later):
        return False
    if named is not None:
        return refusal.follows is not None and tree.nodes[refusal.follows].root is judged.root
    # If no turn is named, a request that follows any turn belongs to the rewarded conversation.
    return refusal.follows is not None or not _is_continuing(judged, tree.nodes)


def check_turns(tree: SessionTree, *, turn_rewards: Mapping[int, float], named: int | None) -> None:
    """Check that all turns that a client rewards exist and are trained. Raises: Refused.

    Args: turn_rewards: the rewards of single turns, by the number of the turn.
    named: number of the turn to which the client gave the session's reward; None if the client
    named no turn.
    """
    num_turns, without = tree.num_turns, left_out(tree)
    for param, numbers in (
        ("turn_rewards", sorted(turn_rewards)),
        ("turn", [] if named is None else [named]),
    ):
        if unknown := [number for number in numbers if not 0 <= number < num_turns]:
            raise Refused(
                RefusalCode.INVALID_REQUEST,
                f"{param} names turns {unknown[:8]}, expected turns of the session, whose numbers "
                f"are below {num_turns}",
                param=param,
            )
        for number in numbers:
            if (reason := without.get(number)) is not None:
                raise Refused(
                    RefusalCode.INVALID_REQUEST,
                    f"{param} names turn {number}, which is not trained ({reason}: "
                    f"{_WHY_LEFT_OUT[reason]}), expected trained turns; reward another turn",
                    param=param,
                )


def totals_of(tree: SessionTree) -> SessionTotals:
    """Count a session's turns and sampled tokens, as the session's state shows them."""
    counted, without = trained(tree), left_out(tree)
    ignored = Counter(name for turn in tree.turns for name in turn.ignored)
    return SessionTotals(
        num_turns=tree.num_turns,
        num_sampled_tokens=sum(turn.num_sampled for turn in tree.turns),
        num_ambiguous=sum(node.is_ambiguous for node in counted),
        num_left_out=len(without),
        num_malformed=sum(node.turn.is_malformed for node in counted),
        left_out=without,
        ignored=dict(ignored.most_common(MAX_IGNORED_NAMES)),
    )


def closed(stored: StoredSession) -> Refused:
    """Return the error for a request to a session that has ended or is being ended."""
    how = f"is {stored.end.status}" if stored.end else "is being ended"
    return Refused(
        RefusalCode.SESSION_CLOSED,
        f"session {stored.id} {how} and takes no more requests; create another",
    )


def ended_otherwise(stored: StoredSession) -> Refused:
    """Return the error for a request to end or reward a session that has ended differently.

    A time limit or a different request has ended the session, or is ending it now. If the request
    only repeats the one that ended the session, it does not get this error.
    """
    end = stored.end
    how = (
        f"is {end.status} already, but not by this request"
        if end
        else "is being ended by another request"
    )
    if end is not None and end.detail:
        how += f" ({shown(end.detail)})"
    return Refused(
        RefusalCode.CONFLICT,
        f"session {stored.id} {how}; a session ends once, and gets one reward",
    )


def stopping() -> Refused:
    """Return the error for a request that reaches a gateway while it stops.

    If the client sends the request again, the next gateway answers it.
    """
    return unavailable("the gateway is being stopped; send the request again")


def left_out(tree: SessionTree) -> dict[int, LeftOutReason]:
    """Return why turns are not trained if the session ends now.

    Returns: the reason for each untrained turn, by the number of the turn, in ascending order.
    """
    topics = _topics_of(tree.nodes) if tree.leaves_titles_out else {}
    found: dict[int, LeftOutReason] = {}
    for node in tree.nodes:
        if node.turn.is_auxiliary:
            found[node.turn.number] = LeftOutReason.AUXILIARY
        elif node.is_orphan:
            found[node.turn.number] = LeftOutReason.UNSEEN
        elif topics and _is_title(node, tree.nodes, topics):
            found[node.turn.number] = LeftOutReason.TITLE
    return found


def trained(tree: SessionTree) -> list[Node]:
    """Return the turns that are trained if the session ends now."""
    without = left_out(tree)
    return [node for node in tree.nodes if node.turn.number not in without]


def judged_of(tree: SessionTree, counted: Sequence[Node], named: int | None = None) -> Node | None:
    """Return the trained turn that gets the session's reward; None if no turn is trained.

    This is the first of these turns that exists:
    1. The turn with the number `named`, to which the client gave the reward.
    2. The newest turn in a conversation that has several turns or quotes a sampled reply.
    3. The newest turn, without those that look like a request for a title and have a shorter
       prompt than the turn that they look like a title of.

    counted: the trained turns.
    """
    for node in counted:
        if node.turn.number == named:
            return node
    for node in reversed(counted):
        if _is_continuing(node, tree.nodes):
            return node
    newest = counted[-1] if counted else None
    tasks = (n for n in reversed(counted) if not _is_like_a_title(n, tree.nodes, is_shorter=True))
    return next(tasks, newest)


def follows(tree: SessionTree, place: Place) -> int | None:
    """Return the number of the turn that a request continues or quotes; None if there is none.

    A request that begins a conversation may quote replies; the newest quoted turn is returned.
    """
    if place.parent is not None:
        return place.parent
    found = _newest_quoted(place.new_messages, tree.nodes)
    return None if found is None else found.turn.number


def samples_of(
    tree: SessionTree,
    trajectory_id: str,
    *,
    reward: float | None = None,
    components: Mapping[str, float] | None = None,
    turn_rewards: Mapping[int, float] | None = None,
    named: int | None = None,
) -> tuple[Sample, ...]:
    """Return the training samples of the trained turns.

    Example: if turn 1 continues turn 0, and turn 2 begins another conversation, there are two
    samples: one of turns 0 and 1, one of turn 2.

    Args: turn_rewards: the rewards of single turns, by the number of the turn; rewards of untrained
    turns are ignored. reward, components: the session's reward and its parts, which are added to
    the turn that `judged_of` returns. named: number of the turn to which the client gave the
    session's reward; None if the client named no turn.
    """
    builder = SampleBuilder(trajectory_id)
    counted, by_turn = trained(tree), turn_rewards or {}
    judged = judged_of(tree, counted, named)
    for node in counted:
        turn, is_judged = node.turn, node is judged
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


def trajectory_of(
    stored: StoredSession,
    tree: SessionTree,
    assignment: RolloutAssignment,
    *,
    oldest_version: int,
) -> Trajectory:
    """Make the trajectory of a session's rollout; may run in a thread.

    oldest_version: if an older policy version sampled a token, the outcome is STALE.
    """
    assert stored.end is not None, "a trajectory of a session that is not over"
    end = settled(stored.end, tree)
    counted, without = trained(tree), left_out(tree)
    breaks = (node.turn.break_reason for node in counted)
    left_out_tokens: Counter[LeftOutReason] = Counter()
    for number, reason in without.items():
        left_out_tokens[reason] += tree.turn(number).num_sampled
    trajectory = replace(
        Trajectory.of(assignment, end.outcome, detail=end.detail),
        samples=samples_of(
            tree,
            assignment.trajectory_id,
            reward=end.reward or 0.0,
            components=end.components,
            turn_rewards=end.turn_rewards,
            named=end.judged,
        ),
        was_rewarded=end.reward is not None,
        left_out=without,
        left_out_tokens=dict(left_out_tokens),
        num_inserted_tokens=sum(node.turn.num_inserted for node in counted),
        render_breaks=Counter(reason.value for reason in breaks if reason is not None),
        timings=Timings(wall_s=max(0.0, end.ended_at - (stored.opened_at or end.ended_at))),
    )
    outcome, detail = _final_outcome(trajectory, end, oldest_version)
    return replace(trajectory, outcome=outcome, detail=detail)


def _final_outcome(
    trajectory: Trajectory, end: SessionEnd, oldest_version: int
) -> tuple[Outcome, str]:
    """Return a trajectory's outcome, and a text with the reason.

    STALE replaces the session's outcome if a version older than `oldest_version` sampled a token.
    """
    # A session without its reward stays REWARD_ERROR.
    versions = trajectory.versions
    is_missing = end.outcome is Outcome.REWARD_ERROR and end.reward is None
    if versions is not None and versions[0] < oldest_version and not is_missing:
        why = f"sampled by version {versions[0]}, expected at least {oldest_version}"
        return Outcome.STALE, why
    return end.outcome, end.detail


def _topics_of(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Group the first turns of all conversations by their first user text."""
    found: dict[str, list[Node]] = {}
    for root in nodes:
        if root.parent is None and (texts := user_texts(root.turn.new_messages)):
            found.setdefault(texts[0], []).append(root)
    return found


def _is_title(node: Node, nodes: Sequence[Node], topics: Mapping[str, list[Node]]) -> bool:
    """Return whether a turn only made a title for another conversation, which then continued."""
    if not node.is_alone or _is_quoting(node, nodes) or _is_used(node, nodes):
        return False
    roots = (each for text in user_texts(node.turn.new_messages) for each in topics.get(text, ()))
    return any(
        root is not node and _is_continuing(root, nodes) and not _starts_over(node, root)
        for root in roots
    )


def _starts_over(node: Node, root: Node) -> bool:
    """Return whether the conversation that begins with `root` takes up the task of the turn `node`.

    Such a turn did not ask for a title. Either `root` repeats the turn's tools and messages, or an
    assistant message in the prompt of `root` quotes the turn's reply.
    """
    own, others = node.turn.new_messages, root.turn.new_messages
    if node.tools_key == root.tools_key and others[: len(own)] == own:
        rest = others[len(own) :]
        if not rest or rest[0].role is Role.ASSISTANT:
            return True
    replies = [message for message in others if message.role is Role.ASSISTANT]
    return PromptText(replies).quotes(node.reply)


def _is_like_a_title(node: Node, nodes: Sequence[Node], *, is_shorter: bool = False) -> bool:
    """Return whether a turn looks like a request for a title of an earlier conversation.

    Such a turn quotes no reply, and contains the first user text of the earlier conversation.
    is_shorter: whether its prompt must also be shorter than the first prompt of that conversation.
    """
    if not node.is_alone or _is_quoting(node, nodes):
        return False
    asked = "\n".join(user_texts(node.turn.new_messages))
    before = [each for each in nodes[: node.turn.number] if each.parent is None]
    # A conversation that begins again with the same messages is another attempt at the task.
    if any(root.turn.new_messages == node.turn.new_messages for root in before):
        return False
    if is_shorter:
        before = [root for root in before if root.num_prompt_tokens > node.num_prompt_tokens]
    return any(text in asked for root in before for text in user_texts(root.turn.new_messages)[:1])


def _is_used(node: Node, nodes: Sequence[Node]) -> bool:
    """Return whether the agent uses the turn's reply later, as it is.

    This is so if the reply is the whole content of a later message, a whole value in the arguments
    of a later call, a whole string in the JSON of a tool's result, or the end of a tool's result
    after a colon or a new line.
    """
    said = node.turn.reply.content.strip()
    later = nodes[node.turn.number + 1 :]
    messages = [m for each in later for m in (*each.turn.new_messages, each.turn.reply)]
    if not said or any(value == said for value in values_of(messages)):
        return bool(said)
    # Google's ADK writes {"result": "..."}, and AutoGen a helper's name before its reply.
    results = [m.content.strip() for m in messages if m.role is Role.TOOL]
    written = json.dumps(said), json.dumps(said, ensure_ascii=False)
    return any(
        (text.endswith(said) and text[: -len(said)].rstrip(" ").endswith((":", "\n")))
        or (any(form in text for form in written) and said in strings_of(text))
        for text in results
    )


def _is_continuing(node: Node, nodes: Sequence[Node]) -> bool:
    """Return whether a turn's conversation has several turns, or begins by quoting a reply."""
    # For the first turn of a conversation, `num_of_task` leaves out auxiliary turns.
    return node.parent is not None or node.root.num_of_task > 1 or _is_quoting(node.root, nodes)


def _is_quoting(root: Node, nodes: Sequence[Node]) -> bool:
    if root.is_quoting is None:
        found = _newest_quoted(root.turn.new_messages, nodes[: root.turn.number])
        root.is_quoting = found is not None
    return root.is_quoting


def _newest_quoted(messages: Sequence[Message], nodes: Sequence[Node]) -> Node | None:
    prompt = PromptText(messages)
    found = (node for node in reversed(nodes) if prompt.quotes(node.reply))
    return next(found, None)
