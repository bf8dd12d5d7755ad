"""Journal steps for tests, made like those of a run, with build_step and journal_step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from actors.algorithm import Baseline, LossSettings, Scale
from actors.journal.files import GroupRule, JournalStep, read_step, write_file, write_step
from actors.merge.groups import classify_groups
from actors.merge.journal import journal_step
from actors.merge.step import build_step
from actors.types import Outcome, Trajectory
from worlds.builders.settings import step_settings
from worlds.builders.trajectory_builders import linear_turns, make_trajectory, random_turns

RULE = GroupRule(baseline=Baseline.MEAN, scale=Scale.STD)


def group_of(
    number: int,
    rewards: Sequence[float],
    *,
    outcomes: dict[int, Outcome] | None = None,
    version: int = 0,
) -> tuple[Trajectory, ...]:
    """Return the members of a group, each with two turns and one of these rewards."""
    return tuple(
        make_trajectory(
            linear_turns(2, reward=reward, version=version, seed=100 * number + member),
            rollout_id=f"g{number:06d}.0-{member}",
            outcome=(outcomes or {}).get(member, Outcome.COMPLETED),
        )
        for member, reward in enumerate(rewards)
    )


def random_group(number: int, seed: int) -> tuple[Trajectory, ...]:
    """Return four random members, with branches, NaNs, malformed turns and empty replies."""
    rng = np.random.default_rng([number, seed])
    outcomes = list(Outcome)
    members = [
        make_trajectory(
            random_turns(rng, max_turns=5),
            rollout_id=f"g{number:06d}.0-{member}",
            outcome=outcomes[int(rng.integers(0, 4))],
            detail="ünusual" if rng.random() < 0.2 else "",
        )
        for member in range(4)
    ]
    return tuple(members)


def step_of(
    groups: Sequence[tuple[Trajectory, ...]],
    *,
    number: int = 1,
    term: int = 1,
    max_policy_age: int = 9,
    trains_without_signal: bool = False,
) -> JournalStep:
    """Return the journal of a step for these groups; the trainer holds version `number` - 1."""
    loss = LossSettings(entropy_coefficient=0.1 if trains_without_signal else 0.0)
    settings = step_settings(loss=loss)
    classified = classify_groups(groups, settings)
    result = build_step(classified, settings, step=number, trainer_version=number - 1)
    rule = replace(RULE, trains_without_signal=trains_without_signal)
    return journal_step(result, term=term, max_policy_age=max_policy_age, group_rule=rule)


def through_a_file(step: JournalStep) -> JournalStep:
    file = io.BytesIO()
    write_step(file, step)
    file.seek(0)
    return read_step(file)


def written(run_dir: Path, *steps: JournalStep) -> Path:
    """Write a run directory that holds only the journal of these steps, and return it."""
    directory = run_dir / "journal"
    directory.mkdir(parents=True, exist_ok=True)
    for step in steps:
        write_file(directory, step)
    return run_dir


def one_group(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    return tuple(trajectories)
