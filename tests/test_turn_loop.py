"""One episode, every outcome: the loop never raises and keeps the turns so far."""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial

import numpy as np
import pytest
from chatml import chatml_tokenizer

from actors.environment.bounded import num_abandoned
from actors.environment.calculator import CalculatorEnvironment
from actors.environment.guessing import GuessingEnvironment
from actors.environment.protocol import (
    Action,
    Environment,
    Message,
    Observation,
    RewardError,
    Role,
    StepResult,
)
from actors.environment.rendering import ChatRenderer
from actors.environment.turn_loop import EpisodeSettings, play_episode
from actors.policy import (
    GenerateReply,
    GenerateRequest,
    PolicyClient,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
)
from actors.trajectory import (
    FinishReason,
    Outcome,
    RolloutAssignment,
    Task,
    Trajectory,
    VersionSpan,
)

ASSIGNMENT = RolloutAssignment(
    rollout_id="r1",
    group_id="g1",
    group_number=4,
    attempt=1,
    task=Task(task_id="t1", environment="any", seed=5),
)
SETTINGS = EpisodeSettings(
    max_turns=4,
    max_tokens_per_turn=16,
    max_context_tokens=400,
    temperature=1.0,
    turn_deadline_s=5.0,
    episode_deadline_s=10.0,
)
HELLO = Observation(messages=(Message(role=Role.USER, content="hi"),), best_return=2.0)
ON = StepResult(messages=(Message(role=Role.USER, content="lower"),), reward=0.25)
DONE = StepResult(reward=1.0, reward_components={"hit": 1.0}, terminated=True)


_tokenizer = cache(chatml_tokenizer)


@cache
def _renderer() -> ChatRenderer:
    return ChatRenderer(_tokenizer())


def _reply(text: str = "4<|im_end|>", **changes: object) -> GenerateReply:
    ids = np.array(_tokenizer().encode(text), dtype=np.int32)
    fields: dict[str, object] = {
        "token_ids": ids,
        "logprobs": np.full(ids.shape, -0.5, dtype=np.float32),
        "finish_reason": FinishReason.STOP,
        "version_spans": (VersionSpan(version=3, start=0, end=len(ids)),) if len(ids) else (),
        "cache_salt": "v3",
    }
    return GenerateReply(**(fields | changes))  # type: ignore[arg-type]


class FakePolicy:
    """Answers with what it was given, in order, the last one for ever; errors are raised."""

    def __init__(self, *replies: GenerateReply | Exception, delay_s: float = 0.0) -> None:
        self.replies = list(replies or [_reply()])
        self.delay_s = delay_s
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


