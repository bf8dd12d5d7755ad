"""Prometheus' promtool, which evaluates rules and queries over series that a test defines."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from worlds.servers.prometheus_server import find_tools


def promtool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [find_tools()["promtool"], *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_test(test: Mapping[str, Any], file: Path, *, rule_files: Sequence[Path] = ()) -> None:
    """Write a test in promtool's format to `file`, and have promtool run it."""
    whole = {
        "rule_files": [str(each) for each in rule_files],
        "evaluation_interval": "60s",
        "tests": [test],
    }
    file.write_text(yaml.dump(whole, Dumper=yaml.CSafeDumper, width=10**9))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
