"""One rank of the trainer: FSDP2 over `torch.distributed`, without Ray.

Every public method except `close` and `abandon` is collective: all ranks call it in the same order
and with the same arguments, except that each has its own shard. Invariant: all ranks take every
decision (refuse, skip, clip) from the same gathered numbers, so that no rank waits in a collective
that another one skips.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors.batch import Float32s, MicroBatch, Minibatch, RankShard, RowScores, scoring_row
from actors.expert_records import ModelShape
from actors.network import LOOPBACK
from actors.trainer.agreement import Abandonment, StepAbandoned, agree_on
from actors.trainer.attribution import SplitGradient, split_gradient
from actors.trainer.checkpoint import Adapter, Progress, check_adapter, read_manifest
from actors.trainer.critic import Critic
from actors.trainer.lora import (
    adapted_layers,
    adapters_off,
    attach_adapters,
    base_digest,
    freeze_in,
)
from actors.trainer.loss.micro_batch import (
    combine_rows,
    micro_batch_loss,
    micro_batch_statistics,
    no_statistics,
)
from actors.trainer.model import (
    PolicyModel,
    RowTensors,
    load_policy,
    row_tensors,
)
from actors.trainer.process_group import join_group, join_side_group, rank_device
from actors.trainer.publish import pack_weights
from actors.trainer.settings import RankSettings
from actors.trainer.sharded_model import (
    ShardedModel,
    Sharding,
    TrainedModel,
    load_checkpoint,
    stage_checkpoint,
    write_checkpoint,
)
from actors.trainer.statistics import StepStats, UpdateTotals, summarize_step
from actors.trainer.utilization import device_peak, mfu, num_multiplied
from actors.weights.board import WeightGroup, check_tokens

_LOG = logging.getLogger(__name__)


ScoredRow = tuple[MicroBatch, Tensor | None, Tensor | None]
"""A row of an update, and two series of its targets' log-probabilities, [M], nats: under the policy
at the step's start, and under the reference. A series is None if the loss does not use it; the
first is also None if the current policy is still the policy at the step's start.
"""


class TrainerRank:
    """One rank's share of the policy, and of the critic and the reference if the run has them.

    version: the policy version of the weights, which each step increments.
    republished: the versions under which a restarted trainer published the last step's weights
    again. Such a version is not a new step (`actors.policy_age`).
    """

    def __init__(
        self, settings: RankSettings, *, rank: int, store: dist.Store, address: str = LOOPBACK
    ) -> None:
        """Join the group, load the model and shard it.

        Raises: OSError (transformers) if the model is missing; NotImplementedError if its
            architecture cannot be trained packed; torch.distributed.DistError if the other ranks do
            not join.
        """
        trainer, algorithm = settings.trainer, settings.algorithm
        self.settings = settings
        self.rank = rank
        self.version = 0
        self.republished: tuple[int, ...] = ()
        self.device = rank_device(trainer.device, rank=rank, num_visible=torch.cuda.device_count())
        torch.set_num_threads(trainer.threads)
        torch.manual_seed(settings.seed)
        mesh = join_group(
            store,
            rank=rank,
            num_ranks=trainer.num_ranks,
            device=self.device,
            timeout_s=settings.collective_timeout_s,
            address=address,
        )
        # A second group for checkpoints, which are written while the main group trains.
        self._side_group = join_side_group()
        self._abandonment = Abandonment(join_side_group())
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Path] | None = None
        sharding = Sharding(
            mesh=mesh,
            device=self.device,
            param_dtype=self.param_dtype,
            reshard_between_micro_batches=trainer.reshard_between_micro_batches,
            compiles=trainer.compile,
        )
        policy = load_policy(
            settings.model,
            logprob_chunk=settings.logprob_chunk,
            gradient_checkpointing=trainer.gradient_checkpointing,
            max_context_tokens=settings.max_context_tokens,
        )
        self.causal_lm = policy.causal_lm
        self._base: str | None = None
        if trainer.lora is not None:
            attach_adapters(self.causal_lm, trainer.lora, seed=settings.seed)
            self._base = base_digest(self.causal_lm)
            freeze_in(self.causal_lm, self.param_dtype)
        self.shape = ModelShape(
            vocab_size=int(self.causal_lm.get_input_embeddings().weight.shape[0]),
            mixture=policy.mixture,
        )
        self._num_multiplied = num_multiplied(self.causal_lm, policy.mixture)
        self._peak = device_peak(self.device, self.param_dtype)
        self._policy = TrainedModel(
            policy, self.causal_lm, sharding, trainer, stored=self.causal_lm
        )
        self._reference = self._load_reference(sharding) if algorithm.needs_reference else None
        self._critic: Critic | None = None
        if algorithm.has_critic:
            critic_model = algorithm.critic.model or settings.model
            self._critic = Critic(
                critic_model,
                algorithm.critic,
                trainer,
                sharding,
                max_context_tokens=settings.max_context_tokens,
            )

    def _load_reference(self, sharding: Sharding) -> Reference:
        settings = self.settings
        # The base model of the adapters is the policy with its adapters off.
        if settings.trainer.lora is not None and settings.algorithm.reference is None:
            return Reference(self._policy)
        policy = load_policy(
            settings.algorithm.reference or settings.model,
            logprob_chunk=settings.logprob_chunk,
            gradient_checkpointing=False,
            max_context_tokens=settings.max_context_tokens,
        ).requires_grad_(False)
        return Reference(ShardedModel(policy, policy.causal_lm, sharding))

    def score_rows(self, shard: RankShard) -> tuple[RowScores, ...]:
        """Score rows with the critic, and with the reference if it shapes the rows' rewards.

        Returns: the scores of each row, in the order of rows.
        Raises: ShardRefused or PolicyTooOld on every rank if any rank refuses its shard;
            StepAbandoned.
        """
        self._agree_on(shard)
        self._abandonment.check()
        rows = tuple(row for part in shard.minibatches for row in part)
        none = (None,) * len(rows)
        values = self._critic.score(rows) if self._critic is not None else none
        reference: Sequence[Float32s | None] = none
        if self._reference is not None and self.settings.algorithm.shapes_by_reference:
            scores = self._reference.score(shard.minibatches, check=self._abandonment.check)
            reference = [logprobs.cpu().numpy() for part in scores for logprobs in part]
        return tuple(
            RowScores(reference_logprobs=logprobs, values=of_row)
            for logprobs, of_row in zip(reference, values, strict=True)
        )

    def train_step(self, shard: RankShard) -> StepStats:
        """Run `epochs` passes over the shard's minibatches, then the critic's update.

        Returns: statistics over all ranks.
        Raises: ShardRefused or PolicyTooOld on every rank if any rank refuses its shard;
            StepAbandoned. The weights are then unchanged.
        """
        try:
            return self._train_step(shard)
        except StepAbandoned:
            self._policy.free_weights()
            raise

    def split_step(
        self, shard: RankShard, group_ids: Sequence[Sequence[str]]
    ) -> tuple[SplitGradient, ...]:
        """Measure each trajectory's share of the gradient in each of the step's updates.

        The trainer must have one rank. Each gradient is computed at the weights that `train_step`
        would use: after a gradient is measured, its update is applied, except the last update. The
        weights therefore change, but the version does not.

        Args: shard: must have one trajectory in each row. group_ids: for each minibatch, the group
        of each row.
        Returns: one result for each update: `epochs` times the number of minibatches.
        Raises: ShardRefused, PolicyTooOld, StepAbandoned.
        """
        assert self.settings.trainer.num_ranks == 1
        self._agree_on(shard)
        scored = self._score(shard.minibatches)
        updates = list(zip(scored, group_ids, strict=True)) * self.settings.algorithm.epochs
        found = []
        for number, (part, groups) in enumerate(updates):
            found.append(self._split(part, groups))
            if number + 1 < len(updates):
                self._update(part, is_first=False)
        return tuple(found)

    def abandon(self) -> None:
        """Abandon the current step and all later steps.

        If an update of the current step was already applied, only later steps are abandoned.
        Any thread of any rank may call this: the other ranks then abandon the steps too.
        """
        self._abandonment.ask()

    def _train_step(self, shard: RankShard) -> StepStats:
        assert (shard.value_rows is None) == (self._critic is None)
        self._agree_on(shard)
        scored = self._score(shard.minibatches)
        updates: list[UpdateTotals] = []
        began = time.monotonic()
        for part in scored * self.settings.algorithm.epochs:
            update = self._update(part, is_first=not updates)
            if update.is_skipped:
                number = len(updates)
                name = f"step-{shard.step:06d}-update-{number}-rank-{self.rank}.npz"
                saved = save_inputs(part, self.settings.checkpoint_dir / "skipped" / name)
                _LOG.warning(
                    "step %d: update %d is not finite, skipped; %s", shard.step, number, saved
                )
            updates.append(update)
        seconds, critic_stats = time.monotonic() - began, None
        if self._critic is not None and shard.value_rows is not None:
            critic_stats = self._critic.update(shard.value_rows)
            if critic_stats.is_skipped:
                _LOG.warning("step %d: the critic's update is not finite, skipped", shard.step)
        self.version += 1
        stats = summarize_step(
            updates,
            step=shard.step,
            trainer_version=self.version - 1,
            critic=critic_stats,
        )
        used = mfu(
            num_parameters=self._num_multiplied,
            num_tokens=stats.packed_tokens,
            seconds=seconds,
            num_ranks=self.settings.trainer.num_ranks,
            peak=self._peak,
        )
        return replace(stats, statistics={**stats.statistics, **used})

    def check_logprobs(self, rows: Sequence[MicroBatch] = ()) -> Float32s:
        """Return the log-probabilities of all rows' targets, concatenated: [N] float32, nats.

        rows: if empty, score the fixed text `weights.board.check_tokens` at temperature 1.
        """
        rows = rows or (scoring_row(check_tokens(self.shape.vocab_size)),)
        scores = [
            score_row(self._policy.model, row_tensors(row, device=self.device)) for row in rows
        ]
        self._policy.free_weights()
        return torch.cat(scores).cpu().numpy()

    @property
    def param_dtype(self) -> torch.dtype:
        """The type of forward and backward computations, and of weights that engines receive."""
        dtype: torch.dtype = getattr(torch, self.settings.trainer.dtype)
        return dtype

    def pack_weights(self) -> Iterator[WeightGroup]:
        """Gather weights or adapters layer by layer; rank 0 yields packed groups, others nothing.

        Every rank must exhaust the iterator.
        """
        return pack_weights(
            self.causal_lm,
            dtype=self.param_dtype,
            is_kept=self.rank == 0,
            only_adapters=self.settings.trainer.published_lora is not None,
        )

    def begin_save(self, step: int, term: int) -> None:
        """Copy weights, optimiser and progress, and write them in a thread; training may continue.

        Args: step, term: numbers in the checkpoint's name. Each start or recovery of a run begins a
        new term.
        """
        trained = None if self._critic is None else self._critic.trained
        progress = Progress(
            step=step,
            version=self.version,
            term=term,
            num_updates=self._policy.num_updates,
            num_ranks=self.settings.trainer.num_ranks,
            model=self.settings.model,
            critic_updates=None if trained is None else trained.num_updates,
            chat_template=self.settings.chat_template,
            lora=self._adapter,
        )
        staged = stage_checkpoint(policy=self._policy, critic=trained)
        self._writing = self._writer.submit(
            write_checkpoint,
            self.settings.checkpoint_dir,
            progress,
            staged,
            group=self._side_group,
        )

    def finish_save(self) -> Path:
        """Wait for the checkpoint that was begun last; return its directory.

        Raises: CheckpointError, CheckpointNotWritten (`write_checkpoint`).
        """
        assert self._writing is not None, "begin_save comes first"
        return self._writing.result()

    def save(self, step: int, term: int) -> Path:
        """Write a checkpoint and return its directory: call `begin_save`, then `finish_save`."""
        self.begin_save(step, term)
        return self.finish_save()

    def load(self, path: Path) -> Progress:
        """Load weights, optimiser and progress from a checkpoint, written by any number of ranks.

        Raises: CheckpointError if the checkpoint is incomplete or broken, or has another model or
        other adapters.
        """
        check_adapter(path, read_manifest(path).lora, self._adapter)
        progress = load_checkpoint(
            path,
            policy=self._policy,
            critic=None if self._critic is None else self._critic.trained,
            group=self._side_group,
        )
        self.version = progress.version
        return progress

    @property
    def _adapter(self) -> Adapter | None:
        lora = self.settings.trainer.lora
        if lora is None or self._base is None:
            return None
        return Adapter(
            rank=lora.rank,
            alpha=lora.alpha,
            layers=tuple(name for name, _ in adapted_layers(self.causal_lm)),
            base=self._base,
        )

    def renumber(self, version: int, republished: tuple[int, ...]) -> None:
        """Give the weights another version number, and set `republished`; no weight changes."""
        self.version, self.republished = version, republished

    def fingerprint(self) -> int:
        """Return a hash of this rank's shards of weights and optimiser; shards that are bitwise
        equal have equal hashes.
        """
        of_critic = () if self._critic is None else self._critic.trained.fingerprint()
        return zlib.crc32(repr((self._policy.fingerprint(), of_critic)).encode())

    def close(self) -> None:
        """Leave the process groups."""
        self._writer.shutdown()
        dist.destroy_process_group()

    def _agree_on(self, shard: RankShard) -> None:
        agree_on(
            shard,
            trainer_version=self.version,
            max_policy_age=self.settings.algorithm.max_policy_age,
            device=self.device,
            republished=self.republished,
        )

    def _score(self, minibatches: Sequence[Minibatch]) -> list[list[ScoredRow]]:
        """Return each row with its log-probabilities under the old policy and the reference.

        What the loss does not need is None. The old policy is the policy at the step's start.
        """
        nothing = [[None] * len(each) for each in minibatches]
        old: Sequence[Sequence[Tensor | None]] = nothing
        reference: Sequence[Sequence[Tensor | None]] = nothing
        # If the step has only one update, the current policy is the old one.
        is_only_update = self.settings.algorithm.epochs * len(minibatches) == 1
        if self.settings.algorithm.loss.needs_old and not is_only_update:
            old = score_minibatches(self._policy, minibatches, check=self._abandonment.check)
        if self._reference is not None and self.settings.algorithm.loss.needs_reference:
            reference = self._reference.score(minibatches, check=self._abandonment.check)
        return [
            list(zip(minibatch, of_old, of_reference, strict=True))
            for minibatch, of_old, of_reference in zip(minibatches, old, reference, strict=True)
        ]

    def _update(self, scored: Sequence[ScoredRow], *, is_first: bool) -> UpdateTotals:
        totals = self._accumulate(scored, is_first=is_first)
        rows, grad_norm = self._policy.gather(totals)
        update = UpdateTotals(
            row=tuple(combine_rows(rows).tolist()),
            grad_norm=grad_norm,
            learning_rate=self._policy.learning_rate,
        )
        is_applied = not update.is_skipped and not update.is_empty
        self._policy.finish_update(grad_norm=grad_norm, is_applied=is_applied)
        return update

    def _split(self, scored: Sequence[ScoredRow], group_ids: Sequence[str]) -> SplitGradient:
        def gradient(index: int) -> list[Tensor]:
            self._accumulate([scored[index]], is_first=False)
            return self._policy.take_gradients()

        return split_gradient(group_ids, gradient)

    def _accumulate(self, scored: Sequence[ScoredRow], *, is_first: bool) -> Tensor:
        """Run forward and backward over an update's micro-batches; return their statistics."""
        totals = no_statistics(self.device)
        for number, (micro_batch, old, reference) in enumerate(scored):
            if is_first:
                self._abandonment.check()
            row = row_tensors(micro_batch, device=self.device)
            self._policy.begin_micro_batch(is_last=number == len(scored) - 1)
            current, entropies = self._policy.model(
                row,
                has_entropy_gradient=self.settings.algorithm.loss.needs_entropy_gradient,
            )
            if old is None and self.settings.algorithm.loss.needs_old:
                old = current.detach()
            terms = row.terms(
                current,
                entropies,
                trainer_version=self.version,
                old_logprobs=old,
                reference_logprobs=reference,
            )
            result = micro_batch_loss(terms, self.settings.algorithm.loss)
            statistics = micro_batch_statistics(
                terms, result, num_tokens=row.num_tokens, with_mismatch=is_first
            )
            totals = combine_rows(torch.stack([totals, statistics]))
            result.loss.backward()
        return totals


