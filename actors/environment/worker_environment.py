"""Run a user's environment in a worker process, which a few episodes share.

Invariant: a `WorkerEnvironment` returns the same results as the user's environment, and its errors
have the same one-line description. If an environment blocks its worker process beyond the deadline,
the process is ended. All its episodes then end as `environment_error` and are played again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from actors.environment import workers
from actors.environment.protocol import (
    Action,
    Environment,
    Observation,
    RewardError,
    StepResult,
    rollout_id,
)
from actors.environment.registry import resolve
from actors.environment.settings import rollout_settings
from actors.types import Task
from actors.user_code import CallFailed


class WorkerEnvironment:
    """The environment of one episode; its methods run in a worker process."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Create an environment; its worker is chosen on the first call.

        Args:
            name: Name of the environment, such as my.py:Class; `registry.resolve` has checked it.
            options: The environment's options, which `registry.resolve` has checked too.
        """
        self._name = name
        self._options = options
        self._home: workers.Home | None = None
        self._held: workers.Held | None = None

    async def reset(self, task: Task) -> Observation:
        return await self._call("reset", task=task)

    async def step(self, action: Action) -> StepResult:
        """Take one action in the worker and return its result.

        Raises: RewardError if only the score is missing; workers.WorkerLost if the worker ends.
        """
        return await self._scored("step", action=action)

    async def score_group(self, task: Task, completions: Sequence[str]) -> Sequence[StepResult]:
        return await self._call("score_group", task=task, completions=list(completions))

    async def _scored(self, method: str, **arguments: Any) -> StepResult:
        found = await self._call(method, **arguments)
        if not isinstance(found, _Unscored):
            return found
        rescore = partial(self._scored, "rescore") if found.can_rescore else None
        raise RewardError(found.message, rescore=rescore)

    async def _call(self, method: str, **arguments: Any) -> Any:
        limit_s = rollout_settings.get().episode_deadline_s
        try:
            if self._home is None:
                self._home = workers.pool().home(is_loop=True)
            if self._held is None:
                self._held = await self._home.call(
                    f"{__name__}:make_instance",
                    {"name": self._name, "options": dict(self._options)},
                    limit_s=limit_s,
                    about=self._name if ":" in self._name else "",
                    keeps=True,
                )
            return await self._home.call(
                f"{__name__}:_call_instance",
                {
                    "instance": self._held,
                    "method": method,
                    "rollout": rollout_id.get(),
                    "arguments": arguments,
                },
                limit_s=limit_s,
                about=self._name if ":" in self._name else "",
            )
        except CallFailed as failed:
            raise failed.error from None

    async def close(self) -> None:
        home, self._home = self._home, None
        try:
            if home is not None and self._held is not None:
                self._home = home
                await self._call("close")
        finally:
            self._home = None
            if home is not None:
                home.close()


class _Unscored:
    """The answer of a worker to a step that raises RewardError, which stays in the worker."""

    def __init__(self, message: str, *, can_rescore: bool) -> None:
        self.message = message
        self.can_rescore = can_rescore


class _Instance:
    """An episode's environment in a worker process, and `rescore` of its newest RewardError."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.rescore: Callable[[], Awaitable[StepResult]] | None = None

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        found = getattr(self.environment, method, None) or _no_method(method)
        # Pass the arguments by position, because a class may give them any names.
        call = partial(found, *arguments.values())
        if method == "rescore" and self.rescore is not None:
            call = partial(self.rescore)
        try:
            return await call()
        except RewardError as error:
            self.rescore = error.rescore
            return _Unscored(str(error), can_rescore=error.rescore is not None)


def _no_method(method: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise AttributeError(f"the environment has no method {method}")

    return refuse


_makers: dict[tuple[str, str], Callable[[], Environment]] = {}


def make_instance(name: str, options: Mapping[str, Any]) -> _Instance:
    """Create an environment and return its `_Instance`. This function runs in a worker."""
    key = name, repr(options)
    if key not in _makers:
        _makers[key] = resolve(name, options)
    return _Instance(_makers[key]())


async def _call_instance(
    instance: _Instance, method: str, rollout: str, arguments: Mapping[str, Any]
) -> Any:
    """Call a method of an environment. This function runs in a worker."""
    rollout_id.set(rollout)
    return await instance.call(method, arguments)
