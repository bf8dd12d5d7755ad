"""Every metric of Rayloom, declared once with name, help, unit and a closed set of labels.

Names are rayloom_<noun>_<unit>. A metric whose value is not known is absent, never zero. A counter
of events starts at zero, so that the first increase can be seen. The metrics of a step's statistics
are made from `actors.statistics`. `service/run/recorder.py` fills the one `Metrics` of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal, get_args

from prometheus_client import Counter, Gauge, Metric

from actors.metric_registry import AtomicRegistry
from actors.statistics import STATISTICS
from actors.trajectory_queue.ledger import EvictionReason, LedgerEventKind
from actors.trajectory_queue.messages import Side
from actors.types import BranchReason, LeftOutReason, Outcome

AGE_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
# From the time of a fast answer to the time of a step that takes more than an hour.
SECONDS_BUCKETS = tuple(float(f"{digit}e{power}") for power in range(-2, 4) for digit in (1, 2, 5))
# Narrow buckets between 0 and 1, where the returns of most environments are; wide ones elsewhere.
RETURN_BUCKETS = (
    *(-1000, -100, -10, -5, -2, -1, -0.5),
    *(tenth / 10 for tenth in range(11)),
    *(2, 5, 10, 100, 1000),
)


Part = Literal["environment_actor", "gateway", "engine", "queue", "trainer", "merge_actor", "term"]
"""A part that is replaced if it dies; term: all parts of a term, replaced together."""
PublishPhase = Literal["send", "check", "load"]
"""A phase of a new version on its way to the engines, in this order.

