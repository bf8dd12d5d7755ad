"""The web page about runs, packed into one HTML file with its program and its styles.

The file may contain the page's data. Otherwise the page requests its data from its API.
`make page` builds `packed.html` from `src/`, and needs npm. The page's content security policy
allows requests only to the run's own API.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKED = HERE / "packed.html"
SOURCES_SHA256 = "rayloom-page-sources"
"""Name of the <meta> element of packed.html that has the digest of the page's sources."""
_PLACE = '<script id="document" type="application/json">null</script>'


@cache
def empty_page() -> str:
    """Return the page without a document; the page requests data from the API that served it."""
    return PACKED.read_text(encoding="utf-8")


def page_with(document: Mapping[str, Any]) -> str:
    """Return the page with its data inside, so that the file can be kept and opened offline.

    Args: document: the data, a JSON tree; characters that could end the script element are escaped.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate, which no file can hold, may be in the text of an environment.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    inside = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    before, place, after = empty_page().partition(_PLACE)
    assert place, "packed.html has no place for a document"
    return before + place.replace("null", inside) + after


def sources_digest() -> str:
    """Return a digest of all source files of the packed page, to detect an outdated page."""
    names = ["build.mjs", "package.json", "package-lock.json", "page.html", "tsconfig.json"]
    paths = [HERE / name for name in names]
    paths += [path for path in (HERE / "src").iterdir() if path.is_file()]
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda each: each.relative_to(HERE).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(HERE).as_posix()}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()
