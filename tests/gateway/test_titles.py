"""Tests of titles and of the turn that gets the reward of a session."""

from __future__ import annotations

import pytest
from worlds.agents.session_player import SessionPlayer, result, says, system, user

from actors.environment.protocol import Message, ToolCall, ToolSchema
from actors.types import LeftOutReason, Outcome
from service.gateway.ends import seen_outcome, trained
from service.intake.session import LimitRefusal

HI = user("hi")


def test_a_title_does_not_get_the_reward_and_is_left_out_if_the_option_is_set() -> None:
    def play(*, is_auxiliary: bool = False, **options: bool) -> SessionPlayer:
        player = SessionPlayer(**options)
        one = player.ask([system("agent"), HI], says("1"))
        player.ask([system("agent"), HI, one, user("no")], says("2"))
        request = {"is_auxiliary": is_auxiliary}
        player.ask([system("title"), HI], says("Greetings"), request=request)
        return player

    for player, reason in (
        (play(leaves_titles_out=True), LeftOutReason.TITLE),
        (play(is_auxiliary=True), LeftOutReason.AUXILIARY),
        (play(is_auxiliary=True, leaves_titles_out=True), LeftOutReason.AUXILIARY),
    ):
        (sample,) = player.samples(reward=1.0, components={"hit": 1.0})
        assert [turn.reward for turn in sample.turns] == [0.0, 1.0]
        assert sample.turns[1].reward_components == {"hit": 1.0}
        trajectory = player.trajectory()
        assert (len(trained(player.tree)), trajectory.left_out) == (2, {2: reason})
        in_all = (turn for each in play().samples(reward=1.0) for turn in each.turns)
        num_left_out = sum(turn.num_sampled for turn in in_all) - sum(
            turn.num_sampled for turn in sample.turns
        )
        assert trajectory.left_out_tokens == {reason: num_left_out} and num_left_out > 0
    player = play()
    rewards = [turn.reward for each in player.samples(reward=1.0) for turn in each.turns]
    assert (rewards, player.judged()) == ([0.0, 1.0, 0.0], 1)

    for options in ({}, {"leaves_titles_out": True}):
        alone = SessionPlayer(**options)
        alone.ask([system("title"), HI], says("Greetings"))
        assert len(alone.samples()) == len(trained(alone.tree)) == 1


def test_among_single_turns_the_newest_gets_the_reward_unless_it_is_like_a_title() -> None:
    """Check a program of prompts that rewrites its replies, as DSPy's ReAct does."""
    player = SessionPlayer()
    steps = ("Where is order 7? Think.", "thought_0: look it up; observation_0: Rome", "answer")
    for number, question in enumerate(steps):
        player.ask([system(f"step {number}"), user(question)], says("xyz"[number]))
    assert player.judged() == 2 and player.judged(1) == 1
    (last,) = (turn for s in player.samples(reward=1.0, named=1) for turn in s.turns if turn.reward)
    assert last.index == 1
    player.ask([system("t"), user(steps[0])], says("An order"))
    assert player.judged() == 2


@pytest.mark.parametrize(
    "first, then",
    [
        ([system("Classify."), HI], [system("Answer the question."), HI]),
        ([system("Rewrite."), HI], [system("Answer."), user("Context: Rome. Question: hi")]),
        ([HI], [user("hi\nYour last answer was no number.")]),
        ([system("t"), HI], [system("You are an agent."), HI]),
    ],
    ids=["short router", "retrieval", "asked again", "title first"],
)
def test_the_answer_of_a_program_that_repeats_the_question_gets_the_reward(
    first: list[Message], then: list[Message]
) -> None:
    player = SessionPlayer()
    player.ask(first, says("x"))
    player.ask(then, says("y"))
    assert player.judged() == 1
    # A request that was refused in between does not decide the answer's outcome.
    refused = LimitRefusal(outcome=Outcome.TRUNCATED_CONTEXT, num_turns=1, follows=None)
    assert seen_outcome(player.tree, refused, None) is Outcome.COMPLETED


@pytest.mark.parametrize(
    "text",
    [
        "Two rows.",
        "helper: Two rows.",
        "From the helper:\nTwo rows.",
        '{"result": "Two rows.", "is_error": false}',
        '[{"type": "text", "text": "Two rows."}]',
    ],
)
def test_the_reply_of_a_helper_that_a_tools_result_contains_is_no_title(text: str) -> None:
    """Check AutoGen's and ADK's tools, whose helper gets the user's question word for word."""
    player = SessionPlayer(leaves_titles_out=True)
    tool = ToolSchema(name="ask", description="", parameters={"type": "object"})
    asks = ToolCall(id="c", name="ask", arguments={"question": "hi"})
    one = player.ask([system("agent"), HI], says("", asks), tools=(tool,))
    player.ask([system("helper"), HI], says("Two rows."))
    player.ask([system("agent"), HI, one, result("c", text)], says("It has two."), tools=(tool,))
    assert player.judged() == 2 and player.trajectory().left_out == {}


@pytest.mark.parametrize(
    ("reply", "text", "quotes"),
    [
        ("a0", "so a0.", True),
        ("a0", "so a01", False),
        ("a", "Name this chat", False),
        ("\u7b54", "\u4e00\u7b54\u6848", True),
        ("", "anything", False),
        # A program that reads the reply's JSON.
        ('```json\n{"steps": ["look it up", 2]}\n```', "Do: look it up", True),
        ('{"type": "message"}', "The first message", False),
        # The text was already in the question of its own turn.
        ("hi", "name this: hi", False),
    ],
)
def test_a_reply_is_quoted_if_a_later_prompt_has_its_words_as_new_text(
    reply: str, text: str, quotes: bool
) -> None:
    player = SessionPlayer()
    player.ask([HI], says(reply), said="x<|end|>")
    player.ask([system("s"), user(text)], says("1"))
    player.ask([system("t"), user("a question that is longer than all the others here")], says("2"))
    assert player.judged() == (1 if quotes else 2)


@pytest.mark.parametrize(
    "text",
    [
        # As Google's ADK shows another agent's call.
        "[root] called tool `transfer` with parameters: {'agent_name': 'billing', 'is_new': True}",
        'transfer({"agent_name":"billing","is_new":true})',
        'transfer({"agent_name": "billing", "is_new": true})',
    ],
)
def test_a_call_is_quoted_in_the_form_in_which_clients_print_its_arguments(text: str) -> None:
    """Check a hand-off; the question of the first turn already names the second agent."""
    player = SessionPlayer(leaves_titles_out=True)
    arguments = {"agent_name": "billing", "is_new": True}
    tool = ToolSchema(name="transfer", description="", parameters={"type": "object"})
    transfer = ToolCall(id="c", name="transfer", arguments=arguments)
    player.ask([system("Transfer to billing. " * 20), HI], says("", transfer), tools=(tool,))
    player.ask([system("Answer."), HI, user(text)], says("It is sent."))
    assert player.judged() == 1 and player.trajectory().left_out == {}


def test_a_request_that_begins_like_the_conversation_is_not_a_title() -> None:
    player = SessionPlayer()
    rules = system("rules")
    one = player.ask([rules, HI], says("1"))
    player.ask([rules, HI], says("2"))
    player.ask([rules, HI, one, user("no")], says("3"))
    player.ask([rules, user("so far: 1, 3")], says("4"))
    assert len(player.samples()) == 3 and len(trained(player.tree)) == 4
