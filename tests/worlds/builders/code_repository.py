"""A small repository for tests of code search, as a directory, with Git and as archives.

Some archives are harmless; others are broken or attack the code that unpacks them.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

FILES: Mapping[str, str] = {
    "README.md": "# Shop\nSells fruit.\n",
    "shop/__init__.py": "",
    "shop/cart.py": '"""What a customer has chosen."""\n\n\nclass Cart:\n    total = 0\n',
    "shop/prices.py": "TAX = 0.2\n\n\ndef price(net):\n    return net * (1 + TAX)\n",
    "tests/test_cart.py": "from shop.cart import Cart\n\n\ndef test_cart():\n    assert Cart()\n",
}


def write_repository(directory: Path) -> Path:
    """Write FILES, and entries that no tool may show: links to the outside, .git and a pipe."""
    for name, content in FILES.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (directory / ".git").mkdir()
    (directory / ".git" / "COMMIT_EDITMSG").write_text("the answer is shop/cart.py\n")
    (directory / "passwords").symlink_to("/etc/passwd")
    (directory / "all").symlink_to("/")
    os.mkfifo(directory / "pipe")
    (directory / "data.bin").write_bytes(b"Cart\0" * 10)
    return directory


def tar_entry(name: str, content: bytes = b"x", **changes: object) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    for key, value in changes.items():
        setattr(entry, key, value)
    return entry, content


def tar_gz(file: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(file, "w:gz") as tar:
        for entry, content in entries:
            tar.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
    return file


def good_tar_gz(file: Path) -> Path:
    link = tar_entry("link.py", b"", type=tarfile.SYMTYPE, linkname="shop/cart.py")
    own = [tar_entry(name, content.encode()) for name, content in FILES.items()]
    return tar_gz(file, *own, link, tar_entry(".git/config", b"secret"))


def good_zip(file: Path) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in FILES.items():
            packed.writestr(name, content)
    return file


def hostile_archives(directory: Path) -> list[tuple[Path, str]]:
    """Write archives that must be refused. Return each with a word of its error message."""
    directory.mkdir(exist_ok=True)
    link = tar_entry("a", b"", type=tarfile.SYMTYPE, linkname="/tmp")
    tars = {
        "parent": ((tar_entry("../evil"),), "outside"),
        "inner-parent": ((tar_entry("a/../../evil"),), "outside"),
        "absolute": ((tar_entry("/tmp/evil"),), "outside"),
        "backslash": ((tar_entry("..\\evil"),), "outside"),
        "twice": ((tar_entry("a"), tar_entry("./a")), "twice"),
        "file-and-directory": ((tar_entry("a"), tar_entry("a/b")), "as a directory"),
        "deep": ((tar_entry("d/" * 60 + "f"),), "outside"),
        "many": (tuple(tar_entry(f"f{i}") for i in range(60)), "more than 50 entries"),
        "large": ((tar_entry("zeros", bytes(3 * 2**20)),), "bytes"),
        # The link is skipped, and the path through it becomes a directory.
        "through-a-link": ((link, tar_entry("a/evil"), tar_entry("../b")), "outside"),
    }
    found = [
        (tar_gz(directory / f"{name}.tar.gz", *entries), word)
        for name, (entries, word) in tars.items()
    ]
    bomb = directory / "bomb.tar.gz"
    with gzip.open(bomb, "wb") as file:
        file.write(tar_entry("a", b"", size=2**33)[0].tobuf())
        file.write(bytes(2**22))
    found.append((bomb, "bytes"))
    zipped = directory / "parent.zip"
    with zipfile.ZipFile(zipped, "w") as packed:
        packed.writestr("../evil", "x")
    found.append((zipped, "outside"))
    # A few KiB that unpack to four MiB.
    lying = directory / "lying.zip"
    with zipfile.ZipFile(lying, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("zeros", bytes(2**22))
    found.append((lying, "bytes"))
    for name, content in (("noise.zip", b"PK\x03\x04" + bytes(99)), ("noise.tar.gz", b"\x1f\x8b")):
        (directory / name).write_bytes(content)
        found.append((directory / name, "cannot be read"))
    cut = directory / "cut.tar.gz"
    whole = good_tar_gz(directory / "whole.tar.gz").read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    found.append((cut, "cannot be read"))
    return found


def git_repository(directory: Path, *commits: tuple[str, Mapping[str, str | None]]) -> Path:
    """Create a Git repository with the given commits.

    commits: each with its subject, and the contents of its files by path (None: remove the file).
    """
    settings = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        **{f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER")
           for what in ("NAME", "EMAIL")},
    }  # fmt: skip

    def git(*arguments: str) -> None:
        command = ["git", "-C", str(directory), *arguments]
        subprocess.run(command, check=True, capture_output=True, env=settings)

    directory.mkdir(parents=True, exist_ok=True)
    git("init", "-q")
    for subject, changes in commits:
        for name, content in changes.items():
            file = directory / name
            if content is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", subject)
    return directory
