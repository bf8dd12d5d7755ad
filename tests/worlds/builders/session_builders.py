"""Session requests, turns and ends for tests, with plausible values unless a test replaces them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from actors.environment.protocol import Message, Role
from actors.types import SESSION, FinishReason, Outcome, Task, VersionSpan
from service.intake.session import (
    SessionEnd,
    SessionKeys,
    SessionRequest,
    SessionSpec,
    SessionStatus,
    SessionTurn,
    TurnAdded,
)
from service.intake.submission import RolloutRequest

SPEC = SessionSpec(
    max_turns=50, max_tokens_per_turn=512, ttl_s=7200.0, idle_s=900.0, reward_deadline_s=3600.0
)


def session_request(name: str, *, num_samples: int = 2, key: str = "key") -> RolloutRequest:
    """Return a request for the sessions `name`-0, `name`-1, …"""
    keys = tuple(
        SessionKeys(agent=f"{key}-agent-{member}", reward=f"{key}-reward-{member}")
        for member in range(num_samples)
    )
    return RolloutRequest.of(
        Task(task_id=name, environment=SESSION, seed=1),
        asked_samples=num_samples,
        default_samples=1,
        sessions=SessionRequest(spec=SPEC, keys=keys),
    )


def session_turn(number: int = 0, **changes: Any) -> SessionTurn:
    """Return a turn that continues turn number - 1; turns of two numbers have different tokens."""
    num_sampled = 3 + number % 5
    turn = SessionTurn(
        number=number,
        parent=number - 1 if number else None,
        tools=(),
        new_messages=(Message(role=Role.USER, content=f"and then, {number}?"),),
        reply=Message(role=Role.ASSISTANT, content=f"answer {number}"),
        extends_parent=number > 0,
        new_token_ids=np.arange(number, number + 4, dtype=np.int32),
        sampled_token_ids=np.arange(num_sampled, dtype=np.int32) + 100 * number,
        logprobs=np.linspace(-1.0, -0.1, num_sampled, dtype=np.float32) - number,
        version_spans=(VersionSpan(version=2, start=0, end=num_sampled),),
        finish_reason=FinishReason.STOP,
        request_id=f"request-{number}",
        request_digest=f"digest-{number}",
        created_at=1_795_000_000.25 + number,
    )
    return replace(turn, **changes)


def turn_added(session_id: str, number: int = 0, **changes: Any) -> TurnAdded:
    return TurnAdded(session_id=session_id, turn=session_turn(number, **changes))


def session_end(**changes: Any) -> SessionEnd:
    end = SessionEnd(
        status=SessionStatus.FINISHED,
        outcome=Outcome.COMPLETED,
        reward=0.5,
        components={"f1": 0.5},
        turn_rewards={0: 0.25, 3: -1.0},
        ended_at=1_795_000_100.0,
        digest="of the request",
    )
    return replace(end, **changes)
