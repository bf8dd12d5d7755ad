"""Tests of directories at fsspec addresses: each is complete or absent, also after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from worlds.servers.object_server import BUCKET, object_server

from service.remote_files import MARKER, RemoteDirectory, RemoteError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with object_server(tmp_path_factory.mktemp("objects")) as found:
        yield found


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"run-{uuid4().hex[:8]}"
    if request.param == "memory":
        return f"memory://{name}"
    if request.param == "file":
        return f"file://{tmp_path}/{name}"
    for key, value in request.getfixturevalue("variables").items():
        monkeypatch.setenv(key, value)
    return f"s3://{BUCKET}/{name}"


def written(directory: Path, **contents: str) -> dict[str, Path]:
    """Write files; return them by remote path, whose folder is the first letter of the name."""
    directory.mkdir(exist_ok=True)
    files = {}
    for name, content in contents.items():
        files[f"{name[0]}/{name}"] = directory / name
        (directory / name).write_text(content)
    return files


def contents(remote: RemoteDirectory, into: Path) -> dict[str, str]:
    marker = remote.download(into)
    found = {str(path.relative_to(into)): path.read_text() for path in into.rglob("*.*")}
    found |= {name: (into / name).read_text() for name in marker.files}
    return found


def test_directory_is_read_as_written_and_only_changed_files_are_sent_again(
    url: str, tmp_path: Path
) -> None:
    remote = RemoteDirectory(f"{url}/")
    assert remote.read() is None and remote.children() == []
    remote.check_writable()
    one = remote.child("one")
    files = written(tmp_path / "a", alpha="first", beta="second")
    assert one.upload(files, note={"step": 1}) == 11
    assert one.upload(files, note={"step": 1}) == 0
    assert contents(one, tmp_path / "b") == {"a/alpha": "first", "b/beta": "second"}
    assert remote.children() == ["one"]
    # One file has changed, one is new, and one is gone.
    files = written(tmp_path / "a", alpha="first", gamma="third")
    assert one.upload(files, note={"step": 2}) == 5
    marker = one.read()
    assert marker is not None and marker.note == {"step": 2} and marker.num_bytes == 10
    assert contents(one, tmp_path / "c") == {"a/alpha": "first", "g/gamma": "third"}
    one.remove()
    assert one.read() is None and remote.children() == []
    one.remove()


def test_changed_and_missing_objects_are_refused(url: str, tmp_path: Path) -> None:
    remote = RemoteDirectory(url)
    files = written(tmp_path / "a", alpha="first")
    remote.upload(files, note={})
    # Another program writes other bytes of the same length.
    remote._files.pipe_file(f"{remote._root}/a/alpha", b"other")
    with pytest.raises(RemoteError, match=r"a/alpha: got 5 bytes with sha256 .*, expected 5"):
        remote.download(tmp_path / "b")
    remote._files.rm_file(f"{remote._root}/a/alpha")
    with pytest.raises(RemoteError, match="cannot be read"):
        remote.download(tmp_path / "c")
    remote._files.rm_file(f"{remote._root}/{MARKER}")
    with pytest.raises(RemoteError, match=r"has no complete.json, expected a complete upload"):
        remote.download(tmp_path / "d")


# A script that kills itself before the change of an object whose number it gets.
UPLOAD = """
import os, signal, sys
from pathlib import Path
from service.remote_files import RemoteDirectory

url, directory, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
remote, calls = RemoteDirectory(url), []
files = remote._files

def counted(call):
    def count(*arguments, **named):
        calls.append(call)
        if len(calls) > last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)
    return count

for name in ("put_file", "pipe_file", "rm_file"):
    setattr(files, name, counted(getattr(files, name)))
remote.upload({path.name: path for path in directory.iterdir()}, note={"of": directory.name})
print(len(calls))
"""


def upload(url: str, directory: Path, *, last: int, variables: dict[str, str]) -> int | None:
    """Upload in a process that is killed before its change number `last` + 1.

    Returns: the number of changes; None if the process was killed.
    """
    done = subprocess.run(
        [sys.executable, "-c", UPLOAD, url, str(directory), str(last)],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


# A proof, because each of a dozen writers imports s3fs: 45 s.
@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reader_finds_one_whole_upload_whenever_the_writer_is_killed(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    old, new = tmp_path / "old", tmp_path / "new"
    written(old, same="same", other="old", gone="gone")
    written(new, same="same", other="new", more="more")
    url = f"s3://{BUCKET}/killed"
    remote, seen = RemoteDirectory(url), []
    whole = {
        directory.name: {path.name: path.read_text() for path in directory.iterdir()}
        for directory in (old, new)
    }
    for last in range(40):
        remote.remove()
        remote.upload({path.name: path for path in old.iterdir()}, note={"of": "old"})
        num_changes = upload(url, new, last=last, variables=variables)
        marker = remote.read()
        seen.append(None if marker is None else marker.note["of"])
        if marker is not None:
            assert contents(remote, tmp_path / f"read-{last}") == whole[marker.note["of"]]
        # The next writer completes the upload.
        remote.upload({path.name: path for path in new.iterdir()}, note={"of": "new"})
        assert contents(remote, tmp_path / f"again-{last}") == whole["new"]
        if num_changes is not None:
            break
    # The changes are: progress, the old marker, two files with progress each, the new marker.
    assert num_changes is not None and seen[0] == "old" and seen[-1] == "new"
    assert None in seen and seen == sorted(seen, key=["old", None, "new"].index)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere", "expected one such as s3://bucket/directory"),
        ("s3://", "expected one such as s3://bucket/directory"),
        ("ftps3://bucket/x", "expected a protocol that fsspec knows"),
    ],
)
def test_an_address_that_cannot_be_opened_is_refused(url: str, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        RemoteDirectory(url)


def test_a_bucket_that_does_not_exist_is_refused_and_not_made(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    remote = RemoteDirectory("s3://no-such-bucket/run")
    for _ in range(2):
        with pytest.raises(RemoteError, match=r"cannot be written .*bucket.*does not exist"):
            remote.check_writable()
