"""Tests of reward functions, tools and environments that run in worker processes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from worlds.models.chatml import chatml_tokenizer
from worlds.parts.environment_fakes import GuessFour

from actors.environment import workers
from actors.environment.actor import EnvironmentActor
from actors.environment.builtin.single_turn import SingleTurnEnvironment, SingleTurnOptions
from actors.environment.builtin.tools import ToolsEnvironment, ToolsOptions
from actors.environment.evaluation import plays_of
from actors.environment.fork_server import WorkerLost
from actors.environment.protocol import Action, RewardError, ToolCall
from actors.environment.settings import (
    EnvironmentActorSettings,
    EnvironmentSettings,
    RolloutSettings,
    rollout_settings,
)
from actors.environment.worker_environment import WorkerEnvironment
from actors.options import read
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.types import Outcome, Task
from actors.user_code import CallFailed, CallTimedOut, bounded, describe

MODULE = '''
import asyncio, os, signal, threading, time
from actors.environment.protocol import Message, Observation, RewardError, Role, StepResult

def score(completion, log_metric):
    if completion == "hang": time.sleep(10**6)
    if completion == "die": os._exit(11)
    if completion == "raise": raise ValueError("no number in it")
    log_metric("length", len(completion))
    return float(threading.current_thread() is threading.main_thread())

def hangs(completion): time.sleep(10**6)

def alarmed(completion):
    def ring(*_): raise TimeoutError
    signal.signal(signal.SIGALRM, ring)
    signal.alarm(5)
    signal.alarm(0)
    return 1.0

def long() -> str:
    """Say much."""
    return "x" * 50

def label(tags: dict) -> str:
    """Label it."""
    return tags["names"].pop()

def names_left(messages):
    [called] = messages.pop(0)["tool_calls"]
    return float(len(called["function"]["arguments"]["tags"]["names"]))

def slow(word: str) -> str:
    """Take a while."""
    time.sleep(0.3)
    return word

def dies() -> str:
    """End."""
    os._exit(11)

class Desk:
    def reset(self, answer, **columns):
        self.answer, self.items = answer, []
        # A worker cannot send an open file.
        self.file = open(os.devnull)
        return self if columns.get("shown") == "self" else columns.get("shown", " Desk:")
    async def close(self):
        self.file.close()
        return self.file
    def put(self, item: str) -> int:
        """Put it there."""
        self.items.append(item)
        return len(self.items)
    def look(self) -> list:
        """Look at it."""
        return [{"type": "image", "image": object()}, {"type": "text", "text": "4 items"}]
    def hang(self) -> str:
        """Hang."""
        time.sleep(10**6)
    def get_reward(self):
        return float(self.answer in self.items)

def read(environment, completion): return len(environment.items)

class Game:
    def __init__(self, start=1): self.number = start
    async def reset(self, board):
        if board.data.get("breaks"): raise KeyError("no such game")
        return Observation(messages=(Message(role=Role.USER, content=f"from {self.number}"),))
    # A class gives its arguments names of its own.
    async def step(self, move, /):
        if move.text == "hang": time.sleep(10**6)
        if move.text == "wait": await asyncio.sleep(10**6)
        async def rescore(): return StepResult(reward=2.0, terminated=True)
        if move.text == "unscored": raise RewardError("no judge", rescore=rescore)
        self.number += 1
        return StepResult(reward=float(self.number), terminated=True)
    async def close(self): self.number = 0
'''


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions")
    (path / "contained_of_test.py").write_text(MODULE)
    return path


@pytest.fixture(autouse=True)
def importable(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))


def task(**data: Any) -> Task:
    return Task(task_id="t7", environment="e", seed=1, data={"prompt": "Go.", **data})


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def scored_by(function: str) -> SingleTurnEnvironment:
    return SingleTurnEnvironment(SingleTurnOptions(reward={function: 1.0}))


async def made(**options: Any) -> ToolsEnvironment:
    options["tools"] = [f"contained_of_test.py:{name}" for name in options.pop("tools").split()]
    environment = ToolsEnvironment(read(ToolsOptions, options, where="options"))
    await environment.reset(task(answer="pen"))
    return environment


async def said(environment: ToolsEnvironment, *calls: ToolCall) -> list[str]:
    result = await environment.step(Action(text="", calls=calls))
    return [message.content for message in result.messages]


async def test_a_reward_function_runs_in_a_main_thread_and_its_metrics_are_returned() -> None:
    environment = scored_by("contained_of_test.py:score")
    await environment.reset(task())
    result = await environment.step(Action(text="four"))
    assert result.reward == 1.0 and result.metrics == {"length": 4.0}
    alarmed = scored_by("contained_of_test.py:alarmed")
    await alarmed.reset(task())
    assert (await alarmed.step(Action(text="four"))).reward == 1.0


@pytest.mark.parametrize(
    ("text", "words", "is_tried_again"),
    [
        ("hang", "score did not answer within 0.5 s and was ended", False),
        ("die", "score: its process ended itself with status 11", True),
        ("raise", "score raised ValueError: no number in it", True),
    ],
)
async def test_a_reward_function_that_fails_is_a_reward_error(
    text: str, words: str, is_tried_again: bool
) -> None:
    environment = scored_by("contained_of_test.py:score")
    await environment.reset(task())
    assert (await environment.step(Action(text="warm"))).reward == 1.0
    rollout_settings.set(RolloutSettings(reward_limit_s=0.5))
    with pytest.raises(RewardError) as raised:
        await environment.step(Action(text=text))
    assert str(raised.value) == words
    assert (raised.value.rescore is not None) == is_tried_again
    rollout_settings.set(RolloutSettings())
    assert (await environment.step(Action(text="four"))).reward == 1.0


async def test_a_cut_result_says_that_it_is_cut_and_a_tool_that_dies_gives_an_error() -> None:
    environment = await made(tools="long dies", reward="contained_of_test.py:score")
    environment._max_answer_chars = 20
    assert await said(environment, call("long"), call("dies")) == [
        "x" * 20 + "\n[cut off: the first 20 of 50 characters]",
        "error: its process ended itself with status 11",
    ]


async def test_calls_of_a_turn_run_in_parallel_if_the_settings_say_so() -> None:
    environment = await made(tools="slow", reward="contained_of_test.py:score")
    calls = [call("slow", word=each) for each in "abcd"]
    rollout_settings.set(RolloutSettings(max_calls_per_turn=3))
    assert await said(environment, *calls) == ["a", "b", "c"]
    rollout_settings.set(RolloutSettings(parallel_calls=True))
    assert await said(environment, *calls) == ["a", "b", "c", "d"]
    started = asyncio.get_running_loop().time()
    assert len(await said(environment, *calls, *calls)) == 8
    assert asyncio.get_running_loop().time() - started < 8 * 0.3


@pytest.mark.parametrize("inline", [True, False])
async def test_what_a_function_does_to_its_arguments_changes_no_later_call(inline: bool) -> None:
    rollout_settings.set(RolloutSettings(inline=inline))
    environment = await made(tools="label", reward="contained_of_test.py:names_left")
    assert await said(environment, call("label", tags={"names": ["a", "b"]})) == ["b"]
    for _ in range(2):
        assert (await environment.step(Action(text="Done."))).reward == 2.0


async def test_an_instance_keeps_its_state_until_its_worker_ends() -> None:
    first, second = [
        await made(tools="Desk", reward="contained_of_test.py:read", call_limit_s=2.0)
        for _ in range(2)
    ]
    assert await said(first, call("put", item="cup"), call("put", item="pen")) == ["1", "2"]
    assert await said(second, call("put", item="cup")) == ["1"]
    result = await first.step(Action(text="done"))
    assert result.reward_components == {"read": 2.0, "get_reward": 1.0}
    with pytest.raises(WorkerLost, match="hang: no answer within"):
        await said(first, call("hang"))
    with pytest.raises(WorkerLost):
        await said(first, call("put", item="cup"))
    with pytest.raises(WorkerLost):
        await first.close()
    assert await said(second, call("put", item="pen")) == ["2"] or second._home is not None
    await second.close()


@pytest.mark.parametrize("inline", [True, False])
async def test_text_parts_of_a_reset_are_added_and_other_values_are_refused(inline: bool) -> None:
    rollout_settings.set(RolloutSettings(inline=inline))
    parts = [{"type": "text", "text": " Board"}, {"type": "text", "text": ": X."}]
    unshown = ((shown, "") for shown in (None, [], True, False, "self"))
    for shown, added in ((parts, " Board\n: X."), (" X.", " X."), *unshown):
        environment = ToolsEnvironment(ToolsOptions(tools=("contained_of_test.py:Desk",)))
        start = await environment.reset(task(answer="", shown=shown))
        assert start.messages[-1].content == f"Go.{added}"
        await environment.close()
    for shown, got in (
        ([*parts, {"type": "image"}], r"a wrong list: content\[2\]: got a dict of type 'image'"),
        ({"a": 1}, "a dict, expected text, a list of text parts or None; return one of these"),
    ):
        environment = ToolsEnvironment(ToolsOptions(tools=("contained_of_test.py:Desk",)))
        with pytest.raises(ValueError, match=f"tool .*Desk: reset returned {got}"):
            await environment.reset(task(answer="", shown=shown))
        await environment.close()


@pytest.mark.parametrize("inline", [True, False])
async def test_an_image_of_a_tool_is_an_error_that_the_policy_reads(inline: bool) -> None:
    rollout_settings.set(RolloutSettings(inline=inline))
    environment = ToolsEnvironment(ToolsOptions(tools=("contained_of_test.py:Desk",)))
    await environment.reset(task(answer=""))
    [answer] = (await environment.step(Action(text="…", calls=(call("look"),)))).messages
    assert answer.content.startswith("error: the tool returned a list that cannot be written as")
    await environment.close()


async def test_an_environment_in_a_worker_behaves_like_the_environment_itself() -> None:
    environment = WorkerEnvironment("contained_of_test:Game", {"start": 4})
    start = await environment.reset(task())
    assert start.messages[0].content == "from 4"
    assert (await environment.step(Action(text="x"))).reward == 5.0
    with pytest.raises(RewardError, match="no judge") as raised:
        await environment.step(Action(text="unscored"))
    assert raised.value.rescore is not None
    assert (await raised.value.rescore()).reward == 2.0
    with pytest.raises(CallFailed) as failed:
        await bounded(lambda: environment.reset(task(breaks=True)), limit_s=20)
    assert describe(failed.value.error) == "KeyError: 'no such game'"
    with pytest.raises(CallTimedOut):
        await bounded(lambda: environment.step(Action(text="wait")), limit_s=0.3)
    assert (await environment.step(Action(text="x"))).reward == 6.0
    with pytest.raises(CallTimedOut):
        await bounded(lambda: environment.step(Action(text="hang")), limit_s=0.3)
    with pytest.raises(WorkerLost):
        await environment.step(Action(text="x"))
    with pytest.raises(WorkerLost):
        await environment.close()


async def test_the_ping_of_an_actor_lists_the_calls_that_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_pools", threading.local())
    chatml_tokenizer().save_pretrained(str(tmp_path))
    played = EnvironmentSettings(
        environment="single_turn", options={"reward": "contained_of_test.py:hangs"}
    )
    actor = EnvironmentActor(
        EnvironmentActorSettings(
            rollouts=RolloutSettings(reward_limit_s=0.5),
            environments={"e": played},
            chat_template=None,
            groups_per_step=1,
            max_context_tokens=256,
        ),
        actor_id="e0",
        tokenizer_path=str(tmp_path),
        make_policy=lambda: GuessFour(build_tokenizer().encode("4"), delay_s=0.0),
        queue=None,
    )
    assert await actor.ping() == ((), 0)
    (found,) = await actor.evaluate(plays_of([task()], 1))
    assert found.summary.outcome is Outcome.REWARD_ERROR
    (lost,), _ = await actor.ping()
    assert (lost.function, lost.end) == ("contained_of_test.py:hangs", "killed")
    assert (lost.count, lost.tasks) == (1, ("t7",)) and "0.5 s" in lost.why
