"""Tests of the trainer's checkpoints: exact resuming, damage, and export."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds.builders.settings import changed, rank_settings
from worlds.faults.mounts import fill, small_disk
from worlds.parts.trainer_world import (
    World,
    largest_difference,
    list_checkpoints,
    obvious_logprobs,
    random_samples,
)

from actors.algorithm import ScheduleSettings, learning_rate_at
from actors.environment.tokenizer import (
    load_tokenizer,
    stop_token_ids,
    tokenizer_fingerprint,
)
from actors.trainer.checkpoint import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    Progress,
    begin,
    claim,
    finish,
    has_digests,
    read_manifest,
    temporary_path,
)
from actors.trainer.export import export_checkpoint
from actors.trainer.settings import RankSettings
from actors.weights.board import check_tokens
from service.launch.resume import newest_complete


@pytest.fixture
def settings(tiny_models: dict[bool, str], tmp_path: Path) -> RankSettings:
    return rank_settings(
        tiny_models[True],
        tmp_path / "run",
        warmup_updates=3,
        schedule=ScheduleSettings(kind="cosine", updates=8, min_ratio=0.1),
        weight_decay=0.01,
    )


def train(world: World, steps: range) -> list[float]:
    """Train steps of two updates each, and return their losses."""
    return [
        world.step(
            [random_samples(2 * step, 5), random_samples(2 * step + 1, 4)],
            step=step,
            version=step,
        ).statistics["loss"]
        for step in steps
    ]


def save(world: World, step: int, term: int = 0) -> Path:
    paths = world.call("save", step=step, term=term)
    assert len(set(paths)) == 1
    return paths[0]


@pytest.mark.parametrize("tied", [True, False])
def test_resuming_equals_continuing_bit_for_bit(
    two_ranks: World, settings: RankSettings, tiny_models: dict[bool, str], tied: bool
) -> None:
    settings = changed(settings, model=tiny_models[tied])
    two_ranks.start(settings)
    train(two_ranks, range(2))
    path = save(two_ranks, 2)
    losses = train(two_ranks, range(2, 4))
    weights = two_ranks.weights()
    two_ranks.start(settings)
    saved = Progress(
        step=2,
        version=2,
        term=0,
        num_updates=4,
        num_ranks=2,
        model=tiny_models[tied],
    )
    assert two_ranks.call("load", path=path) == [saved, saved]
    assert train(two_ranks, range(2, 4)) == losses
    assert largest_difference(weights, two_ranks.weights()) == 0.0


@pytest.mark.proof
@pytest.mark.slow
def test_moments_on_the_host_give_the_same_bits_and_interchangeable_checkpoints(
    two_ranks: World, settings: RankSettings
) -> None:
    """Check the update by single parameters and the loading; on a CPU this copies no moments."""
    own = changed(settings, moments_on_host=True, weight_decay=0.1)
    plain = changed(settings, weight_decay=0.1)
    two_ranks.start(plain)
    losses = train(two_ranks, range(2))
    path, later = save(two_ranks, 2), train(two_ranks, range(2, 4))
    weights, prints = two_ranks.weights(), two_ranks.call("fingerprint")
    two_ranks.start(own)
    assert train(two_ranks, range(2)) == losses
    by_host = save(two_ranks, 3)
    for start, checkpoint in ((own, path), (plain, by_host), (own, by_host)):
        two_ranks.start(start).call("load", path=checkpoint)
        assert train(two_ranks, range(2, 4)) == later
        assert two_ranks.call("fingerprint") == prints
        assert largest_difference(weights, two_ranks.weights()) == 0.0


@pytest.mark.proof
@pytest.mark.slow
def test_a_checkpoint_from_before_the_first_update_resumes_exactly(
    one_rank: World, settings: RankSettings
) -> None:
    one_rank.start(settings)
    path = save(one_rank, 0)
    losses = train(one_rank, range(2))
    weights = one_rank.weights()
    one_rank.start(settings).call("load", path=path)
    assert train(one_rank, range(2)) == losses
    assert largest_difference(weights, one_rank.weights()) == 0.0


def test_a_resumed_run_continues_any_schedule_at_its_number_of_updates(
    one_rank: World, settings: RankSettings
) -> None:
    samples = [random_samples(0, 5)]
    one_rank.start(settings)
    train(one_rank, range(2))
    path = save(one_rank, 2)
    wsd = ScheduleSettings(kind="wsd", updates=7, decay_updates=4)
    for schedule in (settings.trainer.schedule, wsd, ScheduleSettings()):
        one_rank.start(changed(settings, schedule=schedule)).call("load", path=path)
        trainer = settings.trainer
        expected = [
            learning_rate_at(
                done, learning_rate=trainer.learning_rate, warmup_updates=3, schedule=schedule
            )
            for done in (4, 5)
        ]
        found = [one_rank.step(samples, step=step, version=step).learning_rate for step in (2, 3)]
        assert found == expected


def test_a_checkpoint_can_be_loaded_by_another_number_of_ranks(
    one_rank: World, two_ranks: World, settings: RankSettings
) -> None:
    two_ranks.start(settings)
    train(two_ranks, range(2))
    path = save(two_ranks, 2)
    losses = train(two_ranks, range(2, 4))
    one_rank.start(settings).call("load", path=path)
    assert train(one_rank, range(2, 4)) == pytest.approx(losses, abs=1e-5)
    back = save(one_rank, 4)
    before = one_rank.weights()
    assert two_ranks.start(settings).call("load", path=back)[1].num_ranks == 1
    assert largest_difference(before, two_ranks.weights()) == 0.0


def test_checkpoints_are_ordered_by_term_and_then_by_step(
    one_rank: World, settings: RankSettings
) -> None:
    one_rank.start(settings)
    for step, term in ((1, 0), (7, 0), (2, 1)):
        save(one_rank, step, term)
    names = [path.name for path in list_checkpoints(settings.checkpoint_dir)]
    assert names == ["step-000001-t0", "step-000007-t0", "step-000002-t1"]
    assert sorted(path.name for path in settings.checkpoint_dir.glob("[!.]*")) == sorted(names)


def test_a_run_that_was_replaced_can_no_longer_save(
    two_ranks: World, settings: RankSettings
) -> None:
    two_ranks.start(settings)
    path = save(two_ranks, 1, 3)
    claim(settings.checkpoint_dir, 4)
    with pytest.raises(CheckpointError, match="got term 3, expected at least 4"):
        save(two_ranks, 2, 3)
    assert list_checkpoints(settings.checkpoint_dir) == [path]
    with pytest.raises(CheckpointError, match="this run was replaced"):
        claim(settings.checkpoint_dir, 3)
    assert save(two_ranks, 2, 4).name == "step-000002-t4"


def test_a_run_that_is_replaced_while_it_saves_finishes_no_checkpoint(tmp_path: Path) -> None:
    progress = Progress(step=1, version=1, term=3, num_updates=1, num_ranks=1, model="m")
    begin(tmp_path, progress)
    claim(tmp_path, 4)
    # A rank writes its shard after the newer run has claimed the directory.
    temporary_path(tmp_path, progress).mkdir()
    with pytest.raises(CheckpointError, match="got term 3, expected at least 4"):
        finish(tmp_path, progress, digests={}, digest_s=0.0)
    assert list_checkpoints(tmp_path) == []


def test_a_claim_removes_the_leftovers_of_an_interrupted_save(tmp_path: Path) -> None:
    for name in (".tmp-step-000003-t1", ".tmp-step-000004-t2", "step-000002-t1"):
        (tmp_path / name).mkdir()
    claim(tmp_path, 3)
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-000002-t1"]
    (tmp_path / ".tmp-step-000005-t3").mkdir()
    with pytest.raises(CheckpointError, match="this run was replaced"):
        claim(tmp_path, 2)
    assert (tmp_path / ".tmp-step-000005-t3").is_dir()


def test_an_empty_claim_file_counts_as_no_claim(tmp_path: Path) -> None:
    claim(tmp_path, 3)
    [file] = tmp_path.iterdir()
    file.write_text("")
    claim(tmp_path, 2)
    with pytest.raises(CheckpointError, match="this run was replaced"):
        claim(tmp_path, 1)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="holds no number"):
        claim(tmp_path, 3)


@pytest.mark.proof
@pytest.mark.slow
def test_a_save_succeeds_when_a_full_disk_has_space_again(
    two_ranks: World, tiny_models: dict[bool, str], tmp_path: Path
) -> None:
    with small_disk(tmp_path, kib=128 * 1024):
        two_ranks.start(rank_settings(tiny_models[True], tmp_path / "run"))
        filler = tmp_path / "filler"
        fill(filler)
        freeing = threading.Timer(2.0, filler.unlink)
        freeing.start()
        path = save(two_ranks, 1)
        freeing.join()
        assert [progress.step for progress in two_ranks.call("load", path=path)] == [1, 1]


def test_an_incomplete_checkpoint_is_neither_listed_nor_loaded(
    one_rank: World, settings: RankSettings
) -> None:
    one_rank.start(settings)
    good = save(one_rank, 1)
    later = save(one_rank, 2)
    (later / MANIFEST).unlink()
    (settings.checkpoint_dir / ".tmp-step-000003-t0").mkdir()
    assert list_checkpoints(settings.checkpoint_dir) == [good]
    with pytest.raises(CheckpointError, match="was interrupted while it was written"):
        one_rank.call("load", path=later)
    assert one_rank.call("load", path=good)[0].step == 1
    # Writing the same step again replaces the incomplete checkpoint.
    assert save(one_rank, 2) == later
    assert list_checkpoints(settings.checkpoint_dir) == [good, later]


def test_a_damaged_checkpoint_is_refused_on_every_rank(
    two_ranks: World, settings: RankSettings
) -> None:
    two_ranks.start(settings)
    path = save(two_ranks, 1)
    whole = save(two_ranks, 2)
    shard = next(path.glob("*1_0.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"got other bytes in __1_0\.distcp than"):
        two_ranks.call("load", path=path)
    without_digests(path)
    with pytest.raises(CheckpointError, match="its shards cannot be read"):
        two_ranks.call("load", path=path)
    assert two_ranks.call("load", path=whole)[0].step == 2
    train(two_ranks, range(1))


def test_damaged_metadata_are_reported_in_one_sentence(
    two_ranks: World, settings: RankSettings, tmp_path: Path
) -> None:
    two_ranks.start(settings)
    path = save(two_ranks, 1)
    (path / ".metadata").write_bytes(b"\x80\x04no pickle")
    with pytest.raises(CheckpointError, match=r"got other bytes in \.metadata"):
        two_ranks.call("load", path=path)
    without_digests(path)
    with pytest.raises(CheckpointError, match="its shards cannot be read"):
        two_ranks.call("load", path=path)
    with pytest.raises(CheckpointError, match="its weights cannot be read"):
        export_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def without_digests(path: Path) -> None:
    """Rewrite the checkpoint's manifest in format 2, which has no digests."""
    fields = json.loads((path / MANIFEST).read_text())
    for name in ("digests", "digest_s", "sha256"):
        del fields[name]
    (path / MANIFEST).write_text(json.dumps({**fields, "format": 2}))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)


