"""Tests of LoRA adapters: forward, training, checkpoints and export, against whole weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from worlds.builders.settings import changed, rank_settings
from worlds.parts.trainer_world import World, largest_difference, obvious_logprobs, random_samples

from actors.algorithm import KlSettings, LossSettings
from actors.batch import scoring_row
from actors.trainer.checkpoint import CheckpointError
from actors.trainer.export import export_checkpoint
from actors.trainer.lora import adapted_layers, adapters_off, attach_adapters, target_names
from actors.trainer.model import load_policy, row_tensors
from actors.trainer.rank import TrainerRank, score_row
from actors.trainer.settings import LoraSettings, RankSettings
from actors.weights.board import check_tokens

LORA = LoraSettings(rank=4, alpha=8.0)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def settings(tiny_models: dict[bool, str], tmp_path: Path) -> RankSettings:
    return rank_settings(tiny_models[True], tmp_path / "run", lora=LORA)


def train(world: World, steps: range, *, num_micro: int = 1) -> list[float]:
    return [
        world.step(
            [random_samples(2 * step, 5), random_samples(2 * step + 1, 4)],
            step=step,
            version=step,
            num_micro=num_micro,
        ).statistics["loss"]
        for step in steps
    ]


def text(model: str) -> np.ndarray:
    return check_tokens(AutoModelForCausalLM.from_pretrained(model).config.vocab_size)


def test_the_first_policy_is_the_base_model(one_rank: World, settings: RankSettings) -> None:
    found = one_rank.start(settings).call("check_logprobs")[0]
    base = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    expected = obvious_logprobs(base, text(settings.model)).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_merged_weights_give_the_trainers_log_probabilities(
    two_ranks: World, settings: RankSettings, tmp_path: Path
) -> None:
    merged = changed(settings, lora=replace(LORA, publish_merged=True))
    two_ranks.start(merged)
    train(two_ranks, range(3))
    weights = {name: torch.from_numpy(each) for name, each in two_ranks.weights().items()}
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    base = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert weights.keys() == base.keys()
    changed_names = {name for name in base if not torch.equal(base[name], weights[name])}
    assert {name.split(".")[-2] for name in changed_names} == set(LAYERS)
    model.load_state_dict(weights, strict=False)
    expected = obvious_logprobs(model, text(settings.model)).detach().numpy()
    np.testing.assert_allclose(two_ranks.call("check_logprobs")[0], expected, atol=1e-5)


def test_only_adapters_are_published(one_rank: World, settings: RankSettings) -> None:
    one_rank.start(settings)
    train(one_rank, range(2))
    groups = one_rank.call("packed")[0]
    names = [name for group in groups for name in group.manifest.names]
    assert names and all(name.startswith("base_model.model.model.layers.") for name in names)
    assert {name.split(".")[-2] for name in names} == {"lora_A", "lora_B"}
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    linear = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    own = sum(4 * LORA.rank * (each.in_features + each.out_features) for each in linear)
    published = sum(group.manifest.num_bytes for group in groups)
    assert own <= published <= 1.01 * own


def make_full_rank(rank: TrainerRank) -> None:
    """Train only the matrices B, with A the identity of full rank."""
    for _, layer in adapted_layers(rank.causal_lm):
        with torch.no_grad():
            layer.lora_A.to_local().copy_(torch.eye(layer.in_features))
        layer.lora_A.requires_grad_(False)
    _train_only(rank, ".lora_B")


def train_one_kind(rank: TrainerRank) -> None:
    """Train only the weights of down_proj."""
    _train_only(rank, ".down_proj.weight")


def _train_only(rank: TrainerRank, ending: str) -> None:
    policy = rank._policy
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(name.endswith(ending))
    policy._trainable = [each for each in policy.model.parameters() if each.requires_grad]
    policy._optimizer.param_groups[0]["params"] = policy._trainable


def test_an_adapter_of_full_rank_equals_dense_training_of_the_same_weights(
    one_rank: World, settings: RankSettings
) -> None:
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    width = model.model.layers[0].mlp.down_proj.in_features
    full = LoraSettings(rank=width, alpha=float(width), targets=("down_proj",), publish_merged=True)
    one_rank.start(changed(settings, lora=full)).call("plant", fault=make_full_rank)
    losses = train(one_rank, range(3), num_micro=2)
    adapted = one_rank.weights()
    one_rank.start(changed(settings, lora=None)).call("plant", fault=train_one_kind)
    assert train(one_rank, range(3), num_micro=2) == pytest.approx(losses, abs=1e-6)
    assert largest_difference(adapted, one_rank.weights()) < 2e-6
    base = {name: each.detach().numpy() for name, each in model.named_parameters()}
    assert largest_difference(adapted, base) > 1e-3


def test_two_ranks_train_as_one(one_rank: World, two_ranks: World, settings: RankSettings) -> None:
    # The gradients of A start at 0, and Adam would turn their rounding into a step.
    own = changed(settings, adam_epsilon=1e-4)
    losses = train(one_rank.start(own), range(3))
    weights = one_rank.weights()
    assert train(two_ranks.start(own), range(3)) == pytest.approx(losses, abs=1e-5)
    assert largest_difference(weights, two_ranks.weights()) < 1e-4


def test_the_reference_is_the_policy_without_its_adapters(
    one_rank: World, settings: RankSettings
) -> None:
    loss = LossSettings(kl=KlSettings(coefficient=0.5))
    own = changed(settings, loss=loss)
    losses = train(one_rank.start(own), range(3))
    weights = one_rank.weights()
    # Compare with a second model in memory as the reference.
    named = changed(own, reference=settings.model)
    assert train(one_rank.start(named), range(3)) == pytest.approx(losses, abs=1e-6)
    assert largest_difference(weights, one_rank.weights()) < 1e-6
    assert train(one_rank.start(settings), range(3)) != pytest.approx(losses, abs=1e-6)


def test_a_checkpoint_holds_only_adapters_and_resumes_bit_for_bit(
    two_ranks: World, settings: RankSettings
) -> None:
    two_ranks.start(settings)
    train(two_ranks, range(2))
    path = two_ranks.call("save", step=2, term=0)[0]
    losses, weights = train(two_ranks, range(2, 4)), two_ranks.weights()
    prints = two_ranks.call("fingerprint")
    other_seed = changed(settings, seed=7)
    two_ranks.start(other_seed).call("load", path=path)
    assert train(two_ranks, range(2, 4)) == losses
    assert largest_difference(weights, two_ranks.weights()) == 0.0
    assert two_ranks.call("fingerprint") == prints
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size < 0.5 * sum(
        each.stat().st_size for each in Path(settings.model).glob("*.safetensors")
    )


def test_a_checkpoint_of_other_adapters_or_another_base_is_refused(
    one_rank: World, settings: RankSettings, tmp_path: Path
) -> None:
    path = one_rank.start(settings).call("save", step=0, term=0)[0]
    dense = one_rank.start(changed(settings, lora=None)).call("save", step=1, term=0)[0]
    with pytest.raises(CheckpointError, match="got adapters, expected whole weights"):
        one_rank.call("load", path=path)
    one_rank.start(settings)
    with pytest.raises(CheckpointError, match="got whole weights, expected adapters"):
        one_rank.call("load", path=dense)
    one_rank.start(changed(settings, lora=replace(LORA, rank=8)))
    with pytest.raises(CheckpointError, match="adapters with rank 4, expected 8"):
        one_rank.call("load", path=path)
    one_rank.start(changed(settings, lora=replace(LORA, targets=("q_proj",))))
    with pytest.raises(CheckpointError, match="with layers of"):
        one_rank.call("load", path=path)
    other = tmp_path / "other"
    shutil.copytree(settings.model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.0001
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    one_rank.start(changed(settings, model=str(other)))
    with pytest.raises(CheckpointError, match="trained on another base model"):
        one_rank.call("load", path=path)
    with pytest.raises(CheckpointError, match="trained on another base model"):
        export_checkpoint(path, tmp_path / "out", model=str(other))
    with pytest.raises(CheckpointError, match="export it without --adapter"):
        export_checkpoint(dense, tmp_path / "out", only_adapter=True)


def test_exports_have_the_trainers_log_probabilities_in_transformers_and_in_peft(
    one_rank: World, settings: RankSettings, tmp_path: Path
) -> None:
    one_rank.start(settings)
    train(one_rank, range(3))
    path = one_rank.call("save", step=3, term=0)[0]
    trained = one_rank.call("check_logprobs")[0]
    export_checkpoint(path, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    found = obvious_logprobs(merged, text(settings.model)).detach().numpy()
    np.testing.assert_allclose(found, trained, atol=1e-5)
    export_checkpoint(path, tmp_path / "adapter", only_adapter=True)
    names = sorted(file.name for file in (tmp_path / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    base = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    with_peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
    found = obvious_logprobs(with_peft, text(settings.model)).detach().numpy()
    np.testing.assert_allclose(found, trained, atol=1e-5)


def test_frozen_weights_are_kept_in_the_dtype_of_the_computation(
    one_rank: World, settings: RankSettings
) -> None:
    one_rank.start(changed(settings, dtype="bfloat16")).call("plant", fault=check_types)
    assert np.isfinite(train(one_rank, range(2))).all()


def check_types(rank: TrainerRank) -> None:
    for name, parameter in rank.causal_lm.named_parameters():
        is_trained = name.endswith(("lora_A", "lora_B"))
        assert parameter.dtype == (torch.float32 if is_trained else torch.bfloat16), name
        assert parameter.requires_grad is is_trained


def test_adapters_are_off_only_within_the_block(settings: RankSettings) -> None:
    policy = load_policy(settings.model, logprob_chunk=64, gradient_checkpointing=False)
    row = row_tensors(scoring_row(text(settings.model)), device=torch.device("cpu"))
    base = score_row(policy, row)
    attach_adapters(policy.causal_lm, LORA, seed=0)
    with torch.no_grad():
        for _, layer in adapted_layers(policy.causal_lm):
            layer.lora_B.normal_()
    with adapters_off(policy):
        assert torch.equal(score_row(policy, row), base)
    assert not torch.equal(score_row(policy, row), base)


def test_a_target_that_the_model_lacks_is_refused(settings: RankSettings) -> None:
    policy = load_policy(settings.model, logprob_chunk=64, gradient_checkpointing=False)
    with pytest.raises(NotImplementedError, match="got the target qkv, expected some of down_proj"):
        attach_adapters(policy.causal_lm, replace(LORA, targets=("q_proj", "qkv")), seed=0)


def test_targets_are_checked_without_weights(settings: RankSettings) -> None:
    config = AutoConfig.from_pretrained(settings.model)
    assert target_names(config, LORA) == sorted(LAYERS)
    with pytest.raises(NotImplementedError, match="got the target qkv, expected some of down_proj"):
        target_names(config, replace(LORA, targets=("q_proj", "qkv")))
