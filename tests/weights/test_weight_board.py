"""Tests of the weight board: terms, publications, leases and seats, and of its actor."""

from __future__ import annotations

import asyncio

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from actors.weights.actor import Keeping, start_board
from actors.weights.board import (
    MAX_FAILED_BROADCASTS,
    POLL_GRACE_S,
    Board,
    NotPublished,
    Publication,
    Seat,
    StaleTerm,
    StaleVersion,
    WeightGroup,
    WeightManifest,
)

MANIFEST = WeightManifest(names=(), dtypes=(), shapes=(), offsets=(), num_bytes=0)
GROUP = WeightGroup(manifest=MANIFEST, checksum="", buffer=None)


def bad_replicas(num_replicas: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, num_replicas - 1), max_size=3)


def publication(term: int, version: int) -> Publication:
    return Publication(term=term, version=version, groups=(GROUP,))


def poll(
    board: Board,
    replica: str,
    held: tuple[int, int] | None = None,
    *,
    now: float = 0.0,
    num_workers: int = 1,
    is_held: bool = False,
) -> Publication | bool | None:
    term, version = held or (None, None)
    board.heartbeat(
        replica,
        term,
        version=version,
        num_workers=num_workers,
        is_held=is_held,
        lease_s=5.0,
        now=now,
    )
    return board.next_for(replica)


def report(board: Board, replica: str, term: int, version: int, *, now: float = 0.0) -> None:
    board.report(replica, term, version=version, scores=None, now=now)


def test_a_replica_gets_the_current_publication_until_it_holds_it() -> None:
    board = Board(now=0.0)
    assert poll(board, "a") is None
    board.publish(publication(1, 0), now=0.0)
    assert poll(board, "a") == publication(1, 0)
    assert board.laggards() == ("a",)
    report(board, "a", 1, 0)
    assert board.laggards() == ()
    assert poll(board, "a", (1, 0)) is None


def test_a_replica_that_joins_late_gets_only_the_newest_version() -> None:
    board = Board(now=0.0)
    for version in range(3):
        board.publish(publication(1, version), now=0.0)
    assert poll(board, "late") == publication(1, 2)


def test_the_same_version_of_a_newer_term_is_loaded_again() -> None:
    board = Board(now=0.0)
    board.publish(publication(1, 7), now=0.0)
    assert poll(board, "a", (1, 7)) is None
    board.publish(publication(2, 7), now=0.0)
    assert poll(board, "a", (1, 7)) == publication(2, 7)


