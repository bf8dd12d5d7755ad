"""The bodies of requests and answers. An unknown field is an error and never ignored."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Annotated, Any, Self

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from actors.environment.tasks import derived_seed
from actors.limits import MAX_TASK_SEED
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome, Task
from service.access.keys import WHOLE_PATTERN, Caller
from service.intake.listing import FeedEntry, FeedKind, FeedPage, TaskPage
from service.intake.session import SessionStatus
from service.intake.submission import (
    Backlog,
    PlaceAnswer,
    RolloutRequest,
    RolloutView,
    Status,
    SubmissionView,
    SubmitReply,
)

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
# A limit on depth, because the data is stored, copied and shown by recursive functions.
MAX_DEPTH = 64

RolloutId = Annotated[str, Field(pattern=ID_PATTERN)]


def _digits(text: object) -> object:
    """Refuse a text that is not only digits: pydantic would accept "+1", "1.0" and " 1 "."""
    if isinstance(text, str) and not (text.isascii() and text.isdigit()):
        raise ValueError("expected a whole number in digits only")
    return text


Digits = BeforeValidator(_digits)
"""Validator of a number in an address or a header; place it after the number's bounds."""
# Above every real position, and within the integers of every database.
MAX_NUMBER = 2**31 - 1
Natural = Annotated[int, Field(ge=0, le=MAX_NUMBER), Digits]

KnownId = Annotated[
    str,
    Field(
        pattern=WHOLE_PATTERN, description="an id of your tenant; an admin may use any TENANT~ID"
    ),
]


def _as_whole(value: object) -> object:
    """Return 4.0 as 4, because JSON Schema calls both integers; return other values unchanged."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


WHOLE = BeforeValidator(_as_whole)
"""Validator of a strict integer in a body."""
NumSamples = Annotated[int, Field(ge=1, strict=True), WHOLE]


def _storable(data: dict[str, Any]) -> dict[str, Any]:
    if is_deeper(data, MAX_DEPTH):
        raise ValueError(
            f"expected objects and lists nested at most {MAX_DEPTH} deep; flatten it, or give it "
            "as one text"
        )
    try:
        json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(
            f"got a value that plain JSON cannot hold ({error}), expected finite numbers and text "
            "in UTF-8; correct it"
        ) from error
    return data


TaskData = Annotated[dict[str, Any], AfterValidator(_storable)]


class StrictBody(BaseModel):
    """The base class of bodies: they are frozen, and an unknown field is an error.

    `model_validate` also accepts any object that has the body's fields as attributes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)


class TaskBody(StrictBody):
    """One task. A task that is sent again with the same id and content is not added again."""

    id: RolloutId = Field(description="chosen by you; unique in your tenant")
    seed: Annotated[int, Field(ge=0, le=MAX_TASK_SEED, strict=True), WHOLE] | None = Field(
        None,
        description="seed of every random choice of the environment; null: derived from the id",
    )
    data: TaskData = Field(default_factory=dict, description="data that the environment reads")
    num_samples: NumSamples | None = Field(
        None, description="number of its rollouts; null: num_samples of the request"
    )
    min_usable_samples: NumSamples | None = Field(
        None,
        description="train the task as soon as this number of its rollouts is usable; null: when "
        "all rollouts have ended",
    )


class SubmitBody(StrictBody):
    """A batch of tasks for one environment: all are accepted, or none."""

    environment: str = Field(description="a registered name")
    num_samples: NumSamples | None = Field(
        None, description="number of rollouts of each task; null: algorithm.group_size"
    )
    batch: RolloutId | None = Field(
        None, description="a name that you choose, by which these tasks can be listed"
    )
    tasks: list[TaskBody] = Field(min_length=1)

    @model_validator(mode="after")
    def _ids_differ(self) -> SubmitBody:
        counts = Counter(task.id for task in self.tasks)
        twice = sorted(each for each, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"tasks: the ids {twice[:8]} occur more than once, expected each once")
        return self

    def requests(self, *, num_samples: int, caller: Caller) -> list[RolloutRequest]:
        """Return the tasks of a request in the form that the run accepts.

        Args: num_samples: number of rollouts of a task if neither the task nor the request sets it.
        caller: the owner of the tasks.
        """
        return [
            RolloutRequest.of(
                Task(
                    task_id=caller.whole(task.id),
                    environment=self.environment,
                    seed=derived_seed("submitted", task.id) if task.seed is None else task.seed,
                    data=task.data,
                ),
                asked_samples=task.num_samples or self.num_samples,
                default_samples=num_samples,
                min_usable_samples=task.min_usable_samples,
                key_name=caller.name,
                batch=self.batch or "",
            )
            for task in self.tasks
        ]


class StopBody(StrictBody):
    grace_seconds: Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)] | None = Field(
        None,
        description="a step that is not trained by then is abandoned, and its rollouts are played "
        "again when the run is resumed; null: wait for it",
    )


class StopAnswer(StrictBody):
    phase: str = Field(description="phase of the run; GET /readyz shows when the run has ended")


def is_deeper(tree: Any, limit: int) -> bool:
    """Return whether containers nest deeper than `limit`. Example: {"a": [1]} has depth 2."""
    level = [tree]
    for _ in range(limit):
        if not level:
            return False
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [each for part in inner for each in part if isinstance(each, dict | list)]
    return bool(level)


