"""`rayloom try`: play a few tasks without a run, and show the prompt, reply and reward of each.

Replies are reference answers from the data, or the user types them, or they are sampled from a
model behind an API that is compatible with OpenAI's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from actors.environment import workers
from actors.environment.chat_template import RenderError
from actors.environment.group_scoring import checked_results
from actors.environment.policy import ParsedCall
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
)
from actors.environment.rendering import ChatRenderer, load_renderer
from actors.environment.settings import GROUP_REWARD, rollout_settings
from actors.environment.task_data import reference_of
from actors.environment.tool_calls import check_calls, parse_tool_calls, with_integers
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.types import Task
from actors.user_code import (
    CallFailed,
    CallTimedOut,
    bounded,
    closing,
    describe,
    note_of_close,
    root_cause,
    task_id,
    type_of,
)
from service import units
from service.cli.outlet import say, warn
from service.config.file import ConfigError
from service.config.tasks import ROOM, maker, open_tasks, room_for_prompt
from service.config.tree import Config
from service.config.trial import Trial, has_own_code, tried

EXIT_OK, EXIT_UNSCORED = 0, 1
GROUP_SIZE = 4
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class TryRequest:
    """Arguments of `rayloom try`."""

    config: Config
    num_tasks: int
    num_samples: int | None = None
    """Number of times that each task is played; None for the default (`samples_of_task`)."""
    answer: str | None = None
    """Column with reference answers to use as replies; None if the replies come from elsewhere."""
    model: str | None = None
    """Name of the model at `base_url`. If `model` and `answer` are None, the user types the
    replies.
    """
    base_url: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the model, under their names in the API."""

    @property
    def scores_groups(self) -> bool:
        """Whether functions score all answers to a task together."""
        return any(
            member.tasks.options.get(GROUP_REWARD) for member in self.config.members.values()
        )

    @property
    def samples_of_task(self) -> int:
        """Return how often a task is played; the default is 1, or GROUP_SIZE with group scores."""
        return self.num_samples or (GROUP_SIZE if self.scores_groups else 1)

    def check(self) -> None:
        """Check that the options are consistent. Raises: ConfigError if they are not."""
        if self.answer is not None and self.model is not None:
            raise ConfigError(
                f"--model {self.model}: got --answer {self.answer} too, expected one of them to "
                "reply; leave one out"
            )
        if (self.model is None) != (self.base_url is None):
            raise ConfigError(
                "try: got only one of --model NAME and --base-url URL, expected both, such as "
                "--base-url http://127.0.0.1:8000/v1"
            )
        if self.parameters and self.model is None:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in self.parameters)
            raise ConfigError(
                f"try: {names}: got no --model, expected the model that samples; name it, or leave "
                "them out"
            )


class _Unplayed(Exception):
    """Raised if a task cannot be played to its end; the message is the reason."""


# A function that returns the next reply to a chat, and the name of its source.
_Replies = Callable[[Sequence[Message], Sequence[ToolSchema]], Awaitable[tuple[Action, str]]]


def run_try(request: TryRequest) -> int:
    """Play and show the tasks, and return the exit code.

    Raises: ConfigError if the request is refused.
    """
    request.check()
    config = request.config
    if has_own_code(config):
        # This refuses an import that hangs or ends its process, and says why.
        tried(config, Trial(begins=False, functions=False), tell=warn)
    workers.configure(size=config.rollouts.workers, memory_mib=config.rollouts.worker_memory_mib)
    source = open_tasks(config)
    make, renderer = maker(config), _renderer(config)
    count = request.samples_of_task
    rewards: list[float] = []
    num_played = 0
    is_whole, is_over = True, False
    for number in range(request.num_tasks):
        if is_over:
            break
        task = source.task(number)
        played: list[tuple[float, str]] = []
        for sample in range(count):
            which = f", answer {sample + 1} of {count}" if count > 1 else ""
            say(f"── task {task.task_id}, {number + 1} of {request.num_tasks}{which}")
            try:
                played.append(asyncio.run(_play(request, make, task, renderer)))
            except _Unplayed as error:
                is_whole = False
                say(f"no reward: {error}{note_of_close(root_cause(error))}\n")
            except EOFError:
                say("")
                is_over = True
                break
        try:
            rewards += _with_group_rewards(request, make, task, played)
            num_played += bool(played)
        except _Unplayed as error:
            is_whole = False
            say(f"no reward of the group: {error}\n")
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
    answers = f", {units.plural(len(rewards), 'answer')}" if count > 1 else ""
    say(f"{units.plural(num_played, 'task')} played{answers}{mean}")
    return EXIT_OK if rewards and is_whole else EXIT_UNSCORED