class FakeEnvironment:
    """Plays back results; a callable among them is called and awaited."""

    def __init__(
        self,
        *results: StepResult | Callable[[], Awaitable[StepResult]],
        start: Callable[[], Awaitable[Observation]] | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.results = list(results)
        self.start = start
        self.end = end
        self.actions: list[Action] = []
        self.num_closed = 0

    async def reset(self, task: Task) -> Observation:
        return HELLO if self.start is None else await self.start()

    async def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        return result if isinstance(result, StepResult) else await result()

    async def close(self) -> None:
        self.num_closed += 1
        if self.end is not None:
            await self.end()


async def _play(
    environment: Environment,
    policy: PolicyClient | None = None,
    *,
    settings: EpisodeSettings = SETTINGS,
    renderer: ChatRenderer | None = None,
) -> Trajectory:
    trajectory = await play_episode(
        ASSIGNMENT,
        make_environment=lambda: environment,
        policy=policy or FakePolicy(),
        renderer=renderer or _renderer(),
        settings=settings,
    )
    if isinstance(environment, FakeEnvironment):
        assert environment.num_closed == 1
    return trajectory


def _with(**changes: float) -> EpisodeSettings:
    fields = {name: getattr(SETTINGS, name) for name in SETTINGS.__slots__}
    return EpisodeSettings(**(fields | changes))  # type: ignore[arg-type]


async def _hang() -> StepResult:
    await asyncio.sleep(3600)
    raise AssertionError


def _raising(error: BaseException) -> Callable[[], Awaitable[StepResult]]:
    async def step() -> StepResult:
        raise error

    return step


async def test_a_finished_game_is_completed_with_its_rewards_and_exact_ids() -> None:
    environment = FakeEnvironment(ON, DONE)
    policy = FakePolicy()
    trajectory = await _play(environment, policy)
    assert trajectory.outcome is Outcome.COMPLETED
    assert (trajectory.trajectory_id, trajectory.group_number) == ("r1.a1", 4)
    assert (trajectory.episode_return, trajectory.best_return) == (1.25, 2.0)
    assert trajectory.turns[1].reward_components == {"hit": 1.0}
    first, second = trajectory.turns
    assert [request.prompt_token_ids.tolist() for request in policy.requests] == [
        first.prompt_token_ids.tolist(),
        second.prompt_token_ids.tolist(),
    ]
    whole = np.concatenate((first.prompt_token_ids, first.sampled_token_ids))
    np.testing.assert_array_equal(second.prompt_token_ids[: len(whole)], whole)
    assert trajectory.num_inserted_tokens == 1  # the template's newline
    assert trajectory.timings.wall_s > 0
    assert [action.text for action in environment.actions] == ["4", "4"]


async def test_the_salt_of_the_first_reply_goes_with_every_later_turn() -> None:
    policy = FakePolicy(_reply(cache_salt="v3"), _reply(cache_salt="v4"), _reply())
    await _play(FakeEnvironment(ON, ON, DONE), policy)
    assert [request.cache_salt for request in policy.requests] == [None, "v3", "v3"]
    assert {request.trajectory_id for request in policy.requests} == {"r1.a1"}


async def test_a_game_without_an_end_stops_at_max_turns_and_keeps_its_rewards() -> None:
    trajectory = await _play(FakeEnvironment(ON))
    assert trajectory.outcome is Outcome.MAX_TURNS
    assert (len(trajectory.turns), trajectory.episode_return) == (4, 1.0)


async def test_the_environments_own_limit_is_not_an_end_of_the_task() -> None:
    trajectory = await _play(FakeEnvironment(StepResult(reward=0.5, truncated=True)))
    assert trajectory.outcome is Outcome.MAX_TURNS
    assert trajectory.episode_return == 0.5


async def test_a_cut_off_turn_is_kept_and_never_shown_to_the_environment() -> None:
    environment = FakeEnvironment(DONE)
    cut = _reply("4 4 4", finish_reason=FinishReason.LENGTH)
    trajectory = await _play(environment, FakePolicy(cut))
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert trajectory.is_truncated and trajectory.num_sampled > 0
    assert environment.actions == [] and trajectory.episode_return == 0.0


async def test_a_prompt_that_leaves_no_room_ends_as_truncated_by_context() -> None:
    policy = FakePolicy()
    prompt_length = _renderer().first_prompt(HELLO.messages, ()).shape[0]
    trajectory = await _play(
        FakeEnvironment(DONE), policy, settings=_with(max_context_tokens=prompt_length)
    )
    assert trajectory.outcome is Outcome.TRUNCATED_CONTEXT
    assert trajectory.turns == () and policy.requests == []


async def test_a_later_prompt_that_leaves_no_room_keeps_the_turns_before() -> None:
    long = StepResult(messages=(Message(role=Role.USER, content="lower " * 400),))
    trajectory = await _play(FakeEnvironment(long))
    assert trajectory.outcome is Outcome.TRUNCATED_CONTEXT
    assert len(trajectory.turns) == 1


async def test_the_room_that_is_left_bounds_the_turn_and_names_its_end() -> None:
    prompt_length = _renderer().first_prompt(HELLO.messages, ()).shape[0]
    policy = FakePolicy(_reply("4 4", finish_reason=FinishReason.LENGTH))
    settings = _with(max_context_tokens=prompt_length + 4)
    trajectory = await _play(FakeEnvironment(DONE), policy, settings=settings)
    assert policy.requests[0].max_tokens == 4
    assert trajectory.outcome is Outcome.TRUNCATED_CONTEXT
    assert len(trajectory.turns) == 1


async def test_an_episode_that_malformed_calls_ended_says_so() -> None:
    end = StepResult(reward=-0.1, terminated=True, is_malformed=True, ended_by_malformed=True)
    trajectory = await _play(FakeEnvironment(end))
    assert trajectory.outcome is Outcome.MALFORMED_TOOL_CALL
    assert trajectory.num_malformed_turns == 1 and trajectory.episode_return == -0.1


async def test_a_malformed_turn_that_ends_nothing_is_only_flagged() -> None:
    bad = StepResult(messages=ON.messages, is_malformed=True)
    trajectory = await _play(FakeEnvironment(bad, DONE))
    assert trajectory.outcome is Outcome.COMPLETED
    assert [turn.is_malformed for turn in trajectory.turns] == [True, False]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PolicyUnavailable("replica died"), Outcome.INFRASTRUCTURE_ERROR),
        (ValueError("prompt too long"), Outcome.INFRASTRUCTURE_ERROR),
        (KeyError("a bug of the client"), Outcome.INFRASTRUCTURE_ERROR),
        (PolicyDeadlineExceeded("late"), Outcome.WALL_TIMEOUT),
    ],
)
async def test_a_policy_that_fails_keeps_the_turns_before(
    error: Exception, outcome: Outcome
) -> None:
    trajectory = await _play(FakeEnvironment(ON), FakePolicy(_reply(), error))
    assert trajectory.outcome is outcome
    assert len(trajectory.turns) == 1 and type(error).__name__ in trajectory.detail


