"""The arguments of tools: pydantic models of a user's functions, and JSON schemas.

A function's signature gives a pydantic model, which checks the arguments of each call. The model
gives the JSON schema of the arguments. Every tool's schema is put into the form that templates show
and that vLLM's parsers read.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from docstring_parser import Docstring
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, create_model
from pydantic import ValidationError as BadValue
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, SchemaValidator

from actors.environment.user_names import HIDES, hides_arguments

NOT_TAKEN = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
)
# Types of the values that JSON has.
_OF_JSON = (str, int, float, list, dict, type(None))


class BadTool(ValueError):
    """Raised if a tool does not exist, or if its signature cannot be described to a policy."""


def arguments_model(
    name: str,
    parameters: Sequence[inspect.Parameter],
    types: Mapping[str, Any],
    *,
    docs: Docstring,
    where: str,
    function: Callable[..., Any],
) -> type[BaseModel]:
    """Return a pydantic model of a function's arguments.

    The fields are named a0, a1, ..., because pydantic reserves some names; each has its argument's
    name as an alias. The model, and models in its fields, refuse unknown fields, NaN and infinity,
    unless an annotation or the configuration of a model in a field allows these.
    Raises: BadTool if a type cannot be described.
    """
    described = {
        # One entry may describe several arguments: `a, b: The two numbers.`
        name.strip(): each.description
        for each in docs.params
        for name in each.arg_name.split(",")
    }
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.kind in NOT_TAKEN:
            named = str(parameter).partition(":")[0]
            raise BadTool(
                f"{where} takes {named}, expected arguments that can be passed by name; "
                f"{HIDES if hides_arguments(function) else 'name them'}"
            )
        if parameter.name not in types:
            default = _default_of(parameter).get("default")
            kind = "str" if default is None else type(default).__name__
            raise BadTool(
                f"{where}: the argument {parameter.name} has no type, expected one such as "
                f"{parameter.name}: {kind}, because the policy is shown the types"
            )
        annotation = types[parameter.name]
        # Without a description in the docstring, use the one of Annotated.
        text = described.get(parameter.name) or _plain_note(annotation)
        if isinstance(parameter.default, FieldInfo):
            # FastMCP's form, with description and bounds.
            annotation = Annotated[annotation, parameter.default]
        options = _default_of(parameter)
        if "default" in options:
            value, about = options["default"], f"{where}: the argument {parameter.name}"
            annotation = _type_with(annotation, value, about=about)
        options |= {} if text is None else {"description": text}
        fields[f"a{number}"] = (annotation, Field(alias=parameter.name, **options))
    try:
        config = ConfigDict(extra="forbid", allow_inf_nan=False)
        model = create_model(name, __config__=config, **fields)
        if isinstance(model.__pydantic_core_schema__, dict):
            # The validators that nested models already have do not use this configuration.
            new: Any = SchemaValidator
            schema = _strict(model.__pydantic_core_schema__)
            model.__pydantic_validator__ = new(schema, _use_prebuilt=False)
        return model
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        raise no_schema(where, error) from error


def _strict(schema: Any) -> Any:
    """Make the classes in a core schema of pydantic refuse unknown fields, NaN and infinity."""
    # Members of an enum may be lists, tuples or dicts of a class of their own.
    if type(schema) in (list, tuple):
        return type(schema)(_strict(each) for each in schema)
    if type(schema) is not dict:
        return schema
    kind = schema.get("type")
    found = {
        key: value if kind == "default" and key == "default" else _strict(value)
        for key, value in schema.items()
    }
    if kind in ("model", "dataclass", "typed-dict"):
        rules = {"extra_fields_behavior": "forbid", "allow_inf_nan": False}
        # A setting in the class's own configuration has precedence.
        found["config"] = rules | found.get("config", {})
    return found


def _default_of(parameter: inspect.Parameter) -> dict[str, Any]:
    """Return an argument's default, or its default_factory, as keyword arguments of `Field`."""
    given = parameter.default
    if not isinstance(given, FieldInfo | dataclasses.Field):
        return {} if given is parameter.empty else {"default": given}
    if callable(given.default_factory):
        return {"default_factory": given.default_factory}
    unset = (PydanticUndefined, dataclasses.MISSING)
    return {} if any(given.default is each for each in unset) else {"default": given.default}


def _type_with(annotation: Any, default: Any, *, about: str) -> Any:
    """Return an argument's type; add None to it if the default is None.

    Raises: BadTool if the type does not accept the default, or if the default is not finite.
    """
    if isinstance(default, float) and not math.isfinite(default):
        raise BadTool(
            f"{about} has the default {default}, which JSON does not have, expected a finite "
            "number; use None, and a type such as float | None"
        )
    is_noted = get_origin(annotation) is Annotated
    plain, *notes = get_args(annotation) if is_noted else (annotation,)
    # The policy is not shown a default that JSON does not have, so it is not checked.
    if not isinstance(default, _OF_JSON) or _accepts(annotation, default):
        return annotation
    if default is None:
        return Annotated[plain | None, *notes] if is_noted else plain | None
    # A default may be outside of an argument's bounds, as in Field(0, ge=1).
    if is_noted and _accepts(plain, default):
        return annotation
    raise BadTool(
        f"{about} has the default {default!r}, which is not of its type, expected "
        f"{inspect.formatannotation(plain)}; correct the default or the type"
    )


