"""The order of trajectories in an explanation. Importing it does not import torch."""

from __future__ import annotations

from enum import StrEnum


class Order(StrEnum):
    """The order of trajectories: by the part of their gradient's size that does not depend on
    others (`leverage`), by that size unchanged, or by their share of the update's direction.
    """

    OWN = "own"
    NORM = "norm"
    SHARE = "share"
