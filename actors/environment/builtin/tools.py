"""The environment `tools`: the policy may call tools before it gives its final answer.

The tools are a user's functions and classes, and tools of MCP servers. Each call gets a message
with the tool's answer or an error. More than `max_malformed` turns in a row with malformed calls
end the episode. A turn without calls is the final answer, scored as in `single_turn`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Gt, Lt

from actors.environment import workers
from actors.environment.builtin.single_turn import (
    SingleTurnEnvironment,
    SingleTurnOptions,
    check_prompt,
)
from actors.environment.fork_server import WorkerLost
from actors.environment.function_tools import FunctionTool, ToolClass, load_tools
from actors.environment.judge_options import JudgeOptions
from actors.environment.mcp_servers import (
    McpServer,
    McpTool,
    ServerOptions,
    server_of,
)
from actors.environment.protocol import (
    Action,
    Observation,
    StepResult,
    ToolCall,
    text_of_content,
)
from actors.environment.reward_functions import EXTRAS, BadRewardFunction, RewardFunction
from actors.environment.settings import rollout_settings
from actors.environment.tool_calls import visible_text
from actors.environment.tool_turns import BadArguments, ToolFailed, ToolTurns
from actors.limits import STRICT, Natural, Positive
from actors.options import Several
from actors.types import Task
from actors.user_code import CallFailed, CallTimedOut, type_of

TOOLS = "tools"
"""Registered name of this environment."""

MAX_ERROR_CHARS = 500
CLOSE_LIMIT_S = 5.0
CUT_OFF = "\n[cut off: the first {shown} of {all} characters]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsOptions(SingleTurnOptions):
    """Options of `tools`: the options of `single_turn`, and the tools with their limits."""

    __pydantic_config__ = STRICT

    tools: Several = ()
    """Functions and classes, each as FILE.py:NAME."""
    mcp: Mapping[str, ServerOptions] | None = None
    """MCP servers with tools: the options of each, by the name of the server."""
    call_limit_s: Annotated[float, Gt(0), Lt(86400)] = 20.0
    """Seconds that one tool call may take."""
    max_answer_chars: Positive = 8000
    """Maximum number of characters of a tool's answer; the rest is cut off, and a note about the
    cut, which is not counted, is added."""
    max_malformed: Natural = 3
    """Largest number of malformed turns in a row; one more ends the episode."""

    def __post_init__(self) -> None:
        SingleTurnOptions.__post_init__(self)
        if not self.tools and not self.mcp:
            raise ValueError(
                "tools: got none, expected one or more, such as my_tools.py:search, or a server in "
                "mcp"
            )


class ToolsEnvironment(SingleTurnEnvironment):
    """An environment that shows one prompt, answers tool calls and scores the final answer."""

    def __init__(self, options: ToolsOptions) -> None:
        """Load the tools, functions and judges. Raises: BadRewardFunction or BadTool."""
        found = load_tools(options.tools)
        self._function_tools = [each for each in found if isinstance(each, FunctionTool)]
        self._classes = [each for each in found if isinstance(each, ToolClass)]
        if not (options.reward or options.group_reward or self._has_reward(options.judges)):
            raise BadRewardFunction(
                "reward: got no function, and no class of tools with get_reward, expected one of "
                "them, because nothing else scores the answers; name a function such as my.py:score"
            )
        super().__init__(options)
        self._configured = self._functions
        self._servers = options.mcp or {}
        self._call_limit_s = options.call_limit_s
        self._max_answer_chars = options.max_answer_chars
        self._turns = ToolTurns(self._call, at_most=options.max_malformed, penalty=None)
        # Instances in this process, or `workers.Held` references to instances in `_home`.
        self._instances: list[Any] = []
        self._home: workers.Home | None = None
        self._own_servers: list[McpServer] = []
        self._tools: dict[str, FunctionTool | McpTool] = {}
        self._messages: list[dict[str, Any]] = []

    @property
    def tools(self) -> Sequence[Any]:
        """Return the tools that are functions; MCP servers' tools are known only after `reset`."""
        of_classes = (tool for each in self._classes for tool in each.tools)
        return [tool.schema for tool in (*self._function_tools, *of_classes)]

    def _has_reward(self, judges: Mapping[str, JudgeOptions] | None) -> bool:
        return bool(judges) or any(each.has_reward for each in self._classes)

    @property
    def filled_columns(self) -> frozenset[str]:
        return super().filled_columns - EXTRAS

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Check a task's data for the prompt, the reward functions and the tool classes.

        The data must have the columns that the classes' `reset` methods need.

        Raises: ValueError if a check fails.
        """
        for function in self._configured:
            function.check(data, extras=EXTRAS)
        for each in self._classes:
            if missing := sorted(each.required_columns - data.keys()):
                raise ValueError(
                    f"tool {each.name}: its reset needs {', '.join(missing)}, got the columns "
                    f"{', '.join(sorted(data)) or 'none'}; give the data such a column, or "
                    "the argument a default"
                )
        self._check_group(data)
        check_prompt(data["prompt"])

    async def reset(self, task: Task) -> Observation:
        self.check_data(task.data)
        self._columns = task.data
        self._turns.begin_episode()
        self._messages, self._instances = [], []
        classes, limit_s = self._classes, rollout_settings.get().turn_deadline_s
        if classes and all(workers.is_contained(each.target) for each in classes):
            self._home = workers.pool().home()
        for each in classes:
            self._instances.append(await each.made_in(self._home, limit_s=limit_s))
        self._functions = (*self._configured, *self._own_rewards(task.data))
        bound = [
            tool
            for each, instance in zip(classes, self._instances, strict=True)
            for tool in each.bound(instance)
        ]
        tools: list[FunctionTool | McpTool] = [*self._function_tools, *bound]
        for name, options in self._servers.items():
            if options.per == "episode":
                server = McpServer(name, options)
                self._own_servers.append(server)
            else:
                server = server_of(name, options)
            tools += await server.tools()
        self._tools = {tool.schema.name: tool for tool in tools}
        names = [tool.schema.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"tools: {', '.join(twice)} is the name of two tools of the functions and servers, "
                "expected unique names; choose a server's tools by mcp.NAME.tools"
            )
        messages = list(self.first_messages(task.data))
        for each, instance in zip(classes, self._instances, strict=True):
            seen = await each.call(instance, "reset", task.data, limit_s=limit_s)
            # A reset that ends with `return True` or `return self` shows nothing.
            is_shown = not isinstance(seen, bool) and each.made not in type(seen).__mro__
            added = _text_of_reset(each.name, seen) if is_shown else ""
            messages[-1] = replace(messages[-1], content=messages[-1].content + added)
        return Observation(messages=tuple(messages), tools=tuple(tool.schema for tool in tools))

    async def step(self, action: Action) -> StepResult:
        """Answer the turn's tool calls. A turn without calls is scored as the final answer.

        Raises: RewardError if the final answer could not be scored; ServerLost or WorkerLost if an
            MCP server or a tool's process is lost; the episode then ends and is played again.
        """
        self._messages.append(_as_message(action.own_copy()))
        if action.calls:
            messages, is_malformed = await self._turns.answers(action.calls)
            self._messages += [
                {"role": "tool", "name": each.name, "content": each.content} for each in messages
            ]
            return self._turns.result(messages, is_malformed=is_malformed)
        return await super().step(action)

    def _own_rewards(self, columns: Mapping[str, Any]) -> list[RewardFunction]:
        classes = self._classes
        num_rewarded = sum(each.has_reward for each in classes)
        rewards = [
            each.reward_of(
                instance,
                name="get_reward" if num_rewarded == 1 else f"{each.name}.get_reward",
            )
            for each, instance in zip(classes, self._instances, strict=True)
            if each.has_reward
        ]
        for each in rewards:
            each.check(columns, extras=EXTRAS)
        return rewards

    def _extras(self) -> Mapping[str, Any]:
        instance = self._instances[0] if self._instances else None
        return {"environment": instance, "messages": self._messages}

    async def _call(self, call: ToolCall) -> str:
        tool = self._tools[call.name]
        try:
            found = await tool.call(call.arguments, limit_s=self._call_limit_s)
        except CallTimedOut as error:
            if isinstance(tool, FunctionTool) and tool.instance is not None:
                raise WorkerLost(f"{call.name}: {error}; its instance ended with it") from error
            raise ToolFailed(f"no answer within {self._call_limit_s:g} s.") from error
        except CallFailed as error:
            raise ToolFailed(_text_of(error.__cause__)[:MAX_ERROR_CHARS]) from error
        except BadArguments:
            raise
        except ToolFailed as error:
            raise ToolFailed(str(error)[:MAX_ERROR_CHARS]) from error
        content = found[: self._max_answer_chars]
        if len(content) < len(found):
            content += CUT_OFF.format(shown=len(content), all=len(found))
        return content

    async def close(self) -> None:
        instances, self._instances = self._instances, []
        servers, self._own_servers = self._own_servers, []
        home, self._home = self._home, None
        try:
            for each, instance in zip(self._classes, instances, strict=False):
                await each.call(instance, "close", {}, limit_s=CLOSE_LIMIT_S)
        finally:
            if home is not None:
                home.close()
            await asyncio.gather(*(server.close() for server in servers))


def _text_of_reset(name: str, seen: object) -> str:
    if seen is not None and not isinstance(seen, str | list | tuple):
        raise ValueError(
            f"tool {name}: reset returned {type_of(seen)}, expected text, a list of text parts or "
            "None; return one of these"
        )
    try:
        return text_of_content(seen)
    except ValueError as error:
        raise ValueError(f"tool {name}: reset returned a wrong list: {error}") from error


def _text_of(error: BaseException | None) -> str:
    # A user's exception: `__str__` itself may raise.
    with suppress(Exception):
        if text := str(error):
            return text
    return type(error).__name__


def _as_message(action: Action) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": visible_text(action.text)}
    calls = [call for call in action.calls if isinstance(call, ToolCall)]
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": each.name, "arguments": dict(each.arguments)}}
            for each in calls
        ]
    return message
