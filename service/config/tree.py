"""The one configuration tree: `Config`, and those of its leaves that no component declares.

A leaf is the settings dataclass of the component that reads it: each setting is declared once, with
its default, its bounds and its description. Constructed directly nothing is checked; `file.py`
reads a tree from YAML and holds it to the bounds, `disagreements.py` has what several settings must
agree on, `preflight.py` checks a tree against the machine. Pure functions are given leaves, never
the tree. Nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import Field

from actors.algorithm import AlgorithmSettings, RewardSettings, ScheduleSettings
from actors.environment.settings import (
    CurriculumSettings,
    KeptTokens,
    PlayedEnvironment,
    RolloutSettings,
    Sampling,
    StopStrings,
    StructuredOutputs,
)
from actors.journal.record import GroupRule
from actors.limits import (
    STRICT,
    Fraction,
    Natural,
    NotNegative,
    Port,
    Positive,
    Rate,
    Seconds,
    Seed,
    Share,
    Temperature,
)
from actors.outcomes import Disposition, OutcomePolicy, OutcomeRule
from actors.trainer.settings import TrainerSettings
from actors.trajectory_queue.settings import QueueSettings
from actors.types import SESSION, TRUNCATIONS, UPLOADED, Dtype, Outcome
from service.access.keys import KeyLimits
from service.config.sessions import SessionSettings
from service.config.trackers import TrackerSettings
from service.inference.settings import InferenceSettings

HttpUrl = Annotated[str, Field(pattern=r"^(https?://\S+)?$")]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]

# It stands in names of files.
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How long a run is, its seed, and what is kept of it."""

    __pydantic_config__ = STRICT

    name: RunName = "run"
    """Name of the run, and the beginning of its directory's."""
    steps: Positive = 100
    """Training steps, which is also the last version."""
    seed: Seed = 0
    """Tasks, packing and initial sampling derive from it."""
    checkpoint_every: Positive = 20
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 2
    """The newest so many are kept."""
    keep_best: Natural = 0
    """How many of the best are kept in addition: by the evaluation of their step, else by its
    training reward; 0: none."""
    evaluate_every: Positive = 20
    """Steps between evaluations."""
    stop_at_reward: float | None = None
    """End once the mean return of five steps, scaled where known, is as high."""
    journal_steps: Natural = 200
    """Newest steps whose trajectories `rayloom inspect` can show; 0: none."""
    max_recoveries: Natural = 5
    """Returns to a checkpoint, or new supervisors, until a later checkpoint is committed."""
    orphan_timeout_s: Seconds = 60
    """Seconds without a sign of life of the run's supervisor, after which its engines and its API
    end; one that is started sooner takes them over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelSettings:
    """A model that Rayloom builds by itself, for a machine without a model hub."""

    __pydantic_config__ = STRICT

    seed: Seed = 0
    """Of the initial weights and the warm-up."""
    tie_word_embeddings: bool = True
    """Share embedding and output head."""
    warmup_steps: Natural | None = None
    """Format warm-up; null: the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The policy that is trained; exactly one of path and tiny."""

    __pydantic_config__ = STRICT

    path: str | None = None
    """Directory or hub name in Hugging Face format, or a GGUF file, which is converted once."""
    tiny: TinyModelSettings | None = None
    """Build the tiny model instead of a path."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: the path of a Jinja file, which is read when
    the run starts, or a template's text. The word none: raw prompts, for base models. Null: the
    tokenizer's own template."""
    dtype: Dtype = Dtype.FLOAT32
    """What the engines compute in."""
    max_context_tokens: Annotated[int, Ge(32)] = 2048
    """Prompt and answer of one trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksSettings:
    """What is played, in training and evaluation."""

    __pydantic_config__ = STRICT

    environment: str = ""
    """A registered name, or package.module:Class; session: agents outside play all, over HTTP.
    Empty: a mixture has them."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the environment is made with, by the name of its arguments."""
    file: Path | None = None
    """Of tasks, JSONL or Parquet; null, and no dataset: generated by the seed."""
    dataset: str | None = None
    """Rows with columns of their own: a JSONL, JSON, CSV or Parquet file, a directory, or a name on
    the Hugging Face hub."""
    subset: str | None = None
    """Which of several configurations of a data set, such as main."""
    split: str = "train"
    """Of a data set's directory, or of a hub's; a file is taken whole."""
    columns: dict[str, str | None] = field(default_factory=dict)
    """Which column of the data set is which entry of a task's data; null: that one is left out."""
    evaluation_split: str | None = None
    """Of the data set, for the evaluations; null: they hold tasks of the split itself out."""
    evaluation_tasks: Natural = 64
    """Kept for the evaluations; 0: no evaluation."""

    @property
    def place(self) -> Path | None:
        """Of the file or the data set; None: of neither, or a hub has it."""
        return _place(self.file, self.dataset)


