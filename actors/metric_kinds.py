"""What prometheus_client lacks: gauges that may be absent, and a scrape that shows one moment.

Made by `metrics.py`, which declares what there is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class OneMomentRegistry(CollectorRegistry):
    """A registry of which no scrape shows half a change.

    Whoever changes values that belong together holds `change` meanwhile; a scrape waits for it.
    The library's `_created` samples are left out: they tell when this process began, which is not
    when a resumed run did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.change = threading.RLock()

    def collect(self) -> Iterable[Metric]:
        with self.change:
            families = list(super().collect())
        for family in families:
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
        return families


class LateGauge(Collector):
    """A gauge that is absent while its value is not known; the library's own begin at 0."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._value: float | None = None
        registry.register(self)

    def set(self, value: float | None) -> None:
        """None: not known, or no longer."""
        self._value = value

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterable[Metric]:
        if self._value is None:
            return []
        return [GaugeMetricFamily(self._name, self._documentation, value=self._value)]


class LateGauges(Collector):
    """A gauge with one label, of which only the values that were shown last are there."""

    def __init__(
        self, name: str, documentation: str, *, label: str, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        # Where the library's own metrics have theirs.
        self._labelnames = (label,)
        self._values: Mapping[str, float] = {}
        registry.register(self)

    def show(self, values: Mapping[str, float]) -> None:
        """Show these, by the label's value, and nothing that was shown before."""
        self._values = dict(values)

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for value_of_label, value in self._values.items():
            family.add_metric([value_of_label], value)
        return [family]

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(self._name, self._documentation, labels=self._labelnames)
