"""A registry of metrics, and the kinds of metric that the Prometheus library lacks.

`actors.metrics` declares the metrics with this module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class OptionalGauges(Collector):
    """A gauge metric whose values are set together; `show` replaces all earlier values.

    A metric with a label has one value for each value of the label. A metric without a label has
    one value, under the key "". Before the first `show` there is no value; the library's own gauges
    begin at 0.
    """

    def __init__(self, name: str, documentation: str, label: str = "") -> None:
        self._name = name
        self._documentation = documentation
        # The library's metrics use this attribute name too.
        self._labelnames = (label,) if label else ()
        self._values: Mapping[str, float] = {}

    def show(self, values: Mapping[str, float]) -> None:
        """Show these values, by the label's value, and remove all earlier values."""
        self._values = dict(values)

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self._name, self._documentation, labels=self._labelnames)]

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for key, value in self._values.items():
            family.add_metric([key] if self._labelnames else [], value)
        return [family] if self._values or self._labelnames else []


class OptionalGauge(OptionalGauges):
    """A gauge without a label that is absent while its value is not known."""

    def set(self, value: float | None) -> None:
        """Set the value; if it is None, show no value."""
        self.show({} if value is None else {"": value})


class StoredHistograms(Collector):
    """A histogram metric whose bucket counts are set from outside, such as from stored rows.

    The library's own histograms can only count single values. The metric has one histogram for each
    value of its label. Without a label it has one, under the key "".
    """

    def __init__(
        self, name: str, documentation: str, label: str = "", *, buckets: tuple[float, ...]
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labelnames = (label,) if label else ()
        self._bounds = [str(float(bound)) for bound in buckets] + ["+Inf"]
        # By the label's value: the count of each bucket, and the sum of all values.
        self._values: Mapping[str, tuple[Sequence[int], float]] = {}
        if not label:
            self._values = {"": ((), 0.0)}

    def show(self, values: Mapping[str, tuple[Sequence[int], float]]) -> None:
        """Replace the shown values.

        values: for each value of the label, the counts of the buckets, and the sum. The last bucket
        is for values above all bounds.
        """
        self._values = dict(values)

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for key, (counts, total) in self._values.items():
            below = map(float, accumulate(counts or [0] * len(self._bounds)))
            buckets = list(zip(self._bounds, below, strict=True))
            family.add_metric([key] if self._labelnames else [], buckets, total)
        return [family]


class AtomicRegistry(CollectorRegistry):
    """A registry whose scrapes show either all or none of several changes that belong together.

    Code that changes several related values holds the lock `change`; a scrape waits for it. The
    library's `_created` samples are left out, because they show when this process began, and a
    resumed run began earlier.
    """

    def __init__(self, change: threading.RLock | None = None) -> None:  # type: ignore[valid-type]
        """Create a registry.

        change: the lock of another registry, if code changes values of both registries together;
        None creates a new lock.
        """
        super().__init__()
        self.change = change or threading.RLock()

    def collect(self) -> Iterable[Metric]:
        with self.change:
            families = list(super().collect())
        for family in families:
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
        return families

    def counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self)

    def histogram(
        self, name: str, documentation: str, *labels: str, buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(name, documentation, labels, buckets=buckets, registry=self)

    def stored_histograms(
        self, name: str, documentation: str, label: str = "", *, buckets: tuple[float, ...]
    ) -> StoredHistograms:
        histograms = StoredHistograms(name, documentation, label, buckets=buckets)
        self.register(histograms)
        return histograms

    def gauge(self, name: str, documentation: str) -> OptionalGauge:
        gauge = OptionalGauge(name, documentation)
        self.register(gauge)
        return gauge

    def gauges(self, name: str, documentation: str, *, label: str) -> OptionalGauges:
        gauges = OptionalGauges(name, documentation, label)
        self.register(gauges)
        return gauges
