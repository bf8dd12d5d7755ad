"""A setting that is one of a few words, given as the word or as the enumeration's member."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

Choice = TypeVar("Choice", bound=StrEnum)


def choice(kind: type[Choice], value: Any, *, name: str) -> Choice:
    """Return the member, so that it may be compared by identity.

    Raises: ValueError, naming what there is.
    Example: choice(Baseline, "mean", name="baseline") -> Baseline.MEAN
    """
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(kind)}") from None


def take_choices(settings: object, kinds: dict[str, type[StrEnum]], *, room: str) -> None:
    """Make members of a frozen dataclass's fields. Raises: ValueError, as `choice`."""
    for field, kind in kinds.items():
        member = choice(kind, getattr(settings, field), name=f"{room}.{field}")
        object.__setattr__(settings, field, member)