def _given(settings: MemberRollouts | MemberEvaluation) -> dict[str, Any]:
    """What is not null, but for the table of outcomes."""
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    values.pop("outcomes", None)
    return {name: value for name, value in values.items() if value is not None}


def _place(file: Path | None, dataset: str | None) -> Path | None:
    if dataset is None:
        return file
    path = Path(dataset).expanduser()
    return path if path.exists() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSetSettings:
    """One more set of tasks that is evaluated, of the run's own environment."""

    __pydantic_config__ = STRICT

    file: Path | None = None
    """Of tasks, as tasks.file. No file, dataset or split: the run's own held-out tasks."""
    dataset: str | None = None
    """As tasks.dataset, which counts where only a split is named."""
    subset: str | None = None
    """Of `dataset`."""
    split: str | None = None
    """Of the data set; null: tasks.split."""
    columns: dict[str, str | None] | None = None
    """As tasks.columns, which count where none are named."""
    tasks: Positive | None = None
    """The first so many, by a hash of their ids; null: all."""
    samples: Positive = 1
    """Of each task."""
    temperature: NotNegative = 0.0
    """0: greedy, one sample."""
    top_p: Share = 1.0
    """Value of evaluation.top_p for this set; 1: all tokens."""
    top_k: Natural = 0
    """Value of evaluation.top_k for this set; 0: all tokens."""
    min_p: Fraction = 0.0
    """Value of evaluation.min_p for this set; 0: no minimum."""
    structured_outputs: StructuredOutputs | None = None
    """Value of evaluation.structured_outputs for this set; null: no constraint."""
    pass_reward: float = 1.0
    """As evaluation.pass_reward."""

    @property
    def place(self) -> Path | None:
        """Of its own file or data set; None: of neither, or a hub has it."""
        return _place(self.file, self.dataset)

    @property
    def sampling(self) -> Sampling:
        return _sampling(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How the held-out tasks are sampled, and what is kept of it."""

    __pydantic_config__ = STRICT

    samples: Positive = 1
    """Of each task: n of avg@n and majority@n; pass@k is told for the powers of two up to it."""
    temperature: NotNegative = 0.0
    """Of scheduled evaluations; 0: greedy, of which more than one sample would all be the same."""
    top_p: Share = 1.0
    """Sample among the likeliest tokens whose probabilities add up to this number; 1: among all
    tokens. Training always samples among all, because its loss needs a log-probability over all."""
    top_k: Natural = 0
    """Number of the likeliest tokens to sample among; 0: all tokens."""
    min_p: Fraction = 0.0
    """Lowest probability of a token that may be sampled, as a share of the likeliest token's; 0: no
    minimum."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the form of each reply; null: no constraint."""
    pass_reward: float = 1.0
    """A sample passes with so much of its return or more, in parts of the best possible one where
    the environment knows that."""
    keep_results: Natural = 20
    """Newest evaluations whose rollouts are kept, token by token, in RUN_DIR/evaluations; 0:
    none."""
    sets: dict[SetName, EvaluationSetSettings] = field(default_factory=dict)
    """More sets of tasks by name, each with its own sampling."""

    @property
    def sampling(self) -> Sampling:
        return _sampling(self)

    @property
    def all_settings(self) -> tuple[EvaluationSettings | EvaluationSetSettings, ...]:
        """These settings, followed by those of each set."""
        return (self, *self.sets.values())


def _sampling(settings: EvaluationSettings | EvaluationSetSettings) -> Sampling:
    """With the powers of two for pass@k: 1, 2, 4 of six samples."""
    return Sampling(
        num_samples=settings.samples,
        temperature=settings.temperature,
        kept=KeptTokens(
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            structured_outputs=settings.structured_outputs,
        ),
        pass_reward=settings.pass_reward,
        ks=tuple(1 << power for power in range(settings.samples.bit_length())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRollouts:
    """How one part of a mixture is played; null: as rollouts says."""

    __pydantic_config__ = STRICT

    temperature: Temperature | None = None
    """As rollouts.temperature."""
    stop: StopStrings | None = None
    """Value of rollouts.stop for this part; null: that of rollouts."""
    max_turns: Positive | None = None
    """As rollouts.max_turns."""
    max_tokens_per_turn: Positive | None = None
    """As rollouts.max_tokens_per_turn."""
    turn_deadline_s: Seconds | None = None
    """As rollouts.turn_deadline_s."""
    episode_deadline_s: Seconds | None = None
    """As rollouts.episode_deadline_s."""
    outcomes: dict[Outcome, OutcomeRule] = field(default_factory=dict)
    """Rows of the outcome table that differ here, laid over those of rollouts.outcomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvaluation:
    """How one part of a mixture is evaluated; null: as evaluation says."""

    __pydantic_config__ = STRICT

    samples: Positive | None = None
    """As evaluation.samples."""
    temperature: NotNegative | None = None
    """As evaluation.temperature."""
    top_p: Share | None = None
    """Value of evaluation.top_p for this part; null: that of evaluation."""
    top_k: Natural | None = None
    """Value of evaluation.top_k for this part; null: that of evaluation."""
    min_p: Fraction | None = None
    """Value of evaluation.min_p for this part; null: that of evaluation."""
    structured_outputs: StructuredOutputs | None = None
    """Value of evaluation.structured_outputs for this part; null: that of evaluation."""
    pass_reward: float | None = None
    """As evaluation.pass_reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureMember:
    """One of several environments or data sets of a run, under a name of its own."""

    __pydantic_config__ = STRICT

    weight: Rate = 1.0
    """Its share of the groups, beside the other weights."""
    tasks: TasksSettings
    """As the run's own section tasks."""
    rollouts: MemberRollouts = field(default_factory=MemberRollouts)
    evaluation: MemberEvaluation = field(default_factory=MemberEvaluation)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """What looks at a run's trajectories for reward hacking, beside its training."""

    __pydantic_config__ = STRICT

    hacking: bool = True
    """Tell of patterns of reward hacking in the journal of each step."""
    shadow: str | None = None
    """FILE.py:NAME of a second verifier, called as a reward function is: verified from 0.5 on. No
    reward comes of it."""
    shadow_samples: Positive = 16
    """Trajectories of each step that it is asked about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Where Prometheus reads the metrics."""

    __pydantic_config__ = STRICT

    host: str = "127.0.0.1"
    """Address that /metrics listens on."""
    port: Port = 0
    """Port of /metrics; 0: any free one."""
    stays_s: NotNegative = 0
    """Seconds that `rayloom train` stays after the end, so that its last values are scraped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Where OpenTelemetry traces of rollouts go."""

    __pydantic_config__ = STRICT

    endpoint: HttpUrl = ""
    """URL of a collector that speaks OTLP over HTTP, such as http://collector:4318/v1/traces;
    empty: no traces."""
    sample_ratio: Share = 1.0
    """Share of the rollouts that are traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """The HTTP API of `rayloom serve`."""

    __pydantic_config__ = STRICT

    host: str = "127.0.0.1"
    """Address that the HTTP API listens on."""
    port: Port = 8000
    """Port of the HTTP API; 0: any free one."""
    max_waiting_tasks: Positive = 1024
    """Tasks that are accepted and not yet admitted; more are refused with status 429."""
    max_waiting_mib: Positive = 256
    """MiB of these tasks; more are refused with status 429."""
    keep_ended_tasks: Positive = 10000
    """The newest so many tasks that are over can still be asked for."""
    keep_feed_entries: Positive = 200000
    """The newest so many entries of the feed can still be read; some 100 bytes each."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, beside those of loopback, that a Host header may have where the API listens there."""
    max_tasks_per_request: Positive = 256
    """Tasks of one request; more are refused."""
    max_samples_per_task: Positive = 256
    """Rollouts of one task."""
    max_body_kib: Positive = 1024
    """KiB of one request's body; more are refused."""
    key_limits: KeyLimits = field(default_factory=lambda: KeyLimits(requests_per_s=100))
    """Of each named key that was created without limits of its own."""
    public_url: HttpUrl = ""
    """Where agents reach the API, such as https://train.example.org; empty: under the name that the
    request which creates a session came for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Rayloom's configuration; a section's docstring is its description."""

    __pydantic_config__ = STRICT

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings
    tasks: TasksSettings = field(default_factory=TasksSettings)
    mixture: dict[SetName, MixtureMember] = field(default_factory=dict)
    """Several environments or data sets by name, in place of tasks."""
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
        """Whether environment actors play something: not where agents outside play all."""
        return self.tasks.environment != SESSION

    @property
    def members(self) -> dict[str, Config]:
        """What is played, by the name that tasks have as their environment: the parts of the
        mixture, each as a configuration of its own; or this one."""
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
    def environments(self) -> dict[str, PlayedEnvironment]:
        """What environment actors play, by the name that tasks have."""
        return {
            name: PlayedEnvironment(
                environment=each.tasks.environment,
                options=each.tasks.options,
                rollouts=each.rollouts,
            )
            for name, each in self.members.items()
        }

    @property
    def task_places(self) -> dict[str, Path]:
        """Files and directories of tasks that lie here, by the key that names them."""
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
        """Whether the engines need the text of what they sample, for stop strings or structured
        outputs."""
        return any(
            each.rollouts.stop or any(s.structured_outputs for s in each.evaluation.all_settings)
            for each in (self, *self.members.values())
        )

    @property
    def num_environment_actors(self) -> int:
        return self.rollouts.num_actors if self.has_environment else 0

    @property
    def outcome_policy(self) -> OutcomePolicy:
        """The run's own rows of the outcome table, laid over a critic's, over the default ones."""
        algorithm = self.algorithm
        of_critic = {}
        if algorithm.has_critic:
            of_critic = dict.fromkeys(TRUNCATIONS, algorithm.critic.truncation_rule)
        return OutcomePolicy(overrides={**of_critic, **self.rollouts.outcomes})

    @property
    def policies(self) -> dict[str, OutcomePolicy]:
        """By environment. A session ends once: its agent cannot be asked to play again. Nor can who
        uploads a trajectory."""
        once = self.outcome_policy.without_retries()
        members = {name: each.outcome_policy for name, each in self.members.items()}
        return {**members, SESSION: once, UPLOADED: once}

    @property
    def temperatures(self) -> dict[str, float]:
        """At which training samples, by environment; agents outside are given the run's own."""
        members = {name: each.rollouts.temperature for name, each in self.members.items()}
        return {**members, **dict.fromkeys((SESSION, UPLOADED), self.rollouts.temperature)}

    @property
    def policy_schedule(self) -> ScheduleSettings:
        """trainer.schedule with `updates` filled in: if null, the updates of run.steps."""
        return self._planned(self.trainer.schedule, self.algorithm.updates_per_step)

    @property
    def critic_schedule(self) -> ScheduleSettings:
        """algorithm.critic.schedule with `updates` filled in: if null, run.steps, because a critic
        makes one update per step."""
        return self._planned(self.algorithm.critic.schedule, 1)

    def _planned(self, schedule: ScheduleSettings, updates_per_step: int) -> ScheduleSettings:
        return replace(schedule, updates=schedule.updates or self.run.steps * updates_per_step)

    @property
    def group_rule(self) -> GroupRule | None:
        """How the audit computes a group's advantages again.

        None where its returns do not tell: they are shaped, or weighed over the step.
        """
        algorithm = self.algorithm
        rules = [r for each in self.members.values() for r in each.rollouts.outcomes.values()]
        is_plain = (
            algorithm.turn_discount is None
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
