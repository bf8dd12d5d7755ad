"""Tests of the worked sessions of docs/sessions.md over the real routes.

They check which turns are trained and which turn gets the reward. In a request, `back(N)` is the
reply to request N, sent back.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from worlds.builders.episode_builders import reply
from worlds.parts.gateway_world import NAME, SPEC, Gateway, Policy
from worlds.parts.session_app import SessionRun

from actors.types import FinishReason, Outcome, Trajectory
from service.config.sections import SessionSettings, Titles
from service.gateway.bodies import NewSession
from service.intake.session import Finish

AUXILIARY = {"x-rayloom-auxiliary": "1"}
RETRY = {"x-stainless-retry-count": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, and the reply of the policy to it."""

    messages: Sequence[tuple[str, Any]]
    """Pairs: a role and a text, "reply" and a request number, "result" and (number, text)."""
    said: str = ""
    tools: tuple[str, ...] = ()
    headers: dict[str, str] | None = None
    is_cut: bool = False
    status: int = 200


def called(name: str, text: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'q': text}})}</tool_call>"


def ask(*messages: tuple[str, Any], said: str = "", **fields: Any) -> Asked:
    return Asked(messages=messages, said=said, **fields)


def system(text: str) -> tuple[str, str]:
    return "system", text


def user(text: str) -> tuple[str, str]:
    return "user", text


def back(number: int) -> tuple[str, int]:
    return "reply", number


def result(number: int, text: str) -> tuple[str, tuple[int, str]]:
    return "result", (number, text)


