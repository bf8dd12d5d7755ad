"""Tools that are a user's typed Python functions, or the public methods of a class.

    def search(query: str, limit: int = 5) -> str: ...

The signature gives the schema that the policy sees, and the docstring gives the descriptions in it.
Arguments are checked against the types and converted before the call.

Each episode has its own instance of a class. `reset(**columns)` of the instance is called first, as
with `environment_factory` of TRL's trainers. `reset`, `close` and `get_reward` are not tools.
Instead of a class, a factory may be given: a function without arguments that is annotated with the
class, such as `def make() -> Desk`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, get_type_hints

from docstring_parser import Docstring, DocstringStyle, ParseError
from docstring_parser import parse as parse_docstring
from docstring_parser.google import parse as parse_google
from pydantic import BaseModel, PydanticUserError
from pydantic import ValidationError as BadValue
from pydantic_core import to_jsonable_python

from actors.environment import workers
from actors.environment.fork_server import preload
from actors.environment.protocol import ToolSchema, text_of_content
from actors.environment.reward_functions import RewardFunction, method_as_reward
from actors.environment.tool_arguments import (
    NOT_TAKEN,
    BadTool,
    arguments_model,
    no_schema,
    tidy,
    with_json_read,
)
from actors.environment.tool_turns import BadArguments, ToolFailed
from actors.environment.user_names import BadName, find
from actors.user_code import bounded, in_thread, type_of

# Number of elements up to which an array is shown whole.
MAX_SHOWN = 1000
# The end of the text by which Python shows an object that has no text of its own.
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+>")
# A string or bytes in quotes, as `repr` shows it.
_QUOTED = re.compile(r"""(?:(?<!\w)|(?<=\bb))(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\")""")
# Methods of a class that the policy cannot call.
_OWN = frozenset({"reset", "close", "get_reward"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A user's function as a tool of the policy, with the tool's schema."""

    schema: ToolSchema
    function: Callable[..., Any]
    arguments: type[BaseModel]
    target: str = ""
    """The name by which another process finds the tool, such as my_tools.py:search or
    my_tools.py:Desk.look; empty if there is none."""
    instance: Any = None
    """For a method of an instance that a worker keeps: the instance (a `workers.Held`). None for
    any other tool."""

    @property
    def tools(self) -> tuple[FunctionTool, ...]:
        return (self,)

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check a call's arguments; return them converted to the types in the function's signature.

        Some parsers of vLLM (qwen3_coder, qwen3_xml) give an object or a list as JSON text if its
        schema is a $ref or an anyOf. This text is parsed if the argument's type does not accept it.
        Raises: BadArguments if the arguments do not fit.
        """
        try:
            read = self.arguments.model_validate(arguments)
        except BadValue as error:
            if (parsed := with_json_read(arguments, error)) is not None:
                return self.read(parsed)
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadArguments(f"Argument {where}: {first['msg']}.") from None
        fields = type(read).model_fields.items()
        return {str(field.alias): getattr(read, own) for own, field in fields}

    async def call(self, arguments: Mapping[str, Any], *, limit_s: float) -> str:
        """Call the tool and return its answer as text.

        The tool runs in a worker if `workers.is_contained` says so, or if a worker keeps its
        instance. Otherwise it runs in this process: a coroutine runs in the event loop, and any
        other function runs in a thread.

        Args:
            limit_s: Seconds that the call may take. They do not include the wait for a worker or a
                thread.

        Raises: BadArguments if the arguments do not fit; CallTimedOut; CallFailed if the tool
            raises; WorkerLost if the worker that keeps the tool's instance has ended.
        """
        if self.instance is not None or workers.is_contained(self.target):
            return await self._call_in_worker(arguments, limit_s=limit_s)
        read = self.read(arguments)
        if inspect.iscoroutinefunction(self.function):
            return as_text(await bounded(lambda: self.function(**read), limit_s=limit_s))
        begun = asyncio.Event()
        working = asyncio.ensure_future(
            in_thread(functools.partial(self.function, **read), on_start=begun.set)
        )
        try:
            await begun.wait()
            found = await bounded(lambda: working, limit_s=limit_s)
        finally:
            working.cancel()
        if inspect.isawaitable(found):
            found = await bounded(lambda: found, limit_s=limit_s)
        return as_text(found)

    async def _call_in_worker(self, arguments: Mapping[str, Any], *, limit_s: float) -> str:
        if self.instance is None:
            # The worker reads the arguments, because their types may run the user's code too.
            given = {"target": self.target, "arguments": dict(arguments)}
            place: workers.Pool | workers.Home = workers.pool()
        else:
            given = {"target": self.target, "arguments": dict(arguments), "instance": self.instance}
            place = self.instance.home
        text, is_refusal = await place.call(
            f"{__name__}:_answer_of", given, limit_s=limit_s, about=self.target
        )
        if is_refusal:
            raise BadArguments(text)
        return str(text)


def _answer_of(
    target: str, arguments: Mapping[str, Any], instance: Any = None
) -> tuple[str, bool] | Coroutine[Any, Any, tuple[str, bool]]:
    """Call a tool in this worker; return (answer, False), or (reason for a refusal, True)."""
    tool = _tool_of(target)
    try:
        read = tool.read(arguments)
    except BadArguments as error:
        return str(error), True
    called = tool.function if instance is None else getattr(instance, target.rpartition(".")[2])
    found = called(**read)
    return _awaited(found) if inspect.isawaitable(found) else (as_text(found), False)


def _call_if_there(instance: Any, name: str, columns: Mapping[str, Any]) -> Any:
    """Call a method of an instance, and return its answer; None if there is no such method.

    The method gets the columns of the task that its signature names, or all with a `**` parameter.
    If the method is `close` or returns the instance itself, None is returned instead, because a
    worker process cannot send every such value back.
    """
    method = getattr(instance, name, None)
    if method is None:
        return None
    parameters = inspect.signature(method).parameters
    arguments = dict(columns)
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        arguments = {key: value for key, value in arguments.items() if key in parameters}

    def read(found: Any) -> Any:
        return None if found is instance or name == "close" else found

    async def awaited(found: Awaitable[Any]) -> Any:
        return read(await found)

    found = method(**arguments)
    return awaited(found) if inspect.isawaitable(found) else read(found)


async def _awaited(found: Awaitable[Any]) -> tuple[str, bool]:
    return as_text(await found), False


@functools.lru_cache(maxsize=256)
def _tool_of(target: str) -> FunctionTool:
    """Load the tool with a name such as my_tools.py:search or my_tools.py:Desk.look."""
    name, _, method = target.rpartition(".")
    if ":" in name:
        found = _load(name)
        if isinstance(found, ToolClass):
            return next(each for each in found.tools if each.schema.name == method)
    found = _load(target)
    assert isinstance(found, FunctionTool)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolClass:
    """A user's class whose public methods are tools; each episode has an instance."""

    name: str
    make: Callable[[], Any]
    tools: tuple[FunctionTool, ...]
    """The tools, not bound to an instance."""
    has_reward: bool
    """Whether the class has a method `get_reward`, which scores the episode."""
    made: type
    """The class whose instances `make` returns."""
    target: str
    """The name by which another process finds `make`, such as my_tools.py:Desk."""
    required_columns: frozenset[str] = frozenset()
    """The columns that the class's method `reset` requires."""

    async def made_in(self, home: workers.Home | None, *, limit_s: float) -> Any:
        """Make an instance of the class for one episode.

        home: the episode's place in a worker process. The instance stays in this worker, and a
        reference to the instance (`workers.Held`) is returned. If `home` is None, the instance is
        made in this process.
        """
        if home is None:
            return await in_thread(self.make)
        return await home.call(self.target, {}, limit_s=limit_s, keeps=True)

    async def call(
        self, instance: Any, name: str, columns: Mapping[str, Any], *, limit_s: float
    ) -> Any:
        """Call the method `reset` or `close` of an instance and return its answer.

        Return None if the instance has no such method.
        """
        if isinstance(instance, workers.Held):
            return await instance.home.call(
                f"{__name__}:_call_if_there",
                {"instance": instance, "name": name, "columns": columns},
                limit_s=limit_s,
                about=f"{self.target}.{name}",
            )
        # A worker gets copies of the values, so that each instance here gets its own, too.
        columns = {column: deepcopy(value) for column, value in columns.items()}
        if inspect.iscoroutinefunction(getattr(instance, name, None)):
            return await _call_if_there(instance, name, columns)
        return await in_thread(functools.partial(_call_if_there, instance, name, columns))

    def reward_of(self, instance: Any, *, name: str) -> RewardFunction:
        """Return the method `get_reward` of an instance as a reward function called `name`."""
        if not isinstance(instance, workers.Held):
            return method_as_reward(name, instance.get_reward)
        method = self.made.get_reward  # type: ignore[attr-defined]
        if inspect.isfunction(inspect.getattr_static(self.made, "get_reward")):
            # A call gives no value for self, so that None takes its place in the signature.
            method = functools.partial(method, None)
        return method_as_reward(name, method, target=f"{self.target}.get_reward", instance=instance)

    def bound(self, instance: Any) -> tuple[FunctionTool, ...]:
        """Return the class's tools, which then call the methods of the given instance.

        instance: an instance in this process, or a reference to one in a worker (`workers.Held`).
        """
        if isinstance(instance, workers.Held):
            return tuple(
                dataclasses.replace(
                    tool, target=f"{self.target}.{tool.schema.name}", instance=instance
                )
                for tool in self.tools
            )
        return tuple(
            FunctionTool(
                schema=tool.schema,
                function=getattr(instance, tool.schema.name),
                arguments=tool.arguments,
            )
            for tool in self.tools
        )


def load_tools(names: Sequence[str]) -> tuple[FunctionTool | ToolClass, ...]:
    """Load the functions and classes with these names as tools.

    Args: names: such as "my_tools.py:search", or "package.module:Class".
    Raises: BadTool if a tool cannot be loaded, or if two tools have the same name.
    """
    found = tuple(_load(name) for name in names)
    taken = [tool.schema.name for each in found for tool in each.tools]
    if twice := sorted({name for name in taken if taken.count(name) > 1}):
        raise BadTool(
            f"tools: {', '.join(twice)} is the name of two tools, expected unique names; rename one"
        )
    return found


def as_text(found: object) -> str:
    """Return a tool's answer as text for the policy; anything but a text is written as JSON.

    A list of text parts counts as text. Lone surrogates, as in names of files that are not UTF-8,
    are replaced, because no message may have any.
    Raises: ToolFailed if the answer has no JSON form, and its text has an address in memory.
    Example: a plain object, whose text is "<Desk object at 0x7f3a>", raises ToolFailed.
    """
    if isinstance(found, list) and found and all(map(_has_only_text, found)):
        found = text_of_content(found)
    text = found if isinstance(found, str) else _as_json(found)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _as_json(found: object) -> str:
    if isinstance(found, BaseModel):
        return found.model_dump_json()
    try:
        if not isinstance(found, dict | list | tuple | int | float | None):
            found = _plain(found)
        return found if isinstance(found, str) else _dumped(found)
    except (TypeError, ValueError):
        text = str(found)
        # An address in a quoted text, such as a key of a dict, is the user's text.
        if _ADDRESS.search(text) and _ADDRESS.search(_QUOTED.sub("", repr(found))):
            raise ToolFailed(
                f"the tool returned {type_of(found)} that cannot be written as JSON, expected text "
                "or JSON values; return its text"
            ) from None
        return text


def _has_only_text(part: object) -> bool:
    """Return whether an entry of a tool's answer is a text part without other fields."""
    return (
        isinstance(part, dict)
        and {name for name, value in part.items() if value is not None} == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


_dumped = json.JSONEncoder(ensure_ascii=False, default=lambda value: _plain(value)).encode


def _plain(value: Any) -> Any:
    """Convert an array, a dataclass, an enum, a date and the like to values that JSON can hold.

    Raises: TypeError or ValueError if the value cannot be converted.
    """
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        # A long array is shortened, as when it is printed.
        return value.tolist() if math.prod(value.shape) <= MAX_SHOWN else str(value)
    if isinstance(value, set | frozenset):
        # The order of a set's texts differs between processes.
        return sorted(value, key=repr)
    return to_jsonable_python(value)


@functools.lru_cache(maxsize=256)
def _load(name: str) -> FunctionTool | ToolClass:
    """Load a tool or a class, and cache it, because each episode calls this function."""
    try:
        found = find(name, what="tools")
    except BadName as error:
        raise BadTool(str(error)) from error
    preload(name)
    preload(f"{__name__}:_answer_of")
    if inspect.isclass(found):
        return _read_class(name, found, make=found)
    if isinstance(found, functools.partial) and inspect.isclass(found.func):
        return _read_class(name, found.func, make=found)
    if inspect.isroutine(found) and (made := _class_made_by(found, name)) is not None:
        return _read_class(name, made, make=found)
    if not inspect.isroutine(found):
        raise BadTool(
            f"tool {name} is {type_of(found)}, expected a function, or a class whose "
            "methods are tools; name one"
        )
    # The own name of a decorator's inner function says nothing about the tool.
    own = re.split("[:.]", name)[-1] if _is_inner(found) else ""
    return dataclasses.replace(read_function(found, where=f"tool {name}", name=own), target=name)


def _class_made_by(function: Callable[..., Any], name: str) -> type | None:
    """Return the class whose instances a factory function makes; None if the function is a tool.

    Raises: BadTool if neither arguments nor annotation say whether it is a factory or a tool.
    """
    if inspect.signature(function).parameters:
        return None
    try:
        returned = get_type_hints(function).get("return")
    except Exception as error:
        raise BadTool(
            f"tool {name}: its annotations cannot be read ({error}); correct them"
        ) from error
    if returned is None and "return" not in function.__annotations__:
        raise BadTool(
            f"tool {name} takes no argument and has no return annotation, expected "
            f"`def {function.__name__}() -> str` for a tool, or a class as annotation for a "
            "factory whose instances have the tools; annotate it, or name the class"
        )
    if inspect.iscoroutinefunction(function):
        return None
    if not inspect.isclass(returned) or returned.__module__ in ("builtins", "typing"):
        return None
    is_data = issubclass(returned, BaseModel) or dataclasses.is_dataclass(returned)
    has_tools = any(
        inspect.isfunction(each) and not method.startswith("_") and method not in _OWN
        for method, each in vars(returned).items()
    )
    return returned if has_tools and not is_data else None


def _read_class(name: str, found: type, *, make: Callable[[], Any]) -> ToolClass:
    required = [
        each.name
        for each in inspect.signature(make).parameters.values()
        if each.default is each.empty and each.kind not in NOT_TAKEN[:2]
    ]
    if required:
        raise BadTool(
            f"tool {name}: {found.__name__} needs {', '.join(required)} to be made, expected a "
            "class that needs no arguments, because each episode makes an instance; give defaults"
        )
    # A tool has the name of the attribute, because a decorator may have named the function itself.
    methods = {
        method_name: method
        for method_name, method in inspect.getmembers(found, inspect.isroutine)
        if not method_name.startswith("_") and method_name not in _OWN and _is_python(method)
    }
    if not methods:
        raise BadTool(
            f"tool {name}: {found.__name__} has no public method besides reset, close and "
            "get_reward, expected one or more as its tools"
        )
    return ToolClass(
        name=found.__name__,
        make=make,
        tools=tuple(_read_method(found, each, methods[each], cls=name) for each in methods),
        has_reward=callable(getattr(found, "get_reward", None)),
        made=found,
        target=name,
        required_columns=_required_columns(found),
    )


def _read_method(owner: type, name: str, method: Callable[..., Any], *, cls: str) -> FunctionTool:
    """Make a tool from a method. cls: the class's name in errors. Raises: BadTool."""
    is_bound = isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)
    try:
        return read_function(method, where=f"tool {cls}.{name}", name=name, takes_self=not is_bound)
    except BadTool as error:
        raise BadTool(f"{error}; if {name} is not a tool, begin its name with _") from error


def _is_inner(function: Callable[..., Any]) -> bool:
    """Return whether a function is defined inside another one, such as a decorator's wrapper."""
    is_partial = getattr(function, "__module__", "") == functools.__name__
    return "<locals>" in getattr(function, "__qualname__", "") and not is_partial


def _is_python(method: Callable[..., Any]) -> bool:
    """Return whether a method is written in Python, unlike `dict.get`."""
    return hasattr(inspect.unwrap(method), "__code__")


def _required_columns(found: type) -> frozenset[str]:
    method = getattr(found, "reset", None)
    if not inspect.isfunction(method):
        return frozenset()
    is_static = isinstance(inspect.getattr_static(found, "reset", None), staticmethod)
    parameters = list(inspect.signature(method).parameters.values())[0 if is_static else 1 :]
    return frozenset(
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in NOT_TAKEN
    )


def read_function(
    function: Callable[..., Any], *, where: str, name: str = "", takes_self: bool = False
) -> FunctionTool:
    """Make a tool from a function's signature and docstring.

    Args:
        where: The function's name in errors.
        name: The tool's name; the function's own name if it is empty.
        takes_self: Whether the first argument is the instance.

    Raises: BadTool if the function cannot be described.
    """
    name = name or getattr(function, "__name__", type(function).__name__)
    parameters = list(inspect.signature(function).parameters.values())[1 if takes_self else 0 :]
    text = inspect.getdoc(function) or ""
    docs = _parsed(text, [each.name for each in parameters])
    parts = (docs.short_description, docs.long_description, _further_text(text, docs.style))
    description = "\n\n".join(part for part in parts if part)
    if not description:
        hint = "; if a decorator made it, use functools.wraps there" if _is_inner(function) else ""
        raise BadTool(
            f"{where} has no docstring, expected one: the policy reads it as the tool's "
            f"description{hint}"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadTool(f"{where} yields, expected a function that returns its answer; return it")
    try:
        types = get_type_hints(function, include_extras=True)
    except Exception as error:
        # The error is an undefined name in an annotation, or any exception of its evaluation.
        raise BadTool(f"{where}: its annotations cannot be read ({error}); correct them") from error
    arguments = arguments_model(name, parameters, types, docs=docs, where=where, function=function)
    try:
        schema = arguments.model_json_schema()
    # pydantic raises KeyError if a default contains "$ref".
    except (PydanticUserError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise no_schema(where, error) from error
    return FunctionTool(
        schema=ToolSchema(name=name, description=description, parameters=tidy(schema)),
        function=function,
        arguments=arguments,
    )


def _parsed(docstring: str, arguments: Collection[str]) -> Docstring:
    """Parse a docstring of a function with arguments of these names.

    docstring_parser expects a colon in each entry of a section such as Args, and reads none of
    Google's sections if one lacks it. A line without a colon therefore becomes a part of the entry
    before it; an argument's name with its description below, and an error, get a colon. The
    docstring stays as it is if text could be lost: if an entry then has the name of no argument, or
    if a line that would become a part of another entry begins with the name of an argument.
    """
    joined: list[str] = []

    def mended(section: re.Match[str]) -> str:
        title, lines = section.groups()
        indent = lines[: len(lines) - len(lines.lstrip())].rpartition("\n")[2]
        before, *entries = re.split(rf"^{indent}(?=\S)", lines, flags=re.MULTILINE)
        for number, entry in enumerate(entries):
            first, end, rest = entry.partition("\n")
            is_error = title.startswith(("Raises", "Except"))
            is_name = rest.strip() and re.fullmatch(r"\**\w+(?: \(.*\))?", first)
            if ":" in (first if is_name else entry):
                continue
            if is_name or (number == 0 and is_error):
                entries[number] = f"{first}:{end}{rest}"
            elif number:
                entries[number] = f"    {entry}"
                joined.extend(() if is_error else re.findall(r"^\W*(\w+)", first))
        return title + indent.join((before, *entries))

    corrected = _GOOGLE_ENTRIES.sub(mended, docstring)
    with suppress(ParseError):
        params = parse_google(corrected).params
        named = {name.strip() for each in params for name in each.arg_name.split(",")}
        if named.issubset(arguments) and not set(joined).intersection(arguments):
            docstring = corrected
    return parse_docstring(docstring)


def _further_text(docstring: str, style: DocstringStyle | None) -> str:
    """Return a docstring's examples, notes, warnings and paragraphs after its sections.

    docstring_parser leaves these texts out of the description.
    """
    if style is DocstringStyle.NUMPYDOC:
        sections = re.split(r"^(?=\w[\w ]*\n-{3,}[ \t]*$)", docstring, flags=re.MULTILINE)
        return "\n\n".join(each.strip() for each in sections[1:] if _NUMPY_TEXT.match(each))
    begin = _GOOGLE_TITLE.search(docstring) if style is DocstringStyle.GOOGLE else None
    parts = _GOOGLE_PART.split(docstring[begin.start() :]) if begin else []
    return "\n\n".join(each.strip() for each in parts if each and not _GOOGLE_OTHER.match(each))


_NUMPY_TEXT = re.compile(r"(?:Examples?|Notes?|Warnings?)\n")
_ENTRIES = "Arg(?:ument)?s|Param(?:eter)?s|Attributes|Raises|Exceptions|Except"
_FACTS = f"{_ENTRIES}|Returns|Yields"
# The title of a section of entries, and its lines.
_GOOGLE_ENTRIES = re.compile(
    rf"^((?:{_ENTRIES}):[ \t]*\n)((?:[ \t]+\S.*(?:\n|\Z)|[ \t]*\n)+)", re.MULTILINE
)
_GOOGLE_TITLE = re.compile(rf"^(?:{_FACTS}|Examples?):[ \t]*$", re.MULTILINE)
_KEPT = r"(?:Examples?|Notes?|Warnings?):"
_OTHER = rf"(?:{_FACTS}|Todos?|References?|Outputs?|See [Aa]lso):"
_GOOGLE_OTHER = re.compile(_OTHER, re.MULTILINE)
# A part begins with a title, or with a line that follows a blank line and is not indented.
_GOOGLE_PART = re.compile(rf"\n\s*\n(?=\S)|^(?={_KEPT}|{_OTHER})", re.MULTILINE)
