"""Convert rules.yaml to Prometheus' rules: `python -m deploy.rules` writes helm/files/rules/.

Each placeholder in rules.yaml is replaced:
- RUN_LABELS: the labels that distinguish runs, "cluster, namespace, release, run".
- PLACE_LABELS: the labels that distinguish releases of the chart, "cluster, namespace, release".
- A duration in braces: `{6h}` -> "6h", `{10m as seconds}` -> "600".

The chart's PodMonitor adds the label `release`, and Prometheus' operator adds `namespace`. Thanos
and Mimir need `cluster` if they evaluate the rules for several clusters. Prometheus treats a
missing label as empty. For tests, a scale below 1 shortens all durations; the chart uses scale 1.
"""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parent / "rules.yaml"
FOLDER = Path(__file__).parents[2] / "helm" / "files" / "rules"
FILE = "rayloom.yaml"
PLACE_LABELS = ("cluster", "namespace", "release")
RUN_LABELS = (*PLACE_LABELS, "run")
_HEADER = "# Written by `python -m deploy.rules` from deploy/rules/rules.yaml.\n"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\{(\d+)([smhd])( as seconds)?\}")


def rules_text(*, scale: float = 1.0) -> str:
    """Return the rules as YAML.

    scale: factor for all durations; a shortened duration is at least 1 ms.
    """

    def scaled(found: re.Match[str]) -> str:
        amount, unit, is_number = found.groups()
        if is_number:
            return f"{int(amount) * _SECONDS[unit] * scale:g}"
        if scale == 1.0:
            return f"{amount}{unit}"
        return f"{max(round(int(amount) * _SECONDS[unit] * scale * 1000), 1)}ms"

    source = SOURCE.read_text(encoding="utf-8")
    rules = source[source.index("groups:") :]
    for name, labels in (("RUN_LABELS", RUN_LABELS), ("PLACE_LABELS", PLACE_LABELS)):
        rules = rules.replace(name, ", ".join(labels))
    return _HEADER + _DURATION.sub(scaled, rules)


def rule_files() -> dict[str, str]:
    """Return the expected rule files of the chart by name."""
    return {FILE: rules_text()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in rule_files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote {FOLDER / name}")
