"""The errors of a run's store; each message says what failed, what was expected, and the remedy."""

from __future__ import annotations


class StoreError(Exception):
    """The durable state cannot be used."""


class LeaseLost(Exception):
    """Another supervisor has a newer term of this run; nothing was written."""


class LeaseHeld(LeaseLost):
    """The run has a living owner, and the lease was requested only if it has none."""


class Damaged(Exception):
    """A row is missing, or has a value that no run writes; `Database` raises it as a StoreError."""
