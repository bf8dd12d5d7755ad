"""Start a local Ray for one run, or join an existing cluster by its address."""

from __future__ import annotations

import os
import signal
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray._private import services
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.deadline import poll
from actors.limits import MIB
from service.config.file import ConfigError
from service.config.sections import EvaluationSetSettings, TasksSettings
from service.config.tree import Config
from service.launch.placement import Node, misfit
from service.launch.signals import kept_from_children, signals_noted
from service.launch.sources import data_files, user_modules, user_scripts
from service.remote_calls import NAMESPACE

TasksOrSet = TypeVar("TasksOrSet", TasksSettings, EvaluationSetSettings)
# Longest path of an AF_UNIX socket in bytes, without its closing zero.
MAX_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
_FALLBACK_TEMP_DIR = "/tmp"
# Time limit for a cluster to start a process for the first task.
AUTHENTICATION_LIMIT_S = 60.0
# Time limits for a head node that is starting or busy.
HEAD_LIMIT_S, HEAD_ANSWER_S = 10.0, 5.0
# The preface of HTTP/2 with an empty frame of settings: RFC 9113, sections 3.4 and 4.1.
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_HTTP2_HEADER_BYTES = 9
# The longest path of a socket below Ray's directory, with the usual name of a session.
_SESSION = "session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def cpus_wanted(config: Config) -> float:
    """Return how many CPUs the run's engines, ranks and environment actors reserve in Ray.

    Smaller actors, such as the supervisor, reserve no CPU.
    """
    return (
        config.inference.num_replicas * config.inference.cpus_per_replica
        + config.trainer.num_ranks
        + config.num_environment_actors
    )


# Each process in which Ray Serve opens an HTTP server reads this variable; on a cluster it must be
# set on the nodes.
DOOR_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
DOOR = "service.api.door.middlewares"


def prepare_environment(config: Config) -> None:
    """Set environment variables that Ray and vLLM read when they start, unless already set."""
    defaults = {
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        # Each process of Ray writes two files. Each rotates at this size, and two old files of it
        # are kept. Without the first variable the files of workers grow without a limit.
        "RAY_ROTATION_MAX_BYTES": str(16 * MIB),
        "RAY_ROTATION_BACKUP_COUNT": "2",
        DOOR_VARIABLE: DOOR,
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def joined(config: Config, *, address: str | None) -> Iterator[None]:
    """Join the Ray cluster at `address` for the `with` block; if it is None, start a local Ray.

    At the end, leave the cluster or stop the local Ray.
    Raises: ConfigError if the cluster cannot be reached or lacks resources that the run needs.
    """
    prepare_environment(config)
    try:
        if address is None:
            _start_local(config)
        else:
            _join(address, config)
        check_places(config)
        yield
    finally:
        # Runs after a failed start too. On an existing cluster only this driver's actors end.
        ray.shutdown(wait_for_processes=True)


@contextmanager
def attached(address: str) -> Iterator[None]:
    """Join a cluster for the `with` block, in order to read the state of its runs.

    Raises: ConfigError if no cluster answers at `address`.
    """
    try:
        _connect(address)
        yield
    finally:
        ray.shutdown()


def short_temp_dir(asked: str) -> str | None:
    """Return a short directory for Ray's session, or None if Ray's own choice is short enough.

    The path of a socket has a maximum length, and Ray's sockets are in this directory. asked: the
    temporary directory that Ray would use. Raises: ConfigError if a short directory is needed, but
    /tmp cannot be written.
    """
    longest = len(os.fsencode(os.path.join(asked, "ray", _SESSION)))
    if longest <= MAX_SOCKET_PATH:
        return None
    if os.access(_FALLBACK_TEMP_DIR, os.W_OK | os.X_OK):
        return os.path.join(_FALLBACK_TEMP_DIR, "ray")
    raise ConfigError(
        f"the temporary directory {asked} is too long for Ray's sockets ({longest} bytes, expected "
        f"at most {MAX_SOCKET_PATH}) and {_FALLBACK_TEMP_DIR} cannot be written; set RAY_TMPDIR to "
        "a shorter path"
    )


def _temp_dir() -> str | None:
    asked = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or _FALLBACK_TEMP_DIR
    chosen = short_temp_dir(asked)
    if chosen is not None:
        # vLLM and others make sockets in the temporary directory too.
        os.environ["TMPDIR"] = tempfile.tempdir = _FALLBACK_TEMP_DIR
    return chosen


def _start_local(config: Config) -> None:
    try:
        with kept_from_children():
            _init_local(config)
    except ConfigError:
        raise
    except Exception as error:
        # Ray raises plain Exceptions, for example for a full disk or a port that is in use.
        raise ConfigError(
            f"a local Ray did not start ({_first_line(error)}); expected it to start; see the logs "
            "of the newest session in its temporary directory, free memory and disk space, or "
            "join a cluster with --address"
        ) from error


def _init_local(config: Config) -> None:
    # Tell Ray of enough CPUs for all processes. They share the real cores, because each process
    # limits its number of threads.
    logical_cpus = max(psutil.cpu_count() or 1, int(cpus_wanted(config)) + 1)
    # Set in os.environ, not runtime_env, which makes Ray discard its prestarted workers.
    os.environ["PYTHONPATH"] = _import_path()
    start_ray(
        address="local",
        namespace=NAMESPACE,
        num_cpus=logical_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        _temp_dir=_temp_dir(),
    )


def start_ray(**options: Any) -> None:
    """Call `ray.init` for a local node, and call it again if the start timed out.

    Ray gives a node 30 s to start, even on a busy machine, and no setting changes this limit. This
    function kills the processes that a failed start leaves.
    """
    before = set(psutil.Process().children())
    try:
        _init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        for process in set(psutil.Process().children()) - before:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait()
        _init(**options)


def _init(**options: Any) -> None:
    """Call `ray.init`, and raise KeyboardInterrupt if a SIGTERM arrived during the call."""
    with signals_noted() as noted:
        try:
            ray.init(**options)
        # Ray's own handler of SIGTERM raises this; the command stops in order by KeyboardInterrupt.
        except SystemExit as end:
            raise KeyboardInterrupt from end
    # Python drops the SystemExit if the handler ran in a callback from C.
    if signal.SIGTERM in noted:
        raise KeyboardInterrupt


def _join(address: str, config: Config) -> None:
    _connect(address, runtime_env=shipped_files(config, cwd=Path.cwd()))


def _connect(address: str, **options: Any) -> None:
    _check_answers(address)
    try:
        _init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="warning",
            **options,
        )
    except Exception as error:
        raise _unanswered(address, error) from error
    _check_authentication(address)


