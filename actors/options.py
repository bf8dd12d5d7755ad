"""Read settings and options, with a check of the types and bounds that their classes declare.

A component declares its options as a frozen dataclass: annotated types (`actors.limits`), a
docstring under each field, and a `__post_init__` that raises ValueError if fields contradict each
other. Every message names the place, what was given and what was expected.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    JsonValue,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails, SchemaValidator, core_schema

from actors.user_code import describe, location, shown_json

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
# The name that pydantic gives a choice of a union that is a number with the check `_refuse_bool`.
_STRICT = re.compile(r"function-before\[_refuse_bool\(\), ([^\[\]]*)\]")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")

Options = TypeVar("Options")

# Types of number that pydantic's core reads from true as 1, and those keys of its schemas whose
# values are not schemas.
_NUMBERS = ("int", "float", "complex", "timedelta")
_NO_SCHEMAS = ("default", "expected", "members", "metadata", "serialization")

_USER_CODE = "user code"
_DATA = "data"


def _weighted(given: object) -> object:
    """Convert an option that names functions to a map from each name to its weight.

    Example: "a" -> {"a": 1.0}; ["a", "b"] -> {"a": 1.0, "b": 1.0}; a map stays as it is
    """
    if not isinstance(given, str | list | tuple | None):
        return given
    names = [given] if isinstance(given, str) else given or ()
    if len(set(names)) < len(names):
        raise ValueError(f"got {', '.join(names)}, expected each function once")
    return dict.fromkeys(filter(None, names), 1.0)


def _several(given: object) -> object:
    return (given,) if isinstance(given, str) else given or ()


def _as_json(given: object) -> object:
    """Convert a map to JSON values; dates become texts."""
    if not isinstance(given, Mapping):
        return given
    try:
        return json.loads(json.dumps(dict(given), allow_nan=False, default=str))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"got a value that cannot be sent as JSON ({error}), expected texts, finite numbers, "
            "true, false, null, lists and maps"
        ) from error


UserCode = Annotated[str, _USER_CODE]
"""A name of user code, as FILE.py:NAME or module:NAME; a name without a colon is a built-in one."""
Weighted = Annotated[Mapping[UserCode, float], BeforeValidator(_weighted)]
"""The weights of functions by their names; a name or a list of names has weight 1."""
Several = Annotated[tuple[UserCode, ...], BeforeValidator(_several)]
"""Names of functions and classes; a single name need not be in a list."""

DataPath = Annotated[str, _DATA]
"""Path of a file or a directory that the environment reads, relative to the working directory."""
JsonObject = Annotated[Mapping[str, Any], BeforeValidator(_as_json)]
"""A map that can be sent as JSON."""
JsonSchema = Mapping[str, JsonValue]
"""A JSON schema of an object."""


class BadOptions(ValueError):
    """Raised if values do not fit a class of options; the message names every problem."""


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return the adapter that reads and writes a class of settings.

    Raises: PydanticUserError or PydanticUndefinedAnnotation if values of a field's type cannot be
    checked.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    # This call raises if a type is not found; otherwise the first validation would raise.
    adapter.rebuild(raise_errors=True)
    # A validator that a pydantic model already has would read true as 1.
    adapter.validator = SchemaValidator(
        _with_strict_numbers(adapter.core_schema), _use_prebuilt=False
    )
    return adapter


def _with_strict_numbers(schema: Any) -> Any:
    """Return a copy of a core schema of pydantic in which numbers refuse true and false."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_strict_numbers, schema))
    if not isinstance(schema, dict):
        return schema
    # The fields of a model are a map from names to schemas, and a field may be named `default`.
    kept = _NO_SCHEMAS if isinstance(schema.get("type"), str) else ()
    inner = {
        key: value if key in kept else _with_strict_numbers(value) for key, value in schema.items()
    }
    if schema.get("type") == "union":
        # Name each choice by its type, because errors would show the name of the check around it.
        inner["choices"] = [
            (choice, old["type"]) if isinstance(old, dict) and _is_number(old) else choice
            for old, choice in zip(schema["choices"], inner["choices"], strict=True)
        ]
    if not _is_number(schema):
        return inner
    # References to the number by its name now mean the number with the check.
    ref = inner.pop("ref", None)
    return core_schema.no_info_before_validator_function(_refuse_bool, inner, ref=ref)


