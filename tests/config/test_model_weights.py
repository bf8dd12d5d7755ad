"""Tests of the checks, before a start, of a model's weights, tokens, chat template and tools."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from actors.environment.protocol import Message, Observation, Role, ToolSchema
from actors.environment.tokenizer import load_tokenizer
from actors.trainer.tiny.model import build_tiny_model
from service.cli.sft import _checked_chats
from service.config import preflight
from service.config.file import ConfigError, parse_config, parse_sft
from service.config.model_files import template_warnings
from service.config.tree import Config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(directory, warmup_steps=0)
    return directory


@pytest.fixture
def directory(tiny: Path, tmp_path: Path) -> Path:
    """Return the directory of a copy of the tiny model, which a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def config_with(model_path: str | Path, **sections: Any) -> Config:
    tree = {"model": {"path": str(model_path)}, "tasks": {"environment": "guessing"}, **sections}
    return parse_config(tree, source="test")


def check_all(config: Config, model_path: str | Path) -> None:
    observation = preflight.check_without_model(config)
    preflight.check_with_model(config, observation, model_path=str(model_path))


def with_settings(directory: Path, **changes: Any) -> str:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(directory)


Weights = dict[str, Any]


def stored(directory: Path, change: Callable[[Weights], Weights]) -> None:
    """Change the stored tensors of a model."""
    save_file(change(load_file(directory / "model.safetensors")), directory / "model.safetensors")


def of_five_layers(weights: Weights) -> Weights:
    last = {name.replace(".3.", ".4."): each for name, each in weights.items() if ".3." in name}
    return weights | {name: each.copy() for name, each in last.items()}


def with_a_bias(weights: Weights) -> Weights:
    rows = len(weights["model.layers.0.self_attn.q_proj.weight"])
    return weights | {"model.layers.0.self_attn.q_proj.bias": np.zeros(rows, np.float32)}


def with_another_head(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}


def in_integers(weights: Weights) -> Weights:
    return weights | {"model.norm.weight": weights["model.norm.weight"].astype(np.int8)}


def as_they_are(weights: Weights) -> Weights:
    return weights


@pytest.mark.parametrize(
    ("settings", "change", "expected"),
    [
        ({"vocab_size": 1000}, as_they_are, r"the shape \[512, 128\] .*expected \[1000, 128\]"),
        ({"vocab_size": 100}, as_they_are, r"the shape \[512, 128\] .*expected \[100, 128\]"),
        ({"intermediate_size": 512}, as_they_are, r"the shape .*\(12 differ\); correct config"),
        ({"tie_word_embeddings": False}, as_they_are, r"lack 1 .*lm_head\.weight.*tie_word_emb"),
        ({}, of_five_layers, r"have model\.layers\.4\..* no parameter \(11 such tensors\)"),
        ({"num_hidden_layers": 0, "layer_types": []}, as_they_are, r"have model\.layers\.0\..*44"),
        ({}, with_a_bias, r"q_proj\.bias, for which config\.json has no parameter"),
        (
            {},
            with_another_head,
            r"other numbers for lm_head\.weight .*set tie_word_embeddings to f",
        ),
        ({}, in_integers, r"model\.norm\.weight has numbers of type int8, expected float32"),
        ({"hidden_act": "nonesuch"}, as_they_are, r"cannot make a model .*'nonesuch'.*correct"),
    ],
)
def test_weights_that_do_not_fit_the_settings_are_refused_before_anything_starts(
    directory: Path,
    settings: dict[str, Any],
    change: Callable[[Weights], Weights],
    expected: str,
) -> None:
    stored(directory, change)
    path = with_settings(directory, **settings)
    with pytest.raises(
        ConfigError, match=rf"model\.path: {re.escape(path)} cannot be .*{expected}"
    ):
        check_all(config_with(path), path)


