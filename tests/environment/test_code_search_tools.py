"""Tests of the tools of code search, of their sandbox, their bounds and their cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from worlds.builders.code_repository import (
    FILES,
    good_tar_gz,
    good_zip,
    hostile_archives,
    tar_entry,
    tar_gz,
    write_repository,
)

from actors.environment.plugins.code_search.repositories import BadRepository, scratch
from actors.environment.plugins.code_search.tools import CodeTools, ToolSettings, _Pool
from actors.environment.tool_turns import BadArguments, ToolFailed

ROOT = Path(__file__).parents[2]
SMALL = {"max_repository_mib": 1, "max_entries": 50}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_repository(tmp_path / "shop")
    return tmp_path


def tools(root: Path, **changes: float) -> CodeTools:
    return CodeTools(ToolSettings(root=str(root), **changes))  # type: ignore[arg-type]


async def test_the_tools_list_search_and_read(root: Path) -> None:
    async with tools(root) as search:
        shop = await search.open("shop")

        async def answer_of(name: str, **arguments: object) -> str:
            return await search.call(shop, name, arguments)

        assert await answer_of("list_files") == "README.md\ndata.bin\nshop/\ntests/"
        assert await answer_of("list_files", directory="./shop/") == (
            "shop/__init__.py\nshop/cart.py\nshop/prices.py"
        )
        assert await answer_of("list_files", glob="*cart*") == "shop/cart.py\ntests/test_cart.py"
        assert await answer_of("list_files", glob="**/README.md") == "README.md"
        assert await answer_of("list_files", glob="*.rs") == "No file matches."
        # data.bin is not a text file and is not searched.
        assert await answer_of("grep", pattern=r"class\s+Cart|^TAX") == (
            "shop/cart.py:4: class Cart:\nshop/prices.py:1: TAX = 0.2"
        )
        assert await answer_of("grep", pattern="Cart", directory="tests", glob="*.py") == (
            "tests/test_cart.py:1: from shop.cart import Cart\ntests/test_cart.py:5: assert Cart()"
        )
        assert await answer_of("grep", pattern="zebra") == "No line matches."
        assert await answer_of("read_file", path="README.md") == "# Shop\nSells fruit."
        assert await answer_of("read_file", path="shop/prices.py", first_line=4) == (
            "def price(net):\n    return net * (1 + TAX)"
        )
        assert await answer_of("read_file", path="shop/__init__.py") == "The file is empty."


async def test_no_path_reaches_git_data_or_a_file_outside_the_repository(root: Path) -> None:
    malformed = ["/etc/passwd", "../shop/README.md", "shop/../../x", "a\0b", "x" * 2_000]
    absent = ["passwords", "all/etc/passwd", "all", ".git/COMMIT_EDITMSG", ".git", "nothing", "~"]
    absent += ["shop/.git", "shop\\cart.py", "README.md/x", "\ud800", "n" * 300]
    others = ["shop", "pipe", "data.bin", ""]
    async with tools(root) as search:
        shop = await search.open("shop")
        for path in [*malformed, *absent, *others]:
            with pytest.raises(ToolFailed) as refused:
                await search.call(shop, "read_file", {"path": path})
            assert isinstance(refused.value, BadArguments) == (path in malformed), path
            assert "root:" not in str(refused.value)
        for path in malformed:
            for name in ("list_files", "grep"):
                arguments = {"directory": path, "pattern": "x"}
                with pytest.raises(BadArguments):
                    await search.call(shop, name, arguments)
        for pattern in ("the answer", "root:x"):
            answer = await search.call(shop, "grep", {"pattern": pattern})
            assert answer == "No line matches."
        assert await search.missing_files(shop, [*FILES, "nothing", "shop"]) == ["nothing", "shop"]


async def test_bad_arguments_are_malformed_and_the_error_has_the_reason(root: Path) -> None:
    wrong = [
        ("grep", {"pattern": "("}, "not a regular expression"),
        ("grep", {"pattern": ""}, "1 to 500"),
        ("grep", {"pattern": "x" * 501}, "1 to 500"),
        ("grep", {"pattern": "x", "glob": "g" * 501}, "at most 500"),
        ("grep", {"pattern": "x{9999999999}"}, "not a regular expression"),
        ("read_file", {"path": "README.md", "first_line": 0}, "1 or more"),
    ]
    async with tools(root) as search:
        shop = await search.open("shop")
        for name, arguments, word in wrong:
            with pytest.raises(BadArguments, match=word):
                await search.call(shop, name, arguments)
        with pytest.raises(ToolFailed, match=r"^The file has only 2 lines\.$") as beyond:
            await search.call(shop, "read_file", {"path": "README.md", "first_line": 9})
        assert not isinstance(beyond.value, BadArguments)


async def test_answers_are_bounded_in_lines_and_characters(root: Path) -> None:
    shop = root / "shop"
    (shop / "long.txt").write_text("needle " * 100_000)
    (shop / "lines.txt").write_text("needle\n" * 50_000)
    (shop / "huge.txt").write_text("needle\n" * 500_000)
    (shop / os.fsdecode(b"latin-\xe9.txt")).write_text("needle")
    for index in range(300):
        (shop / f"f{index:03}.txt").write_text("needle\n")
    async with tools(root, max_lines=20, max_chars=1_000) as search:
        place = await search.open("shop")
        for name, arguments in (
            ("list_files", {}),
            ("list_files", {"glob": "*"}),
            ("grep", {"pattern": "needle"}),
            ("read_file", {"path": "long.txt"}),
            ("read_file", {"path": "lines.txt"}),
            ("grep", {"pattern": "needle", "glob": "l*.txt"}),
        ):
            answer = await search.call(place, name, arguments)
            assert len(answer) < 1_100, (name, arguments)
            assert answer.count("\n") <= 20 and "..." in answer
        with pytest.raises(ToolFailed, match=r"^The file is too large to be read\.$"):
            await search.call(place, "read_file", {"path": "huge.txt"})
        listed = await search.call(place, "list_files", {"glob": "lat*"})
        assert listed == "latin-\\udce9.txt"


async def test_a_slow_pattern_is_ended_and_does_not_block_the_event_loop(root: Path) -> None:
    (root / "shop" / "trap.txt").write_text("a" * 60 + "!\n")
    async with tools(root, call_limit_s=1.0) as search:
        shop = await search.open("shop")
        pids: set[int] = set()
        trap = asyncio.create_task(search.call(shop, "grep", {"pattern": "(a+)+$"}))
        num_turns = 0
        while not trap.done():
            await asyncio.sleep(0.01)
            num_turns += 1
            pids.update(_Pool.pids())
        with pytest.raises(ToolFailed, match="too long") as late:
            trap.result()
        assert not isinstance(late.value, BadArguments)
        assert num_turns > 5
        assert pids and not any(map(psutil.pid_exists, pids))
        assert await search.call(shop, "list_files", {"glob": "trap*"}) == "trap.txt"


async def test_a_process_that_ends_or_is_frozen_is_replaced(root: Path) -> None:
    async with tools(root, call_limit_s=1.0) as search:
        shop = await search.open("shop")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            await asyncio.gather(*(search.call(shop, "list_files", {}) for _ in range(8)))
            for pid in _Pool.pids():
                os.kill(pid, number)
            broken = await asyncio.gather(
                *(search.call(shop, "list_files", {}) for _ in range(8)), return_exceptions=True
            )
            failed = [each for each in broken if not isinstance(each, str)]
            assert all(isinstance(each, ToolFailed) for each in failed)
            assert failed or number == signal.SIGKILL
            assert await search.call(shop, "list_files", {})


async def test_no_process_is_left_after_the_last_close(root: Path) -> None:
    first, second = tools(root), tools(root)
    shop = await first.open("shop")
    await asyncio.gather(*(first.call(shop, "list_files", {}) for _ in range(4)))
    pids = _Pool.pids()
    assert pids
    first.close()
    first.close()
    assert await second.call(shop, "list_files", {})
    (root / "shop" / "trap.txt").write_text("a" * 60 + "!\n")
    given_up = asyncio.create_task(second.call(shop, "grep", {"pattern": "(a+)+$"}))
    await asyncio.sleep(0.1)
    given_up.cancel()
    pids += _Pool.pids()
    second.close()
    assert not any(map(psutil.pid_exists, pids)) and _Pool.pids() == []


ATTACKS = """
import errno, os, socket, sys
from actors.environment.plugins.code_search.sandbox import confine
target = sys.argv[1]
walls = confine(memory_bytes=2**28, cpu_s=5, **eval(sys.argv[2]))
def fails(attack):
    try:
        attack()
    except (OSError, MemoryError) as error:
        return True
    return False