def _is_number(schema: Mapping[str, Any]) -> bool:
    """Return whether a core schema of pydantic would accept the value true as a number."""
    match schema.get("type"):
        case "literal":
            kinds = set(map(type, schema["expected"]))
        case "enum":
            kinds = {type(each.value) for each in schema["members"]}
        case kind:
            return kind in _NUMBERS
    return bool not in kinds and bool(kinds & {int, float})


def _refuse_bool(given: object) -> object:
    if isinstance(given, bool):
        raise ValueError(f"got {given}, expected a number")
    return given


def read(kind: type[Options], given: object, *, where: str) -> Options:
    """Return an instance of a class of options, made from plain values.

    Args: kind: a class that `is_options_type` accepts, or a union of such classes. where: the path
    of the options in the configuration, for error messages.
    Raises: BadOptions if the values do not fit.
    Example: read(GuessingOptions, {"low": -1}, where="options")
        -> BadOptions("options.low: got -1, expected 0 or more")
    """
    # mypy does not accept a type variable as hashable.
    plain: Any = kind
    try:
        adapter = adapter_of(plain)
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise BadOptions(
            f"{where}: {shown_type(kind)} has a field whose values cannot be checked "
            f"({str(error).splitlines()[0]}); expected fields of plain types, such as int, str, "
            "list[str] or a dataclass, which its module defines or imports outside of `if "
            "TYPE_CHECKING`; correct the annotation"
        ) from error
    try:
        found: Options = adapter.validate_python(given, extra="forbid", by_alias=True, by_name=True)
    except ValidationError as error:
        problems = [sentence(kind, each, where) for each in error.errors(include_url=False)]
    except Exception as error:
        # A `__post_init__` and a validator of the user's may raise anything.
        raise BadOptions(
            f"{where}: a check of {shown_type(kind)} raised {describe(error)} at "
            f"{location(error)}; expected a ValueError that says which value is wrong; correct the "
            "values or the check"
        ) from error
    else:
        return found
    raise BadOptions("; ".join(problems))


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a dataclass, a TypedDict or a model.

    Raises: BadOptions if it has a field whose type has no schema.
    """
    try:
        schema = adapter_of(kind).json_schema()
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise BadOptions(
            f"{kind.__qualname__}: it has no JSON schema ({str(error).splitlines()[0]}), expected "
            "a dataclass with fields of plain types, such as int, str or list[str]"
        ) from error
    # The schema of a class that contains itself is a reference.
    own = schema.pop("$ref", "").rpartition("/")[2]
    return {**schema["$defs"][own], **schema} if own else schema


def holding(part: str) -> AfterValidator:
    """Return a validator for an annotated type; it refuses a text that does not contain `part`."""

    def check(text: str) -> str:
        if part not in text:
            raise ValueError(f"got {text!r}, expected a text with {part}")
        return text

    return AfterValidator(check)


def sentence(kind: type[Any], detail: ErrorDetails, where: str = "") -> str:
    """Return a sentence that describes one error of pydantic.

    where: the path of `kind` in the settings that contain it.
    """
    place = _STRICT.sub(r"\1", ".".join(map(str, [*filter(None, [where]), *detail["loc"]])))
    context = detail.get("ctx", {})
    match detail["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"{place}: unknown key; {closest(kind, detail['loc'], where)}"
        case "missing":
            return f"{place}: missing; this key is required"
        case "value_error" | "assertion_error":
            problem = str(context["error"]) or "is not valid"
            # The error of a `__post_init__` of ours starts with a field's name.
            is_named = re.split(r"\W", problem)[0] in _names_at(kind, detail["loc"])
            return f"{place}.{problem}" if is_named else f"{place}: {problem}"
        case "dataclass_type" | "model_type":
            known = ", ".join(_names_at(kind, detail["loc"])[:3])
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
    return f"{place}: got {shown_json(detail['input'])}, expected {expected}"


def _shown(bound: Any) -> Any:
    is_whole = isinstance(bound, float) and bound.is_integer() and abs(bound) < 2**53
    return int(bound) if is_whole else bound


def closest(kind: Any, location: tuple[int | str, ...], where: str) -> str:
    """Return a hint for an unknown key: the key that the user probably meant, or all known keys.

    Example: location ("trainer", "lr") -> "did you mean 'learning_rate'?"
    """
    name = str(location[-1])
    if elsewhere := list(_places_of(kind, name)):
        places = [".".join(filter(None, [where, each])) for each in elsewhere[:3]]
        return f"did you mean {' or '.join(map(repr, places))}?"
    known = _names_at(kind, location[:-1])
    initials = [each for each in known if "".join(part[:1] for part in each.split("_")) == name]
    if near := initials or difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]!r}?"
    return f"expected one of {', '.join(known)}"


def _places_of(annotation: Any, name: str, depth: int = 3) -> Iterator[str]:
    """Yield the path of each field with this name, down to `depth` levels of sections."""
    for section in sections_in(annotation) if depth else ():
        for field, hint in _types_of(section).items():
            if field == name:
                yield field
            if get_origin(hint) in (None, Union, UnionType):
                yield from (f"{field}.{each}" for each in _places_of(hint, name, depth - 1))


def _names_at(annotation: Any, location: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the settings at a location (a path of keys, as in pydantic)."""
    found = sections_in(annotation)
    for part in location:
        # An error in a union has the name of one of the union's classes as a part of its location.
        chosen = [each for each in found if each.__name__ == part]
        inner = [
            section
            for each in found
            if part in (types := _types_of(each))
            for section in sections_in(types[str(part)])
        ]
        # A part that is neither a class nor a field is the key of a mapping: keep its value's type.
        found = chosen or inner or found
    return [name for each in found for name in _types_of(each)]


