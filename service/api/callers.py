"""Find the sender of each request by its key, and limit the request rate of each key.

A replica of the API asks the supervisor for the run's named keys every `FRESH_S`, and also if a
request has an unknown key. So a new key is valid at once, and a revoked key for up to `FRESH_S`
more. Each replica counts only the requests that it receives itself.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import Scope

from service.access.keys import (
    KEY_MARK,
    MAX_KEY_CHARACTERS,
    NO_LIMITS,
    Caller,
    KeyBook,
    KeyLimits,
    Rates,
    digest_of,
)
from service.access.secret_files import SecretFile
from service.api.ports import RunPort
from service.api.problems import Problem, RunUnavailable
from service.api.settings import bearer_of

FRESH_S = 2.0
# Least seconds between two readings for unknown keys: guessed keys must not load the supervisor.
AGAIN_S = 0.25
# Seconds that a request waits for a new reading; after that it uses the last one.
PATIENCE_S = 1.0
BURST_S = 5.0


class Callers:
    """Finds the sender of each request to an API replica, and limits the request rate of each key.

    An object belongs to one event loop.
    """

    def __init__(
        self,
        run: RunPort,
        *,
        first_digest: str | SecretFile[str] | None,
        defaults: KeyLimits = NO_LIMITS,
    ) -> None:
        """Store the arguments; the first request reads the run's keys.

        Args: first_digest: SHA-256 of the first admin key, or the file with that key; if None, a
        key is required only if the run has named keys. defaults: limits for keys without limits of
        their own.
        """
        self._run = run
        self._first = first_digest
        self._defaults = defaults
        self._rates = Rates()
        self._book = KeyBook()
        self._read_at: float | None = None
        """Time when the newest finished reading of the keys began; None before the first."""
        self._reading: asyncio.Task[None] | None = None

    async def known(self, headers: Mapping[str, str]) -> Caller:
        """Return the sender of a request with these headers.

        Raises: Problem if there is no valid key; RunUnavailable if the keys cannot be read.
        """
        key = bearer_of(headers)
        caller = await self.find(key)
        if caller is None:
            raise _wrong_key(has_sent="authorization" in headers)
        return caller

    async def find(self, key: str) -> Caller | None:
        """Return the holder of a key; None if the key is not valid.

        Raises: RunUnavailable if the keys cannot be read.
        """
        key = key if len(key) <= MAX_KEY_CHARACTERS else ""
        digest = digest_of(key)
        first = self._first.value() if isinstance(self._first, SecretFile) else self._first
        if first is not None and hmac.compare_digest(digest, first):
            return Caller(secret=key)
        now = asyncio.get_running_loop().time()
        await self._read_since(now - FRESH_S)
        found = self._book.find(digest)
        if found is None and key.startswith(KEY_MARK):
            await self._read_since(now)
            found = self._book.find(digest)
        if found is None:
            is_open = first is None and not len(self._book)
            return Caller() if is_open else None
        return Caller(
            name=found.name,
            scope=found.scope,
            tenant=found.tenant,
            limits=found.limits.over(self._defaults),
            secret=key,
        )

    def count(self, caller: Caller) -> None:
        """Count a request of a caller. Raises: Problem if the caller sends too many requests."""
        per_s = caller.limits.requests_per_s
        if not caller.name or per_s is None:
            return
        wait_s = self._rates.take(caller.name, per_s=per_s, burst=BURST_S * per_s)
        if wait_s:
            raise Problem(
                429,
                "too-many-requests",
                f"got more than {per_s:g} requests per second with this key (requests_per_s of the "
                f"key); send it again in {wait_s} s",
                headers={"Retry-After": str(wait_s)},
            )

    async def _read_since(self, moment: float) -> None:
        """Read the run's keys if they were last read before `moment`, by the event loop's clock.

        If the run does not answer within PATIENCE_S, keep the keys that were read last.
        """
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + PATIENCE_S
        while self._read_at is None or self._read_at < moment:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            if self._read_at is None:
                await asyncio.shield(self._reading)
            elif (left_s := patient_until - loop.time()) > 0:
                await asyncio.wait({self._reading}, timeout=left_s)
            else:
                return

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._read_at is not None:
                await asyncio.sleep(self._read_at + AGAIN_S - loop.time())
            began = loop.time()
            self._book.update(await self._run.keys())
            self._read_at = began
        except RunUnavailable:
            if self._read_at is None:
                raise
            # The failed call counts as a reading: requests that wait for it use the older keys.
            # A later request calls the run again.
            self._read_at = loop.time()
        finally:
            self._reading = None


def caller_of(request: Request) -> Caller:
    """Return the sender of a request that the guards have let through."""
    found = request.state.caller
    assert isinstance(found, Caller)
    return found


def note_caller(scope: Scope, caller: Caller) -> None:
    """Store the caller of a request for `caller_of`, and the key's name for logs and records."""
    scope.setdefault("state", {}).update(caller=caller, key_name=caller.name)


def check_scope(caller: Caller, *, path: str) -> None:
    """Check that the caller may use a path. Raises: Problem if the path is only for admins."""
    if not caller.is_admin and not is_for_clients(path):
        raise Problem(
            403,
            "admin-only",
            "this needs a key with scope admin, got one with scope client; ask the service's "
            "operator",
        )


# The paths that clients' keys may use; every other path, also below these, is only for admins. The
# routes at these paths show and change only data of the caller's tenant, or are the same for all.
_CLIENT_PATHS = re.compile(
    r"/api/v1/rollouts(/[^/]+(/cancel)?)?"
    r"|/api/v1/sessions(/[^/]+(/close)?)?"
    r"|/api/v1/trajectories(/[^/]+|/groups/[^/]+)?"
    r"|/api/v1/(feed|events|policy|generate)"
    r"|/api/v1/environments(/[^/]+)?"
    r"|/docs(/oauth2-redirect)?|/openapi\.json"
)


def is_for_clients(path: str) -> bool:
    """Return whether clients' keys may use a path; admins' keys may use every path."""
    return _CLIENT_PATHS.fullmatch(path) is not None


def _wrong_key(*, has_sent: bool) -> Problem:
    given = "another" if has_sent else "none"
    return Problem(
        401,
        "wrong-key",
        f"expected a valid bearer key, got {given}; send Authorization: Bearer KEY with the key "
        "of the service (RAYLOOM_API_KEY, or the file that RAYLOOM_API_KEY_FILE names), or one "
        "that `rayloom keys create` made and that is not revoked",
        headers={"WWW-Authenticate": "Bearer"},
    )
