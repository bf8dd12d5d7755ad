"""Tests of ranks in real processes with gloo and FSDP2: the split over ranks changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from worlds.builders.settings import changed, rank_settings
from worlds.parts.trainer_world import (
    Sample,
    World,
    largest_difference,
    obvious_logprobs,
    pack,
    random_samples,
    shards,
)

from actors.trainer.agreement import PolicyTooOld, ShardRefused
from actors.trainer.model import RowTensors, load_policy, row_tensors
from actors.trainer.rank import TrainerRank, score_row
from actors.trainer.settings import RankSettings
from actors.trainer.sharded_model import ShardedModel, Sharding
from actors.types import Dtype
from actors.weights.board import check_tokens

# float32 sums of the same numbers in two orders, then one AdamW update of learning rate 1e-3.
LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 2e-5


@pytest.fixture
def settings(tiny_models: dict[bool, str], tmp_path: Path) -> RankSettings:
    # With a small epsilon, AdamW's first update has the size of the learning rate whatever the
    # gradient, and turns the rounding of a zero gradient into a full step.
    return rank_settings(tiny_models[True], tmp_path, adam_epsilon=1e-4)


def compute_reference(
    model: str, samples: Sequence[Sample], *, settings: RankSettings
) -> tuple[float, float]:
    """Compute loss and clipped gradient norm in a plain loop over samples in transformers."""
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = sum(int(sample.mask.sum()) for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        current = obvious_logprobs(causal_lm, sample.token_ids, temperature=sample.temperature)
        mask = torch.tensor(sample.mask[1:])
        ratio = torch.exp(current - torch.tensor(sample.logprobs[1:]))
        advantages = torch.tensor(sample.advantages[1:])
        clips = settings.algorithm.loss
        clipped = ratio.clamp(1 - clips.clip_low, 1 + clips.clip_high)
        token_losses = -torch.minimum(ratio * advantages, clipped * advantages)
        loss = loss + (token_losses * mask).sum() / total
    loss.backward()
    squares = [parameter.grad.square().sum() for parameter in causal_lm.parameters()]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


@pytest.mark.parametrize("tied", [True, False])
def test_one_and_two_ranks_match_a_plain_loop(
    one_rank: World,
    two_ranks: World,
    settings: RankSettings,
    tiny_models: dict[bool, str],
    tied: bool,
) -> None:
    settings = changed(settings, model=tiny_models[tied])
    samples = [
        replace(sample, temperature=(1.0, 0.8, 1.3)[number % 3])
        for number, sample in enumerate(random_samples(1, 11))
    ]
    loss, grad_norm = compute_reference(tiny_models[tied], samples, settings=settings)
    alone, both = (
        one_rank.start(settings).step([samples]),
        two_ranks.start(settings).step([samples]),
    )
    for stats in (alone, both):
        assert stats.statistics["loss"] == pytest.approx(loss, abs=LOSS_TOLERANCE)
        assert stats.statistics["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    assert alone.trained_tokens == both.trained_tokens == sum(int(s.mask.sum()) for s in samples)
    assert both.statistics["entropy_mean"] == pytest.approx(
        alone.statistics["entropy_mean"], rel=1e-5
    )
    assert both.statistics["ratio_max"] == pytest.approx(alone.statistics["ratio_max"], rel=1e-5)
    before = AutoModelForCausalLM.from_pretrained(tiny_models[tied]).state_dict()
    after = one_rank.weights()
    assert ("lm_head.weight" in after) is not tied
    assert any(np.abs(after[name] - before[name].numpy()).max() > 1e-4 for name in after)
    assert largest_difference(after, two_ranks.weights()) < WEIGHT_TOLERANCE


def test_weights_do_not_depend_on_order_number_or_padding_of_micro_batches(
    one_rank: World, two_ranks: World, settings: RankSettings
) -> None:
    minibatches = [random_samples(2, 9), random_samples(3, 7)]
    whole = one_rank.start(settings).step(minibatches)
    weights = one_rank.weights()
    turned = [list(reversed(samples)) for samples in minibatches]
    # With seven samples on two ranks and five rows each, some micro-batches are padding.
    split = two_ranks.start(settings).step(turned, num_micro=5)
    assert split.statistics["loss"] == pytest.approx(whole.statistics["loss"], abs=LOSS_TOLERANCE)
    assert split.num_updates == whole.num_updates == 2
    assert largest_difference(weights, two_ranks.weights()) < WEIGHT_TOLERANCE
    frugal = changed(
        settings, reshard_between_micro_batches=True, gradient_checkpointing=True, logprob_chunk=7
    )
    two_ranks.start(frugal).step(turned, num_micro=5)
    assert largest_difference(weights, two_ranks.weights()) < WEIGHT_TOLERANCE


def count_gathered(rank: TrainerRank, file: Path) -> None:
    """Append the number of decoder layers with gathered weights before each micro-batch."""
    trained = rank._policy
    begin = trained.begin_micro_batch

    def counting(*, is_last: bool) -> None:
        layers = [next(layer.parameters()) for layer in trained._groups[:-1]]
        with file.open("a") as opened:
            opened.write(f"{sum(not isinstance(each, DTensor) for each in layers)} ")
        begin(is_last=is_last)

    trained.begin_micro_batch = counting  # type: ignore[method-assign]


def test_gathered_weights_are_freed_after_each_micro_batch_if_configured(
    one_rank: World, settings: RankSettings, tmp_path: Path
) -> None:
    layers = AutoConfig.from_pretrained(settings.model).num_hidden_layers
    for frees, gathered in ((False, [0, layers, layers]), (True, [0, 0, 0])):
        one_rank.start(changed(settings, reshard_between_micro_batches=frees))
        file = tmp_path / f"{frees}"
        one_rank.call("plant", fault=partial(count_gathered, file=file))
        one_rank.step([random_samples(2, 9)], num_micro=3)
        assert list(map(int, file.read_text().split())) == gathered


def test_the_log_probability_check_reads_the_weights_of_the_last_update(
    one_rank: World, two_ranks: World, settings: RankSettings
) -> None:
    samples = random_samples(4, 6)
    for world in (one_rank.start(settings), two_ranks.start(settings)):
        before = world.call("check_logprobs")[0]
        world.step([samples])
        after = world.call("check_logprobs")[0]
        assert np.abs(after - before).max() > 1e-4
        causal_lm = AutoModelForCausalLM.from_pretrained(settings.model)
        weights = {name: torch.tensor(values) for name, values in world.weights().items()}
        causal_lm.load_state_dict(weights, strict=False)
        text = check_tokens(causal_lm.config.vocab_size)
        expected = obvious_logprobs(causal_lm, text).detach().numpy()
        np.testing.assert_allclose(after, expected, atol=1e-5)
        assert np.array_equal(world.call("check_logprobs")[-1], after)


def test_a_second_epoch_trains_again_and_adds_no_mismatch(
    one_rank: World, settings: RankSettings
) -> None:
    samples = random_samples(5, 6)
    once = one_rank.start(settings).step([samples])
    twice = one_rank.start(changed(settings, epochs=2)).step([samples])
    assert twice.num_updates == 2
    assert twice.trained_tokens == 2 * once.trained_tokens
    for name in ("mismatch_k1_mean", "mismatch_k3_mean", "mismatch_max"):
        assert twice.statistics[name] == once.statistics[name]


def test_mismatch_counts_only_tokens_of_the_trainers_own_version(
    one_rank: World, settings: RankSettings
) -> None:
    one_rank.start(settings).step([random_samples(6, 4)])
    old = one_rank.step([random_samples(7, 4, version=0)], step=1, version=1)
    names = {"mismatch_k1_mean", "mismatch_k3_mean", "mismatch_max"}
    assert not names & old.statistics.keys()
    # Tokens of an older version differ much from the trainer, and are not compared.
    stale = [
        replace(sample, logprobs=sample.logprobs - 50.0)
        for sample in random_samples(8, 3, version=1)
    ]
    stats = one_rank.step([[*stale, *random_samples(9, 3, version=2)]], step=2, version=2)
    assert names <= stats.statistics.keys() and stats.statistics["mismatch_max"] < 40


def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(
    two_ranks: World, settings: RankSettings
) -> None:
    good, bad = random_samples(10, 5), random_samples(11, 6)
    bad[3].advantages[:] = np.nan
    two_ranks.start(settings).step([good])
    before = two_ranks.weights()
    stats = two_ranks.step([bad], num_micro=2, step=1, version=1)
    assert stats.is_skipped and stats.num_skipped_updates == 1
    assert stats.trained_tokens == 0
    assert largest_difference(before, two_ranks.weights()) == 0.0
    saved = sorted((settings.checkpoint_dir / "skipped").iterdir())
    assert [path.name for path in saved] == [
        f"step-000001-update-0-rank-{rank}.npz" for rank in range(2)
    ]
    # The bad sample is in the second row of rank 1, whose rows have the samples 1, 5 and 3.
    with np.load(saved[1]) as archive:
        assert np.isnan(archive["1/advantages"]).any()
        assert np.array_equal(archive["0/token_ids"], pack([bad[1], bad[5]]).token_ids)
    after = two_ranks.step([good], step=2, version=2)
    assert not after.is_skipped
    assert largest_difference(before, two_ranks.weights()) > 0.0


def test_a_skipped_minibatch_does_not_change_the_other_updates_of_its_step(
    one_rank: World, settings: RankSettings
) -> None:
    good, bad = random_samples(12, 5), random_samples(13, 4)
    bad[0].advantages[:] = -np.inf
    stats = one_rank.start(settings).step([bad, good])
    assert (stats.num_updates, stats.num_skipped_updates) == (2, 1)
    weights = one_rank.weights()
    alone = one_rank.start(settings).step([good])
    assert stats.statistics["loss"] == alone.statistics["loss"]
    assert largest_difference(weights, one_rank.weights()) == 0.0


def test_a_step_with_nothing_to_train_changes_neither_weights_nor_momentum(
    two_ranks: World, settings: RankSettings
) -> None:
    two_ranks.start(settings).step([random_samples(14, 5)])
    before = two_ranks.weights()
    stats = two_ranks.step([[]], num_micro=2, step=1, version=1)
    assert stats.num_empty_updates == 1
    assert largest_difference(before, two_ranks.weights()) == 0.0
    assert two_ranks.step([], step=2, version=2).num_updates == 0
    two_ranks.step([random_samples(22, 5, version=3)], step=3, version=3)
    with_pauses = two_ranks.weights()
    two_ranks.start(settings).step([random_samples(14, 5)])
    two_ranks.step([random_samples(22, 5, version=1)], step=1, version=1)
    assert largest_difference(with_pauses, two_ranks.weights()) == 0.0


def test_a_token_beyond_the_age_bound_is_refused_on_every_rank(
    two_ranks: World, settings: RankSettings
) -> None:
    two_ranks.start(changed(settings, max_lag=1, window_groups=1))
    two_ranks.step([random_samples(15, 4)])
    two_ranks.step([random_samples(15, 4)], step=1, version=1)
    mixed = [*random_samples(16, 3, version=2), *random_samples(17, 1, version=0)]
    before = two_ranks.weights()
    with pytest.raises(PolicyTooOld, match=r"rank 1: .* 2 training steps old, expected at most 1"):
        two_ranks.step([mixed], step=2, version=2)
    assert largest_difference(before, two_ranks.weights()) == 0.0
    assert two_ranks.step([mixed[:3]], step=2, version=2).num_updates == 1


def test_a_shard_for_another_trainer_is_refused_and_the_group_continues(
    two_ranks: World, settings: RankSettings
) -> None:
    two_ranks.start(settings)
    samples = random_samples(18, 4)
    with pytest.raises(ShardRefused, match="made for version 7, expected version 0"):
        two_ranks.step([samples], version=7)
    own = shards([samples], num_ranks=2, num_micro=1)
    more = replace(own[1], minibatches=own[1].minibatches * 2)
    with pytest.raises(ShardRefused, match="differ in step, version or numbers of rows"):
        two_ranks.call_each("train_step", [{"shard": own[0]}, {"shard": more}])
    with pytest.raises(ShardRefused, match="sampled by version 3"):
        two_ranks.step([random_samples(19, 4, version=3)])
    assert two_ranks.step([random_samples(18, 4)]).num_updates == 1


def test_warm_up_is_linear_in_applied_updates(one_rank: World, settings: RankSettings) -> None:
    one_rank.start(changed(settings, warmup_updates=4, learning_rate=0.01))
    rates = [
        one_rank.step([random_samples(20, 2)], step=step, version=step).learning_rate
        for step in range(5)
    ]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_bfloat16_computes_with_float32_master_weights(
    two_ranks: World, settings: RankSettings
) -> None:
    low = changed(settings, dtype=Dtype.BFLOAT16, learning_rate=1e-5, epochs=3)
    samples = random_samples(21, 6)
    reference = two_ranks.start(changed(settings, learning_rate=1e-5, epochs=3)).step([samples])
    stats = two_ranks.start(low).step([samples])
    assert not stats.is_skipped
    assert stats.statistics["loss"] == pytest.approx(reference.statistics["loss"], abs=0.02)
    assert stats.statistics["grad_norm"] == pytest.approx(
        reference.statistics["grad_norm"], rel=0.1
    )
    # Updates of 1e-5 are below bfloat16's resolution: only float32 master weights sum them up.
    path = Path(two_ranks.call("save", step=1, term=0)[0])
    two_ranks.start(settings).call("load", path=path)
    base = AutoModelForCausalLM.from_pretrained(settings.model).state_dict()
    weights = two_ranks.weights()
    moved = np.concatenate([np.abs(weights[n] - base[n].numpy()).ravel() for n in weights])
    assert 0 < np.median(moved[moved > 0]) < 1e-4


def test_temperatures_and_advantages_stay_float32_in_a_bfloat16_model(
    model: str, mesh: DeviceMesh
) -> None:
    policy = load_policy(model, logprob_chunk=64, gradient_checkpointing=False)
    sharding = Sharding(mesh=mesh, device=torch.device("cpu"), param_dtype=torch.bfloat16)
    sharded = ShardedModel(policy, policy.causal_lm, sharding)
    seen: list[RowTensors] = []
    # This hook runs after FSDP's own, which could cast the fields of dataclasses.
    policy.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    sample = replace(random_samples(0, 1)[0], temperature=0.7)
    row = row_tensors(pack([sample]), device=torch.device("cpu"))
    score_row(sharded.model, row)
    assert policy.causal_lm.dtype is torch.bfloat16
    temperatures, advantages = seen[0].temperatures, seen[0].advantages
    assert temperatures is not None
    assert torch.equal(temperatures, torch.full_like(row.advantages, 0.7))
    assert torch.equal(advantages, row.advantages)
    assert {temperatures.dtype, advantages.dtype} == {torch.float32}
