"""What a user is told when engines die and are replaced: each loss once, each return once."""

from __future__ import annotations

from actors.weights.board import BoardStatus, ReplicaReport
from service.run.health import EngineChange, EngineWatch


def board(version: int, **versions: int | None) -> BoardStatus:
    """A board at `version`, and the version that each of its replicas holds."""
    replicas = tuple(
        ReplicaReport(
            replica_id=name,
            epoch=None if held is None else 1,
            version=held,
            num_workers=1,
            load_s=0.1,
            parity=None,
            silent_s=0.0,
        )
        for name, held in versions.items()
    )
    return BoardStatus(
        epoch=1, version=version, newest_epoch=1, replicas=replicas, needs_rendezvous=False
    )


def test_a_start_and_a_publish_are_no_news() -> None:
    watch = EngineWatch(num_expected=2)
    looks = [
        board(0),
        board(0, a=None),
        board(0, a=0, b=None),
        board(0, a=0, b=0),
        board(1, a=0, b=0),
        board(1, a=1, b=0),
        board(1, a=1, b=1),
    ]
    assert {watch.check(status) for status in looks} == {EngineChange()}


def test_a_loss_and_a_return_are_told_once_each() -> None:
    watch = EngineWatch(num_expected=2)
    watch.check(board(3, a=3, b=3))
    lost = watch.check(board(3, a=3))
    assert lost == EngineChange(num_lost=1, text="an engine was lost; 1 of 2 ready")
    assert watch.check(board(4, a=3, c=None)) == EngineChange()
    assert watch.check(board(4, a=4, c=4)).text == "an engine is back; 2 of 2 ready"
    assert watch.check(board(5, a=5, c=5)) == EngineChange()


def test_all_engines_at_once_are_one_sentence() -> None:
    watch = EngineWatch(num_expected=2)
    watch.check(board(1, a=1, b=1))
    assert watch.check(board(1)) == EngineChange(
        num_lost=2, text="2 engines were lost; 0 of 2 ready"
    )
    assert watch.check(board(1, c=1)).text == "an engine is back; 1 of 2 ready"
    assert watch.check(board(1, c=1, d=1)).text == "an engine is back; 2 of 2 ready"


def test_a_replacement_between_two_looks_is_both() -> None:
    watch = EngineWatch(num_expected=1)
    watch.check(board(1, a=1))
    news = watch.check(board(1, b=1))
    assert news == EngineChange(
        num_lost=1, text="an engine was lost, an engine is back; 1 of 1 ready"
    )
