"""The options of a judge, a model that scores answers.

They describe the judge's service, the question to the judge, and how its reply becomes a score. Bad
options are refused before a run starts. `actors.environment.judge` sends the requests.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Annotated, Any
from urllib.parse import urlsplit

from annotated_types import Ge, Le

from actors.environment.protocol import RewardError, text_of_content
from actors.environment.text_patterns import last_of, problem_of
from actors.limits import STRICT, ModelName, Natural, Positive
from actors.options import JsonObject, expanded

# With this pattern a reply must have only one number, because any of several may be the score.
ONLY_NUMBER = r"(?<![0-9.,])(-?[0-9]+(?:\.[0-9]+)?)(?![.,]?[0-9])"
_DIGITS = re.compile(r"[0-9][0-9.,]*")
_OWN = frozenset({"prompt", "completion"})
# Fields of the request that `body` must not change.
_KEPT = frozenset({"messages", "model", "n", "stream"})
# Bound on numbers, so that the difference of any two is finite.
_MAX_NUMBER = 1e300
_Number = Annotated[float, Ge(-_MAX_NUMBER), Le(_MAX_NUMBER)]
_Amount = Annotated[float, Ge(0), Le(_MAX_NUMBER)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Options of a judge: the service, the question, and how the score is read from a reply."""

    __pydantic_config__ = STRICT

    url: str
    """The address without /chat/completions, such as https://api.openai.com/v1."""
    model: ModelName
    """Name of the model at the service."""
    prompt: str
    """The question; $completion, $prompt and $COLUMN are replaced by values, and $$ by a dollar."""
    weight: _Number = 1.0
    """Weight of the score in the reward."""
    system: str | None = None
    """Text of a system message before the question; null: no such message."""
    parse: str = ONLY_NUMBER
    """A regular expression with one group, the score; the last match counts. The default needs a
    reply with exactly one number: "7/10", "9 or 10" and "1,000" give no score."""
    json_field: str | None = None
    """Instead of `parse`: the name of a field; its value in the last JSON object of the reply that
    has the field is the score. A dot leads into an object (grades.helpful). true is 1."""
    scale: tuple[_Number, _Number] | None = None
    """The range [low, high] that is mapped to [0, 1]; a number outside it is an error. null keeps
    the number unchanged."""
    temperature: _Amount = 0.0
    """Temperature of the judge's reply."""
    max_tokens: Positive = 512
    """Maximum number of tokens of the judge's reply."""
    timeout_s: Annotated[float, Ge(0.01), Le(_MAX_NUMBER)] = 60.0
    """Time limit of one request, in seconds."""
    max_retries: Natural = 3
    """Number of retries after a lost request, or a status that may be temporary (429, 503, …)."""
    concurrency: Positive = 16
    """Maximum number of concurrent requests of one environment actor."""
    cache: str | None = None
    """An SQLite file for replies; null: the newest 20,000 are kept in memory."""
    api_key: str | None = None
    """Sent as a bearer token; $NAME is a variable of the run's processes. null: $OPENAI_API_KEY, if
    it is set; empty: no key is sent."""
    body: JsonObject = field(default_factory=dict, hash=False)
    """More fields of the request, as the service requires; null removes a field that Rayloom
    sets."""
    input_price: _Amount = 0.0
    """Price of a million tokens of the question."""
    output_price: _Amount = 0.0
    """Price of a million tokens of the reply."""

    def __post_init__(self) -> None:
        bad_cache = () if self.cache is None else _bad_cache(self.cache)
        for problem in (*_bad_request(self), *_bad_reading(self), *bad_cache):
            raise ValueError(f"{problem}; correct it")
        key_of(self)

    @property
    def fields(self) -> frozenset[str]:
        """The columns of a task's data that the prompt names."""
        return frozenset(Template(self.prompt).get_identifiers()) - _OWN


