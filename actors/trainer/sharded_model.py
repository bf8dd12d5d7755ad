"""A model sharded over the ranks by FSDP2: its weights, its optimiser and its checkpoint.

`ShardedModel` is only for scoring; `TrainedModel` also has AdamW. Their methods are collective.
Gradients are clipped by their global norm, and an update that is not finite is never applied. All
ranks decide from the same gathered numbers whether to apply an update. The optimiser's state exists
from the start, so a run resumes exactly even from a checkpoint before the first update.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shutil
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from actors.algorithm import learning_rate_at
from actors.trainer import checkpoint
from actors.trainer.checkpoint import CheckpointError, CheckpointNotWritten, Progress
from actors.trainer.host_moments import HostMomentsAdamW
from actors.trainer.process_group import MOVED, gather_rows, gather_texts
from actors.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Number of attempts to write to a full disk. A number is used instead of a time limit, because
# each rank has its own clock.
_WRITE_ATTEMPTS, _WRITE_PAUSE_S = 13, 5.0
_CRITIC = "critic"
_TRAINABLE = StateDictOptions(ignore_frozen_params=True)
_HASH_BLOCK, _HASH_FACTOR = 2**20, 0x9E3779B97F4A7C15
Model = TypeVar("Model", bound=nn.Module)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The placement of a model on the ranks."""

    mesh: DeviceMesh
    device: torch.device
    """The device of this rank."""
    param_dtype: torch.dtype
    """Type of forward and backward computations; master weights and reductions are float32."""
    reshard_between_micro_batches: bool = False
    """Whether gathered weights are freed and gradients reduced after each micro-batch instead of
    once for each update."""
    compiles: bool = False
    """Whether torch.compile compiles each decoder layer."""


