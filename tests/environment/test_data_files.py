"""Tests of reading the text files of a data set: CSV, TSV, JSONL and JSON, compressed or not."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from actors.environment.data_sets import read_data_set
from actors.environment.tasks import BadTaskFile
from actors.types import Task


def read(path: Path) -> list[Task]:
    return read_data_set(str(path), environment="code_search", columns={}, split="train")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("twice.csv", b"prompt,answer,answer\na,1,2\n", "the column answer occurs twice"),
        (
            "semicolons.csv",
            b"prompt;answer\na;1\n",
            "one column, whose name contains ';'.*separated by ','",
        ),
        ("commas.tsv", b"prompt,answer\na,1\n", "one column, whose name contains ','"),
        ("latin.csv", "prompt\né\n".encode("latin-1"), "not UTF-8 text.*save it as UTF-8"),
        ("quoted.csv", b'prompt, "answer"\na,1\n', 'space before the quoted column "answer"'),
        (
            "values.csv",
            b'prompt,answer\na,1\n"1, 2?", "3"\n',
            "line 3: got a space before the quoted value of answer, .*; remove the spaces",
        ),
        (
            "quoted.tsv",
            b'prompt\tanswer\n  "a" \t3\n"b"\t4\n',
            "line 2: got a space before the quoted value of prompt",
        ),
        ("empty.csv", b'prompt,answer\n"a\n"",", ""\n', "line 3: .* value of answer"),
        ("more.csv", b'prompt,answer\na, "1, 2"\n', "without a space before the quote"),
        (
            "spark.csv",
            b'prompt,answer\na,1\n\n"say\n\\"b\\"",1\n',
            r'spark\.csv, line 4: .* doubled \(""',
        ),
        (
            "after.csv",
            b'"prompt" ,answer\na,1\n',
            r"after\.csv, line 1: .* nothing between its last",
        ),
        ("text.tsv", b'prompt\tanswer\n"Yes," he said\t1\n', r"text\.tsv, line 2: .*; correct the"),
        ("open.csv", b'prompt,answer\n"a,1\nb,2\n', r"open\.csv, line 2: .*unexpected end of data"),
        ("spaces.csv", b"answer,prompt, answer\n1,a,2\n", "the column answer occurs twice"),
        (
            "keys.jsonl",
            b'{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}\n',
            "line 2: got the key 'prompt' twice in one object, expected each key once; remove or",
        ),
        ("inner.json", b'[{"a": 1}, {"a": [{"k": 1, "k": 1}]}]', "row 2: got the key 'k' twice"),
        ("wide.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "not UTF-8 text"),
        (
            "cut.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n', mtime=0)[:-6],
            "cannot be read: .*ended before",
        ),
        (
            "flipped.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n', mtime=0)[:10] + b"\xff" * 20,
            "cannot be read: .*decompressing",
        ),
        ("lines.json", b'{"prompt": "a"}\n{"prompt": "b"}\n', r"Extra data.*name it \.jsonl"),
        (
            "commas.jsonl",
            b'{"prompt": "a"},\n{"prompt": "b"},\n',
            "line 1: not JSON: Extra data: .* and nothing else, not even a comma",
        ),
        (
            "comma.json",
            b'[{"prompt": "a"},]',
            r"not JSON \(.*char 17\)\), expected a list of objects; remove the comma before this",
        ),
        ("key.json", b'[{"prompt": "a",\n}]', "; remove the comma before this place$"),
        ("colon.json", b'[{"prompt" "a"}]', "; correct this place$"),
        ("cut.json", b'[{"prompt": "a"},', "; it is empty or cut off; save it again$"),
        ("nothing.json", b"", "; it is empty or cut off; save it again$"),
        (
            "rows.jsonl",
            gzip.compress(b'{"prompt": "a"}\n', mtime=0),
            r"not UTF-8 .*; it is compressed by gzip: name it rows\.jsonl\.gz",
        ),
        ("list.jsonl", b'[{"prompt": "a"}]\n', r"line 1: got a list.*name it \.json"),
    ],
)
def test_a_text_file_with_ambiguous_content_is_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadTaskFile, match=words):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.JSONL", b'{"prompt": "a", "answer": "1"}'),
        ("rows.Json", b'[{"prompt": "a", "answer": "1"}]'),
        ("rows.CSV", b"prompt,answer\na,1\n"),
        ("rows.TSV", b"prompt\tanswer\na\t1\n"),
        ("rows.JSONL.GZ", gzip.compress(b'{"prompt": "a", "answer": "1"}', mtime=0)),
        ("spaces.csv", b"prompt , answer\na,1\n"),
        ("mark.csv", b"\xef\xbb\xbfprompt,answer\na,1\n"),
        ("mark.tsv", b'\xef\xbb\xbf"prompt"\t answer \na\t1\n'),
        ("mark.jsonl", b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\n'),
        ("index.csv", b",prompt,,answer\n0,a,,1\n"),
        ("index.jsonl", b'{"": 0, " ": 1, "prompt": "a", "answer": "1"}\n'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_capitals_bom_spaces_and_an_index_column_do_not_change_the_columns(
    tmp_path: Path, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(content)
    [task] = read(tmp_path / name)
    assert task.data == {"prompt": "a", "answer": "1"}
    assert ("a column without a name is left out" in caplog.text) == name.startswith("index")


def test_a_value_of_a_csv_file_may_have_spaces_and_quotes(tmp_path: Path) -> None:
    values = [' "3"', ' "yes", "no"', "a\n 'b' \"c\"", ' "yes" or no ', ' "']
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt"], *([value] for value in values)])
    assert [each.data["prompt"] for each in read(tmp_path / "rows.csv")] == values


def test_only_a_value_that_is_written_with_a_space_before_its_quote_is_refused(
    tmp_path: Path,
) -> None:
    # Values of quotes only, and one whose text is in another value of its row.
    rows = [[' ""', "a"], [' """"', "b"], ['Say "3" now', ' "3"'], ['x\n, "3",', ' "3"']]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], *rows])
    found = read(tmp_path / "rows.csv")
    assert [[each.data["prompt"], each.data["answer"]] for each in found] == rows
    (tmp_path / "rows.csv").write_text('prompt,answer\nSay "3" now," ""3"""\n')
    assert read(tmp_path / "rows.csv")[0].data["answer"] == ' "3"'
    # The file has no quoted value.
    (tmp_path / "rows.tsv").write_text('prompt\tanswer\na\t "3"\n')
    assert read(tmp_path / "rows.tsv")[0].data["answer"] == ' "3"'


def test_compressed_files_and_tables_with_tabs_are_read(tmp_path: Path) -> None:
    row = '{"prompt": "Where?"}\n'
    (tmp_path / "rows.ndjson").write_text(row)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(row)
    (tmp_path / "rows.tsv").write_text("prompt\tn\nWhere?\t1\n")
    for name in ("rows.ndjson", "rows.jsonl.gz", "rows.tsv"):
        [task] = read(tmp_path / name)
        assert task.data["prompt"] == "Where?"


def test_a_long_value_of_a_csv_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"prompt,tests\na,{'x' * 200_000}\n")
    [task] = read(tmp_path / "rows.csv")
    assert task.data == {"prompt": "a", "tests": "x" * 200_000}
