"""The schedule of the learning rate: a pure function of the update's number.

A scheduler object would have a state, which checkpoints would have to store. With a pure function,
a resumed run computes the same rate for its next update as an uninterrupted run. Called by
`sharded_model.TrainedModel`, for the policy and for a critic. The module does not import torch.
"""

from __future__ import annotations

import math

from actors.algorithm import ScheduleKind, ScheduleSettings


def learning_rate_at(
    num_updates: int,
    *,
    learning_rate: float,
    warmup_updates: int,
    schedule: ScheduleSettings,
) -> float:
    """Return the learning rate of the update after `num_updates` applied updates.

    Let n = num_updates, W = warmup_updates, N = updates. The decay begins at B = W, or for wsd at
    B = N - decay_updates. Let p = (n - B) / (N - B), clipped to [0, 1].

    If n < W: rate = learning_rate (n + 1) / W. Otherwise rate = learning_rate (m + (1 - m) f), with
    m = min_ratio and f = 1 (constant), 1 - p (linear, wsd), (1 + cos(pi p)) / 2 (cosine).

    Source: transformers' `get_scheduler`. Deviations: its warm-up begins with an update of rate 0,
    ours with learning_rate / W; its wsd warms up from the minimum, ours from 0.

    Args: schedule: `updates` must be set unless the kind is constant.
    Examples: learning_rate 1.0 and warmup_updates 4: .25, .5, .75, 1, 1, …; also linear with
    updates 8: .25, .5, .75, 1, 1, .75, .5, .25, 0, 0, …
    """
    if num_updates < warmup_updates:
        return learning_rate * min(1.0, (num_updates + 1) / warmup_updates)
    if schedule.kind is ScheduleKind.CONSTANT:
        return learning_rate
    end, begin = schedule.updates, warmup_updates
    assert end is not None, "a schedule that decays has an end"
    if schedule.kind is ScheduleKind.WSD:
        assert schedule.decay_updates is not None, "wsd has the length of its decay"
        begin = end - schedule.decay_updates
    if num_updates >= end:
        factor = 0.0
    elif num_updates <= begin:
        factor = 1.0
    else:
        progress = (num_updates - begin) / (end - begin)
        is_cosine = schedule.kind is ScheduleKind.COSINE
        factor = 0.5 * (1.0 + math.cos(math.pi * progress)) if is_cosine else 1.0 - progress
    return learning_rate * (factor * (1.0 - schedule.min_ratio) + schedule.min_ratio)
