"""Play one episode, in turns of environment and policy, until it has exactly one outcome.

Invariants: `play_episode` never raises, whatever the environment, the policy or the template does.
It returns a trajectory with one outcome and the turns so far. A turn's tokens are exactly the
tokens that were sent to the engine and the tokens that it returned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import NoReturn

from actors.environment.chat_template import RenderError
from actors.environment.policy import (
    GenerateRequest,
    ParsedReply,
    PolicyClient,
    PolicyDeadlineExceeded,
    UnusableReply,
    check_reply,
)
from actors.environment.protocol import (
    Action,
    Environment,
    Message,
    Observation,
    RewardError,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
    reward_problem,
    rollout_id,
)
from actors.environment.rendering import BreakReason, ChatRenderer
from actors.environment.sample_builder import SampleBuilder
from actors.environment.settings import KeptTokens, RolloutSettings, rollout_settings
from actors.environment.text_patterns import before_stop
from actors.environment.tool_calls import check_calls, with_integers
from actors.outcomes import Disposition, OutcomePolicy
from actors.types import (
    PLAYED_OUT,
    FinishReason,
    Outcome,
    RolloutAssignment,
    Timings,
    TokenIds,
    Trajectory,
    Turn,
)
from actors.user_code import CallFailed, CallTimedOut, FaultLog, bounded, describe, task_id, type_of

# A request ends by itself at its deadline; this time later it is cancelled.
_POLICY_GRACE_S = 2.0
_CLOSE_LIMIT_S = 5.0
_RESCORE_DELAYS_S = (0.1, 0.5)
# Each trajectory's summary has its answer; longer answers are distinguished by their digest.
MAX_ANSWER_CHARS = 256
# One log for the process, because its episodes share an environment and so have the same faults.
_faults = FaultLog(logging.getLogger(__name__))


class _Ended(Exception):
    """Raised to end the episode; the message says why in one sentence."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


async def play_episode(
    assignment: RolloutAssignment,
    *,
    make_environment: Callable[[], Environment],
    policy: PolicyClient,
    renderer: ChatRenderer,
    settings: RolloutSettings,
    max_context_tokens: int,
    keeps_last_observation: bool = False,
    kept: KeptTokens | None = None,
) -> Trajectory:
    """Play one attempt of one rollout, and return its trajectory.

    If the caller's task is cancelled, the trajectory has the outcome `cancelled`.

    Args:
        make_environment: Makes the environment, in one call. If this call fails, the outcome is an
            environment error.
        max_context_tokens: The engine's limit on prompt and reply together.
        keeps_last_observation: Whether to append the last observation to the sample if it leaves
            no room for a reply. The sample is cut to the context's length. A critic can then
            bootstrap from the last state.
        kept: Limits which tokens may be sampled in an evaluation. None allows every token.
    """
    # The environment, its tools and its reward functions read these in the episode's context.
    rollout_id.set(assignment.rollout_id)
    task_id.set(assignment.task.task_id)
    rollout_settings.set(settings)
    episode = _Episode(
        assignment,
        policy=policy,
        renderer=renderer,
        settings=settings,
        max_context_tokens=max_context_tokens,
        keeps_last_observation=keeps_last_observation,
        kept=kept,
    )
    try:
        return episode.trajectory(await _end_of(episode, make_environment))
    finally:
        # Close the environment after a defect of our own code, too.
        await episode.close()


async def _end_of(episode: _Episode, make_environment: Callable[[], Environment]) -> _Ended:
    try:
        await episode.play(make_environment)
    except _Ended as ended:
        if isinstance(ended.__cause__, CallFailed | RenderError):
            _faults.log(f"{episode.name}: {ended.outcome}: {ended}", ended.__cause__)
        return ended
    except asyncio.CancelledError:
        return _Ended(Outcome.CANCELLED, "the episode's task was cancelled")


