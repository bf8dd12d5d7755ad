"""What a run's store raises; each text says what failed, what was expected and how to go on."""

from __future__ import annotations


class StoreError(Exception):
    """The durable state cannot be used."""


class LeaseLost(Exception):
    """Another supervisor has a newer term of this run; nothing was written."""


class LeaseHeld(LeaseLost):
    """The run has a living owner, and the lease was asked for only if it has none."""


class Damaged(Exception):
    """A row is missing, or holds what no run writes; `Database` makes a StoreError of it."""
