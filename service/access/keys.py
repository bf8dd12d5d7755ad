"""Keys of a run's API: named keys with permissions, tenants and limits, and the keys of sessions.

`Rates` counts requests against the limits. The module uses neither HTTP nor Ray. Invariant: a raw
named key is shown once, to its creator; only its SHA-256 is stored. A slow password hash is not
needed, because a key has 256 random bits, which nobody can guess from the digest.
"""

from __future__ import annotations

import hmac
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from hashlib import sha256

from actors.limits import STRICT, Positive, Rate

# Ids within tenants: a tenant's ID is TENANT~ID in the run. Plain strings.
#
# Invariant: no id that a client chooses contains the mark `~`, so that each tenant has its own ids:
# another tenant can neither take nor discover them. The run's own ids have no mark.
MARK = "~"
WHOLE_PATTERN = r"^(?:[A-Za-z0-9_.-]{0,63}~)?[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
"""Pattern of the id of a task or session in a request: ID, TENANT~ID, or ~ID for the run's own."""


def whole_id(tenant: str, own: str) -> str:
    """Return the run-wide id of a tenant's task or session. Example: acme, task-9 -> acme~task-9

    tenant: empty if the run itself is the owner; the run-wide id is then `own` itself.
    """
    return f"{tenant}{MARK}{own}" if tenant else own


def tenant_of(whole: str) -> str:
    """Return the tenant in a run-wide id. Example: acme~task-9 -> acme

    The tenant is empty if the run itself is the owner.
    """
    return whole.rpartition(MARK)[0]


def own_id(whole: str) -> str:
    """Return a run-wide id without its tenant. Example: acme~task-9 -> task-9"""
    return whole.rpartition(MARK)[2]


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
KEY_MARK = "rk_"
"""Prefix of every named key, so that scanners of secrets can recognise one."""
MAX_KEY_CHARACTERS = 512
"""Maximum length of a key in a request; a session's key has 75 characters more than its name."""
MAX_KEYS = 10_000
"""Maximum number of keys of a run, including revoked keys; each API replica has all these keys in
memory."""
_NAME = re.compile(NAME_PATTERN)


class Scope(StrEnum):
    """The permissions of a named key. A session's keys (`session_key`) have other permissions."""

    CLIENT = "client"
    """May submit tasks, create and reward sessions, sample, upload trajectories, and read what its
    tenant owns."""
    ADMIN = "admin"
    """May do the same as CLIENT for every tenant, stop and control the run, and create and revoke
    keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of a named key. If a limit is null in a key, the run's default limit applies."""

    __pydantic_config__ = STRICT

    requests_per_s: Rate | None = None
    """Maximum number of requests per second in each API replica. Bursts of up to 5 times this
    number are allowed. Null: no limit."""
    max_waiting_tasks: Positive | None = None
    """Maximum number of the key's accepted tasks that wait for admission. Null: only the limit of
    all keys together applies (service.max_waiting_tasks)."""
    max_open_sessions: Positive | None = None
    """Maximum number of the key's sessions that wait or are open. Null: no limit."""
    turns_per_minute: Rate | None = None
    """Maximum number per minute of the turns in the key's sessions and its requests to
    /api/v1/generate, counted together. Bursts of up to this number are allowed. Null: no limit."""

    def over(self, defaults: KeyLimits) -> KeyLimits:
        """Return these limits, with each limit that is None taken from `defaults`."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return KeyLimits(
            **{
                name: getattr(defaults, name) if value is None else value
                for name, value in own.items()
            }
        )


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKey:
    """The stored record of a key: its digest, name and rights, without the raw key."""

    name: str
    """Unique in the run; the name of a revoked key is not used again."""
    digest: str
    """SHA-256 of the key, hexadecimal."""
    scope: Scope
    tenant: str = ""
    """Owner of all tasks and sessions that are created with the key. Empty: the run itself is the
    owner; only an admin's key may have no tenant."""
    limits: KeyLimits = field(default_factory=KeyLimits)
    created_at: float
    """Time of the creation, in seconds since 1970."""
    revoked_at: float | None = None
    """Time of the revocation, in seconds since 1970; None if the key is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, with the permissions that the request's key gives.

    The key is a named key or the first admin key. The first admin key has no name; the operator
    gives it to the service at the start. If the API requires no key, every sender is an admin.
    """

    name: str = ""
    """Name of the key; empty for the first admin key, or if no key is required."""
    scope: Scope = Scope.ADMIN
    tenant: str = ""
    limits: KeyLimits = NO_LIMITS
    secret: str = field(default="", repr=False)
    """Raw key, from which the caller's session keys are derived; empty if no key is required."""

    @property
    def is_admin(self) -> bool:
        return self.scope is Scope.ADMIN

    @property
    def sees(self) -> str | None:
        """The tenant whose tasks and sessions the caller may see; None if it may see all."""
        return None if self.is_admin else self.tenant

    def whole(self, name: str) -> str:
        """Return the run-wide id of a task or session, from the id in a request of this caller.

        If a client names a tenant other than its own, return an id that no task or session has.

        name: ID, which belongs to the caller's own tenant, or TENANT~ID. An admin may also write
        ~ID if the run itself is the owner.
        Example: task-9 in a request of a client of acme -> acme~task-9
        """
        tenant = tenant_of(name)
        if MARK in name and (self.is_admin or tenant == self.tenant):
            return whole_id(tenant, own_id(name))
        return whole_id(self.tenant, name)

    def shown(self, whole: str) -> str:
        """Return the short form of a run-wide id: the form that this caller uses in requests.

        The tenant is left out if it is the caller's own. The method `whole` does the reverse.
        Example: acme~task-9 -> task-9 for a client of acme; acme~task-9 for an admin without tenant
        """
        tenant = tenant_of(whole)
        return own_id(whole) if tenant == self.tenant else f"{tenant}{MARK}{own_id(whole)}"


