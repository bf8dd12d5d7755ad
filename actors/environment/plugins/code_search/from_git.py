"""Questions about a git repository, with answers from its history or its files.

Source `commits`: the subject of a commit is the question, and the files that the commit changed are
the right answer. The policy searches the repository at HEAD, which has the change. Merges, reverts
and fixups make no questions. A subject must not be short, and must not name a changed file. Of
commits with the same subject, only the newest one makes a question.

Source `docstrings`: the first sentence of a Python module's docstring is the question, and the
module is the right answer. These questions are easier, because the file contains their words.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from actors.types import Task

MIN_WORDS = 3
# Files that change together with files of any topic, so they answer no question.
BY_THE_WAY = ("CHANGELOG*", "*.lock", "package-lock.json")
_NO_QUESTION = re.compile(r"(merge|revert|fixup!|squash!|wip)\b", re.IGNORECASE)
_GIT_LIMIT_S = 300.0
QuestionSource = Literal["commits", "docstrings"]
"""The part of a repository from which questions are made."""


class GitFailed(ValueError):
    """Raised if git is not installed or a git command fails; the text has git's message."""


def tasks_of_repository(
    repository: Path, archive: Path, *, source: QuestionSource, count: int, max_files: int
) -> list[Task]:
    """Write the repository's files at HEAD as `archive` (.tar.gz), and make tasks about them.

    Args: count: maximum number of tasks; they are made from the newest commits, or from the first
    modules of the archive. max_files: maximum number of files in a right answer.
    Returns: tasks whose `data` name the archive by its file name.
    Raises: GitFailed; ValueError if there is no question; OSError.
    """
    archive.write_bytes(_git(repository, "archive", "--format=tar.gz", "HEAD"))
    with tarfile.open(archive) as packed:
        there = frozenset(member.name for member in packed if member.isreg())
    found = (
        _of_commits(repository, archive.name, there, max_files=max_files)
        if source == "commits"
        else _of_docstrings(archive)
    )
    tasks = list(islice(found, count))
    if not tasks:
        raise ValueError(
            f"{repository}: got no {source} that make a question, expected one or more; try the "
            f"other source ({' or '.join(get_args(QuestionSource))}), or allow more files to change"
        )
    return tasks


def _task(archive: str, name: str, question: str, files: Sequence[str]) -> Task:
    return Task(
        task_id=f"{archive.partition('.')[0]}-{name}",
        environment="code_search",
        # Any seed will do: the environment draws nothing at random.
        seed=0,
        data={"question": question, "repository": archive, "files": list(files)},
    )


def _of_commits(
    repository: Path, archive: str, there: frozenset[str], *, max_files: int
) -> Iterator[Task]:
    log = _git(
        repository, "log", "--no-merges", "--no-renames", "-z", "--name-only",
        "--format=%x01%H%x02%s%x03", "HEAD",
    )  # fmt: skip
    seen: set[str] = set()
    for record in log.decode(errors="replace").split("\x01")[1:]:
        head, _, names = record.partition("\x03")
        commit, _, subject = head.partition("\x02")
        changed = [name.lstrip("\n") for name in names.split("\0") if name.strip("\n")]
        files = tuple(sorted(name for name in changed if not _is_by_the_way(name)))
        if subject in seen or not _is_question(subject, files):
            continue
        if not 0 < len(files) <= max_files or not there.issuperset(files):
            continue
        seen.add(subject)
        yield _task(archive, commit[:12], subject, files)


def _of_docstrings(archive: Path) -> Iterator[Task]:
    seen: set[str] = set()
    with tarfile.open(archive) as packed:
        for member in packed:
            content = packed.extractfile(member) if member.isreg() else None
            if content is None or not member.name.endswith(".py"):
                continue
            sentence = _first_sentence(content.read())
            if sentence not in seen and _is_question(sentence, (member.name,)):
                seen.add(sentence)
                name = member.name.replace("/", ":")
                yield _task(archive.name, name, sentence, (member.name,))


def _first_sentence(source: bytes) -> str:
    try:
        with warnings.catch_warnings():
            # Hide warnings about the parsed code, such as an unknown escape in a string.
            warnings.simplefilter("ignore")
            text = ast.get_docstring(ast.parse(source)) or ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph, maxsplit=1)[0]


def _is_question(text: str, files: Sequence[str]) -> bool:
    names_one = any(file.rpartition("/")[2].lower() in text.lower() for file in files)
    return len(text.split()) >= MIN_WORDS and not _NO_QUESTION.match(text) and not names_one


def _is_by_the_way(name: str) -> bool:
    base = name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(base, glob) for glob in BY_THE_WAY)


def _git(repository: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise GitFailed("git is not installed; expected it on the path") from None
    except subprocess.TimeoutExpired:
        raise GitFailed(
            f"git {arguments[0]} in {repository} needs more than {_GIT_LIMIT_S:g} s; use a clone "
            "on a local disk, or a smaller repository"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitFailed(
            f"git {arguments[0]}: {said[-1] if said else 'failed'}; expected a git repository "
            "with a commit"
        )
    return done.stdout
