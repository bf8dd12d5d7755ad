"""Every metric of ours, declared once: name, help, unit, labels from closed sets.

Names are rayloom_<noun>_<unit>. A metric whose value is not known is absent, never zero. The
supervisor holds the one `Metrics` of a run and fills it from step records and queue statistics.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

AGE_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
RETURN_BUCKETS = (-1, -0.5, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class LateGauge:
    """A gauge that is absent until its value is known; the library's own begin at 0."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(name, documentation, registry=None)
        self._registry: CollectorRegistry | None = registry

    def set(self, value: float) -> None:
        self._gauge.set(value)
        if self._registry is not None:
            self._registry.register(self._gauge)
            self._registry = None


class RolloutMetrics:
    """Trajectories as they end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter(
            "rayloom_rollouts",
            "Trajectories that ended, by environment and outcome; retried attempts included.",
            ["environment", "outcome"],
            registry=registry,
        )
        self.returns = Histogram(
            "rayloom_trajectory_return",
            "Return of each ended training trajectory.",
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


class LedgerMetrics:
    """Where the admitted rollouts are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.admitted = Gauge(
            "rayloom_ledger_admitted_rollouts",
            "Rollouts given a place in the window; equals trained + evicted + in flight.",
            registry=registry,
        )
        self.trained = Gauge(
            "rayloom_ledger_trained_rollouts", "Rollouts trained on.", registry=registry
        )
        self.evicted = Gauge(
            "rayloom_ledger_evicted_rollouts",
            "Rollouts that left untrained, by reason.",
            ["reason"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "rayloom_ledger_in_flight_rollouts", "Admitted and not yet settled.", registry=registry
        )
        self.waiting_items = Gauge(
            "rayloom_queue_items", "Finished trajectories waiting in the queue.", registry=registry
        )
        self.waiting_bytes = Gauge(
            "rayloom_queue_bytes", "Payload bytes that the queue refers to.", registry=registry
        )


class StepMetrics:
    """Progress, age and time of training steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.done = Counter("rayloom_train_steps", "Training steps done.", registry=registry)
        self.skipped = Counter(
            "rayloom_train_skipped_steps",
            "Updates skipped because a loss or gradient was not finite.",
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "rayloom_stage_seconds",
            "Wall time of each stage of a training step.",
            ["stage"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.sampled_tokens = Counter(
            "rayloom_sampled_tokens", "Tokens sampled by the engines in steps.", registry=registry
        )
        self.trained_tokens = Counter(
            "rayloom_trained_tokens", "Tokens in the loss.", registry=registry
        )
        self.policy_version = LateGauge(
            "rayloom_policy_version", "Version that every ready engine holds.", registry=registry
        )
        self.policy_age = Histogram(
            "rayloom_policy_age_versions",
            "Age of each step's oldest token when it was trained on.",
            buckets=AGE_BUCKETS,
            registry=registry,
        )


class LearningMetrics:
    """Reward and the health of the policy."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reward_mean = LateGauge(
            "rayloom_reward_mean", "Mean return of the last step's trajectories.", registry=registry
        )
        self.scaled_reward_mean = LateGauge(
            "rayloom_scaled_reward_mean_ratio",
            "The same over the best possible return, where the environment knows it.",
            registry=registry,
        )
        self.evaluation_reward = LateGauge(
            "rayloom_evaluation_scaled_reward_mean_ratio",
            "Mean scaled return on held-out tasks at temperature 0.",
            registry=registry,
        )
        self.loss = LateGauge("rayloom_loss", "Policy loss of the last step.", registry=registry)
        self.grad_norm = LateGauge(
            "rayloom_gradient_norm", "Gradient norm before clipping.", registry=registry
        )
        self.entropy = LateGauge(
            "rayloom_entropy_nats", "Mean entropy of the policy per token.", registry=registry
        )
        self.mismatch_k3 = LateGauge(
            "rayloom_mismatch_k3_nats",
            "Mean k3 between trainer and engine on tokens of the trainer's version.",
            registry=registry,
        )
        self.mismatch_max = LateGauge(
            "rayloom_mismatch_max_nats",
            "Largest |trainer - engine| log-probability on those tokens.",
            registry=registry,
        )
        self.parity_max = LateGauge(
            "rayloom_parity_max_nats",
            "Largest |trainer - engine| on the fixed prompt after the last publish.",
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
    """The parts of the run."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.replacements = Counter(
            "rayloom_replacements",
            "Parts that died and were replaced.",
            ["part"],
            registry=registry,
        )
        self.engines_ready = Gauge(
            "rayloom_engines_ready", "Engines that hold the current version.", registry=registry
        )


class Metrics:
    """The metrics of one run in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rollouts = RolloutMetrics(self.registry)
        self.ledger = LedgerMetrics(self.registry)
        self.steps = StepMetrics(self.registry)
        self.learning = LearningMetrics(self.registry)
        self.merge = MergeMetrics(self.registry)
        self.parts = PartMetrics(self.registry)
