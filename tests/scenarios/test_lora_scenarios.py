"""Tests of LoRA adapters in a real vLLM engine, which samples from the base model with each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from worlds.parts.trainer_world import obvious_logprobs

from actors.environment.policy import GenerateReply, GenerateRequest, PolicyUnavailable
from actors.trainer.lora import adapted_layers, attach_adapters, merged_weight
from actors.trainer.publish import gather_adapters
from actors.trainer.settings import LoraSettings
from actors.trainer.tiny.model import build_tiny_model
from actors.types import Dtype
from actors.weights.board import Publication, WeightGroup, check_tokens
from actors.weights.buffers import pack_group
from service.inference.settings import EngineSettings, InferenceSettings

pytestmark = [pytest.mark.scenario, pytest.mark.asyncio(loop_scope="module")]

# vLLM has no adapters of this rank, so that it pads them.
LORA = LoraSettings(rank=3, alpha=7.0)
TOLERANCE_NATS = 1e-4
TEMPERATURE = 0.8


@dataclass(kw_only=True)
class Policy:
    """An engine, the model with adapters that its trainer would hold, and its merged weights."""

    settings: EngineSettings
    base: Path
    adapted: PreTrainedModel
    engine: Any = None
    """A `PolicyEngine`, which is imported after its settings are in the environment."""
    merged: dict[int, PreTrainedModel] = field(default_factory=dict)
    groups: dict[int, tuple[WeightGroup, ...]] = field(default_factory=dict)
    """The adapters of each version, as they are published."""
    contexts: list[Any] = field(default_factory=list)
    """The sockets of all engines that were started; vLLM leaves them open."""

    async def start(self, directory: Path) -> None:
        """Start an engine in place of the last one, which must be dead."""
        from service.inference.engine import PolicyEngine

        self.engine = PolicyEngine(self.settings, directory)
        await self.engine.start()
        self.contexts.append(self.engine._llm.engine_core.resources.ctx)

    async def publish(self, *, seed: int) -> None:
        """Change the adapters, and load them into the engine."""
        await self.load(self.change(seed=seed))

    def change(self, *, seed: int) -> int:
        """Change the adapters; return the new version, which no engine has loaded."""
        version = len(self.merged) + 1
        self.merged[version] = self._changed(seed)
        named = gather_adapters(self.adapted, dtype=torch.float32)
        self.groups[version] = tuple(pack_group(each) for each in named)
        return version

    async def load(
        self, version: int, *, term: int = 1, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        groups = self.groups[version]
        publication = Publication(term=term, version=version, groups=groups)
        buffers = [group.buffer for group in groups]
        await self.engine.apply(publication, buffers, on_progress=on_progress)

    async def check(self, version: int) -> None:
        """Check that the engine computes and samples with the adapters of a version."""
        scores = await self.engine.check_logprobs()
        text = check_tokens(self.adapted.config.vocab_size)
        expected = obvious_logprobs(self.merged[version], text).detach().numpy()
        np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE_NATS)
        asked = requests(12, max_tokens=16)
        replies = await asyncio.gather(*(self.engine.generate(each) for each in asked))
        for each, reply in zip(asked, replies, strict=True):
            assert [span.version for span in reply.version_spans] == [version]
            found, wanted = reply.logprobs, self.expected(each, reply)
            np.testing.assert_allclose(found, wanted, atol=TOLERANCE_NATS)

    def _changed(self, seed: int) -> PreTrainedModel:
        generator = torch.Generator().manual_seed(seed)
        merged = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        with torch.no_grad():
            for name, layer in adapted_layers(self.adapted):
                layer.lora_B.copy_(0.3 * torch.randn(layer.lora_B.shape, generator=generator))
                weight = merged.get_submodule(name).weight
                weight.copy_(merged_weight(weight, layer.lora_A, layer.lora_B, scale=layer.scale))
        return merged.eval()

    @torch.no_grad()
    def expected(self, asked: GenerateRequest, reply: GenerateReply) -> np.ndarray:
        """Return the log-probabilities of a reply's tokens, each span by its own merged weights.

        The states of earlier tokens are those of the weights that computed them, as in the engine's
        cache.
        """
        num_prompt = len(asked.prompt_token_ids)
        ids = torch.tensor([*asked.prompt_token_ids.tolist(), *reply.token_ids.tolist()])
        cache, done, logits = None, 0, []
        for span in reply.version_spans:
            # The forward pass that gives a token its logits reads the token before it.
            end = num_prompt + span.end - 1
            output = self.merged[span.version](
                ids[None, done:end], past_key_values=cache, use_cache=True
            )
            cache, done = output.past_key_values, end
            logits.append(output.logits[0])
        of_reply = torch.cat(logits)[num_prompt - 1 :] / TEMPERATURE
        logprobs = torch.log_softmax(of_reply, -1).gather(-1, ids[num_prompt:, None])[:, 0]
        return logprobs.numpy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Policy]:
    directory = tmp_path_factory.mktemp("model")
    build_tiny_model(directory, seed=0, tie_word_embeddings=True, warmup_steps=0)
    adapted = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    attach(adapted)
    settings = EngineSettings(
        inference=InferenceSettings(max_num_seqs=16, kv_cache_gib=0.2, enforce_eager=True),
        model=str(directory),
        dtype=Dtype.FLOAT32,
        chat_template=None,
        max_context_tokens=512,
        stop_token_ids=(),
        reads_text=False,
        resets_prefix_cache=False,
        seed=0,
        lora=LORA,
    )
    os.environ.update(settings.environment)
    found = Policy(settings=settings, base=directory, adapted=adapted)
    await found.start(tmp_path_factory.mktemp("engine"))
    await found.publish(seed=1)
    yield found
    found.engine.shutdown()
    # vLLM leaves them open; the warning when they are collected would fail another test.
    for context in found.contexts:
        context.destroy(linger=0)


def attach(model: PreTrainedModel) -> None:
    """Give every linear layer of the body an adapter, as a trainer's rank does."""
    attach_adapters(model, LORA, seed=0)


