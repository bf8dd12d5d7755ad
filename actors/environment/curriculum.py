"""Which of several tasks a slot plays, by how the policy fares with each: pure.

A task that all samples of its last groups solved teaches nothing, nor does one that none solved:
their advantages are 0. Both rest: they come up with a small chance, so that what is forgotten, or
has come within reach, is noticed. Called by the loop's feed (`service.run.task_feed`), which keeps
the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from actors.environment.settings import CurriculumSettings
from actors.environment.tasks import derived_seed
from actors.types import Task

_COIN_SIDES = 2**30


def choose(
    choices: Iterable[tuple[Task, str]],
    results: Mapping[str, Sequence[float]],
    settings: CurriculumSettings,
    *,
    slot: int,
) -> Task:
    """The first that does not rest, or whose coin says that it is played all the same; else the
    first of all.

    Args: choices: one or more tasks, each with the key of its results. results: by key, the shares
    of its newest groups that passed, oldest first. slot: a slot and a key have one coin.
    """
    first: Task | None = None
    for task, key in choices:
        first = first or task
        coin = derived_seed("curriculum", slot, key) / _COIN_SIDES
        if not is_resting(results.get(key, ()), settings) or coin < settings.resting_share:
            return task
    assert first is not None
    return first


def is_resting(passed: Sequence[float], settings: CurriculumSettings) -> bool:
    """Whether the newest groups' mean share says solved or hopeless; never before there are enough.

    Example: with window 2 it is true of [1, 1] and of [0, 0], and not of [0.5, 0], nor of [1].
    """
    newest = passed[-settings.window :]
    if len(newest) < settings.window:
        return False
    mean = sum(newest) / len(newest)
    return mean >= settings.solved_from or mean <= settings.hopeless_to
