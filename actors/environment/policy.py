"""The interface from environment actors to the inference deployment; turns are token ids.

`service.inference` implements it over Ray Serve; tests replace it with a ten-line fake.
`check_reply` checks each reply; the turn loop trusts the replies that pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from actors.environment.protocol import MalformedCall, ToolSchema
from actors.environment.settings import KeptTokens
from actors.expert_records import ExpertIndices
from actors.misalignment import find_misalignment
from actors.types import FinishReason, LogProbs, Outcome, TokenIds, Turn, VersionSpan


class PolicyUnavailable(Exception):
    """Raised if an engine cannot answer, for example while it starts. Retry on another engine."""


class PolicyDeadlineExceeded(Exception):
    """Raised if the engine does not answer within the deadline; the request is then aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request to the inference deployment to sample one turn."""

    prompt_token_ids: TokenIds
    """Token ids of the prompt: [P] int32."""
    max_tokens: int
    """Maximum number of tokens to sample, at least 1."""
    temperature: float
    """Sampling temperature; 0 for greedy sampling. In training it is a setting of the
    rollouts, or of the part of a mixture."""
    deadline_s: float
    """Seconds that the call may take, from its start to its end."""
    cache_salt: str | None = None
    """The `cache_salt` of the trajectory's first reply; None on the first turn."""
    tenant: str = ""
    """The tenant that owns the request; empty for the run itself. Tenants share no
    cached prefixes."""
    replica: str = ""
    """The replica that sampled the trajectory's last reply and has its prefix cached; empty on the
    first turn."""
    stop: tuple[str, ...] = ()
    """Strings that end the reply; the reply includes the token that completes a string."""
    kept: KeptTokens | None = None
    """The tokens that may be sampled; None means every token, as in training."""
    tools: tuple[ToolSchema, ...] | None = None
    """The tools that the prompt declares. The engine parses the reply for calls of these tools and
    for thinking; if there are no tools, only for thinking. None: the reply is not parsed."""

    def salted(self, salt: str) -> str:
        """Return the cache salt to give to the engine: the tenant's name and `salt`.

        Two tenants thus never have the same salt, and share no cached prefixes.
        """
        # No tenant's name contains a slash.
        return f"{self.tenant}/{salt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A tool call as the engine's parser read it, not checked against a schema.

    `actors.environment.tool_calls.check_calls` checks it.
    """

    name: str
    arguments: str
    """The arguments as JSON text; if the call is broken, the text of the call."""
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply's text, split into thinking, content and calls. The trainer uses only the ids."""

    content: str
    """The text without thinking and calls; markup that the parser could not read stays in it."""
    reasoning: str | None = None
    """The thinking; None: the reply has none."""
    calls: tuple[ParsedCall | MalformedCall, ...] = ()
    """The calls in the order of the text; a malformed one is markup that the parser cannot read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReply:
    """The reply that the engine sampled for one turn."""

    token_ids: TokenIds
    """Sampled token ids, including a sampled stop token: [A] int32."""
    logprobs: LogProbs
    """Log-probabilities in nats, after the temperature was applied: [A] float32."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """The weight version of each token: contiguous spans that cover [0, A)."""
    cache_salt: str
    """The salt to send with the trajectory's later requests."""
    replica: str = ""
    """The replica that sampled this reply and should get the trajectory's next request."""
    expert_indices: ExpertIndices | None = None
    """[R, L, K] uint8 or int16: the K experts that each of L routed layers chose for the first R
    tokens. None: not recorded."""
    parsed: ParsedReply | None = None
    """The parsed reply; None if the request had no `tools`."""


class PolicyClient(Protocol):
    """The inference deployment, as the turn loop uses it."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one turn, and return the reply.

        Raises: PolicyDeadlineExceeded, PolicyUnavailable; ValueError for a request that the
        engine can never serve (prompt too long, empty prompt).
        """
        ...


class UnusableReply(Exception):
    """Raised if a reply's tokens cannot be trained on. outcome: the outcome of the trajectory."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


def check_reply(request: GenerateRequest, reply: GenerateReply) -> Turn:
    """Check a reply; return the turn, which consists of the request's prompt and the reply.

    Raises: UnusableReply if no token was sampled (outcome empty), if `find_misalignment` finds a
    fault or a log-probability is not finite (outcome misaligned), or if the request has tools and
    the reply is not parsed.
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
        prompt_token_ids=request.prompt_token_ids,
        sampled_token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reply.finish_reason,
        version_spans=reply.version_spans,
        expert_indices=reply.expert_indices,
    )
    problem = find_misalignment(turn)
    if problem is None and not np.isfinite(logprobs).all():
        problem = "a log-probability is not finite; check the engine's logits"
    if problem is not None:
        raise UnusableReply(Outcome.TOKEN_MISALIGNED, problem)
    if request.tools is not None and reply.parsed is None:
        raise UnusableReply(
            Outcome.INFRASTRUCTURE_ERROR,
            "the reply is not parsed, expected its calls; parse it in the engine's replica",
        )
    return turn
