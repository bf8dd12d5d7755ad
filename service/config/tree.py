"""The configuration tree `Config`, and the settings that no component declares.

Most sections are settings dataclasses of the components that read them: each setting is declared
once, with its default, its bounds and its description. Constructing such a dataclass checks
nothing: `file.py` reads a tree from YAML and checks the bounds, `disagreements.py` checks settings
against each other, and `preflight.py` checks a tree against the machine. Pure functions receive
sections, never the tree. This module imports nothing slow.
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
    EnvironmentSettings,
    KeptTokens,
    RolloutSettings,
    Sampling,
    StopStrings,
    StructuredOutputs,
)
from actors.journal.files import GroupRule
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
# An address of fsspec's, without a user and a password, which would be in the run's files.
RemoteUrl = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s@?#]+$")]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]

# The name is part of file names.
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Length of a run, its seed, and how much of it is kept."""

    __pydantic_config__ = STRICT

    name: RunName = "run"
    """Name of the run; the name of its directory begins with it."""
    steps: Positive = 100
    """Training steps; also the number of the last policy version."""
    seed: Seed = 0
    """Seed of the tasks, of packing and of the initial sampling."""
    checkpoint_every: Positive = 20
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 2
    """Number of the newest checkpoints to keep."""
    keep_best: Natural = 0
    """Number of the best checkpoints to keep too, by the mean return of the evaluation at their
    step. Checkpoints without an evaluation rank last, by the mean training return. 0: none.
    """
    checkpoint_url: RemoteUrl | None = None
    """Address to which each checkpoint is copied with the run's database, such as
    s3://bucket/runs/one; each run needs an address of its own. Null: checkpoints stay in the run's
    directory.
    """
    evaluate_every: Positive = 20
    """Steps between evaluations."""
    stop_at_reward: float | None = None
    """The run ends when the mean return of the last five steps reaches this value. The returns are
    divided by the best possible return if that is known. Null: the run does not end early.
    """
    journal_steps: Natural = 200
    """Number of the newest steps whose trajectories `rayloom inspect` can show; 0: none."""
    journal_gib: Rate = 20
    """Limit on the size of the journal in GiB: above it the oldest steps are removed, but never the
    newest step. A run can resume without the removed steps.
    """
    max_recoveries: Natural = 5
    """Maximum number of returns to a checkpoint, and of new supervisors, until a later checkpoint
    is committed.
    """
    orphan_timeout_s: Seconds = 60
    """Seconds without a sign of life from the run's supervisor after which its engines and its API
    end; a supervisor that starts sooner takes the engines and the API over.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelSettings:
    """A model that Rayloom builds itself, for a machine without a model hub."""

    __pydantic_config__ = STRICT

    seed: Seed = 0
    """Seed of the initial weights and the warm-up."""
    tie_word_embeddings: bool = True
    """Whether the embedding and the output head share weights."""
    warmup_steps: Natural | None = None
    """Steps of the warm-up that teaches the model the form of an answer; null: the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The policy that is trained; set exactly one of path and tiny."""

    __pydantic_config__ = STRICT

    path: str | None = None
    """Directory, hub name or address (s3://bucket/directory) of a model in Hugging Face format,
    or a GGUF file. An address is downloaded once, and a GGUF file is converted once.
    """
    tiny: TinyModelSettings | None = None
    """Settings of the tiny model, which is built instead of loading a path."""
    chat_template: str | None = None
    """Chat template instead of the tokenizer's own: the path of a Jinja file, which is read when
    the run starts, or a template's text. The word none: raw prompts, for base models. Null: the
    tokenizer's own template.
    """
    dtype: Dtype = Dtype.FLOAT32
    """Data type in which the engines compute."""
    max_context_tokens: Annotated[int, Ge(32)] = 2048
    """Largest number of tokens of a trajectory, prompt and answers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksSettings:
    """The tasks of training and evaluation, and the environment that plays them."""

    __pydantic_config__ = STRICT

    environment: str = ""
    """A registered name, or package.module:Class; session: external agents play all tasks, over
    HTTP. Empty: the parts of a mixture name their environments.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments with which the environment is made, by name."""
    file: Path | None = None
    """File of tasks, JSONL or Parquet. If `file` and `dataset` are null, tasks are generated from
    the seed."""
    dataset: str | None = None
    """Data set whose rows have columns of its own: a JSONL, JSON, CSV or Parquet file, a directory,
    or a name on the Hugging Face hub.
    """
    subset: str | None = None
    """Name of one of several configurations of a data set, such as main."""
    split: str = "train"
    """Split of a data set's directory or of a hub's data set; a file is read completely."""
    columns: dict[str, str | None] = field(default_factory=dict)
    """Column of the data set for each entry of a task's data; null: the entry is left out."""
    evaluation_split: str | None = None
    """Split of the data set for the evaluations; null: evaluations hold out tasks of `split`."""
    evaluation_tasks: Natural = 64
    """Number of tasks held out for the evaluations; 0: no evaluation."""

    @property
    def place(self) -> Path | None:
        """Path of the file or the local data set, if there is one; None for a data set on a hub."""
        return _place(self.file, self.dataset)


def _given(settings: MemberRollouts | MemberEvaluation) -> dict[str, Any]:
    """Return the settings of a section that are not null, except the table of outcomes."""
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
    """One more set of tasks to evaluate, in the run's own environment."""

    __pydantic_config__ = STRICT

    file: Path | None = None
    """File of tasks, as for tasks.file. No file, dataset or split: the run's own held-out tasks."""
    dataset: str | None = None
    """Data set, as for tasks.dataset; null with a split: the data set of tasks.dataset."""
    subset: str | None = None
    """Configuration of the data set, as for tasks.subset."""
    split: str | None = None
    """Split of the data set; null: tasks.split."""
    columns: dict[str, str | None] | None = None
    """Columns, as for tasks.columns; null: the value of tasks.columns."""
    tasks: Positive | None = None
    """Number of tasks, chosen by a hash of their ids; null: all."""
    samples: Positive = 1
    """Samples of each task."""
    temperature: NotNegative = 0.0
    """Sampling temperature; 0: greedy, one sample."""
    top_p: Share = 1.0
    """Value of evaluation.top_p for this set; 1: all tokens."""
    top_k: Natural = 0
    """Value of evaluation.top_k for this set; 0: all tokens."""
    min_p: Fraction = 0.0
    """Value of evaluation.min_p for this set; 0: no minimum."""
    structured_outputs: StructuredOutputs | None = None
    """Value of evaluation.structured_outputs for this set; null: no constraint."""
    pass_reward: float = 1.0
    """Value of evaluation.pass_reward for this set."""

    @property
    def place(self) -> Path | None:
        """Path of the set's own file or local data set; None if the set has neither."""
        return _place(self.file, self.dataset)

    @property
    def sampling(self) -> Sampling:
        return _sampling(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Sampling of the held-out tasks, and the number of results that are kept."""

    __pydantic_config__ = STRICT

    samples: Positive = 1
    """Samples of each task: the n of avg@n and majority@n; pass@k is reported for the powers of two
    up to n.
    """
    temperature: NotNegative = 0.0
    """Sampling temperature of scheduled evaluations; 0: greedy, where all samples of a task are
    equal.
    """
    top_p: Share = 1.0
    """Sample only from the likeliest tokens whose probabilities add up to this number; 1: from all
    tokens. Training always samples from all tokens, because the loss needs the log-probabilities of
    all tokens.
    """
    top_k: Natural = 0
    """Number of the likeliest tokens to sample from; 0: all tokens."""
    min_p: Fraction = 0.0
    """Lowest probability of a token that may be sampled, as a share of the likeliest token's
    probability; 0: no minimum.
    """
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the form of each reply; null: no constraint."""
    pass_reward: float = 1.0
    """Smallest return with which a sample passes, as a share of the best possible return if that
    is known.
    """
    keep_results: Natural = 20
    """Number of the newest evaluations whose rollouts are kept with all tokens in
    RUN_DIR/evaluations; 0: none.
    """
    sets: dict[SetName, EvaluationSetSettings] = field(default_factory=dict)
    """More sets of tasks by name, each with its own sampling."""

    @property
    def sampling(self) -> Sampling:
        return _sampling(self)

    @property
    def all_settings(self) -> tuple[EvaluationSettings | EvaluationSetSettings, ...]:
        """The run's own evaluation settings, followed by those of each set."""
        return (self, *self.sets.values())


def _sampling(settings: EvaluationSettings | EvaluationSetSettings) -> Sampling:
    """Convert an evaluation's settings to `Sampling`; the k of pass@k are the powers of two."""
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
    """Settings of `rollouts` for one part of a mixture; null keeps the value of `rollouts`."""

    __pydantic_config__ = STRICT

    temperature: Temperature | None = None
    """Value of rollouts.temperature for this part; null: the value in rollouts."""
    stop: StopStrings | None = None
    """Value of rollouts.stop for this part; null: the value in rollouts."""
    max_turns: Positive | None = None
    """Value of rollouts.max_turns for this part; null: the value in rollouts."""
    max_tokens_per_turn: Positive | None = None
    """Value of rollouts.max_tokens_per_turn for this part; null: the value in rollouts."""
    turn_deadline_s: Seconds | None = None
    """Value of rollouts.turn_deadline_s for this part; null: the value in rollouts."""
    episode_deadline_s: Seconds | None = None
    """Value of rollouts.episode_deadline_s for this part; null: the value in rollouts."""
    outcomes: dict[Outcome, OutcomeRule] = field(default_factory=dict)
    """Rows of the outcome table that replace the rows of rollouts.outcomes in this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvaluation:
    """Settings of `evaluation` for one part of a mixture; null keeps the value of `evaluation`."""

    __pydantic_config__ = STRICT

    samples: Positive | None = None
    """Value of evaluation.samples for this part; null: the value in evaluation."""
    temperature: NotNegative | None = None
    """Value of evaluation.temperature for this part; null: the value in evaluation."""
    top_p: Share | None = None
    """Value of evaluation.top_p for this part; null: the value in evaluation."""
    top_k: Natural | None = None
    """Value of evaluation.top_k for this part; null: the value in evaluation."""
    min_p: Fraction | None = None
    """Value of evaluation.min_p for this part; null: the value in evaluation."""
    structured_outputs: StructuredOutputs | None = None
    """Value of evaluation.structured_outputs for this part; null: the value in evaluation."""
    pass_reward: float | None = None
    """Value of evaluation.pass_reward for this part; null: the value in evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureMember:
    """One of several environments or data sets of a run, under a name of its own."""

    __pydantic_config__ = STRICT

    weight: Rate = 1.0
    """Weight of this part: it gets weight / (sum of all weights) of the groups."""
    tasks: TasksSettings
    """Tasks of this part, with the settings of the run's own section tasks."""
    rollouts: MemberRollouts = field(default_factory=MemberRollouts)
    evaluation: MemberEvaluation = field(default_factory=MemberEvaluation)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """Search for reward hacking in a run's trajectories, concurrently with training."""

    __pydantic_config__ = STRICT

    hacking: bool = True
    """Report patterns of reward hacking in the journal of each step."""
    shadow: str | None = None
    """FILE.py:NAME of a second verifier, which is called like a reward function; a score of at
    least 0.5 verifies a trajectory. The verifier changes no reward. Null: there is none.
    """
    shadow_samples: Positive = 16
    """Trajectories of each step that the second verifier scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Address at which Prometheus reads the metrics."""

    __pydantic_config__ = STRICT

    host: str = "127.0.0.1"
    """Address at which /metrics listens."""
    port: Port = 0
    """Port of /metrics; 0: any free port."""
    stays_s: NotNegative = 0
    """Seconds that `rayloom train` waits after the end, so that the last values are scraped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """OpenTelemetry traces of rollouts, and where they are sent."""

    __pydantic_config__ = STRICT

    endpoint: HttpUrl = ""
    """URL of a collector for OTLP over HTTP, such as http://collector:4318/v1/traces; empty: no
    traces.
    """
    sample_ratio: Share = 1.0
    """Share of the rollouts that are traced, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """The HTTP API of `rayloom serve`."""

    __pydantic_config__ = STRICT

    host: str = "127.0.0.1"
    """Address at which the HTTP API listens."""
    port: Port = 8000
    """Port of the HTTP API; 0: any free port."""
    max_waiting_tasks: Positive = 1024
    """Maximum number of tasks that wait for admission; more tasks are refused with status 429."""
    max_waiting_mib: Positive = 256
    """Maximum total size of the waiting tasks in MiB; more tasks are refused with status 429."""
    keep_ended_tasks: Positive = 10000
    """Number of the newest ended tasks that clients can still read."""
    keep_feed_entries: Positive = 200000
    """Number of the newest entries of the feed that clients can still read; about 100 bytes
    each.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Names that a Host header may have if the API listens on loopback, in addition to localhost
    and loopback addresses.
    """
    max_tasks_per_request: Positive = 256
    """Maximum number of tasks in a request."""
    max_samples_per_task: Positive = 256
    """Maximum number of rollouts of a task."""
    max_body_kib: Positive = 1024
    """Maximum size of a request's body in KiB."""
    key_limits: KeyLimits = field(default_factory=lambda: KeyLimits(requests_per_s=100))
    """Limits of each named key that was created without its own limits."""
    public_url: HttpUrl = ""
    """URL at which agents reach the API, such as https://train.example.org; empty: the host name of
    the request that creates a session.
    """


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
        """The configuration of each environment, by the environment's name in its tasks.

        A mixture has one configuration for each part; without a mixture, there is only this one.
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
        """Environments that actors play, by the environment's name in its tasks."""
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
        """Local files and directories of tasks, by the key that names them."""
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
        """The outcome table: the defaults, replaced by a critic's rows, then by the run's rows."""
        algorithm = self.algorithm
        of_critic = {}
        if algorithm.has_critic:
            of_critic = dict.fromkeys(TRUNCATIONS, algorithm.critic.truncation_rule)
        return OutcomePolicy(overrides={**of_critic, **self.rollouts.outcomes})

    @property
    def policies(self) -> dict[str, OutcomePolicy]:
        """Outcome rules by environment.

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
        """The schedule of the policy's learning rate; null `updates` become the run's updates."""
        return self._planned(self.trainer.schedule, self.algorithm.updates_per_step)

    @property
    def critic_schedule(self) -> ScheduleSettings:
        """The schedule of the critic's learning rate; null `updates` become run.steps.

        A critic makes one update in each step.
        """
        return self._planned(self.algorithm.critic.schedule, 1)

    def _planned(self, schedule: ScheduleSettings, updates_per_step: int) -> ScheduleSettings:
        return replace(schedule, updates=schedule.updates or self.run.steps * updates_per_step)

    @property
    def group_rule(self) -> GroupRule | None:
        """The rule with which the audit recomputes a group's advantages from the returns.

        None if a group's returns do not determine its advantages, for example because rewards are
        shaped or advantages are normalised over the step.
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
