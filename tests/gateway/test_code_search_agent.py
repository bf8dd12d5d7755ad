"""Tests of the example of an external agent: tasks, tools and reward of the environment."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from worlds.builders.code_repository import write_repository
from worlds.parts.dialect_server import DialectServer

from actors.environment.plugins.code_search.tools import CodeTools, ToolSettings, _Pool
from actors.environment.protocol import Message, Role, ToolCall
from actors.types import Task
from service.gateway.chat import ChatReply, RefusalCode, Refused

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "code_search_agent.py"
TRUTH = ["shop/cart.py", "tests/test_cart.py"]
DATA = {"question": "Where is the cart?", "repository": "shop", "files": TRUTH}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("code_search_agent", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The data classes of the module look up their types in sys.modules.
    monkeypatch.setitem(sys.modules, "code_search_agent", module)
    spec.loader.exec_module(module)
    yield module


def calls(*named: tuple[str, object]) -> ChatReply:
    return ChatReply(
        turn_id="turn",
        policy_version=1,
        created_at=7,
        message=Message(
            role=Role.ASSISTANT,
            content="" if named else "I do not know.",
            tool_calls=tuple(
                ToolCall(id=f"call-{n}", name=name, arguments=arguments)  # type: ignore[arg-type]
                for n, (name, arguments) in enumerate(named)
            ),
        ),
        stop_reason="calls" if named else "stop",
        num_prompt_tokens=1,
        num_sampled_tokens=1,
    )


async def test_an_external_agent_plays_by_the_rules_of_the_environment(
    tmp_path: Path, example: ModuleType, dialect_server: DialectServer
) -> None:
    write_repository(tmp_path / "shop")
    task = Task(task_id="t", environment="code_search", seed=0, data=DATA)
    env = {"OPENAI_BASE_URL": f"{dialect_server.url}/v1", "OPENAI_API_KEY": "key"}
    search = calls(("grep", {"pattern": "Cart"}), ("read_file", {"path": "../x"}))
    answer = calls(("answer", {"files": ["./shop/cart.py", "README.md"]}))
    async with CodeTools(ToolSettings(root=str(tmp_path))) as tools:
        dialect_server.begin(search, calls(), answer)
        played = await example.play(env, task, tools)
        parts = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "num_calls": 2.0, "malformed": -0.2}
        assert played == example.Played(reward=0.3, components=parts, outcome="completed")
        asked = dialect_server.bodies[-1]
        names = [tool["function"]["name"] for tool in asked["tools"]]
        assert names == ["list_files", "grep", "read_file", "answer"]
        results = [message["content"] for message in asked["messages"] if message["role"] == "tool"]
        assert "shop/cart.py:4" in results[0] and results[1].startswith("error: Paths are relative")
        for bad in (("rm", {}), ("answer", {"files": "x"}), ("answer", {"files": [1]})):
            dialect_server.begin(calls(bad))
            played = await example.play(env, task, tools)
            assert (played.outcome, played.reward) == ("malformed_tool_call", pytest.approx(-0.4))
        dialect_server.begin(calls(("list_files", {})))
        assert (await example.play(env, task, tools)).outcome == "max_turns"
        full = Refused(RefusalCode.CONTEXT_LENGTH_EXCEEDED, "the context is full")
        dialect_server.begin(search, full)
        played = await example.play(env, task, tools)
        assert played.outcome is None and played.reward == 0.0
    assert _Pool.pids() == []
