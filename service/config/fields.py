"""What the parts of the configuration tree share: a section, and numbers with their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _refuse_truth(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "expected a number")
    return value


_Number = BeforeValidator(_refuse_truth)
# Counts that the run's database, and the libraries' own 32-bit counters, can hold.
_MAX_COUNT = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=_MAX_COUNT), _Number]
Natural = Annotated[int, Field(ge=0, le=_MAX_COUNT), _Number]
# A bound of its own, because one that is laid over Natural would not reach the chart's schema.
Retries = Annotated[int, Field(ge=0, le=100), _Number]
# NumPy takes no greater one.
MAX_SEED = 2**32 - 1
Seed = Annotated[int, Field(ge=0, le=MAX_SEED), _Number]
# Below a tenth of a second, deadlines pass before an answer can be on its way.
Seconds = Annotated[float, Field(ge=0.1, allow_inf_nan=False), _Number]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), _Number]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), _Number]
# The engine raises what is lower to this; the trainer would not.
Temperature = Annotated[float, Field(ge=0.01, allow_inf_nan=False), _Number]
Finite = Annotated[float, Field(allow_inf_nan=False), _Number]
Fraction = Annotated[float, Field(ge=0, le=1), _Number]
Share = Annotated[float, Field(gt=0, le=1), _Number]
Decay = Annotated[float, Field(ge=0, lt=1), _Number]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
