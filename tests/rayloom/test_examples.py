"""Tests of the examples in docstrings of public names and of the modules with protocols."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

import pytest
from worlds.builders.chat_replies import chat_reply
from worlds.runs.run_driver import ROOT

import rayloom
from actors.environment import protocol
from service.gateway.dialects import dialect
from service.gateway.dialects.openai_chat import OPENAI_CHAT


def namespace() -> dict[str, Any]:
    return {name: getattr(rayloom, name) for name in rayloom.__all__}


async def test_the_environment_in_the_docstring_can_be_played() -> None:
    [code] = blocks(rayloom.Environment)
    names = namespace()
    exec(code, names)
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


def test_one_line_examples_are_valid_values() -> None:
    shown = (
        "Action", "Message", "Observation", "RewardError", "StepResult", "Task", "ToolCall",
        "ToolSchema",
    )  # fmt: skip
    for name in shown:
        kind = getattr(rayloom, name)
        [line] = re.findall(r"Example: (.*)", inspect.getdoc(kind) or "")
        assert isinstance(eval(line, namespace()), kind)


@pytest.mark.parametrize("name", ["ApiError", "Client", "evaluate", "serve", "train"])
def test_calls_in_longer_examples_fit_the_signatures(name: str) -> None:
    [code] = blocks(getattr(rayloom, name))
    names = {**namespace(), "rayloom": rayloom}
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    checked = 0
    for call in found:
        path = ast.unparse(call.func).split(".")
        owner = names.get("Client") if path[0] == "client" else names.get(path[0])
        function = getattr(owner, path[-1], None) if len(path) > 1 else owner
        if function is not None and len(path) <= 2:
            given = [None] * len(call.args) + ([None] if path[0] == "client" else [])
            keywords = {word.arg: None for word in call.keywords if word.arg}
            inspect.signature(function).bind(*given, **keywords)
            checked += 1
    assert checked


def test_the_example_of_load_config_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    [code] = blocks(rayloom.load_config)
    exec(code, namespace())
    assert capsys.readouterr().out == "20 16\n"


async def test_the_example_of_the_environment_protocol_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [definition] = blocks(rayloom.Environment)
    names = namespace()
    exec(definition, names)
    await run(usage(protocol), names)
    shown = ["Double the number: 5", "0.1 False", "0.1 False", "1.0 True"]
    assert capsys.readouterr().out.splitlines() == shown


async def test_the_example_of_a_dialect_runs() -> None:
    names = {
        **vars(dialect),
        "dialect": OPENAI_CHAT,
        "headers": {},
        "sample": lambda request: chat_reply("Hi."),
    }
    body: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    found = await run(usage(dialect), {**names, "body": body})
    assert found["answer"]["choices"][0]["message"]["content"] == "Hi."
    found = await run(usage(dialect), {**names, "body": {"messages": 1}})
    assert found["status"] == 400 and "error" in found["answer"]


def blocks(documented: object) -> list[str]:
    """Return the blocks of Python in a docstring."""
    text = inspect.getdoc(documented) or ""
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [textwrap.dedent(code) for code in found]


def usage(module: object) -> str:
    """Return the indented example in the docstring of a module."""
    lines = (inspect.getdoc(module) or "").splitlines()
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))


async def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run code that may await and return its variables."""
    body = textwrap.indent(code, "    ")
    exec(f"async def main():\n{body}\n    return locals()", names)
    found: dict[str, Any] = await names["main"]()
    return found