class ShardedModel(Generic[Model]):
    """A module with an FSDP2 group for each decoder layer, and one for the rest.

    A tied embedding and head are in the same group, so they stay one parameter. Gradients are
    reduced in float32 and summed, not averaged, because each token's loss weight is its share of
    the whole update.
    """

    def __init__(self, model: Model, pretrained: PreTrainedModel, sharding: Sharding) -> None:
        """Shard the model in place. pretrained: the Hugging Face model inside `model`, which has
        the decoder layers.
        """
        self.model = model
        self.device = sharding.device
        self._reshards_between_micro_batches = sharding.reshard_between_micro_batches
        # Inputs are not cast: activations have the type of the embedding anyway, and temperatures
        # and advantages rounded to a short type would differ from those that the engine used.
        mixed = MixedPrecisionPolicy(
            param_dtype=sharding.param_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        names = set(pretrained._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        for module in layers:
            if sharding.compiles:
                # Compile before `fully_shard`, so that its hooks run outside of the compiled code.
                # Sizes are dynamic, because rows have any number of tokens.
                module.compile(dynamic=True)
            fully_shard(
                module,
                mesh=sharding.mesh,
                mp_policy=mixed,
                reshard_after_forward=sharding.reshard_between_micro_batches,
            )
        fully_shard(model, mesh=sharding.mesh, mp_policy=mixed, reshard_after_forward=False)
        self._groups = [module for module in (*layers, model) if isinstance(module, FSDPModule)]
        for group in self._groups:
            # One rank's mean is its sum; with a factor, FSDP2 would copy each gradient once more.
            if sharding.mesh.size() > 1:
                group.set_gradient_divide_factor(1.0)
            # Force plain sums: with factor 1 nothing is scaled, and gloo supports no other kind.
            group.set_force_sum_reduction_for_comms(True)
            # A rank whose tokens used no weight of an expert must still join the reduction.
            group.set_reduce_scatter_unused_params(True, recurse=False)

    def free_weights(self) -> None:
        """Free gathered weights after a forward pass without a backward pass.

        Otherwise the next forward after an update would still read the old weights.
        """
        for group in self._groups:
            group.reshard()


class TrainedModel(ShardedModel[Model]):
    """A sharded model with AdamW over its trainable parameters.

    Frozen parameters take part in the forward pass, but not in gradients, checkpoints and
    fingerprints. num_updates: number of updates applied so far, which determines the learning rate.
    """

    def __init__(
        self,
        model: Model,
        pretrained: PreTrainedModel,
        sharding: Sharding,
        settings: TrainerSettings,
        *,
        stored: nn.Module | None = None,
    ) -> None:
        """Shard a model for training. stored: the part of the model that checkpoints hold; None for
        the whole model.
        """
        super().__init__(model, pretrained, sharding)
        self.num_updates = 0
        self._settings = settings
        self._stored = model if stored is None else stored
        self._trainable = [each for each in model.parameters() if each.requires_grad]
        self._optimizer = build_optimizer(self._trainable, settings)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return learning_rate_at(
            self.num_updates,
            learning_rate=self._settings.learning_rate,
            warmup_updates=self._settings.warmup_updates,
            schedule=self._settings.schedule,
        )

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Prepare FSDP2 for a micro-batch.

        FSDP2 reduces the gradients and frees the gathered weights only after the last micro-batch
        of an update. If `Sharding.reshard_between_micro_batches` is set, it does both after each
        micro-batch.
        """
        is_synced = is_last or self._reshards_between_micro_batches
        root = self._groups[-1]
        root.set_requires_gradient_sync(is_synced)
        root.set_reshard_after_backward(is_synced)
        root.set_is_last_backward(is_last)

    def gather(self, statistics: Tensor) -> tuple[Tensor, float]:
        """Gather a vector from every rank, and compute the global norm of the gradients.

        Args: statistics: [S] float64, on this rank's device.
        Returns: [ranks, S] on the CPU, and the norm before clipping; the same on every rank.
        """
        square = squared_norm(self._local_gradients(), device=self.device)
        rows = gather_rows(torch.cat([statistics, square[None]])).cpu()
        return rows[:, :-1], math.sqrt(float(rows[:, -1].sum()))

    def finish_update(self, *, grad_norm: float, is_applied: bool) -> None:
        """Clip and apply the gradients if is_applied; drop them in any case.

        Args: grad_norm: from `gather`. is_applied: False if the update is not finite or has no
            tokens.
        """
        if is_applied:
            if grad_norm > self._settings.max_grad_norm:
                scale = self._settings.max_grad_norm / grad_norm
                torch._foreach_mul_(self._local_gradients(), scale)
            for group in self._optimizer.param_groups:
                group["lr"] = self.learning_rate
            self._optimizer.step()
            self.num_updates += 1
        self._optimizer.zero_grad(set_to_none=True)

    def take_gradients(self) -> list[Tensor]:
        """Return this rank's non-empty shards of the gradients, and drop them from the model."""
        found = self._local_gradients()
        self._optimizer.zero_grad(set_to_none=True)
        return found

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds: sharded weights and moments."""
        return {
            "model": get_model_state_dict(self._stored, options=_TRAINABLE),
            "optimizer": get_optimizer_state_dict(self._stored, self._optimizer),
        }

    def load_state(self, state: dict[str, Any], *, num_updates: int) -> None:
        # Frozen parameters are in no checkpoint; `dcp.load` has found every other one.
        has_frozen = len(self._trainable) < len(list(self.model.parameters()))
        options = StateDictOptions(strict=not has_frozen)
        set_model_state_dict(self._stored, state["model"], options=options)
        set_optimizer_state_dict(self._stored, self._optimizer, optim_state_dict=state["optimizer"])
        self.num_updates = num_updates

    def fingerprint(self) -> tuple[int, ...]:
        """Return hashes of this rank's shards of weights and of moments, and the update count."""
        hashes = [self.num_updates]
        for parameter in self._trainable:
            moments = self._optimizer.state[parameter]
            hashes += map(hash_bits, [parameter, *(moments[name] for name in sorted(moments))])
        return tuple(hashes)

    def _local_gradients(self) -> list[Tensor]:
        gradients = (parameter.grad for parameter in self._trainable)
        shards = (
            gradient.to_local() if isinstance(gradient, DTensor) else gradient
            for gradient in gradients
            if gradient is not None
        )
        return [shard for shard in shards if shard.numel()]


def build_optimizer(
    parameters: Iterable[Parameter], settings: TrainerSettings
) -> torch.optim.AdamW:
    """Create AdamW with its moments and step counts at zero.

    torch itself creates moments and step counts only at the first update. If a checkpoint is saved
    or loaded before that, torch's checkpointing makes an update of its own to create them. The step
    counts, and so the bias correction, of the resumed run would then be one update ahead.
    """
    kind = HostMomentsAdamW if settings.moments_on_host else torch.optim.AdamW
    optimizer = kind(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            if isinstance(optimizer, HostMomentsAdamW):
                # Move the moments after each parameter, so that the device never holds all of them.
                optimizer.move_to_host(parameter)
    return optimizer


@torch.no_grad()
def hash_bits(tensor: Tensor) -> int:
    """Return a hash of the bits of this rank's shard of a float32 tensor.

    Shards that differ in one bit, or by an exchange of two elements, have different hashes. The
    hash is not cryptographic.
    """
    # The hash of a block is Σ_i m_i b_i modulo 2^64, where b_i is the block's element i as an
    # integer and m_i is a random odd number. It is computed on the shard's device.
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.detach().contiguous().view(-1).view(torch.int32)
    total = 0
    for block in bits.split(_HASH_BLOCK):
        product = (block.to(torch.int64) * _multipliers(block.device)[: block.shape[0]]).sum()
        total = (total * _HASH_FACTOR + int(product)) % 2**64
    return total


@cache
def _multipliers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**62), 2**62, (_HASH_BLOCK,), generator=generator)
    return (2 * values + 1).to(device)


def squared_norm(shards: list[Tensor], *, device: torch.device) -> Tensor:
    """Return the sum of squares over this rank's shards, a float64 scalar."""
    if not shards:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(shards)).double().square().sum()


