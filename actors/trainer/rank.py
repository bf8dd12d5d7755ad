"""One rank of the trainer: FSDP2 over `torch.distributed`, without Ray.

Every public method but `close` is collective: all ranks call it with the same arguments (each its
own shard) in the same order. Invariant: all ranks take every decision (refuse, skip, clip) from
the same gathered numbers, so none waits for another that went elsewhere. Called by `actor.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from actors.batch import Float32s, Minibatch, RankShard
from actors.trainer import checkpoint
from actors.trainer.loss import (
    MAX_NAMES,
    SUM_NAMES,
    MicroBatchTerms,
    micro_batch_loss,
    statistic_sums,
)
from actors.trainer.model import load_policy, shard_policy
from actors.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate_at,
    local_gradients,
    set_learning_rate,
    squared_norm,
)
from actors.trainer.process_group import gather_rows, gather_texts, join_group
from actors.trainer.publish import pack_weights
from actors.trainer.row import RowTensors, row_tensors, scoring_row
from actors.trainer.settings import ParamDtype, TrainerSettings
from actors.trainer.shard_check import PolicyTooOld, ShardRefused, check_shard, shard_outline
from actors.trainer.skipped import save_skipped
from actors.trainer.statistics import PhaseSeconds, StepStats, UpdateSums, summarize_step
from actors.weights.buffers import WeightGroup
from actors.weights.parity import parity_tokens

_LOG = logging.getLogger(__name__)
_DTYPES = {ParamDtype.FLOAT32: torch.float32, ParamDtype.BFLOAT16: torch.bfloat16}
_REFUSALS = (ShardRefused, PolicyTooOld)


class _Clock:
    """Seconds by phase; each call charges the time since the last one."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.seconds = dict.fromkeys(("prepare", "forward", "backward", "optimizer"), 0.0)

    def charge(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    def read(self) -> PhaseSeconds:
        return PhaseSeconds(
            total_s=time.perf_counter() - self.started,
            **{f"{phase}_s": seconds for phase, seconds in self.seconds.items()},
        )


class TrainerRank:
    """The policy's shard, its optimiser and its place in the process group.

    version: the policy version that the weights are; one more after each step.
    num_updates: optimiser updates applied so far; warm-up counts them.
    """

    def __init__(
        self, settings: TrainerSettings, *, rank: int, store: dist.Store, is_local: bool = True
    ) -> None:
        """Join the group, load the model and shard it.

        Raises: OSError (transformers) for a model that is not there; NotImplementedError for an
            architecture that cannot be trained packed; torch.distributed.DistError when the other
            ranks do not come.
        """
        self.settings = settings
        self.rank = rank
        self.version = 0
        self.num_updates = 0
        self.device = torch.device(settings.device.value)
        torch.set_num_threads(settings.threads_per_rank)
        torch.manual_seed(settings.seed)
        mesh = join_group(
            store,
            rank=rank,
            num_ranks=settings.num_ranks,
            device=self.device,
            timeout_s=settings.collective_timeout_s,
            is_local=is_local,
        )
        self.policy = load_policy(
            settings.model,
            logprob_chunk=settings.logprob_chunk,
            gradient_checkpointing=settings.gradient_checkpointing,
        )
        self.causal_lm = self.policy.causal_lm
        self.vocab_size = int(self.causal_lm.get_input_embeddings().weight.shape[0])
        self._sharded = shard_policy(
            self.policy,
            mesh,
            param_dtype=self.param_dtype,
            reshard_after_forward=settings.shard_between_micro_batches,
        )
        self._parameters = list(self.policy.parameters())
        self.optimizer = build_optimizer(
            self._parameters,
            learning_rate=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def train_step(self, shard: RankShard) -> StepStats:
        """Run a step's updates: `epochs` passes over the shard's minibatches.

        Returns: statistics over all ranks; only the seconds are this rank's own.
        Raises: ShardRefused, PolicyTooOld on every rank when any rank refuses its shard; the
            weights are then unchanged.
        """
        clock = _Clock()
        self._agree_on(shard)
        clock.charge("prepare")
        updates: list[UpdateSums] = []
        for _ in range(self.settings.epochs):
            for minibatch in shard.minibatches:
                update = self._update(shard, minibatch, is_first=not updates, clock=clock)
                if update.is_skipped:
                    self._report_skip(shard, minibatch, number=len(updates))
                updates.append(update)
        self.version = shard.trainer_version + 1
        return summarize_step(
            updates,
            step=shard.step,
            trainer_version=shard.trainer_version,
            seconds=clock.read(),
        )

    def parity_logprobs(self) -> Float32s:
        """Score `weights.parity.parity_tokens` at temperature 1: [16] float32, nats."""
        row = row_tensors(scoring_row(parity_tokens(self.vocab_size)), device=self.device)
        with torch.no_grad():
            logprobs, _ = self._forward(row, temperature=1.0)
        for module in self._sharded:
            # Without a backward pass the gathered weights would stay, and the next forward after
            # an update would still read them.
            module.reshard()
        return logprobs.cpu().numpy()

    @property
    def param_dtype(self) -> torch.dtype:
        """What forward and backward compute in, and the engines are given."""
        return _DTYPES[self.settings.param_dtype]

    def pack_weights(self) -> Iterator[WeightGroup]:
        """Gather the full weights layer by layer; rank 0 yields them packed, the others nothing.

        Every rank must exhaust the iterator.
        """
        return pack_weights(self.causal_lm, dtype=self.param_dtype, is_kept=self.rank == 0)

    def save(self, *, step: int, epoch: int, extra_json: str = "{}") -> Path:
        """Write a checkpoint of weights, optimiser and progress; return its directory.

        Args: step, epoch: name it. extra_json: the caller's own state, kept in the manifest.
        """
        return checkpoint.save(
            self.settings.checkpoint_dir,
            checkpoint.Progress(
                step=step,
                version=self.version,
                epoch=epoch,
                num_updates=self.num_updates,
                num_ranks=self.settings.num_ranks,
                model=self.settings.model,
                extra_json=extra_json,
            ),
            causal_lm=self.causal_lm,
            optimizer=self.optimizer,
            keep=self.settings.keep_checkpoints,
        )

    def load(self, path: Path) -> checkpoint.Progress:
        """Take weights, optimiser and progress from a checkpoint of any number of ranks.

        Raises: checkpoint.CheckpointError when it is incomplete, broken or of another model.
        """
        progress = checkpoint.load(path, causal_lm=self.causal_lm, optimizer=self.optimizer)
        self.version = progress.version
        self.num_updates = progress.num_updates
        return progress

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _agree_on(self, shard: RankShard) -> None:
        fault: ShardRefused | PolicyTooOld | None = None
        try:
            check_shard(
                shard,
                trainer_version=self.version,
                vocab_size=self.vocab_size,
                max_policy_age=self.settings.max_policy_age,
            )
        except _REFUSALS as error:
            fault = error
        kind = 0 if fault is None else 1 + _REFUSALS.index(type(fault))
        row = torch.tensor([kind, shard_outline(shard)], dtype=torch.float64, device=self.device)
        rows = gather_rows(row).tolist()
        if any(kind for kind, _ in rows):
            texts = gather_texts("" if fault is None else str(fault))
            number = next(index for index, (kind, _) in enumerate(rows) if kind)
            raise _REFUSALS[int(rows[number][0]) - 1](f"rank {number}: {texts[number]}")
        if len({outline for _, outline in rows}) > 1:
            raise ShardRefused(
                f"trainer: the {len(rows)} ranks' shards of step {shard.step} differ in version, "
                "denominators or numbers of micro-batches, expected the same on every rank"
            )

    def _forward(self, row: RowTensors, *, temperature: float) -> tuple[Tensor, Tensor]:
        current, entropies = self.policy(
            row.token_ids,
            row.position_ids,
            row.layout,
            row.loss_positions,
            row.targets,
            temperature=temperature,
        )
        return current, entropies

    def _update(
        self, shard: RankShard, minibatch: Minibatch, *, is_first: bool, clock: _Clock
    ) -> UpdateSums:
        totals, maxima = self._accumulate(shard, minibatch, is_first=is_first, clock=clock)
        gradients = local_gradients(self._parameters)
        square = squared_norm(gradients, device=self.device)
        rows = gather_rows(torch.cat([totals, maxima, square[None]])).cpu()
        sums = rows[:, : len(SUM_NAMES)].sum(0).tolist()
        grad_norm = math.sqrt(float(rows[:, -1].sum()))
        rate = learning_rate_at(
            self.num_updates,
            learning_rate=self.settings.learning_rate,
            warmup_steps=self.settings.warmup_steps,
        )
        update = UpdateSums(
            sums=tuple(sums),
            maxima=tuple(rows[:, len(SUM_NAMES) : -1].amax(0).tolist()),
            grad_norm=grad_norm,
            learning_rate=rate,
            is_skipped=not math.isfinite(grad_norm) or sums[SUM_NAMES.index("num_nonfinite")] > 0,
        )
        if not update.is_skipped and not update.is_empty:
            clip_gradients(
                gradients, grad_norm=grad_norm, max_grad_norm=self.settings.max_grad_norm
            )
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.num_updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        clock.charge("optimizer")
        return update

    def _accumulate(
        self, shard: RankShard, minibatch: Minibatch, *, is_first: bool, clock: _Clock
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward over the micro-batches; return their statistics' sums, maxima."""
        totals = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=self.device)
        maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=self.device)
        for number, micro_batch in enumerate(minibatch.micro_batches):
            row = row_tensors(micro_batch, device=self.device)
            self._sync_gradients(is_last=number == len(minibatch.micro_batches) - 1)
            clock.charge("prepare")
            current, entropies = self._forward(row, temperature=self.settings.temperature)
            terms = MicroBatchTerms(
                current_logprobs=current,
                behaviour_logprobs=row.behaviour_logprobs,
                entropies=entropies,
                advantages=row.advantages,
                sampled_versions=row.sampled_versions,
                trainer_version=shard.trainer_version,
            )
            loss, ratio = micro_batch_loss(
                terms,
                clip_low=self.settings.clip_low,
                clip_high=self.settings.clip_high,
                denominator=minibatch.denominator,
            )
            sums, largest = statistic_sums(
                terms,
                loss=loss,
                ratio=ratio,
                clip_low=self.settings.clip_low,
                clip_high=self.settings.clip_high,
                num_tokens=row.num_tokens,
                with_mismatch=is_first,
            )
            totals += sums
            maxima = torch.maximum(maxima, largest)
            clock.charge("forward")
            loss.backward()
            clock.charge("backward")
        return totals, maxima

    def _sync_gradients(self, *, is_last: bool) -> None:
        """Reduce gradients and free gathered weights once an update, after its last backward."""
        is_synced = is_last or self.settings.shard_between_micro_batches
        self.policy.set_requires_gradient_sync(is_synced)
        self.policy.set_reshard_after_backward(is_synced)
        self.policy.set_is_last_backward(is_last)

    def _report_skip(self, shard: RankShard, minibatch: Minibatch, *, number: int) -> None:
        directory = self.settings.checkpoint_dir / "skipped"
        try:
            path = save_skipped(
                minibatch, directory, step=shard.step, update=number, rank=self.rank
            )
        except OSError as error:
            _LOG.warning("step %d: inputs of a skipped update not saved: %s", shard.step, error)
            return
        _LOG.warning("step %d: update %d is not finite, skipped; %s", shard.step, number, path)
