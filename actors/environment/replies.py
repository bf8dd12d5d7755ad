"""Whether the policy's reply can become a turn. Pure; called by the turn loop for every reply."""

from __future__ import annotations

import numpy as np

from actors.merge.misalignment import find_misalignment
from actors.policy import GenerateReply
from actors.types import Outcome, TokenIds, Turn


class UnusableReply(Exception):
    """The reply's tokens cannot be trained on; outcome: how that ends the trajectory."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


def check_reply(prompt: TokenIds, reply: GenerateReply) -> Turn:
    """Make the turn of a prompt that was sent and the reply that came back.

    Raises: UnusableReply for no sampled token (empty); for what `find_misalignment` finds, or a
    log-probability that is not finite (misaligned).
    """
    token_ids = np.asarray(reply.token_ids, dtype=np.int32)
    logprobs = np.asarray(reply.logprobs, dtype=np.float32)
    if token_ids.shape == (0,) and logprobs.shape == (0,):
        raise UnusableReply(Outcome.EMPTY, f"no sampled token, finish reason {reply.finish_reason}")
    if token_ids.ndim != 1 or logprobs.ndim != 1:
        raise UnusableReply(
            Outcome.TOKEN_MISALIGNED,
            f"ids of shape {token_ids.shape} and log-probabilities of shape {logprobs.shape}, "
            "expected one row of each",
        )
    turn = Turn(
        prompt_token_ids=prompt,
        sampled_token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reply.finish_reason,
        version_spans=reply.version_spans,
    )
    problem = find_misalignment(turn)
    if problem is None and not np.isfinite(logprobs).all():
        problem = "a log-probability is not finite; look at the engine's logits"
    if problem is not None:
        raise UnusableReply(Outcome.TOKEN_MISALIGNED, problem)
    return turn
