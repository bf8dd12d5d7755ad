"""The order of trajectories in an explanation. Importing it does not import torch."""

from __future__ import annotations

from enum import StrEnum


class Order(StrEnum):
    """The order of trajectories in an explanation.

    OWN orders by the part of a gradient's size that does not depend on other trajectories, NORM by
    the whole size, and SHARE by the share of the update's direction.
    """

    OWN = "own"
    NORM = "norm"
    SHARE = "share"