class Agent:
    """An agent that sends the requests of a session as a library would."""

    def __init__(self, client: httpx.AsyncClient, gateway: Gateway) -> None:
        self.client, self.gateway = client, gateway
        self.session = NewSession.of(NAME, client_key="", address="http://localhost")
        self.script: list[Asked] = []
        self.answers: list[dict[str, Any]] = []

    async def ask(self, asked: Asked) -> dict[str, Any]:
        self.script.append(asked)
        body: dict[str, Any] = {
            "model": "policy",
            "messages": [*map(self._message, asked.messages)],
        }
        if asked.tools:
            body["tools"] = [*map(schema, asked.tools)]
        answer = await self.client.post(
            f"/sessions/{NAME}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {self.session.agent_key}", **(asked.headers or {})},
        )
        assert answer.status_code == asked.status, answer.text
        self.answers.append(answer.json())
        return self.answers[-1]

    async def view(self) -> dict[str, Any]:
        return (await self.client.get(f"/api/v1/sessions/{NAME}")).json()

    async def give(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.client.request(
            "PUT" if path == "reward" else "POST",
            f"/api/v1/sessions/{NAME}/{path}",
            json=body,
            headers={"authorization": f"Bearer {self.session.reward_key}"},
        )

    def _message(self, given: tuple[str, Any]) -> dict[str, Any]:
        kind, value = given
        if kind == "reply":
            return self.answers[value]["choices"][0]["message"]
        if kind == "result":
            (call,) = self.answers[value[0]]["choices"][0]["message"]["tool_calls"]
            return {"role": "tool", "tool_call_id": call["id"], "content": value[1]}
        return {"role": kind, "content": value}


def schema(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"q": {}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@asynccontextmanager
async def agent(
    directory: Path,
    *,
    titles: Titles = "train",
    max_context_tokens: int = 4000,
    turns: int = 8,
) -> AsyncIterator[Agent]:
    """Open a session and yield its agent."""
    agents: list[Agent] = []

    def answer(number: int) -> Any:
        asked = agents[0].script[-1]
        if asked.is_cut:
            return reply(asked.said, finish_reason=FinishReason.LENGTH)
        return reply(f"{asked.said}<|im_end|>")

    gateway = Gateway(
        directory,
        policy=Policy(answer),
        settings=SessionSettings(hold_s=20, titles=titles),
        max_context_tokens=max_context_tokens,
    )
    await gateway.opened(spec=replace(SPEC, max_tokens_per_turn=400, max_turns=turns))
    transport = httpx.ASGITransport(app=SessionRun(gateway).app())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        agents.append(Agent(client, gateway))
        yield agents[0]
    gateway.sessions.close()
    gateway.store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """A session of the table in docs/sessions.md."""

    name: str
    asked: Sequence[Asked]
    judged: int
    """The number of the turn that gets the reward."""
    left_out: dict[int, str] | None = None
    """Reasons of the turns that are left out by default, by turn number."""
    titles: dict[int, str] | None = None
    """Reasons of the turns that `titles: leave_out` leaves out in addition."""


TASK, RULES = user("Where is order 7?"), system("You are an agent.")
ROUTES, BILLING = system("You route customers."), system("You are the specialist.")
LOOKUP, MOVE = called("lookup", "seven"), called("transfer", "")
WORKED = (
    Worked(
        name="title",
        asked=[
            ask(RULES, TASK, said=LOOKUP, tools=("lookup",)),
            ask(system("Name this chat."), TASK, said="An order"),
            ask(RULES, TASK, back(0), result(0, "sent"), said="It was sent.", tools=("lookup",)),
        ],
        judged=2,
        titles={1: "title"},
    ),
    Worked(
        name="title at the end",
        asked=[
            ask(RULES, TASK, said=LOOKUP, tools=("lookup",)),
            ask(RULES, TASK, back(0), result(0, "sent"), said="It was sent.", tools=("lookup",)),
            ask(system("Name this chat."), TASK, said="An or", is_cut=True),
        ],
        judged=1,
        titles={2: "title"},
    ),
    Worked(
        name="hand-off",
        asked=[
            ask(ROUTES, TASK, said=LOOKUP, tools=("lookup", "transfer")),
            ask(ROUTES, TASK, back(0), result(0, "sent"), said=MOVE, tools=("lookup", "transfer")),
            ask(
                BILLING,
                TASK,
                back(0),
                result(0, "sent"),
                back(1),
                result(1, "ok"),
                said="It is on its way.",
            ),
        ],
        judged=2,
    ),
    Worked(
        name="hand-off at once",
        asked=[
            ask(ROUTES, TASK, said=MOVE, tools=("transfer",)),
            ask(BILLING, TASK, back(0), result(0, "ok"), said="It is on its way."),
        ],
        judged=1,
    ),
    Worked(
        name="router",
        asked=[
            ask(system("Name the one who knows."), TASK, said="billing"),
            ask(system("You are billing."), TASK, said="It is on its way."),
        ],
        judged=1,
        titles={0: "title"},
    ),
    Worked(
        name="helper",
        asked=[
            ask(RULES, TASK, said=called("helper", "find parcel seven"), tools=("helper",)),
            ask(system("You help."), user("find parcel seven"), said="in Rome"),
            ask(RULES, TASK, back(0), result(0, "in Rome"), said="It is there.", tools=("helper",)),
        ],
        judged=2,
    ),
    Worked(
        name="selector",
        asked=[
            ask(system("Who speaks next?"), TASK, said="writer"),
            ask(system("You write."), TASK, user("writer, continue"), said="A draft."),
            ask(system("Who speaks next?"), TASK, user("A draft."), said="critic"),
            ask(system("You judge."), TASK, user("A draft."), said="Good."),
        ],
        judged=3,
        titles={0: "title"},
    ),
    Worked(
        name="compaction",
        asked=[
            ask(RULES, TASK, said="Which one?"),
            ask(RULES, TASK, back(0), user("The red one."), said="I look."),
            ask(
                system("You summarise."),
                user("Which one? The red one. I look."),
                said="red is sought",
            ),
            ask(RULES, user("So far: red is sought. Go on."), said="It was sent."),
        ],
        judged=3,
    ),
    Worked(
        name="clock",
        asked=[
            ask(system("It is 7:01."), TASK, said=LOOKUP, tools=("lookup",)),
            ask(
                system("It is 7:02."),
                TASK,
                back(0),
                result(0, "sent"),
                said="Sent.",
                tools=("lookup",),
            ),
        ],
        judged=1,
    ),
    Worked(
        name="retry",
        asked=[
            ask(RULES, TASK, said="Which one?"),
            ask(RULES, TASK, headers=RETRY),
            ask(RULES, TASK, said="Sent."),
        ],
        judged=1,
    ),
    Worked(
        name="sub-agent",
        asked=[
            ask(RULES, TASK, said=called("task", "search the log"), tools=("task",)),
            ask(system("You search."), user("search the log"), said=LOOKUP, tools=("lookup",)),
            ask(
                system("You search."),
                user("search the log"),
                back(1),
                result(1, "row 3"),
                said="row 3",
                tools=("lookup",),
            ),
            ask(RULES, TASK, back(0), result(0, "row 3"), said="It was sent.", tools=("task",)),
        ],
        judged=3,
    ),
    Worked(
        name="auxiliary",
        asked=[
            ask(RULES, TASK, said="Which one?"),
            ask(RULES, TASK, back(0), user("The red one."), said="Sent."),
            ask(system("Is it rude?"), user("Which one? Sent."), said="no", headers=AUXILIARY),
        ],
        judged=1,
        left_out={2: "auxiliary"},
    ),
)


@pytest.mark.parametrize("titles", get_args(Titles))
@pytest.mark.parametrize("worked", WORKED, ids=lambda each: each.name)
async def test_a_worked_session(tmp_path: Path, worked: Worked, titles: Titles) -> None:
    expected = dict(worked.left_out or {})
    if titles == "leave_out":
        expected |= worked.titles or {}
    listed = [{"turn": number, "reason": reason} for number, reason in expected.items()]
    async with agent(tmp_path, titles=titles) as player:
        for asked in worked.asked:
            await player.ask(asked)
        live = await player.view()
        assert (live["left_out_turns"], live["left_out"]) == (listed, len(listed))
        finished = await player.give("finish", {"reward": 0.5, "components": {"won": 1.0}})
        assert finished.status_code == 200, finished.text
        assert finished.json()["left_out_turns"] == listed
        assert finished.json()["outcome"] == "completed"
        trajectory = await player.gateway.trajectory()
        assert (await player.view())["left_out_turns"] == listed
    trained = [n for n in range(finished.json()["turns"]) if n not in expected]
    assert [turn.reward for turn in trajectory.turns] == [
        0.5 * (number == worked.judged) for number in trained
    ]
    judged = trajectory.turns[trained.index(worked.judged)]
    assert judged.reward_components == {"won": 1.0}
    assert {number: why.value for number, why in trajectory.left_out.items()} == expected
    assert trajectory.outcome is Outcome.COMPLETED and trajectory.is_graded


@pytest.mark.parametrize(
    "title",
    [
        pytest.param({"tools": ("lookup",)}, id="with tools"),
        pytest.param({"messages": (user("Is it sent? Which one?"),)}, id="about a sampled text"),
        pytest.param({"messages": (user("Another question."),)}, id="about another question"),
        pytest.param({"said": "in Rome"}, id="a later message"),
        pytest.param({"said": "12"}, id="a value inside of a later call"),
    ],
)
async def test_leaving_titles_out_leaves_out_nothing_else(
    tmp_path: Path, title: dict[str, Any]
) -> None:
    call = called("lookup", "seven").replace('"seven"', '{"inner": ["in Paris", 12]}')
    first = ask(RULES, TASK, said="Which one?", tools=("lookup",))
    more = (RULES, TASK, back(0), user("in Rome"))
    asked = [
        first,
        replace(ask(system("Name this chat."), TASK, said="A title"), **title),
        ask(*more, said=call, tools=("lookup",)),
    ]
    async with agent(tmp_path, titles="leave_out") as player:
        for each in asked:
            await player.ask(each)
        assert (await player.view())["left_out_turns"] == []


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param((TASK, ("assistant", "<code>look()</code>")), id="a longer reply"),
        pytest.param((TASK, ("assistant", "look")), id="a shorter reply"),
        pytest.param((RULES, TASK, ("assistant", "So: <code>look()")), id="a clock"),
    ],
)
async def test_a_rewritten_first_reply_is_not_left_out_as_a_title(
    tmp_path: Path, begun: tuple[tuple[str, Any], ...]
) -> None:
    """Check histories of smolagents, which closes code that a stop string cut and sends it back."""
    async with agent(tmp_path, titles="leave_out") as player:
        await player.ask(ask(TASK, said="<code>look()"))
        again = (*begun, user("seen"))
        await player.ask(ask(*again, said="It is sent."))
        await player.ask(ask(*again, back(1), user("Sure?"), said="Yes."))
        assert (await player.view())["left_out_turns"] == []