def test_multi_token_prediction_layers_are_ignored(directory: Path) -> None:
    stored(directory, of_five_layers)
    path = with_settings(directory, num_nextn_predict_layers=1)
    check_all(config_with(path), path)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ("model-00001-of-00001.safetensors", r"neither model\.safetensors nor .*reads no other"),
        ("both", r"has model\.safetensors, which the trainer reads, and old\.safetensors"),
    ],
)
def test_weights_are_refused_if_trainer_and_engine_would_read_different_files(
    directory: Path, kept: str, expected: str
) -> None:
    if kept == "both":
        shutil.copy(directory / "model.safetensors", directory / "old.safetensors")
    else:
        (directory / "model.safetensors").rename(directory / kept)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{expected}"):
        check_all(config_with(directory), directory)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("none", None),
        (
            "twice",
            rf"model\.norm\.weight is in {FIRST} and {SECOND} of .*expected each tensor once",
        ),
        # A tensor may be in another file than the index says. A tensor that the model does not need
        # may be in no file.
        ("elsewhere", None),
        ("unneeded", None),
        ("missing", r"its files lack 1 of its parameters, such as model\.norm\.weight"),
        (
            "outside",
            r"weight_map names '\.\./tiny/model\.safetensors', expected the name of a file",
        ),
    ],
)
def test_sharded_weights_are_refused_if_a_tensor_is_duplicate_missing_or_outside(
    directory: Path, fault: str, expected: str | None
) -> None:
    whole = directory / "model.safetensors"
    weights = load_file(whole)
    whole.unlink()
    norm = weights.pop("model.norm.weight")
    first = {**weights, "model.norm.weight": norm + 1} if fault == "twice" else weights
    save_file(first, directory / FIRST)
    save_file({"other" if fault == "missing" else "model.norm.weight": norm}, directory / SECOND)
    named = dict.fromkeys(weights, FIRST) | {"model.norm.weight": SECOND}
    if fault == "elsewhere":
        # The index still names both files, but exchanges two tensors.
        named |= {"model.norm.weight": FIRST, next(iter(weights)): SECOND}
    if fault == "unneeded":
        named["model.rotary_emb.inv_freq"] = FIRST
    if fault == "outside":
        named["model.norm.weight"] = "../tiny/model.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    if expected is None:
        check_all(config_with(directory), directory)
        return
    with pytest.raises(ConfigError, match=rf"^model\.path: .*{expected}"):
        check_all(config_with(directory), directory)


TOP = ["config.json", "tokenizer.json"]
INSIDE = ["checkpoint-5/config.json", "checkpoint-5/model.safetensors"]


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        pytest.param(
            ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"],
            r"config\.json; .* has only an adapter .*; merge it into its model first",
            id="an_adapter_of_peft",
        ),
        pytest.param(
            ["config.json", "tokenizer.json", "pytorch_model.bin"],
            r"safetensors; .* AutoModelForCausalLM\.from_pretrained\('.*'\)\.save_.*'NEW'\) "
            r"and AutoTokenizer\.from_pretrained\('.*'\)\.save_pretrained\('NEW'\); name NEW$",
            id="weights_of_torch",
        ),
        pytest.param(
            ["config.json", "vocab.json", "merges.txt", "model.safetensors"],
            r"tokenizer\.json; .* AutoTokenizer\.from_pretrained\('.*'\)\.save_.*; name NEW$",
            id="a_tokenizer_of_two_files",
        ),
        pytest.param(
            ["config.json", "tokenizer.json", "vocab.json", "merges.txt", "training_args.bin"],
            r"safetensors; .* is incomplete, or it has another format; repeat it, .*$",
            id="a_download_without_the_weights",
        ),
        pytest.param(
            ["config.json", "pytorch_model.bin"],
            r"tokenizer\.json, .*safetensors; .* is incomplete, or it has another format; repeat",
            id="weights_of_torch_without_a_tokenizer",
        ),
        pytest.param(
            # The test writes {} into each file, so this is the commit of the branch main.
            ["refs/main", "snapshots/{}/config.json", "snapshots/~~/config.json"],
            r"safetensors; .* name .*/model/snapshots/{}$",
            id="an_entry_of_the_hubs_cache",
        ),
        pytest.param(
            ["snapshots/a1b2/config.json"],
            r"safetensors; .* name .*/model/snapshots/a1b2$",
            id="an_entry_of_the_hubs_cache_without_a_branch",
        ),
        pytest.param(
            ["checkpoint-500/config.json", "checkpoint-1000/config.json"],
            r"safetensors; .* name .*/model/checkpoint-1000$",
            id="the_output_of_a_trainer",
        ),
        # A trainer may store settings and tokenizer beside its checkpoints.
        ([*TOP, *INSIDE, "checkpoint-50/config.json"], r"safetensors; .*; name .*/checkpoint-5$"),
        ([*TOP, *INSIDE, "pytorch_model.bin"], r"safetensors; .*; save it .*; name NEW$"),
        (
            ["config.json", "model.safetensors", "vocab.txt", *INSIDE],
            r"json; .*; save .*; name NEW$",
        ),
        pytest.param(
            ["refs/main", "snapshots/a1b2/adapter_config.json"],
            r"safetensors; .* only an adapter \(.*/snapshots/a1b2/.*\); merge it",
            id="an_adapter_in_the_hubs_cache",
        ),
        pytest.param(
            ["refs/main", "snapshots/a1b2/tokenizer.json"],
            r"download the model again, or",
            id="an_incomplete_entry_of_the_hubs_cache",
        ),
        pytest.param(
            ["b.gguf", "a.gguf"], r"safetensors; .* GGUF file .* /.*/model/a\.gguf$", id="gguf"
        ),
        pytest.param(
            ["config.json", "tokenizer.json", "a.gguf"],
            r"safetensors; .* GGUF file .* /.*/model/a\.gguf$",
            id="gguf_with_the_settings",
        ),
        (["b.gguf", "mmproj-a.gguf", "a-mmproj.gguf"], r"GGUF file .*/model/b\.gguf$"),
        ([*TOP, "pytorch_model.bin", "q4.gguf"], r"safetensors; .*; save it .*; name NEW$"),
        (["config.json", "model.safetensors", "a.gguf"], r"json; .*; its .* is incomplete, .*$"),
        pytest.param(
            ["shard-0.pt"], "export a checkpoint of a run with `rayloom export`$", id="a_checkpoint"
        ),
    ],
)
def test_the_remedy_for_missing_files_fits_what_the_directory_is(
    tmp_path: Path, names: list[str], remedy: str
) -> None:
    for name in names:
        file = tmp_path / "model" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    with pytest.raises(ConfigError, match=rf"^model\.path: .* lacks .*{remedy}"):
        preflight.check_model_source(str(tmp_path / "model"), key="model.path")


