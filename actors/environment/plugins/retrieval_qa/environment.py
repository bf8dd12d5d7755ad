"""Questions about a set of documents, which the policy searches by BM25.

A task's data: `question`; `answers`, one right answer or several alternatives; and, if known,
`documents`, the ids of the documents with the answer. Without data, the question is made from the
seed, about generated documents.

A turn with calls of `search` or `read` is answered with documents or errors. A turn without calls
is the final answer and ends the task. The answer is the text of the last `<answer>…</answer>` or,
without these tags, the whole visible text.

The option `reward` chooses the reward, `f1` or `exact_match` (see `grade_answer`). The answer's
turn has the components `f1`, `exact_match` and `num_searches`. If `documents` are known, it also
has `found_support`, the share of these documents that a tool has shown. A turn with a call that
cannot be read is malformed: its component `malformed` is minus `malformed_penalty`. More than
`max_malformed` such turns in a row end the task.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Literal

from annotated_types import Ge, Le

from actors.environment.builtin.reasoning_gym_env import extract_answer
from actors.environment.plugins.retrieval_qa.corpus import (
    CorpusOptions,
    Document,
    Index,
    RetrievalQaData,
    generated_facts,
    import_bm25s,
    index_of,
)
from actors.environment.protocol import (
    Action,
    Message,
    Observation,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
)
from actors.environment.tool_turns import Penalty, ToolFailed, ToolTurns
from actors.limits import STRICT, Natural, Positive
from actors.types import Task
from actors.user_code import in_thread

PROMPT = "{question}\nSearch, then answer in few words."
NOTHING_FOUND = "No document has these words."
NO_SUCH_DOCUMENT = "no such document"
SEARCH = ToolSchema(
    name="search",
    description="Find documents by their words.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string"}, "k": {"type": "integer"}},
        "required": ["query"],
    },
)
READ = ToolSchema(
    name="read",
    description="Read a document.",
    parameters={
        "type": "object",
        "properties": {"id": {"type": "string"}},
        "required": ["id"],
    },
)
MAX_FOUND = 20
MAX_QUERY_CHARS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalQaOptions(CorpusOptions):
    """Options of `retrieval_qa`: the documents, the tools and the reward."""

    __pydantic_config__ = STRICT

    reward: Literal["f1", "exact_match"] = "f1"
    """The component that is the reward."""
    k: Annotated[int, Ge(1), Le(MAX_FOUND)] = 3
    """Number of documents that a search returns by default."""
    has_read: bool = True
    """Whether the policy has the tool `read`; set it to false if snippets show whole documents."""
    snippet_chars: Positive = 200
    """Number of each document's characters that a search's answer shows."""
    max_chars: Positive = 4_000
    """Number of a document's characters that `read` shows."""
    max_calls: Positive = 8
    """Maximum number of calls in an episode, of both tools together."""
    max_malformed: Natural = 3
    """Largest number of malformed turns in a row; one more ends the episode."""
    malformed_penalty: Penalty = 0.1
    """Subtracted from the reward for each malformed turn, as the component malformed."""