def _unanswered(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"--address {address}: no Ray cluster answers there ({_first_line(error)}); expected "
        "the address of a running head node, such as auto or HOST:6379"
    )


def _check_answers(address: str) -> None:
    """Raise ConfigError if no head node answers at an address HOST:PORT.

    Without this check, Ray would try to connect for many minutes.
    """
    place = address
    # "auto" is RAY_ADDRESS or the last cluster that this machine started, which may have ended.
    if address == "auto":
        try:
            place = services.canonicalize_bootstrap_address(address) or ""
        except ValueError:
            # RAY_ADDRESS has another form.
            return
        except OSError as error:
            raise _unanswered(address, error) from error
        address = f"auto ({place})"
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or "/" in place:
        return
    host = host.strip("[]")
    if host in ("localhost", "127.0.0.1", "::1"):
        # Replace the address as Ray does: a head need not listen on the loopback.
        host = ray.util.get_node_ip_address()
    end = time.monotonic() + HEAD_LIMIT_S
    while True:
        try:
            return _greet(host, int(port))
        except (OSError, OverflowError) as error:
            if time.monotonic() > end:
                raise _unanswered(address, error) from error
        time.sleep(1.0)


def _greet(host: str, port: int) -> None:
    """Raise OSError if no server of HTTP/2, such as gRPC, answers within HEAD_ANSWER_S."""
    with socket.create_connection((host, port), timeout=HEAD_ANSWER_S) as connection:
        # With Ray's TLS, it is enough that a connection can be opened.
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(_HTTP2_GREETING)
        with connection.makefile("rb") as answers:
            # The fourth byte of a frame's header is its type: 4 for settings, always the first.
            if answers.read(_HTTP2_HEADER_BYTES)[3:4] != b"\4":
                raise OSError("the process that listens there is not a head node")


