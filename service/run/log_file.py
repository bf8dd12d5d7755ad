"""The log file of a run."""

from __future__ import annotations

import logging
import time
from logging.handlers import RotatingFileHandler

# A step writes a few hundred bytes: at least the newest hundred thousand steps are kept.
LOG_BYTES, OLD_LOGS = 32 * 2**20, 3


def configure_logging(path: str) -> None:
    """Write Rayloom's log to a file, one line for each event, with its time in UTC.

    A full file is renamed to run.log.1, older files to run.log.2 and so on; the oldest is removed.
    Nothing is written to stdout, because Ray would store each line again in the node's logs.
    """
    lines = logging.Formatter(
        "%(asctime)s %(levelname)-7s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"
    )
    lines.converter = time.gmtime
    root = logging.getLogger("rayloom")
    root.setLevel(logging.INFO)
    root.propagate = False
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=OLD_LOGS)
    handler.setFormatter(lines)
    root.addHandler(handler)