class _Episode:
    """The state of one episode; a method that ends the episode raises `_Ended`."""

    def __init__(
        self,
        assignment: RolloutAssignment,
        *,
        policy: PolicyClient,
        renderer: ChatRenderer,
        settings: RolloutSettings,
        max_context_tokens: int,
        keeps_last_observation: bool,
        kept: KeptTokens | None,
    ) -> None:
        self._assignment = assignment
        self._policy = policy
        self._renderer = renderer
        self._settings = settings
        self._outcomes = OutcomePolicy(overrides=settings.outcomes)
        self._max_context_tokens = max_context_tokens
        self._keeps_last_observation = keeps_last_observation
        self._kept = kept
        self._environment: Environment | None = None
        self._samples = SampleBuilder(assignment.trajectory_id)
        self._break: BreakReason | None = None  # why the current prompt was rendered again
        self._best_return: float | None = None
        self._answer: str | None = None
        self._state_key: str | None = None  # of the state before the next turn
        self._metrics: dict[str, float] = {}
        self._extra_columns: dict[str, str] = {}
        self._was_rewarded: bool | None = None  # as in `Trajectory`
        self._cache_salt: str | None = None
        self._replica = ""
        self._num_inserted = 0
        self._breaks: Counter[str] = Counter()
        self._reset_s = self._generate_s = self._step_s = 0.0
        self._started = time.monotonic()
        self._episode_end = self._started + settings.episode_deadline_s
        self._turn_end = self._started

    @property
    def name(self) -> str:
        return self._assignment.trajectory_id

    async def play(self, make_environment: Callable[[], Environment]) -> NoReturn:
        """Play turns until the episode ends, but at most max_turns turns.

        Raises: _Ended, always; after max_turns turns its outcome is `max_turns`.
        """
        self._start_turn()
        start = await self._reset(make_environment)
        history = list(start.messages)
        prompt = self._first_prompt(start)
        for number in range(1, self._settings.max_turns + 1):
            self._start_turn()
            turn, parsed = await self._generate(prompt, start.tools)
            text = self._text_of(turn)
            calls = () if parsed is None else check_calls(parsed.calls, start.tools)
            action = Action(text=text, calls=calls)
            result = await self._step(replace(action, calls=with_integers(calls, start.tools)))
            if number == self._settings.max_turns:
                break
            history.append(_as_message(action, parsed, stop=self._settings.stop))
            prompt = self._extend(turn, history, result, start)
            history.extend(result.messages)
        raise _Ended(Outcome.MAX_TURNS, f"no end after {self._settings.max_turns} turns")

    def trajectory(self, end: _Ended) -> Trajectory:
        return replace(
            Trajectory.of(self._assignment, end.outcome, detail=end.detail),
            samples=self._samples.samples(),
            was_rewarded=self._was_rewarded,
            best_return=self._best_return,
            answer=self._answer,
            metrics=self._metrics,
            extra_columns=self._extra_columns,
            num_inserted_tokens=self._num_inserted,
            render_breaks=dict(self._breaks),
            timings=Timings(
                reset_s=self._reset_s,
                generate_s=self._generate_s,
                step_s=self._step_s,
                wall_s=time.monotonic() - self._started,
            ),
        )

    async def close(self) -> None:
        """Close the environment; an error here does not change the outcome."""
        environment = self._environment
        if environment is None:
            return
        try:
            await bounded(lambda: environment.close(), limit_s=_CLOSE_LIMIT_S)
        except (CallTimedOut, CallFailed, asyncio.CancelledError):
            return

    def _start_turn(self) -> None:
        self._turn_end = min(time.monotonic() + self._settings.turn_deadline_s, self._episode_end)

    def _time_left(self) -> float:
        left = self._turn_end - time.monotonic()
        if left <= 0:
            raise _Ended(Outcome.WALL_TIMEOUT, "the deadline passed between two calls")
        return left

    async def _reset(self, make_environment: Callable[[], Environment]) -> Observation:
        async def reset() -> Observation:
            self._environment = make_environment()
            return await self._environment.reset(self._assignment.task.own_copy())

        started = time.monotonic()
        try:
            start = await bounded(reset, limit_s=self._time_left())
        except CallTimedOut as error:
            raise _Ended(Outcome.WALL_TIMEOUT, f"environment reset: {error}") from error
        except CallFailed as error:
            raise _Ended(Outcome.ENVIRONMENT_ERROR, f"reset: {error}") from error
        finally:
            self._reset_s += time.monotonic() - started
        if not isinstance(start, Observation):
            raise _wrong_type("reset", start)
        if start.best_return is not None:
            self._best_return = float(start.best_return)
        self._state_key = _short_key(start.state_key)
        return start

    def _first_prompt(self, start: Observation) -> TokenIds:
        self._check_chat("reset", start.messages)
        try:
            return self._renderer.first_prompt(start.messages, start.tools)
        except RenderError as error:
            raise _Ended(Outcome.AGENT_ERROR, describe(error)) from error

    def _extend(
        self, turn: Turn, history: list[Message], result: StepResult, start: Observation
    ) -> TokenIds:
        self._check_chat("step", result.messages, history=history)
        try:
            extension = self._renderer.extend(
                turn.prompt_token_ids,
                turn.sampled_token_ids,
                history=history,
                new_messages=result.messages,
                tools=start.tools,
            )
        except RenderError as error:
            raise _Ended(Outcome.AGENT_ERROR, describe(error)) from error
        self._num_inserted += extension.num_inserted
        if extension.break_reason is not None:
            self._breaks[extension.break_reason.value] += 1
        self._break = extension.break_reason
        return extension.prompt_token_ids

    def _check_chat(
        self, method: str, messages: Sequence[Message], *, history: Sequence[Message] = ()
    ) -> None:
        """Check that the chat template shows who speaks, and which tool call each result answers.

        Otherwise end the episode with an error that names the environment's method.
        """
        try:
            self._renderer.template.check_chat(messages, history=history)
        except RenderError as error:
            raise _Ended(Outcome.ENVIRONMENT_ERROR, f"{method}: {describe(error)}") from error

    async def _generate(
        self, prompt: TokenIds, tools: tuple[ToolSchema, ...]
    ) -> tuple[Turn, ParsedReply | None]:
        """Sample a turn; return it and the parsed reply, which is None if there are no tools."""
        room = self._max_context_tokens - prompt.shape[0]
        if room < 1:
            if self._keeps_last_observation:
                self._samples.observe(prompt[: self._max_context_tokens])
            raise _Ended(
                Outcome.TRUNCATED_CONTEXT,
                f"a prompt of {prompt.shape[0]} tokens leaves no room for a reply in a context of "
                f"{self._max_context_tokens} tokens",
            )
        limit = min(self._settings.max_tokens_per_turn, room)
        turn, parsed = await self._call_policy(prompt, tools, max_tokens=limit)
        if self._break is None:
            self._samples.append(turn)
        else:
            # A prompt that was rendered again may still extend any sample.
            self._samples.add(turn, reason=self._break.branch_reason)
        if turn.finish_reason is FinishReason.ABORT:
            raise _Ended(Outcome.INFRASTRUCTURE_ERROR, "the engine aborted the turn")
        if turn.finish_reason is FinishReason.LENGTH:
            is_context = limit < self._settings.max_tokens_per_turn
            outcome = Outcome.TRUNCATED_CONTEXT if is_context else Outcome.TRUNCATED_TOKENS
            if self._outcomes.disposition(outcome) is Disposition.SCORE:
                await self._score_cut_off(turn)
            raise _Ended(outcome, f"the turn was cut off after {limit} tokens")
        return turn, parsed

    def _text_of(self, turn: Turn) -> str:
        """Return a reply's text without its stop string and without any text after it."""
        text = self._renderer.decode(turn.sampled_token_ids)
        return before_stop(text, self._settings.stop)[0]

    async def _score_cut_off(self, turn: Turn) -> None:
        try:
            await self._step(Action(text=self._text_of(turn)))
        except _Ended as ended:
            # The outcome stays the one of a cut-off turn, unless the score could not be computed.
            if ended.outcome not in PLAYED_OUT:
                raise
            # The environment ended the task here, so its reward is a grade, even if it is 0.
            self._was_rewarded = True

    async def _call_policy(
        self, prompt: TokenIds, tools: tuple[ToolSchema, ...], *, max_tokens: int
    ) -> tuple[Turn, ParsedReply | None]:
        left = self._time_left()
        request = GenerateRequest(
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            temperature=self._settings.temperature,
            deadline_s=left,
            cache_salt=self._cache_salt,
            replica=self._replica,
            stop=self._settings.stop,
            kept=self._kept,
            tools=tools or None,
        )

        async def generate() -> tuple[Turn, ParsedReply | None]:
            reply = await self._policy.generate(request)
            turn = replace(check_reply(request, reply), state_key=self._state_key)
            if self._cache_salt is None:
                self._cache_salt = reply.cache_salt
            # A successor may have answered instead of the requested replica.
            self._replica = reply.replica
            return turn, reply.parsed

        started = time.monotonic()
        try:
            return await bounded(generate, limit_s=left + _POLICY_GRACE_S)
        except CallTimedOut as error:
            raise _Ended(Outcome.WALL_TIMEOUT, f"policy: {error}") from error
        except CallFailed as error:
            if isinstance(error.error, UnusableReply):
                raise _Ended(error.error.outcome, str(error.error)) from error
            if isinstance(error.error, PolicyDeadlineExceeded):
                raise _Ended(Outcome.WALL_TIMEOUT, f"policy: {error}") from error
            raise _Ended(Outcome.INFRASTRUCTURE_ERROR, f"policy: {error}") from error
        finally:
            self._generate_s += time.monotonic() - started

    async def _step(self, action: Action) -> StepResult:
        started = time.monotonic()
        try:
            result = await self._step_and_rescore(action)
        finally:
            self._step_s += time.monotonic() - started
        if not isinstance(result, StepResult):
            raise _wrong_type("step", result)
        if (problem := reward_problem(result)) is not None:
            raise _Ended(Outcome.REWARD_ERROR, _sendable(problem))
        self._keep_score(result)
        if result.ended_by_malformed:
            raise _Ended(Outcome.MALFORMED_TOOL_CALL, "too many malformed turns in a row")
        if result.terminated:
            raise _Ended(Outcome.COMPLETED)
        if result.truncated:
            raise _Ended(Outcome.MAX_TURNS, "the environment reached its own limit")
        return result

    def _keep_score(self, result: StepResult) -> None:
        """Copy a result's score, because the environment may change the result later."""
        self._samples.score(
            reward=float(result.reward),
            components={
                _sendable(str(name)): float(value)
                for name, value in result.reward_components.items()
            },
            is_malformed=bool(result.is_malformed),
        )
        self._metrics |= {
            _sendable(str(name)): float(value) for name, value in result.metrics.items()
        }
        self._extra_columns |= {
            _sendable(str(name)): _sendable(str(text))
            for name, text in result.extra_columns.items()
        }
        if result.answer is not None:
            self._answer = short_answer(result.answer)
        self._state_key = _short_key(result.state_key)

    async def _step_and_rescore(self, action: Action) -> StepResult:
        assert self._environment is not None
        call: Callable[[], Awaitable[StepResult]] = partial(_step, self._environment, action)
        for delay_s in (*_RESCORE_DELAYS_S, None):
            try:
                return await bounded(call, limit_s=self._time_left())
            except CallTimedOut as error:
                raise _Ended(Outcome.WALL_TIMEOUT, f"environment step: {error}") from error
            except CallFailed as failure:
                unscored = failure.error
                if not isinstance(unscored, RewardError):
                    raise _Ended(Outcome.ENVIRONMENT_ERROR, f"step: {failure}") from failure
                if unscored.rescore is None or delay_s is None:
                    raise _Ended(Outcome.REWARD_ERROR, describe(unscored)) from failure
                await asyncio.sleep(delay_s)
                call = unscored.rescore
        raise AssertionError("unreachable: the last pass raises or returns")


