"""The examples in the docstrings of the public names."""

from __future__ import annotations

import inspect
import re
from typing import Any

import rayloom


def namespace() -> dict[str, Any]:
    return {name: getattr(rayloom, name) for name in rayloom.__all__}


async def test_the_environment_of_the_docstring_can_be_played() -> None:
    text = inspect.getdoc(rayloom.Environment) or ""
    [code] = re.findall(r"```python\n(.*?)```", inspect.cleandoc(text), re.DOTALL)
    names = namespace()
    exec(inspect.cleandoc(code), names)
    environment = names["Doubling"]()
    begun = await environment.reset(rayloom.Task(task_id="a", environment="my:Doubling", seed=4))
    assert begun.messages[0].content == "Double the number: 5"
    rewards = []
    for answer in ("10", "20", "40"):
        result = await environment.step(rayloom.Action(text=answer))
        rewards.append((result.reward, result.terminated))
    assert rewards == [(0.1, False), (0.1, False), (1.0, True)]
    await environment.reset(rayloom.Task(task_id="a", environment="my:Doubling", seed=4))
    assert (await environment.step(rayloom.Action(text="11"))).terminated


def test_the_examples_of_one_line_are_values() -> None:
    for name in ("Message", "StepResult"):
        kind = getattr(rayloom, name)
        [line] = re.findall(r"Example: (.*)", inspect.getdoc(kind) or "")
        assert isinstance(eval(line, namespace()), kind)
