"""Find settings that contradict each other. Pure.

All such checks are in this module; components trust the settings that they receive. Called by
`file.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.algorithm import (
    Aggregation,
    Correction,
    CriticSettings,
    Denominator,
    KlEstimator,
    LossSettings,
    Objective,
    Ratio,
    Scale,
    ScheduleKind,
    ScheduleSettings,
    Truncation,
)
from actors.environment.settings import GROUP_REWARD, MIXTURE_PERIOD
from actors.outcomes import Disposition
from actors.trainer.settings import Device, WeightBackend
from actors.types import SESSION, TRUNCATIONS, UPLOADED, Dtype, Outcome
from service.config.kept_tokens import kept_tokens_problems
from service.config.tree import Config, EvaluationSetSettings, TasksSettings
from service.inference.engine_args import engine_args_problems
from service.inference.settings import ADAPTER_RANKS, CPU_BLOCK_TOKENS

_OUT = frozenset({Disposition.MASK, Disposition.DROP})
_CLIPPED = frozenset({Objective.PPO_CLIP, Objective.DUAL_CLIP, Objective.CISPO})
_DPPO = frozenset({Objective.DPPO_TV, Objective.DPPO_KL})
_CAPPED = _DPPO | {Objective.REINFORCE}
# Objectives whose ratio is computed by token; with a ratio by trajectory they would be other
# algorithms.
_BY_TOKEN = _DPPO | {Objective.SAPO}


def disagreements(config: Config) -> Iterator[str]:
    """Yield a sentence for each contradiction, with got, expected and remedy."""
    checks = (
        _check_model,
        _check_tasks,
        _check_mixture,
        _check_curriculum,
        _check_evaluation,
        _check_audit,
        _check_completions,
        _check_sessions,
        _check_template,
        _check_groups,
        _check_rules,
        _check_reward,
        _check_ends,
        _check_refills,
        _check_scale,
        _check_state_credit,
        _check_critic,
        _check_schedules,
        _check_loss,
        _check_bands,
        _check_unread_loss,
        _check_reference,
        _check_budgets,
        _check_weights,
        _check_blocks,
        _check_adapters,
        _check_engine_args,
        _check_gpus,
    )
    # A problem of a part that the whole configuration also has is reported once, for the whole.
    said = set()
    for check in checks:
        for problem in check(config):
            said.add(problem)
            yield problem
    if not config.mixture:
        return
    for name, member in config.members.items():
        for check in checks:
            for problem in check(member):
                if problem not in said:
                    yield f"mixture.{name}: {problem}"


def trainer_disagreements(config: Config) -> Iterator[str]:
    """Yield a sentence for each contradiction among the settings of model and trainer."""
    for check in (_check_model, _check_schedules, _check_gpus):
        yield from check(config)


def _check_model(config: Config) -> Iterator[str]:
    model = config.model
    if (model.path is None) == (model.tiny is None):
        yield (
            "expected exactly one of model.path and model.tiny; got "
            f"{'neither' if model.path is None else 'both'}; set model.path to a directory or "
            "hub name, or model.tiny to {} for the built-in tiny model"
        )


def _check_tasks(config: Config) -> Iterator[str]:
    tasks = config.tasks
    if tasks.file is not None and tasks.dataset is not None:
        yield (
            "tasks.file and tasks.dataset are both set; expected one of them: a file has tasks as "
            "they are, a data set columns of its own; remove one"
        )
    if tasks.dataset is None:
        for key, is_set in (
            ("columns", bool(tasks.columns)),
            ("subset", tasks.subset is not None),
            ("evaluation_split", tasks.evaluation_split is not None),
        ):
            if is_set:
                yield (
                    f"tasks.{key} is set without tasks.dataset, to which it belongs; expected "
                    "both; set tasks.dataset"
                )


def _check_mixture(config: Config) -> Iterator[str]:
    if not config.mixture:
        if not config.tasks.environment:
            yield (
                "tasks.environment is not set and there is no mixture; expected one of them; name "
                "an environment, such as guessing"
            )
        return
    if config.tasks != TasksSettings():
        yield (
            "tasks and mixture are both set; expected one of them: each part of a mixture has "
            "tasks of its own; move them to mixture.NAME.tasks"
        )
    if config.evaluation.sets:
        yield (
            "evaluation.sets is set with a mixture, whose parts are evaluated each as a set of its "
            "own; leave it out, or make a part of it"
        )
    if len(config.mixture) > MIXTURE_PERIOD:
        yield f"mixture has {len(config.mixture)} parts, expected at most {MIXTURE_PERIOD}"
    whole = sum(each.weight for each in config.mixture.values())
    for name, each in config.mixture.items():
        if each.weight / whole < 1 / MIXTURE_PERIOD:
            yield (
                f"mixture.{name}.weight is {each.weight:g} of {whole:g}, expected at least one in "
                f"{MIXTURE_PERIOD}; raise it"
            )
        if each.tasks.environment == SESSION:
            yield (
                f"mixture.{name}.tasks.environment is session, expected an environment: agents "
                "outside bring their own tasks, to any run of `rayloom serve`"
            )
        if name in (SESSION, UPLOADED):
            yield f"mixture.{name}: this name is taken by rollouts of clients; choose another"


def _check_curriculum(config: Config) -> Iterator[str]:
    settings = config.curriculum
    if not settings.is_on:
        return
    if settings.hopeless_to >= settings.solved_from:
        yield (
            f"curriculum.hopeless_to is {settings.hopeless_to:g}, expected less than "
            f"curriculum.solved_from ({settings.solved_from:g}); lower it"
        )
    tasks = config.tasks
    if not config.mixture and tasks.file is None and tasks.dataset is None and tasks.environment:
        yield (
            "curriculum is set, but the seed makes every task and none is repeated; expected "
            "tasks.file, tasks.dataset or a mixture; leave it out"
        )


def _check_evaluation(config: Config) -> Iterator[str]:
    named = {"evaluation": config.evaluation} | {
        f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()
    }
    for key, settings in named.items():
        if settings.samples > 1 and settings.temperature == 0:
            yield (
                f"{key}.samples is {settings.samples} with temperature 0, where all samples of a "
                "task are the same; expected a temperature above 0, or one sample; set one of them"
            )
        sampling = settings.sampling
        yield from kept_tokens_problems(key, sampling.kept, temperature=sampling.temperature)
    tasks = config.tasks
    scores_answers = any(tasks.options.get(name) for name in ("reward", "judges", "tools"))
    is_evaluated = tasks.evaluation_tasks > 0 or bool(config.evaluation.sets)
    if tasks.options.get(GROUP_REWARD) and not scores_answers and is_evaluated:
        yield (
            "tasks.options.group_reward is set without tasks.options.reward, and tasks are held "
            "out for evaluations, whose answers are in no group; expected a function that scores "
            "one answer, or no evaluation; set one of them, or tasks.evaluation_tasks to 0"
        )
    for name, each in config.evaluation.sets.items():
        yield from _check_set(config, f"evaluation.sets.{name}", each)


def _check_audit(config: Config) -> Iterator[str]:
    audit = config.audit
    if audit.shadow is not None and not (audit.hacking and config.run.journal_steps):
        yield (
            f"audit.shadow is {audit.shadow}, and audit.hacking is {str(audit.hacking).lower()} "
            f"with run.journal_steps {config.run.journal_steps}; expected a journal that is "
            "read; set audit.hacking to true and run.journal_steps above 0, or remove audit.shadow"
        )


def _check_completions(config: Config) -> Iterator[str]:
    trackers = config.trackers
    if not trackers.completions:
        return
    if not config.run.journal_steps:
        yield (
            f"trackers.completions is {trackers.completions} with run.journal_steps 0; expected a "
            "journal, which holds the completions; set run.journal_steps above 0"
        )
    if not (trackers.jsonl or trackers.wandb or trackers.trackio or trackers.own):
        yield (
            f"trackers.completions is {trackers.completions}, but no tracker shows them; expected "
            "wandb, trackio, jsonl or own; set one of them, or trackers.completions to 0"
        )


def _check_set(config: Config, key: str, settings: EvaluationSetSettings) -> Iterator[str]:
    if settings.file is not None and settings.dataset is not None:
        yield f"{key}.file and {key}.dataset are both set; expected one of them; remove one"
    of_data_set = ("subset", "split", "columns")
    is_of_data_set = any(getattr(settings, name) is not None for name in of_data_set)
    has_data_set = settings.dataset is not None or config.tasks.dataset is not None
    if is_of_data_set and (settings.file is not None or not has_data_set):
        yield (
            f"{key} names a subset, a split or columns without a dataset to which they belong; "
            "expected one there or in tasks, and no file; set it, or leave them out"
        )
    has_own = is_of_data_set or settings.file is not None or settings.dataset is not None
    if not has_own and not config.tasks.evaluation_tasks:
        yield (
            f"{key} names no tasks, and tasks.evaluation_tasks is 0, so that the set is empty; "
            "name a file, a dataset or a split, or raise tasks.evaluation_tasks"
        )
    if not config.has_environment:
        yield (
            f"{key} is set with tasks.environment session: nothing here can play it; leave it out"
        )


def _check_sessions(config: Config) -> Iterator[str]:
    tasks = config.tasks
    if config.has_environment:
        return
    if tasks.evaluation_tasks:
        yield (
            f"tasks.evaluation_tasks is {tasks.evaluation_tasks} with tasks.environment session: "
            "nothing here can play them; expected 0; set it"
        )
    for given in ("file", "dataset", "options"):
        if not getattr(tasks, given):
            continue
        yield (
            f"tasks.{given} is set with tasks.environment session, whose tasks come with the "
            "sessions; leave it out"
        )


def _check_template(config: Config) -> Iterator[str]:
    for name, value in config.rollouts.template_options.items():
        if not isinstance(value, bool | int | float | str | None):
            yield (
                f"rollouts.template_options.{name}: got a {type(value).__name__}, expected "
                "true, false, a number, a text or null; chat templates are given plain values"
            )


def _check_groups(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.has_group_baseline and algorithm.group_size < 2:
        yield (
            f"algorithm.group_size is {algorithm.group_size} with a group baseline "
            f"('{algorithm.baseline}'): every advantage would be 0; expected at least 2; raise "
            "algorithm.group_size or set algorithm.baseline to none"
        )
    if algorithm.min_group_size > algorithm.group_size:
        yield (
            f"algorithm.min_group_size is {algorithm.min_group_size}, more than group_size "
            f"{algorithm.group_size}: no group could ever be trained; lower it"
        )
    if (algorithm.min_usable_samples or 0) > algorithm.group_size:
        yield (
            f"algorithm.min_usable_samples is {algorithm.min_usable_samples}, more than "
            f"group_size {algorithm.group_size}; lower it or leave it out"
        )
    if (algorithm.min_usable_samples or algorithm.group_size) < algorithm.min_group_size:
        yield (
            f"algorithm.min_usable_samples is {algorithm.min_usable_samples}, less than "
            f"min_group_size {algorithm.min_group_size}: groups would close too small to be "
            "trained; raise the first or lower the second"
        )
    if algorithm.turn_discount is not None and config.rollouts.max_turns == 1:
        yield (
            f"algorithm.turn_discount is {algorithm.turn_discount:g} with rollouts.max_turns 1: "
            "there is no later turn to discount; leave it out, or allow more turns"
        )
    if algorithm.is_synchronous and algorithm.window > 1:
        yield (
            f"algorithm.window_groups is {algorithm.window} with max_lag 0; synchronous training "
            "takes the groups in order: leave window_groups out, or set max_lag to 1 or more"
        )


def _check_rules(config: Config) -> Iterator[str]:
    for outcome, rule in config.rollouts.outcomes.items():
        disposition = rule.disposition
        if (disposition is Disposition.TRAIN_PENALISED) != (rule.penalty > 0):
            yield (
                f"rollouts.outcomes.{outcome.value} has penalty {rule.penalty:g} with disposition "
                f"{disposition.value}; expected more than 0 with train_penalised and 0 with every "
                "other one; set both"
            )
        if outcome is Outcome.REWARD_ERROR and disposition not in _OUT:
            yield (
                f"rollouts.outcomes.reward_error has disposition {disposition.value}: its return "
                "would be a 0 that no environment gave; expected drop or mask; choose one of them"
            )
        if outcome is Outcome.COMPLETED and rule.max_retries:
            yield (
                f"rollouts.outcomes.completed has max_retries {rule.max_retries}: what was played "
                "to its end would be thrown away and played again; expected 0; leave it out"
            )
        if outcome is Outcome.COMPLETED and disposition in _OUT:
            yield (
                f"rollouts.outcomes.completed has disposition {disposition.value}: nothing that "
                "goes well would ever be trained; expected a disposition that trains; choose one"
            )


def _check_reward(config: Config) -> Iterator[str]:
    reward, rollouts = config.algorithm.reward, config.rollouts
    if reward.clip is not None and not reward.clip[0] < reward.clip[1]:
        yield (
            f"algorithm.reward.clip is [{reward.clip[0]:g}, {reward.clip[1]:g}], expected the "
            "lower bound first and a higher one second; correct them"
        )
    overlong = reward.overlong
    if overlong is None:
        return
    free = overlong.max_tokens - overlong.cache_tokens
    most = rollouts.max_turns * rollouts.max_tokens_per_turn
    if free < 0:
        yield (
            f"algorithm.reward.overlong.cache_tokens is {overlong.cache_tokens}, expected at most "
            f"overlong.max_tokens ({overlong.max_tokens}); lower it"
        )
    elif free >= most:
        yield (
            f"algorithm.reward.overlong punishes from {free} tokens on, but a trajectory samples "
            f"at most {most} (rollouts.max_turns times max_tokens_per_turn): nothing would ever "
            "be punished; lower overlong.max_tokens"
        )


def _check_ends(config: Config) -> list[str]:
    penalty = config.algorithm.reward.missing_end_penalty
    cut_off = {config.outcome_policy.disposition(outcome) for outcome in TRUNCATIONS}
    if not penalty or not cut_off <= _OUT:
        return []
    return [
        f"algorithm.reward.missing_end_penalty is {penalty:g}, but no trajectory that was cut off "
        "is in the loss; expected a rule that trains one; set rollouts.outcomes.truncated_tokens "
        "to {disposition: train}, or leave the penalty out"
    ]


def _check_refills(config: Config) -> list[str]:
    algorithm = config.algorithm
    if not algorithm.max_variance_refills:
        return []
    got = f"algorithm.max_variance_refills is {algorithm.max_variance_refills} with "
    found = []
    if not algorithm.has_group_baseline:
        found.append(
            got + f"baseline {algorithm.baseline}, which trains groups of equal returns as well; "
            "expected 0; choose a group baseline or leave it out"
        )
    if algorithm.turn_discount is not None:
        found.append(
            got + "turn_discount: equal returns that fell to different turns are a signal there; "
            "expected one of the two; leave the other out"
        )
    return found


def _check_scale(config: Config) -> Iterator[str]:
    """Yield a contradiction if advantages need group statistics but have no group baseline."""
    algorithm = config.algorithm
    if algorithm.scale is not Scale.NONE and not algorithm.has_group_baseline:
        yield (
            f"algorithm.scale is {algorithm.scale} with algorithm.baseline {algorithm.baseline}: "
            "it divides by the returns of a group, which needs a group baseline (mean or "
            "leave_one_out); expected none; set algorithm.scale to none, or choose a group baseline"
        )


def _check_state_credit(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.state_credit is None:
        return
    if not algorithm.has_group_baseline:
        yield (
            f"algorithm.state_credit is set with algorithm.baseline {algorithm.baseline}; expected "
            "mean or leave_one_out, because it compares the turns of a group; set "
            "algorithm.baseline, or leave state_credit out"
        )
    if algorithm.scale is Scale.MEAN:
        yield (
            "algorithm.state_credit is set with algorithm.scale mean; expected std or none, "
            "because the formula of scale mean is for whole returns; set algorithm.scale, or leave "
            "state_credit out"
        )
    if algorithm.turn_discount is not None:
        yield (
            "algorithm.state_credit is set with algorithm.turn_discount; expected one of them, "
            "because both give credit by turn; leave one out"
        )
    if algorithm.max_variance_refills:
        yield (
            f"algorithm.max_variance_refills is {algorithm.max_variance_refills} with "
            "algorithm.state_credit: equal returns of different turns are a signal there; expected "
            "0; leave one of them out"
        )


def _check_critic(config: Config) -> Iterator[str]:
    algorithm, critic = config.algorithm, config.algorithm.critic
    if not algorithm.has_critic and critic != CriticSettings():
        yield (
            f"algorithm.critic is set with algorithm.baseline {algorithm.baseline}: no critic "
            "would be trained; set algorithm.baseline to critic, or leave algorithm.critic out"
        )
    if (critic.truncation is Truncation.PENALTY) != (critic.truncation_penalty > 0):
        yield (
            f"algorithm.critic.truncation_penalty is {critic.truncation_penalty:g} with "
            f"truncation {critic.truncation}; expected more than 0 with penalty and 0 with every "
            "other one; set both"
        )
    if algorithm.has_critic and algorithm.turn_discount is not None:
        yield (
            f"algorithm.turn_discount is {algorithm.turn_discount:g} with algorithm.baseline "
            "critic, which gives credit by token; leave turn_discount out, or choose a group "
            "baseline"
        )


def _check_schedules(config: Config) -> Iterator[str]:
    trainer, critic = config.trainer, config.algorithm.critic
    yield from _check_schedule("trainer", trainer.schedule)
    yield from _check_decay("trainer", trainer.warmup_updates, config.policy_schedule)
    if config.algorithm.has_critic:
        yield from _check_schedule("algorithm.critic", critic.schedule)
        yield from _check_decay("algorithm.critic", critic.warmup_updates, config.critic_schedule)


def _check_schedule(section: str, schedule: ScheduleSettings) -> Iterator[str]:
    """Yield the contradictions among a schedule's settings as the configuration has them."""
    key, kind, default = f"{section}.schedule", schedule.kind, ScheduleSettings()
    is_wsd = kind is ScheduleKind.WSD
    if kind is ScheduleKind.CONSTANT:
        for name in ("updates", "min_ratio"):
            if getattr(schedule, name) != getattr(default, name):
                yield (
                    f"{key}.{name} is {getattr(schedule, name)} with kind constant, which does "
                    f"not decay; expected kind linear, cosine or wsd; set {key}.kind, or leave "
                    f"{name} out"
                )
    if is_wsd and schedule.decay_updates is None:
        yield (
            f"{key}.decay_updates is null with kind wsd; expected the number of updates, the last "
            "ones, over which the rate decays; set it, for example to a tenth of the updates, or "
            "choose kind linear, which decays from the warm-up on"
        )
    if not is_wsd and schedule.decay_updates is not None:
        yield (
            f"{key}.decay_updates is {schedule.decay_updates} with kind {kind}, which does not "
            f"read it; expected null; set {key}.kind to wsd, or leave decay_updates out"
        )


