"""The comparison of a real engine with a real trainer for one family of models.

The trainer publishes three times, and their logprobs are compared after each publication. The
trainer's rank has a process of its own; the engine is the one that a replica holds, with vLLM in
another process. All are forked from a process that has imported the libraries
(`tests/families.py`): importing them again for each of a hundred families would take half a minute
each time, which is most of the proof's time.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers.utils import logging as transformers_logging

from actors.environment.policy import GenerateRequest
from actors.types import Dtype
from actors.weights.board import Publication
from service.config.file import ConfigError
from service.config.model_files import check_architecture, check_model_files
from service.inference.engine import PolicyEngine, _scoring_params
from service.inference.settings import EngineSettings, InferenceSettings
from worlds.builders.settings import rank_settings
from worlds.models.families import CONTEXT, VOCABULARY, family_dtype, write_family
from worlds.parts.trainer_world import World, random_samples

NUM_PUBLICATIONS = 3
# Longer than any window of the tiny configurations.
NUM_SCORED, NUM_SAMPLED = 320, 64
TEMPERATURES = (1.0, 0.7)
# Mean and maximum. Rounding in float32 gives about 1e-6; computing another function of the weights
# gives 1e-2 and more.
BOUNDS_NATS = {Dtype.FLOAT32: (1e-4, 1e-2), Dtype.BFLOAT16: (0.02, math.inf)}
PASSES, REFUSED, DIFFERS, FAILED = "passes", "refused", "differs", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one family's trial."""

    kind: str
    """PASSES, REFUSED, DIFFERS or FAILED."""
    reason: str = ""
    """Why the family was refused, or the error of a failure."""
    mean_nats: float = 0.0
    """Mean absolute difference of engine and trainer, the largest of all publications."""
    max_nats: float = 0.0


class ForkedEngine(EngineSettings):
    """An engine whose process is forked."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "VLLM_WORKER_MULTIPROC_METHOD": "fork"}


def judge(name: str) -> Verdict:
    """Write the model, run the checks that precede a start, then compare engine and trainer."""
    dtype = family_dtype(name)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made) / "model"
        write_family(name, directory)
        inference = InferenceSettings(enforce_eager=True, kv_cache_gib=0.25, max_num_seqs=8)
        try:
            check_model_files(directory)
            check_architecture(
                directory,
                key="model.path",
                max_context_tokens=CONTEXT,
                dtype=dtype,
                inference=inference,
            )
        except ConfigError as error:
            return Verdict(kind=REFUSED, reason=str(error).replace(made, "."))
        world = World(1, method="fork")
        try:
            settings = rank_settings(
                str(directory),
                Path(made) / "checkpoints",
                dtype=dtype,
                learning_rate=1e-2,
                max_context_tokens=CONTEXT,
            )
            world.start(settings)
            return asyncio.run(_compare(world, directory, inference, dtype))
        finally:
            world.stop()


async def _compare(
    world: World, directory: Path, inference: InferenceSettings, dtype: Dtype
) -> Verdict:
    settings = ForkedEngine(
        inference=inference,
        model=str(directory),
        dtype=dtype,
        max_context_tokens=CONTEXT,
        stop_token_ids=(),
        chat_template=None,
        reads_text=False,
        resets_prefix_cache=True,
        seed=0,
    )
    engine = PolicyEngine(settings, Path(tempfile.mkdtemp()))
    await engine.start()
    try:
        means, largest = [], []
        for version in range(1, NUM_PUBLICATIONS + 1):
            world.step([random_samples(version, 8, version=version - 1)], version=version - 1)
            publication = Publication(
                term=1, version=version, groups=tuple(world.call("packed")[0])
            )
            buffers = [group.buffer for group in publication.groups]
            await engine.apply(publication, buffers, on_progress=lambda: None)
            for temperature in TEMPERATURES:
                difference = await _difference(engine, world, version, temperature)
                means.append(float(difference.mean()))
                largest.append(float(difference.max()))
    finally:
        engine.shutdown()
    mean, most = max(means), max(largest)
    most_mean, most_at_all = BOUNDS_NATS[dtype]
    is_same = mean <= most_mean and most <= most_at_all
    return Verdict(kind=PASSES if is_same else DIFFERS, mean_nats=mean, max_nats=most)


async def _difference(
    engine: PolicyEngine, world: World, version: int, temperature: float
) -> np.ndarray:
    """Return the absolute differences between the engine's logprobs and the trainer's.

    The tokens are those that the engine sampled at the temperature. At temperature 1 the engine
    also scores the whole text, and those differences are included.
    """
    prompt = np.random.default_rng(version).integers(2, VOCABULARY, NUM_SCORED).astype(np.int32)
    reply = await engine.generate(
        GenerateRequest(
            prompt_token_ids=prompt,
            max_tokens=NUM_SAMPLED,
            temperature=temperature,
            deadline_s=300.0,
        )
    )
    text = np.concatenate([prompt, reply.token_ids]).astype(np.int32)
    trained = world.call("logprobs", token_ids=text, temperature=temperature)[0]
    found = np.abs(trained[NUM_SCORED - 1 :] - reply.logprobs)
    if temperature != 1.0:
        return found
    output = await engine._sample(text.tolist(), _scoring_params(), salt=f"text-{version}")
    return np.concatenate([found, np.abs(trained - np.asarray(output.prompt_logprobs.logprobs[:]))])


def run_trial(name: str, file: Path) -> None:
    """Judge a family and write the verdict as JSON; runs in a process of its own."""
    transformers_logging.set_verbosity_error()
    try:
        verdict = judge(name)
    except Exception as error:  # noqa: BLE001  # any error becomes a verdict
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        verdict = Verdict(kind=FAILED, reason=f"{type(error).__name__}: {first_line}")
        traceback.print_exc()
    file.write_text(json.dumps(asdict(verdict), indent=1))
