"""Tests of the journal: its files, which steps it keeps, and errors of the disk."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.builders.journal_builders import RULE, group_of, random_group, step_of, through_a_file
from worlds.builders.settings import step_settings
from worlds.builders.trajectory_builders import make_trajectory, make_turn
from worlds.checks.same import assert_same_trajectory

from actors.journal.files import (
    FORMAT,
    JournalDamaged,
    JournalStep,
    file_name,
    list_files,
    read_index,
    read_step,
    write_file,
    write_step,
)
from actors.merge.groups import classify_groups
from actors.merge.journal import Journal
from actors.merge.step import build_step
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome


def assert_same_step(got: JournalStep, expected: JournalStep) -> None:
    assert replace(got, entries=()) == replace(expected, entries=())
    for a, b in zip(got.entries, expected.entries, strict=True):
        assert_same_trajectory(a.trajectory, b.trajectory)
        assert (a.reason, a.baseline_return, a.problem) == (b.reason, b.baseline_return, b.problem)
        for one, other in zip(a.advantages, b.advantages, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


def file_of(step: JournalStep) -> bytes:
    file = io.BytesIO()
    write_step(file, step)
    return file.getvalue()


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_a_step_read_from_its_file_is_the_written_step(seed: int, num_groups: int) -> None:
    step = step_of(
        [random_group(number, seed) for number in range(num_groups)], number=4 + seed % 99
    )
    assert_same_step(through_a_file(step), step)


def test_a_step_without_groups_can_be_written_and_read() -> None:
    assert_same_step(through_a_file(step_of([])), step_of([]))


def test_an_entry_has_the_tokens_and_advantages_that_the_trainer_got() -> None:
    first = make_turn([10, 20, 30], [40, 50], logprobs=[-1, np.nan], version=3)
    second = make_turn([10, 20, 30, 40, 50, 60, 70], [80, 90], logprobs=[-2, -3], version=4)
    winner = make_trajectory([first, replace(second, reward=1.0)], rollout_id="g000000.0-0")
    loser = make_trajectory([first, second], rollout_id="g000000.0-1")
    group = (winner, loser)
    step = through_a_file(step_of([group], number=6))
    (sample,) = step.entries[0].trajectory.samples
    (advantages,) = step.entries[0].advantages
    trained = sample.mask == 1
    assert [turn.index for turn in sample.turns] == [0, 1] and sample.prompt_length == 3
    assert np.flatnonzero(trained).tolist() == [3, 7, 8]
    assert sample.token_ids[trained].tolist() == [40, 80, 90]
    assert sample.versions[trained].tolist() == [3, 4, 4]
    assert sample.logprobs[trained].tolist() == [-1, -2, -3]
    # The returns 1 and 0 have the mean 1/2 and the deviation 1/sqrt(2).
    assert advantages == pytest.approx([0.7071058] * 3, abs=1e-6)
    assert (step.step, step.trainer_version) == (6, 5)
    assert step.num_packed_trained == 6 and step.entries[0].baseline_return == 1.0


def test_a_trajectory_outside_the_loss_has_a_reason_and_no_trained_token() -> None:
    group = group_of(0, [1, 0, 0], outcomes={2: Outcome.TRUNCATED_TOKENS})
    masked = through_a_file(step_of([group])).entries[2]
    # Its last turn was scored, so its return counts in the baseline.
    assert masked.reason is EvictionReason.MASKED and masked.baseline_return == 0.0
    assert masked.num_trained == 0 and len(masked.trajectory.samples) == 1


def test_the_problem_of_a_trajectory_is_stored() -> None:
    group = group_of(0, [1, 0, float("nan")])
    entries = through_a_file(step_of([group])).entries
    assert [entry.problem for entry in entries[:2]] == ["", ""]
    assert entries[2].problem.startswith("return nan, expected a finite number; check")


def test_the_index_names_the_trajectories_of_a_step() -> None:
    index = read_index(io.BytesIO(file_of(step_of([group_of(3, [1, 0])], number=7, term=2))))
    assert (index.step, index.term) == (7, 2)
    assert index.trajectory_ids == ("g000003.0-0.a0", "g000003.0-1.a0")


@given(st.data())
def test_a_damaged_file_is_refused(data: st.DataObject) -> None:
    content = bytearray(file_of(step_of([group_of(0, [1, 0])])))
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    with pytest.raises(JournalDamaged):
        read_step(io.BytesIO(content))


def test_intact_sections_with_wrong_content_are_refused() -> None:
    start = f"rayloom journal {FORMAT}\n".encode()

    def section(content: bytes, *, length: int | None = None) -> bytes:
        size = len(content) if length is None else length
        return struct.pack("<QI", size, zlib.crc32(content)) + content

    def read(data: bytes) -> JournalStep:
        return read_step(io.BytesIO(data))

    with pytest.raises(JournalDamaged, match="content is not an index"):
        read_index(io.BytesIO(start + section(b"not an index")))
    for body in (b"not compressed", zlib.compress(b"no step")):
        with pytest.raises(JournalDamaged, match="content is not a step"):
            read(start + section(b"") + section(body))
    with pytest.raises(JournalDamaged, match="cut short"):
        read_index(io.BytesIO(start))
    with pytest.raises(JournalDamaged, match="does not fit in memory"):
        read(start + section(b"", length=2**63))


def test_a_file_of_another_format_is_refused_in_a_sentence() -> None:
    content = file_of(step_of([group_of(0, [1, 0])]))
    for other in (b"rayloom journal 99\n", b"rayloom journal 1\n"):
        number = other.split()[-1].decode()
        with pytest.raises(JournalDamaged, match=f"^format {number}, expected {FORMAT}: another"):
            read_index(io.BytesIO(other + content.partition(b"\n")[2]))
    with pytest.raises(JournalDamaged, match=f"no journal of format {FORMAT}"):
        read_step(io.BytesIO(b"PK\x03\x04" + content))


def journal_in(
    directory: Path, *, keep_steps: int = 9, keep_bytes: int = 1 << 30, term: int = 1
) -> Journal:
    return Journal(
        directory=directory,
        term=term,
        keep_steps=keep_steps,
        keep_bytes=keep_bytes,
        max_policy_age=0,
        group_rule=RULE,
    )


def result_of(number: int) -> object:
    merged = classify_groups([group_of(number, [1, 0])], step_settings())
    return build_step(merged, step_settings(), step=number, trainer_version=number - 1)


def test_the_newest_steps_are_kept_and_no_term_overwrites_another(tmp_path: Path) -> None:
    (tmp_path / "step-of-mine.journal").touch()
    for term, number in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3)]:
        journal = journal_in(tmp_path, keep_steps=2, term=term)
        assert journal.write(result_of(number)) == ""  # type: ignore[arg-type]
    found = [(file.step, file.term) for file in list_files(tmp_path)]
    assert found == [(3, 1), (3, 2), (4, 1)]
    kept = {file_name(step, term=term) for step, term in found}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"step-of-mine.journal"}


def test_a_full_journal_removes_its_oldest_steps_but_never_the_newest(
    tmp_path: Path,
) -> None:
    assert journal_in(tmp_path).write(result_of(1)) == ""  # type: ignore[arg-type]
    (first,) = list_files(tmp_path)
    num_bytes = first.path.stat().st_size
    full = journal_in(tmp_path, keep_bytes=int(3.5 * num_bytes))
    for number in range(2, 9):
        assert full.write(result_of(number)) == ""  # type: ignore[arg-type]
        kept = [file.step for file in list_files(tmp_path)]
        assert kept == list(range(max(1, number - 2), number + 1))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3.5 * num_bytes
    # A step that a later term repeats has two files, and both are kept.
    again = journal_in(tmp_path, keep_bytes=int(2.5 * num_bytes), term=2)
    assert again.write(result_of(8)) == ""  # type: ignore[arg-type]
    assert [(file.step, file.term) for file in list_files(tmp_path)] == [(8, 1), (8, 2)]
    small = journal_in(tmp_path, keep_bytes=1, term=3)
    assert small.write(result_of(9)) == ""  # type: ignore[arg-type]
    (left,) = list_files(tmp_path)
    with left.path.open("rb") as file:
        assert read_step(file).step == left.step == 9


def test_the_age_bound_of_a_step_includes_republished_versions(
    tmp_path: Path,
) -> None:
    journal = replace(journal_in(tmp_path), max_policy_age=1)
    bounds = []
    for number, republished in [(6, ()), (7, (2,)), (8, (7,)), (9, (6, 7))]:
        result = result_of(number)
        assert journal.write(result, republished=republished) == ""  # type: ignore[arg-type]
        with (tmp_path / file_name(number, term=1)).open("rb") as file:
            bounds.append(read_step(file).max_policy_age)
    # Step 8 trains version 7, which equals version 6, so a token of version 5 is one step old.
    assert bounds == [1, 1, 2, 3]


def test_a_journal_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    journal = journal_in(tmp_path / "no" / "journal")
    first, second = journal.write(result_of(1)), journal.write(result_of(2))  # type: ignore[arg-type]
    assert "step 1 is not in the journal" in first and "run.journal_steps" in first
    assert second == "" and not (tmp_path / "no").exists()


def test_a_file_whose_rename_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / file_name(1, term=1) / "x").mkdir(parents=True)
    with pytest.raises(OSError):
        write_file(tmp_path, step_of([group_of(0, [1, 0])]))
    assert [path.name for path in tmp_path.iterdir()] == [file_name(1, term=1)]
