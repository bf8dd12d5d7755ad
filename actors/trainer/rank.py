"""One rank of the trainer: FSDP2 over `torch.distributed`, without Ray.

Every public method but `close` is collective: all ranks call it with the same arguments (each its
own shard) in the same order. Invariant: all ranks take every decision (refuse, skip, clip) from
the same gathered numbers, so none waits for another that went elsewhere. Called by `actor.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.batch import Float32s, Minibatch, RankShard, RowScores, ValueShard
from actors.expert_records import ModelShape
from actors.trainer import checkpoint
from actors.trainer.agreement import agree_on
from actors.trainer.clock import PhaseClock
from actors.trainer.critic import Critic
from actors.trainer.logprobs import token_logprobs, token_logprobs_and_entropies
from actors.trainer.loss.micro_batch import micro_batch_loss
from actors.trainer.loss.statistics import combine_rows, micro_batch_statistics, no_statistics
from actors.trainer.manifest import Progress
from actors.trainer.model import load_policy, shard_policy
from actors.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate_at,
    local_gradients,
    set_learning_rate,
    squared_norm,
)
from actors.trainer.process_group import gather_rows, join_group
from actors.trainer.publish import pack_weights
from actors.trainer.reference import Reference
from actors.trainer.row import RowTensors, row_tensors, scoring_row
from actors.trainer.scoring import Scores, free_weights, score_minibatches, score_row
from actors.trainer.settings import Dtype, RankSettings
from actors.trainer.skipped import SkippedUpdate, report_skip
from actors.trainer.statistics import StepStats, UpdateTotals, summarize_step
from actors.weights.board import WeightGroup, check_tokens

_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


class TrainerRank:
    """The policy's shard, its optimiser and its place in the process group.

    version: the policy version that the weights are; one more after each step.
    num_updates: optimiser updates applied so far; warm-up counts them.
    """

    def __init__(
        self, settings: RankSettings, *, rank: int, store: dist.Store, is_local: bool = True
    ) -> None:
        """Join the group, load the model and shard it.

        Raises: OSError (transformers) for a model that is not there; NotImplementedError for an
            architecture that cannot be trained packed; torch.distributed.DistError when the other
            ranks do not come.
        """
        trainer, algorithm = settings.trainer, settings.algorithm
        self.settings = settings
        self.rank = rank
        self.version = 0
        self.num_updates = 0
        self.device = torch.device(trainer.device.value)
        torch.set_num_threads(trainer.threads)
        torch.manual_seed(settings.seed)
        mesh = join_group(
            store,
            rank=rank,
            num_ranks=trainer.num_ranks,
            device=self.device,
            timeout_s=settings.collective_timeout_s,
            is_local=is_local,
        )
        self.policy = load_policy(
            settings.model,
            logprob_chunk=settings.logprob_chunk,
            gradient_checkpointing=trainer.gradient_checkpointing,
        )
        self.causal_lm = self.policy.causal_lm
        self.shape = ModelShape(
            vocab_size=int(self.causal_lm.get_input_embeddings().weight.shape[0]),
            mixture=self.policy.mixture,
        )
        self._sharded = shard_policy(
            self.policy,
            mesh,
            param_dtype=self.param_dtype,
            reshard_after_forward=settings.shard_between_micro_batches,
        )
        place: dict[str, Any] = {
            "mesh": mesh,
            "device": self.device,
            "param_dtype": self.param_dtype,
        }
        self._reference = Reference(settings, **place) if algorithm.needs_reference else None
        self._critic: Critic | None = None
        if algorithm.has_critic:
            self._critic = Critic(
                algorithm.critic.model or settings.model, algorithm.critic, trainer, **place
            )
        needs_entropies = algorithm.loss.needs_entropy_gradient
        self._score_logits = token_logprobs_and_entropies if needs_entropies else token_logprobs
        self._parameters = list(self.policy.parameters())
        self.optimizer = build_optimizer(self._parameters, trainer)

    def score_rows(self, shard: RankShard) -> tuple[RowScores, ...]:
        """Score rows before their rewards are shaped: by the critic, and by the reference.

        Returns: one answer a row, in their order.
        Raises: ShardRefused, PolicyTooOld on every rank when any rank refuses its shard.
        """
        self._agree_on(shard)
        rows = tuple(row for part in shard.minibatches for row in part.micro_batches)
        none = (None,) * len(rows)
        values = self._critic.score(rows) if self._critic is not None else none
        reference: Sequence[Float32s | None] = none
        if self._reference is not None and self.settings.algorithm.shapes_by_reference:
            scores = self._reference.score(shard.minibatches)
            reference = [logprobs.cpu().numpy() for part in scores for logprobs in part]
        return tuple(
            RowScores(reference_logprobs=logprobs, values=of_row)
            for logprobs, of_row in zip(reference, values, strict=True)
        )

    def train_step(self, shard: RankShard, value_shard: ValueShard | None = None) -> StepStats:
        """Run a step's updates: `epochs` passes over the shard's minibatches; then the critic's.

        Args: value_shard: where there is a critic.
        Returns: statistics over all ranks; only the seconds are this rank's own.
        Raises: ShardRefused, PolicyTooOld on every rank when any rank refuses its shard; the
            weights are then unchanged. ValueError for a value shard without a critic, or the
            other way round.
        """
        if (value_shard is None) != (self._critic is None):
            raise ValueError(
                f"trainer: got {'no' if value_shard is None else 'a'} value shard "
                f"{'without' if self._critic is None else 'with'} a critic, expected one exactly "
                "where there is a critic; set the baseline critic for both or for neither"
            )
        clock = PhaseClock()
        self._agree_on(shard, value_shard)
        clock.charge("prepare")
        old, reference = self._score(shard)
        clock.charge("forward")
        updates: list[UpdateTotals] = []
        for _ in range(self.settings.algorithm.epochs):
            for number, minibatch in enumerate(shard.minibatches):
                update = self._update(
                    shard,
                    minibatch,
                    old=old[number] if old else None,
                    reference=reference[number] if reference else None,
                    is_first=not updates,
                    clock=clock,
                )
                if update.is_skipped:
                    skipped = SkippedUpdate(
                        step=shard.step,
                        update=len(updates),
                        rank=self.rank,
                        minibatch=minibatch,
                        old=old[number] if old else None,
                        reference=reference[number] if reference else None,
                    )
                    report_skip(skipped, self.settings.checkpoint_dir)
                updates.append(update)
        critic_stats = None
        if self._critic is not None and value_shard is not None:
            critic_stats = self._critic.update(value_shard)
            clock.charge("critic")
        self.version = shard.trainer_version + 1
        return summarize_step(
            updates,
            step=shard.step,
            trainer_version=shard.trainer_version,
            seconds=clock.read(),
            critic=critic_stats,
        )

    def parity_logprobs(self) -> Float32s:
        """Score `weights.board.check_tokens` at temperature 1: [16] float32, nats."""
        row = row_tensors(scoring_row(check_tokens(self.shape.vocab_size)), device=self.device)
        logprobs = score_row(self.policy, row, temperature=1.0)
        free_weights(self._sharded)
        return logprobs.cpu().numpy()

    @property
    def param_dtype(self) -> torch.dtype:
        """What forward and backward compute in, and the engines are given."""
        return _DTYPES[self.settings.trainer.dtype]

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
            Progress(
                step=step,
                version=self.version,
                epoch=epoch,
                num_updates=self.num_updates,
                num_ranks=self.settings.trainer.num_ranks,
                model=self.settings.model,
                extra_json=extra_json,
                critic_updates=None if self._critic is None else self._critic.num_updates,
            ),
            policy=self._trained,
            critic=self._trained_critic,
        )

    def load(self, path: Path) -> Progress:
        """Take weights, optimiser and progress from a checkpoint of any number of ranks.

        Raises: CheckpointError when it is incomplete, broken or of another model.
        """
        progress = checkpoint.load(path, policy=self._trained, critic=self._trained_critic)
        self.version = progress.version
        self.num_updates = progress.num_updates
        if self._critic is not None:
            self._critic.num_updates = progress.critic_updates or 0
        return progress

    @property
    def _trained(self) -> checkpoint.Trained:
        return checkpoint.Trained(model=self.causal_lm, optimizer=self.optimizer)

    @property
    def _trained_critic(self) -> checkpoint.Trained | None:
        critic = self._critic
        if critic is None:
            return None
        return checkpoint.Trained(model=critic.value_model, optimizer=critic.optimizer)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _agree_on(self, shard: RankShard, value_shard: ValueShard | None = None) -> None:
        agree_on(
            shard,
            value_shard,
            trainer_version=self.version,
            shape=self.shape,
            max_policy_age=self.settings.algorithm.max_policy_age,
            device=self.device,
        )

    def _score(self, shard: RankShard) -> tuple[Scores | None, Scores | None]:
        """Score the step's tokens with the old policy and the reference, where the loss asks."""
        old: Scores | None = None
        reference: Scores | None = None
        # In a step's only update the current policy still is the old one.
        is_only_update = self.settings.algorithm.epochs * len(shard.minibatches) == 1
        if self.settings.algorithm.loss.needs_old and not is_only_update:
            old = score_minibatches(
                self.policy,
                self._sharded,
                shard.minibatches,
                device=self.device,
                temperature=self.settings.temperature,
            )
        if self._reference is not None and self.settings.algorithm.loss.needs_reference:
            reference = self._reference.score(shard.minibatches)
        return old, reference

    def _forward(self, row: RowTensors) -> tuple[Tensor, Tensor]:
        current, entropies = self.policy(
            row.token_ids,
            row.position_ids,
            row.layout,
            row.loss_positions,
            row.targets,
            temperature=self.settings.temperature,
            score=self._score_logits,
            experts=row.experts,
        )
        return current, entropies

    def _update(
        self,
        shard: RankShard,
        minibatch: Minibatch,
        *,
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
        is_first: bool,
        clock: PhaseClock,
    ) -> UpdateTotals:
        totals = self._accumulate(
            shard, minibatch, old=old, reference=reference, is_first=is_first, clock=clock
        )
        gradients = local_gradients(self._parameters)
        square = squared_norm(gradients, device=self.device)
        rows = gather_rows(torch.cat([totals, square[None]])).cpu()
        grad_norm = math.sqrt(float(rows[:, -1].sum()))
        trainer = self.settings.trainer
        rate = learning_rate_at(
            self.num_updates,
            learning_rate=trainer.learning_rate,
            warmup_updates=trainer.warmup_updates,
        )
        update = UpdateTotals(
            row=tuple(combine_rows(rows[:, :-1]).tolist()),
            grad_norm=grad_norm,
            learning_rate=rate,
        )
        if not update.is_skipped and not update.is_empty:
            clip_gradients(gradients, grad_norm=grad_norm, max_grad_norm=trainer.max_grad_norm)
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.num_updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        clock.charge("optimizer")
        return update

    def _accumulate(
        self,
        shard: RankShard,
        minibatch: Minibatch,
        *,
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
        is_first: bool,
        clock: PhaseClock,
    ) -> Tensor:
        """Forward and backward over the micro-batches; return their statistics."""
        totals = no_statistics(self.device)
        for number, micro_batch in enumerate(minibatch.micro_batches):
            row = row_tensors(micro_batch, device=self.device)
            self._sync_gradients(is_last=number == len(minibatch.micro_batches) - 1)
            clock.charge("prepare")
            current, entropies = self._forward(row)
            terms = row.terms(
                current,
                entropies,
                trainer_version=shard.trainer_version,
                old_logprobs=old[number] if old else self._still_old(current),
                reference_logprobs=reference[number] if reference else None,
            )
            result = micro_batch_loss(terms, self.settings.algorithm.loss)
            statistics = micro_batch_statistics(
                terms, result, num_tokens=row.num_tokens, with_mismatch=is_first
            )
            totals = combine_rows(torch.stack([totals, statistics]))
            clock.charge("forward")
            result.loss.backward()
            clock.charge("backward")
        return totals

    def _still_old(self, current: Tensor) -> Tensor | None:
        """The old policy in a step's only update: the current one, which nothing has moved yet."""
        return current.detach() if self.settings.algorithm.loss.needs_old else None

    def _sync_gradients(self, *, is_last: bool) -> None:
        """Reduce gradients and free gathered weights once an update, after its last backward."""
        is_synced = is_last or self.settings.shard_between_micro_batches
        self.policy.set_requires_gradient_sync(is_synced)
        self.policy.set_reshard_after_backward(is_synced)
        self.policy.set_is_last_backward(is_last)
