"""Make a small database and a question about it from a seed, without side effects.

Questions of level 1 ask for one number about a whole table. Level 2 adds questions that ask for
certain rows, for sorted rows, or for one number for each kind of item (GROUP BY). Level 3 adds
questions about two joined tables. Every question has exactly one right answer, which is not empty.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import MaxLen, MinLen

from actors.limits import strict_unless_empty

LEVELS = 3
_NAMES = ("ash", "bay", "elm", "fig", "ivy", "oak", "pine", "rose", "sage", "yew")
_KINDS = ("red", "green", "blue")
_AGGREGATES = {"highest": "max", "lowest": "min", "total": "sum"}
_MOST = 99


MAX_SCRIPT_CHARS = 1_000_000
MAX_TRUE_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlData:
    """A question about a database, as the data of a task for the environment `sql`.

    If a task has no data, the environment makes the question from the task's seed.
    """

    __pydantic_config__ = strict_unless_empty(
        allOf=[
            {"required": ["question"]},
            {"if": {"required": ["database"]}, "else": {"required": ["schema"]}},
            {"if": {"required": ["rows"]}, "else": {"required": ["query"]}},
        ],
    )

    question: Annotated[str, MinLen(1), MaxLen(20_000)] = ""
    """The question about the database."""
    schema: Annotated[str, MaxLen(MAX_SCRIPT_CHARS)] = ""
    """SQL that makes the database: CREATE TABLE, INSERT."""
    database: Annotated[str, MinLen(1)] = ""
    """Instead of schema: the name that replaces {database} in the option database_path."""
    query: Annotated[str, MinLen(1)] = ""
    """A query that answers the question."""
    rows: Annotated[Sequence[Sequence[float | str | None]], MaxLen(MAX_TRUE_ROWS)] = ()
    """Instead of query: the rows that are the answer."""
    is_ordered: bool | None = None
    """Whether rows in another order are wrong; null: they are wrong if query has an ORDER BY at its
    top level."""


_Items = Sequence[tuple[str, str, int, str]]
"""Name, kind, price and city of each item of a shop; names and prices are unique."""


def make_question(seed: int, *, level: int = 1) -> SqlData:
    """Make a database and a question about it, both determined by the seed.

    Args: level: from 1 to LEVELS; each level includes the questions of the lower levels.
    """
    dice = random.Random(seed)
    names = dice.sample(_NAMES, dice.randint(4, 8))
    prices = dice.sample(range(1, _MOST + 1), len(names))
    kinds = [*_KINDS, *(dice.choice(_KINDS) for _ in names)][: len(names)]
    cities = [dice.choice(("Rome", "Oslo")) for _ in names]
    items = list(zip(names, kinds, prices, cities, strict=True))
    makers = [maker for each in _MAKERS[:level] for maker in each]
    text, query = dice.choice(makers)(dice, items)
    return SqlData(question=text, schema=_script(items, with_stores=level > 2), query=query)


def _script(items: _Items, *, with_stores: bool) -> str:
    """Return the SQL that makes the database; the table `stores`, if any, has the items' cities."""
    rows = ", ".join(f"('{name}', '{kind}', {price})" for name, kind, price, _ in items)
    script = (
        "CREATE TABLE items (name TEXT, kind TEXT, price INTEGER);\n"
        f"INSERT INTO items VALUES {rows};\n"
    )
    if with_stores:
        stores = ", ".join(f"('{city}', '{name}')" for name, _, _, city in items)
        script += (
            f"CREATE TABLE stores (city TEXT, item TEXT);\nINSERT INTO stores VALUES {stores};\n"
        )
    return script


_Made = tuple[str, str]


def _aggregate(dice: random.Random, _items: _Items) -> _Made:
    word = dice.choice(list(_AGGREGATES))
    return f"What is the {word} price?", f"SELECT {_AGGREGATES[word]}(price) FROM items"


def _count(_dice: random.Random, _items: _Items) -> _Made:
    return "How many items are there?", "SELECT count(*) FROM items"


def _of_kind(dice: random.Random, items: _Items) -> _Made:
    kind = dice.choice([kind for _, kind, _, _ in items])
    return f"Which items are {kind}?", f"SELECT name FROM items WHERE kind = '{kind}'"


def _above(dice: random.Random, items: _Items) -> _Made:
    bound = dice.choice(sorted(price for _, _, price, _ in items)[:-1])
    return (
        f"Which items have a price above {bound}?",
        f"SELECT name FROM items WHERE price > {bound}",
    )


def _in_order(dice: random.Random, _items: _Items) -> _Made:
    word, direction = dice.choice((("lowest", ""), ("highest", " DESC")))
    return (
        f"List the names of the items, the {word} price first.",
        f"SELECT name FROM items ORDER BY price{direction}",
    )


def _by_kind(dice: random.Random, _items: _Items) -> _Made:
    word = dice.choice(list(_AGGREGATES))
    return (
        f"Give each kind with its {word} price.",
        f"SELECT kind, {_AGGREGATES[word]}(price) FROM items GROUP BY kind",
    )


def _in_city(dice: random.Random, items: _Items) -> _Made:
    city = dice.choice([city for _, _, _, city in items])
    word = dice.choice(list(_AGGREGATES))
    return (
        f"What is the {word} price of the items in the stores of {city}?",
        f"SELECT {_AGGREGATES[word]}(price) FROM items JOIN stores ON item = name "
        f"WHERE city = '{city}'",
    )


_MAKERS: Sequence[Sequence[Callable[[random.Random, _Items], _Made]]] = (
    (_aggregate, _count),
    (_of_kind, _above, _in_order, _by_kind),
    (_in_city,),
)