def _with_group_rewards(
    request: TryRequest,
    make: Callable[[], Environment],
    task: Task,
    played: Sequence[tuple[float, str]],
) -> list[float]:
    """Return the rewards of a task's answers, each with its group score added.

    An answer without a group score is left out. played: reward and text of each answer.
    """
    own = [reward for reward, _ in played]
    if not (request.scores_groups and played):
        return own
    environment = make()
    if not hasattr(environment, "score_group"):
        # Another environment of the mixture has the group functions.
        return own

    async def score() -> Sequence[StepResult | None]:
        _set_playing(request.config, task)
        async with closing(environment.close):
            call = partial(environment.score_group, task.own_copy(), [text for _, text in played])
            limit_s = request.config.rollouts.turn_deadline_s
            found = await _ended("score_group", call, limit_s=limit_s)
        try:
            return checked_results(found, num_answers=len(played))
        except RewardError as error:
            raise _Unplayed(str(error)) from error

    results = asyncio.run(score())
    say(f"group of {units.plural(len(played), 'answer')}")
    sums: list[float] = []
    for number, (reward, result) in enumerate(zip(own, results, strict=True), start=1):
        if result is None:
            say(f"  answer {number}: no reward: none of the group functions gave a number for it")
            continue
        sums.append(reward + float(result.reward))
        scored = f"group reward {result.reward:g}{_parts(result)}, in all {sums[-1]:g}"
        say(f"  answer {number}: {scored}")
    say("")
    return sums


def _parts(result: StepResult) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in result.reward_components.items())
    return f" ({parts})" if parts else ""