class RetrievalQaEnvironment:
    """An environment that asks one question about the documents."""

    data_schema = RetrievalQaData

    def __init__(self, options: RetrievalQaOptions) -> None:
        import_bm25s()
        self._options = options
        # Environments with equal options of the corpus share an index.
        self._corpus = CorpusOptions(
            **{each.name: getattr(options, each.name) for each in fields(CorpusOptions)}
        )
        self._tools = (SEARCH, READ) if options.has_read else (SEARCH,)
        self._turns = ToolTurns(
            self._call,
            at_most=options.max_malformed,
            penalty=options.malformed_penalty,
            max_calls=options.max_calls,
        )
        self._index: Index | None = None
        self._truths: Sequence[str] = ()
        self._support: frozenset[str] = frozenset()
        self._shown: set[str] = set()
        self._num_searches = 0

    async def reset(self, task: Task) -> Observation:
        self._index = await in_thread(partial(index_of, self._corpus))
        data = RetrievalQaData(**task.data) if task.data else self._generated(task)
        self._truths = [data.answers] if isinstance(data.answers, str) else data.answers
        if not any(map(normalised, self._truths)):
            raise ValueError(
                f"retrieval_qa: task {task.task_id}: data.answers: they are empty without "
                "punctuation and articles, expected one with a word; correct the task"
            )
        self._support = frozenset(map(str, data.documents))
        if unknown := self._support - self._index.by_id.keys():
            raise ValueError(
                f"retrieval_qa: task {task.task_id}: data.documents: {sorted(unknown)[:3]} "
                f"({len(unknown)} in all) are not in the corpus, expected ids of its documents"
            )
        self._shown = set()
        self._num_searches = 0
        self._turns.begin_episode()
        asked = Message(role=Role.USER, content=PROMPT.format(question=data.question))
        return Observation(messages=(asked,), tools=self._tools, best_return=1.0)

    async def step(self, action: Action) -> StepResult:
        if action.calls:
            return await self._turns.result_of(action.calls)
        return self._graded(extract_answer(action.text))

    async def close(self) -> None:
        return None

    def _generated(self, task: Task) -> RetrievalQaData:
        if self._corpus.corpus is not None:
            raise ValueError(
                f"retrieval_qa: task {task.task_id} has no data, and questions about "
                f"{self._corpus.corpus} cannot be generated; expected question and answers; set "
                "tasks.file or tasks.dataset, or leave the corpus out"
            )
        questions = list(generated_facts(self._corpus.num_generated).values())
        return questions[task.seed % len(questions)]

    def _graded(self, answer: str) -> StepResult:
        components = grade_answer(answer, self._truths)
        components["num_searches"] = float(self._num_searches)
        if self._support:
            components["found_support"] = len(self._support & self._shown) / len(self._support)
        return StepResult(
            reward=components[self._options.reward],
            reward_components=components,
            terminated=True,
            answer=normalised(answer),
        )

    async def _call(self, call: ToolCall) -> str:
        given = call.arguments
        if call.name == READ.name:
            return self._read(given["id"])
        return await self._search(given["query"], given.get("k", self._options.k))

    async def _search(self, query: str, most: int) -> str:
        assert self._index is not None
        self._num_searches += 1
        most = max(1, min(most, MAX_FOUND))
        search = partial(self._index.search, query[:MAX_QUERY_CHARS], most=most)
        found = await in_thread(search)
        self._shown |= {document.id for document in found}
        return "\n".join(map(self._snippet, found)) or NOTHING_FOUND

    def _read(self, name: str) -> str:
        assert self._index is not None
        document = self._index.by_id.get(name)
        if document is None:
            raise ToolFailed(NO_SUCH_DOCUMENT)
        self._shown.add(document.id)
        parts = (document.title, document.text[: self._options.max_chars])
        return "\n".join(part for part in parts if part)

    def _snippet(self, document: Document) -> str:
        title = f"{document.title}: " if document.title else ""
        text = document.text
        most = self._options.snippet_chars
        cut = text if len(text) <= most else f"{text[:most]}..."
        return f"[{document.id}] {title}{' '.join(cut.split())}"


# Score a short answer against the true ones.
#
# As in SQuAD's evaluation (Rajpurkar et al. 2016, evaluate-v1.1), texts are normalised, an exact
# match is 1, and F1 is over the bag of words; the best of several true answers counts. Stated
# deviation: a text that is empty after normalisation matches nothing, not even another empty one.
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return a text in lower case with single spaces, without punctuation and articles.

    Example: normalised("The  Eiffel-Tower!") -> "eiffeltower"
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def grade_answer(answer: str, truths: Iterable[str]) -> dict[str, float]:
    """Return an answer's exact_match (0 or 1) and f1 (0 to 1); of several truths the best counts.

    F1 = 2 common words / (words of the answer + words of the truth), after `normalised`. A word
    that occurs twice in both texts is two common words.

    Example: grade_answer("in the city Rome", ["Rome", "Roma"]) -> exact_match 0, f1 1/2
    """
    given = normalised(answer)
    true = [text for truth in truths if (text := normalised(truth))]
    return {
        "exact_match": float(bool(given) and given in true),
        "f1": max((_f1(given.split(), text.split()) for text in true), default=0.0),
    }


def _f1(given: list[str], true: list[str]) -> float:
    hits = (Counter(given) & Counter(true)).total()
    return 2 * hits / (len(given) + len(true))
