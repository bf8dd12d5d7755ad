"""A client of the API: typed, synchronous, with retries.

    from service.api.schemas import TaskBody
    from service.client import Client

    with Client("http://127.0.0.1:8000") as client:
        client.submit("guessing", [TaskBody(id="task-1")])
        print(client.wait("task-1").reward)

Every request may be repeated: the service recognizes the ids in it and does the work only once. The
client therefore repeats a request that got no answer, after growing pauses with jitter.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from service.api.environments import EnvironmentAnswer, EnvironmentsAnswer
from service.api.ports import PREFIX
from service.api.schemas import (
    EntryAnswer,
    FeedAnswer,
    ReadyAnswer,
    RolloutAnswer,
    RolloutLine,
    RolloutsAnswer,
    StopAnswer,
    SubmitAnswer,
    SubmitBody,
    TaskBody,
)
from service.gateway.bodies import (
    FinishBody,
    RewardBody,
    SessionAnswer,
    SessionLineAnswer,
    SessionListAnswer,
    SessionsAnswer,
    SessionsBody,
)
from service.intake.session import SessionStatus
from service.intake.submission import Status

OVER = frozenset({Status.TRAINED, Status.EVICTED, Status.CANCELLED})
ANSWER_LIMIT_S = 60.0
WAIT_S = 30
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
# Statuses after which the same request may be sent again: the service, or a proxy in front of it,
# could not answer.
_COME_AGAIN = frozenset({408, 429, 500, 502, 503, 504})

Answer = TypeVar("Answer", bound=BaseModel)


class ApiError(Exception):
    """The API refused a request; the message says why, and what to do.

    status: HTTP status. code: stable code of the error, for programs; empty if the answer is not a
    problem document (RFC 9457). problem: the whole problem document. retry_after_s: the answer's
    Retry-After in seconds; None if it has none.

    Example:
        ```python
        try:
            client.cancel("task-1")
        except ApiError as error:
            if error.status != 409:  # it is in a training step
                raise
        ```
    """

    def __init__(
        self, status: int, problem: Mapping[str, Any], *, retry_after_s: float | None = None
    ) -> None:
        self.status, self.problem, self.retry_after_s = status, dict(problem), retry_after_s
        self.code = str(problem.get("code", ""))
        super().__init__(f"{status} {self.code}: {problem.get('detail', 'no problem document')}")


class NoAnswer(Exception):
    """The service did not answer within the client's patience, or its answer could not be read."""