async def test_an_aborted_turn_is_an_infrastructure_error() -> None:
    trajectory = await _play(
        FakeEnvironment(ON), FakePolicy(_reply(finish_reason=FinishReason.ABORT))
    )
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_ERROR
    assert len(trajectory.turns) == 1


async def test_a_policy_that_ignores_its_deadline_is_given_up() -> None:
    trajectory = await _play(
        FakeEnvironment(DONE), FakePolicy(delay_s=3600), settings=_with(turn_deadline_s=0.05)
    )
    assert trajectory.outcome is Outcome.WALL_TIMEOUT
    assert trajectory.timings.generate_s > 0


async def test_no_sampled_token_is_empty_and_keeps_the_turns_before() -> None:
    trajectory = await _play(FakeEnvironment(ON), FakePolicy(_reply(), _reply("")))
    assert trajectory.outcome is Outcome.EMPTY
    assert len(trajectory.turns) == 1


_HALF = np.full(1, -0.5, dtype=np.float32)
_NAN = np.array([-0.5, math.nan], dtype=np.float32)
_INF = np.array([-math.inf, -0.5], dtype=np.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": _HALF},
        {"logprobs": np.zeros(0, dtype=np.float32)},
        {"logprobs": _NAN},
        {"logprobs": _INF},
        {"token_ids": np.zeros(0, dtype=np.int32)},
        {"token_ids": np.array([-1, 5], dtype=np.int32)},
        {"token_ids": np.zeros((2, 1), dtype=np.int32)},
        {"version_spans": ()},
        {"version_spans": (VersionSpan(version=1, start=0, end=1),)},
        {"version_spans": (VersionSpan(version=1, start=1, end=2),)},
        {
            "version_spans": (
                VersionSpan(version=1, start=0, end=0),
                VersionSpan(version=2, start=0, end=2),
            )
        },
    ],
)
async def test_tokens_that_do_not_fit_together_are_misaligned_and_not_kept(
    changes: dict[str, object],
) -> None:
    assert _reply().token_ids.shape == (2,)
    trajectory = await _play(FakeEnvironment(ON), FakePolicy(_reply(), _reply(**changes)))
    assert trajectory.outcome is Outcome.TOKEN_MISALIGNED
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("broken"),
        asyncio.CancelledError(),
        SystemExit(3),
        KeyboardInterrupt(),
        StopAsyncIteration(),
        TimeoutError("its own"),
        RecursionError(),
    ],
)
async def test_whatever_a_step_raises_is_an_environment_error(error: BaseException) -> None:
    trajectory = await _play(FakeEnvironment(ON, _raising(error)))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert len(trajectory.turns) == 2 and trajectory.turns[1].reward == 0.0


async def test_an_environment_that_exits_the_process_does_not() -> None:
    async def leave() -> StepResult:
        sys.exit(1)

    assert (await _play(FakeEnvironment(leave))).outcome is Outcome.ENVIRONMENT_ERROR


