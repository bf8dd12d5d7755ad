"""The errors of a run's store; each message says what failed, what was expected, and the remedy."""

from __future__ import annotations


class StoreError(Exception):
    """The run's database cannot be used."""


class LeaseLost(Exception):
    """Another supervisor has a newer term of this run; nothing was written."""


class LeaseHeld(LeaseLost):
    """The lease belongs to a process that is alive, and the caller did not want to take it over."""


class Damaged(Exception):
    """A stored row is missing, or has a value that no run writes.

    `Database` turns this error into a StoreError.
    """