def _bad_request(options: JudgeOptions) -> Iterator[str]:
    """Yield the faults of the address, the question and the body."""
    if not _is_address(options.url):
        yield (
            f"url: got {options.url!r}, expected http:// or https:// with a host, and a port from "
            "1 to 65535 if any"
        )
    template = Template(options.prompt)
    if not template.is_valid():
        yield "prompt: it has a $ without a name, expected $NAME, or $$ for a dollar"
    elif "completion" not in template.get_identifiers():
        yield "prompt: it lacks $completion, expected it: it is the answer to judge"
    if kept := sorted(_KEPT & set(options.body)):
        yield f"body: got {', '.join(kept)}, expected other fields of the request"


def _bad_reading(options: JudgeOptions) -> Iterator[str]:
    """Yield the faults of the options that say how a reply becomes a score."""
    if (problem := problem_of(options.parse)) is not None:
        yield f"parse: {problem}"
    if options.json_field is not None:
        if options.parse != ONLY_NUMBER:
            yield "json_field: got parse and json_field, expected one"
        if not all(options.json_field.split(".")):
            yield f"json_field: got {options.json_field!r}, expected names separated by dots"
    if options.scale is not None and options.scale[0] >= options.scale[1]:
        low, high = options.scale
        yield f"scale: got [{low:g}, {high:g}], expected [low, high], low below high"


def key_of(options: JudgeOptions) -> str:
    """Return the API key to send; empty if no key is sent.

    Raises: ValueError if the key cannot be sent; the error's text does not contain the key.
    """
    if options.api_key is None:
        key = os.environ.get("OPENAI_API_KEY", "")
    else:
        key = expanded(options.api_key, what="api_key")
    # A key that was read from a file may end with a newline.
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        name = "$OPENAI_API_KEY" if options.api_key is None else "api_key"
        raise ValueError(
            f"{name}: got a key with control characters or letters beyond ASCII, expected a key of "
            "printable ASCII; correct it"
        )
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


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
        return url.startswith(("http://", "https://")) and has_host and url.isprintable()
    except ValueError:
        return False


def question_of(
    options: JudgeOptions, completion: str, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of the request that asks the judge about a completion.

    columns: the task's data. Raises: RewardError if a column that the prompt names is missing.
    """
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
    """Return the scaled score in a reply. Raises: RewardError if the reply has no score."""
    where = f"judge {options.model}"
    found: Any
    if options.json_field is None and options.parse == ONLY_NUMBER:
        if (num_numbers := len(_DIGITS.findall(reply))) > 1:
            raise RewardError(
                f"{where}: {num_numbers} numbers in its reply, expected one; ask in the prompt for "
                "nothing but the score, or set parse or json_field"
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
    """Return the value of a field in a judge's reply; None if the field is missing or null.

    The last JSON object that has the field counts. path: the field's name, such as "score", or
    "verdict.score" for a field of the object `verdict`.
    """
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
    """Return a column's value as text; a chat has a line `ROLE: CONTENT` for each message."""
    if isinstance(value, str):
        return value
    is_list = isinstance(value, Sequence) and len(value) > 0
    if is_list and all(
        isinstance(each, Mapping) and "role" in each and each.keys() & {"content", "tool_calls"}
        for each in value
    ):
        return "\n".join(f"{each['role']}: {_text_of(each)}" for each in value)
    return json.dumps(value, ensure_ascii=False)


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the content of a chat's message, and a line of JSON for each of its calls."""
    content = message.get("content")
    try:
        text = text_of_content(content)
    except ValueError:
        # A column other than the prompt may have a chat with images.
        text = json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls") or ()
    if isinstance(calls, list | tuple):
        calls = [_shown_call(call) for call in calls]
    else:
        # A data set may have the calls as a JSON text.
        calls = [calls if isinstance(calls, str) else json.dumps(calls, ensure_ascii=False)]
    return "\n".join([*filter(None, [text]), *calls])


def _shown_call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if isinstance(function, Mapping):
        function = {name: function[name] for name in ("name", "arguments") if name in function}
        with suppress(KeyError, TypeError, ValueError):
            function["arguments"] = json.loads(function["arguments"])
    return json.dumps(function, ensure_ascii=False)
