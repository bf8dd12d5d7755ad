"""Write the generated pages of the documentation: `python -m deploy.reference DIRECTORY`.

`configuration.md` comes from the configuration tree, `command-line.md` from the parser, and the
pages in `examples/` from the notebooks in `docs/examples`, with the output that is stored in them.
`make docs` writes them before it builds the site.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from actors.options import schema_of
from service.cli.main import app
from service.config.file import config_schema
from service.config.sft import SftConfig

Schema = Mapping[str, Any]
_ROOT = Path(__file__).parents[1]
_STYLE = re.compile(r"<style.*?</style>\n?", flags=re.DOTALL)
_SMALLEST, _LARGEST = -(2**31), 2**31 - 1
_INTRODUCTION = """\
# Configuration

Every setting of a run, with its type and default. A setting without a default is required, if its
section is used. `rayloom check CONFIG` prints the same settings with the values of a file, and
`--set section.key=value` changes one on the command line. `rayloom sft` reads `model`, `trainer`
and `sft`; the other commands read all sections but `sft`.
"""


def configuration_page() -> str:
    """Return a page with a table for each section of the configuration tree."""
    tree, of_sft = config_schema(), schema_of(SftConfig)
    sections = {**of_sft["properties"], **tree["properties"]}
    definitions = {**of_sft["$defs"], **tree["$defs"]}
    lines = [_INTRODUCTION]
    for name, section in sections.items():
        schema, description = _resolved(section, definitions)
        lines += [f"## `{name}`", "", description, ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        lines += _rows(f"{name}.", schema, definitions)
        lines.append("")
    return "\n".join(lines)


def command_line_page() -> str:
    """Return a page with all commands, their arguments and options."""
    command = typer.main.get_command(app)
    return get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="rayloom", title="The command line"
    )


def notebook_page(notebook: Mapping[str, Any]) -> str:
    """Return a notebook as Markdown: its text, and each cell of code with its stored output."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell))


def _parts(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data:
            yield _STYLE.sub("", "".join(data["text/html"]))
        elif text := "".join(data.get("text/plain", output.get("text", ""))):
            yield f"```text\n{text.rstrip()}\n```"


PAGES = {"configuration.md": configuration_page, "command-line.md": command_line_page}


def _rows(prefix: str, section: Schema, sections: Schema) -> Iterator[str]:
    """Yield a row for each setting; a section within a section has its own rows."""
    for key, setting in section.get("properties", {}).items():
        target, description = _resolved(setting, sections)
        has_rows = "properties" in target and not _is_list(setting)
        kind = "section" if has_rows else _kind(setting, sections)
        default = "" if has_rows or "default" not in setting else _code(setting["default"])
        yield f"| `{prefix}{key}` | {_cell(kind)} | {default} | {_cell(description)} |"
        if has_rows:
            yield from _rows(f"{prefix}{key}.", target, sections)


def _resolved(setting: Schema, sections: Schema) -> tuple[Schema, str]:
    """Return a setting's schema, or that of the section to which it refers, and its description."""
    options = (setting, *setting.get("anyOf", ()), setting.get("items", {}))
    names = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
    target = sections[names[0]] if names else setting
    text = setting.get("description") or target.get("description", "").partition("\n\n")[0]
    return target, " ".join(text.split())


def _is_list(setting: Schema) -> bool:
    return any(each.get("type") == "array" for each in (setting, *setting.get("anyOf", ())))


def _kind(schema: Schema, sections: Schema) -> str:
    """Return the values that a setting accepts, in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each, sections) for each in schema["anyOf"]))
    if "$ref" in schema:
        return _kind(sections[schema["$ref"].rpartition("/")[2]], sections)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any value")
    if kind == "array":
        items: Schema = schema.get("items") or next(iter(schema.get("prefixItems", ())), {})
        return f"list of {_kind(items, sections)}"
    if kind == "object":
        values = schema.get("additionalProperties")
        of = f" to {_kind(values, sections)}" if isinstance(values, Mapping) else ""
        return f"mapping{of}"
    bounds = [
        f"{sign} {schema[name]:,}"
        for name, sign in (
            ("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")
        )
        if name in schema and schema[name] not in (_SMALLEST, _LARGEST)
    ]  # fmt: skip
    return " ".join([str(kind), ", ".join(bounds)]).strip()


def _code(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`".replace("|", "\\|")


def _cell(text: str) -> str:
    """Escape the characters that would end a cell of a Markdown table or begin an HTML tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / "examples").mkdir(parents=True, exist_ok=True)
    for file, page in PAGES.items():
        (directory / file).write_text(page(), encoding="utf-8")
    for notebook in (_ROOT / "docs" / "examples").glob("*.ipynb"):
        text = notebook_page(json.loads(notebook.read_text(encoding="utf-8")))
        (directory / "examples" / f"{notebook.stem}.md").write_text(text, encoding="utf-8")
