"""The stages of a start: a line at once, and each one's seconds."""

from __future__ import annotations

from itertools import accumulate

from service.cli.outlet import Stages


def test_each_stage_is_told_with_its_seconds_and_the_next_one() -> None:
    lines: list[str] = []
    moments = accumulate([10.0, 1.5, 0.5, 0.2])
    stages = Stages("reading CONFIG", tell=lines.append, clock=lambda: next(moments))
    assert lines == ["rayloom: reading CONFIG"]
    stages.next("starting Ray")
    stages.ended("engine: loading the model", 0.31)
    stages.end()
    assert lines[1:] == [
        "reading CONFIG: 1.5 s; next: starting Ray",
        "engine: loading the model: 0.3 s",
        "starting Ray: 0.2 s",
    ]
