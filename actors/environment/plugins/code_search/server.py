"""The program that the tools run in: it reads requests from its input and writes an answer to each.

Each request and each answer is one line of JSON. The program is confined before it reads a request
(`sandbox`). If a call takes too long, the caller (`servers`) kills the program. Only the standard
library is used, so that the program starts in some twenty milliseconds and takes ten MiB.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from actors.environment.plugins.code_search.sandbox import NotConfined, confine
from actors.environment.plugins.code_search.tree import (
    BadArgument,
    Bounds,
    ToolError,
    grep,
    list_files,
    missing_files,
    read_file,
)

MEMORY_BYTES = 512 * 2**20
CPU_S = 120
_TOOLS = {"list_files": list_files, "grep": grep, "read_file": read_file}


def main() -> None:
    serve(_answer)


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Confine this process, then answer requests until the input ends."""
    # Hide the warnings that a pattern causes, because nobody would see them.
    warnings.simplefilter("ignore")
    try:
        walls = confine(memory_bytes=MEMORY_BYTES, cpu_s=CPU_S)
    except (NotConfined, OSError) as error:
        _say({"failure": f"{type(error).__name__}: {error}"})
        return
    _say({"walls": walls})
    for line in _lines():
        _say({**answer(json.loads(line)), "cpu_s": time.process_time()})


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        root = os.open(request["repository"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return {"failure": f"the repository cannot be opened: {error.strerror}"}
    try:
        if request["tool"] == "missing_files":
            return {"missing": missing_files(root, request["paths"])}
        text = _TOOLS[request["tool"]](root, request["arguments"], Bounds(**request["bounds"]))
        return {"text": text, "is_error": False, "is_malformed": False}
    except ToolError as error:
        is_malformed = isinstance(error, BadArgument)
        return {"text": str(error), "is_error": True, "is_malformed": is_malformed}
    except (MemoryError, RecursionError):
        text = "The call took too much memory; narrow it."
        return {"text": text, "is_error": True, "is_malformed": False}
    finally:
        os.close(root)


def _lines() -> Iterator[bytes]:
    waiting = b""
    while chunk := os.read(sys.stdin.fileno(), 2**16):
        *lines, waiting = (waiting + chunk).split(b"\n")
        yield from lines


def _say(answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


if __name__ == "__main__":
    main()