def stage_checkpoint(
    *, policy: TrainedModel[Any], critic: TrainedModel[Any] | None = None
) -> dict[str, Any]:
    """Copy this rank's part of a checkpoint to the CPU, so that training can continue."""
    staged: dict[str, Any] = BlockingAsyncStager().stage(_state(policy, critic))
    return staged


def write_checkpoint(
    root: Path, progress: Progress, state: dict[str, Any], *, group: dist.ProcessGroup
) -> Path:
    """Write a checkpoint under a temporary name, and rename it when it is complete.

    An existing checkpoint of the same name is replaced. If a rank cannot write, all ranks try again
    together for a minute.

    Args:
        state: What `stage_checkpoint` returned on this rank.
        group: A separate group, because the function runs in a thread during training.
    Returns: the checkpoint's directory.
    Raises (on every rank): CheckpointError if a later start or recovery of the run has
        claimed `root`; CheckpointNotWritten if a rank cannot write its shard.
    """
    for _ in range(_WRITE_ATTEMPTS - 1):
        try:
            return _write_once(root, progress, state, group=group)
        except CheckpointNotWritten as error:
            log.warning("%s; trying again in %g s", error, _WRITE_PAUSE_S)
            time.sleep(_WRITE_PAUSE_S)
    return _write_once(root, progress, state, group=group)


def _write_once(
    root: Path, progress: Progress, state: dict[str, Any], *, group: dist.ProcessGroup
) -> Path:
    aside = checkpoint.temporary_path(root, progress)
    is_writer = dist.get_rank() == 0
    _together(lambda: checkpoint.begin(root, progress), does_run=is_writer, group=group)
    writer = _DigestingWriter(aside)
    try:
        dcp.save(state, storage_writer=writer, process_group=group, planner=_CountingSave())
    except (CheckpointException, OSError) as error:
        if is_writer:
            # Free the space, otherwise a full disk would stay full.
            shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointNotWritten(
            f"checkpoint {root / progress.directory_name}: a rank could not write its shard "
            f"({_first_line(error)}); is the disk full, and does every rank see the same directory?"
        ) from error
    # Gathering the digests of every rank also waits until all have written.
    texts = gather_texts(json.dumps([writer.digests, writer.seconds]), group)
    digests, seconds = zip(*map(json.loads, texts), strict=True)
    finish = partial(
        checkpoint.finish,
        root,
        progress,
        digests=dict(ChainMap(*digests)),
        digest_s=max(seconds),
    )
    _together(finish, does_run=is_writer, group=group)
    return root / progress.directory_name


