"""The JSON schema of an environment's task data, and the check of data against it.

An environment's class or instance may have an attribute `data_schema`: a dataclass, or a JSON
schema. The dataclass's fields have types and bounds like the fields of options. Without this
attribute any object is accepted. A schema refers to nothing outside itself, because a check of data
must not read a file or a URL.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from actors.environment.protocol import Role
from actors.options import BadOptions, JsonSchema, schema_of
from actors.types import Task
from actors.user_code import type_of

ANSWERS = ("answer", "solution", "ground_truth", "final_answer", "expected_answer", "target")
"""Columns that are searched for a reference answer, in this order, unless a column is named."""
ANY_DATA: JsonSchema = {"type": "object"}
"""The schema that is used for an environment without a declared schema."""
NO_DATA: JsonSchema = {"type": "object", "additionalProperties": False}
"""The schema of an environment that makes its tasks only from their seeds."""
_TEXT_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": ["object", "string", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_NAME = {"type": ["string", "null"]}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": [*(role.value for role in Role), "developer"]},
        "content": {"anyOf": [{"type": ["string", "null"]}, _TEXT_PARTS]},
        "tool_calls": {"anyOf": [{"type": "null"}, {"type": "array", "items": _CALL}]},
        "tool_call_id": _NAME,
        "name": _NAME,
        "reasoning_content": _NAME,
        "reasoning": _NAME,
        "thinking": _NAME,
    },
    "required": ["role"],
    # A message without content must have calls.
    "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}],
}
PROMPT_DATA: JsonSchema = {
    "type": "object",
    "properties": {
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": _MESSAGE, "minItems": 1},
            ]
        }
    },
    "required": ["prompt"],
}
"""The schema of tasks with a prompt, which is a text or a chat's messages, and any other data."""
_WEIGHTED = {**_MESSAGE, "properties": {**_MESSAGE["properties"], "weight": {"enum": [0, 1, None]}}}
MESSAGE_FIELDS: tuple[str, ...] = tuple(_WEIGHTED["properties"])
"""The fields of a data set's message that are read."""
CHAT_DATA: JsonSchema = {
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": _WEIGHTED, "minItems": 1},
        "tools": {"type": ["array", "string", "null"]},
    },
    "required": ["messages"],
    "additionalProperties": False,
}
"""The schema of a chat for supervised fine-tuning; a message of weight 0 is not trained on."""
_MAX_NAMES = 8
_OF_SHAREGPT = (
    "rename from to role and value to content, and write the roles as user, assistant, system or "
    "tool"
)
MAX_DEPTH = 100
"""Maximum number of levels of lists and objects in an entry of a task's data."""
_logger = logging.getLogger(__name__)


class BadDataSchema(ValueError):
    """Raised if an environment's `data_schema` cannot be used as the JSON schema of an object."""


