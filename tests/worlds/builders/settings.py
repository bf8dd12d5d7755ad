"""Settings of components for tests.

A test passes the fields that it needs by name. The other fields have the values of this file, or
the defaults of the configuration.
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
    """Return settings with one rank that train groups of one member, unless a test overrides it."""
    plain = StepSettings(
        algorithm=AlgorithmSettings(min_group_size=1),
        trainer=TrainerSettings(num_ranks=1),
        max_context_tokens=1024,
        seed=0,
    )
    return changed(plain, **named)


def rank_settings(model: str, checkpoint_dir: Path, **named: Any) -> RankSettings:
    """Return settings without warm-up that train tokens of any age, unless a test overrides it."""
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
    """Return settings whose bounds a test reaches only if it overrides them."""
    plain = QueueStateSettings(algorithm=AlgorithmSettings(), queue=QueueSettings(max_items=4096))
    return changed(plain, **named)


def changed(settings: Composed, **named: Any) -> Composed:
    """Return the settings with other values of fields, also of the fields of their parts.

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