@cache
def _types_of(section: Any) -> Mapping[str, Any]:
    hints = _hints(section)
    if is_dataclass(section):
        known = {field.name for field in fields(section) if field.init}
        known |= {name for name, hint in hints.items() if isinstance(hint, InitVar)}
    else:
        known = set(getattr(section, "model_fields", hints))
    return {name: hint for name, hint in hints.items() if name in known}


def _hints(kind: Any, unknown: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the types of a class's attributes, by the attribute's name.

    A name in an annotation that cannot be resolved, for instance in a ClassVar, counts as Any.
    unknown: such names so far; only the function itself passes this argument.
    """
    try:
        return get_type_hints(kind, localns=dict(unknown) or None, include_extras=True)
    except NameError as error:
        if not error.name or error.name in unknown:
            raise
        return _hints(kind, {**unknown, error.name: Any})


def sections_in(annotation: Any) -> list[Any]:
    """Return the classes of settings in a type: dataclasses, pydantic's models and TypedDicts."""
    if isinstance(annotation, InitVar):
        return sections_in(annotation.type)
    kind = get_origin(annotation) or annotation
    if _is_section(kind):
        return [kind]
    return [section for each in get_args(annotation) for section in sections_in(each)]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and (
        is_dataclass(kind)
        or issubclass(kind, BaseModel)
        # This is a TypedDict, of typing or of typing_extensions.
        or (issubclass(kind, dict) and hasattr(kind, "__total__"))
    )


def is_options_type(annotation: Any) -> bool:
    """Return whether a type is a class of settings, or a union of them, which may include None."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return is_options_type(inner[0])
    if origin in (Union, UnionType):
        return all(is_options_type(each) for each in inner if each is not NoneType)
    return _is_section(origin or annotation)


def shown_type(annotation: Any) -> str:
    """Return the class names of the settings in a type, for an error message.

    Example: CalculatorOptions | None -> "CalculatorOptions"
    """
    return " | ".join(each.__qualname__ for each in sections_in(annotation))


def user_code(options: Any) -> list[str]:
    """Return the names of user code that options contain, such as my_tools.py:search."""
    # A name without a colon belongs to the environment.
    return [name for name in _marked(options, _USER_CODE) if ":" in name]


def data_paths(options: Any) -> list[Path]:
    """Return the paths of an environment's data that options contain; [] if `options` is None."""
    return [] if options is None else [Path(p).expanduser() for p in _marked(options, _DATA)]


def _marked(options: Any, mark: str) -> Iterator[str]:
    for name, hint in _hints(type(options)).items():
        # The arguments of a `__post_init__` are not kept.
        value = getattr(options, name, None)
        if value is not None and _has_mark(hint, mark):
            yield from [value] if isinstance(value, str) else value


def _has_mark(hint: Any, mark: str) -> bool:
    return mark in getattr(hint, "__metadata__", ()) or any(
        _has_mark(each, mark) for each in get_args(hint)
    )


def expanded(text: str, *, what: str) -> str:
    """Replace each `$NAME` in a text by the value of the environment variable NAME.

    So a run's files need not contain secrets.

    Args: what: the option's name, for the error.
    Raises: ValueError if a variable is not set.
    """
    for match in _VARIABLE.finditer(text):
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(
                f"{what}: the variable {name} is not set for the run's processes; set it, or "
                "correct the name"
            )
    return os.path.expandvars(text)
