"""Replace `$NAME` in a configuration's texts by a variable of the process's environment.

Secrets can therefore be left out of a run's files.
"""

from __future__ import annotations

import os
import re

_NAMED = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


def expanded(text: str, *, what: str) -> str:
    """Replace the variables in a text.

    Args: what: the option's name, for the error.
    Raises: ValueError if a variable is not set.
    """
    for match in _NAMED.finditer(text):
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(
                f"{what}: the variable {name} is not set for the run's processes; set it, or "
                "correct the name"
            )
    return os.path.expandvars(text)
