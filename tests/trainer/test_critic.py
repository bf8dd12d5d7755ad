"""Tests of the critic of one rank: its scores, its updates, and updates that it skips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from worlds.builders.settings import changed, step_settings
from worlds.builders.trajectory_builders import linear_turns, make_trajectory
from worlds.parts.critic_world import update_twice

from actors.algorithm import Baseline, CriticSettings, Scale
from actors.batch import RowScores, ValueRow
from actors.merge.groups import classify_groups
from actors.merge.scoring import plan_scores, read_scores
from actors.merge.step import StepResult, build_step
from actors.trainer.critic import Critic
from actors.trainer.settings import TrainerSettings
from actors.trainer.sharded_model import Sharding

STEP = step_settings(baseline=Baseline.CRITIC, scale=Scale.NONE, tokens_per_micro_batch=64)
GROUP = tuple(
    make_trajectory(linear_turns(3, reward=reward, seed=member), rollout_id=f"g000000.0-{member}")
    for member, reward in enumerate([1.0, 0.0, 1.0])
)


def make_critic(model: str, mesh: DeviceMesh, **fields: float | None) -> Critic:
    named = {"learning_rate": 3e-3, "warmup_updates": 0, **fields}
    settings = CriticSettings(**named)  # type: ignore[arg-type]
    sharding = Sharding(mesh=mesh, device=torch.device("cpu"), param_dtype=torch.float32)
    return Critic(model, settings, TrainerSettings(), sharding)


def value_rows(built: StepResult) -> list[tuple[ValueRow, ...]]:
    """Return the critic's rows of each rank."""
    return [shard.value_rows for shard in built.shards if shard.value_rows is not None]


def build_with_values_of_zero(num_ranks: int) -> StepResult:
    settings = changed(STEP, num_ranks=num_ranks)
    merged = classify_groups([GROUP], settings)
    plan = plan_scores(merged, settings, step=0, trainer_version=0)
    answers = [
        [RowScores(values=np.zeros(row.num_tokens, np.float32)) for row in shard.minibatches[0]]
        for shard in plan
    ]
    return build_step(read_scores(merged, settings, answers), settings, step=0, trainer_version=0)


def build(critic: Critic) -> StepResult:
    """Build a whole step with the values that the critic gives to its rows."""
    merged = classify_groups([GROUP], STEP)
    plan = plan_scores(merged, STEP, step=0, trainer_version=0)
    values = [critic.score(shard.minibatches[0]) for shard in plan]
    answers = [[RowScores(values=row) for row in of_rank] for of_rank in values]
    return build_step(read_scores(merged, STEP, answers), STEP, step=0, trainer_version=0)


def test_with_a_new_critic_advantages_are_the_returns_to_go(model: str, mesh: DeviceMesh) -> None:
    result = build(make_critic(model, mesh))
    rows = [row for shard in result.shards for row in shard.minibatches[0]]
    found = np.concatenate([row.advantages for row in rows])
    assert found.shape == (54,) and set(found.tolist()) == {0.0, 1.0}
    (critic_rows,) = value_rows(result)
    assert sum(float(row.row.loss_weights.sum()) for row in critic_rows) == pytest.approx(1.0)


def test_a_trained_critic_explains_the_returns(model: str, mesh: DeviceMesh) -> None:
    critic = make_critic(model, mesh, value_clip=None)
    stats = [critic.update(value_rows(build(critic))[0]) for _ in range(25)]
    assert stats[0].num_tokens == 54 and critic.trained.num_updates == 25
    assert stats[0].statistics["critic_target_mean"] == pytest.approx(2 / 3)
    # All values are 0, so that the loss is half the mean square of the targets.
    assert stats[0].statistics["critic_loss"] == pytest.approx(0.5 * 2 / 3)
    assert stats[-1].statistics["critic_loss"] < stats[0].statistics["critic_loss"] / 4
    explained = [each.statistics["critic_explained_variance"] for each in stats]
    assert explained[-1] > explained[0]


def test_the_division_into_rows_does_not_change_the_critics_update(
    model: str, mesh: DeviceMesh
) -> None:
    apart, together = make_critic(model, mesh), make_critic(model, mesh)
    rows = value_rows(build(apart))[0]
    wide = changed(STEP, tokens_per_micro_batch=4096)
    merged = classify_groups([GROUP], wide)
    answers = [
        [RowScores(values=v) for v in together.score(shard.minibatches[0])]
        for shard in plan_scores(merged, wide, step=0, trainer_version=0)
    ]
    scored = read_scores(merged, wide, answers)
    whole = value_rows(build_step(scored, wide, step=0, trainer_version=0))[0]
    assert (len(rows), len(whole)) == (3, 1)
    left, right = apart.update(rows), together.update(whole)
    assert left.statistics["critic_loss"] == pytest.approx(
        right.statistics["critic_loss"], rel=1e-5
    )
    assert left.statistics["critic_grad_norm"] == pytest.approx(
        right.statistics["critic_grad_norm"], rel=1e-4
    )


@pytest.mark.proof
@pytest.mark.slow
def test_two_ranks_update_the_critic_as_one_does(
    model: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    (whole,), halves = (value_rows(build_with_values_of_zero(number)) for number in (1, 2))
    critic = make_critic(model, mesh, learning_rate=1e-3)
    alone = [critic.update(whole) for _ in range(2)]
    first, second = update_twice(model, halves, tmp_path)
    assert first == second
    for expected, found in zip(alone, first, strict=True):
        assert found.num_tokens == expected.num_tokens == 54
        assert found.statistics["critic_loss"] == pytest.approx(
            expected.statistics["critic_loss"], rel=1e-5
        )
        assert found.statistics["critic_grad_norm"] == pytest.approx(
            expected.statistics["critic_grad_norm"], rel=1e-4
        )
        assert found.statistics["critic_clip_fraction"] == pytest.approx(
            expected.statistics["critic_clip_fraction"]
        )


def test_an_update_with_a_loss_that_is_not_finite_is_skipped(model: str, mesh: DeviceMesh) -> None:
    critic = make_critic(model, mesh)
    first, *rest = value_rows(build(critic))[0]
    broken = replace(first, value_targets=first.value_targets * np.float32("nan"))
    before = [p.full_tensor().clone() for p in critic.trained.model.parameters()]  # type: ignore[attr-defined]
    stats = critic.update((broken, *rest))
    assert stats.is_skipped and critic.trained.num_updates == 0
    for old, new in zip(before, critic.trained.model.parameters(), strict=True):
        assert torch.equal(old, new.full_tensor())  # type: ignore[attr-defined]


def test_an_update_without_tokens_changes_nothing(model: str, mesh: DeviceMesh) -> None:
    critic = make_critic(model, mesh)
    (empty,) = value_rows(build_step([], STEP, step=0, trainer_version=0))
    stats = critic.update(empty)
    assert stats.num_tokens == 0 and critic.trained.num_updates == 0 and not stats.is_skipped
