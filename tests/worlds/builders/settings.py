"""Settings of components for tests: leaves of the configuration by the names of their fields.

A test names what it needs; what it does not name is as below, or the configuration's own default.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from actors.algorithm import AlgorithmSettings
from actors.merge.settings import StepSettings
from actors.trainer.settings import RankSettings, TrainerSettings
from actors.trajectory_queue.settings import QueueSettings, QueueStateSettings

Composed = TypeVar("Composed", StepSettings, RankSettings, QueueStateSettings)


def step_settings(**named: Any) -> StepSettings:
    """One rank, and groups of one member are trained, unless a test says otherwise."""
    plain = StepSettings(
        algorithm=AlgorithmSettings(min_group_size=1),
        trainer=TrainerSettings(num_ranks=1),
        max_context_tokens=1024,
        seed=0,
    )
    return changed(plain, **named)


def rank_settings(model: str, checkpoint_dir: Path, **named: Any) -> RankSettings:
    """Without warm-up, and tokens of any age are trained, unless a test says otherwise."""
    plain = RankSettings(
        algorithm=AlgorithmSettings(max_lag=1000),
        trainer=TrainerSettings(warmup_updates=0),
        model=model,
        checkpoint_dir=checkpoint_dir,
        weight_backend="object_store",
        chat_template=None,
        max_context_tokens=1024,
        seed=0,
    )
    return changed(plain, **named)


def queue_settings(**named: Any) -> QueueStateSettings:
    """Without a bound that a test would meet, unless it says otherwise."""
    plain = QueueStateSettings(algorithm=AlgorithmSettings(), queue=QueueSettings(max_items=4096))
    return changed(plain, **named)


def changed(settings: Composed, **named: Any) -> Composed:
    """With other values of fields, its own or those of the leaves that it holds.

    Example: changed(rank_settings(model, directory), learning_rate=1e-3, epochs=2)
    """
    own = {field.name for field in fields(settings)}
    beside = {name: named.pop(name) for name in own & named.keys()}
    for leaf in ("algorithm", "trainer", "queue"):
        if leaf in own:
            held = beside.get(leaf, getattr(settings, leaf))
            known = {field.name for field in fields(held)}
            taken = {name: named.pop(name) for name in known & named.keys()}
            beside[leaf] = replace(held, **taken)
    return replace(settings, **beside, **named)
