"""A check of dashboards against Grafana's TypeScript types.

The types and the compiler are two pinned npm packages, downloaded once to `build/grafana`. Without
Node.js, or if the download fails, the test is skipped with the reason; if CI is set, it fails.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha512
from pathlib import Path
from typing import Any

from worlds.checks.missing_tools import skip_or_fail

ROOT = Path(__file__).parents[3]
MODULES = ROOT / "build" / "grafana" / "node_modules"
TYPES = Path(__file__).parent / "grafana.ts"
FETCH_LIMIT_S = 300
CHECK_LIMIT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    name: str
    version: str
    sha512: str
    """SHA-512 of the package's archive, in base64, as npm writes it."""


PACKAGES = (
    Package(
        name="@grafana/schema",
        version="13.2.3",
        sha512="rk8FEO7yuFfRTK/JD39747SZFQ+iCTQbpm6Mh2OjnqGx/g/uQQFx56t64eCLXWEyoR68ru4cigcGKrXk+ozrLg==",
    ),
    Package(
        name="typescript",
        version="5.9.3",
        sha512="jl1vZzPDinLr9eUt3J/t7V6FgNEw9QjvBPdysz9KfQDD41fQrC2Y4vKQdiaUpFT4bXlb1RHhLpp8wtm6M5TgSw==",
    ),
)


def type_errors(dashboards: Mapping[str, Mapping[str, Any]], folder: Path) -> list[str]:
    """Return the type errors of dashboards, given by name, as lines that begin with the file."""
    modules = _fetched()
    (folder / "node_modules").symlink_to(modules, target_is_directory=True)
    shutil.copy(TYPES, folder / "grafana.ts")
    for name, tree in dashboards.items():
        text = json.dumps(tree, indent=1)
        lines = ('import type { Dashboard } from "./grafana";', f"const it: Dashboard = {text};")
        (folder / f"{name}.json.ts").write_text("\n".join((*lines, "export default it;")), "utf-8")
    done = subprocess.run(
        [
            "node", str(modules / "typescript" / "bin" / "tsc"), "--noEmit", "--strict",
            "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler",
            *(f"{name}.json.ts" for name in dashboards),
        ],
        cwd=folder, capture_output=True, text=True, timeout=CHECK_LIMIT_S, check=False,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert bool(errors) == bool(done.returncode), done.stdout + done.stderr
    return errors


def _fetched() -> Path:
    if not shutil.which("node") or not shutil.which("npm"):
        skip_or_fail("Grafana's types need Node.js and npm")
    try:
        for package in PACKAGES:
            if not _is_there(package):
                _fetch(package)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        skip_or_fail(f"Grafana's types cannot be downloaded: {reason}")
    return MODULES


def _is_there(package: Package) -> bool:
    manifest = MODULES / package.name / "package.json"
    return manifest.exists() and json.loads(manifest.read_text())["version"] == package.version


def _fetch(package: Package) -> None:
    place = MODULES / package.name
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as directory:
        subprocess.run(
            ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
            cwd=directory, check=True, capture_output=True, text=True, timeout=FETCH_LIMIT_S,
        )  # fmt: skip
        [archive] = Path(directory).glob("*.tgz")
        found = base64.b64encode(sha512(archive.read_bytes()).digest()).decode()
        assert found == package.sha512, f"{archive.name} has the wrong hash: {found}"
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
        shutil.rmtree(place, ignore_errors=True)
        (Path(directory) / "package").rename(place)
