"""Whether the policy's reply can become a turn. Pure; called by the turn loop for every reply."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from actors.policy import GenerateReply
from actors.types import Outcome, VersionSpan


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
        raise UnusableReply(
            Outcome.TOKEN_MISALIGNED,
            f"{logprobs.size} log-probabilities for {token_ids.size} sampled tokens",
        )
    if token_ids.min() < 0:
        raise UnusableReply(Outcome.TOKEN_MISALIGNED, "a sampled token id is negative")
    if not np.isfinite(logprobs).all():
        raise UnusableReply(Outcome.TOKEN_MISALIGNED, "a log-probability is not finite")
    if not _covers(reply.version_spans, token_ids.shape[0]):
        raise UnusableReply(
            Outcome.TOKEN_MISALIGNED, "the version spans do not cover the sampled tokens"
        )
    return replace(reply, token_ids=token_ids, logprobs=logprobs)


def _covers(spans: tuple[VersionSpan, ...], num_tokens: int) -> bool:
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == num_tokens
