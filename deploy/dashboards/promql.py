"""PromQL of one run, as the panels write it."""

from __future__ import annotations

from deploy.dashboards.model import Query


def of_run(metric: str, matcher: str = "") -> str:
    """The series of the chosen run. matcher: further ones, such as kind="evicted"."""
    return f'{metric}{{instance="$instance"{"," if matcher else ""}{matcher}}}'


def rate(metric: str, matcher: str = "") -> str:
    return f"rate({of_run(metric, matcher)}[$__rate_interval])"


def mean(histogram: str) -> str:
    """Of what a histogram without labels, or each of its label sets, has seen lately."""
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, sum by (le) ({rate(f'{histogram}_bucket')}))"


def one(expr: str, legend: str) -> tuple[Query, ...]:
    return (Query(expr=expr, legend=legend),)
