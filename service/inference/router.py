"""Which replica a Serve call goes to: the one it names, else the less busy of two.

The session id of a call is the name of the replica that answered the trajectory's first turn. While
that replica lives all further turns meet it; when it is gone, a rendezvous hash sends all that
named it to the same survivor. Runs wherever a handle is used; Serve imports it by name.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ReplicaAffinityRouter(RequestRouter):
    """Serve's public extension point; requests are matched one by one, not first in first out."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of candidates; within a rank Serve takes the shortest queue."""
        if not candidate_replicas:
            return []
        wanted = "" if pending_request is None else pending_request.metadata.session_id
        if not wanted:
            count = min(2, len(candidate_replicas))
            return [random.sample(candidate_replicas, count)]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[home(wanted, by_name)]]]


def home(wanted: str, names: Iterable[str]) -> str:
    """The replica called `wanted` if it is there, else the one that inherits its trajectories."""
    candidates = list(names)
    if wanted in candidates:
        return wanted
    return max(candidates, key=lambda name: (zlib.crc32(f"{wanted}/{name}".encode()), name))
