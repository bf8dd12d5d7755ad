"""Keep the chart's schema in step with the configuration tree: `python -m deploy.chart_schema`.

helm/values.schema.json is written by hand but for `properties.config`, which is the tree's own
schema: a key of `config` that Rayloom does not know is refused by helm already. A test holds the
file to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.config.file import config_schema

SCHEMA = Path(__file__).parents[1] / "helm" / "values.schema.json"
_REFERENCE = "#/properties/config/$defs/{model}"
# Of no use to helm; the defaults are the application's own.
_LEFT_OUT = {"title", "default"}


def with_config(schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with `properties.config` as the tree has it now."""
    config = _stripped(config_schema(_REFERENCE))
    return {**schema, "properties": {**schema["properties"], "config": config}}


def dumped(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2) + "\n"


def _stripped(node: Any, *, is_properties: bool = False) -> Any:
    """Without annotations; the names of properties are no keywords, and stay."""
    if isinstance(node, list):
        return [_stripped(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _stripped(value, is_properties=key in ("properties", "$defs") and not is_properties)
        for key, value in node.items()
        if is_properties or key not in _LEFT_OUT
    }


if __name__ == "__main__":
    SCHEMA.write_text(dumped(with_config(json.loads(SCHEMA.read_text("utf-8")))), "utf-8")