async def test_a_request_for_a_title_may_begin_like_the_prompt_of_the_agent(
    tmp_path: Path,
) -> None:
    async with agent(tmp_path, titles="leave_out") as player:
        await player.ask(ask(TASK, said="A title"))
        await player.ask(ask(TASK, said=called("lookup", "seven"), tools=("lookup",)))
        more = (TASK, back(1), result(1, "sent"))
        await player.ask(ask(*more, said="It is sent.", tools=("lookup",)))
        assert (await player.view())["left_out_turns"] == [{"turn": 0, "reason": "title"}]


async def test_another_sample_of_a_prompt_is_not_left_out_as_a_title(tmp_path: Path) -> None:
    async with agent(tmp_path, titles="leave_out") as player:
        for said in ("Sent.", "Lost."):
            await player.ask(ask(RULES, TASK, said=said))
        await player.ask(ask(RULES, TASK, back(1), user("Sure?"), said="Yes."))
        assert (await player.view())["left_out_turns"] == []


async def test_an_auxiliary_call_about_a_turn_does_not_give_it_the_reward(
    tmp_path: Path,
) -> None:
    async with agent(tmp_path) as player:
        await player.ask(ask(TASK, said="Which one?"))
        await player.ask(ask(TASK, back(0), user("A title?"), said="Title", headers=AUXILIARY))
        await player.ask(ask(RULES, user("Another and longer question."), said="Sent."))
        rewards = [[turn.reward for turn in each.turns] for each in (await ended(player)).samples]
    assert rewards == [[0.0], [1.0]]