attacks = {
    "read": lambda: os.close(os.open(target + ".there", os.O_RDONLY)),
    "connect": lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3])), timeout=2),
    "socket": lambda: socket.socket(),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "fork": lambda: os._exit(9) if os.fork() == 0 else None,
    "exec": lambda: os.execv("/bin/sh", ["sh", "-c", "exit 9"]),
    "write": lambda: os.close(os.open(target, os.O_WRONLY | os.O_CREAT)),
    "append": lambda: os.close(os.open(target + ".there", os.O_RDONLY | os.O_APPEND)),
    "change": lambda: os.close(os.open(target + ".there", os.O_RDWR)),
    "unlink": lambda: os.unlink(target + ".there"),
    "mkdir": lambda: os.mkdir(target + ".d"),
    "signal": lambda: os.kill(os.getppid(), 0),
    "chmod": lambda: os.chmod(target + ".there", 0),
    "memory": lambda: bytearray(2**29),
    "descriptors": lambda: [os.dup(2) for _ in range(500)],
}
if "seccomp" not in walls:
    del attacks["exec"]
print(" ".join(walls), "|", " ".join(name for name, attack in attacks.items() if not fails(attack)))
"""


def attack(tmp_path: Path, how: str, port: int) -> tuple[list[str], set[str]]:
    """Return the names of the walls of the sandbox and of the attacks that succeed.

    The output is read through a pipe, because the sandbox does not let files grow.
    """
    (tmp_path / "target.there").write_text("x")
    done = subprocess.run(
        [sys.executable, "-c", ATTACKS, str(tmp_path / "target"), how, str(port)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    walls, _, succeeded = done.stdout.partition("|")
    return walls.split(), set(succeeded.split())


def test_a_confined_process_can_only_read(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        walls, succeeded = attack(tmp_path, "{}", port)
        if "seccomp" in walls:
            assert succeeded == {"read"}
        assert "connect" not in succeeded
        # On a processor without a seccomp filter only the namespace protects, and the limits do
        # not bind processes of root.
        if "namespace" in walls:
            walls, succeeded = attack(tmp_path, "{'processor': 'abacus'}", port)
            assert walls == ["namespace"]
            assert not succeeded & {"connect", "memory", "descriptors"}


def test_a_tool_process_ends_with_its_owner(root: Path) -> None:
    """Check that the kernel ends the tool processes of an owner that gets kill -9.

    The next process removes the scratch directory that the owner left.
    """
    good_tar_gz(root / "shop.tar.gz")
    program = """
