"""The HTTP routes for clients that run their own agent loop.

A client sends token ids to sample from the policy, and uploads trajectories to train on. A whole
upload is checked before any part is stored. Each trajectory's result is accepted, duplicate or
rejected. A complete group is submitted for training before the answer. If the submission is
refused, the client repeats the upload; the stored trajectories then count as duplicates.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray
from pydantic import Field

from actors.environment.policy import GenerateReply, GenerateRequest
from actors.environment.settings import RolloutSettings
from actors.policy_age import oldest_version
from service.access.keys import Caller
from service.api.bodies import THREAD_BYTES
from service.api.callers import caller_of
from service.api.ports import PREFIX, RunPort
from service.api.problems import MAX_ERRORS, Problem
from service.api.rollouts import check_samples, refuse_if_needed
from service.api.schemas import KnownId, StrictBody
from service.api.settings import HttpSettings
from service.gateway.routes import answer_or_problem
from service.gateway.upload_bodies import (
    MSGPACK,
    Fault,
    GenerateAnswer,
    GenerateBody,
    Packed,
    UploadBody,
    Violation,
    decode_body,
    is_packed,
)
from service.gateway.upload_checks import checked_upload
from service.gateway.upload_columns import read_ids
from service.intake.uploads import (
    GroupPolicy,
    PolicyFacts,
    RejectedTrajectory,
    TrajectoryAnswer,
    Upload,
    UploadGroup,
    UploadReply,
)

if TYPE_CHECKING:
    # It needs a tokenizer, which a replica of the API does not load.
    from service.gateway.uploads import Uploads


UPLOADS = f"{PREFIX}/trajectories"
Answer = TypeVar("Answer")


class PolicyAnswer(StrictBody):
    """The facts that a client needs to sample for this run, or to upload trajectories."""

    tokenizer_fingerprint: str = Field(
        description="sha256: and the digest of chat_template and vocab as JSON, with sorted keys "
        "and no spaces"
    )
    vocab_size: int | None = Field(
        description="every token id is below this number; null: not known"
    )
    max_context_tokens: int = Field(
        description="maximum number of tokens of prompt and reply together"
    )
    temperature: float
    policy_version: int = Field(description="version of the weights after the last finished step")
    oldest_version: int = Field(description="tokens of older versions are refused as stale now")


class GroupAnswer(StrictBody):
    """The state of a group of uploaded trajectories."""

    id: str
    uploaded: int
    members: int | None = Field(
        description="number of trajectories with which the group is complete; null: it is complete "
        "when it is closed"
    )
    is_submitted: bool = Field(
        description="whether the group is submitted; GET /api/v1/rollouts/ID then shows its state"
    )

    @classmethod
    def of(cls, group: UploadGroup, caller: Caller) -> GroupAnswer:
        return cls(
            id=caller.shown(group.id),
            uploaded=group.num_uploaded,
            members=group.num_members,
            is_submitted=group.is_closed,
        )


class UploadAnswer(StrictBody):
    """The result of each trajectory in an upload. Accepted trajectories are stored."""

    accepted: list[str]
    duplicates: list[str] = Field(
        description="trajectories that were accepted before with the same content"
    )
    rejected: list[RejectedTrajectory]
    groups: list[GroupAnswer]

    @classmethod
    def of(cls, reply: UploadReply, caller: Caller) -> UploadAnswer:
        return cls(
            accepted=[caller.shown(each) for each in reply.accepted],
            duplicates=[caller.shown(each) for each in reply.duplicates],
            rejected=[replace(each, id=caller.shown(each.id)) for each in reply.rejected],
            groups=[GroupAnswer.of(group, caller) for group in reply.groups],
        )


def _either_format(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body that is either JSON or MessagePack."""
    # FastAPI cannot derive the description, because the body's type is a `msgspec.Struct`.
    (reference,), definitions = msgspec.json.schema_components([kind])
    schema = _inlined(reference, definitions)
    content = {media_type: {"schema": schema} for media_type in ("application/json", MSGPACK)}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace each `$ref` in a JSON schema by its definition, which may not refer to itself."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(each, definitions) for name, each in schema.items()}


_TAGS: list[str | Enum] = ["trajectories"]
_UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "the run does not have it"}}
_REFUSED: dict[int | str, dict[str, Any]] = {
    409: {"description": "a group exists with another number of members"},
    429: {"description": "too much is waiting; Retry-After says when to try again"},
}


