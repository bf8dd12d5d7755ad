"""Batches made from samples, and real processes that hold ranks, for the trainer's tests."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.batch import MicroBatch, Minibatch, RankShard, scoring_row
from actors.network import LOOPBACK
from actors.trainer.checkpoint import MANIFEST, CheckpointError, read_manifest
from actors.trainer.group import TrainerGroup
from actors.trainer.model import row_tensors
from actors.trainer.process_group import connect_store, open_store
from actors.trainer.rank import TrainerRank, score_row
from actors.trainer.settings import RankSettings
from actors.trainer.statistics import StepStats
from actors.trainer.tiny.model import build_tiny_model
from actors.weights.board import WeightGroup
from worlds.builders.settings import changed

# Long, so that no test fails because the machine is busy.
CALL_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample before packing. mask, logprobs, advantages, versions: one value per token.

    trajectory: samples with the same number are one trajectory; None: the sample is one by itself.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    temperature: float = 1.0
    trajectory: int | None = None


def tiny_model(directory: Path, *, tied: bool = True) -> str:
    """Build a model whose policy is nearly uniform, so that few ratios of random samples clip."""
    build_tiny_model(directory, seed=3, tie_word_embeddings=tied, warmup_steps=0)
    causal_lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        causal_lm.get_output_embeddings().weight.mul_(0.1 if tied else 1.0)
    causal_lm.save_pretrained(directory)
    return str(directory)


def random_samples(seed: int, num_samples: int, *, version: int = 0) -> list[Sample]:
    """Make samples of 4 to 60 tokens; about half are trained, but never a sample's first token."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        length = int(rng.integers(4, 61))
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        samples.append(
            Sample(
                token_ids=rng.integers(0, 500, length).astype(np.int32),
                mask=mask,
                logprobs=rng.normal(-6.2, 0.3, length).astype(np.float32),
                advantages=np.full(length, rng.normal(), dtype=np.float32),
                versions=np.full(length, version, dtype=np.int32),
            )
        )
    return samples


def obvious_logprobs(
    causal_lm: PreTrainedModel, token_ids: Sequence[int] | np.ndarray, *, temperature: float = 1.0
) -> torch.Tensor:
    """Compute log-probabilities the plain way, as the reference for every faster way.

    Transformers' model runs on a single sequence.

    Args: token_ids: [T]. Returns: [T - 1] float32, nats: of each token given all before it.
    """
    ids = torch.tensor(token_ids, dtype=torch.int64)
    logits = causal_lm(ids[None]).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]


def pack(samples: Sequence[Sample], *, loss_weight: float = 1.0) -> MicroBatch:
    """Pack samples into one row; the tokens in a sample's mask are targets of one loss weight."""

    def joined(values: list[np.ndarray], dtype: Any) -> np.ndarray:
        return np.concatenate(values).astype(dtype) if values else np.zeros(0, dtype)

    lengths = [len(sample.token_ids) for sample in samples]
    starts = np.cumsum([0, *lengths])
    owners = [
        -1 - number if sample.trajectory is None else sample.trajectory
        for number, sample in enumerate(samples)
    ]
    of_sample = [
        np.full(int(sample.mask.sum()), sorted(set(owners)).index(owner))
        for sample, owner in zip(samples, owners, strict=True)
    ]
    return MicroBatch(
        token_ids=joined([sample.token_ids for sample in samples], np.int32),
        position_ids=joined([np.arange(length) for length in lengths], np.int32),
        segment_lengths=np.array(lengths, dtype=np.int32),
        segment_parents=np.full(len(lengths), -1, dtype=np.int32),
        loss_positions=joined(
            [
                start + np.flatnonzero(sample.mask) - 1
                for start, sample in zip(starts, samples, strict=False)
            ],
            np.int32,
        ),
        targets=joined([sample.token_ids[sample.mask] for sample in samples], np.int32),
        behaviour_logprobs=joined([sample.logprobs[sample.mask] for sample in samples], np.float32),
        advantages=joined([sample.advantages[sample.mask] for sample in samples], np.float32),
        sampled_versions=joined([sample.versions[sample.mask] for sample in samples], np.int32),
        loss_weights=joined([np.full(len(part), loss_weight) for part in of_sample], np.float32),
        trajectory_index=joined(of_sample, np.int32),
        temperatures=joined(
            [np.full(int(sample.mask.sum()), sample.temperature) for sample in samples], np.float32
        ),
    )


