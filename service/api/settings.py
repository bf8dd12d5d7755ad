"""The API's address, its settings, and its bearer key.

All checks are made before anything is started. This module imports neither a web framework nor Ray.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from actors.network import HAPROXY_VARIABLE, is_loopback, uses_haproxy
from actors.options import JsonSchema
from service.access.keys import digest_of
from service.access.secret_files import read_secret
from service.config.file import ConfigError
from service.config.sections import ServiceSettings, SessionSettings
from service.config.tree import Config

KEY_VARIABLE = "RAYLOOM_API_KEY"
KEY_FILE_VARIABLE = "RAYLOOM_API_KEY_FILE"
MIN_KEY_CHARACTERS = 16
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The settings that the API's routes use."""

    service: ServiceSettings
    algorithm: AlgorithmSettings
    rollouts: RolloutSettings
    sessions: SessionSettings = field(default_factory=SessionSettings)
    environments: tuple[str, ...]
    """Environments whose tasks are accepted."""
    data_schemas: Mapping[str, JsonSchema] = field(default_factory=dict)
    """JSON schemas of tasks' data, by environment. An environment without a schema accepts any
    object."""
    key_digest: str | None = None
    """SHA-256 of the first admin key, hexadecimal; None: no key is needed unless the run has named
    keys (`service.access.keys`)."""
    key_file: Path | None = None
    """File with the first admin key, which the replicas read again; None: it does not change."""
    session_secret: str = field(default="", repr=False)
    """Secret from which a session's keys are derived if the client that creates it has no key."""

    @property
    def hosts(self) -> frozenset[str] | None:
        """Host names that a request may have; None if any name is allowed.

        Names are checked only if the API listens on loopback. A web page of any site can send
        requests to loopback; if the site's name resolves to loopback (DNS rebinding), the page
        could read the answers too.
        """
        if not is_loopback(self.service.host):
            return None
        return frozenset({*LOOPBACK_NAMES, self.service.host, *self.service.allowed_hosts})


def checked_service(config: Config, *, is_local: bool) -> tuple[Config, HttpSettings]:
    """Return the configuration with the port to listen on, and the API's settings.

    Raises: ConfigError, as `http_settings` and `with_free_port` do.
    """
    api = http_settings(config)
    return with_free_port(config, is_local=is_local), api


def with_free_port(config: Config, *, is_local: bool) -> Config:
    """Return the configuration with port 0 replaced by a port that is free now.

    Args: is_local: whether the API will listen on this machine.
    Raises: ConfigError if the port is taken, or if the port is 0 and the API listens on another
        machine, whose ports cannot be tried here.
    """
    service = config.service
    if not is_local:
        if service.port == 0:
            raise ConfigError(
                "service.port is 0 with --address: a free port can only be found on this machine; "
                "name one, such as --set service.port=8000"
            )
        return config
    family = socket.AF_INET6 if ":" in service.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((service.host, service.port))
            port: int = probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"service.host {service.host}, service.port {service.port}: cannot listen there "
            f"({error.strerror or error}); end the process that listens there, or choose another "
            "port with --set service.port=PORT (0: any free one)"
        ) from error
    return replace(config, service=replace(service, port=port))


def http_settings(config: Config) -> HttpSettings:
    """Return the API's settings, and remove the API's key from the process's environment.

    Call this function once, before anything else reads the key. Raises: ConfigError if anyone in
    the network could use the API, if the metrics have the API's port, or if an environment cannot
    be made.
    """
    service = config.service
    if service.port == config.metrics.port != 0:
        raise ConfigError(
            f"service.port and metrics.port are both {service.port}; expected two ports; set "
            "another metrics.port, or 0 for any free one"
        )
    key, key_file = take_key(), _key_file()
    if key is not None and key_file is not None:
        raise ConfigError(
            f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE}: got both, expected one of them: a key, or "
            "the path of a file with it; leave one out"
        )
    try:
        if key_file is not None:
            key = read_secret(key_file)
        digest = None if key is None else digest_of_long(key)
    except (OSError, ValueError) as error:
        source = KEY_VARIABLE if key_file is None else f"{KEY_FILE_VARIABLE} {key_file}"
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{source}: {reason}; choose a long random key, such as by `openssl rand -hex 32`"
        ) from error
    if key is None and not is_loopback(service.host):
        raise ConfigError(
            f"service.host is {service.host} and no key is set: anyone who reaches this address "
            f"could use the API; set {KEY_VARIABLE} to a long random key, or listen on 127.0.0.1"
        )
    if key is None and uses_haproxy():
        raise ConfigError(
            f"{HAPROXY_VARIABLE} is 1 and no key is set: with HAProxy the API's replicas listen on "
            f"every interface, even if service.host is {service.host}; set {KEY_VARIABLE} to a "
            f"long random key, or leave {HAPROXY_VARIABLE} out"
        )
    # An environment is the user's own code: import it after all other checks, and after the key
    # has been removed.
    from service.config.tasks import data_schemas

    return HttpSettings(
        service=service,
        algorithm=config.algorithm,
        rollouts=config.rollouts,
        sessions=config.sessions,
        environments=tuple(config.members),
        data_schemas=data_schemas(config),
        key_digest=digest,
        key_file=key_file,
    )


def digest_of_long(key: str) -> str:
    """Return the digest of an admin key. Raises: ValueError if the key is too short."""
    if len(key) < MIN_KEY_CHARACTERS:
        raise ValueError(f"got {len(key)} characters, expected at least {MIN_KEY_CHARACTERS}")
    return digest_of(key)


def _key_file() -> Path | None:
    named = os.environ.get(KEY_FILE_VARIABLE)
    return Path(named).expanduser().absolute() if named else None


def take_key() -> str | None:
    """Remove the first admin key from this process's environment and return it; None if not set.

    Later processes inherit the environment, and some of them run the user's code. The key's bytes
    are overwritten in place, because Linux shows them in /proc/PID/environ.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return None
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if address := libc.getenv(KEY_VARIABLE.encode()):
        ctypes.memset(address, ord("x"), len(os.fsencode(key)))
    del os.environ[KEY_VARIABLE]
    return key


def bearer_of(headers: Mapping[str, str]) -> str:
    """Return a request's bearer key, or an empty string if it has none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def api_address(service: ServiceSettings, *, route: str = "/") -> str:
    host = f"[{service.host}]" if ":" in service.host else service.host
    return f"http://{host}:{service.port}{route.rstrip('/')}"


def api_application_name(run_id: str) -> str:
    """Return the name of a run's API among the Ray Serve applications of a cluster."""
    return f"{run_id}-api"


def api_route(run_id: str, *, is_local: bool) -> str:
    """Return the path prefix of a run's API; runs on a shared cluster have different prefixes."""
    return "/" if is_local else f"/{run_id}"
