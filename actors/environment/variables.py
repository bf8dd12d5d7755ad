"""Texts of a configuration with `$NAME`, which stands for a variable of the process's environment:
so that secrets are in no file of a run."""

from __future__ import annotations

import os
import re

_NAMED = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


def expanded(text: str, *, what: str) -> str:
    """what: the option, for the error. Raises: ValueError for a variable that is not set."""
    for match in _NAMED.finditer(text):
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(
                f"{what}: the variable {name} is not set where the run's processes start; set it, "
                "or correct the name"
            )
    return os.path.expandvars(text)
