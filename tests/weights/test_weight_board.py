"""The weight board's state machine: terms, publications, leases and commands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.weights.actor import BoardClient, start_board
from actors.weights.board import (
    POLL_GRACE_S,
    Board,
    Command,
    CommandKind,
    NotPublished,
    Publication,
    RendezvousNeeded,
    ReplicasLagging,
    StaleTerm,
    StaleVersion,
    WeightCommandFailed,
    WeightGroup,
    WeightManifest,
)

MANIFEST = WeightManifest(names=(), dtypes=(), shapes=(), offsets=(), num_bytes=0)
GROUP = WeightGroup(manifest=MANIFEST, checksum="", buffer=None)


def publication(term: int, version: int) -> Publication:
    return Publication(term=term, version=version, groups=(GROUP,))


def poll(
    board: Board,
    replica: str,
    held: tuple[int, int] | None = None,
    *,
    now: float = 0.0,
    num_workers: int = 1,
) -> Publication | Command | None:
    term, version = held or (None, None)
    board.heartbeat(replica, term, version=version, num_workers=num_workers, lease_s=5.0, now=now)
    return board.next_for(replica, now=now)


def report(board: Board, replica: str, term: int, version: int, *, now: float = 0.0) -> None:
    board.report(replica, term, version=version, check_logprobs=None, now=now)


def test_replica_is_given_the_current_publication_until_it_holds_it() -> None:
    board = Board()
    assert poll(board, "a") is None
    board.publish(publication(1, 0))
    assert poll(board, "a") == publication(1, 0)
    assert board.laggards() == ("a",)
    report(board, "a", 1, 0)
    assert board.laggards() == ()
    assert poll(board, "a", (1, 0)) is None


def test_replica_that_joins_late_is_given_the_newest_version_alone() -> None:
    board = Board()
    for version in range(3):
        board.publish(publication(1, version))
    assert poll(board, "late") == publication(1, 2)


def test_same_version_of_a_newer_term_is_loaded_again() -> None:
    board = Board()
    board.publish(publication(1, 7))
    assert poll(board, "a", (1, 7)) is None
    board.publish(publication(2, 7))
    assert poll(board, "a", (1, 7)) == publication(2, 7)


def test_newer_term_may_go_back_in_versions_and_fences_the_older_one() -> None:
    board = Board()
    board.publish(publication(1, 9))
    board.publish(publication(2, 4))
    with pytest.raises(StaleTerm, match="got term 1, expected at least 2"):
        board.publish(publication(1, 10))
    with pytest.raises(StaleVersion, match="got policy version 3, expected at least 4"):
        board.publish(publication(2, 3))
    with pytest.raises(StaleTerm):
        board.submit(1, CommandKind.INIT)
    assert board.current == publication(2, 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_current_publication_never_goes_back(attempts: list[tuple[int, int]]) -> None:
    board = Board()
    newest = (-1, -1)
    for attempt in attempts:
        try:
            board.publish(publication(*attempt))
        except (StaleTerm, StaleVersion):
            assert attempt < newest
        else:
            assert attempt >= newest
            newest = attempt
        assert board.current == (None if newest[0] < 0 else publication(*newest))


def test_silent_replica_is_forgotten_and_no_longer_waited_for() -> None:
    board = Board(apply_limit_s=60.0)
    board.publish(publication(1, 0))
    poll(board, "dead", (1, 0), now=0.0)
    poll(board, "slow", now=0.0)
    assert board.forget_silent(now=5.0 + POLL_GRACE_S) == ()
    assert board.forget_silent(now=5.1 + POLL_GRACE_S) == ("dead",)
    assert board.laggards() == ("slow",)
    assert board.forget_silent(now=61.0) == ("slow",)


def test_report_of_a_forgotten_replica_is_ignored_until_it_polls_again() -> None:
    board = Board()
    board.publish(publication(1, 0))
    poll(board, "a")
    board.leave("a")
    report(board, "a", 1, 0)
    assert board.status().replicas == ()
    assert poll(board, "a", (1, 0)) is None
    assert [replica.version for replica in board.status().replicas] == [0]


def test_init_deals_out_rank_offsets_by_the_workers_of_each_replica() -> None:
    board = Board()
    poll(board, "a", num_workers=2)
    poll(board, "b", num_workers=4)
    assert board.status().num_workers == 6
    board.submit(1, CommandKind.INIT, payload={"rank_offset": 1, "world_size": 7})
    payloads = {name: poll(board, name, num_workers=n) for name, n in (("a", 2), ("b", 4))}
    offsets = {
        name: command.payload["rank_offset"]
        for name, command in payloads.items()
        if isinstance(command, Command)
    }
    assert offsets == {"a": 1, "b": 3}


def test_init_with_a_world_size_that_does_not_add_up_is_refused() -> None:
    board = Board()
    poll(board, "a", num_workers=2)
    with pytest.raises(ValueError, match="transfer group of 4 ranks, expected 3"):
        board.submit(1, CommandKind.INIT, payload={"rank_offset": 1, "world_size": 4})


def test_commands_reach_each_member_in_order_and_only_once() -> None:
    board = Board()
    poll(board, "a")
    kinds = [CommandKind.INIT, CommandKind.START, CommandKind.UPDATE, CommandKind.FINISH]
    sequences = [board.submit(1, kind) for kind in kinds]
    seen = []
    while isinstance(command := poll(board, "a"), Command):
        assert poll(board, "a") == command
        seen.append((command.sequence, command.kind))
        board.acknowledge("a", command.sequence, error=None)
    assert seen == list(zip(sequences, kinds, strict=True))
    assert all(board.waiting_for(sequence) == () for sequence in sequences)


def test_replica_that_joins_or_leaves_after_init_calls_for_a_rendezvous() -> None:
    board = Board()
    poll(board, "a")
    assert not board.needs_rendezvous
    board.submit(1, CommandKind.INIT)
    poll(board, "b")
    assert board.status().needs_rendezvous
    with pytest.raises(RendezvousNeeded, match=r"joined \['b'\] and left \[\]"):
        board.submit(1, CommandKind.START)
    board.submit(1, CommandKind.INIT)
    assert not board.needs_rendezvous
    board.leave("a")
    with pytest.raises(RendezvousNeeded, match=r"joined \[\] and left \['a'\]"):
        board.submit(1, CommandKind.START)


def test_command_fails_for_the_member_that_reports_an_error_and_the_one_that_leaves() -> None:
    board = Board()
    for name in ("a", "b", "c"):
        poll(board, name)
    sequence = board.submit(1, CommandKind.INIT)
    board.acknowledge("a", sequence, error="out of memory")
    board.leave("b")
    assert board.waiting_for(sequence) == ("c",)
    board.acknowledge("c", sequence, error=None)
    failures = board.close_command(sequence)
    assert failures == {"a": "out of memory", "b": "the replica left or fell silent"}


def test_version_that_travelled_by_commands_is_not_handed_to_who_lacks_it() -> None:
    board = Board()
    poll(board, "a")
    board.submit(1, CommandKind.INIT)
    poll(board, "late")
    board.publish(Publication(term=1, version=3))
    assert poll(board, "late") is None
    assert "late" in board.laggards()


@dataclass(kw_only=True)
class FakeReplica:
    """Polls a real board and executes commands by writing them down."""

    name: str
    board: Any
    fails_on: CommandKind | None = None
    held: tuple[int | None, int | None] = (None, None)
    executed: list[CommandKind] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            work = await self.board.poll.remote(self.name, *self.held, 1.0)
            if not isinstance(work, Command):
                continue
            self.executed.append(work.kind)
            if work.kind is CommandKind.FINISH:
                self.held = (work.term, work.version)
                await self.board.report.remote(self.name, work.term, work.version, None)
            error = "refused" if work.kind is self.fails_on else None
            await self.board.acknowledge.remote(self.name, work.sequence, error)


def send_like_vllm(client: BoardClient) -> None:
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 3})
    client.start_weight_update()
    client.update_weights({"names": []})
    client.finish_weight_update()


async def test_board_client_drives_every_replica_through_vllms_handshake(cluster: None) -> None:
    board = start_board()
    replicas = [FakeReplica(name=name, board=board) for name in ("a", "b")]
    running = [asyncio.create_task(replica.run()) for replica in replicas]
    while len((await board.status.remote()).replicas) < 2:
        await asyncio.sleep(0.01)
    client = BoardClient(board, 1, timeout_s=20.0)
    with pytest.raises(ValueError, match=r"set client\.version"):
        await asyncio.to_thread(send_like_vllm, client)
    client.version = 5
    await asyncio.to_thread(client.finish_weight_update)
    published = await board.wait_published.remote(5, 2, 10.0)
    assert (published.term, published.version, len(published.replicas)) == (1, 5, 2)
    kinds = [CommandKind.INIT, CommandKind.START, CommandKind.UPDATE, CommandKind.FINISH]
    assert all(replica.executed == kinds for replica in replicas)
    replicas[0].fails_on = CommandKind.START
    with pytest.raises(WeightCommandFailed, match="refused"):
        await asyncio.to_thread(client.start_weight_update)
    for task in running:
        task.cancel()
    with pytest.raises(WeightCommandFailed, match=r"not answered by \['a', 'b'\]"):
        await board.command.remote(1, CommandKind.START, None, None, 0.1)
    await board.publish.remote(2, 6, [])
    with pytest.raises(ReplicasLagging, match="version 6"):
        await board.wait_published.remote(6, 1, 0.1)
    with pytest.raises(NotPublished, match="the current one is 6"):
        await board.wait_published.remote(5, 1, 0.1)