class SampleAnswer(StrictBody):
    """One rollout of a task."""

    index: int
    status: Status
    reward: float | None = Field(
        None, description="return of the rollout; null until an attempt has ended"
    )
    outcome: str | None = None
    policy_versions: tuple[int, int] | None = Field(
        None, description="oldest and newest policy version that sampled a token"
    )
    turns: int = 0
    sampled_tokens: int = 0
    step: int | None = Field(description="the training step that took the rollout; null: none")
    reason: str | None = Field(description="why the rollout was evicted; null: it was not")
    detail: str = ""

    @classmethod
    def of(cls, view: RolloutView) -> SampleAnswer:
        known: dict[str, Any] = {}
        if (result := view.result) is not None:
            known = {
                "reward": result.reward,
                "outcome": result.outcome,
                "policy_versions": result.policy_versions,
                "turns": result.num_turns,
                "sampled_tokens": result.num_sampled_tokens,
                "detail": result.detail,
            }
        return cls(
            index=view.index, status=view.status, step=view.step, reason=view.reason, **known
        )


class RolloutLine(StrictBody):
    """A submitted task, as a list shows it."""

    id: str
    place: int = Field(description="1, 2, 3, … in the order of acceptance")
    ahead: int = Field(description="tasks that will be played before it; 0 when it is admitted")
    status: Status
    environment: str
    batch: str | None
    accepted_at: float = Field(description="seconds since 1970")
    num_samples: int
    reward: float | None = Field(description="mean return of the rollouts that have ended")
    outcomes: dict[str, int]
    policy_versions: tuple[int, int] | None

    @classmethod
    def of(cls, view: SubmissionView, caller: Caller) -> Self:
        return cls(id=caller.shown(view.id), **cls._fields_of(view))

    @classmethod
    def _fields_of(cls, view: SubmissionView) -> dict[str, Any]:
        samples = [SampleAnswer.of(item) for item in view.rollouts]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        versions = [each for sample in samples for each in sample.policy_versions or ()]
        return dict(
            place=view.position,
            ahead=view.num_ahead,
            status=view.status,
            environment=view.environment,
            batch=view.batch or None,
            accepted_at=view.accepted_at,
            num_samples=len(view.rollouts),
            reward=sum(rewards) / len(rewards) if rewards else None,
            outcomes=dict(Counter(sample.outcome for sample in samples if sample.outcome)),
            policy_versions=(min(versions), max(versions)) if versions else None,
        )


class RolloutAnswer(RolloutLine):
    """A submitted task and its rollouts, which are one group."""

    samples: list[SampleAnswer]

    @classmethod
    def _fields_of(cls, view: SubmissionView) -> dict[str, Any]:
        samples = [SampleAnswer.of(item) for item in view.rollouts]
        return {**super()._fields_of(view), "samples": samples}


class RolloutsAnswer(StrictBody):
    """A page of tasks."""

    rollouts: list[RolloutLine]
    next: int | None = Field(
        description="the `cursor` that requests the next page; null: this is the last page"
    )

    @classmethod
    def of(cls, page: TaskPage, caller: Caller) -> RolloutsAnswer:
        return cls(rollouts=[RolloutLine.of(view, caller) for view in page.items], next=page.next)


class EntryAnswer(StrictBody):
    """An entry of the feed. Each kind of entry uses some of the fields; the others are null."""

    number: int = Field(description="increases, with gaps")
    at: float = Field(description="when it was stored, in seconds since 1970")
    kind: FeedKind
    task: str | None = Field(description="the id of the task, or of a session's group")
    member: int | None = Field(description="number of the rollout or session in the task")
    outcome: Outcome | None
    reward: float | None
    step: int | None = Field(
        description="the training step that took the rollout; in `went_back`, the step from which "
        "the run continues"
    )
    reason: EvictionReason | None = Field(
        description="why the rollout was evicted; only in `evicted`"
    )
    session_status: SessionStatus | None
    void_after: int | None = Field(
        description="in `went_back`: earlier entries of the kinds `admitted`, `trained` and "
        "`evicted` with numbers above this number are void; when these events happen again, new "
        "entries report them"
    )

    @classmethod
    def of(cls, entry: FeedEntry, caller: Caller) -> EntryAnswer:
        return cls.model_validate(replace(entry, task=entry.task and caller.shown(entry.task)))


class FeedAnswer(StrictBody):
    """A page of the feed."""

    entries: list[EntryAnswer]
    next: int = Field(description="the `after` that requests the next page")

    @classmethod
    def of(cls, page: FeedPage, *, after: int, caller: Caller) -> FeedAnswer:
        entries = [EntryAnswer.of(entry, caller) for entry in page.entries]
        return cls(entries=entries, next=entries[-1].number if entries else after)


class SubmitAnswer(StrictBody):
    """The answer to a submission: every task of the request is stored."""

    accepted: int = Field(description="number of tasks that were new")
    rollouts: list[PlaceAnswer]
    queue: Backlog

    @staticmethod
    def json_of(reply: SubmitReply, caller: Caller) -> bytes:
        """Return the JSON that the API answers after the run has accepted a client's tasks.

        The run's reply is encoded directly, which is faster than creating a `SubmitAnswer` first.
        """
        return msgspec.json.encode(
            {
                "accepted": sum(each.is_new for each in reply.places),
                "rollouts": [replace(each, id=caller.shown(each.id)) for each in reply.places],
                "queue": reply.backlog,
            }
        )


class ReadyAnswer(StrictBody):
    """The answer of /readyz: whether the run plays rollouts and trains now, and if not, why."""

    ready: bool
    reasons: list[str] = Field(description="why the run is not ready; empty if it is")
    phase: str
    policy_version: int = Field(description="version of the weights after the last finished step")
    engines: dict[str, int]