def _check_decay(section: str, warmup_updates: int, planned: ScheduleSettings) -> Iterator[str]:
    """Yield a contradiction if warm-up and decay do not fit into the updates of a schedule.

    planned: the schedule with its number of updates.
    """
    if planned.kind is ScheduleKind.CONSTANT:
        return
    assert planned.updates is not None
    decay = planned.decay_updates if planned.kind is ScheduleKind.WSD else None
    if warmup_updates + (decay or 1) > planned.updates:
        asked = f"{section}.warmup_updates is {warmup_updates}"
        if decay is not None:
            asked += f" and {section}.schedule.decay_updates {decay}"
        yield (
            f"{asked} with kind {planned.kind}, but the schedule has {planned.updates} updates "
            f"({section}.schedule.updates, or those of run.steps); expected room for warm-up and "
            f"decay; set {section}.schedule.updates or run.steps higher, or lower the first"
        )


def _check_loss(config: Config) -> Iterator[str]:
    loss = config.algorithm.loss
    is_over_old = loss.denominator is Denominator.OLD
    if loss.objective is Objective.DPPO_TV and loss.divergence_bound >= 1:
        yield (
            f"algorithm.loss.divergence_bound is {loss.divergence_bound:g} for dppo_tv, expected "
            "less than 1, the largest total variation; the paper has 0.15"
        )
    if loss.ratio is Ratio.SEQUENCE and loss.objective in _BY_TOKEN:
        yield (
            f"algorithm.loss.ratio is sequence with objective {loss.objective}, whose gate is of "
            "single tokens; expected ratio token, or one of ppo_clip, dual_clip, cispo, reinforce"
        )
    if loss.objective in _DPPO and is_over_old:
        yield (
            f"algorithm.loss.denominator is old with objective {loss.objective}, whose trust "
            "region is around the behaviour policy; expected denominator behaviour"
        )
    if loss.correction is not Correction.NONE and not is_over_old:
        yield (
            f"algorithm.loss.correction is {loss.correction} with denominator behaviour: the ratio "
            "already corrects for the sampler and would count twice; set denominator to old, or "
            "correction to none"
        )
    if loss.needs_reference and loss.kl.estimator is KlEstimator.K1 and not loss.kl.corrected:
        yield (
            "algorithm.loss.kl.estimator is k1 without importance correction: its gradient is 0 in "
            "expectation; weigh it by the ratio (kl.corrected), or choose k2 or k3"
        )