async def test_a_named_turn_gets_the_reward(tmp_path: Path) -> None:
    async with agent(tmp_path) as player:
        await player.ask(ask(RULES, TASK, said="Which one?"))
        await player.ask(ask(RULES, TASK, back(0), user("The red one."), said="Sent."))
        await player.ask(ask(system("Rude?"), TASK, said="no", headers=AUXILIARY))
        for turn, words in ((3, "below 3"), (2, "auxiliary")):
            for body in ({"turn": turn}, {"turn_rewards": {turn: 1.0}}):
                refused = await player.give("finish", {"reward": 1.0, **body})
                assert refused.status_code == 400 and words in refused.json()["detail"], body
                assert refused.json()["errors"] == [{"loc": ["body", next(iter(body))]}]
        wanted = {"reward_pending": True, "turn": 0}
        assert (await player.give("finish", wanted)).status_code == 200
        refused = await player.give("reward", {"reward": 1.0, "turn_rewards": {2: 1.0}})
        assert refused.status_code == 400 and "auxiliary" in refused.json()["detail"]
        after = await player.gateway.restart(NAME)
        rewarded = await after.sessions.give_reward(
            NAME, after.key("reward"), Finish(reward=1.0, turn_rewards={1: 0.25})
        )
        assert rewarded.end.reward == 1.0
        trajectory = await after.trajectory()
        after.sessions.close()
        after.store.close()
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.25]


LONG = user("word " * 400)


