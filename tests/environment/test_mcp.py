"""Tests of tools of real MCP servers, each of which runs in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest

from actors.environment import mcp_servers, server_keeper
from actors.environment.builtin.tools import ToolsEnvironment, ToolsOptions
from actors.environment.mcp_servers import BadServer, ServerLost
from actors.environment.protocol import Action, ToolCall
from actors.options import BadOptions, read
from actors.types import Task

SERVER = str(Path(__file__).parents[1] / "worlds" / "servers" / "mcp_calculator.py")
STDIO = {"command": ["python3", SERVER], "env": {"SECRET_OF_TEST": "$SECRET_OF_THE_RUN"}}
LIMIT_S = 30.0


def exact(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


def calculator(expression: str) -> int:
    """Return 0; the MCP server has a tool of the same name."""
    return 0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mcp_of_test")
    module.exact, module.calculator = exact, calculator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mcp_of_test", module)
    monkeypatch.setenv("SECRET_OF_THE_RUN", "a secret")


def made(*tools: str, call_limit_s: float = 20, **servers: Any) -> ToolsEnvironment:
    names = [f"mcp_of_test:{each}" for each in tools]
    given = {
        "reward": "mcp_of_test:exact",
        "tools": names,
        "mcp": servers,
        "call_limit_s": call_limit_s,
    }
    return ToolsEnvironment(read(ToolsOptions, given, where="options"))


TASK = Task(task_id="t", environment="tools", seed=0, data={"prompt": "Go.", "answer": "7"})


def call(name: str, **arguments: Any) -> Action:
    return Action(text="…", calls=(ToolCall(name=name, arguments=arguments, id="c"),))


async def said(environment: ToolsEnvironment, action: Action) -> str:
    [message] = (await environment.step(action)).messages
    return message.content


async def check_calls(environment: ToolsEnvironment) -> None:
    start = await environment.reset(TASK)
    schemas = {tool.name: tool for tool in start.tools}
    assert schemas["calculator"].description == "Evaluate an arithmetic expression."
    assert schemas["calculator"].parameters["required"] == ["expression"]
    assert await said(environment, call("calculator", expression="3+4")) == "7"
    assert "nothing was found" in await said(environment, call("fail"))
    assert (await environment.step(Action(text="7"))).reward == 1.0


async def test_episodes_share_a_stdio_server_and_a_lost_one_is_started_again() -> None:
    first, second = made(sums=STDIO), made(sums=STDIO)
    await check_calls(first)
    await second.reset(TASK)
    process, secret = (await said(first, call("process"))).split(" ", 1)
    assert secret == "a secret" and await said(second, call("process")) == f"{process} a secret"
    with pytest.raises(ServerLost, match="mcp server sums"):
        await first.step(call("end"))
    third = made(sums=STDIO)
    await check_calls(third)
    assert (await said(third, call("process"))).split(" ")[0] != process


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        address, end = f"http://127.0.0.1:{port}/mcp", time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            try:
                httpx.get(address)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


async def test_a_server_over_http_is_called_and_its_loss_is_an_error(url: str) -> None:
    environment = made(sums={"url": url, "headers": {"X-Key": "$SECRET_OF_THE_RUN"}})
    await check_calls(environment)
    with pytest.raises(ServerLost):
        await environment.step(call("end"))
    with pytest.raises(ServerLost, match=r"mcp server sums \(http"):
        await made(sums={"url": url}).reset(TASK)


@pytest.mark.proof
@pytest.mark.slow
async def test_a_hanging_server_is_lost_and_a_server_with_a_slow_tool_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_servers, "CHECK_LIMIT_S", 1.0)
    environment = made(sums=STDIO, call_limit_s=0.3)
    await environment.reset(TASK)
    pid = int((await said(environment, call("process"))).split(" ")[0])
    assert await said(environment, call("slow")) == "error: no answer within 0.3 s."
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ServerLost, match="did not answer the call, nor list its tools within 1 s"):
        await environment.step(call("process"))
    again = made(sums=STDIO)
    await again.reset(TASK)
    assert int((await said(again, call("process"))).split(" ")[0]) != pid


async def test_a_server_that_never_answers_is_an_error_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_servers, "OPEN_LIMIT_S", 0.5)
    mute = {"command": [sys.executable, "-c", "import time; time.sleep(60)"]}
    with pytest.raises(ServerLost, match=r"did not answer within 0.5 s") as caught:
        await made(mute=mute).reset(TASK)
    assert caught.value.__cause__ is None


async def test_tools_are_chosen_by_name_and_two_of_one_name_are_refused() -> None:
    start = await made(sums={**STDIO, "tools": ["calculator"]}).reset(TASK)
    assert [tool.name for tool in start.tools] == ["calculator"]
    with pytest.raises(BadServer, match="has no tool search, expected some of calculator, fail"):
        await made(sums={**STDIO, "tools": ["search"]}).reset(TASK)
    with pytest.raises(ValueError, match="calculator is the name of two tools of"):
        await made("calculator", sums=STDIO).reset(TASK)


async def test_the_text_of_an_embedded_resource_is_shown() -> None:
    environment = made(sums=STDIO)
    await environment.reset(TASK)
    assert await said(environment, call("read")) == "A note.\n[resource]\n\nThe end."


# A server that lists the tool add twice, which servers of the package mcp cannot do.
TWICE = """
import json, sys
tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("add", "add", "halve")]
answers = {"tools/list": {"tools": tools}}
for line in sys.stdin:
    asked = json.loads(line)
    version = asked.get("params", {}).get("protocolVersion")
    begun = {
        "protocolVersion": version,
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "twice", "version": "1"},
    }
    if "id" in asked:
        result = answers.get(asked["method"], begun)
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def test_a_server_that_lists_a_tool_twice_is_refused_unless_the_tool_is_left_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    twice = {"command": [sys.executable, str(tmp_path / "twice.py")]}
    with pytest.raises(BadServer, match="lists two tools with the name add, expected unique"):
        await made(s=twice).reset(TASK)
    start = await made(s={**twice, "tools": ["halve"]}).reset(TASK)
    assert [tool.name for tool in start.tools] == ["halve"]