def test_one_flipped_bit_of_any_file_is_refused_by_ranks_and_export(
    two_ranks: World, settings: RankSettings, tmp_path: Path
) -> None:
    two_ranks.start(settings)
    path = save(two_ranks, 1)
    names = sorted(file.name for file in path.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", MANIFEST]
    for name in names:
        content = (path / name).read_bytes()
        flip_a_bit(path / name)
        with pytest.raises(CheckpointError, match=r"other bytes|has changed since|be read"):
            two_ranks.call("load", path=path)
        with pytest.raises(CheckpointError, match=r"other bytes|has changed since|be read"):
            export_checkpoint(path, tmp_path / "out")
        (path / name).write_bytes(content)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be read .No such file"):
        two_ranks.call("load", path=path)
    (path / "__0_0.distcp").write_bytes(content)


def test_a_manifest_with_another_number_or_without_its_digests_is_refused(tmp_path: Path) -> None:
    progress = Progress(step=1, version=1, term=3, num_updates=1, num_ranks=1, model="m")
    begin(tmp_path, progress)
    finish(tmp_path, progress, digests={}, digest_s=0.0)
    path = tmp_path / progress.directory_name
    assert read_manifest(path) == progress
    manifest = path / MANIFEST
    content = manifest.read_text()
    fields = json.loads(content)
    own = ("digests", "digest_s", "sha256")
    assert fields.keys() == {"format", *asdict(progress), *own}
    stripped = [
        {name: each for name, each in fields.items() if name not in removed}
        for number in (1, 2, 3)
        for removed in combinations(own, number)
    ]
    # Manifests of an earlier format in which at least one field shows that there were digests.
    earlier = [{**each, "format": FORMAT} for each in stripped if each.keys() & {*own}]
    for other in ({**fields, "version": 3}, *stripped, *earlier):
        manifest.write_text(json.dumps(other))
        with pytest.raises(CheckpointError, match="has changed since it was written"):
            read_manifest(path)


def test_a_manifest_without_any_field_of_digests_is_read(tmp_path: Path) -> None:
    progress = Progress(step=1, version=1, term=3, num_updates=1, num_ranks=1, model="m")
    for number in (2, FORMAT):
        (tmp_path / MANIFEST).write_text(json.dumps({"format": number, **asdict(progress)}))
        assert read_manifest(tmp_path) == progress and not has_digests(tmp_path)


def test_a_checkpoint_of_an_older_version_is_read_without_digests(
    one_rank: World, settings: RankSettings, tmp_path: Path
) -> None:
    path = save(one_rank.start(settings), 1)
    assert has_digests(path)
    without_digests(path)
    assert not has_digests(path)
    assert one_rank.call("load", path=path)[0].step == 1
    assert export_checkpoint(path, tmp_path / "out").step == 1


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    progress = Progress(step=20, version=20, term=1, num_updates=20, num_ranks=1, model="m")
    begin(tmp_path, progress)
    finish(tmp_path, progress, digests={}, digest_s=0.0)
    written = tmp_path / progress.directory_name
    shutil.copytree(written, tmp_path / "step-000040-t1")
    with pytest.raises(CheckpointError, match=r"40-t1: its manifest\.json is from step-000020-t1"):
        read_manifest(tmp_path / "step-000040-t1")
    assert newest_complete(tmp_path) == written
    # A copy under any other name is read, but does not belong to the run.
    assert read_manifest(written.rename(tmp_path / "best")) == progress


@pytest.mark.parametrize(
    ("name", "value"), [("step", "3"), ("version", None), ("term", True), ("num_updates", -1)]
)
def test_a_manifest_with_a_wrong_number_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    progress = Progress(step=20, version=20, term=1, num_updates=20, num_ranks=1, model="m")
    fields = {"format": FORMAT, **asdict(progress), name: value}
    (tmp_path / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=f"has {name} {value!r}, expected a whole number"):
        read_manifest(tmp_path)


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="got manifest format 99, expected 2 to 4"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": 3}))
    with pytest.raises(CheckpointError, match="lacks or adds fields"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_gives_the_trainers_own_log_probabilities(
    two_ranks: World,
    settings: RankSettings,
    tiny_models: dict[bool, str],
    tied: bool,
    tmp_path: Path,
) -> None:
    settings = changed(settings, model=tiny_models[tied])
    two_ranks.start(settings)
    train(two_ranks, range(2))
    path = save(two_ranks, 2)
    output = tmp_path / "exported"
    assert export_checkpoint(path, output).step == 2
    expected = two_ranks.call("check_logprobs")[0]
    causal_lm = AutoModelForCausalLM.from_pretrained(output)
    assert causal_lm.dtype == torch.float32
    assert causal_lm.config.tie_word_embeddings is tied
    text = check_tokens(causal_lm.config.vocab_size)
    found = obvious_logprobs(causal_lm, text).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    ours, base = (AutoTokenizer.from_pretrained(name) for name in (output, tiny_models[tied]))
    assert ours.chat_template == base.chat_template
    assert ours.get_vocab() == base.get_vocab()
    with pytest.raises(FileExistsError, match="expected a new directory"):
        export_checkpoint(path, output)
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="expected a new directory"):
        export_checkpoint(path, tmp_path / "dangling")
    assert export_checkpoint(path, tmp_path / "half", dtype=torch.bfloat16).version == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_an_export_on_another_base_model_is_refused(
    one_rank: World, settings: RankSettings, tmp_path: Path
) -> None:
    path = save(one_rank.start(settings), 1)
    (tmp_path / "other").mkdir()
    config = json.loads((Path(settings.model) / "config.json").read_text())
    config["hidden_size"] = 64
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="name the run's base model"):
        export_checkpoint(path, tmp_path / "out", model=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_own_head", [True, False])
def test_a_separate_head_is_exported_whatever_the_configuration_says(
    one_rank: World, tiny_models: dict[bool, str], tmp_path: Path, has_own_head: bool
) -> None:
    # transformers does not tie the head if a checkpoint has one that differs from its embedding.
    base = tmp_path / "base"
    shutil.copytree(tiny_models[False], base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    if not has_own_head:
        weights = load_file(base / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    one_rank.start(rank_settings(str(base), tmp_path / "run"))
    train(one_rank, range(1))
    path, expected = save(one_rank, 1), one_rank.call("check_logprobs")[0]
    export_checkpoint(path, tmp_path / "out")
    causal_lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert causal_lm.config.tie_word_embeddings is not has_own_head
    found = obvious_logprobs(causal_lm, check_tokens(config["vocab_size"])).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_export_has_the_other_files_of_its_base_and_none_of_its_weights(
    one_rank: World, settings: RankSettings, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(settings.model, base)
    given = '{"eos_token_id": [1, 5], "temperature": 0.6}'
    (base / "generation_config.json").write_text(given)
    for name in ("preprocessor_config.json", "processor_config.json", "vocab.json", "code.py"):
        (base / name).write_text("{}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    others = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "params.json")
    for name in (*others, "adapter_config.json", "hf_quant_config.json", "pytorch_model.bin"):
        (base / name).write_text("of other weights")
    path = save(one_rank.start(settings), 1)
    export_checkpoint(path, out, model=str(base))
    assert (out / "generation_config.json").read_text() == given
    assert stop_token_ids(str(out)) == stop_token_ids(str(base))
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    of_base = {file.name for file in base.iterdir() if file.name not in others}
    of_base -= {"adapter_config.json", "hf_quant_config.json", "pytorch_model.bin"}
    assert {file.name for file in out.iterdir()} == of_base
    # Without generation settings, only the tokenizer determines the end of answers.
    (base / "generation_config.json").unlink()
    export_checkpoint(path, tmp_path / "plain", model=str(base))
    assert not (tmp_path / "plain" / "generation_config.json").exists()


@pytest.mark.parametrize(
    "template", ["none", "{% for m in messages %}{{ m.content }}|{% endfor %}"]
)
def test_an_export_has_the_chat_template_of_the_training(
    one_rank: World, settings: RankSettings, tmp_path: Path, template: str
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(settings.model, base)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    path = save(one_rank.start(changed(settings, chat_template=template)), 1)
    assert export_checkpoint(path, out, model=str(base)).chat_template == template
    trained = load_tokenizer(str(base), chat_template=template)
    exported = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "What is 3+4?"}, {"role": "assistant", "content": " 7"}]
    shown = exported.apply_chat_template(chat, tokenize=False)
    assert shown == trained.apply_chat_template(chat, tokenize=False)
    assert shown == ("What is 3+4? 7" if template == "none" else "What is 3+4?| 7|")
    assert tokenizer_fingerprint(load_tokenizer(str(out))) == tokenizer_fingerprint(trained)
    settings_file = json.loads((out / "tokenizer_config.json").read_text())
    assert settings_file["chat_template"] == exported.chat_template
