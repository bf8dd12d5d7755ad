"""From the one configuration tree to each room's own small settings; pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.environment.settings import EnvironmentActorSettings, EnvironmentSettings
from actors.environment.turn_loop import EpisodeSettings
from actors.journal.files import JournalSettings
from actors.journal.record import GroupRule
from actors.merge.advantages import Baseline, Scale
from actors.merge.aggregation import Aggregation
from actors.merge.settings import StepSettings
from actors.merge.shaping import Overlong, ReturnRange, ShapingSettings
from actors.outcomes import Disposition, OutcomePolicy
from actors.trainer.critic_settings import CriticTraining
from actors.trainer.settings import Device, ParamDtype, TrainerSettings, WeightTransport
from actors.trajectory_queue.messages import QueueSettings
from actors.trajectory_queue.window import WindowSettings
from service.config.critic import critic_settings
from service.config.loss import loss_settings
from service.config.outcome_rules import outcome_rules
from service.config.rewards import RewardConfig, kl_in_reward
from service.config.tree import Config
from service.inference.settings import EngineSettings
from service.run.failing import FailureLimits

MIB = 1 << 20
# The run's store knows which checkpoints are committed; the trainer alone could drop one of them.
_UNPRUNED = 1_000_000


def outcome_policy(config: Config) -> OutcomePolicy:
    return OutcomePolicy(overrides=outcome_rules(config))


def queue_settings(config: Config) -> QueueSettings:
    algorithm = config.algorithm
    return QueueSettings(
        window=WindowSettings(
            groups_per_step=algorithm.groups_per_step,
            max_lag=algorithm.max_lag,
            window_groups=algorithm.window,
            num_groups=config.run.steps * algorithm.groups_per_step,
        ),
        min_group_size=algorithm.min_group_size,
        max_items=config.max_queue_items,
        max_bytes=config.queue.max_mib * MIB,
        policies={config.tasks.environment: outcome_policy(config)},
        max_variance_refills=algorithm.max_variance_refills,
    )


def failure_limits(config: Config) -> FailureLimits:
    return FailureLimits(
        max_groups=config.rollouts.max_failed_groups,
        grace_s=config.rollouts.failed_groups_grace_s,
        max_skipped_steps=config.trainer.max_skipped_steps,
        min_group_size=config.algorithm.min_group_size,
        group_size=config.algorithm.group_size,
        engines_limit_s=config.inference.start_deadline_s,
    )


def environment_settings(config: Config, actor_id: str) -> EnvironmentActorSettings:
    rollouts = config.rollouts
    return EnvironmentActorSettings(
        actor_id=actor_id,
        environments=(
            EnvironmentSettings(
                name=config.tasks.environment,
                options=config.tasks.options,
                episode=EpisodeSettings(
                    max_turns=rollouts.max_turns,
                    max_tokens_per_turn=rollouts.max_tokens_per_turn,
                    max_context_tokens=config.model.max_context_tokens,
                    temperature=rollouts.temperature,
                    turn_deadline_s=rollouts.turn_deadline_s,
                    episode_deadline_s=rollouts.episode_deadline_s,
                ),
            ),
        ),
        slots=rollouts.slots_per_actor,
        template_options=rollouts.template_options,
    )


def engine_settings(config: Config, *, model: str, stop_token_ids: Sequence[int]) -> EngineSettings:
    inference = config.inference
    return EngineSettings(
        model=model,
        dtype=config.model.dtype,
        max_model_len=config.model.max_context_tokens,
        max_num_seqs=inference.max_num_seqs,
        kv_cache_gib=inference.kv_cache_gib if inference.gpus_per_replica == 0 else None,
        block_size=inference.block_tokens,
        gpu_memory_utilization=inference.gpu_memory_fraction,
        tensor_parallel_size=inference.tensor_parallel_size,
        enforce_eager=inference.enforce_eager,
        stop_token_ids=tuple(stop_token_ids),
        weight_backend=inference.weight_backend,
        num_replicas=inference.num_replicas,
        cpus_per_replica=inference.cpus_per_replica,
        gpus_per_replica=inference.gpus_per_replica,
        engine_threads=inference.threads,
        reset_prefix_cache_on_publish=config.algorithm.max_lag == 0,
        seed=config.run.seed,
    )


def trainer_settings(config: Config, *, model: str, checkpoint_dir: Path) -> TrainerSettings:
    trainer, algorithm = config.trainer, config.algorithm
    return TrainerSettings(
        model=model,
        checkpoint_dir=checkpoint_dir,
        num_ranks=trainer.num_ranks,
        device=Device(trainer.device),
        param_dtype=ParamDtype(trainer.dtype),
        learning_rate=trainer.learning_rate,
        betas=trainer.betas,
        eps=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
        warmup_steps=trainer.warmup_updates,
        max_grad_norm=trainer.max_grad_norm,
        loss=loss_settings(algorithm.loss),
        reference_model=algorithm.reference,
        scores_reference=algorithm.reward.kl is not None,
        critic=critic_training(config) if algorithm.has_critic else None,
        critic_model=algorithm.critic.model,
        temperature=config.rollouts.temperature,
        epochs=algorithm.epochs,
        max_policy_age=algorithm.max_policy_age,
        keep_checkpoints=_UNPRUNED,
        seed=config.run.seed,
        threads_per_rank=trainer.threads,
        gradient_checkpointing=trainer.gradient_checkpointing,
        weight_transport=WeightTransport(config.inference.weight_backend),
    )


def critic_training(config: Config) -> CriticTraining:
    """How it learns; what is not its own it has in common with the policy."""
    critic, trainer = config.algorithm.critic, config.trainer
    return CriticTraining(
        learning_rate=critic.learning_rate,
        warmup_steps=critic.warmup_updates,
        betas=trainer.betas,
        eps=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        value_clip=critic.value_clip,
        gradient_checkpointing=trainer.gradient_checkpointing,
    )


def shaping_settings(config: Config) -> ShapingSettings:
    reward = config.algorithm.reward
    return ShapingSettings(
        clip=ReturnRange(low=reward.clip[0], high=reward.clip[1]) if reward.clip else None,
        overlong=Overlong(**reward.overlong.model_dump()) if reward.overlong else None,
        missing_end_penalty=reward.missing_end_penalty,
        kl=kl_in_reward(reward),
    )


def merge_settings(config: Config) -> StepSettings:
    algorithm, trainer = config.algorithm, config.trainer
    loss = loss_settings(algorithm.loss)
    return StepSettings(
        baseline=Baseline(algorithm.baseline),
        scale=Scale(algorithm.scale),
        aggregation=Aggregation(algorithm.loss.aggregation),
        constant_tokens=algorithm.loss.constant_tokens or config.model.max_context_tokens,
        trains_without_signal=loss.needs_reference or loss.needs_entropy_gradient,
        num_ranks=trainer.num_ranks,
        tokens_per_micro_batch=trainer.tokens_per_micro_batch,
        share_prefixes=trainer.share_prefixes,
        num_minibatches=algorithm.minibatches,
        seed=config.run.seed,
        policies={config.tasks.environment: outcome_policy(config)},
        min_group_size=algorithm.min_group_size,
        turn_discount=algorithm.turn_discount,
        normalises=algorithm.normalise_advantages,
        shaping=shaping_settings(config),
        critic=critic_settings(algorithm.critic),
    )


def journal_settings(config: Config, *, directory: Path, epoch: int) -> JournalSettings | None:
    """None for a run that keeps no journal."""
    if config.run.journal_steps == 0:
        return None
    algorithm = config.algorithm
    dispositions = {rule.disposition for rule in config.rollouts.outcomes.values()}
    is_plain = (
        algorithm.turn_discount is None
        and not algorithm.normalise_advantages
        and not algorithm.has_critic
        and algorithm.reward == RewardConfig()
        and Disposition.TRAIN_PENALISED not in dispositions
    )
    steps = merge_settings(config)
    rule = GroupRule(
        baseline=steps.baseline,
        scale=steps.scale,
        trains_without_signal=steps.trains_without_signal,
    )
    return JournalSettings(
        directory=directory,
        epoch=epoch,
        keep_steps=config.run.journal_steps,
        max_policy_age=algorithm.max_policy_age,
        # What is shaped, or weighed over the step, no group's returns alone can tell.
        group_rule=rule if is_plain else None,
    )
