"""What actors/metrics.py declares, seen from outside, for the tests of dashboard and documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from actors.metrics import ApiMetrics, Metrics

# What the text format adds to a family's name.
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "gauge": ("",),
}
NAME = re.compile(r"\brayloom_[a-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A metric under its family's name; the series' names follow from the kind."""

    name: str
    kind: str
    labels: tuple[str, ...]
    documentation: str

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in SUFFIXES[self.kind])


def declared() -> list[Declared]:
    """Every metric, in the order of declaration."""
    metrics, found = Metrics(), []
    registries = metrics.gained, metrics.values, ApiMetrics().gained
    for collector in chain.from_iterable(each._collector_to_names for each in registries):
        (family,) = collector.describe()  # type: ignore[attr-defined]
        found.append(
            Declared(
                name=family.name,
                kind=family.type,
                labels=tuple(getattr(collector, "_labelnames", ())),
                documentation=family.documentation,
            )
        )
    return found