def data_schema_of(environment: object) -> dict[str, Any]:
    """Return the JSON schema of an environment's task data.

    Raises: BadDataSchema if the declaration cannot be used.
    """
    declared = getattr(environment, "data_schema", ANY_DATA)
    if isinstance(declared, type):
        declared = _schema_of_class(declared)
    if not isinstance(declared, Mapping):
        raise BadDataSchema(
            f"data_schema: got {type_of(declared)}, expected a dataclass of the task data, "
            "or their JSON schema as a mapping"
        )
    try:
        schema: dict[str, Any] = json.loads(json.dumps(dict(declared), allow_nan=False))
        Draft202012Validator.check_schema(schema)
        _check_references(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadDataSchema(f"data_schema: expected plain JSON ({error})") from error
    except SchemaError as error:
        raise BadDataSchema(
            f"data_schema{error.json_path[1:]}: {error.message}; expected a JSON schema of draft "
            "2020-12"
        ) from error
    except Unresolvable as error:
        raise BadDataSchema(
            f"data_schema: the reference {error.ref!r} leads nowhere; expected only references "
            "within the schema, such as #/$defs/name"
        ) from error
    return schema


def _schema_of_class(kind: type[Any]) -> dict[str, Any]:
    try:
        schema = schema_of(kind)
    except BadOptions as error:
        raise BadDataSchema(f"data_schema: {error}") from error
    if schema.get("type") != "object":
        raise BadDataSchema(
            f"data_schema: got the class {kind.__qualname__}, whose values are not JSON objects, "
            "expected a dataclass of the task data"
        )
    return schema


def _check_references(schema: dict[str, Any]) -> None:
    """Raise Unresolvable if a reference leads outside the schema."""
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    for reference in _references(schema):
        resolver.lookup(reference)


def _references(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for name in ("$ref", "$dynamicRef"):
            if isinstance(tree.get(name), str):
                yield tree[name]
    if isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _references(each)


class DataCheck:
    """A check of data against a schema that `data_schema_of` has returned.

    Args:
        schema: The schema that the data must satisfy.
        check: The environment's method `check_data`, which raises ValueError if it refuses the
            data; None if the environment has no such method.
        filled: The environment's `filled_columns`: entries in which it expects no nulls.
    """

    def __init__(
        self,
        schema: Mapping[str, Any],
        check: Callable[[Mapping[str, Any]], None] | None = None,
        *,
        filled: Iterable[str] = (),
    ) -> None:
        self._check = check
        self.filled = frozenset(filled)
        """Entries in which the environment expects no nulls."""
        self._validator = Draft202012Validator(dict(schema), registry=Registry())
        is_closed = schema.get("additionalProperties") is False
        self.names = frozenset(schema.get("properties", ())) if is_closed else None
        """Names of the entries that the data may have; None allows every name."""
        self._needed = self.filled.union(schema.get("required", ()))
        self._accepts = _acceptor(schema)
        # Most tasks have only a seed.
        self._of_none = self._problem({})

    def problem(self, data: Mapping[str, Any]) -> str:
        """Return a sentence that says what is wrong with the data; empty if nothing is wrong.

        The sentence names the entry and the remedy, and quotes no value of the data.
        Example: {"family": 3} -> "data.family: got a number, expected string; correct it".
        """
        if not data:
            return self._of_none
        if problem := depth_problem(data):
            return f"data.{problem}"
        # jsonschema takes 0.1 ms for a chat, which is 10 s for 100,000 rows.
        if self._accepts is not None and self._accepts(data):
            return self._problem_of_check(data)
        return self._problem(data)

    def remedy(self, data: Mapping[str, Any], entries: Collection[str], *, section: str) -> str:
        """Return a remedy for a row of a data set that has a problem, as the end of its text.

        data: the row's data. entries: the entries that any row has. section: the section of the
        configuration with the setting `columns`.
        """
        example = next(iter(sorted(self._needed - data.keys())), "answer")
        hint = f"map them in {section}.columns, such as {{{example}: COLUMN}}"
        # To change this row helps only if other rows have what it lacks.
        is_general = bool(self._needed - set(entries))
        return hint if is_general else f"{hint}, or correct or remove the row"

    def _problem(self, data: Mapping[str, Any]) -> str:
        found = best_match(self._validator.iter_errors(dict(data)))
        if found is None:
            return self._problem_of_check(data)
        where = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in found.absolute_path
        )
        return f"data{where}: {_error_text(found)}"

    def _problem_of_check(self, data: Mapping[str, Any]) -> str:
        if self._check is None:
            return ""
        try:
            self._check(data)
        except ValueError as error:
            return str(error)
        return ""


def check_of(environment: object) -> DataCheck:
    """Return the check of an environment's task data.

    Raises: BadDataSchema if the environment's schema cannot be used.
    """
    return DataCheck(
        data_schema_of(environment),
        getattr(environment, "check_data", None),
        filled=getattr(environment, "filled_columns", ()),
    )


def report_nulls(tasks: Sequence[Task], check: DataCheck, what: str) -> None:
    """Log a warning for each entry that is empty in some tasks although it needs a value.

    Empty means null or an empty text; a CSV file's missing values are empty texts.
    Args: check: its `filled` names the entries that need a value. what: name of the file or the
    data set, for the warning.
    """
    if not check.filled:
        return
    empty = Counter(
        (name, "null" if value is None else "an empty text")
        for task in tasks
        for name in check.filled & task.data.keys()
        if (value := task.data[name]) is None or value == ""
    )
    for (name, shown), count in sorted(empty.items()):
        _logger.warning(
            "%s: the column %s is %s in %d of %d rows, and a reward function requires it; "
            "expected a value in each row; remove these rows, or annotate the argument, such as "
            "%s: str | None, if the function accepts %s",
            what,
            name,
            shown,
            count,
            len(tasks),
            name,
            "None" if shown == "null" else "empty texts",
        )


_Accepts = Callable[[Any], bool]
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
    "boolean": (bool,),
}
# Keywords that do not restrict the data.
_SILENT = frozenset({"title", "description", "default", "examples", "$schema", "$comment"})


def _acceptor(schema: object) -> _Accepts | None:
    """Return a quick check of data; None if the schema has a keyword that only jsonschema checks.

    Data that pass satisfy the schema. For data that fail, ask jsonschema, which may accept them.
    """
    if not isinstance(schema, Mapping):
        return None
    rules = []
    for name, value in schema.items():
        if name in _SILENT or (name == "additionalProperties" and value is True):
            continue
        if (rule := _rule(name, value, schema)) is None:
            return None
        rules.append(rule)
    return lambda data: all(rule(data) for rule in rules)