PADDING = MicroBatch(
    token_ids=np.zeros(1, np.int32),
    position_ids=np.zeros(1, np.int32),
    segment_lengths=np.ones(1, np.int32),
    segment_parents=np.full(1, -1, np.int32),
    loss_positions=np.zeros(0, np.int32),
    targets=np.zeros(0, np.int32),
    behaviour_logprobs=np.zeros(0, np.float32),
    advantages=np.zeros(0, np.float32),
    sampled_versions=np.zeros(0, np.int32),
    loss_weights=np.zeros(0, np.float32),
    trajectory_index=np.zeros(0, np.int32),
    temperatures=np.zeros(0, np.float32),
)


def shards(
    minibatches: Sequence[Sequence[Sample]],
    *,
    num_ranks: int,
    num_micro: int,
    step: int = 0,
    version: int = 0,
) -> list[RankShard]:
    """Deal each minibatch's samples to ranks and micro-batches in turn.

    Padding micro-batches make the ranks equal. Each token weighs the same in its minibatch.
    """
    dealt: list[list[Minibatch]] = [[] for _ in range(num_ranks)]
    for samples in minibatches:
        weight = 1.0 / max(1, sum(int(sample.mask.sum()) for sample in samples))
        for rank in range(num_ranks):
            own = samples[rank::num_ranks]
            rows = [own[part::num_micro] for part in range(num_micro)]
            micro_batches = tuple(pack(row, loss_weight=weight) if row else PADDING for row in rows)
            dealt[rank].append(micro_batches)
    return [
        RankShard(step=step, trainer_version=version, minibatches=tuple(minibatches))
        for minibatches in dealt
    ]


