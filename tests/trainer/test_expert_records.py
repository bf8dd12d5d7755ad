"""Tests of an engine's records of a mixture's experts, which the trainer replays."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen2Config
from worlds.models.mixture_world import KINDS, make_config

from actors.expert_records import routed_layers, sampled_experts
from actors.trainer.routing_replay import attach_routing_replay


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_layers_are_the_replayed_ones(kind: str) -> None:
    config = make_config(kind)
    causal_lm = AutoModelForCausalLM.from_config(config)
    mixture = attach_routing_replay(causal_lm)
    with_router = [
        number
        for number, layer in enumerate(causal_lm.model.layers)
        if any("TopKRouter" in type(module).__name__ for module in layer.modules())
    ]
    assert mixture is not None and mixture.num_layers == len(with_router)
    assert routed_layers(config) == tuple(with_router)


@pytest.mark.parametrize("config", [Qwen2Config(), DeepseekV3Config()])
def test_nothing_is_recorded_for_models_whose_routing_is_not_replayed(
    config: PretrainedConfig,
) -> None:
    assert routed_layers(config) == ()


@pytest.mark.parametrize(("recorded", "kept"), [(np.uint8, np.uint8), (np.uint16, np.int16)])
def test_a_turn_keeps_the_records_of_the_routed_layers(recorded: type, kept: type) -> None:
    # Two tokens, three layers, of which the middle one is dense, and two experts per layer.
    records = np.array([[[1, 2], [0, 0], [3, 4]], [[5, 6], [0, 0], [7, 8]]], recorded)
    found = sampled_experts(records, routed=(0, 2))
    np.testing.assert_array_equal(found, [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    assert found.dtype == kept


def test_a_turn_of_one_token_has_no_record() -> None:
    assert sampled_experts(np.zeros((0, 3, 2), np.uint8), routed=(0, 2)).shape == (0, 2, 2)
