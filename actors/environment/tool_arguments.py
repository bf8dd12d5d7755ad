"""The arguments of a user's tool as a pydantic model, which gives their schema and reads a call.

The types and the defaults of the function's signature become fields of the model.
`actors.environment.function_tools` uses this module.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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

    An argument's name is only the alias of its field, because pydantic reserves some names. Fields
    that a nested model does not have are refused, and so are NaN and infinity, unless the model's
    own configuration or the annotation allows them.
    Raises: BadTool if a type cannot be described.
    """
    described = {each.arg_name: each.description for each in docs.params}
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.kind in NOT_TAKEN:
            named = str(parameter).partition(":")[0]
            raise BadTool(
                f"{where} takes {named}, expected arguments that can be passed by name; "
                f"{HIDES if hides_arguments(function) else 'name them'}"
            )
        if parameter.name not in types:
            raise BadTool(
                f"{where}: the argument {parameter.name} has no type, expected one such as "
                f"{parameter.name}: str, which the policy is shown"
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
            # The validators that nested models already have do not use the configuration of here.
            new: Any = SchemaValidator
            schema = _strict(model.__pydantic_core_schema__)
            model.__pydantic_validator__ = new(schema, _use_prebuilt=False)
        return model
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        raise no_schema(where, error) from error


def _strict(schema: Any) -> Any:
    """Return a schema of pydantic's core; its classes refuse what they do not themselves allow."""
    if isinstance(schema, list | tuple):
        return type(schema)(_strict(each) for each in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    found = {
        key: value if kind == "default" and key == "default" else _strict(value)
        for key, value in schema.items()
    }
    if kind in ("model", "dataclass", "typed-dict"):
        rules = {"extra_fields_behavior": "forbid", "allow_inf_nan": False}
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
        "expected types that JSON has, such as str, int, float, bool, list[str], Literal, an enum "
        "or a dataclass"
    )