send: the trainer's ranks send the weights to the weight board, or offer a broadcast. check: the
trainer scores the text of the log-probability check. load: the engines load the version, until
every engine holds it.
"""


def secret_failures(gained: AtomicRegistry, secret: Literal["api_key", "database"]) -> Counter:
    """Return the counter of failed attempts to read a secret's file.

    Each process that reads a secret declares this counter in its own registry.
    """
    counter = gained.counter(
        "rayloom_secret_read_failures",
        "Readings of a secret's file that found it missing, empty or invalid, by secret; the last "
        "good value stays in use. While a file stays so, there is one reading every few seconds.",
        "secret",
    )
    return counter.labels(secret=secret)


class RunMetrics:
    """The state of the run, and its versions."""

    def __init__(self, registry: AtomicRegistry) -> None:
        self.build = Gauge(
            "rayloom_build_info",
            "Always 1; the labels are the versions that the supervisor uses.",
            ["rayloom", "ray", "torch", "vllm", "transformers"],
            registry=registry,
        )
        self.phase = registry.gauges(
            "rayloom_run_phase",
            "1 for the phase that the run is in, 0 for all other phases.",
            label="phase",
        )
        self.paused = registry.gauges(
            "rayloom_run_paused",
            "1 for a part that an operator has paused, 0 for all other parts.",
            label="part",
        )
        self.phase_time = registry.gauge(
            "rayloom_run_phase_timestamp_seconds",
            "When the run entered this phase, in seconds since 1970.",
        )
        self.planned_steps = registry.gauge(
            "rayloom_run_planned_steps", "Number of steps after which the run ends."
        )
        self.checkpoint_step = registry.gauge(
            "rayloom_checkpoint_step", "Step of the newest committed checkpoint."
        )
        self.uploaded_step = registry.gauge(
            "rayloom_checkpoint_uploaded_step",
            "Step of the newest checkpoint that this process has copied to run.checkpoint_url.",
        )
        self.upload_waiting_time = registry.gauge(
            "rayloom_checkpoint_upload_waiting_timestamp_seconds",
            "When the first checkpoint was committed that is newer than the newest copy at "
            "run.checkpoint_url, in seconds since 1970; absent if there is none.",
        )
        self.checkpoint_interval = registry.gauge(
            "rayloom_checkpoint_interval_steps",
            "Number of steps between two checkpoints (run.checkpoint_every).",
        )
        self.checkpoint_time = registry.gauge(
            "rayloom_checkpoint_timestamp_seconds",
            "When the newest checkpoint was committed, in seconds since 1970.",
        )
        self.checkpoint_bytes = registry.gauge(
            "rayloom_checkpoint_bytes",
            "Size of the newest checkpoint's files; absent until this process has written one.",
        )
        self.checkpoint_free_bytes = registry.gauge(
            "rayloom_checkpoint_free_bytes",
            "Free space of the checkpoints' volume after the newest checkpoint was written; absent "
            "until this process has written one.",
        )
        self.checkpoint_seconds = registry.gauge(
            "rayloom_checkpoint_seconds",
            "Time from copying the ranks' state to the end of writing, for the newest checkpoint.",
        )
        self.database_away = registry.gauge(
            "rayloom_database_away_seconds",
            "Time since the run's database last answered; 0 while it answers.",
        )


class RolloutMetrics:
    """Counts of trajectories that ended since the start of this process; they are not stored."""

    def __init__(self, gained: AtomicRegistry, values: AtomicRegistry) -> None:
        self.ended = gained.counter(
            "rayloom_rollouts",
            "Ended trajectories by environment and outcome, including attempts that were retried.",
            "environment",
            "outcome",
        )
        self._seen: set[str] = set()
        self.returns = gained.histogram(
            "rayloom_trajectory_return",
            "Return of each ended training trajectory that could be graded.",
            "environment",
            buckets=RETURN_BUCKETS,
        )
        self.seconds = gained.histogram(
            "rayloom_trajectory_seconds",
            "Wall time of a trajectory, from reset to its outcome.",
            "environment",
            buckets=SECONDS_BUCKETS,
        )
        self.phase_seconds = gained.histogram(
            "rayloom_environment_phase_seconds",
            "Time that a trajectory spent in its reset, in requests to the policy, and in steps; "
            "only phases that it reached are counted.",
            "environment",
            "phase",
            buckets=SECONDS_BUCKETS,
        )

        self.seconds_limit = values.gauge(
            "rayloom_trajectory_seconds_limit",
            "Time after which a trajectory is ended (rollouts.episode_deadline_s).",
        )

    def meet(self, environment: str) -> None:
        """Show the counts of all outcomes of an environment, with 0 for those not seen yet."""
        if environment not in self._seen:
            self._seen.add(environment)
            for outcome in Outcome:
                self.ended.labels(environment=environment, outcome=outcome.value)


class LedgerMetrics:
    """Metrics of the queue, and of the ledger, which records what became of each rollout.

    The gauges count rollouts by state, and trajectories that wait in the queue. If the run returns
    to a checkpoint, the gauges return to their values at the checkpoint. The counter `events`
    counts rows of the ledger and never decreases: rows that a return undid still count.
    """

    def __init__(self, registry: AtomicRegistry) -> None:
        self.events = registry.counter(
            "rayloom_ledger_events",
            "Stored rows of the ledger by kind and reason, including rows that a return to a "
            "checkpoint undid.",
            "kind",
            "reason",
        )
        self.admitted = registry.gauge(
            "rayloom_ledger_admitted_rollouts",
            "Admitted rollouts; their number equals trained + evicted + in flight.",
        )
        self.trained = registry.gauge("rayloom_ledger_trained_rollouts", "Trained rollouts.")
        self.evicted = Gauge(
            "rayloom_ledger_evicted_rollouts",
            "Rollouts that were evicted without being trained, by reason.",
            ["reason"],
            registry=registry,
        )
        self.in_flight = registry.gauge(
            "rayloom_ledger_in_flight_rollouts",
            "Admitted rollouts that are neither trained nor evicted yet.",
        )
        self.waiting_items = registry.gauge(
            "rayloom_queue_items", "Finished trajectories that wait in the queue."
        )
        self.waiting_bytes = registry.gauge(
            "rayloom_queue_bytes", "Size of the trajectories that wait in the queue."
        )
        self.handed_out = registry.gauge(
            "rayloom_queue_handed_out_rollouts", "Rollouts that environment actors are playing."
        )
        self.items_limit = registry.gauge(
            "rayloom_queue_items_limit",
            "Number of waiting trajectories and played rollouts at which the queue starts "
            "further rollouts only for the step that is being collected.",
        )
        self.bytes_limit = registry.gauge(
            "rayloom_queue_bytes_limit",
            "Size of the waiting trajectories at which the queue starts further rollouts only for "
            "the step that is being collected (queue.max_mib).",
        )
        self.oldest = registry.gauge(
            "rayloom_queue_oldest_seconds",
            "Time for which the oldest finished trajectory has waited; absent if none waits.",
        )
        for kind in (LedgerEventKind.ADMITTED, LedgerEventKind.TRAINED):
            self.events.labels(kind=kind.value, reason="")
        for reason in EvictionReason:
            self.events.labels(kind=LedgerEventKind.EVICTED.value, reason=reason.value)


class WaitMetrics:
    """Time for which environment actors and the training loop waited for the queue.

    The time counts from the start of this process and is not stored.
    """

    def __init__(self, registry: AtomicRegistry) -> None:
        self.blocked = registry.counter(
            "rayloom_queue_blocked_seconds",
            "Time spent waiting for the queue. producer: environment actors with free slots, "
            "while the queue is full, summed over the actors. consumer: the training loop, for a "
            "step's groups.",
            "side",
        )
        for side in get_args(Side):
            self.blocked.labels(side=side)


# The name and help of each counter, by the field of a step's record whose values it adds up.
STEP_COUNTERS: Mapping[str, tuple[str, str]] = {
    "is_skipped": (
        "rayloom_train_skipped_steps",
        "Steps in which an update was skipped because its loss or gradient was not finite.",
    ),
    "num_sampled_tokens": (
        "rayloom_sampled_tokens",
        "Tokens that the engines sampled for the stored steps.",
    ),
    "num_trained_tokens": (
        "rayloom_trained_tokens",
        "Tokens in the loss of the stored steps.",
    ),
    "num_inserted_tokens": (
        "rayloom_inserted_tokens",
        "Tokens that Rayloom inserted; they are never trained.",
    ),
    "num_malformed_turns": (
        "rayloom_malformed_turns",
        "Turns that an environment reported as malformed.",
    ),
    "num_malformed_rewarded": (
        "rayloom_malformed_rewarded",
        "Malformed trajectories with a positive reward; any increase fires an alert.",
    ),
    "num_zero_variance_groups": (
        "rayloom_zero_variance_groups",
        "Groups whose returns were all equal.",
    ),
    "num_negative_return_groups": (
        "rayloom_negative_return_groups",
        "Groups that have advantage 0 because scale mean needs returns of at least 0.",
    ),
}


class StepMetrics:
    """Progress, time, tokens and policy age of training steps, and the effect of merging turns."""

    def __init__(self, registry: AtomicRegistry) -> None:
        self.newest = registry.gauge("rayloom_train_newest_step", "Number of the newest step.")
        self.newest_time = registry.gauge(
            "rayloom_train_newest_step_timestamp_seconds",
            "When the newest step was finished, in seconds since 1970.",
        )
        self.done = registry.counter(
            "rayloom_train_steps",
            "Stored training steps, including steps that a return to a checkpoint undid.",
        )
        self.counted = {
            field: registry.counter(name, documentation)
            for field, (name, documentation) in STEP_COUNTERS.items()
        }
        self.newest_seconds = registry.gauges(
            "rayloom_train_newest_step_seconds",
            "Wall time of each stage of the newest step; their sum is that of the step.",
            label="stage",
        )
        self.newest_tokens = registry.gauges(
            "rayloom_train_newest_step_tokens",
            "Tokens of the newest step by kind: sampled by the engines, or in the loss.",
            label="kind",
        )
        self.stage_seconds = registry.stored_histograms(
            "rayloom_stage_seconds",
            "Wall time of each stage of a stored step.",
            "stage",
            buckets=SECONDS_BUCKETS,
        )
        self.policy_version = registry.gauge(
            "rayloom_policy_version",
            "Version that the newest step made and every engine loaded.",
        )
        self.policy_age = registry.stored_histograms(
            "rayloom_policy_age_versions",
            "Age of the oldest trained token of each step.",
            buckets=AGE_BUCKETS,
        )
        self.policy_age_limit = registry.gauge(
            "rayloom_policy_age_versions_limit", "Largest age that a trained token can have."
        )
        self.samples = registry.counter(
            "rayloom_merge_samples",
            "Samples before merging (one for each turn) and after it.",
            "side",
        )
        self.branches = registry.counter(
            "rayloom_merge_branches",
            "Turns that extended no open sample and opened a new one, by reason.",
            "reason",
        )
        for reason in BranchReason:
            self.branches.labels(reason=reason.value)
        self.played_tokens = registry.counter(
            "rayloom_played_tokens",
            "Sampled tokens by fate: trained, or the reason why they are not in the loss. They "
            "are tokens of stored steps and of ended attempts that no step took.",
            "fate",
        )
        for fate in (LedgerEventKind.TRAINED, *EvictionReason, *LeftOutReason):
            self.played_tokens.labels(fate=fate.value)


class StatisticMetrics:
    """The statistics of the newest step, and the results of the newest evaluation."""

    def __init__(self, registry: AtomicRegistry) -> None:
        self._gauges = {each.name: registry.gauge(each.metric, each.help) for each in STATISTICS}
        self.reward_components = registry.gauges(
            "rayloom_reward_component_mean",
            "Mean of each component of the reward over the trajectories that have it.",
            label="component",
        )
        self.collapsed_since = registry.gauge(
            "rayloom_reward_collapsed_since_step",
            "First step of a collapse of the mean return that has not recovered; absent if there "
            "is none.",
        )
        self.evaluation_reward = registry.gauge(
            "rayloom_evaluation_scaled_reward_mean_ratio",
            "Mean return on held-out tasks, divided by the best possible return.",
        )

    def show(self, statistics: Mapping[str, float]) -> None:
        """Show the known statistics of a step, and remove the statistics of an earlier step."""
        for name, gauge in self._gauges.items():
            gauge.set(statistics.get(name))


class PartMetrics:
    """The numbers, replacements, failures and times of parts such as engines and trainer ranks.

    The counters begin at 0 when this process starts.
    """

    def __init__(self, gained: AtomicRegistry, values: AtomicRegistry) -> None:
        self.replacements = gained.counter(
            "rayloom_replacements", "Parts that died and were replaced.", "part"
        )
        for part in get_args(Part):
            self.replacements.labels(part=part)
        self.publish_seconds = gained.histogram(
            "rayloom_publish_seconds",
            "Time of each phase of a publish.",
            "phase",
            buckets=SECONDS_BUCKETS,
        )
        for phase in get_args(PublishPhase):
            self.publish_seconds.labels(phase=phase)
        self.publish_failures = gained.counter(
            "rayloom_publish_failures", "Publishes that failed because a part was lost."
        )
        self.checkpoint_failures = gained.counter(
            "rayloom_checkpoint_failures", "Checkpoints that were begun but could not be committed."
        )
        self.upload_failures = gained.counter(
            "rayloom_checkpoint_upload_failures",
            "Attempts to copy checkpoints to run.checkpoint_url that failed.",
        )
        self.upload_seconds = gained.histogram(
            "rayloom_checkpoint_upload_seconds",
            "Time of each copy of a checkpoint to run.checkpoint_url.",
            buckets=SECONDS_BUCKETS,
        )
        self.upload_bytes = gained.counter(
            "rayloom_checkpoint_upload_bytes",
            "Bytes of finished copies of checkpoints that were sent to run.checkpoint_url.",
        )
        self.engines_ready = values.gauge(
            "rayloom_engines_ready", "Engines that hold the current version."
        )
        self.engines_expected = values.gauge(
            "rayloom_engines_expected",
            "Requested engines: inference.num_replicas, or the number that was set in Serve later.",
        )
        self.engine_version = values.gauges(
            "rayloom_engine_policy_version",
            "Version that a live engine holds; absent before its first version.",
            label="replica",
        )
        self.environment_actors = values.gauge(
            "rayloom_environment_actors", "Environment actors that answer."
        )
        self.environment_actors_expected = values.gauge(
            "rayloom_environment_actors_expected",
            "Requested environment actors (rollouts.num_actors).",
        )
        self.lost_user_calls = gained.counter(
            "rayloom_user_calls_lost",
            "Calls of a user's function without an answer: the call was killed or cancelled at "
            "its limit, or its process died.",
            "function",
            "end",
        )
        self.worker_memory = values.gauge(
            "rayloom_worker_memory_bytes",
            "Memory of the largest worker process for a user's functions, of all environment "
            "actors; absent if there is no worker.",
        )
        self.ranks = values.gauge("rayloom_trainer_ranks", "Trainer ranks that answer.")
        self.ranks_expected = values.gauge(
            "rayloom_trainer_ranks_expected", "Requested trainer ranks (trainer.num_ranks)."
        )
        self.rank_memory = values.gauges(
            "rayloom_rank_peak_memory_bytes",
            "Largest memory of a rank since its start: on its GPU, or of its process if it has "
            "no GPU.",
            label="rank",
        )


class ServiceMetrics:
    """Metrics of the tasks that clients submit; absent if the run brings its own tasks."""

    def __init__(self, registry: AtomicRegistry) -> None:
        self.waiting_tasks = registry.gauge(
            "rayloom_service_waiting_tasks", "Accepted tasks that wait for admission."
        )
        self.waiting_tasks_limit = registry.gauge(
            "rayloom_service_waiting_tasks_limit",
            "Number of tasks that may wait; more are refused with 429.",
        )


class ApiMetrics:
    """Requests to the HTTP API; every replica of the API has its own `ApiMetrics`."""

    def __init__(self) -> None:
        self.gained = AtomicRegistry()
        self.requests = self.gained.counter(
            "rayloom_http_requests",
            "Answered requests; the route is empty if the request was refused before routing.",
            "route",
            "method",
            "status",
        )
        self.seconds = self.gained.histogram(
            "rayloom_http_request_seconds",
            "Time from the first byte of a request to the last byte of its answer.",
            "route",
            buckets=SECONDS_BUCKETS,
        )
        self.key_failures = secret_failures(self.gained, "api_key")


class GatewayMetrics:
    """The sessions that external agents play; the gateway has one `GatewayMetrics`."""

    def __init__(self) -> None:
        self.gained = AtomicRegistry()
        self.values = AtomicRegistry(self.gained.change)
        self.open = self.values.gauge(
            "rayloom_sessions_open", "Admitted sessions that have not ended."
        )
        self.ended = self.gained.counter(
            "rayloom_sessions_ended", "Ended sessions by outcome.", "outcome"
        )
        self.turns = self.gained.counter(
            "rayloom_session_turns",
            "Turns of ended sessions by use: trained, auxiliary, not seen by a client, or title.",
            "use",
        )
        self.refused = self.gained.counter(
            "rayloom_session_refusals", "Refused requests of agents, by reason.", "code"
        )
        self.seconds = self.gained.histogram(
            "rayloom_session_turn_seconds",
            "Time from an agent's request to the turn that answers it, including the wait for "
            "admission.",
            buckets=SECONDS_BUCKETS,
        )
        self.commit_seconds = self.gained.histogram(
            "rayloom_session_commit_seconds",
            "Time from sampling a turn until it is durable.",
            buckets=SECONDS_BUCKETS,
        )


class Metrics:
    """The metrics of a run's supervisor.

    `gained` holds what this process has counted since it started; nothing of it is stored. `values`
    holds sums over stored rows of the database, and the current state.
    """

    def __init__(self) -> None:
        self.gained = AtomicRegistry()
        self.values = AtomicRegistry(self.gained.change)
        self.run = RunMetrics(self.values)
        self.rollouts = RolloutMetrics(self.gained, self.values)
        self.ledger = LedgerMetrics(self.values)
        self.waits = WaitMetrics(self.gained)
        self.steps = StepMetrics(self.values)
        self.statistics = StatisticMetrics(self.values)
        self.parts = PartMetrics(self.gained, self.values)
        self.service = ServiceMetrics(self.values)
        self.database_secret_failures = secret_failures(self.gained, "database")

    def read(self) -> tuple[list[Metric], list[Metric]]:
        """Return the metrics of `gained` and of `values`, both of the same moment."""
        with self.together():
            return list(self.gained.collect()), list(self.values.collect())

    def together(self) -> AbstractContextManager[object]:
        """Return the lock to hold while several related values change; scrapes wait for it."""
        return self.gained.change
