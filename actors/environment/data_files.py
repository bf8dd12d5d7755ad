"""Read the text files of a data set: a single file, or those that a directory has for a split.

The `datasets` library selects the files of a directory. This module reads the files itself, because
the library gives each column one type and so changes values. In a CSV file the text "007" would
become a number, and in a JSON file the text "2024-01-01" a time.
"""

from __future__ import annotations

import csv
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import date, timedelta
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.environment.tasks import BadTaskFile, json_list, json_rows, open_text
from actors.user_code import json_type_of

if TYPE_CHECKING:
    # The import takes seconds; only runs with a data set need it.
    from datasets import BuilderConfig

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
Rows = tuple[Sequence[str], Iterable[Mapping[str, Any]]]
"""The names of the columns, and the rows."""
_logger = logging.getLogger(__name__)
_MAX_FIELD = 2**31 - 1
_MAX_SHOWN = 8
_SPACED_QUOTE = re.compile(r' +"(?:[^"]|"")*" *')
# A quoted field, after its separator or at the start of its record.
_QUOTED = {each: re.compile(rf'(^|{each})"[^"]*(?:""[^"]*)*"') for each in ",\t"}
# A file's name in a series, such as train-00000-of-00002.parquet.
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\b")
# Files that describe a data set, in the form of the `datasets` library.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
# What a data set's README.md may set without changing how its files are read.
_NO_FORMAT = ("name", "version", "data_dir", "data_files", "description", "features")


def read_directory(
    path: Path, *, split: str, subset: str | None, what: str, section: str
) -> Rows | None:
    """Return the columns' names and the rows of one split of a directory.

    Return None if the path is not a directory, or if its files are not text. Log a warning with the
    names of files that belong to no split, and of files that are missing.
    Args: split: name of a split, or an expression of the `datasets` library, such as train[:10%].
    what: the data set's name for error texts. section: the section that error texts refer to.
    Raises: BadTaskFile if there is no such split, or a file cannot be used; errors of `datasets`.
    """
    from datasets import ReadInstruction, load_dataset_builder

    if not path.is_dir():
        return None
    builder = load_dataset_builder(str(path), subset)
    files = {
        str(name): [Path(each) for each in found]
        for name, found in (builder.config.data_files or {}).items()
    }
    every = [each for found in files.values() for each in found]
    asked = {each.partition("[")[0].strip() for each in split.split("+")}
    _report_missing(chain(*(files[name] for name in files if {name, "all"} & asked)), what)
    if len(builder.builder_configs) <= 1:
        _report_unread(path, every, what)
    is_text = all(suffix_of(each) in TEXT_SUFFIXES for each in every)
    if not files or not is_text or _has_own_format(builder.config):
        return None
    if split in files:
        return read_text(files[split])
    read = {name: read_text(found) for name, found in files.items()}
    try:
        parts = ReadInstruction.from_spec("+".join(files) if split == "all" else split).to_absolute(
            {name: sum(1 for _ in _rows_of(found)) for name, found in files.items()}
        )
    except (ValueError, AssertionError) as error:
        raise BadTaskFile(
            f"{what}: got no split {split!r}, expected one of {', '.join(files)}; set "
            f"{section}.split"
        ) from error
    names = dict.fromkeys(name for part in parts for name in read[part.splitname][0])
    rows = (islice(read[part.splitname][1], part.from_, part.to) for part in parts)
    return list(names), chain.from_iterable(rows)


def _has_own_format(config: BuilderConfig) -> bool:
    """Return whether a data set's README.md sets how its files are read, such as a separator."""
    usual = type(config)()
    names = {each.name for each in fields(config)}.difference(_NO_FORMAT)
    return any(getattr(config, name) != getattr(usual, name) for name in names)


def _report_missing(files: Iterable[Path], what: str) -> None:
    """Log a warning for each incomplete series, such as train-00000-of-00002.parquet by itself."""
    series = Counter(
        (found[1], int(found[2]), each.suffix)
        for each in set(files)
        if (found := _SHARD.match(str(each)))
    )
    for (start, number, suffix), count in sorted(series.items()):
        if count < number:
            _logger.warning(
                "%s: files are missing: there are %d of the %d files %s-*-of-%05d*%s; "
                "expected all files; add the others, or give the files "
                "other names if these rows are enough",
                what,
                count,
                number,
                start,
                number,
                suffix,
            )


