"""The sources of training tasks and of held-out tasks; readers and writers of task files.

A source has the same task at an index in every process and after every restart. Training tasks and
held-out tasks never overlap: generated tasks draw their seeds from two disjoint ranges, and a
file's tasks are split by a hash of their ids. A task file is JSON lines or Parquet. A row has
`task_id` and `environment` (text), `seed` (a whole number, 0 or more) and `data` (an object; JSON
text in a Parquet column).
"""

from __future__ import annotations

import gzip
import json
import os
import random
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain
from operator import eq
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, overload

import pyarrow as pa
import pyarrow.parquet as pq

from actors.environment.settings import MIXTURE_PERIOD
from actors.environment.task_data import DataCheck, report_nulls
from actors.file_targets import regular_target
from actors.types import Task
from actors.user_code import json_type_of

# Seeds are below 2^31, so that every generator accepts them (some take 32 bits, some signed).
_SEEDS_PER_RANGE = 2**30
_KEPT_EPOCHS = 32
# Group k plays task k. If it plays another task instead, a number is added to the task's index:
# SLOTS for each replacement (below 2^16), OTHER_TASK for another task of the same source, and
# OTHER_SOURCE for the next sources of a mixture.
SLOTS = 2**32
OTHER_TASK = SLOTS * 2**16
OTHER_SOURCE = SLOTS * 2**20
_FIELDS = ("task_id", "environment", "seed", "data")
_TEXT = pa.string()
_SCHEMA = pa.schema({"task_id": _TEXT, "environment": _TEXT, "seed": pa.int64(), "data": _TEXT})


class TaskSource(Protocol):
    """An unlimited sequence of training tasks, and held-out tasks that training never sees."""

    def task(self, index: int) -> Task:
        """Return the training task at an index, which is 0 or more."""
        ...

    def held_out(self, count: int) -> list[Task]:
        """Return the first `count` evaluation tasks. Raises: ValueError if there are fewer."""
        ...

    def comes_again(self, task: Task) -> bool:
        """Return whether a task is from a fixed list and so is played again in every epoch."""
        ...

    def find(self, task_id: str) -> Task | None:
        """Return the training task with an id; None if it is unknown or was made from a seed."""
        ...


