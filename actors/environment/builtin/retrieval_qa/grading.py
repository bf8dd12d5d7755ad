"""How a short answer is scored against the true ones: pure.

As SQuAD's evaluation has it (Rajpurkar et al. 2016, evaluate-v1.1): texts are normalised, an exact
match is 1, and F1 is over the bag of words; the best of several true answers counts. Stated
deviation: where nothing is left of a text, it matches nothing, not even another empty one.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Each 0 to 1, of the true answer that fits best."""

    exact_match: float
    f1: float


def normalised(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces.

    Example: normalised("The  Eiffel-Tower!") -> "eiffeltower"
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def grade_answer(answer: str, truths: Iterable[str]) -> Grade:
    """Score an answer.

    F1 = 2 hits / (words of the answer + words of the truth), hits with multiplicity.

    Example: grade_answer("in the city Rome", ["Rome", "Roma"]) -> exact_match 0, f1 1/2
    """
    given = normalised(answer)
    true = [text for truth in truths if (text := normalised(truth))]
    return Grade(
        exact_match=float(bool(given) and given in true),
        f1=max((_f1(given.split(), text.split()) for text in true), default=0.0),
    )


def _f1(given: list[str], true: list[str]) -> float:
    hits = (Counter(given) & Counter(true)).total()
    return 2 * hits / (len(given) + len(true))
