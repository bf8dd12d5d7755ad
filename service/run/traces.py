"""A trace for each rollout, from its submission to the optimiser step that trained on it.

The supervisor makes the trace from the queue's events when the rollout is trained or evicted, so
the actors pass no trace context. Times may be late by one poll of the queue. The stages of a step
are shown one after another, because only their durations are known. The last stage ends when the
queue reports the rollout as trained.

A thread sends the traces over OTLP; traces that a collector does not accept in time are dropped. If
a supervisor dies, the traces of the rollouts in flight begin when its successor starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.outcomes import DEFAULT_RULES, Disposition
from actors.trajectory_queue.ledger import LedgerEvent, LedgerEventKind
from actors.types import TrajectorySummary
from service.config.sections import TracingSettings
from service.telemetry.records import StepRecord

if TYPE_CHECKING:
    # Only traced runs import these, because that takes a second.
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

# Number of spans that may wait for the collector; a step of 512 rollouts has about five thousand.
QUEUE_SPANS = 2**15
EXPORT_LIMIT_S = 10.0
FLUSH_LIMIT_MS = 5000


@dataclass(slots=True, kw_only=True)
class _Rollout:
    """The times of a rollout for its trace, in seconds since 1970."""

    accepted_at: float | None
    """Time at which the HTTP API accepted the rollout; None for the run's own tasks, or if unknown.
    """
    admitted_at: float
    attempts: list[tuple[float, TrajectorySummary]] = field(default_factory=list)
    """Each ended attempt to play the rollout: the time of its end, and its summary."""
    left_at: float = 0.0


class RolloutTraces:
    """A writer of traces: it follows the rollouts in flight, and writes a trace when one ends."""

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        run: str,
        sample_ratio: float,
        accepted_at: Callable[[str], float | None],
    ) -> None:
        """Start a tracer.

        run: name of the run. accepted_at: function that returns the time at which a client
        submitted the group with the given id; None if it is unknown.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            resource=Resource.create({"service.name": "rayloom", "rayloom.run": run}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rayloom")
        self._accepted_at = accepted_at
        self._in_flight: dict[str, _Rollout] = {}
        self._evicted: dict[str, tuple[_Rollout, str]] = {}
        """Evicted rollouts with the reason of the eviction, until the next call of `attempts`.

        That call reports their last attempts, which are in the same cut of the queue as the
        eviction.
        """
        self._trained: dict[int, list[tuple[str, _Rollout]]] = {}
        """The trained rollouts of each step that is not recorded yet, by step."""

    def begin_term(self) -> None:
        """Forget the rollouts in flight. Called when the run starts or returns to a checkpoint.

        The run then plays these rollouts again from the start, each with a new trace.
        """
        self._in_flight.clear()
        self._evicted.clear()
        self._trained.clear()

    def attempts(self, summaries: Iterable[TrajectorySummary], *, now: float) -> None:
        """Add attempts that have ended to their rollouts' traces; write traces of evicted rollouts.

        The queue reports attempts and events together. Call `events` first, because the events say
        which rollouts were evicted.
        summaries: the ended attempts. now: seconds since 1970.
        """
        for summary in summaries:
            evicted = self._evicted.get(summary.rollout_id)
            rollout = evicted[0] if evicted else self._rollout(summary.rollout_id, now)
            rollout.attempts.append((now, summary))
        for rollout_id, (rollout, reason) in self._evicted.items():
            self._write(rollout_id, rollout, reason=reason, record=None)
        self._evicted.clear()

    def events(self, events: Iterable[LedgerEvent], *, now: float) -> None:
        for event in events:
            rollout = self._rollout(event.rollout_id, now)
            if event.kind is LedgerEventKind.ADMITTED:
                continue
            rollout.left_at = now
            del self._in_flight[event.rollout_id]
            if event.kind is LedgerEventKind.TRAINED and event.step is not None:
                self._trained.setdefault(event.step, []).append((event.rollout_id, rollout))
            else:
                self._evicted[event.rollout_id] = rollout, event.reason or ""

    def step(self, record: StepRecord) -> None:
        """Write the traces of the rollouts that a stored step trained on."""
        for rollout_id, rollout in self._trained.pop(record.step, ()):
            self._write(rollout_id, rollout, reason="", record=record)

    def close(self) -> None:
        """Send the waiting spans; block until they are sent or a time limit has passed."""
        self._provider.force_flush(FLUSH_LIMIT_MS)
        self._provider.shutdown()

    def _rollout(self, rollout_id: str, now: float) -> _Rollout:
        if rollout_id not in self._in_flight:
            group_id, _, _ = rollout_id.rpartition("-")
            self._in_flight[rollout_id] = _Rollout(
                accepted_at=self._accepted_at(group_id), admitted_at=now
            )
        return self._in_flight[rollout_id]

    def _write(
        self, rollout_id: str, rollout: _Rollout, *, reason: str, record: StepRecord | None
    ) -> None:
        """Write the trace of a rollout that the step `record` trained, or that was evicted."""
        began = rollout.admitted_at if rollout.accepted_at is None else rollout.accepted_at
        root = self._tracer.start_span("rollout", start_time=_ns(began))
        root.set_attribute("rayloom.rollout_id", rollout_id)
        root.set_attribute("rayloom.end", "trained" if record else f"evicted: {reason}")
        inside = _within(root)
        if rollout.accepted_at is not None:
            self._span("wait for admission", rollout.accepted_at, rollout.admitted_at, inside)
        ready_at = rollout.admitted_at
        for ended_at, summary in rollout.attempts:
            self._attempt(ended_at, summary, inside)
            root.set_attribute("rayloom.task_id", summary.task_id)
            root.set_attribute("rayloom.environment", summary.environment)
            ready_at = ended_at
        if record is not None:
            self._step(record, ready_at, rollout.left_at, inside)
        root.end(_ns(rollout.left_at))

    def _attempt(self, ended_at: float, summary: TrajectorySummary, inside: Context) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span("attempt", ended_at - summary.timings.wall_s, ended_at, inside, end=False)
        span.set_attributes(
            {
                "rayloom.attempt": summary.attempt,
                "rayloom.outcome": summary.outcome.value,
                "rayloom.return": summary.episode_return,
                "rayloom.turns": summary.num_turns,
                "rayloom.sampled_tokens": summary.num_sampled,
                **{
                    f"rayloom.{phase}_seconds": seconds
                    for phase, seconds in summary.timings.by_phase().items()
                },
            }
        )
        if summary.newest_version is not None:
            span.set_attribute("rayloom.policy_version", summary.newest_version)
        if DEFAULT_RULES[summary.outcome].disposition is Disposition.DROP:
            span.set_status(Status(StatusCode.ERROR, summary.detail))
        span.end(_ns(ended_at))

    def _step(self, record: StepRecord, ready_at: float, left_at: float, inside: Context) -> None:
        seconds = record.stages.by_name()
        stages = [(name, seconds[name]) for name in ("merge", "score", "train", "publish")]
        at = max(left_at - sum(length for _, length in stages), ready_at)
        self._span("wait for the step", ready_at, at, inside)
        step = self._span("optimiser step", at, left_at, inside, end=False)
        step.set_attribute("rayloom.step", record.step)
        step.set_attribute("rayloom.policy_version", record.policy_version)
        for name, length in stages:
            if length:
                self._span(name, at, min(at + length, left_at), _within(step))
                at = min(at + length, left_at)
        step.end(_ns(left_at))

    def _span(
        self, name: str, start: float, stop: float, inside: Context, *, end: bool = True
    ) -> Span:
        span = self._tracer.start_span(name, context=inside, start_time=_ns(start))
        if end:
            span.end(_ns(stop))
        return span


def traces_to(
    settings: TracingSettings, *, run: str, accepted_at: Callable[[str], float | None]
) -> RolloutTraces | None:
    """Return the writer of traces to the configured collector; None if tracing is off."""
    if not settings.endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_LIMIT_S)
    return RolloutTraces(
        BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS),
        run=run,
        sample_ratio=settings.sample_ratio,
        accepted_at=accepted_at,
    )


def _within(span: Span) -> Context:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
