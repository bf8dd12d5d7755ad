"""An engine's side of a broadcast without vLLM: it polls, receives, loads a model and reports."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from actors.weights.board import (
    MAX_FAILED_BROADCASTS,
    Publication,
    Seat,
    StaleTerm,
    WeightGroup,
)
from actors.weights.buffers import pack_group, unpack_group
from actors.weights.collective import Reception, read_progress
from actors.weights.logprob_check import EngineScores

LAYERS, WIDTH = 4, 1500


def build_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def packed(model: nn.Module) -> tuple[WeightGroup, ...]:
    """Return a group of weights for each layer, 9 MB each."""
    return tuple(pack_group([named]) for named in model.state_dict().items())


def score(model: nn.Module) -> Any:
    with torch.no_grad():
        return model(torch.ones(WIDTH)).numpy()[:16]


def group_former(board: Any) -> Callable[[Publication, str, float], Seat | None]:
    """Return a function that asks the board to form a group, as the trainer's rank 0 does."""

    def form_group(offer: Publication, store: str, timeout_s: float) -> Seat | None:
        call = board.form_group.remote(offer.term, offer.version, store, timeout_s)
        try:
            seat: Seat | None = ray.get(call, timeout=timeout_s + 30)
        except ray.exceptions.RayError as error:
            raise StaleTerm("the test is over") from error
        return seat

    return form_group


@ray.remote(num_cpus=0)
class Member:
    """An engine that pulls publications until it is killed.

    fault: "dies" or "freezes" happens once, at "seat", "broadcast" or "load". With "strays" the
    engine never reaches rank 0's store, and ends after MAX_FAILED_BROADCASTS as a real engine does.
    """

    def __init__(
        self, board: Any, directory: str, name: str, fault: str = "", at: str = ""
    ) -> None:
        self._board, self._directory, self._name = board, Path(directory), name
        self._fault, self._at = fault, at
        self._model = build_model(seed=99)
        self._held: tuple[int | None, int | None] = (None, None)
        self.num_failed = 0

    def pid(self) -> int:
        return os.getpid()

    def failures(self) -> int:
        return self.num_failed

    async def pull(self) -> None:
        this_actor = ray.get_runtime_context().current_actor
        await self._board.join.remote(self._name, this_actor)
        while True:
            publication = await self._board.poll.remote(self._name, *self._held, 1.0)
            if publication is None:
                continue
            seat = await self._board.take_seat.remote(self._name, 2.0)
            if seat is not None:
                self._meet_fault("seat")
                await self._take_part(publication, seat)

    async def _take_part(self, publication: Publication, seat: Seat) -> None:
        reception = Reception(
            replace(seat, store="127.0.0.1:1") if self._fault == "strays" else seat,
            [group.manifest for group in publication.groups],
            [group.checksum for group in publication.groups],
            rank=seat.rank,
            device=torch.device("cpu"),
            address="127.0.0.1",
            progress=self._directory / f"{self._name}-{seat.name}",
        )
        while True:
            received, failure = read_progress(self._directory / f"{self._name}-{seat.name}")
            if failure is not None:
                self.num_failed += 1
                if self.num_failed == MAX_FAILED_BROADCASTS:
                    os.kill(os.getpid(), signal.SIGKILL)
                return
            if received:
                self._meet_fault("broadcast")
            if received == len(publication.groups):
                break
            await self._board.beat.remote(self._name)
            await asyncio.sleep(0.01)
        self._meet_fault("load")
        for manifest, buffer in zip(reception.manifests, reception.buffers, strict=True):
            self._model.load_state_dict(dict(unpack_group(manifest, buffer)), strict=False)
        self._held = (publication.term, publication.version)
        await self._board.report.remote(
            self._name, *self._held, EngineScores(logprobs=score(self._model))
        )

    def _meet_fault(self, at: str) -> None:
        if self._at != at:
            return
        self._at = ""
        os.kill(os.getpid(), signal.SIGKILL if self._fault == "dies" else signal.SIGSTOP)
