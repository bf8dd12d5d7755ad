"""The sections of a configuration that do not belong to a single component.

The other settings are declared in the modules of their components.
Each setting is declared once, with its default, its bounds and its description. This module imports
nothing slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import Field

from actors.environment.settings import KeptTokens, Sampling, StopStrings, StructuredOutputs
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
from actors.outcomes import OutcomeRule
from actors.types import Dtype, Outcome
from service.access.keys import KeyLimits

HttpUrl = Annotated[str, Field(pattern=r"^(https?://\S+)?$")]
# An address of fsspec's, without a user and a password, which would be in the run's files.
RemoteUrl = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s@?#]+$")]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
# The name is part of file names.
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
NonEmpty = Annotated[str, MinLen(1)]
# A URL without a user and a password, which would be in the run's files.
TrackerUrl = Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/\S*)?$")]
Titles = Literal["train", "leave_out"]
"""How to treat a turn that only names a conversation (a `title` in docs/semantics.md)."""
Unsupported = Literal["refuse", "ignore"]
SystemMessages = Literal["merge", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Length of a run, its seed, and which of its checkpoints and trajectories are kept."""

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
    divided by the best possible return if that is known. If only some environments of a mixture
    know it, the run does not end early. Null: the run does not end early.
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
    """Split of a data set's directory or of a hub's data set; a single file has only train."""
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
    """Split of the data set; null: tasks.split, or train for a single file."""
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
    """Return the `Sampling` of an evaluation, with pass@k for each power of two up to `samples`."""
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
class WandbSettings:
    """A run at Weights & Biases; the API key is read from WANDB_API_KEY."""

    __pydantic_config__ = STRICT

    project: NonEmpty
    """Name of the project that the run belongs to."""
    entity: str | None = None
    """User or team that the run belongs to; null: the owner of the API key."""
    group: str | None = None
    """Name of a group of runs that W&B shows together; null: no group."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    mode: Literal["online", "offline"] = "online"
    """online: send to the server; offline: only write files for `wandb sync`."""
    directory: str | None = None
    """Directory in which wandb creates its folder wandb; null: the run's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSettings:
    """An MLflow tracking server; the bearer token is read from MLFLOW_TRACKING_TOKEN."""

    __pydantic_config__ = STRICT

    url: TrackerUrl
    """URL of the server, such as http://mlflow:5000."""
    experiment: NonEmpty
    """Name of the experiment that the run belongs to; it is created if it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioSettings:
    """A local database of Trackio, which `trackio show` displays and `trackio sync` uploads."""

    __pydantic_config__ = STRICT

    project: NonEmpty
    """Name of the project that the run belongs to."""
    group: str | None = None
    """Name of a group of runs that Trackio shows together; null: no group."""
    directory: str | None = None
    """Directory of the database; null: the environment's TRACKIO_DIR, or Trackio's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTrackerSettings:
    """A tracker of your own, which is a class with the methods write, flush and close."""

    __pydantic_config__ = STRICT

    use: NonEmpty
    """The class, as FILE.py:CLASS below the directory that the command is started in, or as
    package.module:CLASS.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class's constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSettings:
    """Trackers that get a run's curves in addition to its own database; none by default."""

    __pydantic_config__ = STRICT

    jsonl: bool = False
    """Write metrics.jsonl in the run's directory."""
    tensorboard: str | None = None
    """Directory for event files, in which the run gets its own directory; empty: the folder
    tensorboard in the run's directory; null: no event files.
    """
    wandb: WandbSettings | None = None
    """Settings of a run at Weights & Biases; null: the run is not written to it."""
    trackio: TrackioSettings | None = None
    """Settings of a local Trackio database; null: the run is not written to one."""
    mlflow: MlflowSettings | None = None
    """Settings of a run at an MLflow server; null: the run is not written to one."""
    own: OwnTrackerSettings | None = None
    """Settings of a tracker of your own; null: none."""
    completions: Annotated[int, Ge(0), Le(256)] = 0
    """Number of completions of each step that W&B, Trackio, JSONL and your own tracker get as a
    table, read from the journal; 0: none.
    """


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
class SessionSettings:
    """Sessions, which are rollouts that external agents play over HTTP. The cost of one session is
    bounded by rollouts.max_turns, rollouts.max_tokens_per_turn and rollouts.episode_deadline_s.
    """

    __pydantic_config__ = STRICT

    max_open: Positive = 1024
    """Maximum number of open sessions; further sessions wait, even if their group is admitted."""
    idle_s: Seconds = 600
    """Seconds without a request after which a session ends like a rollout that ran out of time."""
    hold_s: Seconds = 300
    """Seconds for which a request is held while its session waits for admission, weights are
    loaded, or an engine or the database is unavailable; after that the request is answered with
    status 503.
    """
    reward_deadline_s: Seconds = 3600
    """Seconds for which a finished session may wait for a reward that is sent later."""
    unsupported: Unsupported = "refuse"
    """How to handle a parameter that a session cannot obey, if the answer has the same form without
    the parameter (a forced tool_choice, a JSON schema, logit_bias). refuse: answer 400 with its
    name; ignore: sample without the parameter, and count it in the session's field `ignored`.
    """
    max_body_mib: Positive = 48
    """Largest body of a request in MiB; it also limits uploaded trajectories."""
    titles: Titles = "train"
    """Whether titles of conversations, which the session's reward does not judge, are trained. Use
    `leave_out` for agents that request titles without marking the call as auxiliary.
    """
    system_messages: SystemMessages = "merge"
    """How to handle system and developer messages that the chat template refuses or does not show
    at their position. merge: put all of their texts into one message at the front, in a new sample
    if the conversation has already begun; refuse: answer with status 400.
    """
