"""Tests of the SQL environment: comparing results, confining queries, and whole episodes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from actors.deadline import within
from actors.environment.plugins.sql.environment import (
    Execution,
    QueryFailed,
    SqlEnvironment,
    SqlOptions,
    is_correct,
    orders_rows,
    query_of,
    shown_result,
)
from actors.environment.plugins.sql.generated import LEVELS, make_question
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

SCRIPT = "CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (3, NULL);"
DATABASE = {"script": SCRIPT}


@pytest.fixture
async def execution() -> AsyncIterator[Execution]:
    shared = Execution.shared()
    yield shared
    shared.close()


@pytest.mark.parametrize(
    ("found", "truth", "is_ordered", "expected"),
    [
        ([[1], [2]], [[2], [1]], False, True),
        ([[1], [2]], [[2], [1]], True, False),
        ([[1], [1]], [[1]], False, False),
        ([[1], [1], [2]], [[1], [2], [2]], False, False),
        ([[1.0]], [[1]], False, True),
        ([[0.1 + 0.2]], [[0.3]], False, True),
        ([[0.3001]], [[0.3]], False, False),
        ([[2**53 + 1]], [[2**53]], False, False),
        ([["1"]], [[1]], False, False),
        ([["a"]], [["A"]], False, False),
        ([["a "]], [["a"]], False, False),
        ([[None, 1]], [[None, 1]], False, True),
        ([[None, 1]], [["", 1]], False, False),
        ([[0]], [[None]], False, False),
        ([[1, 2]], [[2, 1]], False, False),
        ([[1]], [[1, 1]], False, False),
        ([[{"blob": "00ff"}]], [[{"blob": "00ff"}]], False, True),
        ([[{"blob": "61"}]], [["a"]], False, False),
        ([[float("inf")]], [[float("inf")]], False, True),
        # With an empty truth no result is correct.
        ([], [], False, False),
        ([[None]], [[None]], False, False),
        ([[0]], [[0]], False, True),
    ],
)
def test_results_are_compared_as_documented(
    found: list[list[Any]], truth: list[list[Any]], is_ordered: bool, expected: bool
) -> None:
    assert is_correct(found, truth, is_ordered=is_ordered) is expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a limit 1", True),
        ("SELECT * FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'order by a' FROM t", False),
        ("SELECT a FROM t -- order by a", False),
        ("SELECT a /* order by */ FROM t", False),
        ('SELECT "order by" FROM t', False),
        ("SELECT ')', a FROM t ORDER BY a", True),
        ("SELECT a FROM t UNION SELECT a FROM u ORDER BY 1", True),
        ("SELECT reorder FROM bypass", False),
    ],
)
def test_only_an_order_by_at_the_top_level_orders_the_rows(query: str, expected: bool) -> None:
    assert orders_rows(query) is expected


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("SELECT 1", "SELECT 1"),
        (" SELECT 1;\n", "SELECT 1;"),
        ("First\n```sql\nSELECT 1\n```\nno:\n```\nSELECT 2\n```", "SELECT 2"),
        ("```SELECT```", "SELECT"),
        ("```SELECT a FROM t```", "SELECT a FROM t"),
        ("```sql SELECT 1```", "SELECT 1"),
        ("```sqlite3\nSELECT 1\n```", "SELECT 1"),
        ("```sql\nSELECT 1", "```sql\nSELECT 1"),
        ("", ""),
    ],
)
def test_the_query_is_the_last_fenced_block_or_the_whole_answer(text: str, query: str) -> None:
    assert query_of(text) == query


def test_equal_results_are_shown_in_the_same_way() -> None:
    assert shown_result([[2.0], [1]], is_ordered=False) == shown_result(
        [[1], [2]], is_ordered=False
    )
    assert shown_result([[2], [1]], is_ordered=True) != shown_result([[1], [2]], is_ordered=True)


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("INSERT INTO t VALUES (4, 'z')", "only SELECT"),
        ("DROP TABLE t", "only SELECT"),
        ("CREATE TEMP TABLE u (a)", "only SELECT"),
        ("ATTACH '/etc/passwd' AS x", "only SELECT"),
        ("PRAGMA query_only = 0", "only SELECT"),
        ("VACUUM INTO '/tmp/x'", "denied"),
        ("SELECT load_extension('x')", "only SELECT"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        ("SELECT 1; DROP TABLE t", "one statement"),
        ("SELECT randomblob(1000000000)", "too big"),
        ("SELECT zeroblob(2000000000)", "too big"),
        ("SELECT replace(hex(zeroblob(500000)), '0', 'aaaaaa')", "too big"),
        ("SELECT " + "(" * 5000, "overflow"),
        ("SELECT absent FROM t", "no such column: absent"),
        ("SELECT \x00", "null character"),
        ("SELECT '\udc80'", "surrogates"),
        ("", "no query"),
        ("-- SELECT 1", "no query"),
        ("SELECT '" + "x" * 30_000 + "'", "too"),
    ],
)
async def test_a_hostile_query_is_an_error(execution: Execution, query: str, error: str) -> None:
    with pytest.raises(QueryFailed, match=error):
        await execution.query(DATABASE, query, max_rows=5, limit_s=5.0)


ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) "


@pytest.mark.parametrize(
    "query",
    [
        ENDLESS + "SELECT count(*) FROM r",
        ENDLESS + "SELECT a.x FROM r a, r b WHERE a.x < 0",
        # Each row has a MiB, and sorting keeps all rows in memory.
        ENDLESS + "SELECT x, randomblob(1000000) FROM r ORDER BY 2",
        "WITH a0 AS (SELECT 1)"
        + "".join(
            f", a{i} AS (SELECT * FROM a{i - 1} UNION ALL SELECT * FROM a{i - 1})"
            for i in range(1, 30)
        )
        + " SELECT * FROM a29",
    ],
    ids=["recursion", "product", "memory", "planning"],
)
async def test_an_endless_query_is_stopped_and_the_next_one_is_answered(
    execution: Execution, query: str
) -> None:
    with pytest.raises(QueryFailed, match=r"too long|memory"):
        await within(60.0, execution.query(DATABASE, query, max_rows=5, limit_s=0.3))
    found = await execution.query(DATABASE, "SELECT count(*) FROM t", max_rows=5, limit_s=5.0)
    assert found.rows == [[3]]


async def test_rows_and_bytes_beyond_the_limits_are_cut(execution: Execution) -> None:
    found = await execution.query(DATABASE, "SELECT a FROM t", max_rows=2, limit_s=5.0)
    assert (found.columns, found.rows, found.is_cut) == (["a"], [[1], [2]], True)
    large = ENDLESS + "SELECT hex(zeroblob(200000)) FROM r"
    found = await execution.query(DATABASE, large, max_rows=1000, limit_s=5.0)
    assert found.is_cut and len(found.rows) < 5


async def test_processes_end_with_their_last_user() -> None:
    first, second = Execution.shared(), Execution.shared()
    await first.query(DATABASE, "SELECT 1", max_rows=1, limit_s=5.0)
    (pid,) = first._servers.pids()
    first.close()
    await second.query(DATABASE, "SELECT 1", max_rows=1, limit_s=5.0)
    second.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _task(**data: Any) -> Task:
    return Task(task_id="t", environment="sql", seed=3, data=data)


GIVEN = {"question": "How many?", "schema": SCRIPT, "query": "SELECT count(*) FROM t"}


async def _final(task: Task, answer: str, **options: Any) -> StepResult:
    environment = SqlEnvironment(SqlOptions(**{"max_queries": 0, **options}))
    try:
        await environment.reset(task)
        result = await environment.step(Action(text=answer))
    finally:
        await environment.close()
    assert result.terminated
    return result


@pytest.mark.parametrize(
    ("answer", "correct", "executable"),
    [
        ("SELECT count(*) FROM t", 1.0, 1.0),
        ("<think>SELECT 9</think>```sql\nSELECT 3\n```", 1.0, 1.0),
        ("SELECT count(b) FROM t", 0.0, 1.0),
        ("SELECT a FROM t WHERE a > 9", 0.0, 1.0),
        ("SELECT", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
async def test_an_answer_is_scored_by_the_rows_of_its_query(
    answer: str, correct: float, executable: float
) -> None:
    result = await _final(_task(**GIVEN), answer, executable_bonus=0.25)
    assert result.reward == correct + 0.25 * executable
    assert result.reward_components == {
        "correct": correct,
        "executable": executable,
        "num_queries": 0.0,
    }


async def test_the_truth_may_be_given_as_rows_and_no_answer_matches_an_empty_truth() -> None:
    given = {"question": "?", "schema": SCRIPT}
    query = "SELECT a, b FROM t WHERE a < 3"
    rows = [[2, "y"], [1, "x"]]
    assert (await _final(_task(**given, rows=rows), query)).reward == 1.0
    assert (await _final(_task(**given, rows=rows, is_ordered=True), query)).reward == 0.0
    empty = _task(**given, query="SELECT a FROM t WHERE a > 9")
    assert (await _final(empty, "SELECT a FROM t WHERE a > 9")).reward == 0.0
    environment = SqlEnvironment(SqlOptions())
    assert (await environment.reset(empty)).best_return == 0.0
    await environment.close()


async def test_the_script_of_a_task_cannot_read_another_database(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE s AS SELECT 'a secret' AS v")
    script = f"ATTACH '{other}' AS x; CREATE TABLE t AS SELECT v FROM x.s;"
    environment = SqlEnvironment(SqlOptions())
    with pytest.raises(ValueError, match="too many attached databases"):
        await environment.reset(_task(question="?", schema=script, query="SELECT v FROM t"))
    await environment.close()


async def test_the_order_of_rows_counts_if_the_true_query_has_an_order() -> None:
    task = _task(**{**GIVEN, "query": "SELECT a FROM t ORDER BY a DESC"})
    assert (await _final(task, "SELECT a FROM t ORDER BY a DESC")).reward == 1.0
    assert (await _final(task, "SELECT a FROM t")).reward == 0.0


async def test_an_episode_runs_queries_and_answers() -> None:
    environment = SqlEnvironment(SqlOptions(max_queries=2, max_rows=2, sample_rows=1))
    start = await environment.reset(_task(**GIVEN))
    assert start.messages[0].content == (
        "CREATE TABLE t (a INTEGER, b TEXT);\n-- 1 | x\nHow many?\n"
        "Look with run_sql, then answer with one SQLite query."
    )
    (tool,) = start.tools
    look = ToolCall(name=tool.name, arguments={"query": "SELECT * FROM t ORDER BY a DESC"}, id="1")
    drop = ToolCall(name=tool.name, arguments={"query": "DROP TABLE t"}, id="2")
    result = await environment.step(Action(text="", calls=(look, drop, look)))
    assert [message.content for message in result.messages] == [
        "a | b\n3 | NULL\n2 | y\n(more rows)",
        "error: only SELECT is allowed",
        "error: no queries are left; answer",
    ]
    assert [message.tool_call_id for message in result.messages] == ["1", "2", "1"]
    assert not result.terminated and not result.is_malformed
    result = await environment.step(Action(text="SELECT 3"))
    assert result.reward == 1.0 and result.reward_components["num_queries"] == 2.0
    await environment.close()


async def test_more_calls_in_a_turn_than_the_run_allows_are_malformed() -> None:
    environment = SqlEnvironment(SqlOptions())
    await environment.reset(_task(**GIVEN))
    look = ToolCall(name="run_sql", arguments={"query": "SELECT a FROM t"})
    rollout_settings.set(RolloutSettings(max_calls_per_turn=2))
    result = await environment.step(Action(text="", calls=(look, look, look)))
    assert result.is_malformed and len(result.messages) == 2
    await environment.close()


async def test_malformed_calls_are_penalised_and_end_the_task() -> None:
    environment = SqlEnvironment(SqlOptions(max_malformed=1))
    await environment.reset(_task(**GIVEN))
    broken = MalformedCall(reason="invalid_json", message="no JSON.")
    first = await environment.step(Action(text="", calls=(broken,)))
    assert first.is_malformed and not first.terminated and first.reward == -0.1
    assert first.messages[0].content == "error: no JSON."
    last = await environment.step(Action(text="", calls=(broken,)))
    assert last.ended_by_malformed
    await environment.close()


async def test_only_database_files_below_the_root_are_read(tmp_path: Path) -> None:
    directory = tmp_path / "root" / "shop"
    directory.mkdir(parents=True)
    for place in (directory / "shop.sqlite", tmp_path / "out.sqlite"):
        connection = sqlite3.connect(place)
        # The journal is another file, which a read-only connection cannot create.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(SCRIPT)
        connection.close()
    options = {"root": str(tmp_path / "root"), "database_path": "{database}/{database}.sqlite"}
    task = _task(question="?", database="shop", query="SELECT count(*) FROM t")
    assert (await _final(task, "SELECT 3", **options)).reward == 1.0
    for name in ("../..", "none", "/etc/passwd", str(tmp_path / "out")):
        outside = _task(question="?", database=name, query="SELECT 1")
        with pytest.raises(ValueError, match=r"data\.database: got"):
            await _final(outside, "SELECT 1", **options)
    os.symlink(tmp_path / "out.sqlite", tmp_path / "root" / "link")
    outside = _task(question="?", database="link", query="SELECT 1")
    with pytest.raises(ValueError, match=r"data\.database: got"):
        await _final(outside, "SELECT 1", root=str(tmp_path / "root"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"query": "SELECT absent FROM t"}, "no such column"),
        ({"schema": "CREATE TABLE"}, "incomplete input"),
        ({"query": ENDLESS + "SELECT x FROM r"}, "more than 1000 rows"),
    ],
)
async def test_a_task_whose_query_or_schema_fails_is_refused(
    change: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=f"sql: task t: .*{error}.*correct its data"):
        await _final(_task(**{**GIVEN, **change}), "SELECT 1", limit_s=0.5)


@pytest.mark.parametrize("level", range(1, LEVELS + 1))
async def test_only_the_true_query_answers_a_generated_question(
    execution: Execution, level: int
) -> None:
    texts = set()
    for seed in range(12):
        made = make_question(seed, level=level)
        assert made == make_question(seed, level=level)
        texts.add(made.question)
        task = Task(task_id="t", environment="sql", seed=seed, data={})
        assert (await _final(task, made.query, level=level)).reward == 1.0
        assert (await _final(task, "SELECT 100", level=level)).reward == 0.0
    assert len(texts) > 3


def test_data_are_checked_before_they_are_played() -> None:
    check = DataCheck(data_schema_of(SqlEnvironment(SqlOptions())))
    assert check.problem({}) == check.problem(GIVEN) == ""
    assert check.problem({"query": "SELECT 1"}) == "data: question missing; give it"
    assert "schema missing" in check.problem({"question": "?", "query": "SELECT 1"})
    assert "query missing" in check.problem({"question": "?", "database": "a"})
    assert "unknown fields gold" in check.problem({**GIVEN, "gold": 1})
    assert check.problem({"question": "?", "schema": "", "rows": [[1, None, "a"]]}) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 4}, "options.level: got 4, expected at most 3"),
        ({"database_path": "x.db"}, "expected a text with {database}"),
        ({"max_queries": -1}, "options.max_queries: got -1, expected 0 or more"),
        ({"limit_s": 0}, "options.limit_s: got 0, expected more than 0"),
        ({"executable_bonus": 1.0}, "options.executable_bonus: got 1.0, expected less than 1"),
        ({"rows": 1}, "options.rows: unknown key; did you mean 'max_rows'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadEnvironmentOptions, match=message):
        resolve("sql", options)