def _renderer(config: Config) -> ChatRenderer:
    load = partial(
        load_renderer,
        template_options=config.rollouts.template_options,
        history=config.rollouts.history,
        chat_template=config.model.chat_template,
    )
    try:
        if config.model.path is not None:
            return load(config.model.path)
        with tempfile.TemporaryDirectory(prefix="rayloom-try-") as directory:
            build_tokenizer().save_pretrained(directory, save_jinja_files=False)
            return load(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: its tokenizer cannot be used: {error}") from error


async def _play(
    request: TryRequest, make: Callable[[], Environment], task: Task, renderer: ChatRenderer
) -> tuple[float, str]:
    """Play one task and return its reward and the text of its last reply.

    Raises: _Unplayed if the task cannot be played to its end; EOFError at the end of typed input.
    """
    _set_playing(request.config, task)
    limit_s = request.config.rollouts.turn_deadline_s
    environment = make()
    async with closing(lambda: _ended("close", environment.close, limit_s=limit_s)):
        start = await _ended("reset", lambda: environment.reset(task.own_copy()), limit_s=limit_s)
        if not isinstance(start, Observation):
            raise _Unplayed(f"reset returned {type_of(start)}, expected an Observation")
        _show_prompt(renderer, start, room=room_for_prompt(_member(request.config, task)))
        return await _play_turns(request, environment, task, start)


def _set_playing(config: Config, task: Task) -> None:
    """Set the context variables that a run sets while a task is played."""
    rollout_settings.set(replace(_member(config, task).rollouts, inline=False))
    task_id.set(task.task_id)


def _member(config: Config, task: Task) -> Config:
    """Return the configuration of the environment that plays a task."""
    return config.members.get(task.environment, config)


async def _play_turns(
    request: TryRequest, environment: Environment, task: Task, start: Observation
) -> tuple[float, str]:
    rollouts, reward = request.config.rollouts, 0.0
    chat = list(start.messages)
    reply = _replies(request, task)
    for _ in range(rollouts.max_turns):
        begun = time.monotonic()
        action, who = await reply(chat, start.tools)
        replied = time.monotonic()
        say(f"\nreply ({who}, {replied - begun:.2f} s)\n{_indented(_as_text(action))}")
        calls = with_integers(action.calls, start.tools)
        step = _step(environment, replace(action, calls=calls))
        result = await _ended("step", step, limit_s=rollouts.turn_deadline_s)
        if not isinstance(result, StepResult):
            raise _Unplayed(
                f"step returned {type_of(result)}, expected a StepResult; return one from `step`"
            )
        if (problem := reward_problem(result)) is not None:
            raise _Unplayed(problem)
        reward += result.reward
        spent_s = time.monotonic() - replied
        say(f"\nreward {result.reward:g}{_parts(result)}, {spent_s:.3f} s")
        made = tuple(call for call in action.calls if isinstance(call, ToolCall))
        content = "" if made else action.text
        chat += [
            Message(role=Role.ASSISTANT, content=content, tool_calls=made),
            *result.messages,
        ]
        for message in result.messages:
            say(f"\n{message.role}\n{_indented(message.content)}")
        if result.terminated or result.truncated:
            say("")
            return reward, action.text
        if request.answer is not None:
            raise _Unplayed("the task continues after the reference answer, which is one reply")
    raise _Unplayed(f"no end after {rollouts.max_turns} turns (rollouts.max_turns)")


def _step(environment: Environment, action: Action) -> Callable[[], Awaitable[StepResult]]:
    return lambda: environment.step(action)


async def _ended(method: str, call: Callable[[], Awaitable[Any]], *, limit_s: float) -> Any:
    """Await a call of the environment. Raises: _Unplayed if it fails or takes too long."""
    try:
        return await bounded(call, limit_s=limit_s)
    except CallTimedOut as error:
        raise _Unplayed(
            f"{method} gave {error} (rollouts.turn_deadline_s); find out what hangs"
        ) from error
    except CallFailed as error:
        # A RewardError names the function that failed.
        is_named = isinstance(error.error, RewardError)
        text = str(error.error) if is_named else describe(root_cause(error.error))
        raise _Unplayed(f"{method}: {text}") from error


def _show_prompt(renderer: ChatRenderer, start: Observation, *, room: int | None) -> None:
    """Print the prompt of a task, and say if it has more than `room` tokens, a run's limit."""
    try:
        renderer.template.check_chat(start.messages)
        ids = renderer.first_prompt(start.messages, start.tools)
    except RenderError as error:
        raise _Unplayed(f"the chat template cannot render the prompt: {error}") from error
    say(f"\nprompt, {units.plural(len(ids), 'token')}\n{_indented(renderer.decode(ids))}")
    if room is not None and len(ids) > room:
        say(
            f"\na run leaves this task out, because its prompt has more than {room} tokens "
            f"({ROOM}); shorten the prompt, or raise model.max_context_tokens"
        )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _as_text(action: Action) -> str:
    calls = [
        f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
        if isinstance(call, ToolCall)
        else f"malformed call: {call.message}"
        for call in action.calls
    ]
    return "\n".join([*([action.text] if action.text else []), *calls])


def _replies(request: TryRequest, task: Task) -> _Replies:
    if request.model is not None:
        return lambda chat, tools: _sampled(request, chat, tools)
    if request.answer is None:
        return _typed
    answer = reference_of(task, request.answer)
    if answer is None:
        raise ConfigError(
            f"--answer {request.answer}: task {task.task_id} has the columns "
            f"{', '.join(sorted(task.data)) or 'none'}, expected a column of texts or "
            "numbers; correct it"
        )

    async def given(chat: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[Action, str]:
        return Action(text=answer), f"column {request.answer}"

    return given


async def _typed(chat: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[Action, str]:
    """Read a reply that ends with an empty line. Raises: EOFError if the input has ended."""
    how = ' A call: <tool_call>{"name": …, "arguments": {…}}</tool_call>.' if tools else ""
    say(f"\nyour reply, ended by an empty line.{how}")
    lines: list[str] = []
    while (line := sys.stdin.readline()).strip():
        lines.append(line.rstrip("\n"))
    if not line and not lines:
        raise EOFError
    text = "\n".join(lines)
    return Action(text=text, calls=parse_tool_calls(text, tools) if tools else ()), "typed"


async def _sampled(
    request: TryRequest, chat: Sequence[Message], tools: Sequence[ToolSchema]
) -> tuple[Action, str]:
    """Request a reply from the model behind the API; return it with the model's name."""
    assert request.base_url is not None
    body = {
        "model": request.model,
        "messages": [_for_api(message) for message in chat],
        "max_tokens": request.config.rollouts.max_tokens_per_turn,
        **request.parameters,
    }
    if tools:
        body["tools"] = [tool.for_template() for tool in tools]
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit_s = request.config.rollouts.turn_deadline_s
    url = f"{request.base_url.rstrip('/')}/chat/completions"
    try:
        async with httpx.AsyncClient(timeout=limit_s) as client:
            answer = await client.post(url, json=body, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _Unplayed(f"{url}: {describe(error)}; check --base-url") from None
    if answer.status_code != 200:
        raise _Unplayed(f"{url}: status {answer.status_code}: {answer.text[:300]}")
    try:
        message = answer.json()["choices"][0]["message"]
        calls = [
            ParsedCall(
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
                id=call.get("id") or "",
            )
            for call in message.get("tool_calls") or ()
        ]
        text = message.get("content") or ""
        return Action(text=text, calls=check_calls(calls, tools)), str(request.model)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Unplayed(
            f"{url}: the answer is not a chat completion ({describe(error)})"
        ) from error


def _for_api(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in message.tool_calls
        ]
    return found


def read_schema(file: Path) -> dict[str, Any]:
    """Return the API's `response_format` for the JSON schema in a file.

    Raises: ConfigError if the file cannot be read or has no JSON schema.
    """
    try:
        schema = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--json-schema {file}: cannot be read ({error}); expected a file with a JSON schema"
        ) from error
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