@pytest.mark.parametrize("key", ["model.path", "algorithm.reference", "algorithm.critic.model"])
def test_an_adapter_in_the_directory_of_full_weights_is_refused(
    tiny: Path, directory: Path, key: str
) -> None:
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    algorithms: dict[str, dict[str, Any]] = {
        "model.path": {},
        "algorithm.reference": {
            "loss": {"kl": {"coefficient": 0.1}},
            "reference": str(directory),
        },
        "algorithm.critic.model": {
            "baseline": "critic",
            "scale": "none",
            "critic": {"model": str(directory)},
        },
    }
    policy = directory if key == "model.path" else tiny
    expected = rf"^{key}: {directory}/adapter_config\.json: .*; remove the file .* merge it first"
    with pytest.raises(ConfigError, match=expected):
        check_all(config_with(policy, algorithm=algorithms[key]), policy)


def with_token(directory: Path, token: str) -> None:
    """Add a token after the last row of the model's embedding."""
    tokenizer: Any = load_tokenizer(str(directory))
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    assert len(tokenizer) == 513
    tokenizer.save_pretrained(directory)


def test_a_template_with_a_token_that_the_model_lacks_is_refused(directory: Path) -> None:
    with_token(directory, "<|image|>")
    # Gemma 3 has such a token. No prompt of plain text contains it.
    check_all(config_with(directory), directory)
    template = directory / "template.jinja"
    template.write_text("<|image|>{% for m in messages %}{{ m.content }}{% endfor %}")
    config = config_with(
        directory, model={"path": str(directory), "chat_template": template.read_text()}
    )
    with pytest.raises(ConfigError, match=r"writes '<\|image\|>', token 512 .*only 512 tokens"):
        check_all(config, directory)


def test_a_model_with_its_own_code_is_refused_without_a_question(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse the code in a terminal too, where transformers would ask whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked in the terminal"))
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    path = with_settings(directory, model_type="own", auto_map=code)
    with pytest.raises(ConfigError, match=r"it needs Python code from the model's directory"):
        check_all(config_with(path), path)
    tokenizer = directory / "tokenizer_config.json"
    changes = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | changes))
    with pytest.raises(ValueError, match="custom code"):
        load_tokenizer(path)


def test_an_end_token_that_the_model_can_never_sample_is_refused(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{}")
    file = directory / "tokenizer_config.json"
    # The name is misspelt; transformers adds a token of this name.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|ned|>"}))
    with pytest.raises(ConfigError, match=r"end with token 512, which it can never sample"):
        check_all(config_with(directory), directory)


def test_a_tokenizer_that_splits_the_templates_special_tokens_is_refused(directory: Path) -> None:
    preflight.check_token_ids(config_with(directory), directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"split_special_tokens": True}))
    expected = r"^model\.path: .* makes ids \[.*, .*\] of '<.*; set split_special_tokens to false"
    with pytest.raises(ConfigError, match=expected):
        preflight.check_token_ids(config_with(directory), directory)
    # A resumed run has used the tokenizer before.
    found: list[str] = []
    config = config_with(directory)
    observations = preflight.check_without_model(config)
    preflight.check_with_model(
        config,
        observations,
        model_path=str(directory),
        was_loaded=True,
        tell_template=found.append,
    )
    assert len(found) == 1 and re.search(expected, found[0])
    # `rayloom sft` has the same check.
    row = {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}
    chats = directory / "chats.jsonl"
    chats.write_text(json.dumps(row))
    tree = {"model": {"path": str(directory)}, "sft": {"dataset": str(chats)}}
    with pytest.raises(ConfigError, match=expected):
        _checked_chats(parse_sft(tree, source="test"), str(directory), was_loaded=False)
    # The end token may be named only by its variable.
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    named = config_with(directory, model={"path": str(directory), "chat_template": template})
    with pytest.raises(ConfigError, match=expected):
        preflight.check_token_ids(named, directory)
    # Raw prompts have no special token in their text.
    raw = config_with(directory, model={"path": str(directory), "chat_template": "none"})
    preflight.check_token_ids(raw, directory)


