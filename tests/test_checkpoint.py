"""Checkpoints: resuming equals going on, any number of ranks, only whole ones count; export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_world import (
    World,
    largest_difference,
    random_samples,
    shared_world,
    tiny_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.trainer.checkpoint import (
    MANIFEST,
    CheckpointError,
    Progress,
    claim,
    list_checkpoints,
    newest_checkpoint,
    read_manifest,
)
from actors.trainer.export import export_checkpoint
from actors.trainer.settings import TrainerSettings


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {tied: tiny_model(root / f"tied-{tied}", tied=tied) for tied in (True, False)}


@pytest.fixture(scope="module")
def one():
    return shared_world(1)


@pytest.fixture(scope="module")
def two():
    return shared_world(2)


@pytest.fixture
def settings(models, tmp_path):
    return TrainerSettings(
        model=models[True], checkpoint_dir=tmp_path / "run", warmup_steps=5, weight_decay=0.01
    )


def train(world: World, steps: range) -> list[float]:
    """Two updates a step; the losses."""
    return [
        world.step(
            [random_samples(2 * step, 5), random_samples(2 * step + 1, 4)],
            step=step,
            version=step,
        ).loss
        for step in steps
    ]


def save(world: World, step: int, epoch: int = 0, **extra: str) -> Path:
    paths = world.call("save", step=step, epoch=epoch, **extra)
    assert len(set(paths)) == 1
    return paths[0]


@pytest.mark.parametrize("tied", [True, False])
def test_resuming_equals_going_on_bit_for_bit(two, settings, models, tied):
    settings = replace(settings, model=models[tied])
    two.start(settings)
    train(two, range(2))
    path = save(two, 2, extra_json='{"seed": 9}')
    losses = train(two, range(2, 4))
    weights = two.weights()
    two.start(settings)
    progress = two.call("load", path=path)
    assert (
        progress
        == [
            Progress(
                step=2,
                version=2,
                epoch=0,
                num_updates=4,
                num_ranks=2,
                model=models[tied],
                extra_json='{"seed": 9}',
            )
        ]
        * 2
    )
    assert train(two, range(2, 4)) == losses
    assert largest_difference(weights, two.weights()) == 0.0


def test_a_checkpoint_from_before_the_first_update_resumes_exactly(one, settings):
    one.start(settings)
    path = save(one, 0)
    losses = train(one, range(2))
    weights = one.weights()
    one.start(settings).call("load", path=path)
    assert train(one, range(2)) == losses
    assert largest_difference(weights, one.weights()) == 0.0


def test_another_number_of_ranks_takes_over(one, two, settings):
    two.start(settings)
    train(two, range(2))
    path = save(two, 2)
    losses = train(two, range(2, 4))
    one.start(settings).call("load", path=path)
    assert train(one, range(2, 4)) == pytest.approx(losses, abs=1e-5)
    back = save(one, 4)
    before = one.weights()
    assert two.start(settings).call("load", path=back)[1].num_ranks == 1
    assert largest_difference(before, two.weights()) == 0.0


def test_only_the_newest_are_kept_and_a_newer_epoch_outranks_a_later_step(one, settings):
    one.start(replace(settings, keep_checkpoints=2))
    for step, epoch in ((1, 0), (7, 0), (2, 1)):
        save(one, step, epoch)
    names = [path.name for path in list_checkpoints(settings.checkpoint_dir)]
    assert names == ["step-000007-e0", "step-000002-e1"]
    assert newest_checkpoint(settings.checkpoint_dir).name == "step-000002-e1"
    assert sorted(path.name for path in settings.checkpoint_dir.glob("[!.]*")) == sorted(names)


def test_a_run_that_was_replaced_can_no_longer_save(two, settings):
    two.start(settings)
    path = save(two, 1, 3)
    claim(settings.checkpoint_dir, 4)
    with pytest.raises(CheckpointError, match="got epoch 3, expected at least 4"):
        save(two, 2, 3)
    assert list_checkpoints(settings.checkpoint_dir) == [path]
    with pytest.raises(CheckpointError, match="this run was replaced"):
        claim(settings.checkpoint_dir, 3)
    assert save(two, 2, 4).name == "step-000002-e4"


def test_a_half_written_checkpoint_does_not_count_and_is_not_loaded(one, settings):
    one.start(settings)
    good = save(one, 1)
    later = save(one, 2)
    (later / MANIFEST).unlink()
    (settings.checkpoint_dir / ".tmp-step-000003-e0").mkdir()
    assert newest_checkpoint(settings.checkpoint_dir) == good
    with pytest.raises(CheckpointError, match="was interrupted while being written"):
        one.call("load", path=later)
    assert one.call("load", path=good)[0].step == 1
    # Writing the same step again replaces what was left behind.
    assert save(one, 2) == later
    assert newest_checkpoint(settings.checkpoint_dir) == later


def test_a_damaged_checkpoint_is_refused_on_every_rank(two, settings):
    two.start(settings)
    path = save(two, 1)
    whole = save(two, 2)
    shard = next(path.glob("*1_0.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="its shards cannot be read"):
        two.call("load", path=path)
    assert two.call("load", path=whole)[0].step == 2
    train(two, range(1))


def test_a_manifest_of_another_format_is_refused(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="got manifest format 99, expected 1"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 1, "step": 3}))
    with pytest.raises(CheckpointError, match="lacks or adds fields"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_gives_the_trainers_own_log_probabilities(two, settings, models, tied, tmp_path):
    settings = replace(settings, model=models[tied])
    two.start(settings)
    train(two, range(2))
    path = save(two, 2)
    output = tmp_path / "exported"
    assert export_checkpoint(path, output).step == 2
    ids = random_samples(99, 1)[0].token_ids
    expected = two.call("logprobs", token_ids=ids, num_prompt=1)[0]
    causal_lm = AutoModelForCausalLM.from_pretrained(output)
    assert causal_lm.dtype == torch.float32
    assert causal_lm.config.tie_word_embeddings is tied
    row = torch.tensor(ids, dtype=torch.int64)
    with torch.no_grad():
        scores = torch.log_softmax(causal_lm(row[None]).logits[0, :-1], -1)
    found = scores.gather(-1, row[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    ours, base = (AutoTokenizer.from_pretrained(name) for name in (output, models[tied]))
    assert ours.chat_template == base.chat_template
    assert ours.get_vocab() == base.get_vocab()
    with pytest.raises(FileExistsError, match="expected a new directory"):
        export_checkpoint(path, output)
    assert export_checkpoint(path, tmp_path / "half", dtype=torch.bfloat16).version == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_an_export_on_another_base_model_is_refused(one, settings, tmp_path):
    path = save(one.start(settings), 1)
    (tmp_path / "other").mkdir()
    config = json.loads((Path(settings.model) / "config.json").read_text())
    config["hidden_size"] = 64
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="name the run's base model"):
        export_checkpoint(path, tmp_path / "out", model=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()
