"""Read a configuration from YAML with overrides, and say in sentences what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.config.tree import Config


class ConfigError(Exception):
    """The configuration cannot be run; the text says what, got, expected and the remedy."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path` and lay `section.key=value` overrides (values in YAML) over it.

    Raises: ConfigError naming every problem.
    """
    return parse_config(_apply_overrides(_read_yaml(path), overrides), source=str(path))


def parse_config(tree: dict[str, Any], *, source: str) -> Config:
    """Validate a plain tree. Raises: ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [f"  - {_sentence(detail)}" for detail in error.errors(include_url=False)]
        raise ConfigError(f"configuration {source} is refused:\n" + "\n".join(lines)) from None


def dump_config(config: Config) -> str:
    """The effective configuration as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Plain values, and no key twice: YAML's own loader takes the last one in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.YAMLError(
                    f"the key {key.value!r} stands a second time, in line "
                    f"{key.start_mark.line + 1}; expected each key once; remove one of them"
                )
            seen.add((key.tag, key.value))
        return node


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.is_dir():
            raise ConfigError(f"configuration {path} is a directory; give the path of a YAML file")
        if not path.exists():
            raise ConfigError(f"configuration {path} is not there; give the path of a YAML file")
        tree = _load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"configuration {path} is nested too deep; expected sections") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"configuration {path} holds {type(tree).__name__}, expected sections such as "
            "run, model, tasks"
        )
    return tree


def _apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {override!r}: expected section.key=value")
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                child = node[section] = {}
            node = child
        try:
            node[leaf] = _load_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from None
    return tree


def _sentence(detail: ErrorDetails) -> str:
    location = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{location}: unknown key; {_closest(detail['loc'])}"
    if detail["type"] == "missing":
        return f"{location}: missing; this key is required"
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{location}: got {detail['input']!r}; {message}"


def _closest(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = Config
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        candidates = getattr(field.annotation, "__args__", (field.annotation,)) if field else ()
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            return "remove it"
        model = sections[0]
    known = list(model.model_fields)
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"expected one of {', '.join(known)}"
