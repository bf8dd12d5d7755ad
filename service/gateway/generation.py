"""Sample from token ids to token ids, for agent loops that render their own prompts.

The API's replicas check the body and write the answer with this module; the gateway samples
(`service.gateway.uploads`). The sampled tokens are not stored. They are trained only if the client
uploads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.environment.policy import GenerateReply, GenerateRequest
from actors.environment.settings import RolloutSettings
from service.api.problems import Problem
from service.gateway.upload_bodies import GenerateAnswer, GenerateBody, Packed, Span
from service.gateway.upload_columns import read_ids
from service.gateway.upload_faults import Fault, Violation
from service.intake.uploads import PolicyFacts


def checked_request(
    body: GenerateBody,
    facts: PolicyFacts,
    *,
    tenant: str,
    rollouts: RolloutSettings,
    deadline_s: float,
) -> GenerateRequest:
    """Convert the body of an HTTP request to a request for the engine. tenant: the client's tenant.

    Raises: Violation if the prompt is invalid or does not fit into the context; Problem if
        max_tokens is larger than `rollouts.max_tokens_per_turn`.
    """

    def fail(fault: Fault, name: str, message: str) -> Violation:
        return Violation(fault, [name], message)

    prompt = read_ids(body.token_ids, facts, fail)
    room = facts.max_context_tokens - prompt.shape[0]
    most = min(room, rollouts.max_tokens_per_turn)
    if room < 1 or (body.max_tokens or 1) > room:
        raise fail(
            Fault.CONTEXT_LENGTH_EXCEEDED,
            "max_tokens" if body.max_tokens else "token_ids",
            f"got {prompt.shape[0]} tokens and max_tokens {body.max_tokens}, expected at most "
            f"{facts.max_context_tokens} together (model.max_context_tokens), with room to sample "
            "at least one",
        )
    if (body.max_tokens or 1) > rollouts.max_tokens_per_turn:
        raise Problem(
            422,
            "invalid-request",
            f"max_tokens is {body.max_tokens}, expected at most {rollouts.max_tokens_per_turn} "
            "(rollouts.max_tokens_per_turn); sample the rest with another request",
            errors=[{"loc": ["body", "max_tokens"], "code": "invalid-request"}],
        )
    return GenerateRequest(
        prompt_token_ids=prompt,
        max_tokens=min(most, body.max_tokens or most),
        temperature=facts.temperature,
        stop=rollouts.stop,
        deadline_s=deadline_s,
        cache_salt=body.cache_salt or None,
        tenant=tenant,
        replica=body.replica,
    )


def generate_answer(reply: GenerateReply, *, packed: bool) -> GenerateAnswer:
    experts = reply.expert_indices
    return GenerateAnswer(
        token_ids=_packed(reply.token_ids, "<i4") if packed else reply.token_ids.tolist(),
        logprobs=_packed(reply.logprobs, "<f4") if packed else reply.logprobs.tolist(),
        finish_reason=reply.finish_reason,
        version_spans=[
            Span(version=span.version, start=span.start, end=span.end)
            for span in reply.version_spans
        ],
        experts=None if experts is None else _packed_experts(experts),
        cache_salt=reply.cache_salt,
        replica=reply.replica,
    )


def _packed(column: NDArray[Any], dtype: str) -> Packed:
    return Packed(dtype=dtype, data=np.ascontiguousarray(column, dtype).tobytes())


def _packed_experts(indices: NDArray[Any]) -> Packed:
    dtype = "|u1" if indices.dtype == np.uint8 else "<i2"
    return Packed(dtype=dtype, data=_packed(indices, dtype).data, shape=indices.shape)
