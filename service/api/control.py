"""The calls with which operators control a run, and the answers to them.

The supervisor creates the answers (`service.run.control`). Ray carries them to the API, and the API
sends them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, Protocol

from pydantic import Field

from actors.environment.settings import Sampling
from service.api.schemas import StrictBody
from service.store.controls import CallAnswer, PauseAnswer
from service.store.tables import Pausable


class ControlRefused(Exception):
    """The run refused an operator's call and changed nothing.

    The message says why, and what the operator can do.
    """

    def __init__(
        self, code: Literal["unknown", "gone", "conflict", "invalid"], message: str
    ) -> None:
        """Refuse a call.

        code: `gone` if the requested object existed, but no longer does; `conflict` if the call is
        not possible in the run's current state.
        """
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return self.message


class OperationStatus(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class InFlightAnswer(StrictBody):
    """The rollouts, engines and step in progress; a pause does not end them."""

    admitted: int = Field(description="rollouts in the window")
    playing: int = Field(description="admitted rollouts that are being played")
    waiting: int = Field(description="admitted rollouts that have ended and wait for their step")
    step: int | None = Field(description="the step that is being trained; null: none")
    engines_held: int = Field(description="engines that hold their turns")
    engines: int


class ControlAnswer(StrictBody):
    phase: str
    paused: list[PauseAnswer] = Field(description="the paused parts")
    in_flight: InFlightAnswer


class CheckpointAnswer(StrictBody):
    id: str
    step: int
    policy_version: int
    term: int
    committed_at: float = Field(description="seconds since 1970")
    bytes: int | None = Field(description="size of its files in bytes; null: the files are gone")
    can_go_back: bool
    why_not: str


class EvaluationAnswer(StrictBody):
    """The result of an evaluation."""

    step: int = Field(description="the last finished step when the evaluation began")
    policy_version: int
    last_policy_version: int | None = Field(
        description="the newest version that sampled a token; training continues meanwhile"
    )
    temperature: float
    num_tasks: int
    num_samples: int
    reward_mean: float | None = Field(description="mean reward over all samples: avg@n")
    scaled_reward_mean: float | None = Field(
        description="the same mean, as a share of the best possible reward"
    )
    standard_error: float | None = Field(
        description="standard error of that mean, over the tasks; null: there is one task"
    )
    pass_reward: float
    pass_at: dict[int, float] = Field(
        description="pass@k by k: the unbiased estimate over all tasks"
    )
    majority_mean: float | None = Field(
        description="mean reward of each task's most frequent answer: majority@n; null: there are "
        "no answers"
    )
    outcomes: dict[str, int]
    num_failed: int = Field(
        description="rollouts that ended with an error; no mean and no n counts them"
    )


class OperationAnswer(StrictBody):
    """A checkpoint, an evaluation, or a return to a checkpoint that an operator requested.

    The operation continues in the background after the request has been answered.
    """

    # Only the supervisor that began an operation knows it, and it keeps only the newest ones.

    id: str
    kind: str = Field(description="checkpoint, return or evaluation")
    status: OperationStatus
    created_at: float = Field(description="seconds since 1970")
    ended_at: float | None
    detail: str
    checkpoint: str | None = Field(description="the id of its checkpoint")
    evaluation: EvaluationAnswer | None


class ReplicaAnswer(StrictBody):
    id: str
    version: int | None
    since: float | None = Field(description="seconds since 1970; null: not known")
    is_held: bool = Field(description="whether its turns are frozen because generation is paused")


class PolicyAnswer(StrictBody):
    version: int
    is_trained: bool = Field(description="whether it is the trainer's newest version")
    is_published: bool = Field(description="whether engines load this version, or have it")
    is_republished: bool = Field(
        description="whether it replaced the version before it, of the same step, because "
        "restarted ranks have other weights"
    )
    checkpoints: list[str]
    replicas: list[ReplicaAnswer]


class PoliciesAnswer(StrictBody):
    """The policy versions, each with the engines and checkpoints that have it.

    After a return to a checkpoint, the run uses the later version numbers again, for new policies.
    An engine that still has a policy from before the return is listed in `starting`.
    """

    term: int
    trained_version: int | None
    published_version: int | None
    policies: list[PolicyAnswer] = Field(description="newest first")
    starting: list[ReplicaAnswer] = Field(description="engines without a version of this term yet")


class ControlPort(Protocol):
    """The interface through which the API's routes pass operators' calls to a run.

    `service.run.control.Control` implements it. Every call may raise ControlRefused and
    RunUnavailable.
    """

    async def view(self) -> ControlAnswer: ...

    async def pause(self, part: Pausable, reason: str) -> ControlAnswer: ...

    async def resume(self, part: Pausable) -> ControlAnswer: ...

    async def checkpoints(self) -> Sequence[CheckpointAnswer]: ...

    async def checkpoint(self) -> OperationAnswer: ...

    async def go_back(self, checkpoint_id: str) -> OperationAnswer: ...

    async def evaluate(
        self, sampling: Sampling, *, num_tasks: int | None, task_ids: Sequence[str]
    ) -> OperationAnswer: ...

    async def operation(self, operation_id: str) -> OperationAnswer: ...

    async def policies(self) -> PoliciesAnswer: ...

    async def note_call(self, call: CallAnswer) -> None: ...

    async def calls(self, limit: int) -> Sequence[CallAnswer]: ...
