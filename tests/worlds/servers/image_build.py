"""An image of the project, built by buildah on a Debian that mmdebstrap makes.

Needs root. In the build pip finds packages as it does on this machine: its configuration, and the
files that the configuration names, are mounted during the build and do not get into the image.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worlds.checks.missing_tools import skip_or_fail
from worlds.servers.helm_chart import CHART

ROOT = CHART.parent
TOOLS = ("buildah", "mmdebstrap")
SUITE = "bookworm"
PACKAGES = "ca-certificates,python3,python3-venv"
# The same as in Debian's own images.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE = "localhost/base"
BUILT = "localhost/rayloom"
LIMIT_S = 2400


def require_buildah() -> None:
    """Skip the test if no image can be built; fail it if CI is set."""
    if os.geteuid() != 0:
        skip_or_fail("building an image needs root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        skip_or_fail(f"{', '.join(missing)} not found: install Debian's packages of these names")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A built image whose files are mounted."""

    files: Path
    config: dict[str, Any]
    """In the form of OCI's image specification: User, Env, Labels, ..."""

    @property
    def environ(self) -> dict[str, str]:
        return dict(variable.split("=", 1) for variable in self.config["Env"])

    def home(self, user: int) -> str:
        """Return a user's home directory from /etc/passwd."""
        lines = (self.files / "etc/passwd").read_text().splitlines()
        [home] = [fields[5] for line in lines if (fields := line.split(":"))[2] == str(user)]
        return home

    def output_of(self, *command: str) -> str:
        """Run a command in the image as the image's user; return what it prints."""
        settings = [f"{name}={value}" for name, value in self.environ.items()]
        line = ["chroot", f"--userspec={self.config['User']}", self.files]
        return _run(*line, "env", "-i", *settings, *command, limit_s=60)


@contextlib.contextmanager
def built(dockerfile: Path, directory: Path) -> Iterator[Image]:
    """Build an image, which takes minutes; remove it at the end of the block.

    directory: a place with enough room for the build.
    """
    require_buildah()
    base = directory / "base.tar"
    _run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, base)
    buildah = ("buildah", "--root", directory / "images", "--runroot", directory / "state")
    try:
        _run(*buildah, "from", "--name", "base", "scratch")
        _run(*buildah, "add", "base", base, "/")
        _run(*buildah, "config", f"--env=PATH={PATH}", "base")
        _run(*buildah, "commit", "--quiet", "--rm", "base", BASE)
        _run(
            *buildah, "bud", "--isolation=chroot", f"--build-arg=BASE_IMAGE={BASE}",
            *_pip_mounts(directory), f"--file={dockerfile}", f"--tag={BUILT}", ROOT,
        )  # fmt: skip
        config = json.loads(_run(*buildah, "inspect", "--type=image", BUILT))["OCIv1"]["config"]
        _run(*buildah, "from", "--name", "run", BUILT)
        files = Path(_run(*buildah, "mount", "run").strip())
        yield Image(files=files, config=config)
    finally:
        _run(*buildah, "rm", "--all")
        _run(*buildah, "rmi", "--all", "--force")
        base.unlink(missing_ok=True)


def _pip_mounts(directory: Path) -> list[str]:
    """Options that give a build one file with all of this machine's settings of pip."""
    listed = _run(sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list")
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        # global.index-url, or :env:.index-url, which is listed first and wins.
        settings.setdefault(name.rpartition(".")[2], str(ast.literal_eval(value)))
    file = directory / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {settings[key]}\n" for key in settings))
    words = [word for value in settings.values() for word in value.split()]
    # The pages of an index link to files in the directory next to them.
    mounts = {Path(word.removeprefix("file://")).parent for word in words if "file://" in word}
    mounts |= {Path(word) for word in words if Path(word).is_absolute() and Path(word).exists()}
    return [f"--volume={file}:/etc/pip.conf:ro", *(f"--volume={each}:{each}:ro" for each in mounts)]


def _run(*command: object, limit_s: float = LIMIT_S) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {(done.stdout + done.stderr)[-4000:]}"
    return done.stdout
