"""The configuration tree `Config`, and the settings of a run's parts that derive from it.

Each section is a dataclass, in `sections.py` or beside the component that reads it. Constructing a
tree or a section checks nothing. `file.py` reads a tree from YAML and checks the bounds.
`disagreements.py` checks settings against each other, and `preflight.py` checks them against the
machine. Pure functions receive sections, never the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from actors.algorithm import AlgorithmSettings, RewardSettings, ScheduleSettings
from actors.environment.settings import CurriculumSettings, EnvironmentSettings, RolloutSettings
from actors.expert_records import ModelShape
from actors.journal.files import GroupRule
from actors.limits import STRICT
from actors.merge.settings import StepSettings
from actors.outcomes import Disposition, OutcomePolicy
from actors.trainer.settings import RankSettings, TrainerSettings
from actors.trajectory_queue.settings import QueueSettings
from actors.types import SESSION, TRUNCATIONS, UPLOADED
from service.config.sections import (
    AuditSettings,
    EvaluationSetSettings,
    EvaluationSettings,
    MemberEvaluation,
    MemberRollouts,
    MetricsSettings,
    MixtureMember,
    ModelSettings,
    RunSettings,
    ServiceSettings,
    SessionSettings,
    SetName,
    TasksSettings,
    TracingSettings,
    TrackerSettings,
)
from service.inference.settings import InferenceSettings


def _given(settings: MemberRollouts | MemberEvaluation) -> dict[str, Any]:
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    values.pop("outcomes", None)
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Rayloom's configuration; the docstring of a section's class is the section's description."""

    __pydantic_config__ = STRICT

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings
    tasks: TasksSettings = field(default_factory=TasksSettings)
    mixture: dict[SetName, MixtureMember] = field(default_factory=dict)
    """Several environments or data sets by name, instead of tasks."""
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    inference: InferenceSettings = field(default_factory=InferenceSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    trackers: TrackerSettings = field(default_factory=TrackerSettings)
    service: ServiceSettings = field(default_factory=ServiceSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)

    @property
    def has_environment(self) -> bool:
        """Whether environment actors play tasks; False if external agents play all of them."""
        return self.tasks.environment != SESSION

    @property
    def members(self) -> dict[str, Config]:
        """The configuration of each environment, by the environment's name in `Task.environment`.

        If the section `mixture` names several environments or data sets, each name has its own
        configuration. Otherwise the only configuration is `self`.
        """
        if not self.mixture:
            return {self.tasks.environment: self}
        return {name: self._of_member(each) for name, each in self.mixture.items()}

    def _of_member(self, member: MixtureMember) -> Config:
        rollouts = replace(
            self.rollouts,
            **_given(member.rollouts),
            outcomes={**self.rollouts.outcomes, **member.rollouts.outcomes},
        )
        evaluation = replace(self.evaluation, **_given(member.evaluation))
        return replace(
            self,
            tasks=member.tasks,
            mixture={},
            curriculum=CurriculumSettings(),
            rollouts=rollouts,
            evaluation=evaluation,
        )

    @property
    def environments(self) -> dict[str, EnvironmentSettings]:
        """Settings of each environment that actors play, by `Task.environment`."""
        return {
            name: EnvironmentSettings(
                environment=each.tasks.environment,
                options=each.tasks.options,
                rollouts=each.rollouts,
            )
            for name, each in self.members.items()
        }

    @property
    def task_places(self) -> dict[str, Path]:
        """Local task files and data sets, by the setting that names each.

        Example: {"evaluation.sets.hard.file": Path("hard.jsonl")}
        """
        named: dict[str, TasksSettings | EvaluationSetSettings] = {"tasks": self.tasks}
        named |= {f"mixture.{name}.tasks": each.tasks for name, each in self.mixture.items()}
        named |= {f"evaluation.sets.{name}": each for name, each in self.evaluation.sets.items()}
        return {
            f"{key}.{'file' if each.dataset is None else 'dataset'}": place
            for key, each in named.items()
            if (place := each.place) is not None
        }

    @property
    def engine_reads_text(self) -> bool:
        """Whether the engines need text besides tokens, for stop strings or structured outputs."""
        return any(
            each.rollouts.stop or any(s.structured_outputs for s in each.evaluation.all_settings)
            for each in (self, *self.members.values())
        )

    @property
    def num_environment_actors(self) -> int:
        return self.rollouts.num_actors if self.has_environment else 0

    @property
    def outcome_policy(self) -> OutcomePolicy:
        """The rules that decide by a rollout's outcome whether it is retried and how it is trained.

        The rule for an outcome is the first that exists:
        1. the rule in `rollouts.outcomes`,
        2. for truncated rollouts of a run with a critic, `algorithm.critic.truncation_rule`,
        3. the outcome's default rule.
        """
        algorithm = self.algorithm
        of_critic = {}
        if algorithm.has_critic:
            of_critic = dict.fromkeys(TRUNCATIONS, algorithm.critic.truncation_rule)
        return OutcomePolicy(overrides={**of_critic, **self.rollouts.outcomes})

    @property
    def policies(self) -> dict[str, OutcomePolicy]:
        """The rules of `outcome_policy` for each environment, by the environment's name.

        Sessions and uploads have no retries, because their clients cannot be made to play again.
        """
        once = self.outcome_policy.without_retries()
        members = {name: each.outcome_policy for name, each in self.members.items()}
        return {**members, SESSION: once, UPLOADED: once}

    @property
    def temperatures(self) -> dict[str, float]:
        """Training temperature by environment; sessions and uploads use rollouts.temperature."""
        members = {name: each.rollouts.temperature for name, each in self.members.items()}
        return {**members, **dict.fromkeys((SESSION, UPLOADED), self.rollouts.temperature)}

    @property
    def policy_schedule(self) -> ScheduleSettings:
        """The schedule of the policy's learning rate.

        If its `updates` is null, the number of the policy's updates in the run is filled in.
        """
        return self._planned(self.trainer.schedule, self.algorithm.updates_per_step)

    @property
    def critic_schedule(self) -> ScheduleSettings:
        """The schedule of the critic's learning rate.

        If its `updates` is null, run.steps is filled in: a critic makes one update in each step.
        """
        return self._planned(self.algorithm.critic.schedule, 1)

    def _planned(self, schedule: ScheduleSettings, updates_per_step: int) -> ScheduleSettings:
        return replace(schedule, updates=schedule.updates or self.run.steps * updates_per_step)

    def step_settings(self, *, shape: ModelShape | None = None) -> StepSettings:
        """Return the settings of the merge actor.

        shape: shape of the trained model; if None, samples are not checked against a shape.
        """
        return StepSettings(
            algorithm=self.algorithm,
            trainer=self.trainer,
            max_context_tokens=self.model.max_context_tokens,
            seed=self.run.seed,
            policies=self.policies,
            temperatures=self.temperatures,
            shape=shape,
        )

    def rank_settings(self, *, model: str, checkpoint_dir: Path) -> RankSettings:
        """Return the settings of the trainer's ranks.

        If a learning-rate schedule leaves `updates` null, the run's number of updates is filled in.
        """
        critic = replace(self.algorithm.critic, schedule=self.critic_schedule)
        return RankSettings(
            trainer=replace(self.trainer, schedule=self.policy_schedule),
            algorithm=replace(self.algorithm, critic=critic),
            model=model,
            chat_template=self.model.chat_template,
            checkpoint_dir=checkpoint_dir,
            weight_backend=self.inference.weight_backend,
            max_context_tokens=self.model.max_context_tokens,
            seed=self.run.seed,
        )

    @property
    def group_rule(self) -> GroupRule | None:
        """The rule by which the audit computes a group's advantages again from the returns.

        None if the advantages depend on more than the group's returns, for example because rewards
        are shaped or advantages are normalised over the step.
        """
        algorithm = self.algorithm
        rules = [r for each in self.members.values() for r in each.rollouts.outcomes.values()]
        is_plain = (
            algorithm.turn_discount is None
            and algorithm.state_credit is None
            and not algorithm.normalise_advantages
            and not algorithm.has_critic
            and algorithm.reward == RewardSettings()
            and not any(rule.disposition is Disposition.TRAIN_PENALISED for rule in rules)
        )
        if not is_plain:
            return None
        return GroupRule(
            baseline=algorithm.baseline,
            scale=algorithm.scale,
            trains_without_signal=algorithm.trains_without_signal,
        )
