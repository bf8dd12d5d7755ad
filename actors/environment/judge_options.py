"""The options of a judge: the service, the question, and how a reply becomes a score.

Pure: `actors.environment.judge` sends the requests. Bad options are refused before a run starts.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlsplit

from actors.environment.protocol import RewardError
from actors.environment.text_patterns import last_of, problem_of
from actors.environment.variables import expanded

# With this pattern a reply must have only one number, because any of several may be the score.
ONLY_NUMBER = r"(?<![0-9.,])(-?[0-9]+(?:\.[0-9]+)?)(?![.,]?[0-9])"
_DIGITS = re.compile(r"[0-9][0-9.,]*")
_OWN = frozenset({"prompt", "completion"})
_TEXTS = ("url", "model", "prompt", "parse", "json_field", "system", "cache", "api_key")
# Fields of the request that `body` must not change.
_KEPT = frozenset({"messages", "model", "n", "stream"})


class BadJudge(ValueError):
    """The options of a judge are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """The service, the question, and how to read the reply."""

    url: str
    """The address without /chat/completions, such as https://api.openai.com/v1."""
    model: str
    prompt: str
    """The question; $completion, $prompt and $COLUMN are replaced by values, and $$ by a dollar."""
    system: str | None = None
    parse: str = ONLY_NUMBER
    """A regular expression with one group, the score; the last match counts. The default needs a
    reply with exactly one number: "7/10", "9 or 10" and "1,000" give no score."""
    json_field: str | None = None
    """Instead of `parse`: the name of a field; its value in the last JSON object of the reply that
    has the field is the score. A dot leads into an object (grades.helpful). true is 1.
    """
    scale: tuple[float, float] | None = None
    """The range [low, high] that is mapped to [0, 1]; a number outside it is an error. None keeps
    the number unchanged."""
    temperature: float = 0.0
    max_tokens: int = 512
    timeout_s: float = 60.0
    """Time limit of one request, in seconds."""
    max_retries: int = 3
    """Number of retries after a lost request, or a status that may be temporary (429, 503, …)."""
    concurrency: int = 16
    """Maximum number of concurrent requests of one environment actor."""
    cache: str | None = None
    """An SQLite file for replies; None: the newest KEPT_REPLIES are kept in memory."""
    api_key: str | None = None
    """Sent as a bearer token; $NAME is a variable of the run's processes. None: $OPENAI_API_KEY, if
    it is set; empty: no key is sent."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the request, as the service requires; null removes a field that
    Rayloom sets."""
    input_price: float = 0.0
    """Price of a million tokens of the question."""
    output_price: float = 0.0
    """Price of a million tokens of the reply."""

    @property
    def fields(self) -> frozenset[str]:
        """Return the columns that the prompt needs."""
        return frozenset(Template(self.prompt).get_identifiers()) - _OWN


def judge_options(name: str, given: Any) -> JudgeOptions:
    """Read a judge's options. Raises: BadJudge."""
    known = list(JudgeOptions.__dataclass_fields__)
    if not isinstance(given, Mapping) or (unknown := sorted(set(given) - set(known))):
        got = f"the keys {', '.join(unknown)}" if isinstance(given, Mapping) else repr(given)[:80]
        raise BadJudge(f"judges.{name}: got {got}, expected some of {', '.join(known)}; correct it")
    if missing := [key for key in ("url", "model", "prompt") if not given.get(key)]:
        raise BadJudge(f"judges.{name}: {', '.join(missing)} missing; give it")
    if given.get("json_field") is not None and "parse" in given:
        raise BadJudge(f"judges.{name}: got parse and json_field, expected one; drop the other")
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
        for name in _TEXTS
        if not isinstance(value := getattr(settings, name), str if name == "parse" else str | None)
    ]
    if found:
        return found
    found += _bad_texts(settings)
    found += [] if settings.cache is None else _bad_cache(settings.cache)
    given_scale = list(settings.scale) if isinstance(settings.scale, tuple) else settings.scale
    if given_scale is not None and not _is_scale(settings.scale):
        found.append(f"scale: got {given_scale!r}, expected [low, high], low below high")
    try:
        key_of(settings)
    except ValueError as error:
        found.append(str(error))
    return [*found, *_bad_numbers(settings)]


def key_of(options: JudgeOptions) -> str:
    """Return the API key to send; empty if no key is sent.

    Raises: ValueError, without the key in its text.
    """
    if options.api_key is None:
        key = os.environ.get("OPENAI_API_KEY", "")
    else:
        key = expanded(options.api_key, what="api_key")
    # A key that was read from a file may end with a newline.
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("api_key: it has characters that are not allowed in a header; correct it")
    return key


