"""List, search and read the files of a directory, and nothing outside it. Standard library only.

Invariant: a path is opened part by part below the directory, and no part may be a link. So only the
directory's own regular files are read. Links and git's own directory (`.git`, which reveals later
commits) are treated as missing. Every answer has a bound on lines, characters, files read and
seconds, and says so if it was cut.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN = frozenset({".git"})
MAX_PATH_CHARS = 1_024
MAX_DEPTH = 48
MAX_FILES_WALKED = 50_000
# Larger files are listed, but neither searched nor read, because they are data and not text.
MAX_FILE_BYTES = 2 * 2**20
MAX_PATTERN_CHARS = 500
MAX_LINE_CHARS = 240
# A pattern is matched only with the start of a line, because some patterns take time quadratic in
# the line's length.
MAX_SEARCHED_CHARS = 2_000
_BINARY_PROBE_BYTES = 8_192
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class ToolError(Exception):
    """Raised if a call cannot be answered; the text is one short sentence for the policy."""


class BadArgument(ToolError):
    """Raised if an argument has a wrong form, so that no repository could answer the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of the answer to one call of a search tool."""

    max_lines: int
    max_chars: int
    soft_limit_s: float
    """Seconds after which a search stops and returns what it has found so far."""


class _Page:
    """The lines of an answer; lines that exceed the bounds are left out."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lines: list[str] = []
        self._num_chars = 0
        self.num_left_out = 0

    @property
    def is_full(self) -> bool:
        return self.num_left_out > 0

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def add(self, line: str) -> None:
        line = _shown(line)
        has_room = self._num_chars + len(line) < self._bounds.max_chars
        if self.is_full or len(self._lines) >= self._bounds.max_lines or not has_room:
            self.num_left_out += 1
            return
        self._lines.append(line)
        self._num_chars += len(line) + 1

    def text(self, *notes: str) -> str:
        return "\n".join((*self._lines, *(note for note in notes if note)))


def list_files(root: int, arguments: Mapping[str, Any], bounds: Bounds) -> str:
    """List the entries of a directory.

    If a glob is given, list instead the files at any depth whose path or name matches the glob.
    """
    directory = parts_of(arguments.get("directory", ""))
    wanted = _glob(arguments)
    start = _opened(root, directory, is_directory=True)
    try:
        page = _Page(bounds)
        if wanted is None:
            for name, is_directory in _entries(start):
                page.add("/".join((*directory, name)) + ("/" if is_directory else ""))
            return page.text(_more(page, "entries")) or "The directory is empty."
        walk = _Walk(start, directory, bounds)
        for path, _ in walk.files():
            if wanted(path):
                page.add(path)
        return page.text(_more(page, "files"), walk.note()) or "No file matches."
    finally:
        os.close(start)


def grep(root: int, arguments: Mapping[str, Any], bounds: Bounds) -> str:
    """Return the lines that a regular expression matches, each as `path:number: line`."""
    pattern = _pattern(arguments["pattern"])
    directory = parts_of(arguments.get("directory", ""))
    wanted = _glob(arguments)
    start = _opened(root, directory, is_directory=True)
    try:
        page = _Page(bounds)
        walk = _Walk(start, directory, bounds)
        for path, file in walk.files(wanted):
            for number, line in enumerate(_text_lines(file), start=1):
                if pattern.search(line[:MAX_SEARCHED_CHARS]):
                    page.add(f"{path}:{number}: {line.strip()}")
            if page.is_full:
                break
        more = "... more lines match; narrow the pattern or the glob." if page.is_full else ""
        return page.text(more, walk.note()) or "No line matches."
    finally:
        os.close(start)


def read_file(root: int, arguments: Mapping[str, Any], bounds: Bounds) -> str:
    """Return the lines of a file, from `first_line` on (default 1)."""
    path = parts_of(arguments["path"])
    first = arguments.get("first_line", 1)
    if first < 1:
        raise BadArgument("first_line must be 1 or more.")
    file = _opened(root, path, is_directory=False)
    try:
        if os.fstat(file).st_size > MAX_FILE_BYTES:
            raise ToolError("The file is too large to be read.")
        content = _content(file)
    finally:
        os.close(file)
    if content is None:
        raise ToolError("The file is not text.")
    lines = _lines(content)
    if first > max(1, len(lines)):
        raise ToolError(f"The file has only {len(lines)} lines.")
    page = _Page(bounds)
    for line in lines[first - 1 :]:
        page.add(line)
    if not page.num_left_out:
        return page.text() or "The file is empty."
    return page.text(f"... {page.num_left_out} more lines, from line {first + page.num_lines} on.")


def missing_files(root: int, paths: Iterable[str]) -> list[str]:
    """Return the paths that are not regular files."""
    missing = []
    for path in paths:
        try:
            os.close(_opened(root, parts_of(path), is_directory=False))
        except ToolError:
            missing.append(path)
    return missing