import asyncio, sys
from actors.environment.plugins.code_search.tools import CodeTools, ToolSettings, _Pool
from actors.environment.plugins.code_search.repositories import scratch
async def main():
    tools = CodeTools(ToolSettings(root=sys.argv[1]))
    shop = await tools.open("shop.tar.gz")
    await tools.call(shop, "list_files", {})
    asyncio.create_task(tools.call(shop, "grep", {"pattern": "(.*)*x"}))
    print(scratch(), *_Pool.pids(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(root)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    left, *pids = owner.stdout.readline().split()
    servers = [psutil.Process(int(pid)) for pid in pids]
    assert servers and Path(left).is_dir()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    gone, alive = psutil.wait_procs(servers, timeout=10)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], gone
    subprocess.run(
        [sys.executable, "-c", "from actors.environment.plugins.code_search.repositories import "
         "scratch; scratch()"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    assert not Path(left).exists()


@pytest.mark.parametrize("make", [good_tar_gz, good_zip])
async def test_an_archive_is_unpacked_once_without_links_and_git(root: Path, make: object) -> None:
    archive = make(root / ("r.zip" if make is good_zip else "r.tar.gz"))  # type: ignore[operator]
    async with tools(root) as search:
        places = await asyncio.gather(*(search.open(archive.name) for _ in range(8)))
        assert len(set(places)) == 1 and places[0].startswith(scratch())
        listed = await search.call(places[0], "list_files", {"glob": "*"})
        assert listed.split("\n") == sorted(FILES)
        assert await search.open(f"./{archive.name}") == places[0]
        # An archive that replaces another one of the same name is another repository.
        time.sleep(0.01)
        good_zip(archive) if make is good_zip else good_tar_gz(archive)
        assert await search.open(archive.name) != places[0]


async def test_unused_unpacked_repositories_are_removed_when_space_is_needed(root: Path) -> None:
    content = tar_entry("zeros", bytes(2**20))
    for number in range(11):
        tar_gz(root / f"{number}.tar.gz", content)
    async with tools(root, max_repository_mib=1) as used:
        first = await used.open("0.tar.gz")
        places = []
        for number in range(1, 11):
            async with tools(root, max_repository_mib=1) as search:
                places.append(await search.open(f"{number}.tar.gz"))
        # Space for eight repositories: the one in use and the seven newest are kept.
        assert [Path(place).is_dir() for place in (first, *places)] == [True] + [False] * 3 + [
            True
        ] * 7
        assert await used.call(first, "list_files", {})
        async with tools(root, max_repository_mib=1) as search:
            again = await search.open("1.tar.gz")
            assert await search.call(again, "list_files", {}) == "zeros"


async def test_hostile_archives_are_refused_and_leave_no_file(root: Path) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    async with tools(root, **SMALL) as search:
        for archive, word in hostile_archives(root / "hostile"):
            with pytest.raises(BadRepository, match="refused") as refused:
                await search.open(f"hostile/{archive.name}")
            assert word in str(refused.value), (archive.name, refused.value)
        # A refused archive leaves no file, neither in the scratch directory nor outside it.
        left = [name for name in os.listdir(scratch()) if name != "lock"]
        assert not [name for name in left if "evil" in os.listdir(f"{scratch()}/{name}")]
    found = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in found if "evil" in name]


async def test_a_repository_outside_the_root_is_refused(root: Path) -> None:
    (root / "inner").mkdir()
    (root / "inner" / "out").symlink_to("/etc")
    (root / "inner" / "up").symlink_to(root / "shop")
    (root / "inner" / "notes.txt").write_text("x")
    names = ["/etc", "..", "../shop", "a/../../shop", "out", "up", "", "a\0", "none", "notes.txt"]
    async with tools(root / "inner") as search:
        for name in names:
            with pytest.raises(BadRepository, match=r"expected|leads outside"):
                await search.open(name)
    async with tools(root / "nowhere") as search:
        with pytest.raises(BadRepository, match="root"):
            await search.open("shop")