class RankHost:
    """The server in a rank's process, which holds one `TrainerRank` after another."""

    def __init__(self) -> None:
        self.store: Any = None
        self.rank: TrainerRank | None = None

    def open(self, num_ranks: int) -> Any:
        self.store = open_store(LOOPBACK, num_ranks=num_ranks, timeout_s=CALL_TIMEOUT_S)
        return f"{LOOPBACK}:{self.store.port}"

    def join(self, rendezvous: Any, settings: RankSettings, number: int) -> None:
        if number > 0:
            self.store = connect_store(
                rendezvous, num_ranks=settings.trainer.num_ranks, timeout_s=CALL_TIMEOUT_S
            )
        self.rank = TrainerRank(settings, rank=number, store=self.store)

    def weights(self) -> dict[str, np.ndarray]:
        """Return the full weights by name, as published; empty on all ranks except 0."""
        assert self.rank is not None
        named: dict[str, np.ndarray] = {}
        for group in self.rank.pack_weights():
            manifest = group.manifest
            rows = zip(
                manifest.names, manifest.dtypes, manifest.shapes, manifest.offsets, strict=True
            )
            for name, dtype_name, shape, offset in rows:
                dtype = getattr(torch, dtype_name)
                size = int(np.prod(shape)) * dtype.itemsize
                part = torch.from_numpy(group.buffer[offset : offset + size]).view(dtype)
                named[name] = part.view(shape).float().numpy()
        return named

    def plant(self, fault: Callable[[TrainerRank], None]) -> None:
        """Plant a fault, a function that changes the rank; it lasts until the next rank joins."""
        assert self.rank is not None
        fault(self.rank)

    def packed(self) -> list[WeightGroup]:
        """Return the groups of weights that are published."""
        assert self.rank is not None
        return list(self.rank.pack_weights())

    def logprobs(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """Score every token except the first, as a training step does: [T - 1], nats."""
        assert self.rank is not None
        row = scoring_row(token_ids)
        row = replace(row, temperatures=np.full_like(row.temperatures, temperature))
        tensors = row_tensors(row, device=self.rank.device)
        return score_row(self.rank._policy.model, tensors).numpy()

    def do(self, method: str, arguments: dict[str, Any]) -> Any:
        if method in ("open", "join", "weights", "plant", "packed", "logprobs"):
            return getattr(self, method)(**arguments)
        return getattr(self.rank, method)(**arguments)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    host = RankHost()
    while True:
        message = pipe.recv()
        try:
            pipe.send((True, host.do(*message)))
        except Exception as error:  # noqa: BLE001  # raised again where the test called
            pipe.send((False, (error, traceback.format_exc())))


class World:
    """Real processes connected by gloo, in which `start` replaces the ranks by new ones."""

    def __init__(self, num_ranks: int, *, method: str = "spawn") -> None:
        """Start the processes.

        method: "fork" is fast, but needs a process that has all imports and has run nothing.
        """
        context: Any = multiprocessing.get_context(method)
        self.num_ranks = num_ranks
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._has_group = False

    def start(self, settings: RankSettings) -> World:
        """Replace the ranks by new ones; the world's size is set in the settings."""
        if self._has_group:
            self.call("close")
        settings = changed(settings, num_ranks=self.num_ranks)
        self._pipes[0].send(("open", {"num_ranks": self.num_ranks}))
        _, rendezvous = self._receive(0)
        common = {"rendezvous": rendezvous, "settings": settings}
        self.call_each("join", [{**common, "number": rank} for rank in range(self.num_ranks)])
        self._has_group = True
        return self

    def call(self, method: str, **arguments: Any) -> list[Any]:
        return self.call_each(method, [arguments] * self.num_ranks)

    def call_each(self, method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((method, own))
        answers = [self._receive(rank) for rank in range(self.num_ranks)]
        for error, trace in (value for is_answer, value in answers if not is_answer):
            error.add_note(trace)
            raise error
        return [value for _, value in answers]

    def step(
        self,
        minibatches: Sequence[Sequence[Sample]],
        *,
        num_micro: int = 1,
        step: int = 0,
        version: int = 0,
    ) -> StepStats:
        own = shards(
            minibatches, num_ranks=self.num_ranks, num_micro=num_micro, step=step, version=version
        )
        stats: StepStats = self.call_each("train_step", [{"shard": shard} for shard in own])[0]
        return stats

    def weights(self) -> dict[str, np.ndarray]:
        return self.call("weights")[0]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(CALL_TIMEOUT_S):
            raise TimeoutError(f"rank {rank} did not answer")
        return self._pipes[rank].recv()


@cache
def shared_world(num_ranks: int) -> World:
    """Return the world of a size, which all tests share: starting processes takes long."""
    world = World(num_ranks)
    atexit.register(world.stop)
    return world


def largest_difference(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


async def process_ids_of(group: TrainerGroup) -> list[int]:
    """Ask each rank for its process id; a rank answers between two calls of its group."""
    asked = [rank.__ray_call__.remote(lambda _: os.getpid()) for rank in group._ranks]
    return [await process_id for process_id in asked]


def list_checkpoints(root: Path) -> list[Path]:
    """List the complete checkpoints under a directory, oldest first: by term, then step.

    A newer term outranks a later step: it continued from a committed checkpoint, and the older
    term's checkpoints after that one belong to no surviving lineage.
    """
    found: list[tuple[int, int, Path]] = []
    for manifest in root.glob(f"step-*/{MANIFEST}"):
        try:
            progress = read_manifest(manifest.parent)
        except CheckpointError:
            continue
        found.append((progress.term, progress.step, manifest.parent))
    return [path for _, _, path in sorted(found)]