def _report_unread(path: Path, files: Sequence[Path], what: str) -> None:
    read = {each.resolve() for each in files}
    found = (each.relative_to(path) for each in sorted(path.rglob("*")) if each.is_file())
    unread = [
        str(each)
        for each in found
        if suffix_of(each) in SUFFIXES and each.name not in _DESCRIPTIONS
        if (path / each).resolve() not in read
        # The library does not look for hidden files.
        and not any(part.startswith((".", "__")) for part in each.parts)
    ]
    if unread:
        more = f" and {len(unread) - _MAX_SHOWN} more" if len(unread) > _MAX_SHOWN else ""
        _logger.warning(
            "%s: files are not read: %s; expected files of one format, and the name of a split in "
            "the names of all files or of none; rename them, or move them elsewhere",
            what,
            f"{listed(unread[:_MAX_SHOWN])}{more}",
        )


def listed(names: Iterable[str]) -> str:
    """Join the names of columns for an error's text; a name with outer spaces is in quotes."""
    return ", ".join(name if name and name == name.strip() else repr(name) for name in names)


def read_text(files: Sequence[Path]) -> Rows:
    """Return the columns' names and the rows of JSONL, JSON or CSV files, one file after the other.

    Raises: BadTaskFile if a file cannot be used.
    """
    names = dict.fromkeys(name for path in files for name in _names_in(path))
    return list(names), _rows_of(files)