async def _step(environment: Environment, action: Action) -> StepResult:
    # Look the method up within the call, so that its absence is an error of the environment.
    return await environment.step(action.own_copy())


def _short_key(key: str | None) -> str | None:
    return None if key is None else short_answer(key)


def short_answer(answer: str) -> str:
    """Replace the end of a long answer by a digest, so that equal answers stay equal."""
    text = _sendable(answer)
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{text[: MAX_ANSWER_CHARS - len(digest) - 1]}…{digest}"


def _sendable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def _as_message(action: Action, parsed: ParsedReply | None, *, stop: Sequence[str]) -> Message:
    """Return a reply as a chat message, which has the unparsed text if a call is malformed."""
    calls = tuple(call for call in action.calls if isinstance(call, ToolCall))
    if parsed is None or len(calls) < len(action.calls):
        return Message(role=Role.ASSISTANT, content=action.text)
    return Message(
        role=Role.ASSISTANT,
        content=before_stop(parsed.content, stop)[0],
        reasoning=parsed.reasoning,
        tool_calls=calls,
    )


def _wrong_type(method: str, value: object) -> _Ended:
    expected = "an Observation" if method == "reset" else "a StepResult"
    return _Ended(Outcome.ENVIRONMENT_ERROR, f"{method} returned {type_of(value)}, not {expected}")