def test_a_warning_names_a_templates_end_token_that_stops_no_engine(directory: Path) -> None:
    assert [*template_warnings(config_with(directory), str(directory))] == []
    (directory / "generation_config.json").write_text("{}")
    file = directory / "tokenizer_config.json"
    # The template's end token is also the padding token, at which an engine does not stop.
    changes = {"eos_token": "<|user|>", "pad_token": "<|end|>"}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    found: list[str] = []
    config = config_with(directory)
    observation = preflight.check_without_model(config)
    preflight.check_with_model(
        config, observation, model_path=str(directory), tell_template=found.append
    )
    (warning,) = found
    assert "ends a reply with '<|end|>', token 1, and the engines stop only at 3" in warning
    assert "add 1 to eos_token_id in generation_config.json" in warning
    stopped = config_with(directory, rollouts={"stop": ["<|end|>"]})
    assert [*template_warnings(stopped, str(directory))] == []
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    assert [*template_warnings(config, str(directory))] == []


@pytest.mark.parametrize(
    ("template", "header"),
    [
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
            "<|assistant|>",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}",
            "assistant: ",
        ),
        # Like the template of Mistral, this one has no header before a reply.
        (
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% else %} {{ m.content }}<|end|>{% endif %}{% endfor %}",
            None,
        ),
        # This template writes the header at the end of each rendering.
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
            "<|assistant|>",
            None,
        ),
    ],
)
def test_a_warning_names_a_header_that_a_template_omits_at_the_end_of_prompts(
    tiny: Path, template: str, header: str | None
) -> None:
    config = config_with(tiny, model={"path": str(tiny), "chat_template": template})
    found = [*template_warnings(config, str(tiny))]
    if header is None:
        assert found == []
    else:
        assert len(found) == 1 and f"writes {header!r} before a reply, but not at" in found[0]


@pytest.mark.parametrize("history", ["appended", "as_rendered"])
def test_a_template_that_shows_the_tools_with_each_message_is_warned_of(
    tiny: Path, history: str
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' and loop.last %}{{ tools | tojson if tools "
        "else '' }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    model = {"path": str(tiny), "chat_template": template}
    config = config_with(tiny, model=model, rollouts={"history": history})
    tool = ToolSchema(name="look", description="Look.", parameters={"type": "object"})
    observation = Observation(messages=(Message(role=Role.USER, content="Go."),), tools=(tool,))
    assert [*template_warnings(config, str(tiny))] == []
    found = [*template_warnings(config, str(tiny), {"guessing": observation})]
    if history == "as_rendered":
        assert found == []
    else:
        assert len(found) == 1
        assert re.search(r"tools again .* user, \d{2,} tokens each time in guessing", found[0])


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("m.content | lower", "first line  has\n\n\ttwo spaces"),
        ("m.content.split() | join(' ')", "First Line has Two Spaces"),
        ("m.content | replace('\t', '    ')", "First Line  has\n\n    Two Spaces"),
        ("m.content | trim", None),
        ("m.content | tojson", None),
        ("m.content[:2]", None),
    ],
)
def test_a_warning_shows_how_a_template_changes_letters_or_white_space(
    tiny: Path, content: str, shown: str | None
) -> None:
    template = (
        f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ {content} }}}}<|end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = config_with(tiny, model={"path": str(tiny), "chat_template": template})
    found = [*template_warnings(config, str(tiny))]
    if shown is None:
        assert found == []
    else:
        assert len(found) == 1
        assert f"'First Line  has\\n\\n\\tTwo Spaces' as {shown!r}" in found[0]


