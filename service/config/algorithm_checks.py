"""Find contradictions among the settings of the algorithm and its schedules."""

from __future__ import annotations

from collections.abc import Iterator

from actors.algorithm import (
    CriticSettings,
    LossSettings,
    Objective,
    Scale,
    ScheduleSettings,
)
from actors.outcomes import Disposition
from actors.types import TRUNCATIONS, Outcome
from service.config.tree import Config

_OUT = frozenset({Disposition.MASK, Disposition.DROP})
_CLIPPED = frozenset({Objective.PPO_CLIP, Objective.DUAL_CLIP, Objective.CISPO})
_DPPO = frozenset({Objective.DPPO_TV, Objective.DPPO_KL})
_CAPPED = _DPPO | {Objective.REINFORCE}
# Objectives whose ratio is computed by token; with a ratio by trajectory they would be other
# algorithms.
_BY_TOKEN = _DPPO | {Objective.SAPO}


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
            f"group_size {algorithm.group_size}; lower it, or remove the setting"
        )
    if (algorithm.min_usable_samples or algorithm.min_group_size) < algorithm.min_group_size:
        yield (
            f"algorithm.min_usable_samples is {algorithm.min_usable_samples}, less than "
            f"min_group_size {algorithm.min_group_size}: groups would close too small to be "
            "trained; raise the first or lower the second"
        )
    if algorithm.turn_discount is not None and config.rollouts.max_turns == 1:
        yield (
            f"algorithm.turn_discount is {algorithm.turn_discount:g} with rollouts.max_turns 1: "
            "there is no later turn to discount; remove turn_discount, or allow more turns"
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
                "to its end would be thrown away and played again; expected 0; remove max_retries"
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
            "expected 0; choose a group baseline, or set it to 0"
        )
    if algorithm.turn_discount is not None:
        found.append(
            got + "turn_discount: equal returns that fell to different turns are a signal there; "
            "expected only one of these settings; remove the other"
        )
    return found


def _check_scale(config: Config) -> Iterator[str]:
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
    if (critic.truncation == "penalty") != (critic.truncation_penalty > 0):
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


def check_schedules(config: Config) -> Iterator[str]:
    trainer, critic = config.trainer, config.algorithm.critic
    yield from _check_schedule("trainer", trainer.schedule)
    yield from _check_decay("trainer", trainer.warmup_updates, config.policy_schedule)
    if config.algorithm.has_critic:
        yield from _check_schedule("algorithm.critic", critic.schedule)
        yield from _check_decay("algorithm.critic", critic.warmup_updates, config.critic_schedule)


def schedule_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each constant learning rate whose warm-up is longer than the run.

    The run would never reach such a learning rate.
    """
    trainer, critic = config.trainer, config.algorithm.critic
    planned = [("trainer", trainer.warmup_updates, config.policy_schedule)]
    if config.algorithm.has_critic:
        planned.append(("algorithm.critic", critic.warmup_updates, config.critic_schedule))
    for section, warmup, schedule in planned:
        assert schedule.updates is not None
        if schedule.kind == "constant" and warmup > schedule.updates:
            yield (
                f"{section}.warmup_updates is {warmup}, and the run has {schedule.updates} "
                f"updates, so that the learning rate stays below {section}.learning_rate; expected "
                f"at most {schedule.updates}; lower it, or raise the number of steps"
            )


def _check_loss(config: Config) -> Iterator[str]:
    loss = config.algorithm.loss
    is_over_old = loss.denominator == "old"
    if loss.objective is Objective.DPPO_TV and loss.divergence_bound >= 1:
        yield (
            f"algorithm.loss.divergence_bound is {loss.divergence_bound:g} for dppo_tv, expected "
            "less than 1, the largest total variation; the paper has 0.15"
        )
    if loss.ratio == "sequence" and loss.objective in _BY_TOKEN:
        yield (
            f"algorithm.loss.ratio is sequence with objective {loss.objective}, whose gate is of "
            "single tokens; expected ratio token, or one of ppo_clip, dual_clip, cispo, reinforce"
        )
    if loss.objective in _DPPO and is_over_old:
        yield (
            f"algorithm.loss.denominator is old with objective {loss.objective}, whose trust "
            "region is around the behaviour policy; expected denominator behaviour"
        )
    if loss.correction != "none" and not is_over_old:
        yield (
            f"algorithm.loss.correction is {loss.correction} with denominator behaviour: the ratio "
            "already corrects for the sampler and would count twice; set denominator to old, or "
            "correction to none"
        )
    if loss.needs_reference and loss.kl.estimator == "k1" and not loss.kl.corrected:
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
        "correction_cap": (loss.correction != "none", "a correction"),
        "constant_tokens": (loss.aggregation == "constant", "aggregation constant"),
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
            "algorithm.loss.kl.coefficient above 0 or algorithm.reward.kl, or remove the setting"
        )


def _check_schedule(section: str, schedule: ScheduleSettings) -> Iterator[str]:
    key, kind, default = f"{section}.schedule", schedule.kind, ScheduleSettings()
    is_wsd = kind == "wsd"
    if kind == "constant":
        for name in ("updates", "min_ratio"):
            if getattr(schedule, name) != getattr(default, name):
                yield (
                    f"{key}.{name} is {getattr(schedule, name)} with kind constant, which does "
                    f"not decay; expected kind linear, cosine or wsd; set {key}.kind, or leave "
                    f"{name} out"
                )
    if is_wsd and schedule.decay_updates is None:
        yield (
            f"{key}.decay_updates is null with kind wsd; expected the number of updates at the end "
            "in which the rate decays; set it, for example to a tenth of the updates, or choose "
            "kind linear, which decays from the warm-up on"
        )
    if not is_wsd and schedule.decay_updates is not None:
        yield (
            f"{key}.decay_updates is {schedule.decay_updates} with kind {kind}, which does not "
            f"read it; expected null; set {key}.kind to wsd, or leave decay_updates out"
        )


def _check_decay(section: str, warmup_updates: int, planned: ScheduleSettings) -> Iterator[str]:
    """Yield a contradiction if warm-up and decay have more updates than the schedule."""
    if planned.kind == "constant":
        return
    assert planned.updates is not None
    decay = planned.decay_updates if planned.kind == "wsd" else None
    if warmup_updates + (decay or 1) > planned.updates:
        asked = f"{section}.warmup_updates is {warmup_updates}"
        if decay is not None:
            asked += f" and {section}.schedule.decay_updates {decay}"
        yield (
            f"{asked} with kind {planned.kind}, but the schedule has {planned.updates} updates "
            f"({section}.schedule.updates, or the updates of run.steps steps); expected room for "
            f"warm-up and decay; raise {section}.schedule.updates or run.steps, or lower "
            f"{section}.warmup_updates"
        )


ALGORITHM_CHECKS = (
    _check_groups,
    _check_rules,
    _check_reward,
    _check_ends,
    _check_refills,
    _check_scale,
    _check_state_credit,
    _check_critic,
    check_schedules,
    _check_loss,
    _check_bands,
    _check_unread_loss,
    _check_reference,
)
