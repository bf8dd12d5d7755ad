"""Plant the faults of `mutants.toml` in a copy of the tree, one by one: each must fail a test.

If no test fails, a change could introduce the fault unnoticed. A test has to run and fail: an error
in an import or in the collection does not count. The tests first run once without a fault, because
a test that always fails detects nothing. `make mutants` runs this.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = "900"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted fault. `name` is unique; `find` occurs in `file` exactly once."""

    name: str
    package: str
    fault: str
    file: str
    find: str
    replace: str
    tests: list[str]


def read_mutants() -> list[Mutant]:
    rows = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]
    return [Mutant(**row) for row in rows]


def problems(mutants: Sequence[Mutant]) -> Iterator[str]:
    """Yield the reasons why faults cannot be planted."""
    names = Counter(mutant.name for mutant in mutants)
    yield from (f"{name}: occurs twice in the list" for name, count in names.items() if count > 1)
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.find) if path.is_file() else 0
        if count != 1:
            yield f"{mutant.name}: 'find' occurs {count} times in {mutant.file}, expected once"
        for test in mutant.tests:
            file, *parts = test.split("::")
            name = parts[-1].partition("[")[0] if parts else ""
            if not (ROOT / file).is_file() or f"def {name}" not in (ROOT / file).read_text():
                yield f"{mutant.name}: there is no test {test}"


def copy_tree(tree: Path) -> None:
    """Copy the files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def run_tests(tests: Sequence[str], tree: Path) -> tuple[int, str]:
    """Run tests; return the exit code of pytest, 124 after LIMIT_S, and the end of its output."""
    # A stale .pyc would hide a change that keeps a file's size and second.
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = ["timeout", LIMIT_S, sys.executable, "-m", "pytest", *options, *tests]
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(command, cwd=tree, env=env, stdout=output, stderr=output)
        output.seek(0)
        return done.returncode, "\n".join(output.read().splitlines()[-15:])


def survives(mutant: Mutant, tree: Path) -> bool:
    """Plant a fault, run its tests, and remove it; return whether no test failed."""
    path = tree / mutant.file
    sound = path.read_text()
    path.write_text(sound.replace(mutant.find, mutant.replace))
    code, tail = run_tests(mutant.tests, tree)
    path.write_text(sound)
    is_caught = code == 1 and re.search(r"\b\d+ failed\b", tail) is not None
    print("caught  " if is_caught else "SURVIVED", f"{mutant.name}: {mutant.fault}", flush=True)
    if not is_caught:
        print(f"exit {code}\n{tail}", flush=True)
    return not is_caught


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults and see each one fail a test.")
    parser.add_argument("names", nargs="*", help="names of faults; all faults if none is given")
    parser.add_argument("--package", help="only the faults of one package")
    parser.add_argument("--check", action="store_true", help="only check that each can be planted")
    given = parser.parse_args()
    mutants = read_mutants()
    chosen = [m for m in mutants if given.package in (None, m.package)]
    chosen = [m for m in chosen if not given.names or m.name in given.names]
    found = list(problems(mutants)) + ([] if chosen else ["no such fault"])
    print(*found, sep="\n", end="\n" if found else "")
    if found or given.check:
        return int(bool(found))
    with tempfile.TemporaryDirectory(prefix="mutants-") as tree:
        copy_tree(Path(tree))
        code, tail = run_tests(sorted({test for m in chosen for test in m.tests}), Path(tree))
        if code != 0:
            print(f"the tests fail without a fault: exit {code}\n{tail}")
            return 1
        survivors = [m.name for m in chosen if survives(m, Path(tree))]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults caught", *survivors)
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
