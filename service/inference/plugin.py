"""vLLM's entry point into this package (`vllm.general_plugins`), loaded in each of its processes.

It makes the weight-transfer backends known by name, and ties the life of the engine's processes to
the replica's: an engine core is no Ray worker, so nothing else ends it when its replica is killed.
"""

from __future__ import annotations

import os
import select
import threading
import time
from importlib.metadata import entry_points

from tqdm import tqdm

from actors.trainer.settings import WeightBackend

BACKENDS = {
    WeightBackend.OBJECT_STORE: "ObjectStoreWeightTransferEngine",
    WeightBackend.COLLECTIVE: "CollectiveWeightTransferEngine",
}
ENTRY_POINT_NAME = "rayloom"
OWNER_PID_VARIABLE = "RAYLOOM_ENGINE_OWNER_PID"

registered_at = 0.0
"""When this process had imported vLLM and called `register`, seconds since 1970; 0: not yet."""


def register() -> None:
    """Register the backends and start the watch on the owner; a second call does nothing."""
    global registered_at
    if registered_at:
        return
    registered_at = time.time()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, class_name in BACKENDS.items():
        # By module path: it is imported in the worker alone, when the engine is created.
        WeightTransferEngineFactory.register_engine(
            backend.value, "service.inference.weight_transfer", class_name
        )
    # Its default makes a named semaphore, which outlives a process that is killed.
    tqdm.set_lock(threading.RLock())
    _die_with_owner()


def check_installed() -> None:
    """Raises: RuntimeError when vLLM's own processes would not find this plugin."""
    if not entry_points(group="vllm.general_plugins", name=ENTRY_POINT_NAME):
        raise RuntimeError(
            f"inference: got no vLLM plugin {ENTRY_POINT_NAME!r} among the installed packages, "
            "expected this project's; install it (pip install -e .)"
        )


def _die_with_owner() -> None:
    owner = int(os.environ.get(OWNER_PID_VARIABLE, "0"))
    if owner in (0, os.getpid()):
        return
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_wait_and_exit, args=(owner_fd,), daemon=True).start()


def _wait_and_exit(owner_fd: int) -> None:
    select.select([owner_fd], [], [])
    os._exit(1)