def load_checkpoint(
    path: Path,
    *,
    policy: TrainedModel[Any],
    critic: TrainedModel[Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Progress:
    """Load a checkpoint, written by any number of ranks, into models and optimisers.

    The checkpoint's critic is ignored if no critic is given.

    Raises: CheckpointError if the checkpoint is incomplete, changed, broken or of another model, or
        if it has no critic although one is given. The weights may then be partly loaded: load
        another checkpoint before you continue.
    """
    progress = checkpoint.read_manifest(path)
    if critic is not None and progress.critic_updates is None:
        raise CheckpointError(
            f"checkpoint {path}: got no critic, expected one; the run that wrote it had no "
            "critic: start a new run, with an export of this checkpoint as its model"
        )
    check = partial(
        checkpoint.check_files,
        path,
        part=dist.get_rank(group),
        num_parts=dist.get_world_size(group),
        on_read=MOVED.add,
    )
    _together(check, does_run=True, group=group)
    state = _state(policy, critic)
    try:
        dcp.load(state, checkpoint_id=path, process_group=group, planner=_CountingLoad())
    except (CheckpointException, Exception) as error:
        # torch's own error is not an Exception. Reading includes unpickling, and a damaged pickle
        # may raise any error.
        raise CheckpointError(
            f"checkpoint {path}: its shards cannot be read ({_first_line(error)}), expected "
            f"weights of {progress.model}; use an older one"
        ) from error
    policy.load_state(state, num_updates=progress.num_updates)
    if critic is not None:
        critic.load_state(state[_CRITIC], num_updates=progress.critic_updates or 0)
    return progress


class _DigestingWriter(FileSystemWriter):
    """A writer of one rank's files that also computes each file's SHA-256 while it is written.

    digests: maps each file's name to its digest. seconds: time spent on the digests.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = self._files = _DigestingFiles()

    @property
    def digests(self) -> dict[str, str]:
        return self._files.digests

    @property
    def seconds(self) -> float:
        return self._files.seconds


class _DigestingFiles(FileSystem):
    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.seconds = 0.0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            digesting = _DigestingStream(stream)
            yield digesting
        self.digests[Path(path).name] = digesting.digest.hexdigest()
        self.seconds += digesting.seconds

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _DigestingStream(io.RawIOBase):
    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.digest = sha256()
        self.seconds = 0.0

    def write(self, data: Buffer) -> int:
        began = time.monotonic()
        self.digest.update(data)
        self.seconds += time.monotonic() - began
        return self._raw.write(data)

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def close(self) -> None:
        self._raw.close()
        super().close()


class _CountingSave(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor):
            MOVED.add(data.nbytes)
        return data


class _CountingLoad(DefaultLoadPlanner):
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        MOVED.add(tensor.nbytes)


def _state(policy: TrainedModel[Any], critic: TrainedModel[Any] | None) -> dict[str, Any]:
    state = policy.state()
    return state if critic is None else {**state, _CRITIC: critic.state()}


def _together(
    work: Callable[[], None], *, does_run: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Run work on each rank whose does_run is true, and wait until all have ended.

    If the work fails on a rank, every rank raises this rank's error.
    """
    not_written = refused = ""
    if does_run:
        try:
            work()
        except OSError as error:
            not_written = str(error)
        except CheckpointError as error:
            refused = str(error)
    for failure, kind in ((not_written, CheckpointNotWritten), (refused, CheckpointError)):
        if found := [text for text in gather_texts(failure, group) if text]:
            raise kind(found[0])


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