def derived_seed(*parts: str | int) -> int:
    """Return a seed in [0, 2^30) that is a hash of the parts, the same on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) % _SEEDS_PER_RANGE


class GeneratedTasks:
    """Tasks of an environment that needs only a seed to make a game.

    Training seeds are in [0, 2^30), held-out seeds in [2^30, 2^31). The held-out tasks do not
    depend on the run's seed, so that two runs are evaluated on the same tasks.
    """

    def __init__(self, environment: str, *, run_seed: int) -> None:
        self._environment = environment
        self._run_seed = run_seed

    def task(self, index: int) -> Task:
        _check_index(index)
        return self._make("train", index, derived_seed("train", self._run_seed, index))

    def held_out(self, count: int) -> list[Task]:
        return [
            self._make("held-out", index, _SEEDS_PER_RANGE + derived_seed("held-out", index))
            for index in range(count)
        ]

    def comes_again(self, task: Task) -> bool:
        return False

    def find(self, task_id: str) -> Task | None:
        return None

    def _make(self, split: str, index: int, seed: int) -> Task:
        return Task(
            task_id=f"{self._environment}-{split}-{index}",
            environment=self._environment,
            seed=seed,
            data={},
        )


class PackedTasks(Sequence[Task]):
    """A list of tasks, stored as JSON in one buffer; each access makes a new Task object.

    A list of Task objects would slow down the garbage collector: 100,000 tasks would consist of
    about a million Python objects, and each full collection would visit them all.
    Invariant: the buffer only grows, so that selections (`selected`) can share it.
    """

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._buffer = bytearray()
        # For each task three positions in the buffer: start, end of the id, end of the data.
        self._places = array("Q")
        self._seeds = array("Q")
        self._environments: dict[str, int] = {}
        self._environment_of = array("L")
        self._order: array[int] | range = range(0)
        for task in tasks:
            self.append(task)

    def append(self, task: Task) -> None:
        """Add a task to the end of the list, which must not be the result of `selected`."""
        assert isinstance(self._order, range)
        start = len(self._buffer)
        self._buffer += task.task_id.encode("utf-8", "surrogatepass")
        id_end = len(self._buffer)
        self._buffer += _json(dict(task.data)).encode("utf-8", "surrogatepass")
        self._places.extend((start, id_end, len(self._buffer)))
        self._seeds.append(task.seed)
        number = self._environments.setdefault(task.environment, len(self._environments))
        self._environment_of.append(number)
        self._order = range(len(self._seeds))

    @property
    def environments(self) -> frozenset[str]:
        """Return the names of the environments of all tasks in the buffer."""
        return frozenset(self._environments)

    def task_id(self, position: int) -> str:
        """Return a task's id, without making the task."""
        number = self._order[position]
        start, id_end = self._places[3 * number : 3 * number + 2]
        return self._buffer[start:id_end].decode("utf-8", "surrogatepass")

    def contents(self) -> Iterator[bytes]:
        """Yield the data of each task as JSON."""
        for number in self._order:
            _, id_end, end = self._places[3 * number : 3 * number + 3]
            yield bytes(self._buffer[id_end:end])

    def selected(self, positions: Iterable[int]) -> PackedTasks:
        """Return the tasks at some positions, in the order of the positions."""
        chosen = copy(self)
        chosen._order = array("L", [self._order[position] for position in positions])
        return chosen

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> PackedTasks: ...
    def __getitem__(self, index: int | slice) -> Task | PackedTasks:
        if isinstance(index, slice):
            return self.selected(range(len(self))[index])
        number = self._order[index]
        _, id_end, end = self._places[3 * number : 3 * number + 3]
        return Task(
            task_id=self.task_id(index),
            environment=list(self._environments)[self._environment_of[number]],
            seed=self._seeds[number],
            data=json.loads(self._buffer[id_end:end].decode("utf-8", "surrogatepass")),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class FileTasks:
    """A fixed list of tasks, repeated epoch after epoch, each epoch in its own seeded order.

    The `num_held_out` tasks with the lowest hashes of their ids are kept for evaluation. They
    depend neither on the run's seed nor on the order of the tasks.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        run_seed: int,
        num_held_out: int = 0,
        held_out: Sequence[Task] | None = None,
    ) -> None:
        """Split the tasks: all are trained except `num_held_out` of them, kept for evaluation.

        Args: held_out: tasks from which the `num_held_out` tasks are taken instead. All of `tasks`
        are then trained.
        Raises: ValueError if there are too few tasks.
        """
        if held_out is None and not 0 <= num_held_out < len(tasks):
            raise ValueError(
                f"got {num_held_out} held-out tasks of {len(tasks)} tasks; expected at least one "
                "task left for training"
            )
        if held_out is not None and num_held_out > len(held_out):
            raise ValueError(
                f"got {num_held_out} held-out tasks of a split of {len(held_out)}; expected at "
                f"most {len(held_out)}"
            )
        ordered = by_hash(tasks)
        kept = ordered if held_out is None else by_hash(held_out)
        self._held_out = kept[:num_held_out]
        self._train = ordered[num_held_out if held_out is None else 0 :]
        self._run_seed = run_seed
        # The first choices of groups, and each round of replacements, have epochs of their own.
        self._order = lru_cache(maxsize=_KEPT_EPOCHS)(self._shuffled)

    @property
    def digest(self) -> str:
        """Return a hexadecimal digest that is equal for equal tasks in any order."""
        hashed = blake2b(digest_size=16)
        for task in chain(self._held_out, self._train):
            hashed.update(_json(_row(task)).encode() + b"\n")
        return hashed.hexdigest()

    @property
    def num_trained_held_out(self) -> int:
        """Return how many different held-out tasks have the same data as a training task."""
        return len(set(self._held_out.contents()).intersection(self._train.contents()))

    def task(self, index: int) -> Task:
        _check_index(index)
        epoch, position = divmod(index, len(self._train))
        return self._train[self._order(epoch)[position]]

    def comes_again(self, task: Task) -> bool:
        return True

    def find(self, task_id: str) -> Task | None:
        position = self._position_by_id.get(task_id)
        return None if position is None else self._train[position]

    @cached_property
    def _position_by_id(self) -> dict[str, int]:
        return {self._train.task_id(position): position for position in range(len(self._train))}

    def _shuffled(self, epoch: int) -> array[int]:
        order = list(range(len(self._train)))
        random.Random(derived_seed("epoch", self._run_seed, epoch)).shuffle(order)
        return array("L", order)

    def held_out(self, count: int) -> list[Task]:
        if count > len(self._held_out):
            raise ValueError(
                f"got a request for {count} held-out tasks, expected at most "
                f"{len(self._held_out)}; hold out more, or evaluate on fewer"
            )
        return list(self._held_out[:count])


class MixedTasks:
    """Tasks of several sources, mixed evenly in proportion to the sources' weights.

    A task's environment is the name of its source. Task k has the same source in every process and
    after every restart. Of n consecutive tasks, n w / W are from a source of weight w, give or take
    two; W is the sum of all weights. The tasks of a source keep their order, without gaps.
    """

    def __init__(self, sources: Mapping[str, TaskSource], weights: Mapping[str, float]) -> None:
        """Combine sources by their weights, each above 0."""
        self._sources = dict(sources)
        self._counts = apportioned(weights, total=MIXTURE_PERIOD)
        self._pattern = spread(self._counts)

    @property
    def digest(self) -> str:
        """Return a digest of the sources that are `FileTasks`; empty if there are none."""
        found = {
            name: each.digest for name, each in self._sources.items() if isinstance(each, FileTasks)
        }
        return blake2b(_json(found).encode(), digest_size=16).hexdigest() if found else ""

    def task(self, index: int) -> Task:
        _check_index(index)
        other, slot = index // SLOTS, index % SLOTS
        period, position = divmod(slot + index // OTHER_SOURCE, MIXTURE_PERIOD)
        name, rank = self._pattern[position]
        own = period * self._counts[name] + rank + other * SLOTS
        return _under(name, self._sources[name].task(own))

    def comes_again(self, task: Task) -> bool:
        return self._sources[task.environment].comes_again(task)

    def find(self, task_id: str) -> Task | None:
        name, _, own = task_id.partition(":")
        found = self._sources[name].find(own) if name in self._sources else None
        return None if found is None else _under(name, found)

    def held_out(self, count: int) -> list[Task]:
        """Return `count` evaluation tasks of each source.

        Raises: ValueError if a source has fewer.
        """
        return [task for name in self._sources for task in self.held_out_of(name, count)]

    def held_out_of(self, name: str, count: int) -> list[Task]:
        """Return a source's first `count` evaluation tasks. Raises: ValueError if it has fewer."""
        return [_under(name, task) for task in self._sources[name].held_out(count)]


def _under(name: str, task: Task) -> Task:
    """Rename a source's task, because two sources may use the same task id."""
    return replace(task, task_id=f"{name}:{task.task_id}", environment=name)


def apportioned(weights: Mapping[str, float], *, total: int) -> dict[str, int]:
    """Divide a total in proportion to weights; each share is a whole number of at least 1.

    The shares are rounded by the largest remainders.
    Example: apportioned({"a": 1, "b": 2}, total=10) -> {"a": 3, "b": 7}
    """
    assert len(weights) <= total
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    counts = {name: max(1, int(share)) for name, share in exact.items()}
    # Sorting is stable, so that the first of equal names is chosen.
    order = sorted(exact, key=lambda name: counts[name] - exact[name])
    while (left := total - sum(counts.values())) > 0:
        for name in order[:left]:
            counts[name] += 1
    while sum(counts.values()) > total:
        larger = [name for name in order if counts[name] > 1]
        counts[max(larger, key=lambda name: counts[name] - exact[name])] -= 1
    return counts


def spread(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return a list that has each name as often as its count, evenly spread.

    Each entry is a name and the number of earlier entries of this name. Among the first j entries,
    a name of count c occurs j c / total times, give or take one.
    Example: spread({"a": 1, "b": 2}) -> [("b", 0), ("a", 0), ("b", 1)]
    """
    # R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980: the delay of a
    # name at entry j is j c / total minus the number of its earlier entries. With n names, let
    # d = 1 / (2 n - 2). Entry j is one of the names whose delay is at least d: the name whose delay
    # would otherwise be the first to exceed 1 - d.
    total, parts = sum(counts.values()), max(2 * len(counts) - 2, 1)
    taken = dict.fromkeys(counts, 0)
    order = []
    for place in range(1, total + 1):
        may = [
            name
            for name, count in counts.items()
            if (count * place - taken[name] * total) * parts >= total
        ]
        name = min(may, key=lambda name: (taken[name] + 1 - 1 / parts) / counts[name])
        order.append((name, taken[name]))
        taken[name] += 1
    return order


def by_hash(tasks: Sequence[Task]) -> PackedTasks:
    """Return the tasks in an order that depends only on their ids."""
    packed = tasks if isinstance(tasks, PackedTasks) else PackedTasks(tasks)

    def key(position: int) -> tuple[int, str]:
        task_id = packed.task_id(position)
        return derived_seed(task_id), task_id

    return packed.selected(sorted(range(len(packed)), key=key))


def _check_index(index: int) -> None:
    if index < 0:
        raise ValueError(f"task index: got {index}, expected 0 or more")


class BadTaskFile(ValueError):
    """Raised if a task file cannot be used; the message names the row and the remedy."""


def read_tasks(path: str | Path, *, checks: Mapping[str, DataCheck] | None = None) -> list[Task]:
    """Return the tasks of a file, whose suffix is .jsonl or .parquet.

    Args: checks: the check of the tasks' data for each environment.
    Raises: BadTaskFile for an unknown suffix, an unreadable or empty file, a row that is not a
    task or has data that the environment refuses, or a task id that occurs twice.
    """
    path = Path(path)
    _check_suffix(path)
    try:
        rows = list(_parquet_rows(path) if path.suffix.lower() == ".parquet" else json_rows(path))
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise BadTaskFile(f"task file {path}: cannot be read: {error}") from error
    first_found: dict[str, str] = {}
    tasks = []
    for where, row in rows:
        task = _task(row, where=where)
        if task.task_id in first_found:
            raise BadTaskFile(
                f"{where}: task_id {task.task_id!r} is already in {first_found[task.task_id]}; "
                "expected unique ids; rename or remove one"
            )
        first_found[task.task_id] = where
        check = (checks or {}).get(task.environment)
        if check is not None and (problem := check.problem(task.data)):
            raise BadTaskFile(f"{where}: task {task.task_id!r}: {problem}")
        tasks.append(task)
    if not tasks:
        raise BadTaskFile(f"task file {path}: got no tasks, expected one or more")
    for name, check in (checks or {}).items():
        own = [task for task in tasks if task.environment == name]
        report_nulls(own, check, f"task file {path}")
    return tasks


def write_tasks(path: str | Path, tasks: Sequence[Task]) -> None:
    """Write a task file in the format of its suffix. No reader ever sees a part of the new file.

    Raises: BadTaskFile for an unknown suffix, duplicate ids or no tasks; TypeError or
    ValueError for data that are not JSON; OSError if the file cannot be written.
    """
    path = Path(path)
    _check_suffix(path)
    if len({task.task_id for task in tasks}) != len(tasks):
        raise BadTaskFile(f"task file {path}: got duplicate task ids, expected unique ones")
    if not tasks:
        raise BadTaskFile(f"task file {path}: got no tasks to write, expected one or more")
    target = regular_target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            if path.suffix.lower() == ".parquet":
                cells = [row | {"data": _json(row["data"])} for row in map(_row, tasks)]
                pq.write_table(pa.Table.from_pylist(cells, schema=_SCHEMA), file)
            else:
                file.writelines((_json(_row(task)) + "\n").encode() for task in tasks)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, target)
    finally:
        Path(aside).unlink(missing_ok=True)  # It exists only if the writing failed.


def _check_suffix(path: Path) -> None:
    if path.suffix.lower() not in (".jsonl", ".parquet"):
        raise BadTaskFile(
            f"task file {path}: got suffix {path.suffix!r}, expected .jsonl or .parquet; rename it"
        )


def open_text(path: Path, *, newline: str | None = None) -> IO[str]:
    """Open and return a text file, compressed by gzip if its name ends in .gz."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each value of a JSONL file with its location. Raises: BadTaskFile; OSError."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            yield where, _parse_json(line, where=where)


def json_list(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each value of the list in a JSON file, with its location.

    A file with a single object counts as a list of one.
    Raises: BadTaskFile if the file has other content; OSError or ValueError if it cannot be read.
    """
    with open_text(path) as file:
        listed = json.loads(file.read(), object_pairs_hook=_as_dict)
    for number, row in enumerate(listed if isinstance(listed, list) else [listed], start=1):
        where = f"{path}, row {number}"
        _check_keys(row, where=where)
        yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(pq.read_table(path).to_pylist(), start=1):
        where = f"{path}, row {number}"
        if isinstance(row.get("data"), str):
            row["data"] = _parse_json(row["data"], where=where)
        yield where, row


def _parse_json(text: str, *, where: str) -> Any:
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_as_dict)
    except (ValueError, RecursionError) as error:
        expected = "one JSON object and nothing else, not even a comma after it; correct it"
        raise BadTaskFile(f"{where}: not JSON: {error}; expected {expected}") from None
    _check_keys(found, where=where)
    return found


class _Repeated(dict[str, Any]):
    """A JSON object that has a key twice."""

    key = ""


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    # The caller raises the error, because its message names the row.
    repeated = _Repeated(found)
    names = [name for name, _ in pairs]
    repeated.key = next(name for name in names if names.count(name) > 1)
    return repeated


def _check_keys(row: Any, *, where: str) -> None:
    if isinstance(row, _Repeated):
        raise BadTaskFile(
            f"{where}: got the key {row.key!r} twice in one object, expected each key once; remove "
            "or rename one"
        )
    if isinstance(row, dict | list):
        for value in row.values() if isinstance(row, dict) else row:
            if isinstance(value, dict | list):
                _check_keys(value, where=where)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _task(row: Any, *, where: str) -> Task:
    if not isinstance(row, dict):
        _refuse(where, "row", row, f"an object with {', '.join(_FIELDS)}")
    wrong = [f"the field {name} is unknown" for name in sorted(set(row) - set(_FIELDS))]
    wrong += [f"the field {name} is missing" for name in _FIELDS[:3] if name not in row]
    if wrong:
        raise BadTaskFile(
            f"{where}: {', '.join(wrong)}; expected {', '.join(_FIELDS)} (data may be left out); "
            "put the environment's fields into data"
        )
    for name in ("task_id", "environment"):
        if not isinstance(row[name], str) or not row[name]:
            _refuse(where, name, row[name], "a text that is not empty")
    # In Python True is an int, but not a seed.
    if not isinstance(row["seed"], int) or isinstance(row["seed"], bool):
        _refuse(where, "seed", row["seed"], "a whole number")
    if not 0 <= row["seed"] < 2**63:
        raise BadTaskFile(f"{where}: seed: got {row['seed']}, expected 0 to 2^63 - 1")
    data = row.get("data", {})
    if not isinstance(data, dict):
        _refuse(where, "data", data, "an object")
    try:
        _json(row).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadTaskFile(
            f"{where}: got a value that is not JSON ({error}), expected texts, finite numbers, "
            "true, false, null, lists and objects; correct the row"
        ) from None
    return Task(task_id=row["task_id"], environment=row["environment"], seed=row["seed"], data=data)


def _refuse(where: str, name: str, value: Any, expected: str) -> NoReturn:
    raise BadTaskFile(
        f"{where}: {name}: got {json_type_of(value)}, expected {expected}; correct the row"
    )


def _row(task: Task) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "environment": task.environment,
        "seed": task.seed,
        "data": dict(task.data),
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
