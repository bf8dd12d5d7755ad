"""What can go wrong between trainer and engines, by name.

Each error keeps its arguments in `args`, so that it survives the way through Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class WeightError(Exception):
    """Base of this package's errors."""


class StaleEpoch(WeightError):
    """An older run (lease) tried to publish or to command; it has been replaced and must stop."""

    def __init__(self, got: int, newest: int) -> None:
        super().__init__(got, newest)
        self.got, self.newest = got, newest

    def __str__(self) -> str:
        return (
            f"board: got epoch {self.got}, expected at least {self.newest}; this run was replaced "
            "by a newer one and must stop"
        )


class StaleVersion(WeightError):
    """A version older than the current one of the same epoch."""

    def __init__(self, got: int, current: int) -> None:
        super().__init__(got, current)
        self.got, self.current = got, current

    def __str__(self) -> str:
        return (
            f"board: got policy version {self.got}, expected at least {self.current}; going back "
            "takes a new epoch"
        )


class NotPublished(WeightError):
    """Somebody waits for a version that is not the current publication."""

    def __init__(self, version: int, current: int | None) -> None:
        super().__init__(version, current)
        self.version, self.current = version, current

    def __str__(self) -> str:
        return f"board: waiting for version {self.version}, but the current one is {self.current}"


class ReplicasLagging(WeightError):
    """Not every live replica held the version in time."""

    def __init__(
        self, version: int, laggards: Sequence[str], num_live: int, min_replicas: int
    ) -> None:
        super().__init__(version, tuple(laggards), num_live, min_replicas)
        self.version, self.laggards = version, tuple(laggards)
        self.num_live, self.min_replicas = num_live, min_replicas

    def __str__(self) -> str:
        return (
            f"board: version {self.version} is not held by {list(self.laggards)}; "
            f"{self.num_live} replicas are live, expected at least {self.min_replicas}; "
            "look at the replicas' logs"
        )


class RendezvousNeeded(WeightError):
    """The replicas are not those that met at the last init; the trainer must initialise again."""

    def __init__(self, joined: Sequence[str], left: Sequence[str]) -> None:
        super().__init__(tuple(joined), tuple(left))
        self.joined, self.left = tuple(joined), tuple(left)

    def __str__(self) -> str:
        return (
            f"board: replicas joined {list(self.joined)} and left {list(self.left)} since the "
            "transfer was initialised; initialise it again"
        )


class WeightCommandFailed(WeightError):
    """Replicas failed a command of the transfer handshake, or did not answer in time."""

    def __init__(self, kind: str, failures: Mapping[str, str], silent: Sequence[str]) -> None:
        super().__init__(kind, dict(failures), tuple(silent))
        self.kind, self.failures, self.silent = kind, dict(failures), tuple(silent)

    def __str__(self) -> str:
        return (
            f"board: command {self.kind} failed on {self.failures} and was not answered by "
            f"{list(self.silent)}; initialise the transfer again"
        )
