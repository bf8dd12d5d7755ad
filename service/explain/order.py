"""What puts a trajectory first. Apart, because the command line reads it before torch."""

from __future__ import annotations

from enum import StrEnum


class Order(StrEnum):
    """By the size of its gradient that is its own doing (`leverage`), by that size as it is, or by
    how much of the update's direction is its."""

    OWN = "own"
    NORM = "norm"
    SHARE = "share"
