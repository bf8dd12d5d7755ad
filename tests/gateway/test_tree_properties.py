"""Property tests of sessions: any tree of conversations, played in any order.

The tests keep each conversation also as plain lists, append to its ids with the renderer, and
compare the tree with them. Clients send a conversation back in different forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.agents.session_player import SessionPlayer, call, result, says, system, user
from worlds.checks.examples import examples
from worlds.checks.same import assert_same_samples

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.protocol import Message, Role, ToolCall, ToolSchema
from actors.types import LeftOutReason, Sample, TokenIds
from service.gateway.chat import ChatRequest
from service.gateway.ends import judged_of, left_out, samples_of, totals_of, trained
from service.gateway.tree import SessionTree

WEATHER = ToolSchema(name="weather", description="Of a city.", parameters={"type": "object"})
TOOLS: tuple[tuple[ToolSchema, ...], ...] = ((), (CALCULATOR, WEATHER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: the turn that it continues, its new messages, and their form."""

    continues: int
    """The turn to continue, modulo the number of turns; without turns a conversation begins."""
    begins: bool
    question: int
    with_tools: bool
    num_calls: int
    thinks: bool
    is_auxiliary: bool
    is_unseen: bool
    by_name: bool
    form_seed: int
    """Seed of the form in which the client sends earlier messages."""


