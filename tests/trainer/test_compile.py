"""Tests that decoder layers under torch.compile have the same losses and updates as others.

These are proofs: the compilation of the layers takes half a minute on two idle cores.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from worlds.builders.settings import changed, rank_settings
from worlds.parts.trainer_world import World, largest_difference, random_samples

from actors.trainer.settings import LoraSettings

pytestmark = [
    pytest.mark.proof,
    pytest.mark.settings,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on CPU"),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "reshard_between_micro_batches": True},
        {"lora": LoraSettings(rank=4)},
    ],
    ids=["plain", "checkpointing", "lora"],
)
def test_compiled_layers_train_like_uncompiled_ones(
    one_rank: World, tiny_models: dict[bool, str], tmp_path: Path, options: dict[str, object]
) -> None:
    settings = changed(rank_settings(tiny_models[True], tmp_path, adam_epsilon=1e-4), **options)
    # The rows differ in length, so that one compilation has to serve all of them.
    steps = [[random_samples(2 * step, 3 + step)] for step in range(3)]
    found = []
    for compiles in (False, True):
        one_rank.start(changed(settings, compile=compiles))
        losses = [
            one_rank.step(samples, step=step, version=step).statistics["loss"]
            for step, samples in enumerate(steps)
        ]
        found.append((losses, one_rank.weights()))
    (plain, weights), (compiled, compiled_weights) = found
    assert compiled == pytest.approx(plain, abs=1e-5)
    assert largest_difference(weights, compiled_weights) < 1e-4