def test_a_template_that_raises_any_error_is_refused(tiny: Path) -> None:
    config = config_with(tiny, model={"path": str(tiny), "chat_template": "{{ 1 // 0 }}"})
    with pytest.raises(ConfigError, match=r"chat template.*ZeroDivisionError"):
        check_all(config, tiny)


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("chat_template.jinja", "", r"{}/chat_template\.jinja is empty, expected one; set model\."),
        (
            "chat_template.jinja",
            "{% for m in messages %}\n{{ m.content }}\n{% if %}",
            r"{}/chat_template\.jinja, line 3: Expected an expression.*; correct it",
        ),
        (
            "tokenizer_config.json",
            "{% nonesuch %}",
            r"{}/tokenizer_config\.json, line 1: Encountered unknown tag 'nonesuch'",
        ),
        (
            "tokenizer_config.json",
            [{"name": name, "template": "{{ messages }}"} for name in ("tool_use", "rag")],
            r"templates rag, tool_use, expected .* default; set model\.chat_template to the path",
        ),
        ("model.chat_template", "\n{{ 1 }}{% if %}", r"model\.chat_template, line 2: Expected an"),
    ],
)
def test_the_error_of_an_unusable_template_names_its_file_and_line(
    directory: Path, name: str, template: Any, expected: str
) -> None:
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    model = {"path": str(directory)}
    match name:
        case "model.chat_template":
            model |= {"chat_template": template}
        case "tokenizer_config.json":
            file.write_text(json.dumps(settings | {"chat_template": template}))
        case _:
            settings.pop("chat_template")
            file.write_text(json.dumps(settings))
            (directory / name).write_text(template)
    with pytest.raises(ConfigError, match=expected.format(re.escape(str(directory)))):
        check_all(config_with(directory, model=model), directory)


def test_a_reference_may_lack_a_token_that_the_policy_lacks_too(directory: Path) -> None:
    with_token(directory, "<|image|>")
    algorithm = {"loss": {"kl": {"coefficient": 0.1}}, "reference": str(directory)}
    check_all(config_with(directory, algorithm=algorithm), directory)


def test_a_critic_needs_all_of_its_body_but_no_output_head(tiny: Path, directory: Path) -> None:
    path = with_settings(directory, tie_word_embeddings=False)
    algorithm = {"baseline": "critic", "scale": "none", "critic": {"model": path}}
    check_all(config_with(tiny, algorithm=algorithm), tiny)
    stored(directory, lambda weights: {k: v for k, v in weights.items() if "layers.1.mlp" not in k})
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.model: .*lack 3 of its parameters"):
        check_all(config_with(tiny, algorithm=algorithm), tiny)


@pytest.mark.parametrize(
    ("parameters", "count", "expected"),
    [
        ({"type": "object"}, 2, "f is the name of two tools, expected unique names"),
        ({"type": "nope"}, 1, r"tool f: its parameters are not a JSON schema \('nope' is not"),
    ],
)
def test_duplicate_tools_and_invalid_tool_schemas_are_refused(
    tiny: Path, parameters: dict[str, Any], count: int, expected: str
) -> None:
    tool = ToolSchema(name="f", description="Do it.", parameters=parameters)
    begun = Observation(messages=(Message(role=Role.USER, content="Go."),), tools=(tool,) * count)
    config = config_with(tiny, tasks={"environment": "calculator"})
    with pytest.raises(ConfigError, match=expected):
        preflight.check_with_model(config, {"calculator": begun}, model_path=str(tiny))


def test_a_tool_schema_of_an_older_draft_is_accepted(tiny: Path) -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    pair = {"type": "array", "items": [{"type": "string"}, {"type": "number"}]}
    positive = {"type": "number", "minimum": 0, "exclusiveMinimum": True}
    for parameters in (
        draft | {"type": "object", "properties": {"pair": pair}},
        {"type": "object", "properties": {"size": positive}},
    ):
        tool = ToolSchema(name="f", description="Do it.", parameters=parameters)
        begun = Observation(messages=(Message(role=Role.USER, content="Go."),), tools=(tool,))
        config = config_with(tiny, tasks={"environment": "calculator"})
        preflight.check_with_model(config, {"calculator": begun}, model_path=str(tiny))


def test_a_git_lfs_pointer_is_refused_only_in_place_of_a_loaded_file(
    tiny: Path, directory: Path
) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (directory / "consolidated.safetensors").write_text(pointer)
    check_all(config_with(directory), directory)
    (directory / "model.safetensors").write_text(pointer)
    algorithm = {"loss": {"kl": {"coefficient": 0.1}}, "reference": str(directory)}
    with pytest.raises(ConfigError, match=r"algorithm\.reference: .*model\.safetensors is broken"):
        check_all(config_with(tiny, algorithm=algorithm), tiny)
