"""Find the file that a path names, before it is replaced by a rename."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def regular_target(path: Path) -> Path:
    """Follow symbolic links, and return the file that `path` names. The file need not exist.

    A rename to the result replaces the file itself. A rename to `path` would replace a link or, as
    root, a device such as /dev/full.
    Raises: OSError if the path names something other than a regular file, or a loop of links.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        what = "a directory" if target.is_dir() else "not a regular file"
        code = errno.EISDIR if target.is_dir() else errno.EINVAL
        raise OSError(code, f"it is {what}", str(path))
    return target