asks = st.lists(
    st.builds(
        Ask,
        continues=st.integers(0, 7),
        begins=st.integers(0, 4).map(lambda drawn: drawn == 0),
        question=st.integers(0, 1),
        with_tools=st.booleans(),
        num_calls=st.integers(0, 2),
        thinks=st.booleans(),
        is_auxiliary=st.integers(0, 6).map(lambda drawn: drawn == 0),
        is_unseen=st.integers(0, 3).map(lambda drawn: drawn == 0),
        by_name=st.booleans(),
        form_seed=st.integers(1, 2**16),
    ),
    min_size=1,
    max_size=8,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A conversation up to a reply."""

    messages: list[Message]
    tools: tuple[ToolSchema, ...]
    prompt: TokenIds
    sampled: TokenIds


def play(
    family: str, script: Sequence[Ask], *, as_sent: bool, says_one_thing: bool = False
) -> SessionPlayer:
    """Play a script of requests.

    as_sent: the client sends everything back unchanged.
    says_one_thing: the replies of the policy differ only in the ids of their calls.
    """
    player = SessionPlayer(family)
    said: list[Said] = []
    for number, ask in enumerate(script):
        before = None if ask.begins or not said else said[ask.continues % len(said)]
        new = news_for(ask, before)
        tools = TOOLS[ask.with_tools] if before is None else before.tools
        messages = [*(before.messages if before else ()), *new]
        text = "same" if says_one_thing else f"{number}"
        calls = [call(f"n{number:04}c{index:03}", text) for index in range(ask.num_calls)][
            : player.family.max_calls
        ]
        thought = "hm" if ask.thinks and player.family.has_thoughts else None
        can_say = player.family.can_say_and_call or not calls
        reply = says(text if can_say else "", *calls, reasoning=thought)
        sent, request = messages, {}
        if ask.by_name and before is not None and not as_sent:
            request = {"continues": f"s-0.{said.index(before)}"}
            sent = new
        elif not as_sent:
            num_known = len(before.messages) if before else 0
            sent = rewritten(messages, num_known, ask.form_seed)
        player.ask(
            sent,
            reply,
            tools=tools if as_sent or before is None or ask.form_seed % 2 else tools[::-1],
            request={"is_auxiliary": ask.is_auxiliary, **request},
            is_unseen=ask.is_unseen,
        )
        if before is None:
            prompt = player.renderer.first_prompt(messages, tools)
        else:
            extension = player.renderer.extend(
                before.prompt,
                before.sampled,
                history=before.messages,
                new_messages=messages[len(before.messages) :],
                tools=tools,
            )
            assert extension.break_reason is None
            prompt = extension.prompt_token_ids
        np.testing.assert_array_equal(player.prompts[number], prompt)
        sampled = player.ids(player.family.say(reply))
        said.append(Said(messages=[*messages, reply], tools=tools, prompt=prompt, sampled=sampled))
    return player


def news_for(ask: Ask, before: Said | None) -> list[Message]:
    if before is None:
        return [system(f"x-anthropic-billing-header: 0\nrules {ask.question}"), user("hi")]
    calls = before.messages[-1].tool_calls
    if calls:
        answers = [replace(result(each.id, f"of {each.id}"), name=each.name) for each in calls]
        return answers[::-1] if ask.question else answers
    return [user(f"on {ask.question}")]


def rewritten(messages: Sequence[Message], num_known: int, seed: int) -> list[Message]:
    """Return messages as another client would write them; new ones only get other ids."""
    rng = np.random.default_rng(seed)
    ids = [each.id for message in messages for each in message.tool_calls]
    others = ids if rng.random() < 0.5 else [f"toolu-{each}" for each in ids]
    names = dict(zip(ids, rng.permutation(others).tolist(), strict=True))
    known = [_rewritten(message, names, rng) for message in messages[:num_known]]
    return known + [_renamed(message, names) for message in messages[num_known:]]


def _renamed(message: Message, names: dict[str, str]) -> Message:
    if message.tool_call_id is None:
        return message
    return replace(message, tool_call_id=names[message.tool_call_id], name=None)


def _rewritten(message: Message, names: dict[str, str], rng: np.random.Generator) -> Message:
    if message.role is Role.SYSTEM:
        header = f"header: {rng.integers(1000)}"
        return replace(message, content=message.content.replace("header: 0", header))
    if message.role is not Role.ASSISTANT:
        return _renamed(message, names)
    return replace(
        message,
        content=rng.choice(["{}", "{}\n", " {}", "<think>\n</think>{}"]).format(message.content),
        reasoning=rng.choice([None, "", message.reasoning, f" {message.reasoning or ''}\n"]),
        tool_calls=tuple(
            ToolCall(id=names[each.id], name=each.name, arguments=dict(each.arguments))
            for each in message.tool_calls
        ),
    )


def counted(tree: SessionTree) -> list[int]:
    """Return the numbers of the turns to train, computed directly from the rule."""
    continued = {turn.parent for turn in tree.turns}
    return [
        turn.number
        for turn in tree.turns
        if not turn.is_auxiliary and (not turn.is_unseen or turn.number in continued)
    ]


def assert_trained_once(player: SessionPlayer, samples: Sequence[Sample]) -> None:
    turns = [player.tree.turns[number] for number in counted(player.tree)]
    spans = sorted(
        ((span.index, sample, span) for sample in samples for span in sample.turns),
        key=lambda each: each[0],
    )
    assert [index for index, _, _ in spans] == list(range(len(turns)))
    for turn, (_, sample, span) in zip(turns, spans, strict=True):
        full = player.tree.nodes[turn.number].full_ids()
        np.testing.assert_array_equal(sample.token_ids[: span.end], full)
        np.testing.assert_array_equal(sample.token_ids[span.tokens], turn.sampled_token_ids)
        np.testing.assert_array_equal(sample.logprobs[span.tokens], turn.logprobs)
        assert (sample.versions[span.tokens] == turn.number).all()
    num_sampled = sum(len(turn.sampled_token_ids) for turn in turns)
    assert sum(sample.num_trained for sample in samples) == num_sampled


@pytest.mark.parametrize("family", ["tiny", "qwen3", "mistral"])
@given(script=asks)
@examples(40)
def test_every_sampled_token_is_trained_once_in_any_form_of_a_client(
    family: str, script: list[Ask]
) -> None:
    player = play(family, script, as_sent=True)
    samples = player.samples()
    assert_trained_once(player, samples)
    assert len(trained(player.tree)) == len(counted(player.tree))

    other_forms = play(family, script, as_sent=False)
    assert_same_samples(other_forms.samples(), samples)
    assert [place.parent for place in other_forms.places] == [
        place.parent for place in player.places
    ]

    rebuilt = player.rebuilt()
    assert_same_samples(samples_of(rebuilt, "t"), samples)
    assert totals_of(rebuilt) == totals_of(player.tree)
    made, remade = player.trajectory(), player.trajectory(rebuilt)
    assert remade.left_out_tokens == made.left_out_tokens
    assert remade.num_inserted_tokens == made.num_inserted_tokens
    assert remade.render_breaks == made.render_breaks
    reply = player.tree.turns[-1].reply
    asked = ChatRequest(messages=(*player.places[-1].history, *player.places[-1].new_messages))
    for chat in (asked, replace(asked, messages=(*asked.messages, reply, user("more")))):
        found, again = rebuilt.find(chat), player.tree.find(chat)
        assert found.parent == again.parent
        assert found.new_messages == again.new_messages
        assert found.request_digest == again.request_digest
        if found.parent is not None:
            np.testing.assert_array_equal(
                np.concatenate(found.parent_prompt), np.concatenate(again.parent_prompt)
            )


@pytest.mark.parametrize("family", ["tiny", "mistral"])
@given(script=asks)
@examples(30)
def test_replies_of_equal_text_are_distinguished_by_their_ids(
    family: str, script: list[Ask]
) -> None:
    player = play(family, script, as_sent=True, says_one_thing=True)
    assert not any(node.is_ambiguous for node in player.tree.nodes)
    samples = player.samples()
    assert_same_samples(samples_of(player.rebuilt(), "t"), samples)
    num_sampled = sum(len(player.tree.turns[n].sampled_token_ids) for n in counted(player.tree))
    assert sum(sample.num_trained for sample in samples) == num_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of one of several agents of a session."""

    agent: int
    continues: int
    """Number of the agent's conversation that the request continues; 0: it begins one."""
    quotes: bool
    """Whether it quotes the reply before it."""
    words: int
    with_tools: bool
    is_auxiliary: bool
    is_unseen: bool
    reward: float | None


calls_of_agents = st.lists(
    st.builds(
        Call,
        agent=st.integers(0, 2),
        continues=st.integers(0, 3),
        quotes=st.booleans(),
        words=st.integers(0, 3),
        with_tools=st.booleans(),
        is_auxiliary=st.integers(0, 4).map(lambda drawn: drawn == 0),
        is_unseen=st.integers(0, 4).map(lambda drawn: drawn == 0),
        reward=st.none() | st.sampled_from([-0.5, 0.0, 0.25, 2.0]),
    ),
    min_size=1,
    max_size=9,
)


@examples(60)
@given(calls_of_agents, st.booleans(), st.sampled_from([0.0, 1.0, -3.0]), st.integers(0, 9))
def test_with_many_agents_a_turn_is_trained_once_or_left_out_and_no_reward_is_lost(
    script: list[Call], leaves_titles_out: bool, reward: float, named: int
) -> None:
    player = SessionPlayer(leaves_titles_out=leaves_titles_out)
    said: list[tuple[int, list[Message], tuple[ToolSchema, ...]]] = []
    for number, each in enumerate(script):
        own = [chat for chat in said if chat[0] == each.agent]
        if each.continues and own:
            _, chat, tools = own[each.continues % len(own)]
            messages = [*chat, user(f"on {each.words}")]
        else:
            quote = f" {said[-1][1][-1].content}" if each.quotes and said else ""
            messages = [system(f"agent {each.agent}"), user(f"task {each.words}{quote}")]
            tools = TOOLS[each.with_tools]
        answer = player.ask(
            messages,
            says(f"reply {number % 5}"),
            tools=tools,
            request={"is_auxiliary": each.is_auxiliary},
            is_unseen=each.is_unseen,
        )
        said.append((each.agent, [*messages, answer], tools))
    tree = player.tree
    without = left_out(tree)
    rewards = {
        number: each.reward
        for number, each in enumerate(script)
        if each.reward is not None and number not in without
    }
    judged = named if named < len(script) and named not in without else None
    samples = player.samples(reward=reward, turn_rewards=rewards, named=judged)
    numbers = [n for n in range(len(script)) if n not in without]
    # The version of its tokens identifies each turn.
    found = [
        (int(sample.versions[turn.start]), turn.reward)
        for sample in samples
        for turn in sample.turns
    ]
    assert sorted(number for number, _ in found) == numbers
    rewarded = player.judged(judged)
    assert (rewarded is None) == (not numbers) and (judged is None or rewarded == judged)
    for number, given_reward in found:
        expected = rewards.get(number, 0.0) + (reward if number == rewarded else 0.0)
        assert given_reward == expected
    total = sum(turn.reward for sample in samples for turn in sample.turns)
    assert total == pytest.approx(sum(rewards.values()) + (reward if numbers else 0.0))
    # The rebuilt tree gives the same results.
    again = player.rebuilt()
    kept = judged_of(again, trained(again), judged)
    assert left_out(again) == without
    assert (None if kept is None else kept.turn.number) == rewarded
    for number, reason in without.items():
        turn, asked = tree.turns[number], script[number]
        if reason is LeftOutReason.TITLE:
            assert leaves_titles_out and turn.parent is None and not turn.tools
            assert all(other.parent != number for other in tree.turns)
            assert not (asked.is_auxiliary or (asked.quotes and number))
        elif reason is LeftOutReason.AUXILIARY:
            assert asked.is_auxiliary
        else:
            assert asked.is_unseen