def _rows_of(files: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    return (row for path in files for _, row in _written(path))


def _names_in(path: Path) -> Iterable[str]:
    """Return the names of the columns in all rows of a file."""
    names: dict[str, None] = {}
    num_rows = 0
    try:
        # Do not keep the rows: 100,000 are a million objects. They are read again, one by one.
        for where, row in _written(path):
            if not isinstance(row, dict):
                remedy = (
                    "; if the file is one list, name it .json"
                    if isinstance(row, list) and suffix_of(path) != ".json"
                    else ""
                )
                raise BadTaskFile(f"{where}: got {json_type_of(row)}, expected an object{remedy}")
            names |= dict.fromkeys(row)
            num_rows += 1
    except BadTaskFile:
        raise
    except UnicodeDecodeError as error:
        is_gzip = error.object.startswith(b"\x1f\x8b") and path.suffix.lower() != ".gz"
        remedy = (
            f"it is compressed by gzip: name it {path.name}.gz" if is_gzip else "save it as UTF-8"
        )
        raise BadTaskFile(f"data set {path}: it is not UTF-8 text ({error}); {remedy}") from error
    except json.JSONDecodeError as error:
        raise BadTaskFile(
            f"data set {path}: it is not JSON ({error}), expected a list of objects; "
            f"{_remedy(error)}"
        ) from error
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise BadTaskFile(f"data set {path}: cannot be read: {error}") from error
    if not num_rows:
        raise BadTaskFile(f"data set {path}: got no rows, expected one or more")
    return names


def _remedy(error: json.JSONDecodeError) -> str:
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if error.msg == "Extra data":
        return "if each line is an object, name it .jsonl"
    if not after or error.msg.startswith("Unterminated string"):
        return "it is empty or cut off; save it again"
    if before.endswith(",") and after.startswith(("]", "}")):
        return "remove the comma before this place"
    return "correct this place"


def _written(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row of a file with its location in the file.

    Raises: BadTaskFile, OSError or ValueError if the file cannot be read.
    """
    suffix = suffix_of(path)
    if suffix in (".jsonl", ".ndjson"):
        yield from json_rows(path)
        return
    if suffix == ".json":
        yield from json_list(path)
        return
    # The values of a column of tests, for example, are longer than the module's limit.
    csv.field_size_limit(_MAX_FIELD)
    lines: dict[int, str] = {}
    separator = "\t" if suffix == ".tsv" else ","
    with open_text(path, newline="") as file:
        reader = csv.DictReader(_noted(file, lines), strict=True, delimiter=separator)
        try:
            yield from _records(reader, lines, path=path)
        except csv.Error as error:
            begin = next(number for number, line in lines.items() if line.strip())
            raise BadTaskFile(
                f"{path}, line {begin}: got wrong quotes ({error}), expected each quote inside a "
                'quoted value doubled ("" instead of \\"), and nothing between its last quote and '
                "the separator; correct the row that begins here"
            ) from error


def _records(
    reader: csv.DictReader[str], lines: dict[int, str], *, path: Path
) -> Iterator[tuple[str, Any]]:
    """Yield each row of a CSV or TSV file with its location in the file.

    lines: the lines that the reader has read since the row before, by their numbers.
    Raises: BadTaskFile, OSError, ValueError or csv.Error if the file cannot be read.
    """
    suffix, separator = suffix_of(path), reader.reader.dialect.delimiter
    # In a TSV file without quoted values, a quote after a space is a part of its value.
    is_quoted, spaced = suffix != ".tsv", ""
    names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    check_names(names, what=f"data set {path}")
    if quoted := next((name for name in names if name.startswith('"')), None):
        raise BadTaskFile(
            f"data set {path}: got a space before the quoted column {quoted}, expected the "
            "quote first; remove the spaces after the separators"
        )
    if len(names) == 1 and (found := next((c for c in ",;\t|" if c in names[0]), None)):
        raise BadTaskFile(
            f"data set {path}: the header has one column, whose name contains {found!r}; "
            f"expected names separated by {separator!r} in a {suffix} file; "
            "save it with this separator"
        )
    is_quoted |= _QUOTED[separator].search("".join(lines.values())) is not None
    lines.clear()
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        if None in row or None in row.values():
            raise BadTaskFile(
                f"{where}: the number of values differs from the names in the first line, "
                f"expected {len(reader.fieldnames or ())}; quote values that contain a comma, "
                "without a space before the quote"
            )
        if '"' in (record := "".join(lines.values()).strip("\r\n")):
            bare = _QUOTED[separator].sub(r"\1", record)
            is_quoted |= bare != record
            pairs = zip(names, bare.split(separator), strict=True)
            bad = next((name for name, text in pairs if _SPACED_QUOTE.fullmatch(text)), None)
            if bad is not None and not spaced:
                spaced = f"{where}: got a space before the quoted value of {listed([bad])}"
        if spaced and is_quoted:
            raise BadTaskFile(
                f"{spaced}, expected the quote first; remove the spaces after the separators"
            )
        lines.clear()
        yield where, row


def _noted(file: Iterable[str], lines: dict[int, str]) -> Iterator[str]:
    """Yield the lines of a file, and add each to `lines` with its number, from 1."""
    for number, line in enumerate(file, start=1):
        lines[number] = line
        yield line


def note_of_object(path: Path) -> str:
    """Return a note that tells the user to save a list of rows instead of one JSON object.

    The caller adds the note to an error about a row of the file. The note is empty if the file is
    not a single JSON object.
    """
    if suffix_of(path) != ".json" or not path.is_file():
        return ""
    with open_text(path) as file:
        is_object = file.read().lstrip().startswith("{")
    return (
        "; the file is one JSON object, which was read as one row; expected a list of rows, such "
        'as [{"prompt": "1 + 2?", "answer": "3"}]; save lists of columns in this form'
        if is_object
        else ""
    )


def check_names(names: Sequence[str], *, what: str) -> None:
    """Raise BadTaskFile if two columns have the same name. Columns without a name are ignored."""
    if twice := sorted({name for name in names if name.strip() and names.count(name) > 1}):
        raise BadTaskFile(
            f"{what}: the column {listed(twice)} occurs twice, expected unique names; rename one"
        )


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's format in lower case, such as .jsonl for rows.JSONL.gz."""
    last = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if last == ".gz" else last


def python_values(value: Any) -> Any:
    """Convert an array, or a scalar of numpy or pandas, to Python values, as `tolist` does.

    Unlike `tolist`, this function never turns a date or duration into an integer.

    Raises: TypeError for a masked value, for an array with named fields, for numpy's missing date
    or duration, and for a date or duration that Python's types cannot hold.
    """
    if np.ma.is_masked(value):
        raise TypeError("an array with masked values")
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.names:
        raise TypeError("an array with named fields")
    # `tolist` of pandas' own types, such as times with a zone, returns no integers.
    if not isinstance(dtype, np.dtype) or dtype.kind not in ("M", "m"):
        return value.tolist()
    # numpy returns days as dates, and times that are finer than Python's as integers.
    is_days = dtype.kind == "M" and np.datetime_data(dtype)[0] in ("Y", "M", "W", "D")
    times = value if is_days else value.astype(f"{dtype.kind}8[us]")
    found = np.asarray(times).astype(object).flat
    if not all(isinstance(each, date | timedelta) for each in found):
        raise TypeError("a missing date or duration, or one that Python cannot hold")
    return times.tolist()