def _check_authentication(address: str) -> None:
    """Raise ConfigError if the cluster and this process use different values of RAY_AUTH_MODE.

    With different values, the control store takes this process for dead, and ends its actors.
    """
    own = _authentication_mode()
    asked = ray.remote(_authentication_mode).options(num_cpus=0, max_retries=0).remote()
    try:
        found = ray.get(asked, timeout=AUTHENTICATION_LIMIT_S)
    except RayError as error:
        raise ConfigError(
            f"--address {address}: the cluster ran no task within {AUTHENTICATION_LIMIT_S:g} s "
            f"({_first_line(error)}); expected a cluster that runs tasks, and authenticates as "
            f"this process (RAY_AUTH_MODE {own}); check its nodes"
        ) from error
    # Ray accepts the connection, but this process would refuse calls from the control store (GCS).
    if found != own:
        raise ConfigError(
            f"--address {address}: RAY_AUTH_MODE is {own} here and {found} on the cluster, "
            f"expected the same; set RAY_AUTH_MODE={found} (if unset, it is token if "
            "~/.ray/auth_token exists)"
        )


def _authentication_mode() -> str:
    # Ray sets the variable if it was unset.
    return os.environ.get("RAY_AUTH_MODE", "disabled").lower()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def alive_nodes() -> list[Node]:
    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=dict(node["Resources"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return Ray's scheduling strategy that places a task or an actor on the node `node_id`."""
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Return Ray's scheduling strategy that places an actor on the node of the calling process.

    Use it for actors that are useless without the calling process.
    """
    return on_node(ray.get_runtime_context().get_node_id())


def check_places(config: Config, *, limit_s: float = 0.0) -> None:
    """Check that all engines, trainer ranks and environment actors fit on the cluster's nodes.

    Args: limit_s: seconds to wait for nodes that have not joined yet.
    Raises: ConfigError that names the first process that fits on no node.
    """
    poll(lambda: True if misfit(config, alive_nodes()) is None else None, limit_s=limit_s)
    if (fault := misfit(config, alive_nodes())) is not None:
        raise ConfigError(f"the cluster has no room for the run: {fault}")


def shipped_files(config: Config, *, cwd: Path) -> dict[str, Any]:
    """Return Ray's runtime environment with the files that processes on other nodes need.

    The working directory is shipped if it contains one of the user's modules or scripts, the tasks,
    or data that an option names by a relative path; otherwise only the user's modules are shipped.
    Installed packages are expected on every node.
    """
    modules = _user_modules(config)
    own = [*user_scripts(config), *data_files(config)]
    paths = [*modules, *own, *config.task_places.values()]
    if any(path.resolve().is_relative_to(cwd) for path in paths):
        # Ray also excludes the files that .gitignore names.
        return {"working_dir": str(cwd), "excludes": [".git", ".venv", "/runs", "/*/checkpoints"]}
    return {"py_modules": [str(module) for module in modules]} if modules else {}


def seen_from_afar(config: Config, *, cwd: Path) -> Config:
    """Return the configuration with paths that are valid on other nodes of the cluster.

    Ray copies the working directory to another path on these nodes. So a task file in the working
    directory gets a relative path, and other paths become absolute.
    """
    mixture = {
        name: replace(each, tasks=_named_from(cwd, each.tasks))
        for name, each in config.mixture.items()
    }
    sets = {name: _named_from(cwd, each) for name, each in config.evaluation.sets.items()}
    algorithm = config.algorithm
    critic = replace(algorithm.critic, model=_absolute(algorithm.critic.model, cwd))
    return replace(
        config,
        tasks=_named_from(cwd, config.tasks),
        mixture=mixture,
        evaluation=replace(config.evaluation, sets=sets),
        algorithm=replace(algorithm, critic=critic, reference=_absolute(algorithm.reference, cwd)),
    )


def _named_from(cwd: Path, tasks: TasksOrSet) -> TasksOrSet:
    if (place := tasks.place) is None:
        return tasks
    place = (cwd / place).resolve()
    place = place.relative_to(cwd) if place.is_relative_to(cwd) else place
    is_file = tasks.dataset is None
    return replace(tasks, file=place) if is_file else replace(tasks, dataset=str(place))


def _absolute(model: str | None, cwd: Path) -> str | None:
    if model is None or not (directory := cwd / Path(model).expanduser()).is_dir():
        return model
    return str(directory)


def _user_modules(config: Config) -> list[Path]:
    return [path for name in user_modules(config) if (path := _user_module(name)) is not None]


def _user_module(name: str) -> Path | None:
    """Return the path of a user's package or module; None if it is missing or installed."""
    spec = find_spec(name.partition(".")[0])
    if spec is None:
        return None
    # A package's directory, or a module's file.
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    module = Path(places[0]).resolve()
    installed = [Path(place).resolve() for place in sysconfig.get_paths().values()]
    return None if any(module.is_relative_to(place) for place in installed) else module


def _import_path() -> str:
    # The user's own modules are in the current directory.
    parts = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(part for part in parts if part)
