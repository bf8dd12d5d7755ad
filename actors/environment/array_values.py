"""Convert arrays and numbers of numpy, pandas and torch to Python values."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import numpy as np


def python_values(value: Any) -> Any:
    """Return what `tolist` of an array or of a number returns, with dates and durations.

    Raises: TypeError for a masked or missing value, and for a date that Python cannot hold:
    `tolist` would return None or an integer.
    """
    if np.ma.is_masked(value):
        raise TypeError("an array with masked values")
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind not in ("M", "m"):
        return value.tolist()
    # numpy returns times that are finer than Python's as integers.
    times = value.astype(f"{kind}8[us]")
    found = np.asarray(times).astype(object).flat
    if not all(isinstance(each, date | timedelta) for each in found):
        raise TypeError("a missing date or duration, or one that Python cannot hold")
    return times.tolist()