def test_a_newer_term_may_publish_an_older_version_and_excludes_the_older_term() -> None:
    board = Board(now=0.0)
    board.publish(publication(1, 9), now=0.0)
    board.publish(publication(2, 4), now=0.0)
    with pytest.raises(StaleTerm, match="got term 1, expected at least 2"):
        board.publish(publication(1, 10), now=0.0)
    with pytest.raises(StaleVersion, match="got policy version 3, expected at least 4"):
        board.publish(publication(2, 3), now=0.0)
    assert board.current == publication(2, 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_the_current_publication_never_goes_back(attempts: list[tuple[int, int]]) -> None:
    board = Board(now=0.0)
    newest = (-1, -1)
    for attempt in attempts:
        try:
            board.publish(publication(*attempt), now=0.0)
        except (StaleTerm, StaleVersion):
            assert attempt < newest
        else:
            assert attempt >= newest
            newest = attempt
        assert board.current == (None if newest[0] < 0 else publication(*newest))


def test_a_silent_replica_is_forgotten_and_no_longer_waited_for() -> None:
    board = Board(now=0.0)
    board.publish(publication(1, 0), now=0.0)
    poll(board, "dead", (1, 0), now=0.0)
    poll(board, "slow", now=0.0)
    assert board.forget_silent(now=5.0 + POLL_GRACE_S) == ()
    board.beat("slow", lease_s=5.0, now=5.0 + POLL_GRACE_S)
    assert board.forget_silent(now=5.1 + POLL_GRACE_S) == ("dead",)
    assert board.laggards() == ("slow",)
    # A beat only extends the lease; without one, a slow replica is forgotten too.
    assert board.forget_silent(now=10.1 + 2 * POLL_GRACE_S) == ("slow",)
    board.beat("slow", lease_s=5.0, now=60.0)
    assert board.status(now=60.0).replicas == ()


def test_quiet_time_counts_from_the_last_live_replica_or_progress_of_a_start() -> None:
    board = Board(now=0.0)
    board.starting("a", work=0.0, now=1.0)
    board.starting("a", work=2.5, now=20.0)
    board.starting("a", work=2.5, now=30.0)
    assert board.status(now=30.0).quiet_s == 10.0
    poll(board, "a", now=40.0)
    board.forget_silent(now=50.0)
    assert board.status(now=50.0).quiet_s == 0.0
    board.forget_silent(now=100.0)
    assert board.status(now=100.0).quiet_s == 50.0


def test_only_progress_of_replicas_that_lack_the_version_ends_the_quiet_time() -> None:
    board = Board(now=0.0)
    board.publish(publication(1, 0), now=0.0)
    poll(board, "holds", (1, 0), now=5.0)
    poll(board, "waits", now=10.0)
    for now in (20.0, 30.0, 40.0):
        poll(board, "holds", (1, 0), now=now)
        board.beat("waits", num_loaded=0, lease_s=5.0, now=now)
        board.forget_silent(now=now)
    assert board.status(now=40.0).quiet_s == 30.0
    board.beat("waits", num_loaded=1, lease_s=5.0, now=41.0)
    assert board.status(now=45.0).quiet_s == 4.0
    report(board, "waits", 1, 0, now=47.0)
    board.forget_silent(now=48.0)
    assert board.status(now=48.0).quiet_s == 0.0


def test_starts_and_loads_that_repeatedly_crash_at_one_place_are_not_progress() -> None:
    board = Board(now=0.0)
    board.publish(publication(1, 0), now=0.0)
    now = 0.0
    for attempt in range(10):
        for work in (0.0, 10.0, 20.0):
            now += 10.0
            board.starting(f"crashes-{attempt}", work=work, now=now)
        board.leave(f"crashes-{attempt}")
    assert board.status(now=now).quiet_s == 270.0
    board.starting("further", work=21.0, now=now)
    assert board.status(now=now).quiet_s == 0.0
    since = now
    for attempt in range(10):
        poll(board, f"loads-{attempt}", now=now)
        for num_loaded in (1, 2):
            now += 10.0
            board.beat(f"loads-{attempt}", num_loaded=num_loaded, lease_s=5.0, now=now)
        board.leave(f"loads-{attempt}")
    assert board.status(now=now).quiet_s == now - since - 20.0
    # After a version was loaded, progress of the next start counts from its beginning.
    poll(board, "loads", now=now)
    report(board, "loads", 1, 0, now=now)
    board.leave("loads")
    board.starting("again", work=5.0, now=now + 50.0)
    assert board.status(now=now + 50.0).quiet_s == 0.0


def test_a_report_of_a_forgotten_replica_is_ignored_until_it_polls_again() -> None:
    board = Board(now=0.0)
    board.publish(publication(1, 0), now=0.0)
    poll(board, "a")
    board.leave("a")
    report(board, "a", 1, 0)
    assert board.status(now=0.0).replicas == ()
    assert poll(board, "a", (1, 0)) is None
    assert [replica.version for replica in board.status(now=0.0).replicas] == [0]


def test_a_retired_replica_is_distinguished_from_one_that_died() -> None:
    board = Board(now=0.0)
    for name in ("a", "b"):
        poll(board, name)
    board.leave("a", is_in_order=True)
    board.leave("b")
    status = board.status(now=0.0)
    assert (status.replicas, status.retired) == ((), {"a"})


def test_seats_are_given_per_worker_to_replicas_that_ask_and_lack_the_version() -> None:
    board = Board(now=0.0)
    for name, num_workers in (("a", 2), ("b", 4), ("holds", 1), ("quiet", 1)):
        poll(board, name, num_workers=num_workers)
    board.publish(publication(1, 3), now=0.0)
    report(board, "holds", 1, 3)
    for name in ("a", "b", "holds"):
        board.ask_for_seat(name)
    assert board.waiting() == ("a", "b")
    seats = board.seat(["a", "b", "quiet"], store="host:1")
    assert seats == {
        "a": Seat(store="host:1", name="t1-v3-g1", rank=1, size=7),
        "b": Seat(store="host:1", name="t1-v3-g1", rank=3, size=7),
    }
    assert board.waiting() == () and board.seat(["a", "b"], store="host:2") == {}


def test_a_replica_that_missed_a_broadcast_gets_a_seat_in_the_next_one() -> None:
    board = Board(now=0.0)
    board.publish(publication(1, 3), now=0.0)
    for name in ("a", "b"):
        poll(board, name)
        board.ask_for_seat(name)
    assert board.seat(["a", "b"], store="")["a"].size == 3
    board.leave("b")
    board.ask_for_seat("b")
    board.ask_for_seat("a")
    [seat] = board.seat(["a", "b"], store="").values()
    assert (seat.size, seat.name) == (2, "t1-v3-g2")
    assert board.laggards() == ("a",), "a replica counts as loaded without a report"


@given(st.integers(1, 64).flatmap(lambda num: st.tuples(st.just(num), bad_replicas(num))))
def test_only_replicas_that_cannot_take_part_in_broadcasts_end(
    case: tuple[int, set[int]],
) -> None:
    num_replicas, bad = case
    board = Board(now=0.0)
    board.publish(publication(1, 0), now=0.0)
    num_failed = dict.fromkeys(map(str, range(num_replicas)), 0)
    for name in num_failed:
        poll(board, name)
    num_groups = 0
    while left := board.laggards():
        for name in left:
            board.ask_for_seat(name)
        members = board.seat(left, store="")
        num_groups += 1
        assert members and all(seat.size == len(members) + 1 for seat in members.values())
        if bad & {int(name) for name in members}:
            for name in members:
                num_failed[name] += 1
                if num_failed[name] == MAX_FAILED_BROADCASTS:
                    board.leave(name)
        else:
            for name in members:
                report(board, name, 1, 0)
        if num_groups <= 2 and bad:
            assert len(members) == num_replicas, (
                "a replica is left out after fewer than two failures"
            )
    ended = {name for name, count in num_failed.items() if count == MAX_FAILED_BROADCASTS}
    assert ended == set(map(str, bad))


def test_after_a_load_a_replica_gets_a_seat_with_all_others_again() -> None:
    board = Board(now=0.0)
    for version in range(2):
        board.publish(publication(1, version), now=0.0)
        for name in "abcde":
            poll(board, name)
        for expected in ("abcde", "abcde", "ab", "c", "d", "e"):
            for name in board.laggards():
                board.ask_for_seat(name)
            seats = board.seat(board.waiting(), store="")
            assert "".join(seats) == expected
            if len(seats) < 5:
                for name in seats:
                    report(board, name, 1, version)


async def test_the_board_waits_only_for_live_replicas_and_lists_holders_of_the_version(
    cluster: None,
) -> None:
    board = start_board()
    await board.publish.remote(2, 6, [GROUP])
    for name in ("a", "b"):
        await board.poll.remote(name, None, None, 1.0)
    await board.report.remote("a", 2, 6, None)
    status = await board.wait_published.remote(6, 1, 0.2)
    assert not status.is_loaded and status.holders == {"a"}
    waiting = asyncio.ensure_future(board.wait_published.remote(6, 1, 60.0))
    await board.leave.remote("b")
    status = await waiting
    assert status.is_loaded and [each.replica_id for each in status.replicas] == ["a"]
    with pytest.raises(NotPublished, match="the current one is 6"):
        await board.wait_published.remote(5, 1, 0.1)


async def test_a_group_is_formed_of_replicas_that_ask_and_are_alive(cluster: None) -> None:
    board = start_board()
    await board.publish.remote(1, 1, [GROUP])
    assert await board.form_group.remote(1, 1, "host:1", 0.1) is None
    replicas = [Replica.remote(), Replica.remote()]
    dead, alive = await asyncio.gather(*(each.name.remote() for each in replicas))
    for name, actor in zip((dead, alive), replicas, strict=True):
        await board.join.remote(name, actor)
        await board.poll.remote(name, None, None, 1.0)
    asking = [asyncio.ensure_future(board.take_seat.remote(name, 30.0)) for name in (dead, alive)]
    ray.kill(replicas[0])
    seat = await board.form_group.remote(1, 1, "host:1", 30.0)
    assert (seat.rank, seat.size) == (0, 2)
    assert (await asking[1]).rank == 1
    await board.publish.remote(1, 2, [GROUP])
    assert await board.form_group.remote(1, 1, "host:1", 30.0) is None, (
        "a group was formed for an older version"
    )
    asking[0].cancel()


@pytest.mark.proof
@pytest.mark.slow
async def test_a_runs_board_outlives_its_supervisor_and_ends_without_a_successor(
    cluster: None,
) -> None:
    keeping = Keeping(
        name="run-board",
        namespace="boards",
        orphan_timeout_s=2.0,
        applications=("gone",),
        engines="settings",
    )
    board = start_board(keeping)
    assert await board.open_term.remote(1) == keeping
    for _ in range(6):
        await asyncio.sleep(0.5)
        await board.status.remote(1)
    found = ray.get_actor("run-board", namespace="boards")
    assert await found.open_term.remote(2) == keeping
    with pytest.raises(StaleTerm):
        await board.status.remote(1)
    with pytest.raises(ActorDiedError):
        async with asyncio.timeout(60.0):
            # A call of `status` without a term does not keep the board alive.
            while await found.status.remote():
                await asyncio.sleep(0.5)


@ray.remote(num_cpus=0)
class Replica:
    """An actor process that is alive."""

    def name(self) -> str:
        return ray.get_runtime_context().get_actor_id()


def test_replicas_are_asked_to_hold_and_load_a_new_publication_first() -> None:
    board = Board(now=0.0)
    board.publish(publication(1, 0), now=0.0)
    board.hold(True)
    assert poll(board, "a") == publication(1, 0)
    report(board, "a", 1, 0, now=3.0)
    assert poll(board, "a", (1, 0)) is True
    assert poll(board, "a", (1, 0), is_held=True) is None
    [replica] = board.status(now=5.0).replicas
    assert replica.is_held and (replica.loaded_at, board.status(now=5.0).now) == (3.0, 5.0)
    assert board.status(now=5.0).is_loaded
    board.publish(publication(1, 1), now=6.0)
    assert poll(board, "a", (1, 0), is_held=True) == publication(1, 1)
    board.hold(False)
    assert poll(board, "a", (1, 1), is_held=True) is False
    assert poll(board, "a", (1, 1)) is None


def test_the_status_of_a_replica_has_the_stages_of_its_start() -> None:
    board = Board(now=0.0)
    stages = (("engine: packages", 8.0), ("engine: warm-up", 1.5))
    board.started("a", stages)
    assert board.status(now=1.0).replicas == ()
    for name in ("a", "b"):
        board.heartbeat(name, None, version=None, num_workers=1, lease_s=5.0, now=1.0)
    assert [replica.stages for replica in board.status(now=1.0).replicas] == [stages, ()]
