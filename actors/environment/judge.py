"""Score answers by a model, the judge: it is asked about an answer and replies with a number.

The judge is any server with OpenAI's chat completions API:

    question = "From 1 to 10, how helpful is this answer to $prompt? $completion"
    options = JudgeOptions(url="http://judge:8000/v1", model="m", prompt=question, scale=(1, 10))
    judge = Judge(options)
    judgement = await judge.judge("It is 42.", prompt="What is 17 + 25?")
    print(judgement.score, judgement.num_tokens, judgement.cost)

A failed judgement raises `RewardError` after retries, and is never a score of 0. Equal questions
are sent once: pending requests are shared, and replies are kept in memory or in an SQLite file that
all processes on a node share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from actors.environment.judge_options import (
    JudgeOptions,
    key_of,
    question_of,
    score_of,
)
from actors.environment.protocol import RewardError
from actors.environment.reward_functions import Score
from actors.user_code import describe

MAX_DELAY_S = 30.0
MAX_REPLY_CHARS = 100_000
_RETRIED = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 that are retried; all statuses from 500 are retried too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A judge's verdict on one answer: its reply, and the score that was read from the reply."""

    score: float
    reply: str
    num_tokens: int
    """Number of tokens in question and reply together; 0 if the reply is from the cache or from an
    equal question that was pending."""
    cost: float
    """Cost in the currency of the prices; 0 where `num_tokens` is 0."""


