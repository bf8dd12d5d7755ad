"""The journal: what is written comes back, the newest is kept, and a full disk ends nothing."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.journal_builders import RULE, group_of, random_group, step_of, through_a_file
from worlds.same import assert_same_fields, assert_same_trajectory
from worlds.settings import step_settings
from worlds.trajectory_builders import make_trajectory, make_turn

from actors.journal.codec import JournalDamaged, read_index, read_step, write_step
from actors.journal.files import Journal, JournalSettings, file_name, list_files, write_file
from actors.journal.record import JournalStep
from actors.merge.groups import TrajectoryGroup, merge_groups
from actors.merge.step import build_step
from actors.trajectory_queue.ledger import EvictionReason
from actors.types import Outcome


def assert_same_step(got: JournalStep, expected: JournalStep) -> None:
    assert replace(got, entries=()) == replace(expected, entries=())
    for a, b in zip(got.entries, expected.entries, strict=True):
        assert_same_trajectory(a.trajectory, b.trajectory)
        assert (a.reason, a.baseline_return, a.problem) == (b.reason, b.baseline_return, b.problem)
        assert a.mismatches == b.mismatches
        for one, other in zip(a.samples, b.samples, strict=True):
            assert_same_fields(one, other)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_a_step_comes_back_from_its_file_as_it_was(seed: int, num_groups: int) -> None:
    step = step_of(
        [random_group(number, seed) for number in range(num_groups)], number=4 + seed % 99
    )
    assert_same_step(through_a_file(step), step)


def test_a_step_without_groups_comes_back_too() -> None:
    assert_same_step(through_a_file(step_of([])), step_of([]))


def test_an_entry_holds_what_the_trainer_was_handed() -> None:
    first = make_turn([10, 20, 30], [40, 50], logprobs=[-1, np.nan], version=3)
    second = make_turn([10, 20, 30, 40, 50, 60, 70], [80, 90], logprobs=[-2, -3], version=4)
    winner = make_trajectory([first, replace(second, reward=1.0)], rollout_id="g000000.0-0")
    loser = make_trajectory([first, second], rollout_id="g000000.0-1")
    group = TrajectoryGroup(group_id="g000000.0", trajectories=(winner, loser))
    step = through_a_file(step_of([group], number=6))
    (sample,) = step.entries[0].samples
    assert (sample.turns, sample.prompt_length, sample.num_tokens) == ((0, 1), 3, 9)
    assert sample.positions.tolist() == [3, 7, 8] and sample.token_ids.tolist() == [40, 80, 90]
    assert sample.versions.tolist() == [3, 4, 4] and sample.logprobs.tolist() == [-1, -2, -3]
    # Returns 1 and 0: mean 1/2, deviation 1/sqrt(2).
    assert sample.advantages == pytest.approx([0.7071058] * 3, abs=1e-6)
    assert (step.step, step.trainer_version) == (6, 5)
    assert step.num_packed_trained == 6 and step.entries[0].baseline_return == 1.0


def test_what_is_not_in_the_loss_has_no_trained_token_and_a_reason() -> None:
    group = group_of(0, [1, 0, 0], outcomes={2: Outcome.TRUNCATED_TOKENS})
    masked = through_a_file(step_of([group])).entries[2]
    # Its last turn was scored, so that it stands in the baseline.
    assert masked.reason is EvictionReason.MASKED and masked.baseline_return == 0.0
    assert masked.num_trained == 0 and len(masked.samples) == 1


def test_what_is_wrong_with_a_trajectory_is_kept() -> None:
    group = group_of(0, [1, 0, float("nan")])
    entries = through_a_file(step_of([group])).entries
    assert [entry.problem for entry in entries[:2]] == ["", ""]
    assert entries[2].problem.startswith("return nan, expected a finite number; look at")


def test_numbers_of_other_kinds_come_back_as_plain_ones() -> None:
    group = group_of(0, [1, 0])
    first, second = group.trajectories
    kinds = (replace(first, best_return=Fraction(1, 4)), replace(second, best_return=np.float32(2)))
    entries = through_a_file(step_of([replace(group, trajectories=kinds)])).entries
    assert [entry.trajectory.best_return for entry in entries] == [0.25, 2.0]


def test_the_file_is_plain_numpy_and_json() -> None:
    file = io.BytesIO()
    write_step(file, step_of([group_of(0, [1, 0])]))
    file.seek(0)
    archive = np.load(file, allow_pickle=False)
    assert archive["trained_ids"].shape == (24,) and archive["turns"].shape == (4,)
    assert json.loads(archive["header.json"])["step"] == 1


def test_the_header_alone_tells_who_is_in_a_step() -> None:
    file = io.BytesIO()
    write_step(file, step_of([group_of(3, [1, 0])], number=7, epoch=2))
    index = read_index(file)
    assert (index.step, index.epoch) == (7, 2)
    assert index.trajectory_ids == ("g000003.0-0.a0", "g000003.0-1.a0")


def test_another_way_of_compression_is_damage_and_no_fault_of_the_disk() -> None:
    file = io.BytesIO()
    write_step(file, step_of([group_of(0, [1, 0])]))
    data = file.getvalue()
    # Method 8, deflate, becomes 12, bzip2, in every header of the archive.
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.find(signature)
        while at >= 0:
            data = data[: at + place] + b"\x0c\x00" + data[at + place + 2 :]
            at = data.find(signature, at + 1)
    for read in (read_step, read_index):
        with pytest.raises(JournalDamaged, match="Invalid data stream"):
            read(io.BytesIO(data))


@pytest.mark.parametrize("cut", [0, 3, 400, -30])
def test_a_file_that_was_cut_short_is_called_damaged(cut: int) -> None:
    file = io.BytesIO()
    write_step(file, step_of([group_of(0, [1, 0])]))
    with pytest.raises(JournalDamaged):
        read_step(io.BytesIO(file.getvalue()[:cut]))


@given(st.data())
def test_a_flipped_byte_is_found_or_changes_nothing(data: st.DataObject) -> None:
    file, step = io.BytesIO(), step_of([group_of(0, [1, 0])])
    write_step(file, step)
    content = bytearray(file.getvalue())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = read_step(io.BytesIO(content))
    except JournalDamaged:
        return
    assert_same_step(found, step)


def test_a_file_of_another_format_is_refused_by_name() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.json", '{"format": 99}')
    with pytest.raises(JournalDamaged, match="format 99, expected 1"):
        read_step(file)


def settings(directory: Path, *, keep_steps: int = 9, epoch: int = 1) -> JournalSettings:
    return JournalSettings(
        directory=directory, epoch=epoch, keep_steps=keep_steps, max_policy_age=0, group_rule=RULE
    )


def result_of(number: int) -> object:
    merged = merge_groups([group_of(number, [1, 0])], step_settings())
    return build_step(merged, step_settings(), step=number - 1, trainer_version=number - 1)


def test_the_newest_steps_are_kept_and_an_epoch_never_writes_over_another(tmp_path: Path) -> None:
    for epoch, number in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3)]:
        journal = Journal(settings(tmp_path, keep_steps=2, epoch=epoch))
        assert journal.write(result_of(number)) == ""  # type: ignore[arg-type]
    found = [(file.step, file.epoch) for file in list_files(tmp_path)]
    assert found == [(3, 1), (3, 2), (4, 1)]
    assert {path.name for path in tmp_path.iterdir()} == {
        file_name(step, epoch=epoch) for step, epoch in found
    }


def test_a_journal_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    journal = Journal(settings(tmp_path / "no" / "journal"))
    first, second = journal.write(result_of(1)), journal.write(result_of(2))  # type: ignore[arg-type]
    assert "step 1 is not in the journal" in first and "run.journal_steps" in first
    assert second == "" and not (tmp_path / "no").exists()


def test_a_file_whose_rename_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / file_name(1, epoch=1) / "x").mkdir(parents=True)
    with pytest.raises(OSError):
        write_file(tmp_path, step_of([group_of(0, [1, 0])]))
    assert [path.name for path in tmp_path.iterdir()] == [file_name(1, epoch=1)]
