"""The API as a Ray Serve deployment: stateless replicas that call the run's supervisor by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from actors.metrics import ApiMetrics
from service.api.app import create_app
from service.api.control_routes import add_control
from service.api.run_page import add_page
from service.api.settings import HttpSettings, api_application_name
from service.config.file import ConfigError
from service.gateway.client import GatewayClient
from service.gateway.routes import add_sessions
from service.gateway.upload_routes import add_uploads
from service.run.remote_handles import run_client
from service.telemetry.endpoint import Reading, push_forever

MAX_HELD_REQUESTS = 20_000


@serve.ingress()
class ApiIngress:
    """A replica of the HTTP API. It has no state: any number may run, and any may die."""

    def __init__(self, run_id: str, settings: HttpSettings, host: Any = None) -> None:
        """Create a replica.

        host: handle of the `RunHost` if Serve also runs the run; otherwise None.
        """
        self._run_id = run_id
        self._host = host
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        metrics = ApiMetrics()
        role = serve.get_replica_context().replica_id.unique_id

        @asynccontextmanager
        async def pushing(_app: FastAPI) -> AsyncIterator[None]:
            def read() -> Reading:
                return Reading(gained=list(metrics.gained.collect()))

            task = asyncio.create_task(push_forever(self._run_id, role=role, read=read))
            yield
            task.cancel()

        run = run_client(self._run_id, host=self._host)
        app = create_app(run, self._settings, metrics=metrics, lifespan=pushing)
        gateway = GatewayClient(run.gateway)
        add_control(app, run)
        add_sessions(app, run, gateway.sessions, self._settings)
        add_uploads(app, run, gateway.uploads, self._settings)
        add_page(app, run)
        return app


def ingress_application(run_id: str, settings: HttpSettings, *, host: Any = None) -> Any:
    """Return the HTTP API as an application for Ray's `serve.run`.

    Args: run_id: names the run's supervisor. host: the `RunHost` deployment if Serve also runs the
    run; otherwise None.
    """
    deployment = serve.deployment(
        name="api",
        # Agents' requests wait in a replica for their turns; the gateway has its own limit on them.
        max_ongoing_requests=MAX_HELD_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=5.0,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(ApiIngress)
    return deployment.bind(run_id, settings, host)


def open_api(run_id: str, settings: HttpSettings, *, route: str) -> None:
    """Deploy the HTTP API on Ray Serve after `start_serve`; it answers some seconds later.

    route: prefix of the API's paths.
    """
    target = serve.RunTarget(
        ingress_application(run_id, settings),
        name=api_application_name(run_id),
        route_prefix=route,
    )
    serve.run_many([target], wait_for_applications_running=False)


def start_serve(*, host: str, port: int) -> None:
    """Start Ray Serve with an HTTP proxy on the head node.

    Call it before `start_serve_for_engines`, which starts Serve without a proxy.
    """
    start = partial(
        serve.start,
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=host, port=port),
        logging_config={"log_level": "WARNING"},
    )
    try:
        start()
    except (ActorDiedError, TimeoutError):
        # On a busy machine a proxy may need more than five seconds. Serve then replaces it, and a
        # second call does not wait for the new one.
        start()


def check_listens(*, host: str, port: int) -> None:
    """Raise ConfigError if Ray Serve listens at another address than this one.

    Serve keeps the address of its first start: a later start with another address has no effect.
    """
    running = _get_global_client().http_config
    if (running.host, running.port) != (host, port):
        raise ConfigError(
            f"service.host {host}, service.port {port}: Ray Serve runs on this cluster already and "
            f"listens on {running.host}:{running.port}; set service.host and service.port to these"
        )
