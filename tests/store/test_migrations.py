"""Tests of the migration of a stored run: complete or not at all, once, after a copy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest
from sqlalchemy import Column, Connection, ForeignKey, MetaData, String, Table, inspect, select
from worlds.builders.record_builders import step_record
from worlds.builders.session_builders import session_request, turn_added
from worlds.builders.store_builders import write_under_way
from worlds.runs.stored_run import unpack_run

from service.cli.commands import keys
from service.launch.resume import move_finished
from service.launch.run_dir import RunDir
from service.store import tables
from service.store.errors import LeaseHeld, StoreError
from service.store.leases import own_name
from service.store.migrations import FIRST_FORMAT, STEPS, Step, add_column, newest_format
from service.store.read_only import ReadOnlyStore
from service.store.run_store import RunStore
from service.store.sessions import SessionStore
from service.store.submissions import SubmissionStore, packed

PlaceOf = Callable[[Path], str]
NEXT = tables.FORMAT
# The table of training steps after the migration step of these tests.
MOVED = Table("steps", MetaData(), Column("step"), Column("colour", String))


class Painting:
    """A migration step that adds a column and counts how often it ran."""

    def __init__(self, *, fails: bool = False) -> None:
        self.num_runs, self._fails = 0, fails

    def __call__(self, connection: Connection) -> None:
        self.num_runs += 1
        add_column(
            connection, "steps", Column("colour", String, nullable=False, server_default="red")
        )
        connection.execute(MOVED.update().where(MOVED.c.step == 2).values(colour="blue"))
        if self._fails:
            raise KeyError("a fault in a step")

    @property
    def steps(self) -> dict[int, Step]:
        return {**STEPS, NEXT: self}


def write_run(place: str, *, owner: str = "gone:nobody") -> None:
    """Write a run of the current format with two training steps."""
    with closing(RunStore(place)) as store:
        term = store.acquire_lease(owner=owner).term
        for step in (1, 2):
            store.add_step(step_record(step), term=term, new_events=())


def colours(store: ReadOnlyStore) -> list[str]:
    query = select(MOVED.c.colour).order_by(MOVED.c.step)
    return list(store.read(lambda connection: connection.execute(query).scalars().all()))


def stored_format(place: str) -> int:
    with closing(ReadOnlyStore(place, steps={**STEPS, NEXT: Painting()}, may_be_older=True)) as at:
        return int(at.read(lambda connection: connection.scalar(select(tables.formats.c.number))))


def test_there_is_a_migration_step_for_each_format() -> None:
    assert list(STEPS) == list(range(FIRST_FORMAT, tables.FORMAT))
    assert newest_format() == tables.FORMAT


def test_the_next_lease_migrates_a_run_once(
    tmp_path: Path, place_of: PlaceOf, caplog: pytest.LogCaptureFixture
) -> None:
    place, painting = place_of(tmp_path), Painting()
    write_run(place)
    for term in (2, 3):
        with closing(RunStore(place, may_be_older=True, steps=painting.steps)) as store:
            # The data that is read before the lease exists in both formats.
            assert store.newest_term() == term - 1 and store.checkpoints() == []
            assert store.acquire_lease(owner="b").term == term
            assert colours(store) == ["red", "blue"]
    assert painting.num_runs == 1 and stored_format(place) == NEXT + 1
    [said] = [record.getMessage() for record in caplog.records if "moved" in record.getMessage()]
    assert f"was moved forward from format {NEXT} to {NEXT + 1}" in said
    with pytest.raises(StoreError, match="use the newer Rayloom that wrote it"):
        RunStore(place)
    copy = tmp_path / f"run.db.format-{NEXT}.bak"
    if place.startswith("sqlite"):
        assert said.endswith(str(copy))
        with closing(ReadOnlyStore(copy)) as before:
            assert before.newest_term() == 1
            names = before.read(lambda connection: inspect(connection).get_columns("steps"))
            assert "colour" not in [column["name"] for column in names]


def test_a_failed_migration_leaves_the_run_unchanged(tmp_path: Path, place_of: PlaceOf) -> None:
    place = place_of(tmp_path)
    write_run(place)
    failing = Painting(fails=True)
    with closing(RunStore(place, may_be_older=True, steps=failing.steps)) as store:
        with pytest.raises(KeyError, match="a fault in a step"):
            store.acquire_lease(owner="b")
        assert store.newest_term() == 1
    assert stored_format(place) == NEXT
    with closing(RunStore(place)) as store:
        assert store.acquire_lease(owner="c").term == 2


def test_two_processes_migrate_a_run_only_once(tmp_path: Path, place_of: PlaceOf) -> None:
    place, painting, together = place_of(tmp_path), Painting(), Barrier(2)
    write_run(place)

    def take(owner: str) -> int:
        with closing(RunStore(place, may_be_older=True, steps=painting.steps)) as store:
            together.wait()
            try:
                return store.acquire_lease(owner=owner, unless_held=True).term
            except LeaseHeld:
                return 0

    with ThreadPoolExecutor(2) as threads:
        # The owner is this process, which is alive.
        assert sorted(threads.map(take, [own_name()] * 2)) == [0, 2]
    assert painting.num_runs == 1


def test_a_held_run_is_not_migrated(tmp_path: Path, place_of: PlaceOf) -> None:
    place, painting = place_of(tmp_path), Painting()
    write_run(place, owner=own_name())
    with closing(RunStore(place, may_be_older=True, steps=painting.steps)) as store:
        with pytest.raises(LeaseHeld):
            store.acquire_lease(owner="b", unless_held=True)
        with pytest.raises(LeaseHeld):
            store.move_forward()
    assert painting.num_runs == 0 and stored_format(place) == NEXT
    with closing(RunStore(place)) as before:
        before.release(1)
    with closing(RunStore(place, may_be_older=True, steps=painting.steps)) as store:
        store.move_forward()
        assert store.newest_term() == 1 and colours(store) == ["red", "blue"]


def test_a_writer_without_a_lease_refuses_an_older_run(tmp_path: Path, place_of: PlaceOf) -> None:
    place = place_of(tmp_path)
    write_run(place)
    with pytest.raises(StoreError, match=f"older format than this Rayloom's {NEXT + 1}; move it"):
        RunStore(place, steps=Painting().steps)
    assert stored_format(place) == NEXT


def test_a_reader_sees_an_older_run_in_the_new_format_without_changing_it(
    tmp_path: Path, place_of: PlaceOf
) -> None:
    place, painting = place_of(tmp_path), Painting()
    write_run(place)
    if not place.startswith("sqlite"):
        with pytest.raises(StoreError, match="move it forward first: resume the run with --res"):
            ReadOnlyStore(place, steps=painting.steps)
        return
    before = (tmp_path / "run.db").read_bytes()
    with closing(ReadOnlyStore(place, steps=painting.steps)) as looking:
        assert looking.newest_term() == 1 and colours(looking) == ["red", "blue"]
        assert looking.location == str(tmp_path / "run.db") and not looking.is_older()
    assert (tmp_path / "run.db").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["run.db"]


def test_a_run_that_cannot_be_copied_is_not_migrated(tmp_path: Path) -> None:
    place, painting = f"sqlite:///{tmp_path / 'run.db'}", Painting()
    write_run(place)
    copy = tmp_path / f"run.db.format-{NEXT}.bak"
    copy.mkdir()
    (copy / "in the way").touch()
    with (
        closing(RunStore(place, may_be_older=True, steps=painting.steps)) as store,
        pytest.raises(StoreError, match=r"cannot be copied to .*\.bak .*; expected a writable"),
    ):
        store.acquire_lease(owner="b")
    assert painting.num_runs == 0 and stored_format(place) == NEXT
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.db", copy.name]


def test_the_copy_has_the_committed_rows_only(tmp_path: Path) -> None:
    place = f"sqlite:///{tmp_path / 'run.db'}"
    write_run(place)
    (tmp_path / "run.db").chmod(0o600)
    with closing(RunStore(place)) as store:
        term = store.acquire_lease(owner="b").term
        store.add_step(step_record(3), term=term, new_events=())
        with write_under_way(store) as writing:
            writing.execute(tables.steps.delete())
            store._database.copy_to(tmp_path / "copy.db")
    with closing(ReadOnlyStore(tmp_path / "copy.db")) as copy:
        query = select(tables.steps.c.step).order_by(tables.steps.c.step)
        assert copy.read(lambda reading: reading.execute(query).scalars().all()) == [1, 2, 3]
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600


def test_a_database_with_too_old_a_format_number_is_migrated(
    tmp_path: Path, place_of: PlaceOf
) -> None:
    place = place_of(tmp_path)
    write_run(place)
    with closing(RunStore(place)) as store:
        store.write_of_no_term(
            lambda writing: writing.execute(tables.formats.update().values(number=NEXT - 1))
        )
    with closing(RunStore(place, may_be_older=True)) as store:
        assert store.is_older()
        store.move_forward()
        assert not store.is_older() and store.format_number() == NEXT


def test_the_migration_drops_the_table_of_requests_being_sampled(
    tmp_path: Path, place_of: PlaceOf
) -> None:
    """Migrate a run of format 12, which had such a table with references to sessions."""
    place = place_of(tmp_path)
    intents = Table(
        "session_intents",
        MetaData(),
        Column("session_id", String, ForeignKey(tables.sessions.c.id), primary_key=True),
        Column("request_id", String, primary_key=True),
    )

    def write_format_12(writing: Connection) -> None:
        intents.create(writing)
        writing.execute(intents.insert().values(session_id="a-0", request_id="lost"))
        writing.execute(tables.formats.update().values(number=12))

    with closing(RunStore(place)) as store:
        term = store.acquire_lease(owner="gone:nobody").term
        SubmissionStore(store).add([packed(session_request("a"))], term=term)
        SessionStore(store).apply([turn_added("a-0")], term=term)
        store.write_of_no_term(write_format_12)
    with closing(RunStore(place, may_be_older=True)) as store:
        assert store.is_older()
        term = store.acquire_lease(owner="b").term
        assert not store.read(_has_intents)
        SessionStore(store).apply([turn_added("a-0", 1)], term=term)
        found = SessionStore(store).load("a-0")
        assert found is not None and [turn.number for turn in found[1]] == [0, 1]
        SubmissionStore(store).cancel("a", term=term)


def _has_intents(connection: Connection) -> bool:
    places = connection.get_execution_options().get("schema_translate_map") or {}
    return inspect(connection).has_table("session_intents", schema=places.get(None))


def test_the_keys_of_an_older_run_can_be_managed(tmp_path: Path) -> None:
    run_dir = unpack_run(tmp_path)
    assert keys.listing(run_dir.path) == "the run has no named keys"
    assert run_dir.database_file.with_name("rayloom.db.format-9.bak").is_file()
    with run_dir.looked_into() as store:
        assert store.format_number() == tables.FORMAT


def test_a_finished_run_is_migrated_without_a_new_term(tmp_path: Path) -> None:
    run_dir = RunDir(path=tmp_path)
    write_run(run_dir.database_url)
    move_finished(run_dir)
    with run_dir.looked_into() as store:
        assert store.newest_term() == 1 and not store.is_older()