async def test_a_program_that_is_not_a_server_is_an_error_at_the_first_task() -> None:
    with pytest.raises(ServerLost, match="mcp server none"):
        await made(none={"command": [sys.executable, "-c", "print(1)"]}).reset(TASK)


WITH_WORDS = f"""
import runpy, sys
print("ready", 2 * "é", file=sys.stderr)
runpy.run_path({SERVER!r}, run_name="__main__")
"""


async def test_the_error_of_a_lost_server_has_the_end_of_its_standard_error() -> None:
    failing = {"command": [sys.executable, "-c", "import no_such_module"]}
    with pytest.raises(
        ServerLost, match=r"cannot be opened: .*: Traceback .* \| Module.*_module'$"
    ):
        await made(failing=failing).reset(TASK)
    environment = made(sums={**STDIO, "command": [sys.executable, "-c", WITH_WORDS]})
    await check_calls(environment)
    with pytest.raises(ServerLost, match=r"Connection closed; the end of its .*: ready éé"):
        await environment.step(call("end"))


async def test_only_the_first_part_of_a_long_standard_error_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mcp_servers, "SHOWN_BYTES", 100_000)
    monkeypatch.setattr(mcp_servers, "_num_shown", 0)
    script = "import sys; sys.stderr.write(100 * (19_999 * 'x' + '\\n'))\n" + WITH_WORDS
    await check_calls(made(sums={**STDIO, "command": [sys.executable, "-c", script]}))
    shown = capsys.readouterr().err
    assert 100_000 <= len(shown) < 200_000 and shown.count("is not logged any further") == 1
    assert shown.startswith("xxx") and "ready" not in shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ": got neither of command and url"),
        ({"command": ["x"], "url": "http://x"}, ": got both of command and url"),
        ({"command": "python x.py"}, r"\.command: got 'python x.py', expected a list"),
        ({"command": ["no-such-program-here"]}, r"\.command: no-such-program-here not found"),
        ({"url": "ftp://x"}, r"\.url: got 'ftp://x', expected http:// or https://"),
        ({"url": "http://x", "headers": {"a": 3}}, r"\.headers\.a: got 3, expected a text"),
        (
            {"url": "http://x", "headers": {"a": "Bearer $NOT_SET_ANYWHERE"}},
            r"\.headers: the variable NOT_SET_ANYWHERE is not",
        ),
        ({"adress": "x"}, r"\.adress: unknown key; did you mean 'headers'"),
        ({"place": "x"}, r"\.place: unknown key; expected one of command"),
        ("http://x", ": got 'http://x', expected a map of settings, with keys such as command"),
        ({"url": "http://x", "per": "task"}, r"\.per: got 'task', expected 'actor' or 'episode'"),
    ],
)
def test_invalid_options_of_a_server_are_refused(given: Any, words: str) -> None:
    with pytest.raises(BadOptions, match=rf"^options\.mcp\.sums{words}"):
        made(sums=given)


