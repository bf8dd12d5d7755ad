"""Ids within tenants: a tenant's ID is TENANT~ID in the run. Plain strings.

Invariant: no id that a client chooses contains the mark `~`, so that each tenant has its own ids:
another tenant can neither take nor discover them. The run's own ids have no mark.
"""

from __future__ import annotations

MARK = "~"
WHOLE_PATTERN = r"^(?:[A-Za-z0-9_.-]{0,63}~)?[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
"""Pattern of a caller's own id, or of an id with its tenant."""


def whole_id(tenant: str, own: str) -> str:
    """Return the id within the run for a tenant's own id. tenant: empty for the run itself."""
    return f"{tenant}{MARK}{own}" if tenant else own


def tenant_of(whole: str) -> str:
    """Return an id's tenant, empty for the run's own. Example: acme~task-9 -> acme"""
    return whole.rpartition(MARK)[0]


def own_id(whole: str) -> str:
    """Return the tenant's own id. Example: acme~task-9 -> task-9"""
    return whole.rpartition(MARK)[2]
