"""Number types with bounds for the fields of settings; limits of log-ratios, rewards and seeds.

`service.config` reads settings dataclasses from YAML, and checks these bounds. A settings object
that code constructs directly is not checked.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen

# Nats. A token that one policy finds e^20 times likelier than another was not sampled as recorded,
# or was recorded wrongly; its ratio counts as e^20, sends no gradient and overflows nothing.
MAX_LOG_RATIO = 20.0

# The largest reward of a turn or a whole trajectory, after shaping. Advantages are float32: a much
# larger reward would leave its group's other members without a significant digit, or be infinite.
MAX_REWARD = 1e9

# The largest seed that NumPy accepts, and the largest seed of a task. A task's seed fits in 32 bits
# with a sign, because any third-party environment may read it.
MAX_SEED = 2**32 - 1
MAX_TASK_SEED = 2**31 - 1

MIB = 1 << 20
GIB = 1 << 30

# `__pydantic_config__` of all settings: unknown keys are refused, and a field's docstring is its
# description. This is a plain dict, so that actors need no pydantic.
STRICT = {
    "extra": "forbid",
    "use_attribute_docstrings": True,
    "allow_inf_nan": False,
}
# `__pydantic_config__` of a task's data that may have more entries than its class declares.
OPEN = {"use_attribute_docstrings": True}


def strict_unless_empty(**rule: object) -> dict[str, Any]:
    """Return a `__pydantic_config__` for a class of task data; a task may also have no data.

    The configuration forbids unknown entries, like STRICT. If a task has data, its data must
    satisfy the rule. rule: keywords of JSON schema.
    Example: with strict_unless_empty(required=["question"]), {} and {"question": "…"} are valid,
        and {"answer": "…"} is not.
    """
    return {**STRICT, "json_schema_extra": {"if": {"minProperties": 1}, "then": rule}}


# Counts that the run's database, and the libraries' own 32-bit counters, can hold.
_MAX_COUNT = 2**31 - 1
Positive = Annotated[int, Ge(1), Le(_MAX_COUNT)]
Natural = Annotated[int, Ge(0), Le(_MAX_COUNT)]
Retries = Annotated[int, Ge(0), Le(100)]
Seed = Annotated[int, Ge(0), Le(MAX_SEED)]
# Below a tenth of a second, deadlines pass before an answer can be on its way.
Seconds = Annotated[float, Ge(0.1)]
Rate = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
# The engine would raise a lower temperature to this bound, and the trainer would not.
Temperature = Annotated[float, Ge(0.01)]
Port = Annotated[int, Ge(0), Le(65535)]
ModelName = Annotated[str, MinLen(1)]
