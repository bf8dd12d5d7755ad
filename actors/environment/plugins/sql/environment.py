"""Questions about an SQLite database, answered by a query and scored by the query's result.

The data of a task:
- `question`
- `schema`, an SQL script that creates the database; or `database`, the name of a database below the
  option `root`
- `query`, a query that finds the true rows; or `rows`, the true rows
Without data, the task's seed determines all three (`generated`).

In a turn, the policy calls the tool `run_sql` or gives its answer, which ends the task. The answer
is a query: the last fenced block of the visible text or, without a block, the whole visible text.
With `max_queries` 0 there is no tool.

Reward: 1 if the answer finds the true rows (see `is_correct`), plus `executable_bonus` if the query
runs, right or wrong. The answer has the components `correct` and `executable`, 0 or 1 each, and
`num_queries`, the number of the tool's queries. A turn with a call that cannot be read is
malformed: its component `malformed` is minus `malformed_penalty`. More than `max_malformed` such
turns in a row end the task.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from actors.environment.plugins.code_search.servers import NoAnswer, ServerThreads
from actors.environment.plugins.sql.generated import LEVELS, MAX_TRUE_ROWS, SqlData, make_question
from actors.environment.plugins.sql.server import MAX_QUERY_BYTES
from actors.environment.protocol import (
    Action,
    Message,
    Observation,
    Role,
    StepResult,
    ToolCall,
    ToolSchema,
)
from actors.environment.tool_calls import visible_text
from actors.environment.tool_turns import ToolFailed, ToolTurns, TurnOptions
from actors.limits import STRICT, Natural, Positive
from actors.options import DataPath, holding
from actors.types import Task

PROMPT = "{schema}\n{question}\n{instruction}"
ANSWER_AT_ONCE = "Answer with one SQLite query."
ANSWER_AFTER_LOOKING = "Look with run_sql, then answer with one SQLite query."
NO_QUERIES_LEFT = "no queries are left; answer"
RUN_SQL = ToolSchema(
    name="run_sql",
    description="Run a SELECT on the database.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
)

MAX_RESULT_BYTES = 2**20
# Extra time before a process is killed: a query stops itself at its limit, but not during a single
# step of SQLite.
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlOptions(TurnOptions):
    """Options of `sql`: the databases, the tool and the reward."""

    __pydantic_config__ = STRICT

    root: DataPath | None = None
    """Directory of the tasks' databases, relative to the working directory; null: the working
    directory itself."""
    database_path: Annotated[str, holding("{database}")] = "{database}"
    """Path of a task's database below `root`, such as {database}/{database}.sqlite."""
    level: Annotated[int, Ge(1), Le(LEVELS)] = 1
    """Difficulty of generated questions."""
    max_queries: Natural = 5
    """Maximum number of queries in an episode; 0: there is no tool."""
    sample_rows: Natural = 0
    """Number of rows of each table that the prompt shows."""
    max_rows: Positive = 20
    """Maximum number of rows in the tool's answer."""
    max_chars: Positive = 2_000
    """Maximum number of characters in the tool's answer."""
    limit_s: Annotated[float, Gt(0), Le(30)] = 2.0
    """Seconds that a query may take."""
    executable_bonus: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Reward for an answer that runs, right or wrong."""


class BadDatabase(ValueError):
    """Raised if a task's database cannot be used; the text says why."""


class QueryFailed(ToolFailed):
    """Raised if a query fails; the text is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a query. Rows beyond the limits are left out."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    is_cut: bool
    """Whether rows beyond the limits were left out."""


class Execution:
    """Sandboxed processes that run queries for all episodes of the current process.

    Get an Execution by `Execution.shared()`, and `close` it at the end. Queries do not block the
    event loop, because threads wait for the sandboxed processes. A sandboxed process that does not
    answer in time is killed, and the next query starts another.
    """

    _current: ClassVar[Execution | None] = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._num_users = 0
        self._servers = ServerThreads("sql.server")
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="sql")

    @classmethod
    def shared(cls) -> Execution:
        with cls._lock:
            # A forked child has its parent's memory, but none of its threads.
            if cls._current is None or cls._current._pid != os.getpid():
                cls._current = cls()
            cls._current._num_users += 1
            return cls._current

    def close(self) -> None:
        """Release the processes. If no other environment uses them, end them before returning."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            if type(self)._current is self:
                type(self)._current = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._servers.close()

    async def query(
        self, database: Mapping[str, str], query: str, *, max_rows: int, limit_s: float
    ) -> Result:
        """Run a query on a database, and return the rows that it finds.

        database: has `script`, the SQL that creates the database, or `path`, the database's file.
        Raises: QueryFailed, BadDatabase; ServerFailed if a confined process cannot be started.
        """
        request = {"query": query, "max_rows": max_rows}
        answer = await self._ask(database, request, limit_s=limit_s)
        return Result(columns=answer["columns"], rows=answer["rows"], is_cut=answer["is_cut"])

    async def schema(self, database: Mapping[str, str], *, sample_rows: int, limit_s: float) -> str:
        """Return the CREATE statement of each table and view, followed by its first rows.

        The rows are SQL comments.

        Raises: the same errors as `query`.
        """
        request = {"query": None, "sample_rows": sample_rows, "max_rows": max(1, sample_rows)}
        answer = await self._ask(database, request, limit_s=limit_s)
        lines = []
        for table in answer["tables"]:
            lines += [f"{table['sql']};", *(f"-- {_format_row(row)}" for row in table["rows"])]
        return "\n".join(lines)

    async def _ask(
        self, database: Mapping[str, str], asked: Mapping[str, Any], *, limit_s: float
    ) -> dict[str, Any]:
        request = {**database, **asked, "max_bytes": MAX_RESULT_BYTES, "limit_s": limit_s}
        ask = partial(self._servers.ask, request, limit_s=limit_s + _GRACE_S)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except NoAnswer:
            raise QueryFailed("the query took too long or too much memory") from None
        if "error" not in answer:
            return answer
        if answer["is_database"]:
            raise BadDatabase(answer["error"])
        raise QueryFailed(answer["error"])


