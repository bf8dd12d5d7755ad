"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`).

The plugin registers the weight-transfer backends, which receive new weights, and, on CPU, the class
that applies the LoRA adapter. It also ends the engine's processes when the replica ends. Ray does
not know these processes, so nothing else would end them if the replica is killed.
"""

from __future__ import annotations

import os
import select
import threading
import time
from importlib.metadata import entry_points

from tqdm import tqdm

BACKENDS = {
    "object_store": "ObjectStoreWeightTransferEngine",
    "collective": "CollectiveWeightTransferEngine",
}
ENTRY_POINT_NAME = "rayloom"
_ONE_ADAPTER = "service.inference.lora.OneAdapter"
OWNER_PID_VARIABLE = "RAYLOOM_ENGINE_OWNER_PID"

registered_at = 0.0
"""Time when this process called `register`, which is after its import of vLLM, in seconds since
1970; 0 before the call."""


def register() -> None:
    """Register the weight-transfer backends with vLLM; end this process when the replica ends.

    A second call does nothing.
    """
    global registered_at
    if registered_at:
        return
    registered_at = time.time()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    for backend, class_name in BACKENDS.items():
        # Register the module's path, so that only the worker imports the module, and only when it
        # creates the backend.
        WeightTransferEngineFactory.register_engine(
            backend, "service.inference.weight_transfer", class_name
        )
    if current_platform.is_cpu():
        # vLLM resolves the class by its name when an engine with LoRA starts.
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: _ONE_ADAPTER)
    # tqdm's default lock is a named semaphore, which outlives a killed process.
    tqdm.set_lock(threading.RLock())
    _die_with_owner()


def check_installed() -> None:
    """Raise RuntimeError if this plugin is not installed; vLLM would then start without it."""
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