def _bad_cache(cache: str) -> Iterator[str]:
    file = Path(cache).expanduser().absolute()
    if not cache or file.is_dir():
        yield f"cache: got {cache!r}, expected a file"
    elif not os.access(file.parent, os.W_OK):
        yield f"cache: {file.parent} cannot be written, expected a directory that can"
    elif file.is_file():
        with file.open("rb") as opened:
            if opened.read(16) not in (b"", b"SQLite format 3\0"):
                yield f"cache: {file} is not an SQLite file, expected one, or a new name"


def _bad_texts(settings: JudgeOptions) -> Iterator[str]:
    """Yield what is wrong with the address, the prompt, the reading of replies and the body."""
    if not settings.url.startswith(("http://", "https://")):
        yield f"url: got {settings.url!r}, expected http:// or https://"
    elif not _is_address(settings.url):
        yield f"url: got {settings.url!r}, expected a host, and a port from 1 to 65535 if any"
    template = Template(settings.prompt)
    if not template.is_valid():
        yield "prompt: it has a $ without a name, expected $NAME, or $$ for a dollar"
    elif "completion" not in template.get_identifiers():
        yield "prompt: it lacks $completion, expected it: it is the answer to judge"
    if (problem := problem_of(settings.parse)) is not None:
        yield f"parse: {problem}"
    if settings.json_field is not None and not all(settings.json_field.split(".")):
        yield f"json_field: got {settings.json_field!r}, expected names separated by dots"
    yield from _bad_body(settings.body)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        return False


def _bad_body(body: object) -> Iterator[str]:
    if not isinstance(body, Mapping) or (kept := sorted(_KEPT & set(body))):
        got = ", ".join(kept) if isinstance(body, Mapping) else repr(body)[:80]
        yield f"body: got {got}, expected other fields of the request"
        return
    try:
        json.dumps(body, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        yield f"body: it cannot be sent as JSON ({error})"


def is_moderate(number: float) -> bool:
    """Whether a number is finite as a float; a whole number may be too large for one."""
    return -1e300 <= number <= 1e300


def _is_scale(scale: object) -> bool:
    return (
        isinstance(scale, tuple)
        and len(scale) == 2
        and all(isinstance(each, int | float) and is_moderate(each) for each in scale)
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
        if not isinstance(value, int | float) or not low <= value <= 1e300:
            yield f"{name}: got {value!r}, expected a number from {low:g}"


def question_of(
    options: JudgeOptions, completion: str, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of the request. Raises: RewardError if the task lacks a column."""
    values = {**columns, "completion": completion}
    template = Template(options.prompt)
    named = {name: _shown(values[name]) for name in template.get_identifiers() if name in values}
    try:
        content = template.substitute(named)
    except KeyError as error:
        raise RewardError(f"judge: the task has no column {error}") from error
    messages = [{"role": "user", "content": content}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    body = {
        "model": options.model,
        "messages": messages,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        **options.body,
    }
    return {name: value for name, value in body.items() if value is not None}


def score_of(options: JudgeOptions, reply: str) -> float:
    """Return the scaled score in a reply. Raises: RewardError if there is none."""
    where = f"judge {options.model}"
    found: Any
    if options.json_field is None and options.parse == ONLY_NUMBER:
        if (num_numbers := len(_DIGITS.findall(reply))) > 1:
            raise RewardError(
                f"{where}: {num_numbers} numbers in its reply, expected one; have it answer only "
                "with the score, or set parse or json_field"
            )
    if options.json_field is None:
        found, how = last_of(options.parse, reply, what=where), f"parse {options.parse!r}"
    else:
        found, how = _field_of(reply, options.json_field), f"json_field {options.json_field}"
    try:
        score = float(found)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(
            f"{where}: no score in its reply of {len(reply)} characters ({how})"
        ) from error
    if options.scale is not None:
        low, high = options.scale
        if not low <= score <= high:
            raise RewardError(f"{where}: its score is {score:g}, expected {low:g} to {high:g}")
        score = (score - low) / (high - low)
    if not math.isfinite(score):
        raise RewardError(f"{where}: its score is not finite")
    return score


def _field_of(reply: str, path: str) -> Any:
    """Return a field of the last JSON object in a text that has it; None if none has."""
    found, decoder, start = None, json.JSONDecoder(), reply.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(reply, start)
        except json.JSONDecodeError as error:
            # A brace in prose, or a broken object, of which no part is an answer.
            end = max(start + 1, error.pos)
        except (ValueError, RecursionError):
            break
        else:
            for name in path.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            found = found if value is None else value
        start = reply.find("{", end)
    return found


def _shown(value: Any) -> str:
    """Return a column as readable text; a chat as its messages, each after its role."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(
        isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in value
    ):
        return "\n".join(f"{each['role']}: {each['content']}" for each in value)
    return json.dumps(value, ensure_ascii=False)
