"""Whether a stored run is free to be gone on with, looked at before anything starts."""

from __future__ import annotations

import time

from service.config.file import ConfigError
from service.launch.run_dir import RunDir
from service.store.run_store import TOLERANCE_S, RunStore

# A supervisor outlives the kill -9 of its command for a moment.
PATIENCE_S = 10.0
POLL_S = 0.25


def check_free(run_dir: RunDir) -> None:
    """Wait a moment for a holder that is ending. Raises: ConfigError for one that lives on."""
    store = RunStore(run_dir.database_url)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while (owner := store.live_owner(now=time.time())) is not None:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"--resume {run_dir.path}: the run is held by {owner.name} (its supervisor; "
                    f"last sign of life {time.time() - owner.renewed_at:.0f} s ago), expected one "
                    "that nobody holds; end it with Ctrl-C or SIGTERM where it was started, wait "
                    f"{TOLERANCE_S:g} s where its machine is dead, or take the run from it with "
                    "--take-over"
                )
            time.sleep(POLL_S)
    finally:
        store.close()