def requests(count: int, *, max_tokens: int) -> list[GenerateRequest]:
    generator = np.random.default_rng(count)
    return [
        GenerateRequest(
            prompt_token_ids=generator.integers(8, 60, 8 + 12 * number).astype(np.int32),
            max_tokens=max_tokens,
            temperature=TEMPERATURE,
            deadline_s=120.0,
        )
        for number in range(count)
    ]


async def test_the_engine_samples_from_the_base_model_with_each_adapter(policy: Policy) -> None:
    for seed in (2, 3):
        await policy.check(len(policy.merged))
        await policy.publish(seed=seed)


async def test_each_span_of_a_reply_has_the_log_probabilities_of_its_adapter(
    policy: Policy,
) -> None:
    asked, old = requests(8, max_tokens=300), len(policy.merged)
    sampling = asyncio.gather(*(policy.engine.generate(each) for each in asked))
    await asyncio.sleep(0.5)
    await policy.publish(seed=4)
    replies = await sampling
    assert [[span.version for span in reply.version_spans] for reply in replies].count(
        [old, old + 1]
    )
    for each, reply in zip(asked, replies, strict=True):
        np.testing.assert_allclose(
            reply.logprobs, policy.expected(each, reply), atol=TOLERANCE_NATS
        )


async def test_a_text_is_scored_while_other_requests_run(policy: Policy) -> None:
    # This kills vLLM's engine if its output head can have an adapter.
    sampling = asyncio.gather(
        *(policy.engine.generate(each) for each in requests(8, max_tokens=300))
    )
    await asyncio.sleep(0.3)
    scores = await policy.engine.check_logprobs()
    text = check_tokens(policy.adapted.config.vocab_size)
    expected = obvious_logprobs(policy.merged[len(policy.merged)], text).detach().numpy()
    np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE_NATS)
    await sampling


@pytest.mark.chaos
async def test_an_engine_killed_between_the_load_and_the_switch_has_not_switched(
    policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Check that the next engine loads the old adapter first, as a resumed run does."""
    old = len(policy.merged)
    new = policy.change(seed=5)
    num_loaded, killed = 0, []

    def kill() -> None:
        """Kill the engine when it has all groups; its adapter is then still the old one."""
        nonlocal num_loaded
        num_loaded += 1
        for process in psutil.Process().children():
            is_engine = "EngineCore" in " ".join(process.cmdline())
            if is_engine and num_loaded == len(policy.groups[new]):
                process.kill()
                killed.append(process.pid)

    victim = policy.engine
    with pytest.raises(PolicyUnavailable, match="loading of weights failed"):
        await policy.load(new, on_progress=kill)
    assert len(killed) == 1 and victim.version == old
    with pytest.raises(PolicyUnavailable, match="loading of weights failed"):
        await victim.generate(requests(1, max_tokens=1)[0])
    # The path of its sockets must be short, so the test's own directory is too long.
    await policy.start(tmp_path_factory.mktemp("engine"))
    await policy.load(old, term=2)
    await policy.check(old)
    await policy.load(new, term=2)
    await policy.check(new)


async def test_adapter_for_a_layer_that_vllm_lacks_is_refused(policy: Policy) -> None:
    # The last test of this module: a failed update ends the engine.
    name = "base_model.model.model.layers.0.mlp.other_proj"
    halves = [
        (f"{name}.lora_A.weight", torch.ones(3, 8)),
        (f"{name}.lora_B.weight", torch.ones(8, 3)),
    ]
    version = len(policy.merged) + 1
    policy.groups[version] = (pack_group(halves),)
    with pytest.raises(PolicyUnavailable, match="no place for the adapters of 1 of 1 layers"):
        await policy.load(version)