# Log-probabilities of a step's trained tokens without gradient, by the old policy or a reference.
# All ranks score minibatches with the same numbers of rows, in the same order.
Scores = list[list[Tensor]]
"""Log-probabilities by minibatch, then by micro-batch: [M] float32, nats, on the device."""


@torch.no_grad()
def score_row(policy: PolicyModel, row: RowTensors) -> Tensor:
    """Return the log-probabilities of one row's targets, [M] float32, nats, without gradient.

    Recorded experts are replayed.
    """
    logprobs: Tensor = policy(row)[0]
    return logprobs


def score_minibatches(
    policy: ShardedModel[PolicyModel],
    minibatches: Sequence[Minibatch],
    *,
    check: Callable[[], None],
) -> Scores:
    """Score every row of a step, then free the gathered weights.

    check: called before each row; an error that it raises ends the scoring.
    """

    def score(row: MicroBatch) -> Tensor:
        check()
        tensors = row_tensors(row, device=policy.device)
        return score_row(policy.model, tensors)

    try:
        return [[score(row) for row in minibatch] for minibatch in minibatches]
    finally:
        policy.free_weights()


class Reference:
    """The frozen policy with which KL terms compare the trained policy; used only for scoring.

    The reference uses its own routing: recorded experts are not replayed, because another policy
    chose them.
    """

    def __init__(self, policy: ShardedModel[PolicyModel]) -> None:
        """Create a reference. policy: the model that scores, with any adapters off."""
        self._policy = policy

    def score(self, minibatches: Sequence[Minibatch], *, check: Callable[[], None]) -> Scores:
        """Return log-probabilities of the rows' targets. check: called before each row."""
        without = [
            tuple(replace(row, experts=None) for row in minibatch) for minibatch in minibatches
        ]
        with adapters_off(self._policy.model):
            return score_minibatches(self._policy, without, check=check)


def save_inputs(scored: Sequence[ScoredRow], path: Path) -> str:
    """Write the inputs of a skipped update to a NumPy archive, so that a user can find the cause.

    Keys are `<micro-batch>/<field>`. Besides the fields of a micro-batch the archive has
    `old_logprobs`, `reference_logprobs`, `expert_positions` and `expert_indices`, if present.

    Returns: a clause for the log, with the path or the reason why the inputs were not written;
    training continues in both cases.
    """
    columns: dict[str, Any] = {}
    for number, (row, old, reference) in enumerate(scored):
        named = {field.name: getattr(row, field.name) for field in fields(row)}
        if row.experts is not None:
            named["expert_positions"] = row.experts.positions
            named["expert_indices"] = row.experts.indices
        for name, logprobs in (("old", old), ("reference", reference)):
            if logprobs is not None:
                named[f"{name}_logprobs"] = logprobs.float().cpu().numpy()
        columns |= {f"{number}/{name}": values for name, values in named.items()}
    arrays: dict[str, Any] = {
        name: each for name, each in columns.items() if isinstance(each, np.ndarray)
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)
    except OSError as error:
        return f"its inputs could not be saved: {error}"
    return f"its inputs are in {path}"
