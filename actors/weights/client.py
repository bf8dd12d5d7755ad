"""The trainer's end of vLLM's own weight-transfer backends (NCCL, CUDA IPC), over the board.

vLLM's trainer-side engines drive four synchronous calls; each becomes a command that the board
hands to every replica, and returns when all have executed it. So the trainer needs no addresses of
engines, and every call has a deadline.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle

from actors.weights.board import CommandKind

RPC_MARGIN_S = 10.0


class BoardClient:
    """Implements vLLM's `VLLMWeightSyncClient` protocol.

    Before each `send_weights()` set `version` to what is being sent: vLLM's trainer engines do not
    pass one when they finish.
    """

    def __init__(
        self,
        board: ActorHandle,
        epoch: int,
        *,
        command_timeout_s: float = 300.0,
        init_timeout_s: float = 300.0,
    ) -> None:
        self._board = board
        self._epoch = epoch
        self._command_timeout_s = command_timeout_s
        self._init_timeout_s = init_timeout_s
        self.version: int | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the transfer on every live replica; rank offsets are dealt out by the board."""
        self._run(CommandKind.INIT, init_info, timeout_s=self._init_timeout_s)

    def start_weight_update(self) -> None:
        """Pause every replica, keeping its requests, and open the update."""
        self._run(CommandKind.START, None, timeout_s=self._command_timeout_s)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Have every replica receive one chunk; runs beside the trainer's own broadcast."""
        self._run(CommandKind.UPDATE, update_info, timeout_s=self._command_timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update, set the version and resume; the version is then the current one.

        Raises: ValueError when neither the argument nor `self.version` says what was sent.
        """
        version = self.version if weight_version is None else int(weight_version)
        if version is None:
            raise ValueError(
                "weights: no version to finish with; set client.version before sending"
            )
        self._run(CommandKind.FINISH, None, version=version, timeout_s=self._command_timeout_s)

    def _run(
        self, kind: CommandKind, payload: Any, *, timeout_s: float, version: int | None = None
    ) -> None:
        reference = self._board.command.remote(self._epoch, kind, payload, version, timeout_s)
        ray.get(reference, timeout=timeout_s + RPC_MARGIN_S)
