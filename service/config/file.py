"""Read a configuration from YAML with overrides, write it, and describe its settings and errors."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from actors.environment.tokenizer import RAW
from actors.options import adapter_of, sentence
from actors.user_code import type_of
from service.config.disagreements import disagreements, trainer_disagreements
from service.config.sft import SftConfig
from service.config.tree import Config


class ConfigError(Exception):
    """A configuration that cannot be run.

    The message says what is wrong, what was given, what was expected, and what to do.
    """


_logger = logging.getLogger(__name__)
# Maximum number of values in a file or an override. The longest configuration of this repository
# has a hundred.
MAX_VALUES = 100_000
FUNCTIONS = "functions"
"""Name of the directory, in a run's directory, of what `rayloom.train` stores."""
_Root = TypeVar("_Root", Config, SftConfig)
# Distinguishes the text of a template from a path.
_SIGN = "{{"
# Settings of `evaluation` that `rollouts` does not have.
_KEEPING = ("top_p", "top_k", "min_p", "structured_outputs")


def load_config(
    path: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()
) -> Config:
    """Return the configuration in the file `path`, with the overrides applied.

    Args: path: a YAML file, or its content as a mapping. overrides: settings, as KEY=VALUE.
    Raises: ConfigError that names every problem.

    Example:
        ```python
        config = load_config("deploy/configs/guessing-cpu.yaml", ["run.steps=20"])
        print(config.run.steps, config.algorithm.group_size)
        ```
    """
    if isinstance(path, Mapping):
        return parse_config(plain_values(path), source="(a mapping)", overrides=overrides)
    file = path_text(
        path, what="config", expected="a YAML file's path, or its content as a mapping"
    )
    tree = _with_own_rows(read_yaml(Path(file)), Path(file).parent)
    return parse_config(tree, source=file, overrides=overrides)


