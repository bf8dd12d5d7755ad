"""A model as judge, over OpenAI's chat completions: a prompt, a number in the reply, its cost.

A judgement that cannot be had raises `RewardError`, after retries: it is never 0. Equal questions
are asked once: what is under way is shared, what was answered is kept, in memory or in an SQLite
file that all processes on a node share. Called by `single_turn` and `tools` as a reward function,
and by a user's own functions.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import re
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from string import Template
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from actors.environment.protocol import RewardError
from actors.environment.reward_functions import Score
from actors.environment.user_code import describe
from actors.environment.variables import expanded

KEPT_REPLIES = 20_000
MAX_DELAY_S = 30.0
_log = logging.getLogger(__name__)
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_OWN = frozenset({"prompt", "completion"})


class BadJudge(ValueError):
    """What is configured cannot judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the judge said of one answer."""

    score: float
    reply: str
    num_tokens: int
    """Of question and reply; 0 where it was answered before."""
    cost: float
    """In the currency of the prices; 0 where it was answered before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Whom to ask, what, and how the reply is read."""

    url: str
    """Where /chat/completions lies, such as https://api.openai.com/v1."""
    model: str
    prompt: str
    """$completion, $prompt and the columns stand for their values; $$ for a dollar."""
    system: str | None = None
    parse: str = r"(-?[0-9]+(?:\.[0-9]+)?)"
    """A regular expression with one group, the score; of several matches the last counts."""
    scale: tuple[float, float] | None = None
    """[low, high] become 0 and 1, and what lies outside is no score; None: as the judge says."""
    temperature: float = 0.0
    max_tokens: int = 512
    timeout_s: float = 60.0
    """Of one request."""
    max_retries: int = 3
    """Of requests that fail on the way, or with a status that may pass (429, 503, …)."""
    concurrency: int = 16
    """Requests at once, of one environment actor."""
    cache: str | None = None
    """An SQLite file; None: replies are kept in memory, the newest KEPT_REPLIES."""
    api_key: str | None = None
    """$NAME: of the environment of the run's processes; sent as a bearer token. None:
    $OPENAI_API_KEY, where it is set; empty: none is sent."""
    input_price: float = 0.0
    """Of a million tokens."""
    output_price: float = 0.0
    """Of a million tokens."""

    @property
    def fields(self) -> frozenset[str]:
        """The columns that the prompt needs."""
        return frozenset(Template(self.prompt).get_identifiers()) - _OWN


def judge_options(name: str, given: Any) -> JudgeOptions:
    """Read a judge's options. Raises: BadJudge."""
    known = list(JudgeOptions.__dataclass_fields__)
    if not isinstance(given, Mapping) or (unknown := sorted(set(given) - set(known))):
        told = f"the keys {', '.join(unknown)}" if isinstance(given, Mapping) else repr(given)[:80]
        raise BadJudge(
            f"judges.{name}: got {told}, expected some of {', '.join(known)}; correct it"
        )
    if missing := [key for key in ("url", "model", "prompt") if not given.get(key)]:
        raise BadJudge(f"judges.{name}: {', '.join(missing)} missing; give it")
    scale = given.get("scale")
    if isinstance(scale, list):
        given = {**given, "scale": tuple(scale)}
    settings = JudgeOptions(**given)
    for problem in _problems(settings):
        raise BadJudge(f"judges.{name}.{problem}; correct it")
    return settings


def _problems(settings: JudgeOptions) -> list[str]:
    found = [
        f"{name}: got {value!r}, expected a text"
        for name in ("url", "model", "prompt", "parse", "system", "cache", "api_key")
        if not isinstance(value := getattr(settings, name), str | None)
    ]
    if found:
        return found
    if not settings.url.startswith(("http://", "https://")):
        found.append(f"url: got {settings.url!r}, expected http:// or https://")
    template = Template(settings.prompt)
    if not template.is_valid():
        found.append("prompt: it has a $ without a name, expected $NAME, or $$ for a dollar")
    elif "completion" not in template.get_identifiers():
        found.append("prompt: it lacks $completion, which is what is to be judged")
    try:
        if re.compile(settings.parse).groups != 1:
            found.append(f"parse: got {settings.parse!r}, expected one group, which is the score")
    except re.error as error:
        found.append(f"parse: {settings.parse!r} is no regular expression ({error})")
    directory = Path(settings.cache or ".").expanduser().absolute().parent
    if settings.cache is not None and not os.access(directory, os.W_OK):
        found.append(f"cache: {directory} cannot be written, expected a directory that can")
    given_scale = list(settings.scale) if isinstance(settings.scale, tuple) else settings.scale
    if given_scale is not None and not _is_scale(settings.scale):
        found.append(f"scale: got {given_scale!r}, expected [low, high], low below high")
    try:
        expanded(settings.api_key or "", what="api_key")
    except ValueError as error:
        found.append(str(error))
    return [*found, *_bad_numbers(settings)]


