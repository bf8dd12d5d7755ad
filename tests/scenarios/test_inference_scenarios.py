"""Tests of the inference deployment: vLLM in Ray Serve on a local cluster, with tiny models."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from ray import serve
from ray.actor import ActorHandle
from transformers import AutoModelForCausalLM, PreTrainedModel
from worlds.models.mixture_world import write_served_mixture
from worlds.parts.trainer_world import obvious_logprobs

from actors.environment.builtin.calculator import CALCULATOR
from actors.environment.policy import (
    GenerateReply,
    GenerateRequest,
    ParsedCall,
    PolicyDeadlineExceeded,
    PolicyUnavailable,
)
from actors.environment.rendering import ChatRenderer
from actors.trainer.publish import gather_groups
from actors.trainer.tiny.model import build_tiny_model
from actors.trainer.tiny.tokenizer import build_tokenizer
from actors.types import Dtype
from actors.weights.actor import start_board
from actors.weights.board import BoardStatus, StaleTerm, check_tokens
from actors.weights.buffers import pack_group
from service.inference.client import ServePolicyClient, engines_handle
from service.inference.deployment import delete_inference, deploy_inference, wait_ready
from service.inference.replica import ReplicaDescription, session_directory
from service.inference.settings import EngineSettings, InferenceSettings

pytestmark = pytest.mark.scenario

TEMPERATURE = 0.8
MAX_MODEL_LEN = 512
TOLERANCE_NATS = 1e-3
# An engine starts in seconds on an idle machine, in minutes on one that is shared.
REPLACED_S = 400.0


@dataclass(kw_only=True)
class Deployed:
    """A deployment, its weight board, and the model that its trainer would hold."""

    app: str
    num_replicas: int
    board: ActorHandle
    model: PreTrainedModel
    term: int = 1
    version: int = 0

    def publish(self) -> BoardStatus:
        packed = [pack_group(named) for named in gather_groups(self.model, dtype=torch.float32)]
        groups = [replace(group, buffer=ray.put(group.buffer)) for group in packed]
        ray.get(self.board.publish.remote(self.term, self.version, groups), timeout=30)
        limit_s = 60.0
        if not self.version:
            asyncio.run(wait_ready(self.app, self.board.status.remote, quiet_limit_s=420))
            limit_s = 420.0
        waiting = self.board.wait_published.remote(self.version, self.num_replicas, limit_s)
        status: BoardStatus = ray.get(waiting, timeout=limit_s + 10)
        assert status.is_loaded and len(status.replicas) >= self.num_replicas
        return status

    def publish_random(self, *, seed: int) -> BoardStatus:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.1 * float(parameter.std()))
        self.version += 1
        return self.publish()

    def status(self) -> BoardStatus:
        return ray.get(self.board.status.remote(), timeout=30)

    @property
    def check_text(self) -> list[int]:
        return check_tokens(self.model.config.vocab_size).tolist()

    def logprobs(self, prompt: list[int], sampled: list[int]) -> np.ndarray:
        logprobs = obvious_logprobs(self.model, prompt + sampled, temperature=TEMPERATURE)
        return logprobs[len(prompt) - 1 :].detach().numpy()


def write_model(directory: Path, app: str) -> None:
    if app == "mixture":
        write_served_mixture(directory)
    else:
        build_tiny_model(directory, seed=0, tie_word_embeddings=app == "tied", warmup_steps=0)


def deploy(directory: Path, app: str, *, num_replicas: int) -> Deployed:
    write_model(directory, app)
    settings = EngineSettings(
        inference=InferenceSettings(
            max_num_seqs=64, kv_cache_gib=0.1, num_replicas=num_replicas, enforce_eager=True
        ),
        model=str(directory),
        dtype=Dtype.FLOAT32,
        chat_template=None,
        max_context_tokens=MAX_MODEL_LEN,
        stop_token_ids=(),
        reads_text=False,
        resets_prefix_cache=False,
        seed=0,
        health_check_period_s=1.0,
        graceful_shutdown_s=2.0,
    )
    board = start_board()
    deploy_inference(settings, name=app, board=board, run_id=app)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return Deployed(app=app, num_replicas=num_replicas, board=board, model=model)


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        yield
        serve.shutdown()
    finally:
        ray.shutdown()


@contextmanager
def published(directory: Path, app: str, *, num_replicas: int = 1) -> Iterator[Deployed]:
    deployed = deploy(directory, app, num_replicas=num_replicas)
    deployed.publish()
    yield deployed
    delete_inference(deployed.app)


@pytest.fixture(scope="module")
def tied(own_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with published(tmp_path_factory.mktemp("tied"), "tied", num_replicas=2) as deployed:
        yield deployed


@pytest.fixture(scope="module")
def mixture(own_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with published(tmp_path_factory.mktemp("mixture"), "mixture") as deployed:
        yield deployed


@pytest.fixture(scope="module")
def untied(own_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with published(tmp_path_factory.mktemp("untied"), "untied") as deployed:
        yield deployed


def request(
    trajectory: str,
    *,
    num_prompt_tokens: int = 24,
    max_tokens: int = 16,
    deadline_s: float = 60.0,
    after: GenerateReply | None = None,
) -> GenerateRequest:
    generator = np.random.default_rng(zlib.crc32(trajectory.encode()))
    return GenerateRequest(
        prompt_token_ids=generator.integers(8, 60, num_prompt_tokens).astype(np.int32),
        max_tokens=max_tokens,
        temperature=TEMPERATURE,
        deadline_s=deadline_s,
        cache_salt=None if after is None else after.cache_salt,
        replica="" if after is None else after.replica,
    )


async def largest_difference(deployed: Deployed) -> float:
    client = ServePolicyClient(deployed.app)
    # Prompts fill up to three blocks of the prefix cache, so that blocks of an older version would
    # be used again.
    requests = [request(f"t{i}", num_prompt_tokens=8 + 12 * i) for i in range(32)]
    replies = await asyncio.gather(*(client.generate(one) for one in requests))
    differences = []
    for asked, reply in zip(requests, replies, strict=True):
        assert {span.version for span in reply.version_spans} == {deployed.version}
        expected = deployed.logprobs(asked.prompt_token_ids.tolist(), reply.token_ids.tolist())
        differences.append(np.abs(expected - reply.logprobs).max())
    return float(max(differences))


@pytest.fixture(
    params=[
        "tied",
        pytest.param("mixture", marks=pytest.mark.chaos),
        pytest.param("untied", marks=pytest.mark.chaos),
    ],
)
def deployed(request: pytest.FixtureRequest) -> Deployed:
    found: Deployed = request.getfixturevalue(request.param)
    return found


async def test_engine_samples_from_exactly_the_published_weights(deployed: Deployed) -> None:
    assert await largest_difference(deployed) < TOLERANCE_NATS
    for seed in (1, 2):
        report = await asyncio.to_thread(deployed.publish_random, seed=seed)
        assert len(report.replicas) == deployed.num_replicas
        for replica in report.replicas:
            assert replica.scores is not None
            expected = obvious_logprobs(deployed.model, deployed.check_text).detach().numpy()
            np.testing.assert_allclose(replica.scores.logprobs, expected, atol=TOLERANCE_NATS)
        assert await largest_difference(deployed) < TOLERANCE_NATS


async def test_eager_engine_keeps_no_compiled_files(tied: Deployed) -> None:
    replica = await describe(tied)
    files = list((session_directory() / f"engine-{replica.name}").iterdir())
    # The engine's temporary directory has files, and torch's compiler would add its own.
    assert files and not [file.name for file in files if file.name.startswith("torchinductor")]


async def test_requests_in_flight_survive_an_update_and_show_both_versions(tied: Deployed) -> None:
    client = ServePolicyClient(tied.app)
    old = tied.version
    replies = asyncio.gather(
        *(client.generate(request(f"long{i}", max_tokens=400)) for i in range(8))
    )
    await asyncio.sleep(0.3)
    await asyncio.to_thread(tied.publish_random, seed=3)
    spans = [reply.version_spans for reply in await replies]
    both = [pair for pair in spans if [span.version for span in pair] == [old, old + 1]]
    assert both
    for first, second in both:
        assert first.start == 0 < first.end == second.start < second.end


async def test_turns_of_a_trajectory_go_to_one_replica(tied: Deployed) -> None:
    client: ServePolicyClient = pickle.loads(pickle.dumps(ServePolicyClient(tied.app)))

    async def play(trajectory: str) -> set[str]:
        reply: GenerateReply | None = None
        homes = set()
        for turn in range(4):
            reply = await client.generate(
                request(trajectory, num_prompt_tokens=16 + 8 * turn, max_tokens=4, after=reply)
            )
            assert reply.cache_salt == f"{tied.term}:{tied.version}"
            assert reply.expert_indices is None
            homes.add(reply.replica)
        return homes

    replicas = {replica.replica_id for replica in tied.status().replicas}
    seen: set[str] = set()
    deadline = time.monotonic() + REPLACED_S
    # On a busy machine Serve skips a replica for a while if it answers the probe late.
    while seen != replicas:
        assert time.monotonic() < deadline, f"only {seen} of {replicas} got requests"
        homes = await asyncio.gather(*(play(f"affine{i}") for i in range(64)))
        assert all(len(one) == 1 for one in homes)
        seen = seen.union(*homes)


async def test_deadline_ends_a_request_and_the_replica_continues_to_answer(tied: Deployed) -> None:
    client = ServePolicyClient(tied.app)
    await client.generate(request("warm"))
    with pytest.raises(PolicyDeadlineExceeded, match="no answer within"):
        await client.generate(request("late", max_tokens=480, deadline_s=0.02))
    reply = await client.generate(request("after"))
    assert reply.token_ids.shape == reply.logprobs.shape


async def test_prompt_that_fills_the_context_is_refused_with_both_lengths(tied: Deployed) -> None:
    client = ServePolicyClient(tied.app)
    with pytest.raises(ValueError, match=r"512 tokens, expected at most 511"):
        await client.generate(request("full", num_prompt_tokens=512))
    reply = await client.generate(request("last", num_prompt_tokens=511))
    assert reply.token_ids.shape == (1,)


async def test_replies_are_parsed_if_the_request_declares_tools(tied: Deployed) -> None:
    client = ServePolicyClient(tied.app)
    renderer = ChatRenderer(build_tokenizer())
    asked = [replace(request(f"tool{i}"), tools=(CALCULATOR,)) for i in range(8)]
    replies = await asyncio.gather(*(client.generate(one) for one in asked))
    for reply in replies:
        # Random weights produce no call, so that the whole reply stays content.
        assert reply.parsed is not None
        assert reply.parsed.content == renderer.decode(reply.token_ids)
        assert not any(isinstance(call, ParsedCall) for call in reply.parsed.calls)
    assert (await client.generate(request("plain"))).parsed is None


def test_older_term_cannot_publish(tied: Deployed) -> None:
    tied.term, tied.version = 2, 40
    tied.publish_random(seed=4)
    with pytest.raises(StaleTerm, match="got term 1, expected at least 2"):
        ray.get(tied.board.publish.remote(1, 99, []), timeout=30)
    assert (tied.status().term, tied.status().version) == (2, 41)


@pytest.mark.chaos
async def test_killed_replica_and_killed_engine_are_replaced_with_the_current_version(
    tied: Deployed, untied: Deployed
) -> None:
    pair, single = tied, untied
    victim = await describe(pair)
    os.kill(victim.pid, signal.SIGKILL)
    other = await describe(single)
    for pid in other.engine_pids:
        os.kill(pid, signal.SIGKILL)
    # Requests that come while the only engine is dead are answered by the next engine.
    client = ServePolicyClient(single.app)
    late = [request(f"late{number}", deadline_s=REPLACED_S) for number in range(32)]
    replies = await asyncio.gather(*(client.generate(one) for one in late))
    assert {reply.replica for reply in replies}.isdisjoint({other.name})
    deadline = time.monotonic() + REPLACED_S
    for deployed, lost in ((pair, victim), (single, other)):
        while not is_whole_again(deployed, without=lost.name):
            assert time.monotonic() < deadline, f"{lost.name} was not replaced"
            await asyncio.sleep(0.5)
        assert await largest_difference(deployed) < TOLERANCE_NATS
    assert not any(psutil.pid_exists(pid) for pid in victim.engine_pids)


async def describe(deployed: Deployed) -> ReplicaDescription:
    return await engines_handle(deployed.app).describe.remote()


def is_whole_again(deployed: Deployed, *, without: str) -> bool:
    holders = [
        replica.replica_id
        for replica in deployed.status().replicas
        if (replica.term, replica.version) == (deployed.term, deployed.version)
    ]
    return len(holders) == deployed.num_replicas and without not in holders


@pytest.mark.usefixtures("tied")
async def test_client_without_a_deployment_raises_policy_unavailable() -> None:
    reply: GenerateReply | None = None
    with pytest.raises(PolicyUnavailable, match="deploy it first"):
        reply = await ServePolicyClient("nowhere").generate(request("lost", deadline_s=1.0))
    assert reply is None
