"""How actors reach the inference deployment: a Protocol, token ids in, token ids out.

`service.inference` implements it over Ray Serve; tests stand a ten-line fake in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from actors.types import FinishReason, LogProbs, TokenIds, VersionSpan


class PolicyUnavailable(Exception):
    """The engine could not answer (replica died, not ready, shutting down). Retry elsewhere."""


class PolicyDeadlineExceeded(Exception):
    """No answer within the request's deadline; the engine was told to abort it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn.

    trajectory_id: session affinity; turns of one trajectory meet the same replica's prefix cache.
    prompt_token_ids: [P] int32.
    max_tokens: sampled tokens at most, >= 1.
    temperature: 0 is greedy; training uses the run's one temperature.
    deadline_s: seconds from now until the call must have ended.
    cache_salt: what the trajectory's first reply carried; None on its first turn.
    """

    trajectory_id: str
    prompt_token_ids: TokenIds
    max_tokens: int
    temperature: float
    deadline_s: float
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReply:
    """token_ids: [A] int32, sampled stop token included. logprobs: [A] float32, nats, processed.

    version_spans: contiguous, covering [0, A). cache_salt: pass it on with the next turn.
    """

    token_ids: TokenIds
    logprobs: LogProbs
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    cache_salt: str


class PolicyClient(Protocol):
    """What an environment's turn loop needs of the inference deployment."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one turn.

        Raises: PolicyDeadlineExceeded, PolicyUnavailable; ValueError for a request that the
        engine can never serve (prompt too long, empty prompt).
        """
        ...
