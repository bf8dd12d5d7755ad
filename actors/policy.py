"""How actors reach the inference deployment: a Protocol, token ids in, token ids out.

`service.inference` implements it over Ray Serve; tests stand a ten-line fake in its place.
`check_reply` is the border: the turn loop trusts a reply that has passed it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from actors.expert_records import ExpertIndices
from actors.types import FinishReason, LogProbs, Outcome, TokenIds, VersionSpan


class PolicyUnavailable(Exception):
    """The engine could not answer (replica died, not ready, shutting down). Retry elsewhere."""


class PolicyDeadlineExceeded(Exception):
    """No answer within the request's deadline; the engine was told to abort it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn."""

    prompt_token_ids: TokenIds
    """[P] int32."""
    max_tokens: int
    """Sampled tokens at most, >= 1."""
    temperature: float
    """0 is greedy; training uses the run's one temperature."""
    deadline_s: float
    """Seconds from now until the call must have ended."""
    cache_salt: str | None = None
    """What the trajectory's first reply carried; None on its first turn."""
    replica: str = ""
    """Who gave the trajectory's first reply, and has its prefix cached; empty on its first turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReply:
    """What the engine sampled for one turn."""

    token_ids: TokenIds
    """[A] int32, sampled stop token included."""
    logprobs: LogProbs
    """[A] float32, nats, processed (temperature applied)."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """Contiguous, covering [0, A)."""
    cache_salt: str
    """For the trajectory's later requests."""
    replica: str = ""
    """For the trajectory's later requests."""
    expert_indices: ExpertIndices | None = None
    """[R, L, K] uint8 or int16, as `Turn.expert_indices`; None: not recorded."""


class PolicyClient(Protocol):
    """What an environment's turn loop needs of the inference deployment."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one turn.

        Raises: PolicyDeadlineExceeded, PolicyUnavailable; ValueError for a request that the
        engine can never serve (prompt too long, empty prompt).
        """
        ...


class UnusableReply(Exception):
    """The reply's tokens cannot be trained on; outcome: how that ends the trajectory."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


def check_reply(reply: GenerateReply) -> GenerateReply:
    """Give the reply with its arrays as int32 and float32.

    Raises: UnusableReply for no sampled token (empty); for lengths that differ, a negative id, a
    log-probability that is not finite, or version spans that do not cover the tokens (misaligned).
    """
    token_ids = np.asarray(reply.token_ids, dtype=np.int32)
    logprobs = np.asarray(reply.logprobs, dtype=np.float32)
    if token_ids.shape == (0,) and logprobs.shape == (0,):
        raise UnusableReply(Outcome.EMPTY, f"no sampled token, finish reason {reply.finish_reason}")
    if token_ids.ndim != 1 or logprobs.shape != token_ids.shape:
        problem = f"{logprobs.size} log-probabilities for {token_ids.size} sampled tokens"
    elif token_ids.min() < 0:
        problem = "a sampled token id is negative"
    elif not np.isfinite(logprobs).all():
        problem = "a log-probability is not finite"
    elif not _covers(reply.version_spans, token_ids.shape[0]):
        problem = "the version spans do not cover the sampled tokens"
    else:
        return replace(reply, token_ids=token_ids, logprobs=logprobs)
    raise UnusableReply(Outcome.TOKEN_MISALIGNED, problem)


def _covers(spans: tuple[VersionSpan, ...], num_tokens: int) -> bool:
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == num_tokens
