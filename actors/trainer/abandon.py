"""Abandon the current step before its first update, so that a run can end within its grace
period.

Every rank is asked, at a different time; between two micro-batches the ranks agree whether any of
them was, so that none enters a collective that another one has left. Until the first update of a
step the weights are those of the step before: a checkpoint of it can be written. Used by
`TrainerRank`. Imports no torch at its top: the supervisor reads the error.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


class StepAbandoned(Exception):
    """A step was abandoned; the weights are those of the step before."""


class Abandonment:
    """The request to one rank to abandon. `check` is collective, over a separate gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_asked = threading.Event()

    def ask(self) -> None:
        """Request that the current step, and every later one, is abandoned; from any thread."""
        self._is_asked.set()

    def check(self) -> None:
        """Raise StepAbandoned on every rank if any rank was asked to abandon."""
        import torch
        import torch.distributed as dist

        is_asked = torch.tensor([int(self._is_asked.is_set())])
        if self._group.size() > 1:
            dist.all_reduce(is_asked, op=dist.ReduceOp.MAX, group=self._group)
        if is_asked.item():
            raise StepAbandoned("the current step was abandoned")
