"""What passes between the client and a replica: many requests in one stream of replies.

A Serve call costs about a millisecond on either side, more than a turn of a small model; so the
client sends the requests of one moment together and the replica streams the replies back
as they come. Affinity needs no table: a reply's cache salt ends with its replica's name, and the
client hands the salt on with the trajectory's next turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from actors.policy import GenerateReply, PolicyDeadlineExceeded, PolicyUnavailable

REPLICA_MARK = "@"


class FailureKind(StrEnum):
    """Which exception the caller is owed."""

    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFailure:
    """Why one request of a batch has no reply."""

    kind: FailureKind
    message: str

    @staticmethod
    def of(error: PolicyUnavailable | PolicyDeadlineExceeded | ValueError) -> GenerateFailure:
        if isinstance(error, PolicyDeadlineExceeded):
            kind = FailureKind.DEADLINE
        elif isinstance(error, PolicyUnavailable):
            kind = FailureKind.UNAVAILABLE
        else:
            kind = FailureKind.REFUSED
        return GenerateFailure(kind=kind, message=str(error))

    def exception(self) -> Exception:
        match self.kind:
            case FailureKind.UNAVAILABLE:
                return PolicyUnavailable(self.message)
            case FailureKind.DEADLINE:
                return PolicyDeadlineExceeded(self.message)
            case FailureKind.REFUSED:
                return ValueError(self.message)


Answer = GenerateReply | GenerateFailure

# (position in the batch, answer) of those that finished in one tick of the replica.
AnswerChunk = list[tuple[int, Answer]]


def mark_salt(salt: str, replica: str) -> str:
    """Append the replica that answered. Example: mark_salt("1:7", "abc") -> "1:7@abc"."""
    return f"{salt}{REPLICA_MARK}{replica}"


def split_salt(salt: str | None) -> tuple[str | None, str]:
    """Take the replica off again; ("", no replica) for a first turn."""
    if salt is None:
        return None, ""
    bare, _, replica = salt.partition(REPLICA_MARK)
    return bare, replica
