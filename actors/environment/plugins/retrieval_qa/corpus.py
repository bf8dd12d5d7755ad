"""Documents, and their search by BM25 with the optional package bm25s.

All episodes of a process share one index. It is built when it is first needed, and again if the
file has changed. `index_of` and `search` block; `environment` calls them in threads.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from annotated_types import Ge, Le, MaxLen, MinLen

from actors.environment.tasks import BadTaskFile, json_rows
from actors.limits import STRICT, strict_unless_empty
from actors.options import DataPath

# The number of names that `_STARTS`, `_MIDDLES` and `_ENDS` make.
MAX_GENERATED = 200
_SUFFIXES = (".jsonl", ".parquet")
_KEPT_INDEXES = 4
_building = threading.Lock()


class BadCorpus(ValueError):
    """Raised if the documents cannot be used; the text names the value and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusOptions:
    """The source of the documents, and how to read it."""

    __pydantic_config__ = STRICT

    corpus: DataPath | None = None
    """A JSONL or Parquet file, relative to the working directory; null: generated documents."""
    num_generated: Annotated[int, Ge(1), Le(MAX_GENERATED)] = MAX_GENERATED
    """Number of generated documents."""
    id_column: str = "id"
    """Column of a document's id."""
    text_column: str = "text"
    """Column of a document's text."""
    title_column: str = "title"
    """Column of a document's title; the file need not have this column."""
    stopwords: str | None = "en"
    """The language whose stop words bm25s ignores; null: all words count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of the corpus."""

    id: str
    text: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalQaData:
    """The question of a task for `retrieval_qa`, with its answers.

    With the generated corpus, the data may be left out: the task's seed then chooses a question.
    """

    __pydantic_config__ = strict_unless_empty(required=["question", "answers"])

    question: Annotated[str, MinLen(1), MaxLen(20_000)] = ""
    """The question about the documents."""
    answers: str | Annotated[Sequence[str], MinLen(1)] = ()
    """A right answer, or several right answers; the best match counts."""
    documents: Sequence[str | int] = ()
    """Ids of the documents with the answer."""


def import_bm25s() -> ModuleType:
    """Import the optional package bm25s. Raises: ImportError with the remedy."""
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            "environment retrieval_qa: the package bm25s is not installed; install it with: "
            "pip install 'rayloom[retrieval]'"
        ) from error
    return bm25s


class Index:
    """Finds documents by id and by BM25 (Lucene's variant, k1 1.5, b 0.75); thread-safe."""

    def __init__(self, documents: Iterable[Document], *, stopwords: str | None) -> None:
        self._bm25s = import_bm25s()
        self.by_id = {document.id: document for document in documents}
        self._documents = list(self.by_id.values())
        self._stopwords = stopwords
        # Always use numpy, so that results do not depend on which other packages are installed.
        self._ranking = self._bm25s.BM25(backend="numpy")
        texts = [f"{document.title} {document.text}" for document in self._documents]
        words = self._words(texts)
        if not any(words):
            raise BadCorpus("corpus: got only documents without words, expected some with words")
        self._ranking.index(words, show_progress=False)

    def search(self, query: str, *, most: int) -> list[Document]:
        """Return up to `most` documents that share a word with the query, best first.

        Documents with equal scores are in the order of the corpus.
        """
        (words,) = self._words([query])
        words = [word for word in words if word in self._ranking.vocab_dict]
        if not words:
            return []
        numbers, scores = self._ranking.retrieve(
            [words],
            k=min(most, len(self._documents)),
            show_progress=False,
            backend_selection="numpy",
        )
        found = sorted(zip(-scores[0], numbers[0], strict=True))
        return [self._documents[int(number)] for score, number in found if score < 0]

    def _words(self, texts: Sequence[str]) -> list[list[str]]:
        words: list[list[str]] = self._bm25s.tokenize(
            list(texts), stopwords=self._stopwords or [], return_ids=False, show_progress=False
        )
        return words


def index_of(settings: CorpusOptions) -> Index:
    """Return the index of a corpus. Raises: BadCorpus; ImportError if bm25s is not installed."""
    stamp: tuple[int, ...] = ()
    if settings.corpus is not None:
        try:
            status = Path(settings.corpus).expanduser().stat()
        except OSError as error:
            raise BadCorpus(
                f"tasks.options.corpus: {settings.corpus} cannot be read: {error.strerror}; "
                "expected a file of documents, on every node that plays"
            ) from error
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
    # Episodes that begin together wait for one index instead of building one each.
    with _building:
        return _index(settings, stamp, os.getpid())