class SqlEnvironment:
    """An environment that asks one question about a database."""

    data_schema = SqlData

    def __init__(self, options: SqlOptions) -> None:
        self._options = options
        self._turns = ToolTurns(
            self._call,
            at_most=options.max_malformed,
            penalty=options.malformed_penalty,
            max_calls=options.max_queries,
            no_calls_left=NO_QUERIES_LEFT,
            max_chars=options.max_chars,
        )
        self._execution: Execution | None = None
        self._database: Mapping[str, str] = {}
        self._truth: Sequence[Sequence[Any]] = ()
        self._is_ordered = False

    async def reset(self, task: Task) -> Observation:
        level = self._options.level
        data = SqlData(**task.data) if task.data else make_question(task.seed, level=level)
        self._turns.begin_episode()
        self._database = self._database_of(data)
        if self._execution is None:
            self._execution = Execution.shared()
        try:
            schema = await self._execution.schema(
                self._database, sample_rows=self._options.sample_rows, limit_s=self._options.limit_s
            )
            self._truth = data.rows if "rows" in task.data else await self._found(data.query)
        except (BadDatabase, QueryFailed) as error:
            raise ValueError(f"sql: task {task.task_id}: {error}; correct its data") from error
        is_ordered = data.is_ordered
        self._is_ordered = orders_rows(data.query) if is_ordered is None else is_ordered
        prompt = PROMPT.format(
            schema=schema,
            question=data.question,
            instruction=ANSWER_AFTER_LOOKING if self._options.max_queries else ANSWER_AT_ONCE,
        )
        return Observation(
            messages=(Message(role=Role.USER, content=prompt),),
            tools=(RUN_SQL,) if self._options.max_queries else (),
            best_return=self._options.executable_bonus + (not is_empty(self._truth)),
        )

    async def step(self, action: Action) -> StepResult:
        if action.calls:
            return await self._turns.result_of(action.calls)
        return await self._graded(query_of(visible_text(action.text)))

    async def close(self) -> None:
        if self._execution is not None:
            execution, self._execution = self._execution, None
            await asyncio.to_thread(execution.close)

    def _database_of(self, data: SqlData) -> dict[str, str]:
        """Return a task's database in the form that `Execution.query` takes: a script or a path."""
        if not data.database:
            return {"script": data.schema}
        root = Path(self._options.root or ".").expanduser().resolve()
        template = self._options.database_path
        path = (root / template.replace("{database}", data.database)).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            raise ValueError(
                f"sql: data.database: got {data.database!r}, which names no file below {root} "
                f"by database_path={template!r}; expected a name that does"
            )
        return {"path": str(path)}

    async def _found(self, query: str) -> Sequence[Sequence[Any]]:
        """Return the rows that a task's true query finds. Raises: QueryFailed, BadDatabase."""
        result = await self._run(query, max_rows=MAX_TRUE_ROWS)
        if result.is_cut:
            raise QueryFailed(
                f"data.query: got more than {MAX_TRUE_ROWS} rows or 1 MiB, expected less; "
                "correct the task's query"
            )
        return result.rows

    async def _run(self, query: str, *, max_rows: int) -> Result:
        assert self._execution is not None
        if len(query.encode(errors="replace")) > MAX_QUERY_BYTES:
            raise QueryFailed("the query is too long")
        return await self._execution.query(
            self._database, query, max_rows=max_rows, limit_s=self._options.limit_s
        )

    async def _graded(self, query: str) -> StepResult:
        correct, executable, answer = 0.0, 0.0, "no result"
        try:
            found = await self._run(query, max_rows=MAX_TRUE_ROWS)
        except QueryFailed:
            # The answer is at fault: the database worked at the reset.
            pass
        else:
            executable = 1.0
            answer = shown_result(found.rows, is_ordered=self._is_ordered)
            is_right = is_correct(found.rows, self._truth, is_ordered=self._is_ordered)
            correct = float(is_right and not found.is_cut)
        return StepResult(
            reward=correct + self._options.executable_bonus * executable,
            reward_components={
                "correct": correct,
                "executable": executable,
                "num_queries": float(self._turns.num_calls),
            },
            terminated=True,
            answer=answer,
        )

    async def _call(self, call: ToolCall) -> str:
        result = await self._run(call.arguments["query"], max_rows=self._options.max_rows)
        return _format_result(result)


