"""Tests of `rayloom check --size`: disks and memory of a run, and the table in docs/deploy.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig
from typer.testing import CliRunner
from worlds.runs.run_driver import ROOT

from actors.limits import GIB, MIB
from actors.trainer.lora import attach_adapters
from actors.trainer.settings import LoraSettings
from service.cli.main import app
from service.cli.size import SESSION_BYTES, Need, describe_needs, needs
from service.config.file import ConfigError, load_config, parse_config

SEVERAL = ROOT / "deploy" / "configs" / "several-nodes-gpu.yaml"


def of(**run: object) -> dict[str, float]:
    tree = {"model": {"tiny": {}}, "tasks": {"environment": "guessing"}, "run": run}
    found = needs(parse_config(tree, source="of the test"))
    return {each.part: each.num_bytes for each in found}


def parts_of(tree: Mapping[str, object], **options: float) -> dict[str, Need]:
    whole = {"tasks": {"environment": "guessing"}, **tree}
    found = needs(parse_config(whole, source="of the test"), **options)
    return {each.part: each for each in found}


def test_the_table_on_the_page_is_the_output_of_the_command() -> None:
    done = CliRunner().invoke(app, ["check", str(SEVERAL), "--size", "--parameters", "8e9"])
    assert done.exit_code == 0, done.output
    text = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    table = describe_needs(needs(load_config(SEVERAL), num_parameters=8e9))
    assert done.stdout.strip() == table and f"\n{table}\n" in text


def test_a_measured_run_of_the_tiny_model_stays_below_the_estimate() -> None:
    """Compare with the measured file sizes of a run of 60 steps with 256 guessing games each."""
    tree = {
        "model": {"tiny": {}, "max_context_tokens": 256},
        "tasks": {"environment": "guessing"},
        "algorithm": {"groups_per_step": 16, "group_size": 16},
        "run": {"steps": 60},
    }
    found = {each.part: each.num_bytes for each in needs(parse_config(tree, source="of the test"))}
    measured = {
        "checkpoints": 22_265_027, "journal": 1_832_450, "database": 1_986_560,
        "each export": 3_418_352,
    }  # fmt: skip
    assert all(size <= found[part] * 1.01 for part, size in measured.items()), found


def test_the_retention_settings_decide_the_size_of_the_disks() -> None:
    usual = of()
    assert of(keep_checkpoints=6)["checkpoints"] == 2 * usual["checkpoints"]
    # If one is written every five steps, there is one more checkpoint between the newest two and
    # that of 20 steps before.
    assert of(checkpoint_every=5)["checkpoints"] == 5 / 4 * usual["checkpoints"]
    assert of(journal_steps=50)["journal"] == usual["journal"] / 2
    assert of(journal_steps=0)["journal"] == 0
    assert of(journal_gib=0.01)["journal"] == pytest.approx(0.01 * GIB)
    assert of(steps=1000)["database"] > usual["database"]


def test_parameters_are_counted_from_a_models_files(tmp_path: Path) -> None:
    save_file(
        {"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32)},
        tmp_path / "x.safetensors",
    )
    tree = {"model": {"path": str(tmp_path)}, "tasks": {"environment": "guessing"}}
    found = {each.part: each for each in needs(parse_config(tree, source="of the test"))}
    assert found["each export"].num_bytes == 4 * 22
    (tmp_path / "y.safetensors").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"y\.safetensors is not a safetensors file"):
        needs(parse_config(tree, source="of the test"))


def test_a_model_whose_size_is_not_known_is_refused() -> None:
    tree = {"model": {"path": "Qwen/Qwen3-8B"}, "tasks": {"environment": "guessing"}}
    with pytest.raises(ConfigError, match="such as --parameters 8e9"):
        needs(parse_config(tree, source="of the test"))


TINY: dict[str, Any] = {"model": {"tiny": {}}}
RANK = "memory of each rank for weights, gradients and moments"
GATHERED = "memory of each rank for gathered weights and gradients, in addition"
PUBLICATIONS = "memory of two publications, in each object store"
SERVICE = "database of `rayloom serve`, in addition"


@pytest.mark.parametrize("number", ["inf", "nan", "-1", "0", "1e30"])
def test_an_impossible_number_of_parameters_is_refused(number: str) -> None:
    done = CliRunner().invoke(app, ["check", str(SEVERAL), "--size", f"--parameters={number}"])
    assert isinstance(done.exception, ConfigError)
    assert "--parameters: got " in str(done.exception) and "such as 8e9" in str(done.exception)


def test_with_lora_checkpoints_and_publications_contain_only_adapters(small_model: str) -> None:
    model: dict[str, Any] = {"model": {"path": small_model}}
    lora = {"rank": 8, "targets": ["q_proj", "v_proj"]}
    whole = parts_of(model)
    adapted = parts_of({**model, "trainer": {"lora": lora, "num_ranks": 1}})
    config = AutoConfig.from_pretrained(small_model)
    causal_lm = AutoModelForCausalLM.from_config(config)
    attach_adapters(causal_lm, LoraSettings(rank=8, targets=("q_proj", "v_proj")), seed=0)
    count = sum(each.numel() for each in causal_lm.parameters() if each.requires_grad)
    assert count
    assert adapted["each export of adapters"].num_bytes == 4 * count
    assert adapted["each export"] == whole["each export"]
    assert adapted["checkpoints"].num_bytes == pytest.approx(4 * (12 * count + MIB))
    assert adapted[PUBLICATIONS].num_bytes == 2 * 4 * count
    num = whole["each export"].num_bytes / 4
    assert adapted[RANK].num_bytes == pytest.approx(16 * count + 4 * num)
    merged = parts_of({**model, "trainer": {"lora": {**lora, "publish_merged": True}}})
    assert merged[PUBLICATIONS] == whole[PUBLICATIONS]
    with pytest.raises(ConfigError, match="got the target q_prj, expected some of"):
        parts_of({**model, "trainer": {"lora": {"targets": ["q_prj"]}}})


def test_the_adapters_of_a_model_that_is_not_here_cannot_be_counted() -> None:
    assert "each export of adapters" in parts_of({**TINY, "trainer": {"lora": {"rank": 4}}})
    absent = {"model": {"path": "nobody/no-such-model"}, "trainer": {"lora": {"rank": 4}}}
    with pytest.raises(ConfigError, match=r"cannot be counted; download the model"):
        parts_of(absent, num_parameters=8e9)


def test_the_largest_evaluation_set_is_counted() -> None:
    def size(**evaluation: object) -> float:
        return parts_of({**TINY, "evaluation": evaluation})["evaluations"].num_bytes

    usual = size()
    assert size(samples=4, temperature=1.0) == 4 * usual and size(keep_results=10) == usual / 2
    assert size(keep_results=0) == 0
    # The larger set has 640 samples instead of 64.
    held_out = {"easy": {"samples": 10, "temperature": 1.0}}
    assert size(sets=held_out) == 10 * usual
    assert size(sets={"easy": {**held_out["easy"], "tasks": 32}}) == 5 * usual
    other = parts_of({**TINY, "evaluation": {"sets": {"far": {"file": "far.jsonl"}}}})
    assert "set evaluation.sets.far.tasks" in other["evaluations"].formula


def test_experts_that_engines_record_are_counted(tmp_path: Path) -> None:
    save_file({"a": np.zeros(5, np.float32)}, tmp_path / "x.safetensors")
    Qwen3MoeConfig(
        num_hidden_layers=4, decoder_sparse_step=2, num_experts=8, num_experts_per_tok=3
    ).save_pretrained(tmp_path)
    wide = {"run": {"journal_gib": 1e6}}
    dense = parts_of({**TINY, **wide})["journal"]
    mixture = parts_of({"model": {"path": str(tmp_path)}, **wide})["journal"]
    # Two layers of three experts, a byte each.
    assert mixture.num_bytes == pytest.approx(dense.num_bytes * (5.1 + 6) / 5.1)
    unknown = parts_of({"model": {"path": "nobody/no-such-model"}}, num_parameters=8e9)
    assert "recorded experts, if the model is a mixture" in unknown["journal"].formula


def test_turns_of_sessions_are_counted_if_external_agents_play() -> None:
    usual = parts_of(TINY)[SERVICE].num_bytes
    tasks = {"environment": "session", "evaluation_tasks": 0}
    sessions = {**TINY, "tasks": tasks, "sessions": {"max_open": 100}}
    assert parts_of(sessions)[SERVICE].num_bytes > usual
    more = parts_of({**sessions, "sessions": {"max_open": 200}})[SERVICE]
    added = more.num_bytes - parts_of(sessions)[SERVICE].num_bytes
    assert added == pytest.approx(100 * 2048 * SESSION_BYTES)


def test_critics_and_references_are_counted() -> None:
    plain = parts_of({**TINY, "trainer": {"num_ranks": 1}})
    algorithm = {"baseline": "critic", "scale": "none", "loss": {"kl": {"coefficient": 0.1}}}
    more = parts_of({**TINY, "trainer": {"num_ranks": 1}, "algorithm": algorithm})
    num = plain["each export"].num_bytes / 4
    assert more[RANK].num_bytes - plain[RANK].num_bytes == pytest.approx((16 + 4) * num)
    assert more["checkpoints"].num_bytes > 1.5 * plain["checkpoints"].num_bytes


def test_gathered_weights_and_gradients_are_counted_unless_they_are_freed() -> None:
    frees = {"reshard_between_micro_batches": True}
    short = {"dtype": "bfloat16"}
    num = parts_of(TINY)["each export"].num_bytes / 4
    assert parts_of(TINY)[GATHERED].num_bytes == 8 * num
    assert parts_of({**TINY, "trainer": short})[GATHERED].num_bytes == 6 * num
    assert GATHERED not in parts_of({**TINY, "trainer": frees})
    critic = {"algorithm": {"baseline": "critic", "scale": "none"}}
    assert parts_of({**TINY, **critic})[GATHERED].num_bytes == 16 * num
    adapted = parts_of({**TINY, "trainer": {"lora": {"rank": 4}}})
    adapters = adapted["each export of adapters"].num_bytes
    assert adapted[GATHERED].num_bytes == 4 * num + adapters