@pytest.mark.parametrize("value", [None, 3, {"reward": 1.0}, HELLO])
async def test_a_step_that_returns_something_else_is_an_environment_error(value: object) -> None:
    async def odd() -> StepResult:
        return value  # type: ignore[return-value]

    assert (await _play(FakeEnvironment(odd))).outcome is Outcome.ENVIRONMENT_ERROR


async def test_messages_of_a_wrong_kind_are_an_environment_error() -> None:
    async def odd() -> StepResult:
        return StepResult(messages=({"role": "user"},))  # type: ignore[arg-type]

    assert (await _play(FakeEnvironment(odd))).outcome is Outcome.ENVIRONMENT_ERROR


async def test_an_environment_whose_methods_are_not_async_is_an_environment_error() -> None:
    class Blocking(FakeEnvironment):
        def step(self, action: Action) -> StepResult:  # type: ignore[override]
            return DONE

    assert (await _play(Blocking(DONE))).outcome is Outcome.ENVIRONMENT_ERROR


async def test_a_reset_that_raises_or_returns_nothing_is_an_environment_error() -> None:
    async def nothing() -> Observation:
        return None  # type: ignore[return-value]

    for start in (nothing, _raising(OSError("no container"))):
        trajectory = await _play(FakeEnvironment(DONE, start=start))  # type: ignore[arg-type]
        assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
        assert trajectory.turns == ()


async def test_an_environment_that_cannot_be_made_is_an_environment_error() -> None:
    def fail() -> Environment:
        raise OSError("no more of them")

    trajectory = await play_episode(
        ASSIGNMENT,
        make_environment=fail,
        policy=FakePolicy(),
        renderer=_renderer(),
        settings=SETTINGS,
    )
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR


async def test_a_hanging_reset_step_or_close_is_given_up() -> None:
    settings = _with(turn_deadline_s=0.5)
    hang: Callable[[], Awaitable[Observation]] = _hang  # type: ignore[assignment]
    reset = await _play(FakeEnvironment(DONE, start=hang), settings=settings)
    assert (reset.outcome, reset.turns) == (Outcome.WALL_TIMEOUT, ())
    step = await _play(FakeEnvironment(ON, _hang), settings=settings)
    assert (step.outcome, len(step.turns)) == (Outcome.WALL_TIMEOUT, 2)


async def test_an_environment_that_ignores_cancellation_holds_nobody_up() -> None:
    released = asyncio.Event()

    async def refuse_to_stop() -> StepResult:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return DONE

    before = num_abandoned()
    trajectory = await _play(FakeEnvironment(refuse_to_stop), settings=_with(turn_deadline_s=0.5))
    assert trajectory.outcome is Outcome.WALL_TIMEOUT
    assert num_abandoned() == before + 1
    released.set()
    while num_abandoned() > before:
        await asyncio.sleep(0.01)


async def test_the_episode_deadline_holds_over_many_short_turns() -> None:
    settings = _with(max_turns=10_000, max_context_tokens=10**6, episode_deadline_s=0.3)
    trajectory = await _play(FakeEnvironment(ON), FakePolicy(delay_s=0.01), settings=settings)
    assert trajectory.outcome is Outcome.WALL_TIMEOUT


async def test_what_goes_wrong_in_close_changes_nothing() -> None:
    end: Callable[[], Awaitable[None]] = _raising(OSError())  # type: ignore[assignment]
    assert (await _play(FakeEnvironment(DONE, end=end))).outcome is Outcome.COMPLETED


async def test_a_missing_score_is_asked_for_again_and_the_action_is_not_repeated() -> None:
    tries = 0

    async def rescore() -> StepResult:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RewardError("still away", rescore=rescore)
        return DONE

    environment = FakeEnvironment(_raising(RewardError("judge away", rescore=rescore)))
    trajectory = await _play(environment)
    assert (trajectory.outcome, trajectory.episode_return) == (Outcome.COMPLETED, 1.0)
    assert len(environment.actions) == 1 and tries == 2


