"""Tests that packed.html is up to date and loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from worlds.checks.missing_tools import skip_or_fail

from service.page.packed import HERE, PACKED, SOURCES_SHA256, empty_page, sources_digest

REMEDY = "packed.html is not of these sources; run `make page`, and commit what it writes"


def test_the_packed_page_is_up_to_date_with_its_sources() -> None:
    assert f'<meta name="{SOURCES_SHA256}" content="{sources_digest()}">' in empty_page(), REMEDY


def test_packing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        skip_or_fail("needs node and npm")
    here = shutil.copytree(HERE, tmp_path / "page", ignore=shutil.ignore_patterns("node_modules"))

    def npm(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["npm", *arguments], cwd=here, capture_output=True, text=True, timeout=120
        )

    installed = npm("ci", "--no-audit", "--no-fund", "--ignore-scripts")
    if installed.returncode != 0:
        skip_or_fail(f"npm cannot install the packages of the page: {installed.stderr[-300:]}")
    for script in ("check", "build"):
        ended = npm("run", script)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (here / "packed.html").read_bytes() == PACKED.read_bytes(), REMEDY


def test_the_page_contains_no_address_and_loads_nothing() -> None:
    page = empty_page()
    assert "://" not in page and "@import" not in page and "url(" not in page
    targets = re.findall(r'\b(?:src|href)="([^"]*)"', page.partition("<style>")[0])
    assert targets == ["data:,"]


def test_the_content_security_policy_allows_only_the_script_and_the_api() -> None:
    page = empty_page()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    (script,) = re.findall(r"<script>(.*)</script>\n</body>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"


def test_packed_libraries_keep_their_licence() -> None:
    page = empty_page()
    assert "The MIT License (MIT)" in page and "Leon Sorokin" in page
    assert '"resolved"' not in (HERE / "package-lock.json").read_text(encoding="utf-8")
