"""Tests of the table of vLLM's engine arguments: vLLM's source, the configuration, the page."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.types import Dtype
from actors.weights.logprob_check import LogprobCheck, compare
from service.config.file import ConfigError, parse_config
from service.config.tree import Config
from service.inference.engine_args import ALLOWED, REFUSED, engine_args_problems
from service.inference.settings import InferenceSettings

PAGE = Path(__file__).parents[2] / "docs" / "engine-args.md"


def config_with(engine_args: dict[str, Any]) -> Config:
    tree = {
        "model": {"tiny": {}},
        "tasks": {"environment": "guessing"},
        "inference": {"engine_args": engine_args},
    }
    return parse_config(tree, source="test")


def names_of_vllm() -> set[str]:
    """Return the public fields of AsyncEngineArgs in the source of the installed vLLM."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    return {
        statement.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_")
    }


def test_the_table_names_each_argument_of_the_installed_vllm_once() -> None:
    assert not ALLOWED.keys() & REFUSED.keys()
    assert names_of_vllm() == ALLOWED.keys() | REFUSED.keys()


def test_every_argument_that_rayloom_sets_is_refused() -> None:
    engine = Path(__file__).parents[2] / "service" / "inference" / "engine.py"
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(engine.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    keywords = {
        keyword.arg
        for node in ast.walk(functions["_engine_args"])
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "AsyncEngineArgs"
        for keyword in node.keywords
        if keyword.arg
    }
    keys = {
        key.value
        for node in ast.walk(functions["engine_options"])
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    assert len(keywords) > 4 and len(keys) > 10
    # Users may disable the cache. Rayloom or another setting determines all other arguments.
    assert (keywords | keys) & ALLOWED.keys() == {"enable_prefix_caching"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "float16"}, ["engine_args.dtype", "set model.dtype"]),
        ({"logprobs_mode": "raw_logprobs"}, ["engine_args.logprobs_mode", "temperature"]),
        ({"speculative_config": {"method": "ngram"}}, ["speculative_config", "draft"]),
        ({"enable_lora": True}, ["engine_args.enable_lora", "the trainer determines the weights"]),
        ({"max_batched_tokens": 64}, ["max_batched_tokens", "'max_num_batched_tokens'"]),
        ({"zzz": 1}, ["engine_args.zzz", "docs/engine-args.md"]),
        ({"max_num_batched_tokens": "64"}, ["got '64'", "a whole number"]),
        ({"max_num_batched_tokens": True}, ["got True", "a whole number"]),
        ({"enable_chunked_prefill": 1}, ["got 1", "true or false"]),
        ({"kv_cache_dtype": None}, ["got null", "a string", "remove it"]),
        (
            {"seed": 1, "zzz": 1, "watermark": "a"},
            ["set run.seed", "engine_args.zzz", "watermark", "a number"],
        ),
    ],
)
def test_an_argument_that_cannot_be_passed_is_refused(
    given: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(given)
    for word in words:
        assert word in str(caught.value)


def test_allowed_arguments_are_kept_as_given() -> None:
    given = {"max_num_batched_tokens": 64, "watermark": 0, "compilation_config": {"mode": 0}}
    assert config_with(given).inference.engine_args == given
    assert list(engine_args_problems({})) == []


@pytest.mark.parametrize(
    ("given", "is_quantised"),
    [
        ({}, False),
        ({"kv_cache_dtype": "auto", "max_num_batched_tokens": 64}, False),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"quantization": "int8_per_channel_weight_only"}, True),
    ],
)
def test_only_a_quantised_engine_has_the_wider_logprob_bound(
    given: dict[str, Any], is_quantised: bool
) -> None:
    settings = InferenceSettings(engine_args=given)
    assert settings.is_quantised is is_quantised
    zeros = np.zeros(64, np.float32)
    for nats, is_beyond in ((0.1, not is_quantised), (0.3, True)):
        check = LogprobCheck(
            num_tokens=64,
            dtype=Dtype.BFLOAT16,
            comparisons=(compare("text", zeros, zeros + np.float32(nats)),),
            is_quantised=settings.is_quantised,
        )
        assert check.is_beyond is is_beyond
        assert ("quantised engine" in str(check)) is is_quantised


def test_the_page_lists_the_allowed_arguments() -> None:
    rows = re.findall(r"^\| (.*?) \| (`.*`) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = [name for _, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(named) == sorted(ALLOWED)
