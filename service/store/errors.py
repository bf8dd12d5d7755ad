"""The errors of a run's store; each message says what failed, what was expected, and the remedy."""

from __future__ import annotations


class StoreError(Exception):
    """The run's database cannot be used."""


class LeaseLost(Exception):
    """Another supervisor has a newer term of this run; nothing was written."""


class LeaseHeld(LeaseLost):
    """A living process owns the lease; the caller asked to take only a lease without an owner."""


class Damaged(Exception):
    """A row is missing or has a value that no run writes; `Database` raises StoreError for it."""
