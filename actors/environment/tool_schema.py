"""JSON schemas of tools' arguments, as templates show them and vLLM's parsers read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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

    vLLM's parsers qwen3_coder and qwen3_xml follow no reference: they read an argument's type only
    at the top level of the argument's schema.
    Args: within: names of the definitions around this part of the schema.
    """
    if isinstance(tree, list):
        return [_inlined(each, defs, within) for each in tree]
    if not isinstance(tree, dict):
        return tree
    name = str(tree.get("$ref", "")).removeprefix("#/$defs/")
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