@lru_cache(maxsize=_KEPT_INDEXES)
def _index(settings: CorpusOptions, _stamp: tuple[int, ...], _pid: int) -> Index:
    if settings.corpus is None:
        documents = list(generated_facts(settings.num_generated))
    else:
        documents = list(_read(Path(settings.corpus).expanduser(), settings))
    return Index(documents, stopwords=settings.stopwords)


def _read(path: Path, settings: CorpusOptions) -> Iterable[Document]:
    seen: set[str] = set()
    for where, row in _rows(path):
        document = _document(row, settings, where=where)
        if document.id in seen:
            raise BadCorpus(f"{where}: the id {document.id!r} occurs twice, expected unique ids")
        seen.add(document.id)
        yield document
    if not seen:
        raise BadCorpus(f"corpus {path}: got no documents, expected one or more")


def _rows(path: Path) -> Iterable[tuple[str, Any]]:
    try:
        if path.suffix == ".jsonl":
            yield from json_rows(path)
            return
        if path.suffix == ".parquet":
            for number, row in enumerate(pq.read_table(path).to_pylist(), start=1):
                yield f"{path}, row {number}", row
            return
    except (OSError, UnicodeDecodeError, BadTaskFile, pa.ArrowException) as error:
        raise BadCorpus(f"corpus {path}: cannot be read: {error}") from error
    raise BadCorpus(
        f"corpus {path}: got suffix {path.suffix!r}, expected one of {', '.join(_SUFFIXES)}"
    )


def _document(row: Any, settings: CorpusOptions, *, where: str) -> Document:
    given: Mapping[str, Any] = row if isinstance(row, dict) else {}
    names = settings.id_column, settings.text_column
    if missing := [name for name in names if name not in given]:
        raise BadCorpus(
            f"{where}: got the columns {', '.join(map(str, given)) or 'none'}, expected "
            f"{' and '.join(missing)}; set tasks.options.id_column and text_column to the names of "
            "your columns"
        )
    number, text = (given[name] for name in names)
    if isinstance(number, int) and not isinstance(number, bool):
        number = str(number)
    if not (isinstance(number, str) and number):
        got = "an empty text" if number == "" else type(number).__name__
        raise BadCorpus(
            f"{where}: got {got} in {names[0]}, expected a whole number or a text that is not "
            "empty; correct the row"
        )
    if not isinstance(text, str):
        raise BadCorpus(
            f"{where}: got {type(text).__name__} in {names[1]}, expected a text; correct the row"
        )
    title = given.get(settings.title_column)
    return Document(id=number, text=text, title=title if isinstance(title, str) else "")


_STARTS = ("Ba", "Do", "Fe", "Gi", "Ka", "Lo", "Mi", "Ra", "Su", "To")
_MIDDLES = ("la", "ne", "ri", "so", "tu")
_ENDS = ("n", "s", "ra", "lo")
_ASKED = {
    "lives in": ("Where does {name} live?", ("Rome", "Oslo", "Lima", "Cairo")),
    "likes": ("What does {name} like?", ("tea", "milk", "bread", "soup")),
    "has": ("What does {name} have?", ("a cat", "a dog", "a boat", "a drum")),
}


@lru_cache(maxsize=_KEPT_INDEXES)
def generated_facts(count: int) -> Mapping[Document, RetrievalQaData]:
    """Make `count` documents, each with one fact about one name, and a question about each fact.

    The documents depend only on `count`, so they are the same on every machine.
    Args: count: at most MAX_GENERATED.
    Returns: for each document, its question with the answer, as the data of a task.
    """
    dice = random.Random(count)
    names = ["".join(parts) for parts in product(_STARTS, _MIDDLES, _ENDS)]
    facts: dict[Document, RetrievalQaData] = {}
    for number, name in enumerate(dice.sample(names, count)):
        verb = dice.choice(list(_ASKED))
        question, answers = _ASKED[verb]
        answer = dice.choice(answers)
        document = Document(id=f"d{number}", text=f"{name} {verb} {answer}.")
        facts[document] = RetrievalQaData(
            question=question.format(name=name), answers=answer, documents=(document.id,)
        )
    return facts