def _format_result(result: Result) -> str:
    lines = [" | ".join(result.columns), *map(_format_row, result.rows)]
    if result.is_cut:
        lines.append("(more rows)")
    return "\n".join(lines)


def _format_row(row: Sequence[Any]) -> str:
    return " | ".join(
        "NULL" if cell is None else cell if isinstance(cell, str) else json.dumps(cell)
        for cell in row
    )


# Compare two results of a query.
#
# These are the choices: rows are compared as a multiset, or in their order if the true query orders
# them at its top level. The names of columns do not matter, their number and order do. A whole
# number and a float of the same value are equal; floats are equal if 12 significant digits are. A
# text never equals a number, upper and lower case differ, NULL equals only NULL. An empty truth,
# with no rows or only NULLs, cannot distinguish right from wrong queries: no answer is correct
# then.
Row = Sequence[Any]
"""Values of a row: None, numbers, strings, and {"blob": hexadecimal}."""
_DIGITS = 12
_MAX_ANSWER_CHARS = 2_000
# Comments, strings and quoted names, which may contain anything.
_OPAQUE = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]", re.DOTALL
)
# The word after the fence is a language if it ends the line, or if it is sql.
_FENCE = re.compile(r"```(?:sql\b|[\w+-]*[ \t]*\n)?(.*?)```", re.DOTALL | re.IGNORECASE)


def is_correct(found: Sequence[Row], truth: Sequence[Row], *, is_ordered: bool) -> bool:
    """Return whether a result equals the true result; False if the true result is empty.

    Example: is_correct([[1.0], [2]], [[2], [1]], is_ordered=False) -> True
    """
    return not is_empty(truth) and result_key(found, is_ordered=is_ordered) == result_key(
        truth, is_ordered=is_ordered
    )


def is_empty(rows: Sequence[Row]) -> bool:
    """Return whether there are no rows, or only NULLs."""
    return all(cell is None for row in rows for cell in row)


def result_key(rows: Sequence[Row], *, is_ordered: bool) -> tuple[Any, ...]:
    """Return a key of a result's rows; two results are equal if their keys are equal."""
    keys = [tuple(_cell_key(cell) for cell in row) for row in rows]
    return tuple(keys) if is_ordered else tuple(sorted(Counter(keys).items()))


def shown_result(rows: Sequence[Row], *, is_ordered: bool) -> str:
    """Return a result as a text for majority votes; equal results give equal texts.

    A long text is cut.
    """
    keys = [[text for _, text in map(_cell_key, row)] for row in rows]
    return json.dumps(keys if is_ordered else sorted(keys))[:_MAX_ANSWER_CHARS]


def _cell_key(cell: Any) -> tuple[str, str]:
    if cell is None:
        return ("null", "")
    if isinstance(cell, dict):
        return ("blob", str(cell["blob"]))
    if isinstance(cell, str):
        return ("text", cell)
    return ("number", _number_key(cell))


def _number_key(number: float) -> str:
    if isinstance(number, float) and math.isfinite(number):
        exact = number.is_integer() and abs(number) < 2**53
        rounded = number if exact else float(f"{number:.{_DIGITS}g}")
        number = int(rounded) if rounded.is_integer() else rounded
    return repr(number)


def orders_rows(query: str) -> bool:
    """Return whether a query has ORDER BY at its top level.

    Example: orders_rows("SELECT a FROM t ORDER BY a") -> True;
    orders_rows("SELECT * FROM (SELECT a FROM t ORDER BY a)") -> False
    """
    depth, top = 0, []
    for character in _OPAQUE.sub(" ", query):
        depth += (character == "(") - (character == ")")
        top.append(character if depth == 0 else " ")
    return re.search(r"\border\s+by\b", "".join(top), re.IGNORECASE) is not None


def query_of(text: str) -> str:
    """Return the last fenced block of an answer, else the whole answer, without outer white space.

    Example: query_of("So:\\n```sql\\nSELECT 1\\n```") -> "SELECT 1"
    """
    fenced = _FENCE.findall(text)
    return (fenced[-1] if fenced else text).strip()
