"""Tests of the stages of a start: each is shown at once, and with its seconds when it ends."""

from __future__ import annotations

from itertools import accumulate

from service.cli.outlet import Stages


def test_each_stage_is_shown_with_its_seconds_and_the_next_stage() -> None:
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
