"""Tests of which turn a request continues and which tokens are trained, in difficult cases.

Expected samples are written as text with the trained parts in brackets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from worlds.agents.session_player import SessionPlayer, call, result, says, system, user
from worlds.builders.chat_examples import tokenizer
from worlds.checks.same import assert_same_samples

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.chat_template import RenderError
from actors.environment.protocol import Message, ToolCall, ToolSchema
from actors.environment.rendering import ChatRenderer
from actors.types import BranchReason, FinishReason, LeftOutReason
from service.gateway.chat import ChatRequest, RefusalCode, Refused
from service.gateway.ends import left_out, samples_of, totals_of, trained
from service.gateway.sampling import next_prompt

WEATHER = ToolSchema(name="weather", description="Of a city.", parameters={"type": "object"})
HI = user("hi")


def parents(player: SessionPlayer) -> list[int | None]:
    return [place.parent for place in player.places]


def test_a_template_that_strips_earlier_thoughts_does_not_begin_a_branch() -> None:
    player = SessionPlayer("qwen3")
    first = player.ask([HI], says("4", reasoning="hm"))
    player.ask([HI, first, user("no")], says("5", reasoning="well"))
    assert player.shown() == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\nhm\n</think>\n\n4<|im_end|>]\n"
        "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\nwell\n</think>\n\n5<|im_end|>]"
    ]
    trajectory = player.trajectory()
    # The line break after the end of a reply is inserted.
    assert (trajectory.num_inserted_tokens, trajectory.render_breaks) == (1, {})


@pytest.mark.parametrize(
    "echo",
    [
        pytest.param({"reasoning": None}, id="reasoning dropped"),
        pytest.param({"reasoning": "hm"}, id="reasoning echoed"),
        pytest.param({"reasoning": " hm\n"}, id="reasoning trimmed"),
        pytest.param({"reasoning": ""}, id="thinking block emptied"),
        pytest.param({"content": "<think>\n\n</think>\n\nsay"}, id="empty thinking"),
        pytest.param({"content": "say\n"}, id="content with a line break"),
        pytest.param({"ids": ("x", "y")}, id="ids renamed"),
        pytest.param({"ids": ("abcdefgh2", "abcdefgh1")}, id="ids swapped"),
        pytest.param({"ids": ("calculator", "calculator")}, id="ids equal"),
        pytest.param({"rekeyed": True}, id="arguments reordered"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "tiny"])
def test_messages_that_a_client_rewrites_stay_in_their_branch(
    family: str, echo: dict[str, object]
) -> None:
    ids = ("abcdefgh1", "abcdefgh2")
    arguments = {"expression": "1", "places": 1.0}
    # In some families a reply cannot have text beside calls, or thoughts.
    content = "say" if SessionPlayer(family).family.can_say_and_call else ""
    thought = "hm" if SessionPlayer(family).family.has_thoughts else None

    def calls(ids: tuple[str, str], **arguments: object) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(id=each, name="calculator", arguments=arguments) for each in ids)

    def play(
        *, ids: tuple[str, str], rekeyed: bool = False, **changes: object
    ) -> tuple[SessionPlayer, Message]:
        player = SessionPlayer(family)
        own = ("abcdefgh1", "abcdefgh2")
        said = player.ask([HI], says(content, *calls(own, **arguments), reasoning=thought))
        shown = {"places": 1, "expression": "1"} if rekeyed else arguments
        if not content and "content" in changes:
            changes["content"] = "\n"
        back = replace(said, tool_calls=calls(ids, **shown), **changes)
        answers = [result(ids[0], "one"), result(ids[1], "two")]
        again = player.ask([HI, back, *answers], says("3"))
        player.ask([HI, back, *answers, again, user("no")], says("4"))
        return player, back

    plain, _ = play(ids=ids)
    varied, _ = play(**{"ids": ids, **echo})  # type: ignore[arg-type]
    assert parents(varied) == parents(plain) == [None, 0, 1]
    assert [turn.new_messages for turn in varied.tree.turns] == [
        turn.new_messages for turn in plain.tree.turns
    ]
    assert len(varied.samples()) == 1
    assert_same_samples(varied.samples(), plain.samples())
    assert_same_samples(samples_of(varied.rebuilt(), "t"), plain.samples())


def test_consecutive_results_share_one_turn_of_the_template() -> None:
    player = SessionPlayer("qwen3")
    said = player.ask([HI], says("", call("a", "1"), call("b", "2")))
    # The results come back in another order and with other ids.
    back = replace(said, tool_calls=(call("x", "1"), call("y", "2")))
    player.ask([HI, back, result("y", "two"), result("x", "one")], says("3"))
    (shown,) = player.shown()
    assert shown.endswith(
        "</tool_call><|im_end|>]\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n[3<|im_end|>]"
    )
    assert [each.tool_call_id for each in player.places[1].new_messages] == ["b", "a"]
    # A template may show which tool answers.
    assert {each.name for each in player.places[1].new_messages} == {"calculator"}


@pytest.mark.parametrize("ids", [("a", "b", "c"), ("call_0", "call_0", "call_0")])
def test_calls_are_numbered_across_turns(ids: tuple[str, ...]) -> None:
    player = SessionPlayer()
    # The policy did not make the first call; some policies give every call the same id.
    chat = [HI, says("", call(ids[0], "1")), result(ids[0], "one")]
    for call_id in ids[1:]:
        chat += [player.ask(chat, says("", call(call_id, "2"))), result(call_id, "two")]
    player.ask([*chat, player.ask(chat, says("3")), user("on")], says("4"))
    assert parents(player) == [None, 0, 1, 2] and len(player.samples()) == 1


def test_a_reply_sent_back_with_fewer_calls_is_a_rewritten_history() -> None:
    player = SessionPlayer()
    said = player.ask([HI], says("", call("a", "1"), call("b", "2")))
    shown = replace(said, tool_calls=said.tool_calls[:1])
    player.ask([HI, shown, result("a", "one")], says("3"))
    assert player.shown() == [
        '<|user|>hi<|end|><|assistant|>[<tool_call>{"name": "calculator", "arguments": '
        '{"expression": "1"}}</tool_call><tool_call>{"name": "calculator", "arguments": '
        '{"expression": "2"}}</tool_call><|end|>]',
        '<|user|>hi<|end|><|assistant|><tool_call>{"name": "calculator", "arguments": '
        '{"expression": "1"}}</tool_call><|end|><|tool|>one<|end|><|assistant|>[3<|end|>]',
    ]
    assert player.samples()[1].branch_reason is BranchReason.HISTORY_REWRITTEN


def test_a_rewritten_reply_begins_a_branch_and_the_sampled_one_stays_trained() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"))
    two = player.ask([HI, one, user("no")], says("2"))
    player.ask([HI, one, user("no"), says("two"), user("go on")], says("3"))
    player.ask([HI, one, user("no"), two, user("go on")], says("4"))
    assert parents(player) == [None, 0, 0, 1]
    assert player.places[2].new_messages == (user("no"), says("two"), user("go on"))
    assert player.shown() == [
        "<|user|>hi<|end|><|assistant|>[1<|end|>]<|user|>no<|end|><|assistant|>[2<|end|>]"
        "<|user|>go on<|end|><|assistant|>[4<|end|>]",
        "<|user|>hi<|end|><|assistant|>1<|end|><|user|>no<|end|><|assistant|>two<|end|>"
        "<|user|>go on<|end|><|assistant|>[3<|end|>]",
    ]
    branched = player.samples()[1]
    assert (branched.parent, branched.branch_reason) == (0, BranchReason.HISTORY_REWRITTEN)


def test_a_compacted_history_is_a_new_root_and_both_chains_are_trained() -> None:
    player = SessionPlayer()
    rules = system("rules")
    one = player.ask([rules, HI], says("1"))
    player.ask([rules, HI, one, user("no")], says("2"))
    player.ask([rules, user("so far: 1, 2")], says("3"))
    assert parents(player) == [None, 0, None]
    samples = player.samples(reward=1.0)
    assert [[turn.reward for turn in sample.turns] for sample in samples] == [[0, 0], [1]]
    assert player.shown()[1] == (
        "<|system|>rules<|end|><|user|>so far: 1, 2<|end|><|assistant|>[3<|end|>]"
    )


def test_the_main_conversation_continues_beside_that_of_a_sub_agent() -> None:
    player = SessionPlayer()
    main, sub = [system("main"), HI], [system("sub"), user("look")]
    for number in range(3):
        for chat in (main, sub):
            chat += [player.ask(chat, says(f"{number}")), user("on")]
    assert parents(player) == [None, None, 0, 1, 2, 3]
    assert [[turn.index for turn in s.turns] for s in player.samples()] == [[0, 2, 4], [1, 3, 5]]
    assert player.shown() == [
        f"<|system|>{name}<|end|><|user|>{question}<|end|><|assistant|>[0<|end|>]"
        "<|user|>on<|end|><|assistant|>[1<|end|>]<|user|>on<|end|><|assistant|>[2<|end|>]"
        for name, question in (("main", "hi"), ("sub", "look"))
    ]


def test_equal_requests_are_siblings_and_each_can_be_continued() -> None:
    player = SessionPlayer()
    replies = [player.ask([HI], says(text)) for text in ("1", "2", "3")]
    assert len({turn.request_digest for turn in player.tree.turns}) == 1
    for reply in (replies[1], replies[0]):
        player.ask([HI, reply, user("no")], says("7"))
    assert parents(player) == [None, None, None, 1, 0]
    assert player.shown() == [
        f"<|user|>hi<|end|><|assistant|>[{text}<|end|>]{rest}"
        for text, rest in (
            ("1", "<|user|>no<|end|><|assistant|>[7<|end|>]"),
            ("2", "<|user|>no<|end|><|assistant|>[7<|end|>]"),
            ("3", ""),
        )
    ]


def test_siblings_of_equal_text_are_distinguished_by_ids_or_reasoning() -> None:
    by_ids = SessionPlayer("mistral")
    replies = [by_ids.ask([HI], says("", call(f"abcdefgh{n}"))) for n in range(3)]
    for reply in (replies[1], replies[2], replies[0]):
        (made,) = reply.tool_calls
        by_ids.ask([HI, reply, result(made.id, "7")], says("7"))
    assert parents(by_ids) == [None, None, None, 1, 2, 0]
    # Later turns that differ only in their parents are distinguished too.
    asked = [HI, replies[2], result("abcdefgh2", "7"), says("7"), user("no")]
    by_ids.ask(asked, says("8"))
    assert parents(by_ids)[-1] == 4

    # A client may have renamed the ids of earlier calls.
    renamed = SessionPlayer("mistral")
    chat = [HI, renamed.ask([HI], says("", call("abcdefgh0"))), result("abcdefgh0", "7")]
    replies = [renamed.ask(chat, says("", call(f"abcdefgh{n}"))) for n in (1, 2)]
    chat[1:] = [says("", call("x")), result("x", "7")]
    for number, reply in enumerate(replies, start=1):
        renamed.ask([*chat, reply, result(f"abcdefgh{number}", "7")], says("7"))
    assert parents(renamed) == [None, 0, 0, 1, 2]

    by_reasoning = SessionPlayer("qwen3")
    for thought in ("a", "b", "c"):
        by_reasoning.ask([HI], says("4", reasoning=thought))
    for thought in ("b", " c\n"):
        by_reasoning.ask([HI, says("4", reasoning=thought), user("no")], says("5"))
    assert parents(by_reasoning) == [None, None, None, 1, 2]


def test_the_newest_of_equal_siblings_is_continued_and_all_are_trained() -> None:
    player = SessionPlayer()
    four = says("4")
    for _ in range(2):
        player.ask([HI], four)
    player.ask([HI, four, user("no")], says("5"))
    assert (parents(player), player.tree.nodes[2].is_ambiguous) == ([None, None, 1], False)
    assert player.shown() == [
        "<|user|>hi<|end|><|assistant|>[4<|end|>]",
        "<|user|>hi<|end|><|assistant|>[4<|end|>]<|user|>no<|end|><|assistant|>[5<|end|>]",
    ]


def test_indistinguishable_siblings_are_not_continued_and_are_counted() -> None:
    player = SessionPlayer("qwen3")
    for thought in ("a", "b"):
        player.ask([HI], says("4", reasoning=thought))
    shown = [HI, says("4"), user("no")]
    five = player.ask(shown, says("5"))
    player.ask([*shown, five, user("no")], says("6"))
    assert parents(player) == [None, None, None, 2]
    assert [node.is_ambiguous for node in player.tree.nodes] == [False, False, True, False]
    question = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    no = "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    # The new chain has neither thought, and the text of the reply is only context in it.
    assert player.places[2].new_messages == tuple(shown)
    assert player.shown() == [
        f"{question}[<think>\na\n</think>\n\n4<|im_end|>]",
        f"{question}[<think>\nb\n</think>\n\n4<|im_end|>]",
        f"{question}4<|im_end|>{no}[5<|im_end|>]{no}[6<|im_end|>]",
    ]
    for tree in (player.tree, player.rebuilt()):
        assert totals_of(tree).num_ambiguous == 1
    # A client that shows no reasoning need not mean the reply without reasoning.
    player = SessionPlayer("qwen3")
    for reasoning in ("a", None):
        player.ask([HI], says("4", reasoning=reasoning))
    player.ask(shown, says("5"))
    assert parents(player) == [None, None, None]
    # If the client uses its own ids, neither reply is continued.
    player = SessionPlayer()
    for call_id in ("a", "b"):
        player.ask([HI], says("", call(call_id)), said=f"{call_id}<|end|>")
    player.ask([HI, says("", call("x")), result("x", "7")], says("7"))
    assert parents(player) == [None, None, None]


def test_a_rotating_header_does_not_begin_a_branch() -> None:
    def rules(number: int) -> Message:
        return system(f"x-anthropic-billing-header: cch={number}\nBe brief.")

    player = SessionPlayer()
    one = player.ask([rules(1), HI], says("1"))
    player.ask([rules(2), HI, one, user("no")], says("2"))
    player.ask([rules(3), HI, user("other")], says("3"))
    assert parents(player) == [None, 0, None]
    # All prompts keep the first header, so that conversations share their beginning.
    assert [text.count("cch=1") for text in player.shown()] == [1, 1]


def test_a_system_message_in_mid_conversation_is_a_message_like_others() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"))
    two = player.ask([HI, one, system("hurry"), user("no")], says("2"))
    player.ask([HI, one, system("hurry"), user("no"), two, user("on")], says("3"))
    assert parents(player) == [None, 0, 1]
    assert player.shown() == [
        "<|user|>hi<|end|><|assistant|>[1<|end|>]<|system|>hurry<|end|><|user|>no<|end|>"
        "<|assistant|>[2<|end|>]<|user|>on<|end|><|assistant|>[3<|end|>]"
    ]


def test_other_tools_begin_a_branch_and_another_order_of_tools_does_not() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"), tools=(CALCULATOR, WEATHER))
    two = player.ask([HI, one, user("a")], says("2"), tools=(WEATHER, CALCULATOR))
    chat = [HI, one, user("a"), two, user("b")]
    three = player.ask(chat, says("3"), tools=(CALCULATOR,))
    player.ask([*chat, three, user("c")], says("4"), tools=(CALCULATOR, WEATHER))
    assert parents(player) == [None, 0, None, 1]
    changed = [node.reason is BranchReason.TOOLS_CHANGED for node in player.tree.nodes]
    assert changed == [False, False, True, True]
    assert player.places[1].tools == (CALCULATOR, WEATHER)
    assert player.places[3].new_messages == (user("b"), three, user("c"))
    samples = player.samples()
    assert [[turn.index for turn in sample.turns] for sample in samples] == [[0, 1, 3], [2]]
    assert samples[1].branch_reason is BranchReason.TOOLS_CHANGED
    # Replies that were sampled with the other tools are only context here.
    assert player.shown()[1].endswith(
        "<|assistant|>1<|end|><|user|>a<|end|><|assistant|>2<|end|><|user|>b<|end|>"
        "<|assistant|>[3<|end|>]"
    )


def test_a_turn_that_two_chains_share_is_trained_once() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"))
    player.ask([HI, one, user("a")], says("2"))
    player.ask([HI, one, user("b")], says("3"))
    assert parents(player) == [None, 0, 0]
    assert player.shown() == [
        "<|user|>hi<|end|><|assistant|>[1<|end|>]<|user|>a<|end|><|assistant|>[2<|end|>]",
        "<|user|>hi<|end|><|assistant|>1<|end|><|user|>b<|end|><|assistant|>[3<|end|>]",
    ]
    assert player.samples()[1].parent == 0


def test_replies_that_were_never_sampled_are_not_trained() -> None:
    player = SessionPlayer()
    chat = [HI, says("made up"), user("a")]
    one = player.ask(chat, says("1"))
    player.ask([*chat, one, user("b"), says("made up"), user("c")], says("2"))
    assert parents(player) == [None, 0]
    assert player.shown() == [
        "<|user|>hi<|end|><|assistant|>made up<|end|><|user|>a<|end|><|assistant|>[1<|end|>]"
        "<|user|>b<|end|><|assistant|>made up<|end|><|user|>c<|end|><|assistant|>[2<|end|>]"
    ]


def test_a_retry_is_answered_with_the_stored_turn() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"), request={"idempotency_key": "k"})
    first, digest = player.tree.turns[0], player.places[0].request_digest
    for tree in (player.tree, player.rebuilt()):
        asked = partial(tree.answered, request_id="", idempotency_key="", is_retry=False)
        assert asked(digest=digest) is None
        # A request that the API sends again, one with the same key, and a marked retry.
        assert asked(digest=digest, request_id="request-0") is first
        assert asked(digest=digest, idempotency_key="k") is first
        assert asked(digest=digest, is_retry=True) is first
        assert asked(digest="another", is_retry=True) is None
        with pytest.raises(Refused, match=r"turn s-0\.0 answers") as refused:
            asked(digest="another", idempotency_key="k")
        assert refused.value.code is RefusalCode.CONFLICT

    asked = partial(player.tree.answered, request_id="", idempotency_key="", is_retry=True)
    player.ask([HI], says("1"))
    assert asked(digest=digest) is player.tree.turns[1]  # the newest of two siblings
    player.ask([HI, one, user("no")], says("2"))
    assert asked(digest=digest) is None
    # A request that is still being sampled is also in between, whichever is stored first.
    other = player.places[2].request_digest
    assert asked(digest=other) is player.tree.turns[2]
    # A request that has no turn yet, or never gets one, does not get an earlier one's.
    player.tree.note_request(other)
    assert asked(digest=other) is None
    player.tree.note_request(digest)
    player.tree.add(replace(player.tree.turns[2], number=3))
    assert asked(digest=other) is None


def test_a_turn_that_its_client_never_received_is_left_out() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"))
    player.ask([HI, one, user("no")], says("2"), is_unseen=True)
    player.ask([HI, one, user("no")], says("3"))
    samples = player.samples(reward=1.0)
    assert player.shown() == [
        "<|user|>hi<|end|><|assistant|>[1<|end|>]<|user|>no<|end|><|assistant|>[3<|end|>]"
    ]
    assert [turn.reward for turn in samples[0].turns] == [0.0, 1.0]
    assert left_out(player.tree) == {1: LeftOutReason.UNSEEN} and len(trained(player.tree)) == 2
    # A client that asked again has received the turn.
    player.tree.mark_unseen(1, is_unseen=False)
    assert not player.tree.turn(1).is_unseen
    assert len(player.samples()) == 2 and len(trained(player.rebuilt())) == 3
    player.tree.mark_unseen(2, is_unseen=True)
    assert player.tree.turn(2).is_unseen and len(trained(player.tree)) == 2


def test_a_turn_that_a_client_continues_counts_as_received() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"), is_unseen=True)
    player.ask([HI, one, user("no")], says("2"))
    assert len(trained(player.tree)) == 2
    # Also with other tools, if the request continues only the text of the turn.
    player = SessionPlayer()
    one = player.ask([HI], says("1"), is_unseen=True)
    player.ask([HI, one, user("no")], says("2"), tools=(CALCULATOR,))
    assert len(trained(player.tree)) == 2
    # Of two turns with equal text, the one that was received is continued.
    player = SessionPlayer("qwen3")
    player.ask([HI], says("4", reasoning="a"))
    player.ask([HI], says("4", reasoning="b"), is_unseen=True)
    player.ask([HI, says("4"), user("no")], says("5"))
    # Unless the client shows that it received the other one.
    player.ask([HI, says("4", reasoning="b"), user("no")], says("5"))
    assert parents(player) == [None, None, 0, 1]


def test_a_request_continues_the_turn_that_it_names() -> None:
    player = SessionPlayer()
    rules = system("rules")
    said = player.ask([rules, HI], says("", call("a")), tools=(CALCULATOR,))
    assert player.tree.turn_id(0) == "s-0.0"
    named = {"continues": "s-0.0"}
    three = player.ask([result("a", "7")], says("3"), tools=(CALCULATOR,), request=named)
    # Every request repeats the instructions; the conversation has them once.
    again = {**named, "instructions": "rules"}
    player.ask([result("a", "8")], says("4"), tools=(CALCULATOR,), request=again)
    player.ask([user("on")], says("5"), request={"continues": "s-0.1", "instructions": "rules"})
    whole = [rules, HI, said, result("a", "7"), three, user("on")]
    player.ask(whole, says("6"), tools=(CALCULATOR,))
    assert parents(player) == [None, 0, 0, None, 1]
    assert player.places[2].new_messages == (replace(result("a", "8"), name="calculator"),)
    assert player.tree.nodes[3].reason is BranchReason.TOOLS_CHANGED
    assert [m.content for m in player.places[3].new_messages] == [m.content for m in whole]
    shown = player.shown()
    assert len(shown) == 3 and shown[0].endswith(
        "<|tool|>7<|end|><|assistant|>[3<|end|>]<|user|>on<|end|><|assistant|>[6<|end|>]"
    )


def test_messages_after_a_named_turn_may_contain_another_reply() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"))
    two = player.ask([HI, one, user("a")], says("2"))
    player.ask([user("a"), two, user("b")], says("3"), request={"continues": "s-0.0"})
    assert parents(player) == [None, 0, 0]
    assert totals_of(player.tree).num_ambiguous == 0


@pytest.mark.parametrize("name", ["s-0.1", "s-0.", "s-0", "s-1.0", "0", "s-0.²", "s-0.-1", "." * 9])
def test_an_unknown_turn_id_is_refused(name: str) -> None:
    player = SessionPlayer()
    player.ask([HI], says("1"))
    with pytest.raises(Refused, match="previous_response_id: no answer") as refused:
        player.tree.find(ChatRequest(messages=(HI,), continues=name))
    assert refused.value.code is RefusalCode.INVALID_REQUEST
    assert refused.value.param == "previous_response_id"


def test_the_end_token_inserted_after_a_cut_off_reply_is_not_trained() -> None:
    player = SessionPlayer()
    cut = player.ask([HI], says("1"), said="1", finish_reason=FinishReason.LENGTH)
    player.ask([HI, cut, user("no")], says("2"))
    assert player.shown() == [
        "<|user|>hi<|end|><|assistant|>[1]<|end|><|user|>no<|end|><|assistant|>[2<|end|>]"
    ]
    assert player.trajectory().num_inserted_tokens == 1


def like_tiny(template: str) -> ChatRenderer:
    fast = tokenizer()
    return ChatRenderer(
        fast.__class__(
            tokenizer_object=fast.backend_tokenizer, eos_token="<|end|>", chat_template=template
        )
    )


def test_a_prompt_that_is_rendered_again_begins_a_branch_with_its_reason() -> None:
    counts_messages = like_tiny(
        "{% for m in messages %}{{ loop.index }}{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    )
    stripped = ChatRenderer(SessionPlayer("qwen3").family.tokenizer, history="as_rendered")
    makers: list[Callable[[], SessionPlayer]] = [
        lambda: SessionPlayer(renderer=counts_messages),
        lambda: SessionPlayer("qwen3", renderer=stripped),
    ]
    for make, reason in zip(makers, ("template_looks_back", "history_rendered"), strict=True):
        player = make()
        one = player.ask([HI], says("1", reasoning="hm"))
        player.ask([HI, one, user("no")], says("2", reasoning="hm"))
        assert parents(player) == [None, 0]
        assert [turn.extends_parent for turn in player.tree.turns] == [False, False]
        assert player.samples()[1].branch_reason is BranchReason.TEMPLATE
        assert player.trajectory().render_breaks == {reason: 1}


def test_a_chat_that_the_template_refuses_does_not_change_the_tree() -> None:
    player = SessionPlayer(renderer=like_tiny("{{ raise_exception('never') }}"))
    with pytest.raises(RenderError):
        next_prompt(player.tree.find(ChatRequest(messages=(HI,))), player.renderer)
    assert player.tree.num_turns == 0 and player.samples() == ()


def test_memory_grows_with_the_new_tokens_of_a_turn_and_not_with_its_prompt() -> None:
    player = SessionPlayer()
    chat = [HI]
    for number in range(20):
        chat += [player.ask(chat, says(f"{number}")), user("on")]
    held = [(turn.new_token_ids, turn.sampled_token_ids) for turn in player.tree.turns]
    assert sum(len(new) + len(said) for new, said in held) == len(player.tree.nodes[19].full_ids())
    # No array is a view, which would keep a whole prompt in memory.
    assert all(new.base is None for new, _ in held)


def test_rewards_of_turns_are_added_to_the_reward_of_the_session() -> None:
    player = SessionPlayer()
    one = player.ask([HI], says("1"), is_malformed=True)
    player.ask([HI, one, user("no")], says("2"))
    (sample,) = player.samples(reward=1.0, components={"hit": 1.0}, turn_rewards={0: 0.5, 1: 0.25})
    assert [turn.reward for turn in sample.turns] == [0.5, 1.25]
    assert [turn.reward_components for turn in sample.turns] == [{}, {"hit": 1.0}]
    assert [turn.is_malformed for turn in sample.turns] == [True, False]
    assert totals_of(player.tree).num_malformed == 1
    np.testing.assert_array_equal(sample.versions[sample.mask == 1], [0, 0, 1, 1])
    (unscored,) = player.samples()
    assert [turn.reward for turn in unscored.turns] == [0.0, 0.0]


def test_a_turn_can_be_continued_with_other_instructions() -> None:
    player = SessionPlayer()
    rules = {"instructions": "rules"}
    said = player.ask([system("rules"), HI], says("1"), request=rules)
    for instructions in ("other rules", ""):
        request = {"continues": "s-0.0", "instructions": instructions}
        player.ask([user("on")], says("2"), request=request)
        begun = [system(instructions)] if instructions else []
        place = player.places[-1]
        assert (place.parent, place.new_messages) == (None, (*begun, HI, said, user("on")))
        assert place.is_instructed == bool(instructions)
    # With the first instructions again, a request continues the turn that had them.
    player.ask([user("off")], says("3"), request={"continues": "s-0.1", **rules})
    player.ask([user("off")], says("3"), request={"continues": "s-0.1"})
    assert parents(player) == [None, None, None, 0, 1]
    assert [node.is_instructed for node in player.rebuilt().turns] == [
        True,
        True,
        False,
        True,
        True,
    ]


def test_instructions_do_not_replace_a_message() -> None:
    """Check a conversation that begins with a developer's message; instructions precede it."""
    player = SessionPlayer()
    rules, said = system("rules"), says("1")
    player.ask([rules, HI], said)
    player.ask([user("on")], says("2"), request={"continues": "s-0.0", "instructions": ""})
    player.ask([user("on")], says("2"), request={"continues": "s-0.0", "instructions": "be brief"})
    begun = (system("be brief"), rules, HI, said, user("on"))
    assert (player.places[-1].parent, player.places[-1].new_messages) == (None, begun)
    # The next instructions replace the earlier ones and not the message.
    player.ask([user("off")], says("3"), request={"continues": "s-0.2", "instructions": "be long"})
    assert player.places[-1].new_messages[:3] == (system("be long"), rules, HI)
    player.ask([user("off")], says("3"), request={"continues": "s-0.2"}, tools=(CALCULATOR,))
    assert player.places[-1].new_messages[:3] == begun[:3] and player.places[-1].is_instructed
    assert parents(player) == [None, 0, None, None, None]