def _is_scale(scale: object) -> bool:
    return (
        isinstance(scale, tuple)
        and len(scale) == 2
        and all(isinstance(each, int | float) and math.isfinite(each) for each in scale)
        and scale[0] < scale[1]
    )


def _bad_numbers(settings: JudgeOptions) -> Iterator[str]:
    for name, least in (("max_tokens", 1), ("concurrency", 1), ("max_retries", 0)):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield f"{name}: got {value!r}, expected a whole number from {least}"
    for name, low in (
        ("temperature", 0.0),
        ("input_price", 0.0),
        ("output_price", 0.0),
        ("timeout_s", 0.01),
    ):
        value = getattr(settings, name)
        if not isinstance(value, int | float) or not low <= value < math.inf:
            yield f"{name}: got {value!r}, expected a number from {low:g}"


class Judge:
    """One judge of one process. May be called from several event loops, one after the other."""

    def __init__(self, settings: JudgeOptions) -> None:
        self.settings = settings
        self._replies = _Replies(settings.cache)
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()

    async def judge(self, completion: str, **columns: Any) -> Judgement:
        """Ask for a judgement. columns: what the prompt needs of the task's data.

        Raises: RewardError, where there is none.
        """
        question = self._question(completion, columns)
        key = blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=20).hexdigest()
        line = self._of_loop.setdefault(
            asyncio.get_running_loop(), _Line(self.settings.concurrency)
        )
        if (asked := line.under_way.get(key)) is not None:
            reply, _, _ = await asyncio.shield(asked)
            return self._read(reply, (0, 0))
        if (known := await self._replies.find(key)) is not None:
            return self._read(known, (0, 0))
        asking = asyncio.ensure_future(self._ask_and_keep(key, question, line))
        line.under_way[key] = asking
        asking.add_done_callback(partial(line.forget, key))
        reply, num_in, num_out = await asyncio.shield(asking)
        return self._read(reply, (num_in, num_out))

    async def _ask_and_keep(
        self, key: str, question: Mapping[str, Any], line: _Line
    ) -> tuple[str, int, int]:
        """Keep a reply that has a score, also where nobody waits for it any more."""
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

    def _question(self, completion: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        settings = self.settings
        values = {**columns, "completion": completion}
        wanted = Template(settings.prompt).get_identifiers()
        named = {name: _shown(values[name]) for name in wanted if name in values}
        try:
            content = Template(settings.prompt).substitute(named)
        except KeyError as error:
            raise RewardError(f"judge: the task has no column {error}") from error
        messages = [{"role": "user", "content": content}]
        if settings.system is not None:
            messages.insert(0, {"role": "system", "content": settings.system})
        return {
            "model": settings.model,
            "messages": messages,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }

    def _read(self, reply: str, tokens: tuple[int, int]) -> Judgement:
        """Raises: RewardError for a reply without a score."""
        settings = self.settings
        matches = re.findall(settings.parse, reply)
        try:
            score = float(matches[-1])
        except (IndexError, ValueError) as error:
            raise RewardError(
                f"judge {settings.model}: no score in its reply of {len(reply)} characters "
                f"(parse {settings.parse!r})"
            ) from error
        if settings.scale is not None:
            low, high = settings.scale
            if not low <= score <= high:
                raise RewardError(
                    f"judge {settings.model}: its score is {score:g}, expected {low:g} to {high:g}"
                )
            score = (score - low) / (high - low)
        if not math.isfinite(score):
            raise RewardError(f"judge {settings.model}: its score is not finite")
        num_in, num_out = tokens
        cost = (num_in * settings.input_price + num_out * settings.output_price) / 1e6
        return Judgement(score=score, reply=reply, num_tokens=num_in + num_out, cost=cost)

    async def _ask(self, question: Mapping[str, Any], line: _Line) -> tuple[str, int, int]:
        """Returns: the reply, and the tokens in and out. Raises: RewardError."""
        settings = self.settings
        async with line.places:
            for attempt in range(settings.max_retries + 1):
                try:
                    return await self._request(question, line)
                except _Passing as passing:
                    problem = passing
                if attempt < settings.max_retries:
                    # Jittered, so that those that failed together do not come together again.
                    delay_s = max(problem.after_s, random.uniform(0.5, 1.0) * 2**attempt)
                    await asyncio.sleep(min(MAX_DELAY_S, delay_s))
        raise RewardError(f"judge {settings.model}: {problem}, {settings.max_retries + 1} times")

    async def _request(self, question: Mapping[str, Any], line: _Line) -> tuple[str, int, int]:
        """Raises: _Passing; RewardError for what a repetition would not change."""
        settings = self.settings
        key = os.environ.get("OPENAI_API_KEY", "")
        if settings.api_key is not None:
            key = expanded(settings.api_key, what="judge: api_key")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            # The client's own limit begins anew with each byte.
            async with asyncio.timeout(settings.timeout_s):
                answer = await line.client.post(
                    f"{settings.url.rstrip('/')}/chat/completions",
                    json=question,
                    headers=headers,
                    timeout=None,
                )
        except (httpx.TransportError, TimeoutError) as error:
            raise _Passing(describe(error)) from error
        if answer.status_code in _RETRIED:
            raise _Passing(f"status {answer.status_code}", after_s=_retry_after(answer))
        if answer.status_code != 200:
            raise RewardError(
                f"judge {settings.model}: status {answer.status_code} of {settings.url}; look at "
                "its key, its model and its address"
            )
        try:
            body = answer.json()
            reply = body["choices"][0]["message"]["content"]
            usage = body.get("usage") or {}
            tokens = (
                int(usage.get("prompt_tokens") or 0),
                int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Passing("an answer that is no chat completion") from error
        if not isinstance(reply, str):
            raise _Passing("a reply without text")
        return reply, *tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReward:
    """A judge in the place of a reward function."""

    name: str
    weight: float
    judge: Judge

    def check(self, columns: Mapping[str, Any], *, extras: frozenset[str] = frozenset()) -> None:
        """Raises: ValueError where the data have not what its prompt needs."""
        if missing := sorted(self.judge.settings.fields - columns.keys() - extras):
            raise ValueError(
                f"judge {self.name}: its prompt needs {', '.join(missing)}, got the columns "
                f"{', '.join(sorted(columns)) or 'none'}; map them in tasks.columns, or correct "
                "the prompt"
            )

    async def score(
        self,
        completion: str,
        columns: Mapping[str, Any],
        *,
        extras: Mapping[str, Any] | None = None,
    ) -> Score:
        """With what it cost, in the parts. Raises: RewardError."""
        found = await self.judge.judge(completion, **{**columns, **(extras or {})})
        parts = {"score": found.score, "tokens": float(found.num_tokens), "cost": found.cost}
        return Score(value=found.score, parts=parts)


def load_judges(given: Mapping[str, Any]) -> tuple[JudgeReward, ...]:
    """Of each name its options, as `JudgeOptions` and a weight. Raises: BadJudge."""
    return tuple(_load(name, json.dumps(options)) for name, options in given.items())


@lru_cache(maxsize=64)
def _load(name: str, options: str) -> JudgeReward:
    """Once for the process: an environment is made for each episode."""
    given = json.loads(options)
    weight = given.pop("weight", 1.0) if isinstance(given, dict) else 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise BadJudge(f"judges.{name}.weight: got {weight!r}, expected a number; correct it")
    return JudgeReward(name=name, weight=weight, judge=Judge(judge_options(name, given)))


class _Passing(Exception):
    """A failure that may pass."""

    def __init__(self, problem: str, *, after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.after_s = after_s


class _Line:
    """What belongs to one event loop."""

    def __init__(self, concurrency: int) -> None:
        self.places = asyncio.Semaphore(concurrency)
        self.client = httpx.AsyncClient(limits=httpx.Limits(max_connections=concurrency))
        self.under_way: dict[str, asyncio.Future[tuple[str, int, int]]] = {}

    def forget(self, key: str, asked: asyncio.Future[tuple[str, int, int]]) -> None:
        """What was asked is answered, or failed; who asked may have gone by then."""
        self.under_way.pop(key, None)
        if not asked.cancelled():
            asked.exception()


class _Replies:
    """Replies by the digest of their question."""

    def __init__(self, file: str | None) -> None:
        self._file = None if file is None else Path(file).expanduser()
        self._newest: OrderedDict[str, str] = OrderedDict()
        self._is_told = False

    async def find(self, key: str) -> str | None:
        if (reply := self._newest.get(key)) is not None or self._file is None:
            return reply
        try:
            return await asyncio.to_thread(self._stored, key)
        except sqlite3.Error as error:
            self._tell(error)
            return None

    async def keep(self, key: str, reply: str) -> None:
        self._newest[key] = reply
        if len(self._newest) > KEPT_REPLIES:
            self._newest.popitem(last=False)
        if self._file is not None:
            try:
                await asyncio.to_thread(self._store, key, reply)
            except sqlite3.Error as error:
                self._tell(error)

    def _tell(self, error: sqlite3.Error) -> None:
        """Once: without the file a judgement costs what it costs, and is had all the same."""
        if not self._is_told:
            self._is_told = True
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
        connection = sqlite3.connect(self._file, timeout=30.0)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT, at REAL)"
        )
        return connection


def _retry_after(answer: httpx.Response) -> float:
    """Seconds that the header asks for; 0 where it says nothing that is a number."""
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def _shown(value: Any) -> str:
    """A column as a person reads it; of a chat each message behind its role."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(
        isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in value
    ):
        return "\n".join(f"{each['role']}: {each['content']}" for each in value)
    return json.dumps(value, ensure_ascii=False)
