"""Hooks of the documentation's site (mkdocs): generated pages, links between pages, broken tables.

In the repository, pages refer to each other as `docs/NAME.md` in code; the site turns this into a
link. mkdocs runs in a separate environment, so this module imports nothing from Rayloom.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "build" / "reference"
_BLOCK = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
_PAGE = re.compile(r"`(docs/([a-z/-]+)\.(?:md|ipynb))`")
_CODE = re.compile(r"`[^`]*`")


def on_files(files: Files, config: Any) -> Files:
    """Return the site's files with added pages: changelog, reference and notebooks.

    The README becomes the first page.
    """
    pages = {"index.md": _read("README.md"), "reference/changelog.md": _read("CHANGELOG.md")}
    pages |= {f"reference/{file.name}": file.read_text("utf-8") for file in GENERATED.glob("*.md")}
    for file in (GENERATED / "examples").glob("*.md"):
        pages[f"examples/{file.name}"] = file.read_text("utf-8")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


# Runs before plugins add their generated text.
@event_priority(100)  # type: ignore[untyped-decorator]
def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Return a page with the names of other pages as links, except in blocks of code.

    Raises: PluginError if a row of a table has another number of cells than its header.
    """
    up = "../" * page.file.src_uri.count("/")

    def link(found: re.Match[str]) -> str:
        is_page = files.get_file_from_path(f"{found[2]}.md") is not None
        return f"[`{found[1]}`]({up}{found[2]}.md)" if is_page else found[0]

    parts = _BLOCK.split(markdown)
    for part in parts[::2]:
        _check_tables(part, page.file.src_uri)
    parts[::2] = [_PAGE.sub(link, part).replace("](docs/", f"]({up}") for part in parts[::2]]
    return "".join(parts)


def _check_tables(text: str, page: str) -> None:
    header: int | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = None
            continue
        num_cells = _CODE.sub("", line).replace("\\|", "").count("|") - 1
        if header is not None and num_cells != header:
            raise PluginError(
                f"{page}: a row of a table has {num_cells} cells, expected {header} as in its "
                f"header; escape a bar within a cell: {line[:120]}"
            )
        header = num_cells


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
