"""The update that the training-step benchmarks train, and the model that trains on it.

Groups of trajectories share a prompt and then play their own turns; every sampled token is trained.
All sides of a benchmark make the same update from the same shape and seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from actors.environment.sample_builder import build_samples
from actors.merge.packing import WeightedSample
from actors.types import FinishReason, Outcome, Trajectory, Turn, VersionSpan

VOCABULARY = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShape:
    """The shape of an update.

    prompt: number of tokens that a group shares. turns: number of turns of a trajectory. sampled,
    observed: numbers of tokens of each turn; the last turn has no observation. groups: number of
    groups. group_size: number of trajectories in each group.
    """

    prompt: int = 256
    turns: int = 6
    sampled: int = 64
    observed: int = 128
    groups: int = 4
    group_size: int = 8

    @property
    def num_trajectories(self) -> int:
        return self.groups * self.group_size

    @property
    def num_trained(self) -> int:
        return self.num_trajectories * self.turns * self.sampled

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> UpdateShape:
        return cls(**json.loads(text))


def make_trajectories(
    shape: UpdateShape, *, vocabulary: int = VOCABULARY, seed: int = 0
) -> list[Trajectory]:
    """Return the trajectories of a shape with random ids, one group after another.

    The reward, on the last turn, is a normal random number; behaviour log-probabilities are spread
    around a uniform policy's, so that some ratios are clipped.
    """
    rng = np.random.default_rng(seed)
    trajectories = []
    for group in range(shape.groups):
        prompt = _ids(rng, shape.prompt, vocabulary)
        for member in range(shape.group_size):
            turns = _play(rng, prompt, shape, vocabulary)
            trajectories.append(
                Trajectory(
                    rollout_id=f"{group}-{member}",
                    group_id=str(group),
                    group_number=group,
                    attempt=0,
                    task_id=str(group),
                    environment="benchmark",
                    samples=build_samples(turns, trajectory_id=f"{group}-{member}.a0"),
                    outcome=Outcome.COMPLETED,
                )
            )
    return trajectories


def _play(
    rng: np.random.Generator, prompt: NDArray[np.int32], shape: UpdateShape, vocabulary: int
) -> tuple[Turn, ...]:
    history, turns = prompt, []
    for number in range(shape.turns):
        sampled = _ids(rng, shape.sampled, vocabulary)
        logprobs = rng.normal(-np.log(vocabulary), 0.1, shape.sampled)
        turns.append(
            Turn(
                prompt_token_ids=history,
                sampled_token_ids=sampled,
                logprobs=logprobs.astype(np.float32),
                finish_reason=FinishReason.STOP,
                version_spans=(VersionSpan(version=0, start=0, end=shape.sampled),),
                reward=float(rng.normal()) if number + 1 == shape.turns else 0.0,
            )
        )
        history = np.concatenate([history, sampled, _ids(rng, shape.observed, vocabulary)])
    return tuple(turns)


def _ids(rng: np.random.Generator, count: int, vocabulary: int) -> NDArray[np.int32]:
    return rng.integers(0, vocabulary, count, np.int32)


def advantages_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the advantage of each trajectory: its return minus its group's mean."""
    returns: dict[str, list[float]] = {}
    for each in trajectories:
        returns.setdefault(each.group_id, []).append(return_of(each))
    return [return_of(each) - float(np.mean(returns[each.group_id])) for each in trajectories]


def return_of(trajectory: Trajectory) -> float:
    return sum(turn.reward for turn in trajectory.turns)


def weigh(trajectories: Sequence[Trajectory]) -> list[WeightedSample]:
    """Return samples with the weight 1 / D for each of the update's D trained tokens."""
    weight = 1 / sum(each.num_trained for each in trajectories)
    return [
        WeightedSample(sample=sample, advantage=advantage, loss_weight=weight)
        for each, advantage in zip(trajectories, advantages_of(trajectories), strict=True)
        for sample in each.samples
    ]


def build_model(directory: Path) -> str:
    """Write a random Qwen3 of hidden size 256 and four layers; return its directory.

    The tokenizer has only numbers.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="1", unk_token="2"
    ).save_pretrained(directory)
    return str(directory)
