"""Every metric of ours, declared once: name, help, unit, labels from closed sets.

Names are rayloom_<noun>_<unit>. A metric whose value is not known is absent, never zero; one that
counts what has not happened yet is zero from the start, so that its first increase can be seen.
The supervisor holds the one `Metrics` of a run; `service/telemetry/recorder.py` and
`service/telemetry/stored_metrics.py` fill it. docs/metrics.md lists them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from actors.metric_kinds import LateGauge, LateGauges, OneMomentRegistry
from actors.trajectory_queue.ledger import EvictionReason, LedgerEventKind
from actors.types import BranchReason, Outcome

AGE_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
RETURN_BUCKETS = (-1, -0.5, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class Part(StrEnum):
    """What is replaced when it dies. EPOCH: every part that an epoch starts, all at once."""

    ENVIRONMENT_ACTOR = "environment_actor"
    ENGINE = "engine"
    EPOCH = "epoch"


class RolloutMetrics:
    """Trajectories as they end; counted since the start of this process, as no row holds them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter(
            "rayloom_rollouts",
            "Trajectories that ended, by environment and outcome; retried attempts included.",
            ["environment", "outcome"],
            registry=registry,
        )
        self._seen: set[str] = set()
        self.returns = Histogram(
            "rayloom_trajectory_return",
            "Return of each ended training trajectory that could be graded.",
            ["environment"],
            buckets=RETURN_BUCKETS,
            registry=registry,
        )
        self.seconds = Histogram(
            "rayloom_trajectory_seconds",
            "Wall time of a trajectory, from reset to its outcome.",
            ["environment"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )

    def meet(self, environment: str) -> None:
        """Have every outcome of an environment, at 0 as long as it did not occur."""
        if environment not in self._seen:
            self._seen.add(environment)
            for outcome in Outcome:
                self.ended.labels(environment=environment, outcome=outcome.value)


class LedgerMetrics:
    """Where the admitted rollouts are, and what was stored of them.

    The gauges go back with the run; the counter counts rows, whatever becomes of them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.events = Counter(
            "rayloom_ledger_events",
            "Ledger rows stored, by kind and reason, those included that the run went back on.",
            ["kind", "reason"],
            registry=registry,
        )
        self.admitted = LateGauge(
            "rayloom_ledger_admitted_rollouts",
            "Rollouts given a place in the window; equals trained + evicted + in flight.",
            registry=registry,
        )
        self.trained = LateGauge(
            "rayloom_ledger_trained_rollouts", "Rollouts trained on.", registry=registry
        )
        self.evicted = Gauge(
            "rayloom_ledger_evicted_rollouts",
            "Rollouts that left untrained, by reason.",
            ["reason"],
            registry=registry,
        )
        self.in_flight = LateGauge(
            "rayloom_ledger_in_flight_rollouts", "Admitted and not yet settled.", registry=registry
        )
        self.waiting_items = LateGauge(
            "rayloom_queue_items", "Finished trajectories waiting in the queue.", registry=registry
        )
        self.waiting_bytes = LateGauge(
            "rayloom_queue_bytes", "Payload bytes that the queue refers to.", registry=registry
        )
        for kind in (LedgerEventKind.ADMITTED, LedgerEventKind.TRAINED):
            self.events.labels(kind=kind.value, reason="")
        for reason in EvictionReason:
            self.events.labels(kind=LedgerEventKind.EVICTED.value, reason=reason.value)


class StepMetrics:
    """Progress, age and time of training steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.newest = LateGauge(
            "rayloom_train_newest_step", "Number of the newest step.", registry=registry
        )
        self.done = Counter(
            "rayloom_train_steps",
            "Training steps stored, those included that the run went back on.",
            registry=registry,
        )
        self.skipped = Counter(
            "rayloom_train_skipped_steps",
            "Steps of which an update was skipped: its loss or gradient was not finite.",
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "rayloom_stage_seconds",
            "Wall time of each stage of a stored step.",
            ["stage"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.sampled_tokens = Counter(
            "rayloom_sampled_tokens",
            "Tokens that the engines sampled, of the stored steps.",
            registry=registry,
        )
        self.trained_tokens = Counter(
            "rayloom_trained_tokens", "Tokens in the loss of the stored steps.", registry=registry
        )
        self.policy_version = LateGauge(
            "rayloom_policy_version",
            "Version that the newest step made, and that every engine took.",
            registry=registry,
        )
        self.policy_age = Histogram(
            "rayloom_policy_age_versions",
            "Age of the oldest token of each step that trained any.",
            buckets=AGE_BUCKETS,
            registry=registry,
        )


class LearningMetrics:
    """Reward and the health of the policy."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reward_mean = LateGauge(
            "rayloom_reward_mean",
            "Mean return of the newest step's trajectories.",
            registry=registry,
        )
        self.scaled_reward_mean = LateGauge(
            "rayloom_scaled_reward_mean_ratio",
            "Mean return over the best possible one, where the environment knows that.",
            registry=registry,
        )
        self.evaluation_reward = LateGauge(
            "rayloom_evaluation_scaled_reward_mean_ratio",
            "Mean return over the best possible one, on held-out tasks at temperature 0.",
            registry=registry,
        )
        self.loss = LateGauge("rayloom_loss", "Policy loss of the newest step.", registry=registry)
        self.grad_norm = LateGauge(
            "rayloom_gradient_norm",
            "Gradient norm of the newest step, before clipping.",
            registry=registry,
        )
        self.entropy = LateGauge(
            "rayloom_entropy_nats",
            "Mean entropy of the policy per token of the newest step.",
            registry=registry,
        )
        self.mismatch_k3 = LateGauge(
            "rayloom_mismatch_k3_nats",
            "Mean k3 between trainer and engine on tokens of the trainer's version.",
            registry=registry,
        )
        self.mismatch_max = LateGauge(
            "rayloom_mismatch_max_nats",
            "Largest difference of a log-probability between the two on those tokens.",
            registry=registry,
        )
        self.parity_max = LateGauge(
            "rayloom_parity_max_nats",
            "The same on the fixed prompt, after the last publish.",
            registry=registry,
        )
        self.statistics = LateGauges(
            "rayloom_step_statistic",
            "Statistics of the newest step's loss and rewards, each under its name.",
            label="name",
            registry=registry,
        )


class MergeMetrics:
    """From turns to samples, and what looked odd."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.samples = Counter(
            "rayloom_merge_samples",
            "Samples before (turns) and after merging.",
            ["side"],
            registry=registry,
        )
        self.mismatches = Counter(
            "rayloom_merge_mismatches",
            "Turns that extended no open sample, by kind of divergence.",
            ["kind"],
            registry=registry,
        )
        for kind in BranchReason:
            self.mismatches.labels(kind=kind.value)
        self.inserted_tokens = Counter(
            "rayloom_inserted_tokens", "Tokens that we inserted, never trained.", registry=registry
        )
        self.malformed_turns = Counter(
            "rayloom_malformed_turns",
            "Turns that an environment called malformed.",
            registry=registry,
        )
        self.malformed_rewarded = Counter(
            "rayloom_malformed_rewarded",
            "Malformed trajectories with a positive reward: an alarm.",
            registry=registry,
        )
        self.zero_variance_groups = Counter(
            "rayloom_zero_variance_groups",
            "Groups whose returns were all equal.",
            registry=registry,
        )


class PartMetrics:
    """The parts of the run; replacements are counted since the start of this process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.replacements = Counter(
            "rayloom_replacements",
            "Parts that died and were replaced.",
            ["part"],
            registry=registry,
        )
        for part in Part:
            self.replacements.labels(part=part.value)
        self.engines_ready = LateGauge(
            "rayloom_engines_ready", "Engines that hold the current version.", registry=registry
        )


class ServiceMetrics:
    """What clients submitted; absent where the run has tasks of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waiting_tasks = LateGauge(
            "rayloom_service_waiting_tasks",
            "Accepted tasks that wait for admission.",
            registry=registry,
        )
        self.waiting_tasks_limit = LateGauge(
            "rayloom_service_waiting_tasks_limit",
            "So many may wait; what is more is refused with 429.",
            registry=registry,
        )


class Metrics:
    """The metrics of one run in a registry of its own."""

    def __init__(self) -> None:
        self.registry = OneMomentRegistry()
        self.rollouts = RolloutMetrics(self.registry)
        self.ledger = LedgerMetrics(self.registry)
        self.steps = StepMetrics(self.registry)
        self.learning = LearningMetrics(self.registry)
        self.merge = MergeMetrics(self.registry)
        self.parts = PartMetrics(self.registry)
        self.service = ServiceMetrics(self.registry)

    def together(self) -> AbstractContextManager[object]:
        """Change several values of which no scrape may show only some."""
        return self.registry.change
