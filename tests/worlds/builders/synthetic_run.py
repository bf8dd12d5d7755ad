"""The series of a made-up run as Prometheus scrapes them, for promtool's tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import get_args

from actors.metrics import Part
from actors.trajectory_queue.ledger import EvictionReason
from service.report.document import PHASES, Phase

# Rollouts and tokens of each step, and the share of its time that each stage takes.
STAGES = {"collect": 0.4, "merge": 0.05, "train": 0.3, "publish": 0.2, "checkpoint": 0.05}
TRAINED, EVICTED = 15, 1
SAMPLED_TOKENS, TRAINED_TOKENS = 4000, 3000
CHECKPOINT_EVERY = 5
EPISODE_DEADLINE_S = 600
# Series that rise with time even while a run does nothing.
_OF_TIME = {'rayloom_queue_blocked_seconds_total{side="consumer"}'}
# A function from seconds since the start of the run to the value of a series; None: absent.
Value = Callable[[float], float | None]


@dataclass
class SyntheticRun:
    """A run that trains from second 0 on. Tests change its values to simulate problems."""

    step_s: float
    scrape_s: int
    seconds: int
    run: str = "small"
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that Prometheus adds to those of the run, such as a pod."""
    values: dict[str, Value] = field(default_factory=dict)
    """Value of each series, named without the label of the run and without `labels`."""

    def __post_init__(self) -> None:
        self.values = {**self._of_steps(), **self._of_parts()}

    def done(self, second: float) -> int:
        """Return the number of steps that are finished at a second."""
        return math.floor(second / self.step_s)

    def change(self, name: str, *, since: float, until: float, to: Value) -> None:
        """Let a series have other values for a while. name: as in `values`."""
        before = self.values[name]
        self.values[name] = lambda t: to(t) if since <= t < until else before(t)

    def stop_counting(self, name: str, *, since: float, until: float) -> None:
        """Let a counter stop for a while, and then continue from the same value."""
        before = self.values[name]

        def value(t: float) -> float | None:
            shown = before(min(t, since))
            gained = (before(t) or 0.0) - (before(until) or 0.0) if t > until else 0.0
            return None if shown is None else shown + gained

        self.values[name] = value

    def count_faster(self, name: str, *, since: float, until: float, a_second: float) -> None:
        """Let a counter rise by `a_second` more each second for a while."""
        before = self.values[name]

        def value(t: float) -> float | None:
            shown = before(t)
            extra = a_second * max(min(t, until) - since, 0.0)
            return None if shown is None else shown + extra

        self.values[name] = value

    def stand_idle(self, *, since: float, until: float) -> None:
        """Turn the run into a service that gets no tasks for a while."""
        for name, before in list(self.values.items()):
            if name not in _OF_TIME:
                self.values[name] = lambda t, before=before: before(
                    min(t, since) if t < until else since + t - until
                )
        for name in ("rayloom_train_newest_step_timestamp_seconds",):
            before = self.values[name]
            self.values[name] = lambda t, before=before: (
                None if (shown := before(t)) is None else shown + (until - since) * (t >= until)
            )
        waiting = "rayloom_service_waiting_tasks"
        self.values[waiting] = lambda t: 0.0 if since <= t < until else 3.0
        # Two rollouts wait for the rest of their step.
        for name in ("rayloom_queue_items", "rayloom_ledger_in_flight_rollouts"):
            self.values[name] = lambda t: 2.0 if since <= t < until else 0.0
        admitted = "rayloom_ledger_admitted_rollouts"
        self.change(
            admitted, since=since, until=until,
            to=lambda t, before=self.values[admitted]: (before(t) or 0.0) + 2.0,
        )  # fmt: skip

    def show_cluster(self) -> None:
        """Add Ray's own metrics, and those of the checkpoints' volume."""
        self.values |= {
            "rayloom_checkpoint_bytes": lambda t: 1e9,
            "rayloom_checkpoint_free_bytes": lambda t: 2e10,
            "rayloom_checkpoint_upload_waiting_timestamp_seconds": lambda t: None,
            "rayloom_checkpoint_upload_seconds_sum": lambda t: 60 * self.done(t),
            "rayloom_checkpoint_upload_seconds_count": self.done,
            series("ray_node_mem_used", RayNodeType="head", ip="1"): lambda t: 3e9,
            series("ray_node_mem_total", RayNodeType="head", ip="1"): lambda t: 8e9,
            # A worker may use all of its memory.
            series("ray_node_mem_used", RayNodeType="worker", ip="2"): lambda t: 7.9e9,
            series("ray_node_mem_total", RayNodeType="worker", ip="2"): lambda t: 8e9,
            series("ray_node_disk_utilization_percentage", ip="1"): lambda t: 40,
            series("ray_object_store_memory", Location="SPILLED"): lambda t: 1e6,
            "ray_object_store_used_memory": lambda t: 2e9,
            "ray_object_store_available_memory": lambda t: 2e9,
            series("ray_cluster_active_nodes", node_type="head"): lambda t: 1,
            series("ray_cluster_active_nodes", node_type="worker"): lambda t: 9,
            series("ray_serve_application_status", application="api"): lambda t: 6,
            # The counter is absent before the first eviction.
            "ray_memory_manager_worker_eviction_total": lambda t: None,
        }

    def vanish(self, *, since: float, until: float) -> None:
        """Let every scrape fail for a while."""
        for name in self.values:
            self.change(name, since=since, until=until, to=lambda t: None)

    def enter(self, phase: Phase, *, since: float) -> None:
        """Let the run be in a phase from the second `since` on."""
        for each in PHASES:
            is_it = float(each == phase)
            name = series("rayloom_run_phase", phase=each)
            self.change(name, since=since, until=math.inf, to=lambda t, is_it=is_it: is_it)
        name = "rayloom_run_phase_timestamp_seconds"
        self.change(name, since=since, until=math.inf, to=lambda t: since)

    def input_series(self) -> list[dict[str, str]]:
        """Return the series as promtool reads them, with one scrape every `scrape_s` seconds.

        If a scrape lacks a series that the previous one had, the series is marked as stale, as
        by Prometheus.
        """
        moments = range(0, self.seconds + 1, self.scrape_s)
        found = []
        for name, value in self.values.items():
            values = [value(t) for t in moments]
            shown = (
                f"{v:.10g}" if v is not None else "_" if before is None else "stale"
                for before, v in pairwise([None, *values])
            )
            labels = {"run": self.run, **self.labels}
            found.append({"series": labelled(name, **labels), "values": " ".join(shown)})
        return found

    def _of_steps(self) -> dict[str, Value]:
        step_s, done = self.step_s, self.done

        def a_step(amount: float) -> Value:
            return lambda t: amount * done(t)

        def newest(value: Callable[[float], float]) -> Value:
            """Return values that are absent before the first step."""
            return lambda t: value(t) if done(t) else None

        found: dict[str, Value] = {
            "rayloom_train_steps_total": a_step(1),
            "rayloom_train_newest_step": newest(done),
            "rayloom_train_newest_step_timestamp_seconds": newest(lambda t: done(t) * step_s),
            "rayloom_checkpoint_step": lambda t: done(t) // CHECKPOINT_EVERY * CHECKPOINT_EVERY,
            "rayloom_checkpoint_interval_steps": lambda t: CHECKPOINT_EVERY,
            "rayloom_policy_version": newest(done),
            series("rayloom_engine_policy_version", replica="a"): done,
            # Every run has a little noise.
            "rayloom_reward_mean": newest(lambda t: 0.5 + 0.02 * math.sin(7.0 * done(t))),
            "rayloom_reward_collapsed_since_step": lambda t: None,
            "rayloom_entropy_nats": newest(lambda t: 0.4),
            "rayloom_mismatch_k3_nats": newest(lambda t: 1e-7),
            "rayloom_logprob_check_ratio": newest(lambda t: 0.01),
            "rayloom_ledger_admitted_rollouts": a_step(TRAINED + EVICTED),
            "rayloom_ledger_trained_rollouts": a_step(TRAINED),
            "rayloom_ledger_in_flight_rollouts": lambda t: 0,
            "rayloom_train_skipped_steps_total": lambda t: 0,
            "rayloom_malformed_rewarded_total": lambda t: 0,
            series("rayloom_train_newest_step_tokens", kind="sampled"): newest(
                lambda t: SAMPLED_TOKENS
            ),
            series("rayloom_train_newest_step_tokens", kind="trained"): newest(
                lambda t: TRAINED_TOKENS
            ),
        }
        for stage, share in STAGES.items():
            found[series("rayloom_train_newest_step_seconds", stage=stage)] = newest(
                lambda t, share=share: share * step_s
            )
            # These series appear with the first step.
            found[series("rayloom_stage_seconds_sum", stage=stage)] = newest(
                lambda t, share=share: share * step_s * done(t)
            )
            found[series("rayloom_stage_seconds_count", stage=stage)] = newest(done)
        events = "rayloom_ledger_events_total"
        found[series(events, kind="admitted")] = a_step(TRAINED + EVICTED)
        found[series(events, kind="trained")] = a_step(TRAINED)
        for reason in EvictionReason:
            count = EVICTED if reason is EvictionReason.MASKED else 0
            found[series(events, kind="evicted", reason=reason.value)] = a_step(count)
            found[series("rayloom_ledger_evicted_rollouts", reason=reason.value)] = a_step(count)
        return found

    def _of_parts(self) -> dict[str, Value]:
        a_second = (TRAINED + EVICTED) / self.step_s
        found: dict[str, Value] = {
            series("rayloom_run_phase", phase=phase): (
                lambda t, phase=phase: float(phase == "training")
            )
            for phase in PHASES
        }
        found |= {
            "rayloom_run_phase_timestamp_seconds": lambda t: 0,
            "rayloom_database_away_seconds": lambda t: 0,
            "rayloom_trajectory_seconds_limit": lambda t: EPISODE_DEADLINE_S,
            "rayloom_engines_ready": lambda t: 1,
            "rayloom_engines_expected": lambda t: 1,
            "rayloom_trainer_ranks": lambda t: 2,
            "rayloom_trainer_ranks_expected": lambda t: 2,
            "rayloom_environment_actors": lambda t: 2,
            "rayloom_environment_actors_expected": lambda t: 2,
            "rayloom_publish_failures_total": lambda t: 0,
            series("rayloom_publish_seconds_count", phase="load"): self.done,
            "rayloom_checkpoint_failures_total": lambda t: 0,
            series("rayloom_queue_blocked_seconds_total", side="consumer"): (
                lambda t: STAGES["collect"] * t
            ),
            series("rayloom_queue_blocked_seconds_total", side="producer"): lambda t: 0.1 * t,
            series("rayloom_rollouts_total", environment="game", outcome="completed"): (
                lambda t: math.floor(a_second * t)
            ),
            series("rayloom_http_requests_total", route="/api", status="200"): lambda t: t,
            series("rayloom_http_requests_total", route="/api", status="429"): lambda t: 0,
            series("rayloom_http_requests_total", route="/readyz", status="503"): lambda t: 0,
        }
        for part in get_args(Part):
            found[series("rayloom_replacements_total", part=part)] = lambda t: 0
        return found


def series(name: str, /, **labels: str) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{inside}}}"


def labelled(name: str, **labels: str) -> str:
    """Add labels to the name of a series."""
    own, _, inside = name.rstrip("}").partition("{")
    further: Mapping[str, str] = labels
    added = ",".join(f'{key}="{value}"' for key, value in further.items())
    return f"{own}{{{inside}{',' if inside else ''}{added}}}"
