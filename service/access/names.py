"""Ids of tenants: what a tenant calls ID, the run calls TENANT~ID. Plain strings.

Invariant: no id that a client chooses has the mark in it, so that each tenant's ids are its own:
none can be taken by another tenant, and none tells of another's. The run's own have no mark.
"""

from __future__ import annotations

MARK = "~"
WHOLE_PATTERN = r"^(?:[A-Za-z0-9_.-]{0,63}~)?[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
"""An id of a caller's own, or one with its tenant."""


def whole_id(tenant: str, own: str) -> str:
    """What the run calls it. tenant: empty: the run's own."""
    return f"{tenant}{MARK}{own}" if tenant else own


def tenant_of(whole: str) -> str:
    """Whose it is; empty: the run's own. Example: acme~task-9 -> acme"""
    return whole.rpartition(MARK)[0]


def own_id(whole: str) -> str:
    """What its tenant calls it. Example: acme~task-9 -> task-9"""
    return whole.rpartition(MARK)[2]
