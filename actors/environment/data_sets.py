"""Make a task of each row of a data set; the columns become the entries of the task's data.

A data set is a JSONL (NDJSON), JSON, CSV, TSV or Parquet file, a directory (written by
`datasets.save_to_disk`, or with a data set's files), or a name on the Hugging Face hub. Files other
than Parquet may be compressed by gzip (`.jsonl.gz`). Values of a CSV file are texts. Spaces around
a CSV column's name are removed, and a column without a name is left out. A row without an id gets
an id by its content: the same rows in any order are the same tasks.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.environment.data_files import (
    SUFFIXES,
    TEXT_SUFFIXES,
    Rows,
    check_names,
    listed,
    note_of_object,
    python_values,
    read_directory,
    read_text,
    suffix_of,
)
from actors.environment.task_data import MESSAGE_FIELDS, DataCheck, depth_problem, report_nulls
from actors.environment.tasks import BadTaskFile, PackedTasks, derived_seed
from actors.types import Task
from actors.user_code import json_type_of, shown_json

if TYPE_CHECKING:
    # The import takes seconds; only runs with a data set need it.
    from datasets import Dataset

# Files that datasets.save_to_disk writes: for one split, and for several.
_SAVED = ("state.json", "dataset_dict.json")
_logger = logging.getLogger(__name__)
_OWN = ("task_id", "seed")
_PLAIN = frozenset({str, int, float, bool, type(None)})
MAX_ID = 512
_BATCH_ROWS = 1000
_LEAVE_OUT = "leave the column out, by null in"
# A chat as JSON, or as Python writes it into a CSV file.
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']\s*:""")
# The columns of a chat, and the keys in them whose objects differ from row to row.
CHAT = ("prompt", "messages", "tools")
# The environments that take the prompt from the column `prompt`; and columns that other libraries
# add to the prompt, with the remedy.
_OF_PROMPTS = ("single_turn", "tools")
_NO_IMAGES = "; Rayloom trains on text only"
_BESIDE_PROMPT = {
    "tools": "; name the tools in tasks.options.tools of the environment tools",
    "chat_template_kwargs": "; set rollouts.template_options, for all rows",
    **dict.fromkeys(
        ("system", "system_prompt"),
        "; write it as the first message of a prompt that is a list, or set tasks.options.system",
    ),
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), _NO_IMAGES),
}
_FREE = ("arguments", "parameters", "input_schema")
# The library raises StopIteration for a file without rows.
_UNREADABLE = (OSError, ValueError, KeyError, ImportError, StopIteration, pa.ArrowException)


def read_data_set(
    source: str,
    *,
    environment: str,
    columns: Mapping[str, str | None],
    split: str,
    subset: str | None = None,
    check: DataCheck | None = None,
    section: str = "tasks",
) -> PackedTasks:
    """Return tasks made of a data set's rows.

    A column becomes an entry of the task's data with the column's name, if the environment accepts
    such an entry. `columns` changes this. The entries `task_id` and `seed` also become the task's
    id and seed.

    Args:
        source: A file, a directory or a name on the Hugging Face hub.
        columns: Maps an entry to the column that has the entry's values. If an entry is mapped to
            None, the column with the entry's name is left out.
        split: The split of a directory or of a data set on the hub; train for a single file.
        subset: One of several configurations of a data set.
        check: The check of every task's data.
        section: The section of the configuration that error texts refer to.

    Raises: BadTaskFile if the data set cannot be used.
    Example: columns={"question": "query", "id": None} turns the row {"query": "Where?", "score": 3,
        "id": 7} into a task with the data {"question": "Where?", "score": 3}.
    """
    what = f"data set {source}"
    left_out = {name for name, column in columns.items() if column is None}
    left_out -= set(columns.values())
    names, rows, is_typed = _open(
        source, split=split, subset=subset, section=section, left_out=left_out
    )
    taken = None if check is None else check.names
    entries = _entries(columns, names, check, what, section=section)
    if _is_unnamed(names) and "" not in columns.values():
        _logger.warning("%s: a column without a name is left out; give it a name to use it", what)
    if unread := [n for n in names if n.strip() and n not in {*entries.values(), *columns}]:
        _logger.warning(
            "%s: not read: %s; to leave a column out without this warning, set it to null in "
            "%s.columns",
            what,
            listed(unread),
            section,
        )
    tasks, found_ids = PackedTasks(), set[str]()
    num_same: dict[str, int] = {}
    rows = _checked(rows, what)
    for where, entry in _values_of(
        rows, entries, columns, what, environment=environment, is_typed=is_typed
    ):
        task = _task(entry, taken, environment=environment, where=where, section=section)
        if check is not None and (problem := check.problem(task.data)):
            remedy = check.remedy(task.data, entries, section=section)
            note = note_of_object(Path(source).expanduser())
            raise BadTaskFile(
                f"{where}: {problem}; the data set has the columns {listed(names)}: {remedy}{note}"
            )
        if task.task_id in found_ids:
            if "task_id" in entries:
                raise BadTaskFile(
                    f"{where}: task_id {task.task_id!r} occurs a second time; expected "
                    "unique ids; leave task_id out of the columns, and rows get ids by content"
                )
            num_same[task.task_id] = again = num_same.get(task.task_id, 1) + 1
            task = _named(task, f"{task.task_id}-{again}")
        found_ids.add(task.task_id)
        tasks.append(task)
    if not tasks:
        raise BadTaskFile(f"{what}: got no rows, expected one or more")
    if check is not None:
        report_nulls(tasks, check, what)
    return tasks