async def ended(player: Agent) -> Trajectory:
    """Restart the gateway, finish the session with reward 1, and return its trajectory."""
    after = await player.gateway.restart(NAME)
    await after.finish(1.0)
    trajectory = await after.trajectory()
    after.sessions.close()
    after.store.close()
    return trajectory


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        pytest.param([], Outcome.TRUNCATED_CONTEXT, id="nothing after it"),
        pytest.param(
            [ask(RULES, user("Summary: red. Go on."), said="Sent.")],
            Outcome.COMPLETED,
            id="compaction to one turn",
        ),
        pytest.param(
            [
                ask(RULES, user("Summary: red. Go on."), said="I look."),
                ask(RULES, user("Summary: red. Go on."), back(2), user("And?"), said="Sent."),
            ],
            Outcome.COMPLETED,
            id="compaction",
        ),
        pytest.param(
            [ask(RULES, TASK, back(0), user("short"), said="Sent.")],
            Outcome.COMPLETED,
            id="a shorter request",
        ),
        pytest.param(
            [ask(RULES, TASK, back(0), user("short"), said="Sent", is_cut=True)],
            Outcome.TRUNCATED_TOKENS,
            id="a reply that is cut off",
        ),
        pytest.param(
            [ask(RULES, TASK, said="It was sent.")],
            Outcome.COMPLETED,
            id="the task once more",
        ),
        pytest.param(
            [ask(system("Name it."), user("Name: Where is order 7?"), said="An order")],
            Outcome.TRUNCATED_CONTEXT,
            id="a title after it",
        ),
        pytest.param(
            [ask(RULES, TASK, back(0), user("short"), said="rude", headers=AUXILIARY)],
            Outcome.TRUNCATED_CONTEXT,
            id="an auxiliary call after it",
        ),
    ],
)
async def test_a_refused_request_decides_the_outcome_if_nothing_follows_it(
    tmp_path: Path, then: list[Asked], outcome: Outcome
) -> None:
    async with agent(tmp_path, max_context_tokens=200) as player:
        await player.ask(ask(RULES, TASK, said="Which one?"))
        await player.ask(ask(RULES, TASK, back(0), LONG, status=400))
        for asked in then:
            await player.ask(asked)
        assert (await ended(player)).outcome is outcome


@pytest.mark.parametrize(
    ("refused", "headers"),
    [((system("Name it."), LONG), None), ((RULES, TASK, back(0), LONG), AUXILIARY)],
    ids=["title", "auxiliary"],
)
async def test_a_refused_title_or_auxiliary_call_does_not_change_the_outcome(
    tmp_path: Path, refused: tuple[Any, ...], headers: dict[str, str] | None
) -> None:
    async with agent(tmp_path, max_context_tokens=200) as player:
        await player.ask(ask(RULES, TASK, said="Which one?"))
        await player.ask(ask(RULES, TASK, back(0), user("The red one."), said="Sent."))
        await player.ask(ask(*refused, headers=headers, status=400))
        assert (await ended(player)).outcome is Outcome.COMPLETED


async def test_every_sampled_turn_counts_against_the_limit(tmp_path: Path) -> None:
    async with agent(tmp_path, turns=3, titles="leave_out") as player:
        await player.ask(ask(RULES, TASK, said="Which one?"))
        await player.ask(ask(system("Rude?"), TASK, said="no", headers=AUXILIARY))
        await player.ask(ask(system("Name it."), TASK, said="An order"))
        body = ask(RULES, TASK, back(0), user("The red one."), status=400)
        assert (await player.ask(body))["error"]["code"] == "rollout_stopped"
        assert (await ended(player)).outcome is Outcome.MAX_TURNS


@pytest.mark.parametrize(
    ("body", "episode_return"),
    [({}, 0.75), ({"reward": 1.0}, 1.75), ({"reward": None}, None)],
    ids=["left out", "given", "null"],
)
async def test_a_session_may_have_only_rewards_of_turns(
    tmp_path: Path, body: dict[str, Any], episode_return: float | None
) -> None:
    async with agent(tmp_path) as player:
        await player.ask(ask(RULES, TASK, said="Which one?"))
        body = {**body, "turn_rewards": {"0": 0.75}}
        assert (await player.give("finish", body)).status_code == 200
        trajectory = await player.gateway.trajectory()
    if episode_return is None:
        assert trajectory.outcome is Outcome.REWARD_ERROR
        return
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.episode_return == episode_return


@pytest.mark.parametrize("reward", [0.0, 1.0])
async def test_a_cut_off_session_with_a_reward_of_0_is_graded(
    tmp_path: Path, reward: float
) -> None:
    async with agent(tmp_path) as player:
        await player.ask(ask(RULES, TASK, said="On its w", is_cut=True))
        assert (await player.give("finish", {"reward": reward})).status_code == 200
        trajectory = await player.gateway.trajectory()
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS and trajectory.is_graded
