"""Tests of the audit: real journals are clean, and each planted fault is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds.builders.journal_builders import (
    group_of,
    one_group,
    random_group,
    step_of,
    through_a_file,
)
from worlds.builders.trajectory_builders import replayed, whole_turns
from worlds.faults.planted_faults import (
    FIRST,
    PLANTS,
    SECOND,
    shaped,
    sound_step,
    with_advantages,
    with_entry,
)
from worlds.runs.audited_runs import audited, rows_of, stored

from actors.algorithm import Baseline, Scale
from actors.merge.advantages import group_advantages, reason_without_signal
from actors.trajectory_queue.ledger import EvictionReason, LedgerEvent, LedgerEventKind
from actors.types import UNDONE, Outcome
from service.cli.inspect import InspectRequest, run_inspect
from service.inspect.audit import Check, GroupRule, check_trajectory, describe, expected_advantages

EVICTED = LedgerEventKind.EVICTED


def test_a_journal_of_the_real_code_is_clean(tmp_path: Path) -> None:
    step = sound_step()
    stored(tmp_path, rows_of(step))
    result = audited(tmp_path, step)
    assert result.offences == () and result.is_clean and result.unchecked == {}
    assert (result.num_trajectories, result.num_trained) == (8, step.num_packed_trained)
    assert run_inspect(InspectRequest(target=str(tmp_path), audit=True)) == 0


def test_tokens_of_versions_that_a_recovery_undid_are_not_a_finding(tmp_path: Path) -> None:
    step = step_of([group_of(0, [1, 0], version=UNDONE + 7)], number=4, max_policy_age=0)
    assert audited(tmp_path / "newer", step).offences == ()
    older = step_of([group_of(0, [1, 0], version=UNDONE + 2)], number=4, max_policy_age=0)
    offences = audited(tmp_path / "older", older).offences
    assert {offence.check for offence in offences} == {Check.AGE}
    assert "the worst is 1" in offences[0].text


def test_equal_returns_are_trained_only_if_the_loss_has_another_term(tmp_path: Path) -> None:
    step = step_of([group_of(0, [1, 1])], trains_without_signal=True)
    assert audited(tmp_path / "with", step).is_clean and step.num_packed_trained > 0
    assert step.group_rule is not None
    rule = replace(step.group_rule, trains_without_signal=False)
    offences = audited(tmp_path / "without", replace(step, group_rule=rule)).offences
    assert [offence.check for offence in offences] == [Check.ADVANTAGES] * 2
    for offence, name in zip(offences, (FIRST, SECOND), strict=True):
        assert offence.text == f"{name}.a0 is trained, but its group has no learning signal"


# With seed 1, a completed member without a trained token has the worst return.
@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
@example(1)
def test_random_trajectories_have_only_the_faults_that_were_drawn(seed: int) -> None:
    step = through_a_file(step_of([random_group(0, seed)], number=4))
    found = {offence.check for entry in step.entries for offence in check_trajectory(step, entry)}
    # The draw may contain log-probabilities that are not finite, rewarded malformed turns, and
    # versions newer than the step's.
    assert found <= {Check.LOGPROBS, Check.MALFORMED, Check.AGE}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found_and_its_trajectory_named(
    plant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check, subject, change = PLANTS[plant]
    result = audited(tmp_path, change(sound_step()))
    named = {(offence.check, offence.subject) for offence in result.offences}
    assert (check, subject) in named
    # The fault may cause other findings, but only about the same group or step.
    group = subject.partition("-")[0].removesuffix(".a0")
    assert all(name.startswith((group, "step 1")) for _, name in named)
    assert run_inspect(InspectRequest(target=str(tmp_path), audit=True)) == 1
    printed = capsys.readouterr().out
    assert f"WRONG  {check.value}" in printed and f"step 1, {subject}: " in printed


def test_a_skipped_check_is_not_reported_as_ok(tmp_path: Path) -> None:
    result = audited(tmp_path, with_entry(shaped(sound_step()), 0, baseline_return=999.0))
    lines = describe(result, limit=0)
    assert result.is_clean
    for check in (Check.BASELINE, Check.ADVANTAGES, Check.ZERO_SUM):
        (line,) = [line for line in lines if check.value in line]
        assert line.startswith("  -      ") and "not checked" in line


def test_a_malformed_trajectory_with_a_positive_reward_is_named(tmp_path: Path) -> None:
    group = group_of(0, [1, 0], outcomes={0: Outcome.MALFORMED_TOOL_CALL})
    (offence,) = audited(tmp_path, step_of([group])).offences
    assert (offence.check, offence.subject) == (Check.MALFORMED, f"{FIRST}.a0")


def test_a_rewarded_malformed_turn_is_named(tmp_path: Path) -> None:
    won, lost = group_of(0, [1, 0])
    first, second = whole_turns(won)
    wild = replayed(won, [replace(first, is_malformed=True, reward=0.5), second])
    (offence,) = audited(tmp_path, step_of([one_group([wild, lost])])).offences
    assert offence.check is Check.MALFORMED and "turn 0 is malformed" in offence.text


def test_a_member_evicted_with_a_reason_is_noted_and_the_audit_passes(tmp_path: Path) -> None:
    step = sound_step()
    gone = "g000000.0-4"
    left = [
        LedgerEvent(seq=0, rollout_id=gone, kind=LedgerEventKind.ADMITTED),
        LedgerEvent(seq=0, rollout_id=gone, kind=EVICTED, reason=EvictionReason.WALL_TIMEOUT),
    ]
    stored(tmp_path, [*rows_of(step), *left])
    result = audited(tmp_path, step)
    (offence,) = result.offences
    assert (offence.check, offence.subject) == (Check.ADMITTED, "g000000.0")
    assert "4 of 5 admitted rollouts" in offence.text and "wall_timeout" in offence.text
    assert offence.is_explained and result.is_clean


def test_a_member_missing_without_a_reason_fails_the_audit(tmp_path: Path) -> None:
    step = sound_step()
    lost = LedgerEvent(seq=0, rollout_id="g000000.0-4", kind=LedgerEventKind.ADMITTED)
    stored(tmp_path, [*rows_of(step), lost])
    (offence,) = audited(tmp_path, step).offences
    assert offence.check is Check.ADMITTED and not offence.is_explained


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kind": EVICTED, "reason": EvictionReason.MASKED},
            "trained in the journal, evicted as masked",
        ),
        ({"kind": LedgerEventKind.ADMITTED, "step": None}, "still in flight in the ledger"),
        ({"step": 2}, "finalised by step 2"),
    ],
)
def test_a_rollout_with_another_fate_in_the_ledger_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    step = sound_step()
    rows = rows_of(step)
    rows[len(step.entries)] = replace(rows[len(step.entries)], **changes)
    stored(tmp_path, rows)
    found = [o for o in audited(tmp_path, step).offences if o.check is Check.LEDGER]
    assert [offence.subject for offence in found] == [f"{FIRST}.a0"] and words in found[0].text


def test_a_rollout_that_is_trained_only_in_the_ledger_is_named(tmp_path: Path) -> None:
    step = sound_step()
    stored(tmp_path, rows_of(step))
    result = audited(tmp_path, replace(step, entries=step.entries[1:]))
    assert (Check.LEDGER, FIRST) in {(o.check, o.subject) for o in result.offences}


def test_a_rollout_that_the_ledger_never_admitted_is_named(tmp_path: Path) -> None:
    step = sound_step()
    stored(tmp_path, [row for row in rows_of(step) if row.rollout_id != FIRST])
    found = [o for o in audited(tmp_path, step).offences if o.check is Check.LEDGER]
    assert [offence.subject for offence in found] == [f"{FIRST}.a0"]


def test_a_step_refused_as_not_finite_agrees_with_its_journal(tmp_path: Path) -> None:
    step = sound_step()
    rows = [
        replace(row, kind=EVICTED, reason=EvictionReason.NONFINITE_STEP)
        if row.kind == "trained"
        else row
        for row in rows_of(step)
    ]
    stored(tmp_path, rows)
    result = audited(tmp_path, step)
    assert result.is_clean and step.num_packed_trained > 0
    assert (result.num_trained, result.refused_steps) == (0, (1,))
    note = "  note   1 step handed out, whose update was not finite and was refused: 1"
    assert note in describe(result, limit=0)


def test_a_nonfinite_advantage_of_a_refused_update_passes_the_audit(tmp_path: Path) -> None:
    step = shaped(step_of([group_of(0, [1, 0])]))
    wild = with_advantages(step, 0, step.entries[0].advantages[0] * np.nan)
    rows = [
        replace(row, kind=EVICTED, reason=EvictionReason.NONFINITE_STEP)
        if row.kind == "trained"
        else row
        for row in rows_of(step)
    ]
    stored(tmp_path / "refused", rows)
    stored(tmp_path / "trained", rows_of(step))
    refused, trained = (audited(tmp_path / name, wild) for name in ("refused", "trained"))
    assert refused.is_clean and not trained.is_clean
    assert [o.check for o in refused.offences] == [Check.ADVANTAGES]


def test_a_step_that_the_run_has_not_recorded_is_not_compared_with_the_ledger(
    tmp_path: Path,
) -> None:
    step = sound_step()
    stored(tmp_path, rows_of(step))
    unrecorded = step_of([group_of(7, [1, 0])], number=2)
    assert audited(tmp_path, step, unrecorded).offences == ()


def test_a_rollout_that_is_trained_in_two_steps_is_named(tmp_path: Path) -> None:
    again = step_of([group_of(0, [1, 0])], number=3)
    first, between = step_of([group_of(0, [1, 0])]), step_of([group_of(1, [1, 0])], number=2)
    found = [o for o in audited(tmp_path, first, between, again).offences if o.check is Check.ONCE]
    assert [(o.subject, o.step) for o in found] == [(FIRST, 3), (SECOND, 3)]


def test_recorded_steps_without_a_file_are_reported(tmp_path: Path) -> None:
    first, third = step_of([]), step_of([], number=3)
    stored(tmp_path, [], steps=(1, 2, 3))
    assert audited(tmp_path, first, third).missing_steps == (2,)


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=6),
    st.sampled_from(
        [
            (baseline, scale)
            for baseline in (Baseline.MEAN, Baseline.LEAVE_ONE_OUT)
            for scale in Scale
        ]
        + [(Baseline.NONE, Scale.NONE)]
    ),
)
def test_the_audits_advantages_equal_those_of_the_merge(
    returns: list[float], choice: tuple[Baseline, Scale]
) -> None:
    baseline, scale = choice
    own = expected_advantages(returns, GroupRule(baseline=baseline, scale=scale))
    other = group_advantages(returns, baseline=baseline, scale=scale)
    reason = reason_without_signal(returns, baseline=baseline, scale=scale)
    assert (own is not None) == (reason is None)
    if own is not None:
        assert own == pytest.approx(other.tolist(), abs=1e-9)