def _with_own_rows(tree: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the settings, with `tasks.dataset` corrected if the run's directory was moved."""
    tasks = tree.get("tasks")
    given = tasks.get("dataset") if isinstance(tasks, dict) else None
    if tasks is None or not isinstance(given, str) or Path(given).parent.name != FUNCTIONS:
        return tree
    # `rayloom.train` has stored the rows that it was given in this file.
    stored = run_dir / FUNCTIONS / Path(given).name
    if os.path.isfile(os.path.expanduser(given)) or not stored.is_file():
        return tree
    return {**tree, "tasks": {**tasks, "dataset": os.path.relpath(stored)}}


def path_text(given: object, *, what: str, expected: str = "a path") -> str:
    """Convert a str or Path to a str, and replace ~ by the home directory.

    what, expected: name of the argument, and what it should be, for the error.
    Raises: ConfigError for any other type.
    """
    if isinstance(given, str | os.PathLike) and isinstance(text := os.fspath(given), str):
        return os.path.expanduser(text)
    raise ConfigError(f"{what}: got {type_of(given)}, expected {expected}; pass that")


def plain_values(value: Any, *, where: str = "") -> Any:
    """Convert a setting that comes from Python code into plain values, which YAML can express.

    Numbers and arrays of numpy become numbers and lists, and paths become texts.
    where: dotted key of the setting, for errors. Raises: ConfigError for any other value.
    """
    if isinstance(value, Mapping):
        return {
            _plain_key(key, where=where): plain_values(each, where=f"{where}.{key}".lstrip("."))
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_values(each, where=where) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    # The plain value of a subclass, such as a member of an Enum.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if value is None or isinstance(value, bool | date):
        return value
    raise ConfigError(
        f"{where}: got {type_of(value)}, expected a text, a number, true, false, null, a list or a "
        "mapping; convert it, or pass a function as FILE.py:NAME"
    )


def _plain_key(key: object, *, where: str) -> str | float | None:
    """Convert a mapping's key as `plain_values` converts a value. Raises: ConfigError."""
    place = f"a key of {where or 'the configuration'}"
    plain = plain_values(key, where=place)
    if plain is None or isinstance(plain, str | int | float):
        return plain
    raise ConfigError(
        f"{place}: got {type_of(key)}, expected a text, a number, true, false or null; convert it"
    )


def parse_config(tree: dict[str, Any], *, source: str, overrides: Sequence[str] = ()) -> Config:
    """Make a Config from a tree of plain values; check all bounds, and look for contradictions.

    source: where the tree is from, for messages.

    Raises: ConfigError that names the problems.
    """
    sections = _without_removed(_filled(tree), source=source)
    return _parsed(sections, Config, disagreements, source=source, overrides=overrides)


def load_sft(path: Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Return the configuration of `rayloom sft` in a file, as `load_config` does for a run.

    Raises: ConfigError that names the problems.
    """
    return parse_sft(read_yaml(path), source=str(path), overrides=overrides)


def parse_sft(tree: dict[str, Any], *, source: str, overrides: Sequence[str] = ()) -> SftConfig:
    """Make the configuration of `rayloom sft` from a tree, as `parse_config` does for a run.

    Raises: ConfigError that names the problems.
    """
    return _parsed(_filled(tree), SftConfig, _sft_disagreements, source=source, overrides=overrides)


def _sft_disagreements(config: SftConfig) -> Iterator[str]:
    # The number of steps follows from the number of chats, and is not known yet.
    yield from trainer_disagreements(config.as_run(num_steps=2**31 - 1))


def _filled(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace null sections by {}: YAML reads a section as null if all its keys are comments."""
    return deepcopy({name: {} if section is None else section for name, section in tree.items()})


def _parsed(
    tree: dict[str, Any],
    root: type[_Root],
    check: Callable[[_Root], Iterator[str]],
    *,
    source: str,
    overrides: Sequence[str],
) -> _Root:
    tree = _apply_overrides(tree, overrides)
    # mypy does not accept a type variable as hashable.
    plain: Any = root
    try:
        config: _Root = adapter_of(plain).validate_python(tree)
    except ValidationError as error:
        problems = [_sentence(detail, root) for detail in error.errors(include_url=False)]
    else:
        problems = list(check(config))
        if not problems:
            return _with_template(config)
    lines = "\n".join(f"  - {problem}" for problem in problems)
    raise ConfigError(f"configuration {source} is refused:\n{lines}")


def _with_template(config: _Root) -> _Root:
    """Return the configuration with the text of the chat template in place of its path."""
    given = config.model.chat_template
    if given is None or given == RAW or _SIGN in given:
        return config
    try:
        text = Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"model.chat_template: {given} cannot be read ({reason}); expected the path of a Jinja "
            f"file, Jinja's text, or {RAW} for raw prompts"
        ) from error
    if _SIGN not in text:
        raise ConfigError(
            f"model.chat_template: {given} holds no Jinja, so that every prompt would be the same; "
            f"expected a chat template, or {RAW} for raw prompts"
        )
    # A run stores its configuration: a resumed run uses this text even if the file has changed.
    return replace(config, model=replace(config.model, chat_template=text))


# Settings that were removed, by section, with their replacement; runs that are resumed still have
# them, because a run's own configuration names every setting.
_REMOVED = {
    ("sessions", "trains_single_turns"): "every turn is trained; sessions.titles leaves titles out",
}


def _without_removed(tree: dict[str, Any], *, source: str) -> dict[str, Any]:
    for (section, name), now in _REMOVED.items():
        settings = tree.get(section)
        if isinstance(settings, dict) and name in settings:
            del settings[name]
            _logger.warning("%s: %s.%s is ignored: %s", source, section, name, now)
    return tree


def dump_config(config: Config | SftConfig) -> str:
    """Return the effective configuration as YAML, defaults included."""
    # mypy does not accept a union of classes as hashable.
    kind: Any = type(config)
    return yaml.safe_dump(adapter_of(kind).dump_python(config, mode="json"), sort_keys=False)


def describe_config(config: Config, options: Any = None) -> str:
    """Return the effective configuration as YAML, with a comment that describes each setting.

    Args: options: the environment's options as a dataclass with defaults; if None, the options are
    shown as given.
    """
    values, schema = adapter_of(Config).dump_python(config, mode="json"), config_schema()
    sections = dict(schema["$defs"])
    if options is not None:
        kind: Any = type(options)
        adapter = adapter_of(kind)
        values["tasks"]["options"] = adapter.dump_python(options, mode="json")
        own = adapter.json_schema(by_alias=False)
        # pydantic reads the docstrings of a class's own fields only, not those of inherited fields.
        bases: list[Any] = [each for each in kind.__mro__[1:] if is_dataclass(each)]
        for base in bases:
            for name, setting in adapter_of(base).json_schema(by_alias=False)["properties"].items():
                if "description" in setting:
                    own["properties"][name].setdefault("description", setting["description"])
        sections |= {**own.get("$defs", {}), "options": own}
        sections["TasksSettings"]["properties"]["options"]["$ref"] = "#/$defs/options"
    return "\n".join(_described(values, schema, sections))


def config_schema(ref_template: str = "#/$defs/{model}") -> dict[str, Any]:
    """Return the JSON schema of the configuration tree."""
    return adapter_of(Config).json_schema(ref_template=ref_template)


def _described(
    values: Mapping[str, Any], section: Mapping[str, Any], sections: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a section's lines as YAML, with a comment that describes each setting.

    section: the JSON schema of `values`. sections: the schemas to which `section` refers, by name.
    """
    for key, value in values.items():
        setting = section["properties"][key]
        target = _section_of(setting, value, sections)
        # Without a description of its own, a section has the first paragraph of its docstring.
        described = setting.get("description") or target.get("description", "").partition("\n\n")[0]
        if described:
            yield f"# {' '.join(described.split())}"
        if value and "properties" in target:
            yield f"{key}:"
            yield from (f"  {line}" for line in _described(value, target, sections))
        else:
            yield from yaml.safe_dump({key: value}, sort_keys=False).splitlines()


def _section_of(
    setting: Mapping[str, Any], value: Any, sections: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the JSON schema of a setting that is a section; {} if the setting is a plain value."""
    for each in (setting, *setting.get("anyOf", ())):
        if "$ref" in each:
            found: Mapping[str, Any] = sections[each["$ref"].rpartition("/")[2]]
            return found
        # The value of `mixture`, for example, maps names to sections.
        of_values = each.get("additionalProperties")
        if isinstance(of_values, dict) and "$ref" in of_values:
            return {"properties": dict.fromkeys(value or (), of_values)}
    return {}


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# Tags of values that are not the name of a setting, such as those of yes and of ~.
_NO_NAMES = {"tag:yaml.org,2002:bool": "true or false", "tag:yaml.org,2002:null": "null"}
# Numbers of base 8 and 60 that look like decimal numbers or times of day, such as 010 and 12:30.
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-9.:_]+))")


