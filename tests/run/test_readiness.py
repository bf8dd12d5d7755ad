"""The rule behind /readyz."""

from __future__ import annotations

import pytest

from service.run.health import BehindWatch, Phase, Readiness, readiness


def check(
    *, phase: Phase = Phase.TRAINING, detail: str = "", behind_s: float = 0.0, ready: int = 2
) -> Readiness:
    return readiness(
        phase=phase, detail=detail, policy_version=7, engines_ready=ready, engines_expected=2,
        behind_s=behind_s, publish_limit_s=30.0,
    )  # fmt: skip


def test_a_run_that_trains_with_all_engines_current_is_ready() -> None:
    found = check()
    assert found.is_ready and found.policy_version == 7


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.TRAINING])
def test_any_other_phase_is_told_with_its_detail(phase: Phase) -> None:
    # No engine is there yet, which is no reason of its own.
    found = check(phase=phase, detail="rank 0 died", ready=0, behind_s=97.0)
    assert found.reasons == (f"the run is {phase.value}: rank 0 died",)


def test_an_engine_may_lack_the_version_for_as_long_as_a_publish_takes() -> None:
    assert check(ready=1, behind_s=30.0).is_ready
    [reason] = check(ready=1, behind_s=30.5).reasons
    assert "1 of 2 engines" in reason and "30 s" in reason


def test_the_time_behind_counts_from_the_first_look_and_ends_with_the_last_engine() -> None:
    watch = BehindWatch()
    assert watch.behind_s(5.0) == 0.0
    watch.update(num_ready=1, num_expected=2, now=10.0)
    watch.update(num_ready=0, num_expected=2, now=12.0)
    assert watch.behind_s(14.0) == 4.0
    watch.update(num_ready=2, num_expected=2, now=15.0)
    assert watch.behind_s(16.0) == 0.0