def _rule(name: str, value: Any, schema: Mapping[str, Any]) -> _Accepts | None:
    if name == "type":
        names = [value] if isinstance(value, str) else value
        if any(each not in _TYPES for each in names):
            return None
        types = tuple(kind for each in names for kind in _TYPES[each])
        return lambda data: isinstance(data, types)
    if name == "required":
        return lambda data: isinstance(data, dict) and all(each in data for each in value)
    if name in ("minLength", "minItems"):
        kind = str if name == "minLength" else list
        return lambda data: isinstance(data, kind) and len(data) >= value
    if name == "enum":
        return lambda data: isinstance(data, str) and data in value
    if name == "additionalProperties" and value is False:
        known = frozenset(schema.get("properties", ()))
        return lambda data: isinstance(data, dict) and known.issuperset(data)
    return _nested_rule(name, value)


def _nested_rule(name: str, value: Any) -> _Accepts | None:
    if name == "items":
        each_item = _acceptor(value)
        if each_item is None:
            return None
        return lambda data: isinstance(data, list) and all(map(each_item, data))
    if name == "anyOf":
        choices = [_acceptor(each) for each in value]
        known_choices = [each for each in choices if each is not None]
        return lambda data: any(each(data) for each in known_choices)
    if name == "properties":
        parts = {key: _acceptor(each) for key, each in value.items()}
        known_parts = {key: each for key, each in parts.items() if each is not None}
        if len(known_parts) < len(parts):
            return None
        return lambda data: (
            isinstance(data, dict)
            and all(each(data[key]) for key, each in known_parts.items() if key in data)
        )
    return None


def _error_text(error: ValidationError) -> str:
    rule, value, given = str(error.validator), error.validator_value, error.instance
    if rule == "type":
        expected = value if isinstance(value, str) else " or ".join(value)
        return f"got {_kind(given)}, expected {expected}; correct it"
    if rule == "anyOf" and all(
        each.validator == "type" and not each.relative_path for each in error.context
    ):
        types = [
            kind
            for each in error.context
            for kind in (
                [each.validator_value]
                if isinstance(each.validator_value, str)
                else each.validator_value
            )
        ]
        return f"got {_kind(given)}, expected {' or '.join(dict.fromkeys(types))}; correct it"
    if rule == "anyOf" and all(each.validator == "required" for each in error.context):
        names = [name for each in error.context for name in each.validator_value]
        first = [name for name in error.schema.get("required", ()) if name not in given]
        expected = " and ".join([*first, " or ".join(names)])
        keys = ", ".join(map(str, [*given][:_MAX_NAMES])) or "none"
        remedy = _OF_SHAREGPT if {"from", "value"} <= given.keys() else "correct it"
        return f"got an object with the keys {keys:.200}, expected {expected}; {remedy}"
    if rule in ("minLength", "minItems") and not given:
        return f"got {_kind(given)} that is empty, expected a non-empty one; correct it"
    if rule == "required":
        missing = [name for name in value if name not in given]
        return f"{', '.join(missing)} missing; give it"
    if rule == "additionalProperties" and value is False:
        known = error.schema.get("properties", {})
        unknown = sorted(name for name in given if name not in known)
        return (
            f"unknown fields {', '.join(unknown[:_MAX_NAMES])}; expected "
            f"{'one of ' + ', '.join(known) if known else 'none'}; leave them out"
        )
    shown = json.dumps(value, ensure_ascii=False)
    return f"got {_kind(given)} that breaks the schema's {rule}: {shown:.200}; correct it"


def depth_problem(data: Mapping[str, Any]) -> str:
    """Return a sentence if an entry has more levels than MAX_DEPTH; else return an empty text.

    The code that copies and compares data is recursive, so data must not be too deep.
    """
    for name, value in data.items():
        if _is_deeper(value, MAX_DEPTH):
            return (
                f"{name}: got a value of more than {MAX_DEPTH} nested lists and objects, expected "
                "fewer levels; flatten the value, or write it as a text"
            )
    return ""


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in parts)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", str: "a text", int: "a number", float: "a number"}
    return kinds.get(type(value), "an object" if isinstance(value, dict) else "a list")


def reference_of(task: Task, column: str | None) -> str | None:
    """Return a task's reference answer; None if the task has none.

    column: name of the column, or path to an entry in it, such as reward_model.ground_truth. If
    None, usual names (`ANSWERS`), such as answer and solution, are tried in order. The first one
    that contains a text or a number is used.
    """
    for name in ANSWERS if column is None else (column,):
        value: Any = task.data
        for part in (name,) if name in task.data else name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, list) and value:
            # A list holds several right answers; take any one.
            value = value[0]
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    return None