class Client:
    """A client of the API at one address. Close the client, or use it in a `with` statement.

    Every method may raise ApiError and NoAnswer.

    Example:
        ```python
        with Client("http://127.0.0.1:8000", key="a key, if the service has one") as client:
            client.submit("guessing", [TaskBody(id="task-1"), TaskBody(id="task-2", num_samples=8)])
            print(client.wait("task-1").reward)
        ```
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        patience_s: float = 300.0,
        tell: Callable[[str], object] = lambda _: None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connect to an API.

        Args:
            url: Address of the service, with the run's prefix if it has one, without /api.
            key: Key for the API. None if the API requires no key.
            patience_s: Seconds for which a request is repeated if the service does not answer.
            tell: Called with a sentence when nothing answers a request, before it is repeated.
            transport: Passed to httpx.Client; None uses the default. Only tests set it.
            sleep: Called with the seconds of each pause. Only tests set it.

        Raises: ValueError if `url` is not an address that begins with http:// or https://.
        """
        _check_url(url)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=url.rstrip("/"), headers=headers, timeout=ANSWER_LIMIT_S, transport=transport
        )
        self._url, self._patience_s, self._tell = url, patience_s, tell
        self._sleep = sleep

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- tasks --------------------------------------------------------------------------------

    def submit(
        self,
        environment: str,
        tasks: Sequence[TaskBody],
        *,
        num_samples: int | None = None,
        batch: str | None = None,
        idempotency_key: str | None = None,
        waits_for_room: bool = True,
    ) -> SubmitAnswer:
        """Submit tasks, and return the answer; either all tasks are accepted or none is.

        A task whose id was accepted before is not played again.

        waits_for_room: if the backlog is full, wait until it has room, without a time limit; if
        False, raise ApiError instead.
        """
        body = SubmitBody(
            environment=environment, num_samples=num_samples, batch=batch, tasks=list(tasks)
        )
        return self._ask(
            "POST",
            f"{PREFIX}/rollouts",
            SubmitAnswer,
            body=body,
            headers={"idempotency-key": idempotency_key} if idempotency_key else {},
            waits_for_room=waits_for_room,
        )

    def rollout(self, task_id: str, *, wait_s: int = 0) -> RolloutAnswer:
        """Return the state of a task.

        wait_s: if the task has not ended, wait up to this many seconds for its end. The API waits a
        minute at most.
        """
        return self._ask(
            "GET", f"{PREFIX}/rollouts/{task_id}", RolloutAnswer, headers=_prefer(wait_s)
        )

    def rollouts(
        self,
        *,
        status: Status | None = None,
        environment: str | None = None,
        batch: str | None = None,
    ) -> Iterator[RolloutLine]:
        """Yield tasks in the order in which they were accepted, page by page."""
        query = {"status": status, "environment": environment, "batch": batch}
        for page in self._pages(f"{PREFIX}/rollouts", RolloutsAnswer, query):
            yield from page.rollouts

    def wait(self, task_id: str, *, limit_s: float | None = None) -> RolloutAnswer:
        """Wait until a task has ended, and return its state.

        Raises: TimeoutError after `limit_s` seconds; None sets no limit.
        """
        deadline_at = None if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = WAIT_S if deadline_at is None else deadline_at - time.monotonic()
            found = self.rollout(task_id, wait_s=max(0, min(WAIT_S, round(left_s))))
            if found.status in OVER:
                return found
            if left_s <= 0:
                raise TimeoutError(f"task {task_id} is {found.status} after {limit_s:g} s")

    def cancel(self, task_id: str) -> RolloutAnswer:
        """Cancel a task if no training step has taken it, and return its state."""
        return self._ask("POST", f"{PREFIX}/rollouts/{task_id}/cancel", RolloutAnswer)

    # -- the run ------------------------------------------------------------------------------

    def feed(self, *, after: int = 0, limit: int = 100, wait_s: int = 0) -> FeedAnswer:
        """Return entries of the run's event feed: those with numbers above `after`.

        limit: maximum number of entries. wait_s: seconds to wait if there is no such entry yet.
        """
        return self._ask(
            "GET",
            f"{PREFIX}/feed",
            FeedAnswer,
            query={"after": after, "limit": limit},
            headers=_prefer(wait_s),
        )

    def follow(self, *, after: int = 0) -> Iterator[EntryAnswer]:
        """Yield the feed's entries with numbers above `after`, and then each new entry, forever."""
        while True:
            page = self.feed(after=after, limit=1000, wait_s=WAIT_S)
            yield from page.entries
            after = page.next

    def environments(self) -> list[EnvironmentAnswer]:
        """Return the environments that the run plays."""
        return self._ask("GET", f"{PREFIX}/environments", EnvironmentsAnswer).environments

    def ready(self) -> ReadyAnswer:
        """Return whether the run now samples rollouts and trains on them.

        This request is never repeated.
        """
        try:
            answer = self._http.get("/readyz")
        except httpx.TransportError as error:
            raise NoAnswer(_silent(error)) from error
        if answer.status_code in (200, 503) and "ready" in _json_of(answer):
            return _read(ReadyAnswer, answer)
        raise ApiError(answer.status_code, _json_of(answer))

    def stop(self, *, grace_s: float | None = None) -> StopAnswer:
        """Stop the run after the current step, and return the answer.

        grace_s: seconds after which the step is abandoned; None sets no limit.
        """
        return self._ask("POST", f"{PREFIX}/stop", StopAnswer, body={"grace_seconds": grace_s})

    # -- sessions -----------------------------------------------------------------------------

    def create_sessions(
        self, body: SessionsBody, *, idempotency_key: str | None = None
    ) -> SessionsAnswer:
        """Create and return a group of sessions; the same body again returns the same sessions."""
        headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
        return self._ask("POST", f"{PREFIX}/sessions", SessionsAnswer, body=body, headers=headers)

    def session(self, session_id: str, *, wait_s: int = 0) -> SessionAnswer:
        """Return the state of a session.

        wait_s: wait up to this many seconds until a queued session opens, or an open session ends.
        """
        return self._ask(
            "GET", f"{PREFIX}/sessions/{session_id}", SessionAnswer, headers=_prefer(wait_s)
        )

    def sessions(
        self, *, group: str | None = None, status: SessionStatus | None = None
    ) -> Iterator[SessionLineAnswer]:
        """Yield sessions in the order in which they were accepted, page by page."""
        query = {"group": group, "status": status}
        for page in self._pages(f"{PREFIX}/sessions", SessionListAnswer, query):
            yield from page.sessions

    def finish(self, session_id: str, body: FinishBody, *, reward_key: str) -> SessionAnswer:
        """End a session, and return its state."""
        return self._ask(
            "POST",
            f"{PREFIX}/sessions/{session_id}/finish",
            SessionAnswer,
            body=body,
            headers={"authorization": f"Bearer {reward_key}"},
        )

    def give_reward(self, session_id: str, body: RewardBody, *, reward_key: str) -> SessionAnswer:
        """Give a reward to a session that was finished without one; return the session's state."""
        return self._ask(
            "PUT",
            f"{PREFIX}/sessions/{session_id}/reward",
            SessionAnswer,
            body=body,
            headers={"authorization": f"Bearer {reward_key}"},
        )

    def discard(self, session_id: str) -> SessionAnswer:
        """End a session without training on it, and return its state."""
        return self._ask("DELETE", f"{PREFIX}/sessions/{session_id}", SessionAnswer)

    # -- requests -----------------------------------------------------------------------------

    def _pages(self, path: str, kind: type[Answer], query: Mapping[str, Any]) -> Iterator[Answer]:
        cursor: Any = None
        while True:
            page = self._ask("GET", path, kind, query={**query, "cursor": cursor, "limit": 500})
            yield page
            cursor = getattr(page, "next", None)
            if cursor is None:
                return

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        *,
        body: BaseModel | Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        waits_for_room: bool = True,
    ) -> Answer:
        content = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
        params = {name: value for name, value in (query or {}).items() if value is not None}
        pause_s, silent_since = FIRST_PAUSE_S, time.monotonic()
        is_told = False
        while True:
            failure: ApiError | NoAnswer
            asked_s: float | None = None
            try:
                answer = self._http.request(
                    method, path, json=content, params=params, headers=dict(headers or {})
                )
            except httpx.TransportError as error:
                failure = NoAnswer(_silent(error))
            else:
                if answer.is_success:
                    return _read(kind, answer)
                asked_s = _retry_after_s(answer)
                failure = ApiError(answer.status_code, _json_of(answer), retry_after_s=asked_s)
                if not _may_come_again(answer):
                    raise failure
                if answer.status_code == 429:
                    if not waits_for_room:
                        raise failure
                    # The service works and says when to retry, so the patience starts again.
                    pause_s, silent_since = FIRST_PAUSE_S, time.monotonic()
            pause = max(asked_s or 0.0, pause_s) * random.uniform(1.0, 1.25)
            if time.monotonic() + pause - silent_since > self._patience_s:
                raise failure
            if isinstance(failure, NoAnswer) and not is_told:
                is_told = True
                url = httpx.URL(self._url).copy_with(username=None, password=None)
                self._tell(f"nothing answers at {url}; trying for {self._patience_s:g} s")
            self._sleep(pause)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _check_url(url: str) -> None:
    expected = "expected an address such as http://HOST:8000; correct it"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"got {url!r} ({error}), {expected}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"got {url!r}, {expected}")


def _prefer(wait_s: int) -> dict[str, str]:
    return {"prefer": f"wait={wait_s}"} if wait_s > 0 else {}


def _may_come_again(answer: httpx.Response) -> bool:
    return answer.status_code in _COME_AGAIN and answer.headers.get("x-should-retry") != "false"


def _retry_after_s(answer: httpx.Response) -> float | None:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 7 else None


def _json_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in an answer; {} if there is none, as in a proxy's answer."""
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _read(kind: type[Answer], answer: httpx.Response) -> Answer:
    """Parse an answer; ignore unknown fields, which a newer service may have added."""
    try:
        return kind.model_validate_json(answer.content, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise NoAnswer(
            f"the answer of {answer.request.url} is not of type {kind.__name__} ({where}: "
            f"{first['msg']}), expected the API of Rayloom; check the address"
        ) from error


def _silent(error: httpx.TransportError) -> str:
    return f"nothing answers ({type(error).__name__}: {error}); check that the service is running"
