"""Tests of learning rates by the number of updates, against formulas and transformers."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from actors.algorithm import ScheduleKind, ScheduleSettings, learning_rate_at

RATE = 3e-4


def rates(num: int, *, warmup: int = 0, rate: float = 1.0, **schedule: Any) -> list[float]:
    settings = ScheduleSettings(**schedule)
    return [
        learning_rate_at(done, learning_rate=rate, warmup_updates=warmup, schedule=settings)
        for done in range(num)
    ]


def of_transformers(name: str, num: int, **arguments: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = get_scheduler(name, optimizer, **arguments)
    found = []
    for _ in range(num):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_a_constant_rate_warms_up_linearly_and_then_stays() -> None:
    assert rates(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(2) == [1.0, 1.0]
    # The rates have the same bits as those of runs before schedules were introduced.
    before = [RATE * min(1.0, (done + 1) / 7) for done in range(20)]
    assert rates(20, warmup=7, rate=RATE) == before


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "linear"}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ({"kind": "linear", "min_ratio": 0.2}, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"kind": "linear", "min_ratio": 1.0}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (
            {"kind": "cosine"},
            [0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0, 0.0],
        ),
        ({"kind": "wsd", "decay_updates": 2}, [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        (
            {"kind": "wsd", "decay_updates": 2, "min_ratio": 0.5},
            [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.5],
        ),
        # With a decay of one update, all updates before the end have the whole rate.
        ({"kind": "wsd", "decay_updates": 1}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
        ({"kind": "wsd", "decay_updates": 4}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    ],
)
def test_six_updates_by_hand(schedule: dict[str, Any], expected: list[float]) -> None:
    assert rates(8, warmup=2, updates=6, **schedule) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1])
@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_rates_after_the_warm_up_equal_those_of_transformers(
    kind: ScheduleKind, min_ratio: float, warmup: int
) -> None:
    """Compare the rates at the same number of updates, up to the end and beyond it."""
    num, decay = 24, 8
    named: dict[ScheduleKind, tuple[str, dict[str, Any]]] = {
        "constant": ("constant_with_warmup", {}),
        "linear": ("linear", {"num_training_steps": num}),
        "cosine": (
            "cosine_with_min_lr",
            {
                "num_training_steps": num,
                "scheduler_specific_kwargs": {"min_lr_rate": min_ratio},
            },
        ),
        "wsd": (
            "warmup_stable_decay",
            {
                "num_training_steps": num,
                "scheduler_specific_kwargs": {
                    "num_decay_steps": decay,
                    "decay_type": "linear",
                    "min_lr_ratio": min_ratio,
                },
            },
        ),
    }
    name, arguments = named[kind]
    theirs = of_transformers(name, num + 6, num_warmup_steps=warmup, **arguments)
    decays = kind != "constant"
    ours = rates(
        num + 6,
        warmup=warmup,
        rate=RATE,
        kind=kind,
        updates=num if decays else None,
        decay_updates=decay if kind == "wsd" else None,
        min_ratio=min_ratio if decays else 0.0,
    )
    if kind == "linear":
        # The linear schedule of transformers has no minimum.
        theirs = [RATE * min_ratio + rate * (1 - min_ratio) for rate in theirs]
    if kind == "cosine":
        # The cosine of transformers rises again after the end.
        theirs[num:] = [RATE * min_ratio] * 6
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12, abs=1e-18)
    # The warm-up of transformers begins with a rate of 0, so that it is one update behind ours.
    warm = of_transformers("constant_with_warmup", warmup + 1, num_warmup_steps=warmup)
    assert ours[:warmup] == pytest.approx(warm[1:], rel=1e-12)


def test_a_cosine_without_a_minimum_equals_that_of_transformers() -> None:
    theirs = of_transformers("cosine", 30, num_warmup_steps=4, num_training_steps=30)
    ours = rates(30, warmup=4, rate=RATE, kind="cosine", updates=30)
    assert ours[4:] == pytest.approx(theirs[4:], rel=1e-12)


@given(
    kind=st.sampled_from(get_args(ScheduleKind)),
    warmup=st.integers(0, 50),
    decay=st.integers(1, 50),
    stable=st.integers(0, 50),
    min_ratio=st.floats(0.0, 1.0),
    beyond=st.integers(0, 50),
)
def test_a_rate_rises_then_falls_and_ends_at_its_minimum(
    kind: ScheduleKind, warmup: int, decay: int, stable: int, min_ratio: float, beyond: int
) -> None:
    end = warmup + stable + decay
    found = rates(
        end + beyond + 1,
        warmup=warmup,
        rate=RATE,
        kind=kind,
        updates=end,
        decay_updates=decay if kind == "wsd" else None,
        min_ratio=min_ratio,
    )
    assert found[: warmup + 1] == sorted(found[: warmup + 1])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    assert found[warmup] == pytest.approx(RATE, rel=1e-12) and min(found) >= 0.0
    minimum = RATE if kind == "constant" else RATE * min_ratio
    assert found[end:] == [minimum] * (beyond + 1)