def _check_bands(config: Config) -> Iterator[str]:
    loss = config.algorithm.loss
    for name, band in (("token_band", loss.token_band), ("sequence_band", loss.sequence_band)):
        if band is not None and not (band[0] <= 1 <= band[1] and band[0] < band[1]):
            yield (
                f"algorithm.loss.{name} is {list(band)}, expected 0 < low <= 1 <= high and low < "
                "high, because a token whose probability has not changed has the ratio 1; widen it"
            )


def _check_unread_loss(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that was changed but has no effect."""
    loss, default = config.algorithm.loss, LossSettings()
    is_clipped = loss.objective in _CLIPPED
    uses = {
        "clip_low": (is_clipped, "objective ppo_clip, dual_clip or cispo"),
        "clip_high": (is_clipped, "objective ppo_clip, dual_clip or cispo"),
        "dual_clip": (loss.objective is Objective.DUAL_CLIP, "objective dual_clip"),
        "ratio_cap": (loss.objective in _CAPPED, "objective reinforce, dppo_tv or dppo_kl"),
        "sapo_tau_positive": (loss.objective is Objective.SAPO, "objective sapo"),
        "sapo_tau_negative": (loss.objective is Objective.SAPO, "objective sapo"),
        "divergence_bound": (loss.objective in _DPPO, "objective dppo_tv or _kl"),
        "correction_cap": (loss.correction is not Correction.NONE, "a correction"),
        "constant_tokens": (loss.aggregation is Aggregation.CONSTANT, "aggregation constant"),
        "kl": (loss.kl.coefficient > 0, "kl.coefficient above 0"),
    }
    for key, (is_used, user) in uses.items():
        if not is_used and getattr(loss, key) != getattr(default, key):
            yield (
                f"algorithm.loss.{key} is set, but objective {loss.objective} with the other "
                f"settings does not read it; expected it together with {user}: set that, or leave "
                "it out"
            )


def _check_reference(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.reference is not None and not algorithm.needs_reference:
        yield (
            f"algorithm.reference is {algorithm.reference}, but nothing is compared with it; set "
            "algorithm.loss.kl.coefficient above 0 or algorithm.reward.kl, or leave it out"
        )


def _check_budgets(config: Config) -> Iterator[str]:
    rollouts, context = config.rollouts, config.model.max_context_tokens
    if rollouts.max_tokens_per_turn >= context:
        yield (
            f"rollouts.max_tokens_per_turn is {rollouts.max_tokens_per_turn}, expected less than "
            f"model.max_context_tokens ({context}), which also holds the prompt; lower the first "
            "or raise the second"
        )
    max_items = config.queue.max_items_with(config.algorithm)
    if max_items < config.algorithm.rollouts_per_step:
        yield (
            f"queue.max_items is {max_items}, expected at least the "
            f"{config.algorithm.rollouts_per_step} rollouts of one step; raise it or leave it out"
        )


def _check_weights(config: Config) -> Iterator[str]:
    inference = config.inference
    if inference.weight_backend is not WeightBackend.COLLECTIVE:
        return
    if (config.trainer.device is Device.CPU) is not inference.is_on_cpu:
        yield (
            f"inference.weight_backend is collective with a trainer on {config.trainer.device} and "
            f"inference.gpus_per_replica {inference.gpus_per_replica:g}; expected both on CPU or "
            "both on GPUs, or object_store"
        )
    elif not inference.is_on_cpu and inference.gpus_per_replica % 1:
        yield (
            f"inference.weight_backend is collective with inference.gpus_per_replica "
            f"{inference.gpus_per_replica:g}; expected whole GPUs, since NCCL takes no two members "
            "on one; use object_store"
        )


def _check_blocks(config: Config) -> Iterator[str]:
    """Yield a contradiction if vLLM's attention on CPU refuses the block size.

    On a GPU the allowed sizes depend on the backend that vLLM chooses.
    """
    inference = config.inference
    tokens = inference.block_tokens
    if inference.is_on_cpu and tokens is not None and tokens % CPU_BLOCK_TOKENS:
        yield (
            f"inference.block_tokens is {tokens}, expected a multiple of {CPU_BLOCK_TOKENS} for "
            f"engines on CPU; set {max(1, tokens // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS}, or "
            "leave it out"
        )


def _check_adapters(config: Config) -> Iterator[str]:
    """Yield a sentence for each reason why vLLM cannot serve the adapters."""
    lora = config.trainer.published_lora
    if lora is None:
        return
    if lora.rank > ADAPTER_RANKS[-1]:
        yield (
            f"trainer.lora.rank is {lora.rank}, expected at most {ADAPTER_RANKS[-1]}, the largest "
            "that vLLM serves; lower it, or set trainer.lora.publish_merged: true"
        )
    if not config.inference.is_on_cpu and config.model.dtype is Dtype.FLOAT32:
        yield (
            "trainer.lora with model.dtype float32: vLLM's kernels for adapters on GPUs compute in "
            "16 bits; expected bfloat16; set model.dtype and trainer.dtype to bfloat16, or "
            "trainer.lora.publish_merged: true"
        )


def _check_engine_args(config: Config) -> Iterator[str]:
    return engine_args_problems(config.inference.engine_args)


def _check_gpus(config: Config) -> Iterator[str]:
    """Yield a sentence for each process that needs GPUs and has none, or does not use its GPUs."""
    inference, trainer = config.inference, config.trainer
    if (trainer.device is Device.CUDA) != (trainer.gpus_per_rank > 0):
        yield (
            f"trainer.device is {trainer.device} with trainer.gpus_per_rank "
            f"{trainer.gpus_per_rank:g}; expected more than 0 with cuda and 0 with cpu; a rank "
            "sees only the GPUs that are reserved for it: set gpus_per_rank to 1, or to 0 on cpu"
        )
    num_gpus = inference.tensor_parallel_size
    if num_gpus > 1 and inference.gpus_per_replica < num_gpus:
        yield (
            f"inference.tensor_parallel_size is {num_gpus} with inference.gpus_per_replica "
            f"{inference.gpus_per_replica:g}; expected at least as many GPUs; raise "
            "gpus_per_replica or set tensor_parallel_size to 1"
        )
    if trainer.num_ranks > 1 and 0 < trainer.gpus_per_rank < 1:
        yield (
            f"trainer.gpus_per_rank is {trainer.gpus_per_rank:g} with trainer.num_ranks "
            f"{trainer.num_ranks}: Ray would put two ranks on one GPU, which NCCL refuses; "
            "expected whole GPUs for more than one rank; set gpus_per_rank to 1, or num_ranks to 1"
        )
    for key, share in (
        ("inference.gpus_per_replica", inference.gpus_per_replica),
        ("trainer.gpus_per_rank", trainer.gpus_per_rank),
    ):
        if share > 1 and not share.is_integer():
            yield (
                f"{key} is {share:g}, expected a fraction below 1 or a whole number, as Ray "
                "reserves GPUs; round it"
            )
