"""The user's cache directory, for results that later runs can use again.

It may be empty: a run computes a missing result again, also if the directory is read-only.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the path of `rayloom/NAME` in the user's cache directory; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rayloom" / name
