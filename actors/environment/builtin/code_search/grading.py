"""How an answer's files are scored against the true ones: pure, for environment and agents alike.

Stated choices. A path counts once, however often it is named; `./a` and `a//b` are `a` and `a/b`;
upper and lower case differ. Everything else that is not the path of a true file is a wrong answer:
a directory, a file that is not there, an absolute path, one with `..`. Where no file is true, every
score is 0, whatever is answered (also the empty answer: F1 of an empty truth is not 1); the empty
answer to a truth that is not empty scores 0 too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Each part from 0 to 1."""

    precision: float
    """Share of the answered files that are true."""
    recall: float
    """Share of the true files that are answered."""
    f1: float
    """Their harmonic mean."""

    def components(self) -> dict[str, float]:
        return {"precision": self.precision, "recall": self.recall, "f1": self.f1}


def canonical_path(path: str) -> str:
    """The one spelling of a file's path within a repository; what is none stays as it is.

    Example: canonical_path("./a//b.py") -> "a/b.py"; canonical_path("../a") -> "../a"
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    is_file_path = parts and ".." not in parts and not path.startswith("/")
    if not is_file_path or path.endswith(("/", "/.")):
        return path
    return "/".join(parts)


def is_file_path(path: str) -> bool:
    """Whether a text can name a file within a repository, in whichever spelling."""
    canonical = canonical_path(path)
    is_relative = bool(canonical) and not canonical.startswith("/")
    return is_relative and not set(canonical.split("/")) & {"", ".", ".."}


def grade_files(answered: Iterable[str], truth: Iterable[str]) -> Grade:
    """Score an answer.

    F1 = 2 p r / (p + r), which is 2 hits / (answered + true).

    Example: grade_files(["a", "./a", "b"], ["a", "c", "d"]) -> precision 1/2, recall 1/3, f1 2/5
    """
    named = {canonical_path(path) for path in answered}
    true = {canonical_path(path) for path in truth}
    hits = len(named & true)
    if not hits:
        return Grade(precision=0.0, recall=0.0, f1=0.0)
    return Grade(
        precision=hits / len(named),
        recall=hits / len(true),
        f1=2 * hits / (len(named) + len(true)),
    )
