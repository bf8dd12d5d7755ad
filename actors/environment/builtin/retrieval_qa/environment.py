"""Questions that documents answer, with a search by BM25 over them.

A task's data: `question`, `answers` (a text or several, of which the best match counts) and, if
known, `documents`, the ids of the documents with the answer. Without data the question is made from
the seed, about generated documents. A turn is calls of `search` and `read`, each answered with
documents or an error, or the final answer: the text of the last `<answer>…</answer>`, else the
whole visible text. The answer ends the task.

Reward: `f1` or `exact_match` (the option `reward`), see `grade_answer`. Components: both,
`num_searches`, and if `documents` are known `found_support`, the share of these documents that a
tool has shown; `malformed`, minus `malformed_penalty`, at a turn with a call that cannot be read,
which ends the task after `max_malformed` in a row.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from actors.environment.builtin.reasoning_gym_env import extract_answer
from actors.environment.builtin.retrieval_qa.corpus import (
    NUM_NAMES,
    CorpusOptions,
    Document,
    Index,
    generated_facts,
    import_bm25s,
    index_of,
)
from actors.environment.malformed import ERROR, MalformedTurns
from actors.environment.protocol import (
    Action,
    MalformedCall,
    Message,
    Observation,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
)
from actors.environment.settings import playing
from actors.types import Task
from actors.user_code import in_thread

PROMPT = "{question}\nSearch, then answer in few words."
NOTHING_FOUND = "No document has these words."
NO_SUCH_DOCUMENT = "no such document"
NO_CALLS_LEFT = "no calls are left; answer"
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
REWARDS = ("f1", "exact_match")


class RetrievalQaEnvironment:
    """Questions with a search tool.

    corpus: a JSONL or Parquet file, relative to the working directory; None for num_generated
    documents. k: number of documents that a search returns by default. snippet_chars: characters
    of each document in a search's answer. has_read: false to leave out the tool `read`, if snippets
    show whole documents. max_chars: characters of a document that `read` shows. max_calls: maximum
    number of calls, of both tools together.
    """

    data_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "question": {"type": "string", "minLength": 1, "maxLength": 20_000},
            "answers": {
                "type": ["string", "array"],
                "items": {"type": "string"},
                "minItems": 1,
                "description": "a right answer, or several",
            },
            "documents": {
                "type": "array",
                "items": {"type": ["string", "integer"]},
                "description": "ids of the documents with the answer",
            },
        },
        "additionalProperties": False,
        # A task without data is a seed.
        "if": {"minProperties": 1},
        "then": {"required": ["question", "answers"]},
    }

    def __init__(
        self,
        *,
        corpus: str | None = None,
        id_column: str = "id",
        text_column: str = "text",
        title_column: str = "title",
        stopwords: str | None = "en",
        num_generated: int = NUM_NAMES,
        reward: str = "f1",
        k: int = 3,
        has_read: bool = True,
        snippet_chars: int = 200,
        max_chars: int = 4_000,
        max_calls: int = 8,
        max_malformed: int = 3,
        malformed_penalty: float = 0.1,
    ) -> None:
        if reward not in REWARDS:
            raise ValueError(
                f"retrieval_qa: got reward={reward!r}; expected one of {', '.join(REWARDS)}"
            )
        if not 1 <= k <= MAX_FOUND or min(snippet_chars, max_chars, max_calls) < 1:
            raise ValueError(
                f"retrieval_qa: got k={k}, snippet_chars={snippet_chars}, max_chars={max_chars}, "
                f"max_calls={max_calls}; expected k from 1 to {MAX_FOUND}, the others from 1"
            )
        if not 1 <= num_generated <= NUM_NAMES:
            raise ValueError(
                f"retrieval_qa: got num_generated={num_generated}; expected 1 to {NUM_NAMES}"
            )
        if max_malformed < 0 or not 0 <= malformed_penalty < 10:
            raise ValueError(
                f"retrieval_qa: got max_malformed={max_malformed}, "
                f"malformed_penalty={malformed_penalty}; expected 0 or more, and 0 to below 10"
            )
        import_bm25s()
        self._corpus = CorpusOptions(
            path=corpus,
            num_generated=num_generated,
            id_column=id_column,
            text_column=text_column,
            title_column=title_column,
            stopwords=stopwords,
        )
        self._reward = reward
        self._k = k
        self._tools = (SEARCH, READ) if has_read else (SEARCH,)
        self._snippet_chars = snippet_chars
        self._max_chars = max_chars
        self._max_calls = max_calls
        self._malformed = MalformedTurns(at_most=max_malformed, penalty=malformed_penalty)
        self._index: Index | None = None
        self._truths: Sequence[str] = ()
        self._support: frozenset[str] = frozenset()
        self._shown: set[str] = set()
        self._num_calls = self._num_searches = 0

    async def reset(self, task: Task) -> Observation:
        self._index = await in_thread(partial(index_of, self._corpus))
        data = dict(task.data) or self._generated(task)
        answers = data["answers"]
        self._truths = [answers] if isinstance(answers, str) else list(answers)
        if not any(map(normalised, self._truths)):
            raise ValueError(
                f"retrieval_qa: task {task.task_id}: data.answers: they are empty without "
                "punctuation and articles, expected one with a word; correct the task"
            )
        self._support = frozenset(map(str, data.get("documents", ())))
        if unknown := self._support - self._index.by_id.keys():
            raise ValueError(
                f"retrieval_qa: task {task.task_id}: data.documents: {sorted(unknown)[:3]} "
                f"({len(unknown)} in all) are not in the corpus, expected ids of its documents"
            )
        self._shown = set()
        self._num_calls = self._num_searches = 0
        self._malformed.begin_anew()
        asked = Message(role=Role.USER, content=PROMPT.format(question=data["question"]))
        return Observation(messages=(asked,), tools=self._tools, best_return=1.0)

    async def step(self, action: Action) -> StepResult:
        if action.calls:
            return await self._answer_calls(action.calls)
        return self._graded(extract_answer(action.text))

    async def close(self) -> None:
        return None

    def _generated(self, task: Task) -> dict[str, Any]:
        if self._corpus.path is not None:
            raise ValueError(
                f"retrieval_qa: task {task.task_id} has no data, and questions about "
                f"{self._corpus.path} cannot be generated; expected question and answers; set "
                "tasks.file or tasks.dataset, or leave the corpus out"
            )
        facts = generated_facts(self._corpus.num_generated)
        fact = facts[task.seed % len(facts)]
        return {
            "question": fact.question,
            "answers": fact.answer,
            "documents": [fact.document.id],
        }

    def _graded(self, answer: str) -> StepResult:
        grade = grade_answer(answer, self._truths)
        components = {
            "f1": grade.f1,
            "exact_match": grade.exact_match,
            "num_searches": float(self._num_searches),
        }
        if self._support:
            components["found_support"] = len(self._support & self._shown) / len(self._support)
        return StepResult(
            reward=components[self._reward],
            reward_components=components,
            terminated=True,
            answer=normalised(answer),
        )

    async def _answer_calls(self, calls: Sequence[ToolCall | MalformedCall]) -> StepResult:
        taken = calls[: playing.get().max_calls_per_turn]
        messages = tuple([await self._answer(call) for call in taken])
        if len(taken) == len(calls) and not any(isinstance(call, MalformedCall) for call in calls):
            self._malformed.begin_anew()
            return StepResult(messages=messages)
        return self._malformed.result(messages)

    async def _answer(self, call: ToolCall | MalformedCall) -> Message:
        if isinstance(call, MalformedCall):
            return Message(role=Role.TOOL, content=ERROR.format(message=call.message))
        if self._num_calls >= self._max_calls:
            content = ERROR.format(message=NO_CALLS_LEFT)
        else:
            self._num_calls += 1
            given = call.arguments
            if call.name == READ.name:
                content = self._read(given["id"])
            else:
                content = await self._search(given["query"], given.get("k", self._k))
        return Message(role=Role.TOOL, content=content, name=call.name, tool_call_id=call.id)

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
            return ERROR.format(message=NO_SUCH_DOCUMENT)
        self._shown.add(document.id)
        parts = (document.title, document.text[: self._max_chars])
        return "\n".join(part for part in parts if part)

    def _snippet(self, document: Document) -> str:
        title = f"{document.title}: " if document.title else ""
        text = document.text
        cut = text if len(text) <= self._snippet_chars else f"{text[: self._snippet_chars]}..."
        return f"[{document.id}] {title}{' '.join(cut.split())}"


# Score a short answer against the true ones.
#
# As in SQuAD's evaluation (Rajpurkar et al. 2016, evaluate-v1.1), texts are normalised, an exact
# match is 1, and F1 is over the bag of words; the best of several true answers counts. Stated
# deviation: a text that is empty after normalisation matches nothing, not even another empty one.
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The scores of an answer, each from 0 to 1, against the true answer that fits best."""

    exact_match: float
    f1: float


def normalised(text: str) -> str:
    """Return a text in lower case with single spaces, without punctuation and articles.

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