def may_see(sees: str | None, tenant: str) -> bool:
    """Return whether a caller may see a tenant's tasks and sessions.

    sees: the only tenant that the caller may see; None: the caller may see all (`Caller.sees`).
    """
    return sees is None or sees == tenant


def new_key() -> str:
    """Return a raw key of 256 random bits."""
    return KEY_MARK + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key, hexadecimal. It is stored instead of the key."""
    return sha256(key.encode()).hexdigest()


# The two keys of a session: one for its agent, one for its judge, who rewards it. Each names its
# session, so that an agent needs only the key.
#
# Both are derived from the key of the client that creates the session: the same request gets the
# same keys, and only digests of the keys are stored. An API on loopback may require no key. Session
# keys are then derived from a random secret of the run (`service.launch.run_dir`): an agent knows
# its session's name, and must not be able to compute the judge's key from it.
AGENT, REWARD = "agent", "reward"


def session_key(client_key: str, session_id: str, scope: str) -> str:
    """Return a session's key, which has the form rl.SCOPE.SESSION.DIGEST.

    DIGEST is the HMAC-SHA256 of the scope and the session's id; `client_key` is the HMAC's key.

    Args: client_key: raw key of the client that creates the session. If the API requires no key, it
    is the run's secret. scope: "agent" or "reward".
    """
    text = f"rayloom session\n{scope}\n{session_id}"
    mark = hmac.new(client_key.encode(), text.encode(), sha256).hexdigest()
    return f"rl.{scope}.{session_id}.{mark}"


def session_of_key(key: str) -> str:
    """Return the session's id in a session's key. Example: rl.agent.task-9-3.f00… -> task-9-3

    Return '' if the key is not a session's key.
    """
    kind, _, rest = key.partition(".")
    _, _, rest = rest.partition(".")
    return rest.rpartition(".")[0] if kind == "rl" else ""


def check_key(name: str, scope: Scope, tenant: str) -> None:
    """Check the fields of a new named key.

    Raises: ValueError for an invalid name or tenant, or if a client's key has no tenant.
    """
    for what, text in (("name", name), ("tenant", tenant)):
        if not _NAME.match(text) and (text or what == "name"):
            raise ValueError(
                f"{what} is {text[:80]!r}, expected at most 63 letters, digits, '_', '.', '-', "
                "beginning with a letter or digit"
            )
    if scope is Scope.CLIENT and not tenant:
        raise ValueError(
            "a client's key needs a tenant, whose tasks and sessions it sees; name one"
        )


class KeyBook:
    """A copy in memory of the named keys in a run's store; finds a key by its digest or name.

    `update` replaces the copy after the store was read again.
    """

    def __init__(self, keys: Iterable[NamedKey] = ()) -> None:
        self._by_digest: dict[str, NamedKey] = {}
        self._by_name: dict[str, NamedKey] = {}
        self.update(keys)

    def update(self, keys: Iterable[NamedKey]) -> None:
        """Replace all keys by newly read ones."""
        self._by_name = {key.name: key for key in keys}
        self._by_digest = {
            key.digest: key for key in self._by_name.values() if key.revoked_at is None
        }

    def __len__(self) -> int:
        """Return the number of keys, including revoked ones."""
        return len(self._by_name)

    def find(self, digest: str) -> NamedKey | None:
        """Return the key with this digest; None if no key has it, or the key was revoked."""
        # A comparison in constant time is not needed: the duration of the look-up depends only on
        # digests, and an attacker who does not know a key cannot choose its digest.
        return self._by_digest.get(digest)

    def is_revoked(self, name: str) -> bool:
        """Return whether the key with this name was revoked."""
        key = self._by_name.get(name)
        return key is not None and key.revoked_at is not None

    def limits_of(self, name: str) -> KeyLimits:
        """Return a key's own limits, without the run's defaults; `NO_LIMITS` for an unknown key."""
        key = self._by_name.get(name)
        return NO_LIMITS if key is None else key.limits


# Largest number of buckets. For a new one, the least recently used is dropped: it is likely full.
MAX_BUCKETS = 4096


class Rates:
    """Rate limits by token buckets, one bucket for each name, such as the name of a key.

    Belongs to one event loop; each process counts separately.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}
        """The number of tokens in each bucket and the time at which it was counted, by name."""

    def take(self, name: str, *, per_s: float, burst: float) -> int:
        """Take a token and return 0; if the bucket is empty, return the seconds until the next one.

        per_s: tokens that are added per second. burst: tokens of a full bucket; at least 1.
        Example: per_s=0.5, burst=1 -> 0 at the first call, 2 at the next.
        """
        now, most = self._now(), max(1.0, burst)
        left, at = self._buckets.get(name, (most, now))
        left = min(most, left + (now - at) * per_s)
        is_there = left >= 1.0
        if len(self._buckets) >= MAX_BUCKETS and name not in self._buckets:
            del self._buckets[next(iter(self._buckets))]
        # Insert it last, so that the buckets stay in the order of their last use.
        self._buckets.pop(name, None)
        self._buckets[name] = (left - 1.0 if is_there else left, now)
        return 0 if is_there else max(1, math.ceil((1.0 - left) / per_s))