def add_uploads(app: FastAPI, run: RunPort, port: Uploads, settings: HttpSettings) -> None:
    """Add the routes of uploads and of token-in, token-out sampling.

    Args: port: the gateway's uploads (`service.gateway.client`).
    """
    _add_trajectories(app, run, port, settings)
    _add_lookups(app, run, port, settings)
    _add_generate(app, port, settings)


def _add_trajectories(app: FastAPI, run: RunPort, port: Uploads, settings: HttpSettings) -> None:
    service = settings.service

    @app.post(UPLOADS, tags=_TAGS, responses=_REFUSED, openapi_extra=_either_format(UploadBody))
    async def upload(request: Request) -> UploadAnswer:
        """Accept trajectories that were sampled elsewhere, JSON or MessagePack: all are checked
        before any is stored. docs/service.md has the fields."""
        raw, packed, caller = await request.body(), is_packed(request.headers), caller_of(request)
        facts, readiness = await answer_or_problem(port.policy_facts()), await run.readiness()
        read = partial(_read_upload, raw, packed, facts, settings, caller)
        uploads, policies = await _off_loop(raw, read)
        reply = await answer_or_problem(
            port.add(
                uploads,
                policies,
                policy_version=readiness.policy_version,
                max_members=service.max_samples_per_task,
                max_waiting_mib=service.max_waiting_mib,
            )
        )
        if closed := [group.request(caller.name) for group in reply.groups if group.is_closed]:
            refuse_if_needed(await run.submit(closed, limits=caller.limits))
        return UploadAnswer.of(reply, caller)

    @app.get(f"{UPLOADS}/{{name}}", tags=_TAGS, responses=_UNKNOWN)
    async def show(request: Request, name: KnownId) -> TrajectoryAnswer:
        """Return an accepted trajectory, without its tokens."""
        caller = caller_of(request)
        found = await answer_or_problem(port.view(caller.whole(name)))
        if found is None:
            raise Problem(
                404,
                "unknown-trajectory",
                f"this run has no uploaded trajectory {name!r}: it was never accepted, or its "
                "group is over and no longer among the newest service.keep_ended_tasks",
            )
        return replace(found, id=caller.shown(found.id), group=caller.shown(found.group))

    @app.delete(
        f"{UPLOADS}/groups/{{group}}",
        tags=_TAGS,
        responses={**_UNKNOWN, 409: {"description": "it is complete, and submitted"}},
    )
    async def drop(request: Request, group: KnownId) -> GroupAnswer:
        """Delete the trajectories of an incomplete group; their ids can then be used again."""
        caller = caller_of(request)
        found = await answer_or_problem(port.drop(caller.whole(group)))
        if found is None:
            raise Problem(404, "unknown-group", f"this run has no group {group!r} of trajectories")
        if found.is_closed:
            raise Problem(
                409,
                "group-closed",
                f"group {group} is submitted, expected an incomplete group; cancel it with POST "
                f"{PREFIX}/rollouts/{group}/cancel",
            )
        return GroupAnswer.of(found, caller)


def _add_lookups(app: FastAPI, run: RunPort, port: Uploads, settings: HttpSettings) -> None:
    @app.get(f"{PREFIX}/policy", tags=_TAGS)
    async def policy() -> PolicyAnswer:
        """Return what a client must know to sample for this run."""
        facts, readiness = await answer_or_problem(port.policy_facts()), await run.readiness()
        version = readiness.policy_version
        return PolicyAnswer(
            tokenizer_fingerprint=facts.tokenizer_fingerprint,
            vocab_size=facts.vocab_size,
            max_context_tokens=facts.max_context_tokens,
            temperature=facts.temperature,
            policy_version=version,
            oldest_version=max(
                0, oldest_version(version, settings.algorithm.max_policy_age, facts.republished)
            ),
        )


def _add_generate(app: FastAPI, port: Uploads, settings: HttpSettings) -> None:
    @app.post(
        f"{PREFIX}/generate",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=_either_format(GenerateBody),
    )
    async def generate(request: Request) -> Response:
        """Sample the tokens that follow a prompt of token ids, at the run's temperature. The body
        and the answer are JSON or MessagePack. If no engine is available, the request waits for
        one, at most sessions.hold_s."""
        caller = caller_of(request)
        raw, packed = await request.body(), is_packed(request.headers)
        facts = await answer_or_problem(port.policy_facts())

        def read() -> GenerateRequest:
            return checked_request(
                decode_body(raw, GenerateBody, packed=packed),
                facts,
                tenant=caller.tenant,
                rollouts=settings.rollouts,
                deadline_s=settings.sessions.hold_s,
            )

        try:
            wanted = await _off_loop(raw, read)
        except Violation as violation:
            raise _problem([(violation, ())]) from violation
        reply = await answer_or_problem(port.generate(wanted, caller.name))
        answer = generate_answer(reply, packed=packed)
        encode = msgspec.msgpack.encode if packed else msgspec.json.encode
        media_type = MSGPACK if packed else "application/json"
        return Response(encode(answer), media_type=media_type)


