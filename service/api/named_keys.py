"""The routes with which admins create, list and revoke named keys; a key is shown only once."""

from __future__ import annotations

import time

from fastapi import FastAPI, Path, Response
from pydantic import Field, model_validator

from service.access.keys import (
    MAX_KEYS,
    NAME_PATTERN,
    KeyLimits,
    NamedKey,
    Scope,
    check_key,
    digest_of,
    new_key,
)
from service.api.ports import PREFIX, RunPort
from service.api.problems import Problem
from service.api.schemas import StrictBody


class KeyBody(StrictBody):
    """A key to create."""

    name: str = Field(pattern=NAME_PATTERN, description="unique in the run, for people")
    scope: Scope = Scope.CLIENT
    tenant: str = Field(
        "",
        description="owner of its tasks and sessions; a client's key sees only its tenant's; an "
        "admin's key sees every tenant's, and needs none",
    )
    limits: KeyLimits = Field(
        default_factory=KeyLimits, description="null: service.key_limits of the run"
    )

    @model_validator(mode="after")
    def _can_be(self) -> KeyBody:
        check_key(self.name, self.scope, self.tenant)
        return self


class KeyAnswer(StrictBody):
    """A key's description, without the key itself."""

    name: str
    scope: Scope
    tenant: str
    limits: KeyLimits
    created_at: float = Field(description="seconds since 1970")
    revoked_at: float | None = Field(description="null: it is valid")


class NewKeyAnswer(StrictBody):
    """A new key, shown only now: the run stores only its SHA-256."""

    key: str
    about: KeyAnswer


class KeysAnswer(StrictBody):
    """The keys, including revoked keys, in the order of their creation."""

    keys: list[KeyAnswer]


def add_keys(app: FastAPI, run: RunPort) -> None:
    """Add the routes of keys; the guards allow only admins."""

    @app.post(
        f"{PREFIX}/keys",
        tags=["keys"],
        status_code=201,
        responses={409: {"description": "the name is, or was, taken; or there are too many keys"}},
    )
    async def create(body: KeyBody, response: Response) -> NewKeyAnswer:
        """Create a key. It is valid at once."""
        raw = new_key()
        key = NamedKey(
            name=body.name,
            digest=digest_of(raw),
            scope=body.scope,
            tenant=body.tenant,
            limits=body.limits,
            created_at=time.time(),
        )
        if not await run.add_key(key):
            raise Problem(
                409,
                "key-exists",
                f"the name {body.name!r} is or was taken, or the run has its maximum of "
                f"{MAX_KEYS:,} keys; choose another name, or use an existing key",
                headers={"x-should-retry": "false"},
            )
        response.headers["Cache-Control"] = "no-store"
        return NewKeyAnswer(key=raw, about=KeyAnswer.model_validate(key))

    @app.get(f"{PREFIX}/keys", tags=["keys"])
    async def keys() -> KeysAnswer:
        """List the run's named keys."""
        return KeysAnswer(keys=[KeyAnswer.model_validate(key) for key in await run.keys()])

    @app.delete(
        f"{PREFIX}/keys/{{name}}",
        tags=["keys"],
        responses={404: {"description": "the run has no key of this name"}},
    )
    async def revoke(name: str = Path(pattern=NAME_PATTERN)) -> KeyAnswer:
        """Revoke a key permanently, and with it the keys of the sessions that it created. The
        request may be repeated. Every replica refuses these keys after at most three seconds.
        """
        key = await run.revoke_key(name)
        if key is None:
            raise Problem(
                404,
                "unknown-key",
                f"the run has no key with the name {name!r}; see GET {PREFIX}/keys",
            )
        return KeyAnswer.model_validate(key)
