"""Tests of the retrieval environment: scoring of answers, search, and whole episodes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from worlds.checks.missing_tools import need_package

from actors.environment.plugins.retrieval_qa.corpus import (
    BadCorpus,
    CorpusOptions,
    Document,
    Index,
    generated_facts,
    index_of,
)
from actors.environment.plugins.retrieval_qa.environment import (
    RetrievalQaEnvironment,
    RetrievalQaOptions,
    grade_answer,
    normalised,
)
from actors.environment.protocol import (
    Action,
    MalformedCall,
    StepResult,
    ToolCall,
)
from actors.environment.registry import BadEnvironmentOptions, resolve
from actors.environment.settings import RolloutSettings, rollout_settings
from actors.environment.task_data import DataCheck, data_schema_of
from actors.types import Task

ROWS = [
    {"id": "a", "title": "Rome", "text": "Rome is the capital of Italy."},
    {"id": "b", "title": "Oslo", "text": "Oslo is the capital of Norway."},
    {"id": "c", "title": "Cats", "text": "Cats sleep. " * 40},
    {"id": 7, "text": "A town in Norway."},
]
ASKED = {"question": "Capital of Italy?", "answers": ["Rome", "Roma"], "documents": ["a"]}


@pytest.fixture(autouse=True)
def _package() -> None:
    need_package("bm25s", "retrieval")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return _written(tmp_path / "corpus.jsonl", ROWS)


def _written(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("An apple, a day", "apple day"),
        ("theory", "theory"),
        ("U.S.A.", "usa"),
        ("the", ""),
        ("?!", ""),
    ],
)
def test_texts_are_normalised_as_squad_does(text: str, expected: str) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "truths", "exact_match", "f1"),
    [
        ("Rome", ["Rome"], 1.0, 1.0),
        ("the ROME.", ["Rome"], 1.0, 1.0),
        ("in the city Rome", ["Rome"], 0.0, 2 * 1 / (3 + 1)),
        ("Roma", ["Rome", "Roma"], 1.0, 1.0),
        ("red red wine", ["red wine wine"], 0.0, 2 * 2 / 6),
        ("Oslo", ["Rome"], 0.0, 0.0),
        ("", ["Rome"], 0.0, 0.0),
        # Both are empty after normalisation.
        ("", [""], 0.0, 0.0),
        ("the", ["a"], 0.0, 0.0),
        ("a", ["the", "Rome"], 0.0, 0.0),
        ("Rome", [], 0.0, 0.0),
    ],
)
def test_an_answer_gets_the_best_score_of_all_truths(
    answer: str, truths: list[str], exact_match: float, f1: float
) -> None:
    assert grade_answer(answer, truths) == {
        "exact_match": exact_match,
        "f1": pytest.approx(f1),
    }


def test_a_search_returns_documents_with_its_words_best_first(corpus: str) -> None:
    index = index_of(CorpusOptions(corpus=corpus))

    def found(query: str, most: int = 10) -> list[str]:
        return [document.id for document in index.search(query, most=most)]

    assert found("Norway capital") == ["b", "7", "a"]
    assert found("Norway capital", most=1) == ["b"]
    assert found("OSLO?") == ["b"]
    assert found("elephants") == found("") == found("the of") == found("?!") == []
    assert [index.by_id[name].title for name in ("a", "7")] == ["Rome", ""]


def test_equal_documents_keep_their_order() -> None:
    documents = [Document(id=str(number), text="same words") for number in range(30)]
    index = Index(documents, stopwords=None)
    assert [document.id for document in index.search("words", most=30)] == [
        document.id for document in documents
    ]


def test_an_index_is_built_once_and_again_after_the_file_changed(corpus: str) -> None:
    settings = CorpusOptions(corpus=corpus)
    first = index_of(settings)
    assert index_of(settings) is first
    _written(Path(corpus), [*ROWS, {"id": "e", "text": "Elephants."}])
    assert [document.id for document in index_of(settings).search("elephants", most=3)] == ["e"]


def test_a_corpus_may_be_parquet_with_other_column_names(tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist([{"docid": 4, "contents": "Lima is in Peru."}]), path)
    settings = CorpusOptions(corpus=str(path), id_column="docid", text_column="contents")
    assert [document.id for document in index_of(settings).search("peru", most=3)] == ["4"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "got no documents"),
        ([{"id": "a", "body": "x"}], "line 1: got the columns id, body, expected text; set"),
        ([{"id": "", "text": "x"}], "line 1: got an empty text in id, expected"),
        ([{"id": True, "text": "x"}], "line 1: got bool in id, expected"),
        ([{"id": 1, "text": None}], "line 1: got NoneType in text, expected a text"),
        ([["a", "x"]], "line 1: got the columns none"),
        ([{"id": 1, "text": "x"}, {"id": "1", "text": "y"}], "line 2: the id '1' occurs twice"),
        ([{"id": "a", "text": "the"}], "only documents without words"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(BadCorpus, match=message):
        index_of(CorpusOptions(corpus=_written(tmp_path / "corpus.jsonl", rows)))


def test_a_missing_corpus_or_one_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCorpus, match=r"tasks\.options\.corpus: .* cannot be read"):
        index_of(CorpusOptions(corpus=str(tmp_path / "none.jsonl")))
    with pytest.raises(BadCorpus, match=r"got suffix '\.txt'"):
        index_of(CorpusOptions(corpus=_written(tmp_path / "corpus.txt", ROWS)))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    with pytest.raises(BadCorpus, match="not JSON"):
        index_of(CorpusOptions(corpus=str(broken)))


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=name)


async def _played(
    corpus: str, answer: str, *calls: ToolCall, data: Any = ASKED, **options: Any
) -> StepResult:
    environment = RetrievalQaEnvironment(RetrievalQaOptions(corpus=corpus, **options))
    await environment.reset(Task(task_id="t", environment="e", seed=0, data=data))
    if calls:
        await environment.step(Action(text="", calls=calls))
    return await environment.step(Action(text=answer))


async def test_more_calls_in_a_turn_than_the_run_allows_are_malformed(corpus: str) -> None:
    environment = RetrievalQaEnvironment(RetrievalQaOptions(corpus=corpus))
    await environment.reset(Task(task_id="t", environment="e", seed=0, data=ASKED))
    rollout_settings.set(RolloutSettings(max_calls_per_turn=2))
    calls = tuple(_call("search", query="Rome") for _ in range(3))
    result = await environment.step(Action(text="", calls=calls))
    assert result.is_malformed and len(result.messages) == 2


async def test_an_episode_searches_reads_and_answers(corpus: str) -> None:
    environment = RetrievalQaEnvironment(
        RetrievalQaOptions(corpus=corpus, snippet_chars=20, max_calls=4)
    )
    start = await environment.reset(Task(task_id="t", environment="e", seed=0, data=ASKED))
    assert start.messages[0].content == "Capital of Italy?\nSearch, then answer in few words."
    assert [tool.name for tool in start.tools] == ["search", "read"]
    calls = (
        _call("search", query="capital Norway", k=2),
        _call("search", query="nothing at all"),
        _call("read", id="a"),
        _call("read", id="z"),
    )
    result = await environment.step(Action(text="", calls=calls))
    assert [message.content for message in result.messages] == [
        "[b] Oslo: Oslo is the capital ...\n[7] A town in Norway.",
        "No document has these words.",
        "Rome\nRome is the capital of Italy.",
        "error: no such document",
    ]
    assert not result.is_malformed and result.messages[2].tool_call_id == "read"
    result = await environment.step(Action(text="", calls=(_call("search", query="Rome"),)))
    assert result.messages[0].content == "error: no calls are left; answer"
    result = await environment.step(Action(text="It is <answer>the Rome</answer>"))
    assert result.terminated and result.reward == 1.0 and result.answer == "rome"
    assert result.reward_components == {
        "f1": 1.0,
        "exact_match": 1.0,
        "num_searches": 2.0,
        "found_support": 1.0,
    }


async def test_the_reward_is_the_component_that_the_option_names(corpus: str) -> None:
    assert (await _played(corpus, "city Rome")).reward == pytest.approx(2 / 3)
    assert (await _played(corpus, "city Rome", reward="exact_match")).reward == 0.0


async def test_found_support_is_the_share_of_known_documents_that_were_shown(corpus: str) -> None:
    both = {**ASKED, "documents": ["a", 7]}
    search = _call("search", query="Italy", k=1)
    unseen = await _played(corpus, "Rome", data=both)
    half = await _played(corpus, "Rome", search, data=both)
    assert unseen.reward_components["found_support"] == 0.0
    assert half.reward_components["found_support"] == 0.5
    unknown = await _played(corpus, "Rome", search, data={"question": "?", "answers": "Rome"})
    assert unknown.reward == 1.0 and "found_support" not in unknown.reward_components


async def test_unparsable_or_too_many_calls_are_malformed(corpus: str) -> None:
    environment = RetrievalQaEnvironment(RetrievalQaOptions(corpus=corpus, max_malformed=1))
    await environment.reset(Task(task_id="t", environment="e", seed=0, data=ASKED))
    broken = MalformedCall(reason="invalid_json", message="no JSON.")
    result = await environment.step(Action(text="", calls=(broken,)))
    assert result.is_malformed and result.reward == -0.1 and not result.terminated
    many = tuple(_call("read", id="a") for _ in range(9))
    result = await environment.step(Action(text="", calls=many))
    assert result.ended_by_malformed


async def test_the_number_of_documents_to_return_is_clamped_to_its_bounds(corpus: str) -> None:
    environment = RetrievalQaEnvironment(RetrievalQaOptions(corpus=corpus))
    await environment.reset(Task(task_id="t", environment="e", seed=0, data=ASKED))
    calls = tuple(_call("search", query="Norway", k=k) for k in (-5, 0, 10**9))
    result = await environment.step(Action(text="", calls=calls))
    counts = [message.content.count("[") for message in result.messages]
    assert counts == [1, 1, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**ASKED, "answers": ["the", "?"]}, "empty without punctuation"),
        ({**ASKED, "documents": ["a", "zz"]}, r"\['zz'\] \(1 in all\) are not in the corpus"),
        ({}, "has no data"),
    ],
)
async def test_a_task_that_cannot_be_answered_is_refused(
    corpus: str, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await _played(corpus, "Rome", data=data)


async def test_generated_questions_are_answered_by_their_documents() -> None:
    facts = generated_facts(50)
    assert facts == generated_facts(50) and len({each.text for each in facts}) == 50
    for seed in (0, 7, 49, 2**30 + 3):
        document, data = list(facts.items())[seed % 50]
        environment = RetrievalQaEnvironment(RetrievalQaOptions(num_generated=50, k=1))
        await environment.reset(Task(task_id="t", environment="e", seed=seed, data={}))
        search = _call("search", query=data.question)
        found = await environment.step(Action(text="", calls=(search,)))
        assert found.messages[0].content == f"[{document.id}] {document.text}"
        result = await environment.step(Action(text=str(data.answers)))
        assert result.reward == result.reward_components["found_support"] == 1.0


async def test_episodes_search_concurrently(corpus: str) -> None:
    results = await asyncio.gather(
        *(_played(corpus, "Rome", _call("search", query="Italy")) for _ in range(40))
    )
    assert {result.reward_components["found_support"] for result in results} == {1.0}


def test_data_are_checked_before_they_are_played() -> None:
    check = DataCheck(data_schema_of(RetrievalQaEnvironment(RetrievalQaOptions())))
    assert check.problem({}) == check.problem(ASKED) == ""
    assert check.problem({"question": "?", "answers": "Rome"}) == ""
    assert check.problem({"question": "?"}) == "data: answers missing; give it"
    assert "data.answers" in check.problem({"question": "?", "answers": []})
    assert "unknown fields gold" in check.problem({**ASKED, "gold": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "bleu"}, "options.reward: got 'bleu', expected 'f1' or 'exact_match'"),
        ({"k": 21}, "options.k: got 21, expected at most 20"),
        ({"num_generated": 201}, "options.num_generated: got 201, expected at most 200"),
        ({"max_malformed": -1}, "options.max_malformed: got -1, expected 0 or more"),
        ({"documents": "x"}, "options.documents: unknown key; expected one of corpus"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadEnvironmentOptions, match=message):
        resolve("retrieval_qa", options)


def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"pip install 'rayloom\[retrieval\]'"):
        resolve("retrieval_qa", {})
