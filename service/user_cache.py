"""The user's cache directory, for results that later runs can reuse.

It may be empty or read-only: a run then computes a missing result again.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the path of `rayloom/NAME` in the user's cache directory; it may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rayloom" / name