class _Loader(yaml.SafeLoader):
    """A loader of plain YAML values that refuses four kinds of misleading files.

    - Duplicate keys: YAML's own loader silently keeps the last.
    - Keys such as yes, which YAML reads as true.
    - Aliases that expand a few lines into more values than fit into memory.
    - Numbers of base 8 and 60: in YAML 1.1 the value 010 is the number 8, and 12:30 is 750.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _num_values(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(
                f"it holds more than {MAX_VALUES} values after its aliases are expanded; expected "
                "fewer; write the values instead of nested aliases"
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag in _NO_NAMES:
                raise yaml.YAMLError(
                    f"got the key {key.value or 'null'} in line {key.start_mark.line + 1}, which "
                    f"YAML reads as {_NO_NAMES[key.tag]}; expected a name; write it in quotes if "
                    "it is one"
                )
            if (key.tag, key.value) in seen:
                raise yaml.YAMLError(
                    f"the key {key.value!r} appears a second time, in line "
                    f"{key.start_mark.line + 1}; expected each key once; remove one of them"
                )
            seen.add((key.tag, key.value))
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag in _NUMBERS and _OTHER_BASE.fullmatch(node.value):
            number = self.construct_object(node)
            raise yaml.YAMLError(
                f"got {node.value} in line {node.start_mark.line + 1}, which YAML reads as the "
                f"number {number}; expected a decimal number, or a text in quotes; write one"
            )
        return node


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a tree with its aliases expanded; infinity for a cycle."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        children = (
            [each for pair in node.value for each in pair]
            if isinstance(node, yaml.MappingNode)
            else node.value
        )
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


# For a date such as 2026-11-31, or a tag that does not fit its value, yaml raises Python's errors.
_NOT_YAML = (yaml.YAMLError, ValueError, AttributeError)


def why_missing(path: Path | str) -> str:
    """Return the words that follow a missing file's path in an error message.

    Examples: "does not exist"; "is a link to /old/data, which does not exist".
    """
    if not os.path.islink(path):
        return "does not exist"
    link = f"is a link to {os.readlink(path)}, which"
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"{link} leads only to other links in a loop"
    return f"{link} does not exist"


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file, as they are written there. Raises: ConfigError."""
    try:
        if path.is_dir():
            raise ConfigError(f"configuration {path} is a directory; give the path of a YAML file")
        if not path.exists():
            raise ConfigError(
                f"configuration {path} {why_missing(path)}; give the path of a YAML file"
            )
        tree = _load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from None
    except _NOT_YAML as error:
        raise ConfigError(f"configuration {path} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"configuration {path} is nested too deep, expected sections with settings; remove the "
            "nesting"
        ) from None
    if not isinstance(tree, dict):
        found = "empty" if tree is None else type_of(tree)
        raise ConfigError(
            f"configuration {path} is {found}, expected sections such as run, model, tasks; write "
            "them"
        )
    return tree


def _apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"--set {override!r}: expected SECTION.KEY=VALUE, such as run.steps=10; "
                "`rayloom check` lists all settings"
            )
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            child = node.setdefault(section, {})
            if child is None:
                child = node[section] = {}
            if not isinstance(child, dict):
                raise ConfigError(
                    f"--set {override!r}: {section} is {child!r:.80}, expected a map of "
                    f"settings to set a key in; set {section} as a whole"
                )
            node = child
        try:
            node[leaf] = _load_yaml(text)
        except _NOT_YAML as error:
            raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from None
        except RecursionError:
            raise ConfigError(
                f"--set {override:.80}: the value is nested too deep, expected a plain value; "
                "remove the nesting"
            ) from None
    return tree


def _sentence(detail: ErrorDetails, root: type[Config] | type[SftConfig]) -> str:
    *sections, name = detail["loc"]
    is_unknown = detail["type"] == "unexpected_keyword_argument"
    if is_unknown and sections[-1:] == ["rollouts"] and name in _KEEPING:
        return (
            f"rollouts.{name}: training samples among all tokens, because the trainer's "
            "log-probability is over all of them and the engine's would be over those that are "
            f"kept, so that their ratio would be wrong; remove rollouts.{name}, or set "
            f"evaluation.{name} instead"
        )
    return sentence(root, detail)
