"""What `rayloom serve` adds to a run: where the API listens, and who may use it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import replace

from service.api.key import KEY_VARIABLE, digest_of, take_key
from service.api.port import HttpSettings
from service.config.file import ConfigError
from service.config.tree import Config, ServiceSettings

MIN_KEY_CHARACTERS = 16


def checked_service(config: Config, *, is_local: bool) -> tuple[Config, HttpSettings]:
    """What can be refused before anything is started or imported. Raises: ConfigError."""
    api = http_settings(config)
    return with_free_port(config, is_local=is_local), api


def with_free_port(config: Config, *, is_local: bool) -> Config:
    """Replace port 0 by a port that is free now. is_local: the API will listen on this machine.

    Raises: ConfigError for one that is taken; elsewhere nothing can be tried, so that it has to be
        named.
    """
    service = config.service
    if not is_local:
        if service.port == 0:
            raise ConfigError(
                "service.port is 0 with --address: a free port can only be found on this machine; "
                "name one, such as --set service.port=8000"
            )
        return config
    try:
        with socket.socket(_family(service.host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((service.host, service.port))
            port: int = probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"service.host {service.host}, service.port {service.port}: cannot listen there "
            f"({error.strerror or error}); end what does, or choose another with --set "
            "service.port=PORT (0: any free one)"
        ) from error
    return replace(config, service=replace(service, port=port))


def http_settings(config: Config) -> HttpSettings:
    """What the API checks. The key is taken out of the environment: call it once, and first.

    Raises: ConfigError for an API that anybody in the network could use, or without a port of its
        own.
    """
    service = config.service
    if service.port == config.metrics.port != 0:
        raise ConfigError(
            f"service.port and metrics.port are both {service.port}; expected two ports; set "
            "another metrics.port, or 0 for any free one"
        )
    key = take_key()
    if key is not None and len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{KEY_VARIABLE}: got {len(key)} characters, expected at least {MIN_KEY_CHARACTERS}; "
            "take a long random key, such as of `openssl rand -hex 32`"
        )
    if key is None and not is_loopback(service.host):
        raise ConfigError(
            f"service.host is {service.host} and no key is set: whoever reaches this address could "
            f"use the API; set {KEY_VARIABLE} to a long random key, or listen on 127.0.0.1"
        )
    return HttpSettings(
        service=service,
        algorithm=config.algorithm,
        environments=(config.tasks.environment,),
        key_digest=None if key is None else digest_of(key),
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def api_address(service: ServiceSettings) -> str:
    host = f"[{service.host}]" if ":" in service.host else service.host
    return f"http://{host}:{service.port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
