"""The inference deployment: vLLM engines, one in each Serve replica.

Each term of the run (from a start or recovery to its end) deploys the engines. They load the
weights that the trainer publishes on the weight board, an actor of the run:

    deploy_inference(settings, name="run-t1", board=board, run_id="run")
    ...                                    # the trainer publishes; the replicas load
    await wait_ready("run-t1", read_status, quiet_limit_s=420)
    client = ServePolicyClient("run-t1")
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b

from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from actors.environment.policy import PolicyUnavailable
from actors.network import uses_haproxy
from actors.weights.board import BoardStatus
from service.inference.client import DEPLOYMENT_NAME, ReplicaAffinityRouter, engines_handle
from service.inference.replica import RPC_TIMEOUT_S, InferenceReplica, ReplicaDescription
from service.inference.settings import EngineSettings

STATUS_POLL_S = 0.2
# Do not ask more often: each request for Serve's status uses two processes on cores that a starting
# engine needs.
SERVE_STATUS_EVERY_S = 2.0
MAX_FAILURE_CHARACTERS = 600
# A traceback's last line, "package.module.Name: what happened", which may have more lines.
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:\(\w+\))?: ", re.MULTILINE)


def start_serve_for_engines() -> None:
    """Start Serve without any HTTP proxy; do nothing if Serve runs already.

    If the HTTP API shares the cluster, it has started Serve earlier, with a proxy.
    """
    serve.start(proxy_location=ProxyLocation.Disabled)


def deploy_inference(
    settings: EngineSettings,
    *,
    name: str,
    board: ActorHandle,
    run_id: str,
    orphan_timeout_s: float = 60.0,
    resources: Mapping[str, float] | None = None,
) -> None:
    """Start the engines' deployment as the application `name`, or change its number of replicas.

    The function does not wait. Replicas become ready after the weight board has a publication, so
    publish first, then call `wait_ready`. If only `num_replicas` changes, running replicas stay
    unchanged.

    Args: run_id, orphan_timeout_s: as for `InferenceReplica`. resources: custom Ray resources that
    a replica requests besides CPUs and GPUs.
    """
    start_serve_for_engines()
    deployment = serve.deployment(
        name=DEPLOYMENT_NAME,
        num_replicas=settings.inference.num_replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={
            "num_cpus": settings.inference.cpus_per_replica,
            "num_gpus": settings.inference.gpus_per_replica,
            "resources": dict(resources or {}),
        },
        request_router_config=RequestRouterConfig(request_router_class=ReplicaAffinityRouter),
        health_check_period_s=settings.health_check_period_s,
        health_check_timeout_s=settings.health_check_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.graceful_shutdown_s,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(InferenceReplica)
    # Without an explicit version Serve would take each call for new code and replace all replicas.
    deployment = deployment.options(version=_digest(settings), _internal=True)
    bound = deployment.bind(settings, board, run_id, orphan_timeout_s)
    if uses_haproxy():
        bound = serve.deployment(
            name="ingress",
            ray_actor_options={"num_cpus": 0},
            logging_config={"log_level": "WARNING"},
        )(HaproxyIngress).bind(bound)
    target = serve.RunTarget(bound, name=name, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


class HaproxyIngress:
    """An ingress deployment in front of the engines' deployment; it receives no requests.

    With HAProxy, Serve refuses an ingress that has a request router of its own. The engines'
    deployment has one (`ReplicaAffinityRouter`), so that the application needs another ingress,
    although it has no HTTP route.
    """

    def __init__(self, engines: DeploymentHandle[InferenceReplica]) -> None:
        self._engines = engines


async def wait_ready(
    name: str, read_status: Callable[[], Awaitable[BoardStatus]], *, quiet_limit_s: float
) -> None:
    """Wait until one replica has loaded the current policy version; others may follow later.

    Args: name: the engines' application. read_status: returns the weight board's status.
        quiet_limit_s: longest time in seconds without progress (`BoardStatus.quiet_s`).
    Raises: PolicyUnavailable, with the last failure of a replica, if the deployment has failed or
        there is no progress; any error of read_status.
    """
    ask_serve_at = time.monotonic()
    while not (status := await read_status()).holders:
        if time.monotonic() >= ask_serve_at:
            await _check_deployed(name, status, quiet_limit_s=quiet_limit_s)
            ask_serve_at = time.monotonic() + SERVE_STATUS_EVERY_S
        await asyncio.sleep(STATUS_POLL_S)


async def _check_deployed(name: str, status: BoardStatus, *, quiet_limit_s: float) -> None:
    application = (await asyncio.to_thread(serve.status)).applications.get(name)
    failed = application is None or application.status is ApplicationStatus.DEPLOY_FAILED
    if not failed and status.quiet_s <= quiet_limit_s:
        return
    messages = []
    if application is not None:
        deployed = application.deployments.values()
        messages = [application.message, *[each.message for each in deployed]]
    failure = last_failure(messages)
    state = "not deployed" if application is None else application.status.value
    raise PolicyUnavailable(
        f"inference: {name!r} is {state}, expected a ready engine, or progress of one "
        f"within {quiet_limit_s:.0f} s; {failure}; see the replicas' logs"
    )


def last_failure(messages: Sequence[str]) -> str:
    """Return the last exception in Serve's messages, as one line "package.Name: what happened".

    If the last message contains no exception, return that message as one line.
    Args: messages: Serve's status messages of the application and its deployments; the message of
    a failed deployment ends with the traceback.
    """
    texts = [message.strip() for message in messages if message.strip()]
    if not texts:
        return "nothing is known of its replicas"
    named = [*_EXCEPTION.finditer(texts[-1])]
    text = texts[-1][named[-1].start() :] if named else texts[-1]
    return " ".join(text.split())[:MAX_FAILURE_CHARACTERS]


def _digest(settings: EngineSettings) -> str:
    return blake2b(repr(_of_one(settings)).encode(), digest_size=8).hexdigest()


def is_same_engine(one: EngineSettings, other: EngineSettings) -> bool:
    """Return whether two settings are equal, apart from the number of engines."""
    return _of_one(one) == _of_one(other)


def _of_one(settings: EngineSettings) -> EngineSettings:
    return replace(settings, inference=replace(settings.inference, num_replicas=1))


def application_name(run_id: str, *, term: int) -> str:
    """Return the name of the Serve application of a run's engines.

    Args: term: number of the term that deployed the engines. Each start or recovery of the run,
    and each return to a checkpoint, begins a term.
    """
    return f"{run_id}-t{term}"


def find_leftover(run_id: str, settings: EngineSettings) -> str:
    """Return the Serve application of engines that an earlier term left running.

    Each start, recovery or return to a checkpoint begins a term of the run. The engines must have
    these settings (`is_same_engine`) and must answer a call. Return an empty text if there is no
    such application.
    """
    for name in _leftovers(run_id):
        with suppress(RayServeException, RayError, TimeoutError):
            answer = engines_handle(name).describe.remote()
            found: ReplicaDescription = answer.result(timeout_s=RPC_TIMEOUT_S)
            if is_same_engine(found.settings, settings):
                return name
    return ""


def delete_leftovers(run_id: str, *, but: str = "") -> None:
    """Delete the engines' applications that earlier terms of a run left, except `but`."""
    for name in _leftovers(run_id):
        if name != but:
            delete_inference(name)


def _leftovers(run_id: str) -> list[str]:
    start_serve_for_engines()
    names = [(name, *name.rpartition("-t")) for name in serve.status().applications]
    return [name for name, owner, _, term in names if owner == run_id and term.isdecimal()]


def delete_inference(name: str) -> None:
    """Delete an application; its replicas may finish requests for graceful_shutdown_s seconds."""
    serve.delete(name)