async def test_a_server_for_one_episode_ends_with_the_episode() -> None:
    own = {**STDIO, "per": "episode"}
    first, second = made(sums=own), made(sums=own)
    await check_calls(first)
    await second.reset(TASK)
    pids = [int((await said(each, call("process"))).split()[0]) for each in (first, second)]
    assert pids[0] != pids[1] and all(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(ServerLost, match="mcp server sums"):
        await second.step(call("end"))
    await second.close()
    assert await said(first, call("calculator", expression="1+1")) == "2"
    await first.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


# A launcher, like npx, uvx or a script, that starts the server and two other processes; one of
# them is in a session of its own and survives its parent.
LAUNCHER = "(setsid sleep 1000 &) ; sleep 1000 & {python} {server}; true"
LAUNCHED = {"command": ["sh", "-c", LAUNCHER.format(python=sys.executable, server=SERVER)]}


def below(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


def are_gone(processes: Sequence[psutil.Process]) -> bool:
    end = time.monotonic() + LIMIT_S
    while any(each.is_running() for each in processes) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(each.is_running() for each in processes)


async def test_all_processes_that_a_server_started_end_with_the_episode() -> None:
    before = below(os.getpid())
    environment = made(sums={**LAUNCHED, "per": "episode"})
    await check_calls(environment)
    started = [each for each in below(os.getpid()) if each not in before]
    # Two processes of the keeper, the launcher, the server, and two that sleep.
    assert len(started) == 6
    await environment.close()
    assert are_gone(started)


HOLDER = """
import asyncio, json, sys
from actors.environment.mcp_servers import McpServer, ServerOptions
from actors.options import read
async def main():
    options = read(ServerOptions, json.loads(sys.argv[1]), where="mcp.sums")
    server = McpServer("sums", options)
    opening = asyncio.create_task(server.tools())
    print("opening", flush=True)
    await opening
    print("open", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "state", "delay_s", "with_children"),
    [
        ({"command": [sys.executable, SERVER]}, "open", 0.0, False),
        (LAUNCHED, "open", 0.0, False),
        (LAUNCHED, "opening", 0.3, False),
        (LAUNCHED, "opening", 0.5, False),
        # Ray ends a worker together with its children.
        (LAUNCHED, "open", 0.0, True),
    ],
)
def test_a_server_ends_when_its_user_is_killed(
    options: dict[str, Any], state: str, delay_s: float, with_children: bool
) -> None:
    line = [sys.executable, "-c", HOLDER, json.dumps(options)]
    holder = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout:
        while holder.stdout.readline().strip() != state:
            assert holder.poll() is None
        time.sleep(delay_s)
        started = below(holder.pid)
        children = psutil.Process(holder.pid).children() if with_children else []
        for process in (holder.pid, *(each.pid for each in children)):
            os.kill(process, signal.SIGKILL)
        holder.wait()
    assert started or state == "opening"
    assert are_gone(started)


def test_the_keeper_passes_on_a_signal_and_returns_the_status_of_the_server() -> None:
    asked = "trap 'exit 5' TERM; sleep 1000 & echo ready; wait"
    for script, number, status in ((asked, signal.SIGTERM, 5), ("exit 3", None, 3)):
        line = [sys.executable, server_keeper.__file__, str(os.getpid()), "sh", "-c", script]
        keeper = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert keeper.stdout is not None
        with keeper.stdout:
            if number is not None:
                assert keeper.stdout.readline() == "ready\n"
                started = below(keeper.pid)
                keeper.send_signal(number)
                assert len(started) == 3 and are_gone(started)
            assert keeper.wait(LIMIT_S) == status


def test_the_keeper_starts_nothing_without_the_command_or_its_user() -> None:
    for user, command, status in ((os.getpid(), "/nowhere/server", 127), (2**22, "true", 1)):
        line = [sys.executable, server_keeper.__file__, str(user), command]
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == status
        assert ("/nowhere/server: No such file" in done.stderr) == (status == 127)


def test_a_check_before_the_start_leaves_no_server() -> None:
    async def trial() -> int:
        environment = made(sums=STDIO)
        await environment.reset(TASK)
        pid = int((await said(environment, call("process"))).split()[0])
        await environment.close()
        return pid

    assert not psutil.pid_exists(asyncio.run(trial()))