def _accepts(annotation: Any, value: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value)
    except BadValue:
        return False
    except (PydanticUserError, TypeError, ValueError, NameError):
        # The type itself cannot be described, which is refused with all arguments.
        return True
    return True


def _plain_note(annotation: Any) -> str | None:
    """Return the text in `Annotated[int, "How many."]`, which pydantic ignores; else None."""
    if get_origin(annotation) is not Annotated:
        return None
    return next((each for each in get_args(annotation)[1:] if isinstance(each, str)), None)


def no_schema(where: str, error: Exception) -> BadTool:
    return BadTool(
        f"{where}: no JSON schema can be made of its arguments ({str(error).splitlines()[0]}); "
        "expected types that JSON has, such as str, int, float, bool, list[str], Literal, an enum, "
        "a dataclass or typing_extensions.TypedDict"
    )


# Keywords of JSON Schema: those whose values are data, and those whose values are schemas by names
# that the user chose.
_DATA = frozenset({"default", "const", "enum", "examples", "example"})
_BY_NAME = frozenset({"properties", "$defs", "patternProperties", "dependentSchemas"})


def tidy(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as a person would write it, because templates show it to the policy.

    The keys are in the usual order, as in the schemas that transformers makes, and there are no
    titles, which would only repeat the names.
    """
    plain = {"type": "object", "properties": {}, **_plain(dict(schema))}
    first = {name: plain[name] for name in ("type", "properties", "required") if name in plain}
    return {**first, **plain}


def _plain(tree: Any) -> Any:
    return _without_titles(_inlined(tree, tree.get("$defs", {}), frozenset()))


def _inlined(tree: Any, defs: Mapping[str, Any], within: frozenset[str]) -> Any:
    """Replace each reference to `$defs` by the definition, unless the definition contains itself.

    within: names of the definitions around this part of the schema.
    """
    if isinstance(tree, list):
        return [_inlined(each, defs, within) for each in tree]
    if not isinstance(tree, dict):
        return tree
    name = str(tree.get("$ref", "")).removeprefix("#/$defs/")
    # vLLM's parsers qwen3_coder and qwen3_xml do not follow references, so they need the type here.
    if name in defs and name not in within and not _contains_itself(name, defs):
        beside = {key: value for key, value in tree.items() if key != "$ref"}
        return _inlined({**defs[name], **beside}, defs, within | {name})
    is_needed = any(_contains_itself(each, defs) for each in defs)
    found = {}
    for key, value in tree.items():
        if key == "$defs" and not is_needed:
            continue
        if key in _DATA:
            # These values are data: their keys are not keywords, even if they look like some.
            found[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            found[key] = {own: _inlined(each, defs, within) for own, each in value.items()}
        else:
            found[key] = _inlined(value, defs, within)
    return found


def _contains_itself(name: str, defs: Mapping[str, Any]) -> bool:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for found in _references(defs.get(waiting.pop(), {})):
            if found == name:
                return True
            if found not in seen:
                seen.add(found)
                waiting.append(found)
    return False


def _references(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if isinstance(reference := tree.get("$ref"), str):
            yield reference.removeprefix("#/$defs/")
        tree = [
            each
            for key, value in tree.items()
            if key not in _DATA
            for each in (value.values() if key in _BY_NAME and isinstance(value, dict) else [value])
        ]
    if isinstance(tree, list):
        for each in tree:
            yield from _references(each)


def _without_titles(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_without_titles(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    type_first = sorted(
        tree.items(), key=lambda item: not (item[0] == "type" and isinstance(item[1], str))
    )
    found = {}
    for name, value in type_first:
        if name == "title" or (name == "additionalProperties" and value is False):
            continue
        if name in _DATA:
            found[name] = value
        elif name in _BY_NAME and isinstance(value, dict):
            found[name] = {key: _without_titles(each) for key, each in value.items()}
        else:
            found[name] = _without_titles(value)
    return found


def with_json_read(arguments: Mapping[str, Any], error: BadValue) -> dict[str, Any] | None:
    """Parse the refused arguments that are JSON text of an object or a list; return all arguments.

    vLLM's parsers may leave such text. Returns: None if there is no text, or if a text is invalid.
    Example: {"n": 1, "at": "[2, 3]"}, if `error` names "at" -> {"n": 1, "at": [2, 3]}
    """
    read = dict(arguments)
    for name in {each["loc"][0] for each in error.errors() if each["loc"]}:
        text = read.get(str(name))
        if isinstance(text, str) and text.lstrip()[:1] in ("{", "["):
            try:
                read[str(name)] = json.loads(text)
            except (ValueError, RecursionError):
                return None
    return None if read == dict(arguments) else read