class Judge:
    """A client of the model that judges.

    Several event loops may use it one after the other, but not at the same time.

    Like a `RewardFunction`, it has `name`, `weight`, `check` and `score`.
    """

    def __init__(self, settings: JudgeOptions, *, name: str = "judge") -> None:
        self.settings = settings
        self.name, self.weight = name, settings.weight
        self._replies = ReplyCache(settings.cache)
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()

    async def judge(self, completion: str, /, **columns: Any) -> Judgement:
        """Return a judgement of an answer.

        Args: columns: the columns of the task's data that the prompt names. $completion is always
        the answer, even if there is a column of that name.
        Raises: RewardError if there is no judgement.
        """
        question = question_of(self.settings, completion, columns)
        # The key has the address, because two services may have models of the same name.
        identity = json.dumps([self.settings.url, question], sort_keys=True)
        key = blake2b(identity.encode(), digest_size=20).hexdigest()
        line = self._of_loop.setdefault(
            asyncio.get_running_loop(), _Line(self.settings.concurrency)
        )
        if (pending := line.pending.get(key)) is not None:
            reply, _, _ = await asyncio.shield(pending)
            return self._read(reply, (0, 0))
        if (known := await self._replies.find(key)) is not None:
            # A run with other options for reading scores may have kept a reply that has no score
            # under these options.
            with suppress(RewardError):
                return self._read(known, (0, 0))
        request = asyncio.ensure_future(self._ask_and_keep(key, question, line))
        line.pending[key] = request
        request.add_done_callback(partial(line.forget, key))
        reply, num_in, num_out = await asyncio.shield(request)
        return self._read(reply, (num_in, num_out))

    def check(self, columns: Mapping[str, Any], *, extras: frozenset[str] = frozenset()) -> None:
        """Check that the data have the prompt's columns. Raises: ValueError if they do not."""
        if missing := sorted(self.settings.fields - columns.keys() - extras):
            raise ValueError(
                f"judge {self.name}: its prompt needs {', '.join(missing)}, got the columns "
                f"{', '.join(sorted(columns)) or 'none'}; give the data such a column, or "
                "correct the prompt"
            )

    async def score(
        self,
        completion: str,
        columns: Mapping[str, Any],
        *,
        extras: Mapping[str, Any] | None = None,
    ) -> Score:
        """Return the judge's score of an answer; the score's parts include tokens and cost.

        Raises: RewardError if there is no judgement.
        """
        found = await self.judge(completion, **{**columns, **(extras or {})})
        parts = {"score": found.score, "tokens": float(found.num_tokens), "cost": found.cost}
        return Score(value=found.score, parts=parts)

    async def _ask_and_keep(
        self, key: str, question: Mapping[str, Any], line: _Line
    ) -> tuple[str, int, int]:
        """Return what `_ask` returns; cache a reply with a score, even if no caller waits."""
        found = await self._ask(question, line)
        with suppress(RewardError):
            self._read(found[0], (0, 0))
            await self._replies.keep(key, found[0])
        return found

    async def close(self) -> None:
        """End the connections of this event loop."""
        line = self._of_loop.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.client.aclose()

    def _read(self, reply: str, tokens: tuple[int, int]) -> Judgement:
        """Return the judgement in a reply. Raises: RewardError if the reply has no score."""
        settings = self.settings
        num_in, num_out = tokens
        return Judgement(
            score=score_of(settings, reply),
            reply=reply,
            num_tokens=num_in + num_out,
            cost=(num_in * settings.input_price + num_out * settings.output_price) / 1e6,
        )

    async def _ask(self, question: Mapping[str, Any], line: _Line) -> tuple[str, int, int]:
        """Call `_request`, with retries; raise RewardError if all attempts fail."""
        settings = self.settings
        async with line.slots:
            for attempt in range(settings.max_retries + 1):
                try:
                    return await self._request(question, line)
                except _Passing as passing:
                    problem = passing
                if attempt < settings.max_retries:
                    # The pause is random: requests that failed together are not repeated together.
                    delay_s = max(problem.after_s, random.uniform(0.5, 1.0) * 2**attempt)
                    await asyncio.sleep(min(MAX_DELAY_S, delay_s))
        raise RewardError(f"judge {settings.model}: {problem}, {settings.max_retries + 1} times")

    async def _request(self, question: Mapping[str, Any], line: _Line) -> tuple[str, int, int]:
        """Send one request; return the reply and the numbers of prompt and completion tokens.

        Raises: _Passing if a repetition may succeed; RewardError if a repetition would fail too.
        """
        settings = self.settings
        key = key_of(settings)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            # The client's own limit begins again with each byte.
            async with asyncio.timeout(settings.timeout_s):
                answer = await line.client.post(
                    f"{settings.url.rstrip('/')}/chat/completions",
                    json=question,
                    headers=headers,
                    timeout=None,
                )
        except httpx.LocalProtocolError:
            # The error's text may contain the key.
            raise RewardError(f"judge {settings.model}: the request cannot be sent") from None
        except (httpx.RequestError, TimeoutError) as error:
            raise _Passing(describe(error)) from error
        if answer.status_code in _RETRIED or answer.status_code >= 500:
            raise _Passing(f"status {answer.status_code}", after_s=_retry_after(answer))
        if answer.status_code != 200:
            raise RewardError(
                f"judge {settings.model}: status {answer.status_code} of {settings.url}; check "
                "its key, its model and its address"
            )
        try:
            body = answer.json()
            choice = body["choices"][0]
            reply, ended_by = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Passing("an answer that is not a chat completion") from error
        if not isinstance(reply, str):
            raise _Passing("a reply without text")
        if ended_by == "length" or len(reply) > MAX_REPLY_CHARS:
            # The last number of a cut-off reply is not its final score.
            raise RewardError(
                f"judge {settings.model}: its reply of {len(reply)} characters was cut off, or is "
                f"longer than {MAX_REPLY_CHARS}; raise max_tokens, or request a shorter reply"
            )
        usage = body.get("usage")
        counts = usage if isinstance(usage, dict) else {}
        tokens = (_count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")))
        # Lone surrogates can be neither stored nor sent.
        return reply.encode(errors="replace").decode(), *tokens


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


@lru_cache(maxsize=64)
def shared_judge(name: str, options: JudgeOptions) -> Judge:
    """Return the judge with these options, which all episodes of this process share."""
    return Judge(options, name=name)


class _Passing(Exception):
    """Raised if a request fails but may succeed when it is repeated."""

    def __init__(self, problem: str, *, after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.after_s = after_s


class _Line:
    """The connections and pending requests of one event loop."""

    def __init__(self, concurrency: int) -> None:
        self.slots = asyncio.Semaphore(concurrency)
        self.client = httpx.AsyncClient(limits=httpx.Limits(max_connections=concurrency))
        self.pending: dict[str, asyncio.Future[tuple[str, int, int]]] = {}

    def forget(self, key: str, request: asyncio.Future[tuple[str, int, int]]) -> None:
        self.pending.pop(key, None)
        if not request.cancelled():
            # asyncio logs a warning for an error that nobody reads.
            request.exception()


def _retry_after(answer: httpx.Response) -> float:
    try:
        delay_s = float(answer.headers.get("Retry-After", ""))
    except ValueError:
        return 0.0
    return delay_s if 0 <= delay_s < math.inf else 0.0


# Kept replies of judges, in memory or in an SQLite file that a node's processes share.
KEPT_REPLIES = 20_000
LOCK_LIMIT_S = 2.0
"""Seconds to wait for another process that has locked the cache's file."""
PAUSE_S = 60.0
"""Seconds without use of the cache's file after an error, so that no judgement waits for it."""
_log = logging.getLogger(__name__)


class ReplyCache:
    """A cache of a judge's replies; the key is the digest of the question."""

    def __init__(self, file: str | None) -> None:
        self._file = None if file is None else Path(file).expanduser()
        self._newest: OrderedDict[str, str] = OrderedDict()
        self._has_warned = False
        self._unused_until = 0.0

    async def find(self, key: str) -> str | None:
        if (reply := self._newest.get(key)) is not None or not self._is_used():
            return reply
        try:
            return await asyncio.to_thread(self._stored, key)
        except sqlite3.Error as error:
            self._pause(error)
            return None

    async def keep(self, key: str, reply: str) -> None:
        self._newest[key] = reply
        if len(self._newest) > KEPT_REPLIES:
            self._newest.popitem(last=False)
        if self._is_used():
            try:
                await asyncio.to_thread(self._store, key, reply)
            except sqlite3.Error as error:
                self._pause(error)

    def _is_used(self) -> bool:
        return self._file is not None and time.monotonic() >= self._unused_until

    def _pause(self, error: sqlite3.Error) -> None:
        self._unused_until = time.monotonic() + PAUSE_S
        if not self._has_warned:
            self._has_warned = True
            _log.warning("judge: the cache %s cannot be used: %s", self._file, error)

    def _stored(self, key: str) -> str | None:
        with closing(self._opened()) as connection:
            row = connection.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _store(self, key: str, reply: str) -> None:
        with closing(self._opened()) as connection, connection:
            connection.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", (key, reply, time.time())
            )

    def _opened(self) -> sqlite3.Connection:
        assert self._file is not None
        connection = sqlite3.connect(self._file, timeout=LOCK_LIMIT_S)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT, at REAL)"
        )
        return connection
