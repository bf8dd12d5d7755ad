"""The bodies of uploaded trajectories and of token-in, token-out requests, JSON or MessagePack.

msgspec reads both formats by one definition, many times faster than Pydantic. A column is either a
list of numbers or a packed array: the type and the little-endian bytes, which JSON has as base64.
Unknown fields are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import Headers

from actors.environment.turn_loop import MAX_ANSWER_CHARS
from actors.types import BranchReason, FinishReason, VersionSpan
from service.api.problems import Problem, shown
from service.api.schemas import ID_PATTERN
from service.gateway.bodies import MAX_COMPONENTS, SESSIONS_ID_PATTERN

MSGPACK = "application/msgpack"
# Largest number of samples of a trajectory, and of turns of a sample. The limit of a body's size
# bounds the number of tokens.
MAX_SAMPLES = 256
MAX_TURNS = 4096
_PLACE = re.compile(r"^(.*) - at `(?:key in )?(.*)`$", re.DOTALL)

Body = TypeVar("Body")
Natural = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=ID_PATTERN)]
# This pattern limits the length of an id, to leave room for the member's number that is appended.
GroupName = Annotated[str, Meta(pattern=SESSIONS_ID_PATTERN)]


Components = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=128)], float], Meta(max_length=MAX_COMPONENTS)
]


class Packed(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, omit_defaults=True):
    """A column of numbers, as the bytes of a little-endian array."""

    dtype: str
    """Name of the NumPy type, such as <i4; each column requires its own type."""
    data: bytes
    shape: tuple[Natural, ...] | None = None
    """Shape of the array, only for recorded experts; null: the array has one dimension."""


Integers = list[int] | Packed
Numbers = list[float] | Packed


class SpanBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A range [start, end) of tokens. One policy version sampled all trained tokens in it."""

    version: int
    start: int
    end: int


class TurnBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A turn: the policy sampled tokens [start, end) of the sample; the tokens before are its
    prompt.
    """

    start: int
    end: int
    finish_reason: FinishReason = FinishReason.STOP
    is_malformed: bool = False
    index: int | None = None
    """Position (0, 1, …) of the turn in the order in which the trajectory's turns were played; null
    in all turns: the turns are listed in this order."""
    state_key: Annotated[str, Meta(max_length=MAX_ANSWER_CHARS)] | None = None
    """Text that is equal for turns in equal states (`algorithm.state_credit`); null: turns are in
    equal states if their observations have equal tokens."""


class ExpertsBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    positions: Integers
    """[R], <i4, ascending: the positions of the tokens whose forward passes are recorded."""
    indices: list[list[list[int]]] | Packed
    """[R, layers, experts], |u1 or <i2: the experts that were chosen in each forward pass."""


class SampleBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The tokens of one branch of a trajectory: a conversation without forks."""

    token_ids: Integers
    """[T], <i4: the tokens."""
    logprobs: Numbers
    """[T], <f4: the log-probabilities in nats; 0 where the mask is 0."""
    versions: list[SpanBody]
    """Contiguous spans, each with the policy version that sampled it; they cover all trained
    tokens."""
    mask: Integers | None = None
    """[T], |u1; 1 marks a trained token. If null, the tokens of the turns are trained."""
    turns: Annotated[list[TurnBody], Meta(min_length=1, max_length=MAX_TURNS)] | None = None
    """The sampled turns; if null, each contiguous range of tokens with mask 1 is a turn."""
    token_rewards: Numbers | None = None
    """[T], <f4: the reward of each token; 0 outside of the turns."""
    experts: ExpertsBody | None = None
    branch_reason: BranchReason | None = None
    """Why the sample extends no earlier sample; null: derived from the token ids."""


class TrajectoryBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    id: Name
    group: GroupName
    samples: Annotated[list[SampleBody], Meta(min_length=1, max_length=MAX_SAMPLES)]
    """The samples, in the order in which their first turns were sampled."""
    reward: float | None = None
    """Reward of the whole trajectory; null if it has none or `token_rewards` contain it."""
    components: Components = {}
    turn_rewards: dict[int, float] = {}
    """Rewards by the number of the turn, in addition to the trajectory's reward."""
    outcome: str = "completed"
    detail: Annotated[str, Meta(max_length=2000)] = ""
    metadata: dict[str, Any] = {}


class GroupBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A group of trajectories. It is complete when it has `members` trajectories.

    If `close` is set, it is complete after this upload.
    """

    id: GroupName
    members: Annotated[int, Meta(ge=1)] | None = None
    close: bool = False


class UploadBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    tokenizer_fingerprint: str
    trajectories: list[TrajectoryBody] = []
    groups: list[GroupBody] = []


class GenerateBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    token_ids: Integers
    """[P], <i4: the prompt."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    cache_salt: str = ""
    """The `cache_salt` in the answer to the previous turn; empty for a first turn."""
    replica: str = ""
    """The `replica` in the answer to the previous turn; empty for a first turn."""


class GenerateAnswer(Struct, frozen=True, kw_only=True):
    """The answer to `GenerateBody`; columns are lists in JSON and packed bytes in MessagePack."""

    token_ids: Integers
    """[A], <i4: the sampled tokens."""
    logprobs: Numbers
    """[A], <f4: the log-probabilities of the sampled tokens, in nats."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """Contiguous spans that cover [0, A), each with the policy version that sampled it."""
    experts: Packed | None
    """[R, layers, experts]: the experts that the recorded forward passes chose; null: no record."""
    cache_salt: str
    replica: str


def is_packed(headers: Headers) -> bool:
    """Return whether a body is MessagePack; otherwise it is JSON."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == MSGPACK


def decode_body(body: bytes, kind: type[Body], *, packed: bool) -> Body:
    """Read a body. packed: whether it is MessagePack. Raises: Problem."""
    decode = msgspec.msgpack.decode if packed else msgspec.json.decode
    try:
        return decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _of_validation(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "MessagePack map" if packed else "JSON object"
        raise Problem(
            400,
            "malformed-body",
            f"the body cannot be read: {shown(str(error))}; send one {what} with the matching "
            "Content-Type",
        ) from None


def _of_validation(text: str) -> Problem:
    found = _PLACE.match(text)
    message, place = (found[1], found[2]) if found else (text, "$")
    loc = ["body", *_parts(place)]
    where = ".".join(str(part) for part in loc)
    return Problem(
        422,
        "invalid-request",
        f"{where}: {shown(message)}; see docs/service.md for the fields",
        errors=[{"loc": loc, "code": "invalid-request", "message": shown(message)}],
    )


def _parts(place: str) -> list[int | str]:
    """Split msgspec's path. Example: $.samples[0].reward -> ["samples", 0, "reward"]"""
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", place)
    return [shown(name) if name else int(n) if n.isdecimal() else n for name, n in parts]


class Fault(StrEnum):
    """The error codes for an uploaded trajectory. Clients' programs read them: never change one."""

    WRONG_TYPE = "wrong-type"
    """A packed column has a wrong type or shape, or a wrong number of bytes."""
    LENGTHS_DIFFER = "lengths-differ"
    TOKEN_OUT_OF_VOCABULARY = "token-out-of-vocabulary"
    INVALID_MASK = "invalid-mask"
    INVALID_TURNS = "invalid-turns"
    DUPLICATE_TURN = "duplicate-turn"
    """Two samples train the same sampled turn."""
    NOTHING_TRAINED = "nothing-trained"
    CONTEXT_LENGTH_EXCEEDED = "context-length-exceeded"
    INVALID_LOGPROB = "invalid-logprob"
    INVALID_VERSIONS = "invalid-versions"
    INVALID_REWARD = "invalid-reward"
    REWARD_MISSING = "reward-missing"
    REWARDS_DIFFER = "rewards-differ"
    INVALID_EXPERTS = "invalid-experts"
    UNKNOWN_OUTCOME = "unknown-outcome"
    INVALID_METADATA = "invalid-metadata"


class Violation(Exception):
    """The first fault that was found in an uploaded trajectory."""

    def __init__(self, fault: Fault, place: Sequence[int | str], message: str) -> None:
        """Report a fault. place: position of the faulty value in the trajectory's body."""
        super().__init__(message)
        self.fault, self.place, self.message = fault, tuple(place), message


Fail = Callable[[Fault, str, str], Violation]
