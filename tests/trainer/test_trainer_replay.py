"""Tests of the replay of recorded experts on ranks in real processes, with gloo and FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from worlds.builders.settings import changed, rank_settings
from worlds.models.mixture_world import (
    KINDS,
    NORMALISES,
    as_in_checkpoint,
    compute_padded,
    load_plain,
    recorded_batch,
    weigh,
    write_mixture,
)
from worlds.parts.trainer_world import World, largest_difference

from actors.algorithm import KlSettings, LossSettings
from actors.batch import MicroBatch, RankShard
from actors.merge.packing import WeightedSample, pack_minibatch, pack_row
from actors.trainer.export import export_checkpoint
from actors.trainer.rank import ScoredRow, save_inputs
from actors.trainer.settings import RankSettings
from actors.trainer.statistics import StepStats
from actors.types import Dtype


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return directories of random mixtures, by kind."""
    return {kind: write_mixture(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def settings_for(model: str, directory: Path) -> RankSettings:
    # AdamW's first update is rate * g / (|g| + eps), which is about g for these settings.
    return rank_settings(
        model,
        directory,
        learning_rate=1e3,
        adam_epsilon=1e3,
        weight_decay=0.0,
        max_grad_norm=1e9,
        loss=LossSettings(clip_low=0.99, clip_high=1e6),
    )


def shards_of(
    weighted: Sequence[WeightedSample], *, num_ranks: int, share_prefixes: bool, budget: int = 150
) -> list[dict[str, RankShard]]:
    minibatches = pack_minibatch(
        weighted,
        num_ranks=num_ranks,
        budget=budget,
        attention_tokens=8192,
        share_prefixes=share_prefixes,
    )
    return [
        {"shard": RankShard(step=0, trainer_version=0, minibatches=(minibatch,))}
        for minibatch in minibatches
    ]


def weights_of(causal_lm: PreTrainedModel, model: str) -> dict[str, np.ndarray]:
    named = {name: each.detach().numpy() for name, each in causal_lm.named_parameters()}
    return as_in_checkpoint(model, named)


def train_once(
    world: World,
    settings: RankSettings,
    weighted: Sequence[WeightedSample],
    *,
    share_prefixes: bool = True,
) -> tuple[StepStats, dict[str, np.ndarray]]:
    """Train one step in real processes; return the ranks' statistics and the new weights."""
    own = shards_of(weighted, num_ranks=world.num_ranks, share_prefixes=share_prefixes)
    stats: StepStats = world.start(settings).call_each("train_step", own)[0]
    return stats, world.weights()


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_replay_on_one_and_two_ranks_trains_like_the_loop_over_experts(
    models: dict[str, str], one_rank: World, two_ranks: World, kind: str, tmp_path: Path
) -> None:
    settings = settings_for(models[kind], tmp_path)
    weighted = weigh(recorded_batch(models[kind]))
    loss, gradients = compute_padded(models[kind], weighted, normalises=NORMALISES[kind])
    before = weights_of(load_plain(models[kind]), models[kind])
    gradients = as_in_checkpoint(
        models[kind], {n.removeprefix("causal_lm."): each for n, each in gradients.items()}
    )
    frugal = changed(
        settings, gradient_checkpointing=True, reshard_between_micro_batches=True, logprob_chunk=7
    )
    for world, chosen, share_prefixes in (
        (one_rank, settings, False),
        (one_rank, settings, True),
        (two_ranks, settings, True),
        (two_ranks, frugal, True),
        (two_ranks, frugal, False),
    ):
        stats, weights = train_once(world, chosen, weighted, share_prefixes=share_prefixes)
        assert stats.statistics["loss"] == pytest.approx(0.01 * loss, rel=1e-5)
        assert weights.keys() == before.keys()
        for name, weight in weights.items():
            gradient = 0.01 * gradients[name]
            moved = before[name] - weight
            # Rounding of weights of about 1 is 1e-7; the update itself is exact to a thousandth.
            tolerance = 2e-3 * float(np.abs(gradient).max()) + 5e-7
            np.testing.assert_allclose(moved, gradient, rtol=0, atol=tolerance)
    plain = weigh([sample.without_experts() for sample in recorded_batch(models[kind])])
    without, _ = train_once(two_ranks, settings, plain)
    assert abs(without.statistics["loss"] - 0.01 * loss) > 1e-3 * abs(0.01 * loss)


def test_the_old_policy_replays_records_and_the_reference_routes_by_itself(
    models: dict[str, str], two_ranks: World, tmp_path: Path
) -> None:
    loss = LossSettings(denominator="old", kl=KlSettings(coefficient=0.01))
    settings = changed(
        settings_for(models["qwen3"], tmp_path), loss=loss, epochs=2, learning_rate=1e-4
    )
    samples = recorded_batch(models["qwen3"])
    plain = [sample.without_experts() for sample in samples]
    replayed = train_once(two_ranks, changed(settings, epochs=1), weigh(samples))[0].statistics
    twice = train_once(two_ranks, settings, weigh(samples))[0].statistics
    own = train_once(two_ranks, settings, weigh(plain))[0].statistics
    # A step of one update does not score its old policy: its current one, with replay, equals it.
    start = replayed["policy_logprob_mean"]
    assert twice["old_logprob_mean"] == pytest.approx(start, rel=1e-6)
    assert abs(own["old_logprob_mean"] - start) > 1e-4
    # Reference and policy have the same weights here; only their routing differs.
    assert twice["reference_logprob_mean"] == pytest.approx(own["reference_logprob_mean"], rel=1e-6)
    assert replayed["kl_max"] > 1e-4


def test_a_bfloat16_policy_replays_records(
    models: dict[str, str], one_rank: World, two_ranks: World, tmp_path: Path
) -> None:
    weighted = weigh(recorded_batch(models["qwen3_normalised"]))
    settings = settings_for(models["qwen3_normalised"], tmp_path)
    exact, weights = train_once(one_rank, settings, weighted)
    half = changed(settings, dtype=Dtype.BFLOAT16)
    rounded, other = train_once(two_ranks, half, weighted)
    assert rounded.statistics["loss"] == pytest.approx(exact.statistics["loss"], rel=0.05)
    assert 0 < largest_difference(weights, other) < 0.1


def test_the_saved_inputs_of_a_skipped_update_have_the_records_and_no_pickle(
    models: dict[str, str], tmp_path: Path
) -> None:
    samples = recorded_batch(models["qwen3"])
    row = pack_row(weigh(samples))
    plain = replace(row, experts=None)
    scores = [torch.zeros(row.num_trained), torch.full((plain.num_trained,), -1.5)]
    scored: list[ScoredRow] = [(row, None, scores[0]), (plain, None, scores[1])]
    path = tmp_path / "skipped" / "inputs.npz"
    assert save_inputs(scored, path) == f"its inputs are in {path}"
    (tmp_path / "file").touch()
    assert "could not be saved: " in save_inputs(scored, tmp_path / "file" / "inputs.npz")
    own = {field.name for field in fields(MicroBatch)} - {"experts", "num_overruled_records"}
    with np.load(path, allow_pickle=False) as archive:
        read = {name: archive[name] for name in archive.files}
    named = {name.removeprefix("1/") for name in read if name.startswith("1/")}
    assert named == {*own, "reference_logprobs"}
    assert (read["1/reference_logprobs"] == -1.5).all()
    assert row.experts is not None
    np.testing.assert_array_equal(read["0/expert_positions"], row.experts.positions)
    np.testing.assert_array_equal(read["0/expert_indices"], row.experts.indices)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_a_trained_mixture_is_saved_loaded_and_exported_exactly(
    models: dict[str, str], one_rank: World, two_ranks: World, kind: str, tmp_path: Path
) -> None:
    settings = settings_for(models[kind], tmp_path)
    _, trained = train_once(two_ranks, settings, weigh(recorded_batch(models[kind])))
    checkpoint = two_ranks.call("save", step=1, term=1)[0]
    one_rank.start(settings).call("load", path=checkpoint)
    assert largest_difference(one_rank.weights(), trained) == 0.0
    export_checkpoint(checkpoint, tmp_path / "exported")
    exported = load_plain(str(tmp_path / "exported"))
    assert largest_difference(weights_of(exported, models[kind]), trained) == 0.0
