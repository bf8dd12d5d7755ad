"""Read settings and options: one adapter checks a frozen dataclass's types and bounds.

A component declares its options as a frozen dataclass: annotated types (`actors.limits`), a
docstring under each field, and a `__post_init__` that raises ValueError if fields contradict each
other. The configuration and environments are read here, and every problem names the place, what it
got and what it expected.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

# Expected values, by the types of pydantic's errors.
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a map of names to values",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list, such as [a, b]",
    "mapping_type": "a map of names to values",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_too_short": "a text of {min_length} characters or more",
    "string_type": "a text",
    "too_long": "a list of at most {max_length} values",
    "too_short": "a list of at least {min_length} valid values",
    "tuple_type": "a list, such as [a, b]",
}
# A member of an enumeration, as pydantic shows it if only some members are allowed.
_MEMBER = re.compile(r"<[\w.]+: ('[^']*')>")

Options = TypeVar("Options")

_USER_CODE = "user code"


def _weighted(given: object) -> object:
    """Return the weight of each name, which is 1 for a name or a list of names."""
    if not isinstance(given, str | list | tuple | None):
        return given
    names = [given] if isinstance(given, str) else given or ()
    if len(set(names)) < len(names):
        raise ValueError(f"got {', '.join(names)}, expected each function once")
    return dict.fromkeys(filter(None, names), 1.0)


def _several(given: object) -> object:
    return (given,) if isinstance(given, str) else given or ()


UserCode = Annotated[str, _USER_CODE]
"""A name of user code, as FILE.py:NAME or module:NAME; a name without a colon is a built-in one."""
Weighted = Annotated[Mapping[UserCode, float], BeforeValidator(_weighted)]
"""The weights of functions by their names; a name or a list of names has weight 1."""
Several = Annotated[tuple[UserCode, ...], BeforeValidator(_several)]
"""Names of functions and classes; a single name need not be in a list."""


class BadOptions(ValueError):
    """Values do not fit a dataclass of options; the text names every problem."""


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return the adapter that reads and writes a dataclass."""
    return TypeAdapter(kind)


def read(kind: type[Options], given: object, *, where: str) -> Options:
    """Make an instance from plain values. `where` is the place that errors name.

    Raises: BadOptions.
    Example: read(GuessingOptions, {"low": -1}, where="options")
        -> BadOptions("options.low: got -1, expected 0 or more")
    """
    # mypy does not accept a type variable as hashable.
    plain: Any = kind
    try:
        adapter = adapter_of(plain)
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise BadOptions(
            f"{where}: {kind.__qualname__} has a field whose values cannot be checked "
            f"({str(error).splitlines()[0]}); expected fields of plain types, such as int, str, "
            "list[str] or a dataclass; correct the annotation"
        ) from error
    try:
        found: Options = adapter.validate_python(given)
    except ValidationError as error:
        problems = [sentence(kind, each, where) for each in error.errors(include_url=False)]
    else:
        problems = list(_unknown_keys(given, found, where))
        problems = problems or list(truths_read_as_numbers(given, found, where))
        if not problems:
            return found
    raise BadOptions("; ".join(problems))


def holding(part: str) -> AfterValidator:
    """Return a check for an annotated type: the text must contain `part`."""

    def check(text: str) -> str:
        if part not in text:
            raise ValueError(f"got {text!r}, expected a text with {part}")
        return text

    return AfterValidator(check)


def sentence(kind: type[Any], detail: ErrorDetails, where: str = "") -> str:
    """Describe one error of pydantic. `where` is the place of `kind` in a larger tree."""
    place = ".".join(map(str, [*filter(None, [where]), *detail["loc"]]))
    context = detail.get("ctx", {})
    match detail["type"]:
        case "unexpected_keyword_argument":
            return f"{place}: unknown key; {_closest(kind, detail['loc'])}"
        case "missing":
            return f"{place}: missing; this key is required"
        case "value_error":
            # The error of a `__post_init__` starts with a field's name.
            problem = str(context["error"])
            return f"{place}: {problem}" if problem.startswith("got ") else f"{place}.{problem}"
        case "dataclass_type":
            known = ", ".join(_names(_section_at(kind, detail["loc"]))[:3])
            expected = f"a map of settings, with keys such as {known}"
        case name if name in _EXPECTED:
            expected = _EXPECTED[name].format_map(
                {key: _shown(each) for key, each in context.items()}
            )
        case "enum" | "literal_error":
            expected = _MEMBER.sub(r"\1", context["expected"])
        case _:
            # Such as "Input should be a valid date".
            expected = detail["msg"].partition(" should be ")[2] or f"another ({detail['msg']})"
    return f"{place}: got {detail['input']!r:.200}, expected {expected}"


def _unknown_keys(given: Any, read: Any, location: str) -> Iterator[str]:
    """Yield a sentence for each key that pydantic has dropped.

    Pydantic refuses unknown keys only in a dataclass with our `__pydantic_config__` and in the
    dataclasses inside it. A user's dataclass lacks this attribute.
    """
    if isinstance(given, Mapping) and is_dataclass(read):
        known = inspect.signature(type(read)).parameters
        for key, value in given.items():
            place = f"{location}.{key}"
            if key not in known:
                yield f"{place}: unknown key; {_closest(type(read), (key,))}"
            else:
                yield from _unknown_keys(value, getattr(read, key, None), place)
    elif isinstance(given, Mapping) and isinstance(read, Mapping):
        for key, value in given.items():
            if key in read:
                yield from _unknown_keys(value, read[key], f"{location}.{key}")
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for number, (value, found) in enumerate(zip(given, read, strict=False)):
            yield from _unknown_keys(value, found, f"{location}.{number}")


def _shown(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _closest(kind: type[Any], location: tuple[int | str, ...]) -> str:
    known = _names(_section_at(kind, location[:-1]))
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"


def _section_at(section: Any, location: tuple[int | str, ...]) -> Any:
    for part in location:
        # A part that is not a field is a key of a mapping, whose values all have one section type.
        if part in _names(section):
            section = dataclass_of(get_type_hints(section)[str(part)])
    return section


def _names(section: Any) -> list[str]:
    return [field.name for field in fields(section) if field.init]


def dataclass_of(annotation: Any) -> Any:
    """Return the dataclass of an annotation: the annotation itself, or one inside it; else None."""
    if is_dataclass(annotation):
        return annotation
    return next(filter(None, map(dataclass_of, get_args(annotation))), None)


def user_code(options: Any) -> list[str]:
    """Return the names of user code in a dataclass of options."""
    found: list[str] = []
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        if value is not None and _is_user_code(hint):
            found += [value] if isinstance(value, str) else value
    # A name without a colon belongs to the environment.
    return [name for name in found if ":" in name]


def _is_user_code(hint: Any) -> bool:
    return _USER_CODE in getattr(hint, "__metadata__", ()) or any(
        map(_is_user_code, get_args(hint))
    )


def truths_read_as_numbers(given: Any, read: Any, location: str = "") -> Iterator[str]:
    """Yield a sentence for each true or false that was parsed as 1 or 0."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            found = read.get(key) if isinstance(read, Mapping) else getattr(read, key, None)
            yield from truths_read_as_numbers(value, found, f"{location}.{key}".lstrip("."))
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for number, (value, found) in enumerate(zip(given, read, strict=False)):
            yield from truths_read_as_numbers(value, found, f"{location}.{number}")
    elif isinstance(given, bool) and not isinstance(read, bool):
        yield f"{location}: got {given}, expected a number"