def parts_of(path: str) -> tuple[str, ...]:
    """Split a path below the repository into its parts.

    Raises: BadArgument for a path that leads outside.
    """
    if len(path) > MAX_PATH_CHARS or "\0" in path:
        raise BadArgument(
            f"The path is not valid: it may have at most {MAX_PATH_CHARS} characters and no NUL."
        )
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or ".." in parts:
        raise BadArgument("Paths are relative to the repository, without .. or a leading /.")
    return parts


def _opened(root: int, parts: tuple[str, ...], *, is_directory: bool) -> int:
    """Open a file or directory; the caller closes the descriptor."""
    if HIDDEN & set(parts):
        raise ToolError("There is no such path.")
    current = os.dup(root)
    try:
        for part in parts:
            below = os.open(part, _OPEN, dir_fd=current)
            os.close(current)
            current = below
        mode = os.fstat(current).st_mode
    except OSError:
        os.close(current)
        # Missing paths, links and unreadable files get the same answer on purpose.
        raise ToolError("There is no such path.") from None
    if is_directory and not stat.S_ISDIR(mode):
        os.close(current)
        raise ToolError("That is not a directory.")
    if not is_directory and not stat.S_ISREG(mode):
        os.close(current)
        raise ToolError("That is a directory." if stat.S_ISDIR(mode) else "That is not a file.")
    return current


def _entries(directory: int) -> list[tuple[str, bool]]:
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in HIDDEN:
                continue
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory or entry.is_file(follow_symlinks=False):
                found.append((entry.name, is_directory))
    return sorted(found)


class _Walk:
    """An iterator over the files below a directory, in order, as far as the bounds allow."""

    def __init__(self, start: int, directory: tuple[str, ...], bounds: Bounds) -> None:
        self._start = start
        self._directory = directory
        self._end = time.monotonic() + bounds.soft_limit_s
        self._num_files = 0
        self._is_cut = False

    def files(self, wanted: Any = None) -> Iterator[tuple[str, int]]:
        yield from self._below(self._start, self._directory, wanted)

    def note(self) -> str:
        return f"... stopped after {self._num_files} files; narrow it." if self._is_cut else ""

    def _below(
        self, directory: int, parts: tuple[str, ...], wanted: Any
    ) -> Iterator[tuple[str, int]]:
        for name, is_directory in _entries(directory):
            if self._num_files >= MAX_FILES_WALKED or time.monotonic() > self._end:
                self._is_cut = True
            if self._is_cut:
                return
            path = "/".join((*parts, name))
            if not is_directory:
                self._num_files += 1
                if wanted is not None and not wanted(path):
                    continue
            elif len(parts) >= MAX_DEPTH:
                continue
            try:
                below = os.open(name, _OPEN, dir_fd=directory)
            except OSError:
                continue
            try:
                if is_directory:
                    yield from self._below(below, (*parts, name), wanted)
                else:
                    yield path, below
            finally:
                os.close(below)


def _text_lines(file: int) -> Iterator[str]:
    if os.fstat(file).st_size > MAX_FILE_BYTES:
        return
    yield from _lines(_content(file) or "")


def _lines(content: str) -> list[str]:
    """Split a text into lines; a newline at the end of the text does not begin another line."""
    lines = content.split("\n")
    return lines if lines[-1] else lines[:-1]


def _content(file: int) -> str | None:
    """Return the text of a file; None if it is binary."""
    chunks: list[bytes] = []
    left = MAX_FILE_BYTES
    while left > 0 and (chunk := os.read(file, min(left, 2**20))):
        if not chunks and b"\0" in chunk[:_BINARY_PROBE_BYTES]:
            return None
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks).decode(errors="replace")


def _pattern(text: str) -> re.Pattern[str]:
    if not 0 < len(text) <= MAX_PATTERN_CHARS:
        raise BadArgument(f"The pattern must have 1 to {MAX_PATTERN_CHARS} characters.")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadArgument(f"The pattern is not a regular expression: {error}.") from None


def _glob(arguments: Mapping[str, Any]) -> Any:
    """Return a function that tells whether a path matches the glob; None if no glob is given."""
    glob = arguments.get("glob")
    if not glob:
        return None
    if len(glob) > MAX_PATTERN_CHARS:
        raise BadArgument(f"The glob must have at most {MAX_PATTERN_CHARS} characters.")
    # A star matches slashes too, so a leading `**/` means only that the rest may be at any depth.
    while glob.startswith("**/"):
        glob = glob[3:]
    match = re.compile(fnmatch.translate(glob)).match

    def is_wanted(path: str) -> bool:
        return bool(match(path) or match(path.rpartition("/")[2]))

    return is_wanted


def _more(page: _Page, what: str) -> str:
    return f"... {page.num_left_out} more {what}." if page.num_left_out else ""


def _shown(line: str) -> str:
    line = line.rstrip("\r\n")
    cut = line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "..."
    # A file's name may not be UTF-8, and a message must not contain lone surrogates.
    return cut.encode(errors="backslashreplace").decode()
