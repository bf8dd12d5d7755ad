"""Check for user modules that have the names of Rayloom's packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

NAMES = ("actors", "deploy", "rayloom", "service")
_ROOT = Path(__file__).resolve().parents[1]


def check_names(path: Sequence[str]) -> None:
    """Check that no module on a search path hides one of Rayloom's packages.

    A folder without `__init__.py`, such as `deploy/` with YAML files, hides no package.

    Args:
        path: Directories in search order, such as sys.path.

    Raises:
        ImportError: If a user's module would be imported in place of a package of Rayloom.
    """
    for name in NAMES:
        found = PathFinder.find_spec(name, list(path))
        if found is None or found.origin is None:
            continue
        origin = Path(found.origin).resolve()
        if not origin.is_relative_to(_ROOT / name):
            raise ImportError(
                f"got {origin}, which hides Rayloom's package {name!r} here and in the processes "
                f"of a run; expected no module of yours that is called {', '.join(NAMES)}: rename "
                "it, or start from another directory"
            )