async def test_a_score_that_cannot_be_had_is_a_reward_error_and_never_zero() -> None:
    tries = 0

    async def rescore() -> StepResult:
        nonlocal tries
        tries += 1
        raise RewardError("away", rescore=rescore)

    again = await _play(FakeEnvironment(ON, _raising(RewardError("away", rescore=rescore))))
    assert again.outcome is Outcome.REWARD_ERROR and tries == 2
    assert len(again.turns) == 2
    once = await _play(FakeEnvironment(_raising(RewardError("gone"))))
    assert once.outcome is Outcome.REWARD_ERROR


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1"])
async def test_a_reward_that_is_no_number_is_a_reward_error(reward: float) -> None:
    result = StepResult(reward=reward, terminated=True)
    assert (await _play(FakeEnvironment(result))).outcome is Outcome.REWARD_ERROR
    part = StepResult(reward=1.0, reward_components={"x": reward}, terminated=True)
    assert (await _play(FakeEnvironment(part))).outcome is Outcome.REWARD_ERROR


@pytest.mark.parametrize("where", ["reset", "step", "policy", "close"])
async def test_cancelling_the_task_gives_a_trajectory_all_the_same(where: str) -> None:
    reached = asyncio.Event()

    async def hang() -> StepResult:
        reached.set()
        return await _hang()

    class HangingPolicy(FakePolicy):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            if where == "policy":
                await hang()
            return await super().generate(request)

    environment = FakeEnvironment(
        hang if where == "step" else DONE,
        start=hang if where == "reset" else None,  # type: ignore[arg-type]
        end=hang if where == "close" else None,  # type: ignore[arg-type]
    )
    task = asyncio.create_task(_play(environment, HangingPolicy()))
    await reached.wait()
    task.cancel()
    trajectory = await task
    expected = Outcome.COMPLETED if where == "close" else Outcome.CANCELLED
    assert trajectory.outcome is expected
    assert len(trajectory.turns) == (1 if where in ("step", "close") else 0)


async def test_a_template_that_refuses_is_an_agent_error() -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    trajectory = await _play(FakeEnvironment(DONE), renderer=ChatRenderer(tokenizer))
    assert trajectory.outcome is Outcome.AGENT_ERROR


async def test_a_template_that_looks_back_breaks_the_prompt_and_is_counted() -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.index }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    trajectory = await _play(FakeEnvironment(ON, ON, DONE), renderer=ChatRenderer(tokenizer))
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.render_breaks == {"template_looks_back": 2}


def _tool_text(expression: str) -> str:
    return (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "'
        + expression
        + '"}}</tool_call><|im_end|>'
    )


async def test_the_calculator_is_played_through_its_tool() -> None:
    start = await CalculatorEnvironment().reset(ASSIGNMENT.task)
    expression = start.messages[0].content.removeprefix("What is ").removesuffix("?")
    answer = str(sum(map(int, expression.split("+"))))
    policy = FakePolicy(
        _reply("<tool_call>{<|im_end|>"), _reply(_tool_text(expression)), _reply(answer)
    )
    trajectory = await _play(CalculatorEnvironment(), policy)
    assert trajectory.outcome is Outcome.COMPLETED
    assert [turn.reward for turn in trajectory.turns] == [-0.1, 0.0, 1.0]
    last = _tokenizer().decode(trajectory.turns[-1].prompt_token_ids.tolist())
    assert f"<tool_response>{answer}</tool_response>" in last
    assert "error: <tool_call> without </tool_call>." in last


async def test_many_episodes_at_once_do_not_disturb_each_other() -> None:
    replies: Sequence[GenerateReply] = [_reply(f"{n}<|im_end|>") for n in range(1, 8)]
    plays = [
        play_episode(
            ASSIGNMENT,
            make_environment=partial(GuessingEnvironment, max_guesses=1),
            policy=FakePolicy(replies[i % 7], delay_s=0.001 * (i % 5)),
            renderer=_renderer(),
            settings=SETTINGS,
        )
        for i in range(210)
    ]
    trajectories = await asyncio.gather(*plays)
    assert {t.outcome for t in trajectories} == {Outcome.COMPLETED}
    assert sum(t.episode_return for t in trajectories) == 30.0


@pytest.mark.parametrize(
    "change",
    [
        {"max_turns": 0},
        {"max_tokens_per_turn": 0},
        {"max_context_tokens": 0},
        {"turn_deadline_s": 0.0},
        {"episode_deadline_s": math.nan},
        {"temperature": -1.0},
        {"temperature": math.nan},
    ],
)
def test_impossible_limits_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        _with(**change)
