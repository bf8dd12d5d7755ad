"""Tests of the record of a step, made from the reports of the trainer and the merge actor."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from worlds.builders.record_builders import step_record

from actors.merge.report import MergeReport, StepReport
from actors.statistics import BY_NAME, STATISTICS, Source
from actors.trainer.statistics import StepStats
from actors.types import Dtype, Outcome
from actors.weights.logprob_check import LogprobCheck, compare
from service.store.lineage import read_history
from service.store.run_store import RunStore
from service.telemetry.records import StageSeconds, StepRecord, finished_record
from service.telemetry.records import step_record as make_step_record

# All numbers differ, so that a test notices two that were exchanged.
EVERY = {name: 1.0 + number / 64 for number, name in enumerate(BY_NAME)}


def of(*sources: Source) -> dict[str, float]:
    return {each.name: EVERY[each.name] for each in STATISTICS if each.source in sources}


STATS = StepStats(
    step=0, trainer_version=0, statistics=of("policy_loss", "critic", "trainer"),
    learning_rate=1e-3, trained_tokens=10, packed_tokens=20,
    num_updates=1, num_empty_updates=0, num_skipped_updates=0,
)  # fmt: skip

REPORT = StepReport(
    step=0, trainer_version=0, num_groups=1, num_zero_variance_groups=0, num_trajectories=2,
    outcomes={Outcome.COMPLETED: 2}, evictions={}, num_malformed_rewarded=0,
    merge=MergeReport(
        samples_before=2, samples_after=1, branches={}, num_saved_tokens=0, num_masked_tokens=0
    ),
    statistics=of("merge"), num_turns=2, num_malformed_turns=0, num_inserted_tokens=0,
    num_sampled_tokens=10, num_trained_tokens=10, num_packed_tokens=20, num_micro_batches=1,
    num_padding_rows=0, num_overruled_records=0,
)  # fmt: skip


SCORES = np.array([-1.0, -2.0, -0.5, -0.25] * 16, np.float32)
CHECK = LogprobCheck(
    num_tokens=65, dtype=Dtype.FLOAT32, seconds=0.375,
    comparisons=(compare("text", SCORES, SCORES + np.array([0, 0, 0, 0.125] * 16, np.float32)),),
)  # fmt: skip
EVERY |= CHECK.statistics


def record_of(
    stats: StepStats,
    report: StepReport,
    *,
    check: LogprobCheck | None = CHECK,
) -> StepRecord:
    record = make_step_record(1, report, stats, version=1, stages=StageSeconds())
    return finished_record(record, check)


def test_the_record_has_each_number_of_each_report_once_under_its_name() -> None:
    record = record_of(STATS, REPORT)
    assert record.statistics == EVERY
    assert list(record.statistics) == [statistic.name for statistic in STATISTICS]
    assert (record.step, record.policy_version, record.num_turns) == (1, 1, 2)


def test_a_number_that_no_report_has_is_absent() -> None:
    nothing_trained = replace(STATS, statistics={}, trained_tokens=0)
    known = {"reward_std": 0.25, "reward_min": -0.75}
    record = record_of(nothing_trained, replace(REPORT, statistics=known), check=None)
    assert record.statistics == known
    assert record.value("loss") is None and record.value("reward_std") == 0.25
    assert record.policy_age_max == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_number_is_absent(value: float) -> None:
    stats = replace(STATS, statistics={**STATS.statistics, "kl_mean": value, "kl_max": value})
    assert EVERY.keys() - record_of(stats, REPORT).statistics.keys() == {"kl_mean", "kl_max"}


def test_a_measured_zero_is_kept() -> None:
    stats = replace(STATS, statistics={**STATS.statistics, "masked_fraction": 0.0})
    assert record_of(stats, REPORT).statistics["masked_fraction"] == 0.0


def test_a_name_outside_the_table_is_refused() -> None:
    with pytest.raises(KeyError, match=r"\['kl_median'\] are not in the table"):
        record_of(replace(STATS, statistics={"kl_median": 1.0}), REPORT)
    with pytest.raises(AssertionError, match="kl_median is not in the table"):
        step_record(1).value("kl_median")


def test_the_best_known_reward_is_the_scaled_one_if_it_exists() -> None:
    both = step_record(1, reward_mean=3.0, scaled_reward_mean=0.5)
    assert both.best_known_reward == 0.5
    assert step_record(1, reward_mean=3.0, scaled_reward_mean=None).best_known_reward == 3.0


def test_the_record_of_a_step_is_read_from_the_store_as_written(tmp_path: Path) -> None:
    record = record_of(STATS, REPORT)
    store = RunStore(f"sqlite:///{tmp_path / 'run.db'}")
    store.add_step(record, term=store.acquire_lease(owner="a").term, new_events=())
    assert read_history(store).steps == (record,)