def _read_upload(
    raw: bytes, packed: bool, facts: PolicyFacts, settings: HttpSettings, caller: Caller
) -> tuple[list[Upload], list[GroupPolicy]]:
    body = decode_body(raw, UploadBody, packed=packed)
    if body.tokenizer_fingerprint != facts.tokenizer_fingerprint:
        raise Problem(
            422,
            "tokenizer-mismatch",
            "tokenizer_fingerprint is not the policy's, expected "
            f"{facts.tokenizer_fingerprint}; sample with the policy's own tokenizer and template",
            errors=[{"loc": ["body", "tokenizer_fingerprint"], "code": "tokenizer-mismatch"}],
        )
    most = settings.service.max_tasks_per_request
    if len(body.trajectories) > most or len(body.groups) > most:
        raise Problem(
            413,
            "too-many-trajectories",
            f"got {len(body.trajectories)} trajectories and {len(body.groups)} groups, expected at "
            f"most {most} of each; split them, or raise service.max_tasks_per_request",
        )
    policies = _group_policies(body, settings, caller)
    uploads: list[Upload] = []
    violations: list[tuple[Violation, tuple[int | str, ...]]] = []
    for number, item in enumerate(body.trajectories):
        try:
            upload = checked_upload(item, facts)
            group = caller.whole(upload.group)
            uploads.append(replace(upload, id=caller.whole(upload.id), group=group))
        except Violation as violation:
            violations.append((violation, ("trajectories", number)))
            if len(violations) == MAX_ERRORS:
                break
    if violations:
        raise _problem(violations)
    return uploads, policies


def _group_policies(body: UploadBody, settings: HttpSettings, caller: Caller) -> list[GroupPolicy]:
    twice = [name for name, count in Counter(each.id for each in body.groups).items() if count > 1]
    if twice:
        raise Problem(
            422,
            "invalid-request",
            f"groups: the ids {twice[:8]} occur more than once, expected each once",
            errors=[{"loc": ["body", "groups"], "code": "invalid-request"}],
        )
    policies = [
        GroupPolicy(id=caller.whole(each.id), num_members=each.members, closes=each.close)
        for each in body.groups
    ]
    for policy in policies:
        if policy.num_members is not None:
            check_samples(policy.id, policy.num_members, None, settings)
    return policies


def _problem(found: Sequence[tuple[Violation, tuple[int | str, ...]]]) -> Problem:
    """Return an HTTP error (422) that lists all violations found in a request's body.

    found: each violation with its trajectory's position, such as ("trajectories", 3), or with ().
    """
    errors = [
        {
            "loc": ["body", *place, *violation.place],
            "code": violation.fault.value,
            "message": violation.message,
        }
        for violation, place in found
    ]
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"])
    return Problem(422, str(first["code"]), f"{where}: {first['message']}", errors=errors)


async def _off_loop(raw: bytes, work: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call `work`, in a thread if the body `raw` is so large that it would delay other requests."""
    if len(raw) > THREAD_BYTES:
        return await asyncio.to_thread(work, *arguments)
    return work(*arguments)


# Sample from token ids to token ids, for agent loops that render their own prompts.
#
# The API's replicas check the body and write the answer; the gateway samples
# (`service.gateway.uploads`). The sampled tokens are not stored. They are trained only if the
# client uploads them.
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
        version_spans=reply.version_spans,
        experts=None if experts is None else _packed_experts(experts),
        cache_salt=reply.cache_salt,
        replica=reply.replica,
    )


def _packed(column: NDArray[Any], dtype: str) -> Packed:
    return Packed(dtype=dtype, data=np.ascontiguousarray(column, dtype).tobytes())


def _packed_experts(indices: NDArray[Any]) -> Packed:
    dtype = "|u1" if indices.dtype == np.uint8 else "<i2"
    return Packed(dtype=dtype, data=_packed(indices, dtype).data, shape=indices.shape)
