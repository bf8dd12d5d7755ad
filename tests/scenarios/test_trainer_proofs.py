"""Tests of a trainer with a killed rank: its new group has equal weights, or publishes again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from worlds.builders.settings import changed, rank_settings, step_settings
from worlds.builders.trajectory_builders import linear_turns, make_trajectory
from worlds.parts.trainer_world import process_ids_of, random_samples, shards

from actors.algorithm import Baseline, CriticSettings, KlRewardSettings, RewardSettings, Scale
from actors.merge.groups import classify_groups
from actors.merge.scoring import plan_scores, read_scores
from actors.merge.step import build_step
from actors.trainer.group import TrainerGroup
from actors.trainer.settings import RankSettings
from actors.weights.actor import start_board
from service.run.health import WeightsMoved
from service.run.restartable_trainer import RestartableTrainer

pytestmark = [
    pytest.mark.proof,
    pytest.mark.training,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(900),
]

NUM_STEPS = 3
REWARD = RewardSettings(kl=KlRewardSettings(coefficient=0.1))
GROUP = tuple(
    make_trajectory(linear_turns(3, reward=reward, seed=member), rollout_id=f"g000000.0-{member}")
    for member, reward in enumerate([1.0, 0.0, 1.0, 0.5])
)


class Restarted:
    """A trainer, the groups that it made, and its reports of restarts."""

    def __init__(self, *settings: RankSettings) -> None:
        """Take the settings of each group in order; all further groups have the last settings."""
        self.groups: list[TrainerGroup] = []
        self.reports: list[str] = []
        self._settings = settings
        self.trainer = RestartableTrainer(
            self._make_group,
            parent=None,
            first_step=1,
            max_kept_bytes=2**30,
            on_restart=self.reports.append,
            on_check=lambda peak_bytes: None,
        )

    def _make_group(self) -> TrainerGroup:
        number = min(len(self.groups), len(self._settings) - 1)
        self.groups.append(TrainerGroup(self._settings[number]))
        return self.groups[-1]

    async def kill_rank(self) -> None:
        os.kill((await process_ids_of(self.groups[-1]))[-1], signal.SIGKILL)


async def play(trainer: RestartableTrainer, settings: RankSettings, *, step: int) -> None:
    """Train a whole step as the merge actor and the loop do: plan, scores, batch, updates."""
    algorithm, version = settings.algorithm, step - 1
    merging = step_settings(
        baseline=algorithm.baseline,
        scale=Scale.NONE,
        num_ranks=settings.trainer.num_ranks,
        tokens_per_micro_batch=64,
        reward=algorithm.reward,
    )
    groups = classify_groups([GROUP], merging)
    if algorithm.scores_first:
        plan = plan_scores(groups, merging, step=step, trainer_version=version)
        answers = await trainer.score([ray.put(shard) for shard in plan])
        groups = read_scores(groups, merging, [await answer for answer in answers])
    built = build_step(groups, merging, step=step, trainer_version=version)
    await trainer.step([ray.put(shard) for shard in built.shards])


async def state_of(trainer: RestartableTrainer, *, term: int, directory: Path) -> dict[str, Any]:
    """Save a checkpoint; return its tensors of weights and optimisers by path."""
    await trainer.begin_save(NUM_STEPS, term=term)
    path = await trainer.finish_save()
    assert path is not None
    file = directory / f"{term}.pt"
    dcp_to_torch_save(path, file)
    return dict(leaves(torch.load(file), ""))


def leaves(tree: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, f"{path}/{name}")


@pytest.mark.parametrize("has_models", [False, True], ids=["only-policy", "critic-and-reference"])
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_weights_and_optimisers_of_a_new_group_are_identical_to_the_killed_ones(
    tiny_models: dict[bool, str], tmp_path: Path, num_ranks: int, has_models: bool
) -> None:
    settings = rank_settings(tiny_models[True], tmp_path / "run", num_ranks=num_ranks, threads=1)
    if has_models:
        settings = changed(
            settings,
            reward=REWARD,
            baseline=Baseline.CRITIC,
            critic=CriticSettings(learning_rate=1e-3, warmup_updates=0),
        )
    restarted = Restarted(settings)
    trainer = restarted.trainer
    await trainer.start()
    for step in range(1, NUM_STEPS + 1):
        await play(trainer, settings, step=step)
        if step == 1:
            # The later steps are trained again from a checkpoint, not from the base model.
            await trainer.begin_save(step, term=0)
            path = await trainer.finish_save()
            assert path is not None
            await trainer.committed(step, path)
    before = await state_of(trainer, term=1, directory=tmp_path)
    fingerprint = await restarted.groups[0].fingerprint()
    await restarted.kill_rank()
    after = await state_of(trainer, term=2, directory=tmp_path)
    assert len(restarted.groups) == 2 and "2 steps trained again" in restarted.reports[0]
    assert before.keys() == after.keys() and len(before) > 100
    assert any("critic" in name for name in before) == has_models
    different = [name for name in before if not torch.equal(before[name], after[name])]
    assert different == []
    assert await restarted.groups[1].fingerprint() == fingerprint
    assert trainer.version == NUM_STEPS and trainer.republished == ()
    await trainer.stop()


async def test_weights_with_other_bits_are_published_as_the_next_version(
    tiny_models: dict[bool, str], tmp_path: Path
) -> None:
    settings = rank_settings(
        tiny_models[True], tmp_path / "run", num_ranks=1, max_lag=1, window_groups=1
    )
    assert settings.algorithm.max_policy_age == 1
    # Imitate a processor that rounds differently: two threads give equal bits on some processors.
    rate = settings.trainer.learning_rate
    restarted = Restarted(settings, changed(settings, learning_rate=rate * (1 + 1e-5)))
    trainer, board = restarted.trainer, start_board()
    await trainer.start()

    def shard_refs(step: int, *, sampled_by: int) -> list[ray.ObjectRef]:
        samples = random_samples(step, 60, version=sampled_by)
        made = shards([samples], num_ranks=1, num_micro=1, step=step, version=step - 1)
        return [ray.put(shard) for shard in made]

    for step in (1, 2):
        await trainer.step(shard_refs(step, sampled_by=step - 1))
        await trainer.publish(board, 0, step)
    before = await trainer.check_logprobs()
    await restarted.kill_rank()
    shard = shard_refs(3, sampled_by=1)
    with pytest.raises(WeightsMoved, match="version 3"):
        await trainer.step(shard)
    assert (trainer.version, trainer.republished) == (3, (3,))
    await trainer.publish(board, 0, 3)
    after = await trainer.check_logprobs()
    assert 0 < np.abs(after - before).max() < 1e-5
    # The shard was made for version 2; its tokens are two versions but only one step old.
    stats = await trainer.step(shard)
    assert (stats.trainer_version, trainer.version) == (3, 4)
    await trainer.stop()
