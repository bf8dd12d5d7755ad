"""A client that submits and cancels tasks of a service under faults.

The client repeats every request until the service answers it, as the documentation demands. It
stores what the service has accepted.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

OVER = frozenset({"trained", "evicted", "cancelled"})
ANSWER_LIMIT_S = 30.0
PAUSE_S = 2.0
# The task cannot be cancelled: a training step has already taken it.
TAKEN = 409
# 404: the service has not added the route yet. 429: the backlog is full. 5xx: the run recovers.
COME_AGAIN = frozenset({404, 429, 500, 502, 503, 504})


@dataclass
class SubmittingClient:
    """A client whose `work` runs in a thread until `stop`.

    `unfinished` then returns the accepted tasks that have not ended.
    """

    base_url: str
    key: str
    environment: str
    rng: random.Random
    accepted: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    """Tasks that the service has reported as cancelled."""
    errors: list[str] = field(default_factory=list)
    """Answers that the service should never give."""
    _stopped: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        while not self._stopped.is_set():
            batch = [f"task-{len(self.accepted) + number}" for number in range(4)]
            body = {"environment": self.environment, "tasks": [{"id": name} for name in batch]}
            if self._ask("POST", "/api/v1/rollouts", body) is not None:
                self.accepted += batch
                if self.rng.random() < 0.2:
                    self._cancel(self.rng.choice(batch))
            self._stopped.wait(PAUSE_S)

    def stop(self) -> None:
        self._stopped.set()

    def unfinished(self) -> list[str]:
        """Return the accepted tasks that have not ended, or that the service has lost."""
        return [name for name in self.accepted if self.status(name) not in OVER]

    def _cancel(self, name: str) -> None:
        answer = self._ask("POST", f"/api/v1/rollouts/{name}/cancel", None)
        if answer is not None and answer.get("status") == "cancelled":
            self.cancelled.add(name)

    def status(self, name: str) -> str:
        """Return a task's status as the service reports it; "unknown" if it has no such task."""
        answer = httpx.get(
            f"{self.base_url}/api/v1/rollouts/{name}", headers=self._headers, timeout=ANSWER_LIMIT_S
        )
        return str(answer.json().get("status")) if answer.status_code == 200 else "unknown"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """Send a request until it is answered. Return the body of a success, else None.

        It also returns None if the client is stopped before an answer.
        """
        while not self._stopped.is_set():
            try:
                answer = httpx.request(
                    method,
                    self.base_url + path,
                    json=body,
                    headers=self._headers,
                    timeout=ANSWER_LIMIT_S,
                )
            except httpx.HTTPError:
                self._stopped.wait(PAUSE_S)
                continue
            if answer.status_code < 300:
                found: dict[str, Any] = answer.json()
                return found
            if answer.status_code == TAKEN:
                return None
            if answer.status_code not in COME_AGAIN:
                self.errors.append(f"{method} {path}: {answer.status_code} {answer.text[:200]}")
                return None
            self._stopped.wait(PAUSE_S)
        return None

    @property
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}
