"""Abandon the current step before its first update, so that a run can end within its grace
period.

The request reaches the ranks at different times. Between two micro-batches the ranks agree whether
any rank has received the request, so that no rank enters a collective that another rank skips.
Until the first update of a step the weights are those of the previous step, and a checkpoint of
that step can be written. Used by `TrainerRank`. The module does not import torch at its top,
because the supervisor imports the error.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


class StepAbandoned(Exception):
    """A step was abandoned; the weights are those of the previous step."""


class Abandonment:
    """A request to abandon the step. `check` is collective, over a separate gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_asked = threading.Event()

    def ask(self) -> None:
        """Request that the current and every later step is abandoned; callable from any thread."""
        self._is_asked.set()

    def check(self) -> None:
        """Raise StepAbandoned on every rank if any rank has received the request."""
        import torch
        import torch.distributed as dist

        is_asked = torch.tensor([int(self._is_asked.is_set())])
        if self._group.size() > 1:
            dist.all_reduce(is_asked, op=dist.ReduceOp.MAX, group=self._group)
        if is_asked.item():
            raise StepAbandoned("the current step was abandoned")
