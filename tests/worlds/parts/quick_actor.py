"""An environment actor with short times, in a module that Ray's workers can import."""

from __future__ import annotations

from typing import Any

from actors.environment.actor import EnvironmentActor
from actors.trajectory_queue import exchange


class QuickActor(EnvironmentActor):
    """An environment actor that asks the queue often and sends small blocks."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        exchange.POLL_S, exchange.MAX_BLOCK = 0.2, 8
        super().__init__(*arguments, **settings)