def _values_of(
    rows: Iterable[Mapping[str, Any]],
    entries: Mapping[str, str],
    columns: Mapping[str, str | None],
    what: str,
    *,
    environment: str,
    is_typed: bool,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Convert each row to the data of a task, and warn once of each probable mistake (`_doubts`).

    Columns of bytes are left out with a warning. entries: the column of each entry of the data.
    Yields: the row's place for error texts, such as "data set a.csv, row 3", and the data.
    """
    left_out: set[str] = set()
    reported: set[str] = set() if is_typed else {_NULLS}
    for number, row in enumerate(rows, start=1):
        where = f"{what}, row {number}"
        read = {column: row[column] for column in entries.values() if column in row}
        if problem := depth_problem(read):
            raise BadTaskFile(f"{where}, column {problem}")
        # If the configuration names such a column, it is an error instead.
        for column in _not_json(row, entries.values()) - left_out - set(columns.values()):
            left_out.add(column)
            _logger.warning("%s: column %s is left out: it holds bytes", what, column)
        values = {
            name: as_json(row[column])
            for name, column in entries.items()
            if column in row and column not in left_out
        }
        found = values
        if is_typed:
            found = {n: without_nulls(v) if n in CHAT else v for n, v in values.items()}
        doubts = [_NULLS] if found != values else []
        for doubt in (*doubts, *_doubts(found, environment)):
            if doubt not in reported:
                reported.add(doubt)
                _logger.warning("%s: %s", where, doubt)
        yield where, found


_NULLS = (
    "nulls in the arguments of calls and in the schemas of tools are left out, because the format "
    "adds them where rows differ"
)


def _doubts(row: Mapping[str, Any], environment: str) -> Iterator[str]:
    """Yield a warning for each probable mistake, such as a prompt that ends with the answer."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) and _CHAT_AS_TEXT.match(prompt):
        yield (
            "prompt is the text of a chat, and the model sees the text as it is; expected a list "
            "of messages; write the data set as JSONL or Parquet to keep the list"
        )
    if not environment:
        yield from _unread_fields("messages", row.get("messages"))
    if environment not in _OF_PROMPTS:
        return
    yield from _unread_fields("prompt", prompt)
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        yield (
            "prompt ends with a message of the assistant, and the model writes another one after "
            "it; expected a message of the user or a tool last; remove the assistant's message if "
            "it is the answer"
        )
    for name in _BESIDE_PROMPT:
        if row.get(name):
            yield (
                f"the column {name} is given to functions only, and the model does not see it; "
                f"expected all that the model must read in prompt{_BESIDE_PROMPT[name]}"
            )


def _unread_fields(column: str, chat: Any) -> Iterator[str]:
    """Yield a warning for each field of a chat's messages that has a value but is not read."""
    given = {
        name
        for message in (chat if isinstance(chat, list) else ())
        if isinstance(message, dict) and "role" in message
        for name, value in message.items()
        if value not in (None, "", [], {})
    }
    for name in sorted(given.difference(MESSAGE_FIELDS)):
        yield (
            f"{column}: a message has the field {name}, which is not read; expected only "
            f"{', '.join(MESSAGE_FIELDS)}; write what the model must see into content, and remove "
            f"{name} from all messages"
        )


def _is_unnamed(names: Sequence[str]) -> bool:
    """Return whether a column lacks a name, as in a CSV file into which pandas wrote its index."""
    return any(not name.strip() for name in names)


def _not_json(row: Mapping[str, Any], columns: Iterable[str]) -> set[str]:
    return {name for name in columns if has_bytes(row.get(name))}


def has_bytes(value: Any) -> bool:
    """Return whether a row's value is bytes, or is a list or dict that holds bytes."""
    if isinstance(value, dict | list):
        return any(map(has_bytes, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bytes | bytearray | memoryview)


def as_json(value: Any) -> Any:
    """Return a value as JSON: dates as ISO texts, durations in seconds, decimals as numbers.

    Numbers, texts and arrays of numpy and pandas become plain values, and tuples become lists.
    Other values that are not JSON, such as bytes and pandas' missing dates, stay as they are.
    Raises: TypeError for a key that is not a text, and for masked or missing values in an array.
    """
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "tolist") and not has_bytes(value):
        plain = python_values(value)  # numpy's longdouble stays as it is
        return plain if type(plain) is type(value) else as_json(plain)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date | time):
        # pandas' missing date differs from itself.
        return value.isoformat() if value == value else value
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    if isinstance(value, dict):
        if odd := [name for name in value if not isinstance(name, str)]:
            raise TypeError(f"the key {odd[0]!r} of a dict is not a text")
        return {name: as_json(each) for name, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


def without_nulls(value: Any, *, is_free: bool = False) -> Any:
    """Remove nulls from the arguments of calls and from the schemas of tools in a chat.

    Arrow gives all objects of a column the same keys: a key that an object lacks is added with the
    value null.

    is_free: whether `value` is a part of a call's arguments or of a tool's schema.
    """
    if isinstance(value, list):
        return [without_nulls(each, is_free=is_free) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: without_nulls(each, is_free=is_free or name in _FREE)
        for name, each in value.items()
        if each is not None or not is_free
    }


def _open(
    source: str, *, split: str, subset: str | None, section: str, left_out: Set[str]
) -> tuple[Sequence[str], Iterable[Mapping[str, Any]], bool]:
    """Open a data set; return its columns' names, its rows, and whether each column has one type.

    left_out: columns that need not be read. Raises: BadTaskFile if the data set cannot be read.
    """
    path = Path(source).expanduser()
    named = {"split": split, "subset": subset}
    if path.is_file() and (given := {k: v for k, v in named.items() if v not in (None, "train")}):
        key, value = next(iter(given.items()))
        raise BadTaskFile(
            f"data set {source}: got the {key} {value!r}, and a single file has none; expected a "
            f"directory or a hub's data set for this; remove the {key} from {section}, or name a "
            "directory with a file for each split"
        )
    if path.is_file() and suffix_of(path) in TEXT_SUFFIXES:
        # In a text file such as JSONL, each value has its own type.
        return *read_text([path]), False
    found = _dataset(source, path, split=split, subset=subset, section=section, left_out=left_out)
    if isinstance(found, tuple):
        return *found, False
    # A format with which a data set was saved, such as numpy, would change or hide values.
    found = found.with_format(None)
    found = found.remove_columns([name for name in found.column_names if name in left_out])
    what = f"data set {source}"
    return found.column_names, _in_batches(found, what=what, section=section), True


def _in_batches(found: Dataset, *, what: str, section: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows; raise BadTaskFile with the name of a column that cannot be read."""
    try:
        # Batches take a fifth of the time of single reads.
        for batch in found.iter(batch_size=_BATCH_ROWS):
            columns = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(columns, values, strict=True))
    except _UNREADABLE as error:
        for name in found.column_names if len(found.column_names) > 1 else ():
            # This raises the error with the column's name.
            for _ in _in_batches(found.select_columns([name]), what=what, section=section):
                pass
        raise BadTaskFile(
            f"{what}, column {listed(found.column_names)}: cannot be read ({error}), expected "
            f"texts, numbers, lists or objects; {_LEAVE_OUT} {section}.columns"
        ) from error


def _read_parquet(path: Path, *, what: str, section: str, left_out: Set[str]) -> Dataset:
    """Read one Parquet file without the columns in `left_out`, whose types may be unreadable."""
    from datasets import Features, load_dataset

    remedy = f"{_LEAVE_OUT} {section}.columns"
    _check_parquet(path, what=what, left_out=left_out, remedy=remedy)
    schema = pq.read_schema(path)
    kept = [field for field in schema if field.name not in left_out]
    chosen: dict[str, Any] = {}
    if kept and len(kept) < len(schema):
        features = Features.from_arrow_schema(pa.schema(kept, metadata=schema.metadata))
        chosen = {"columns": [field.name for field in kept], "features": features}
    return load_dataset("parquet", data_files=str(path), split="train", **chosen)


def _check_parquet(
    path: Path,
    *,
    what: str,
    left_out: Set[str] = frozenset(),
    remedy: str = "remove or convert the column",
) -> None:
    """Raise BadTaskFile with a clear reason for a fault that `datasets` would report unclearly."""
    from datasets import Features

    footer = pq.read_metadata(path)
    schema = footer.schema.to_arrow_schema()
    check_names(schema.names, what=what)
    if footer.num_rows == 0:
        raise BadTaskFile(f"{what}: got no rows, expected one or more")
    for field in schema:
        try:
            if field.name not in left_out:
                Features.from_arrow_schema(pa.schema([field]))
        except ValueError as error:
            raise BadTaskFile(
                f"{what}, column {listed([field.name])}: got the type {field.type}, expected "
                f"texts, numbers, times, lists or structs; {remedy}"
            ) from error


def _dataset(
    source: str,
    path: Path,
    *,
    split: str,
    subset: str | None,
    section: str,
    left_out: Set[str],
) -> Dataset | Rows:
    """Open a data set by the `datasets` library; read the text files of a directory without it."""
    from datasets import DatasetDict, disable_progress_bars, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    what = f"data set {source}"
    try:
        if path.is_file():
            if suffix_of(path) != ".parquet" or path.suffix.lower() == ".gz":
                raise BadTaskFile(
                    f"{what}: got suffix {path.suffix!r}, expected one of {', '.join(SUFFIXES)}, "
                    "or a directory"
                )
            return _read_parquet(path, what=what, section=section, left_out=left_out)
        if path.is_dir() and any((path / name).is_file() for name in _SAVED):
            saved = load_from_disk(str(path))
            if not isinstance(saved, DatasetDict):
                return saved
            return _split_of(saved, split, what, section=section)
        _check_source(source, path, what, section)
        read = read_directory(path, split=split, subset=subset, what=what, section=section)
        if read is not None:
            return read
        found = load_dataset(str(path) if path.is_dir() else source, subset, split=split)
        return _with_times_reported(found, what)
    except (*_UNREADABLE, DatasetsError) as error:
        if isinstance(error, BadTaskFile):
            raise
        if path.is_dir():
            # A directory is unreadable if one file has such a fault.
            for file in sorted(path.rglob("*.parquet")):
                with suppress(OSError, pa.ArrowException):
                    _check_parquet(file, what=f"{what}, file {file.relative_to(path)}")
        reason = " ".join(str(error.__cause__ or error).split()) or "it has no rows"
        raise BadTaskFile(f"{what}: cannot be read: {reason:.300}") from error


def _with_times_reported(found: Dataset, what: str) -> Dataset:
    """Return the data set; warn if the library has converted texts in JSON files to times."""
    schema = found.features.arrow_schema
    times = [each.name for each in schema if "timestamp" in str(each.type)]
    if found.info.builder_name == "json" and times:
        _logger.warning(
            "%s: the `datasets` library has read the texts in %s as times, so that 2024-01-01 is "
            "now 2024-01-01T00:00:00; expected texts as they are written; download the files, and "
            "name their directory as the data set",
            what,
            listed(times),
        )
    return found


def _check_source(source: str, path: Path, what: str, section: str) -> None:
    """Raise BadTaskFile if `source` looks like a local path but is not a file or a directory."""
    is_pattern = any(each in source for each in "*?[")
    has_spaces = source != source.strip()
    looks_local = (
        source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or suffix_of(path) in SUFFIXES
        or path.is_symlink()
        or not source
        or is_pattern
        or has_spaces
    )
    if looks_local and not path.is_dir():
        remedy = "name the directory, whose files are read" if is_pattern else "correct it"
        split = re.fullmatch(r"[\w.-]+/[\w.-]+\[([^\[\]]+)\]", source)
        if split and not path.parent.is_dir():
            remedy = f"set {section}.split to {split[1]!r}, and leave it out of the name"
        raise BadTaskFile(
            f"{what}: not found; expected a file, a directory, or a hub's name such as "
            f"openai/gsm8k; {'remove the spaces around it' if has_spaces else remedy}"
        )


def _split_of(found: Mapping[str, Dataset], split: str, what: str, *, section: str) -> Dataset:
    if split not in found:
        raise BadTaskFile(
            f"{what}: got no split {split!r}, expected one of {', '.join(found)}; set "
            f"{section}.split"
        )
    return found[split]


def _checked(rows: Iterable[Mapping[str, Any]], what: str) -> Iterable[Mapping[str, Any]]:
    try:
        yield from rows
    except BadTaskFile:
        raise
    except _UNREADABLE as error:
        raise BadTaskFile(f"{what}: cannot be read: {error}") from error


def _entries(
    columns: Mapping[str, str | None],
    names: Sequence[str],
    check: DataCheck | None,
    what: str,
    *,
    section: str,
) -> dict[str, str]:
    """Map each entry of a task's data to its column. Raises: BadTaskFile if a column is missing."""
    asked = {entry: column for entry, column in columns.items() if column is not None}
    if missing := sorted(set(asked.values()) - set(names)):
        raise BadTaskFile(
            f"{what}: column {listed(missing)} is missing, got {listed(sorted(names))}; "
            f"correct {section}.columns"
        )
    taken = None if check is None else check.names
    used = columns.keys() | set(asked.values())
    own = {
        name: name
        for name in names
        if name.strip() and name not in used and (taken is None or name in taken or name in _OWN)
    }
    return {**own, **asked}


def _task(
    row: dict[str, Any],
    taken: frozenset[str] | None,
    *,
    environment: str,
    where: str,
    section: str,
) -> Task:
    """Make a row's task. taken: the entries that the task's data may have; None allows all."""
    own, data = row, row
    if "task_id" in row or "seed" in row:
        own = {name: value for name, value in row.items() if name not in _OWN}
        data = {
            name: value
            for name, value in row.items()
            if name not in _OWN or taken is None or name in taken
        }
    try:
        if data is not own:
            json.dumps(data, allow_nan=False)
        content = json.dumps(own, ensure_ascii=False, allow_nan=False, sort_keys=True)
        content.encode()
    except (TypeError, ValueError, RecursionError) as error:
        column = next((name for name, value in row.items() if not _is_json(value)), "")
        raise BadTaskFile(
            f"{where}{f', column {column}' if column else ''}: got a value that is not JSON "
            f"({error}), expected texts, finite numbers, true, false, null, lists and objects; "
            f"leave its column out, by null in {section}.columns"
        ) from None
    task_id = row.get("task_id", f"row-{_digest(content)}")
    if isinstance(task_id, bool) or not isinstance(task_id, str | int) or task_id == "":
        raise BadTaskFile(f"{where}: task_id: got {json_type_of(task_id)}, expected a text")
    task_id = str(task_id)
    if len(task_id) > MAX_ID or not task_id.isprintable():
        raise BadTaskFile(
            f"{where}: task_id: got {task_id!r:.80}{'…' if len(task_id) > 80 else ''} of "
            f"{len(task_id)} characters, expected at most {MAX_ID} printable ones; leave the "
            f"column out, by null in {section}.columns, and rows get ids by content"
        )
    seed = row.get("seed", derived_seed("seed", task_id))
    # Values of a CSV file are texts.
    seed = int(seed) if isinstance(seed, str) and seed.isascii() and seed.isdigit() else seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise BadTaskFile(
            f"{where}: seed: got {shown_json(seed)}, expected a whole number from 0 to 2^63 - 1; "
            f"correct it, or leave the column out, by null in {section}.columns"
        )
    return Task(task_id=task_id, environment=environment, seed=seed, data=data)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _digest(content: str) -> str:
    return blake2b(content.encode(), digest_size=10).hexdigest()


def _named(task: Task, task_id: str) -> Task:
    return Task(task_id=task_id, environment=task.environment, seed=task.seed, data=task.data)
