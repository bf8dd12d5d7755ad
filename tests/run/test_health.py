"""Tests of the rule for /readyz, and of the reports of lost and returned engines."""

from __future__ import annotations

import pytest

from actors.weights.board import BoardStatus, ReplicaReport
from service.api.schemas import ReadyAnswer
from service.report.document import PHASES, Phase
from service.run.health import FAULTS_COUNT_S, EngineWatch, FaultCount, readiness


def board(version: int, *, retired: tuple[str, ...] = (), **versions: int | None) -> BoardStatus:
    """Return the status of a board at `version`. versions: the version that each replica holds."""
    replicas = tuple(
        ReplicaReport(
            replica_id=name,
            term=None if held is None else 1,
            version=held,
            num_workers=1,
        )
        for name, held in versions.items()
    )
    return BoardStatus(term=1, version=version, replicas=replicas, retired=frozenset(retired))


def test_a_start_and_a_publish_are_not_reported() -> None:
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
    assert {watch.check(status, now=0.0) for status in looks} == {""}


def test_a_loss_and_a_return_are_reported_once_each() -> None:
    watch = EngineWatch(num_expected=2)
    watch.check(board(3, a=3, b=3), now=0.0)
    lost = watch.check(board(3, a=3), now=0.0)
    assert (watch.num_lost, lost) == (1, "an engine was lost; 1 of 2 ready")
    assert watch.check(board(4, a=3, c=None), now=0.0) == ""
    assert watch.check(board(4, a=4, c=4), now=0.0) == "an engine is back; 2 of 2 ready"
    assert watch.check(board(5, a=5, c=5), now=0.0) == ""


def test_the_loss_of_all_engines_is_one_report() -> None:
    watch = EngineWatch(num_expected=2)
    watch.check(board(1, a=1, b=1), now=0.0)
    assert watch.check(board(1), now=0.0) == "2 engines were lost; 0 of 2 ready"
    assert watch.num_lost == 2
    assert watch.check(board(1, c=1), now=0.0) == "an engine is back; 1 of 2 ready"
    assert watch.check(board(1, c=1, d=1), now=0.0) == "an engine is back; 2 of 2 ready"


def test_a_replacement_between_two_checks_is_a_loss_and_a_return() -> None:
    watch = EngineWatch(num_expected=1)
    watch.check(board(1, a=1), now=0.0)
    news = watch.check(board(1, b=1), now=0.0)
    assert news == "an engine was lost, an engine is back; 1 of 1 ready" and watch.num_lost == 1


def test_engines_that_were_added_or_retired_are_neither_back_nor_lost() -> None:
    watch = EngineWatch(num_expected=1)
    looks = [board(1, a=1), board(1, a=1, b=None), board(1, a=1, b=1)]
    assert {watch.check(status, now=0.0) for status in looks} == {""}
    assert watch.num_expected == 2
    assert watch.check(board(2, a=2, retired=("b",)), now=0.0) == ""
    assert watch.num_expected == 1 and watch.behind_s(9.0) == 0.0
    lost = watch.check(board(2, retired=("b",)), now=10.0)
    assert (watch.num_lost, lost) == (1, "an engine was lost; 0 of 1 ready")
    assert watch.behind_s(12.0) == 2.0


def check(
    *,
    phase: Phase = "training",
    detail: str = "",
    behind_s: float = 0.0,
    ready: int = 2,
    store_away_s: float = 0.0,
) -> ReadyAnswer:
    return readiness(
        phase=phase, detail=detail, policy_version=7, engines_ready=ready, engines_expected=2,
        behind_s=behind_s, publish_limit_s=30.0, store_away_s=store_away_s,
    )  # fmt: skip


def test_a_run_that_trains_with_all_engines_current_is_ready() -> None:
    found = check()
    assert found.ready and found.policy_version == 7


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "training"])
def test_any_other_phase_is_reported_with_its_detail(phase: Phase) -> None:
    # That no engine is ready yet is not reported as a further reason.
    found = check(phase=phase, detail="rank 0 died", ready=0, behind_s=97.0)
    assert found.reasons == [f"the run is {phase}: rank 0 died"]


def test_a_run_is_not_ready_if_its_database_does_not_answer() -> None:
    [reason] = check(store_away_s=12.3).reasons
    assert "database has not answered for 12 s" in reason


def test_an_engine_may_lack_the_version_for_the_duration_of_a_publish() -> None:
    assert check(ready=1, behind_s=30.0).ready
    [reason] = check(ready=1, behind_s=30.5).reasons
    assert "1 of 2 engines" in reason and "30 s" in reason


def test_the_time_behind_counts_from_the_first_check_to_the_last_engine() -> None:
    watch = EngineWatch(num_expected=2)
    assert watch.behind_s(5.0) == 0.0
    watch.check(board(3, a=3, b=2), now=10.0)
    watch.check(None, now=12.0)
    assert watch.behind_s(14.0) == 4.0
    watch.check(board(3, a=3, b=3), now=15.0)
    assert watch.behind_s(16.0) == 0.0


def are_too_many_after_another(faults: FaultCount) -> bool:
    faults.count()
    return faults.are_too_many


def test_faults_in_a_row_are_allowed_up_to_the_limit_and_reset_by_progress() -> None:
    faults = FaultCount(limit=2)
    assert [are_too_many_after_another(faults) for _ in range(3)] == [False, False, True]
    faults.progressed()
    assert [are_too_many_after_another(faults) for _ in range(3)] == [False, False, True]


def test_faults_far_apart_in_time_are_not_in_a_row() -> None:
    times = iter([0.0, 1.0, FAULTS_COUNT_S, FAULTS_COUNT_S + 0.5, FAULTS_COUNT_S + 0.75])
    faults = FaultCount(limit=2, clock=lambda: next(times))
    # At the third fault the first no longer counts, but the second still does.
    assert [are_too_many_after_another(faults) for _ in range(4)] == [False, False, False, True]
