"""Model directories at fsspec addresses, downloaded once into the user's cache directory.

Invariant: a directory in the cache is complete, because it gets its final name after the download.
The name depends on the content of the address, so that changed content is downloaded again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from service.config.file import ConfigError
from service.remote_files import RemoteDirectory, RemoteError
from service.user_cache import user_cache


def fetched_model(url: str, *, key: str, tell: Callable[[str], None]) -> Path:
    """Download a model directory, unless the cache has its content; return the local directory.

    The files of a complete upload, such as an export, are compared with their digests. Of other
    directories, only the sizes of the files are compared.
    Args: key: the setting that names the address, for messages. tell: called with a sentence before
        a download. Raises: ConfigError.
    """
    try:
        remote = RemoteDirectory(url)
        marker = remote.read()
        content = remote.listing() if marker is None else dict(marker.files)
        if "config.json" not in content:
            raise RemoteError(
                f"{url} has no config.json, expected a directory in Hugging Face format; correct "
                "the address"
            )
        digest = sha256(repr((remote.url, sorted(content.items()))).encode()).hexdigest()
        directory = user_cache("models") / f"{Path(remote.url).name}-{digest[:16]}"
        if directory.is_dir():
            return directory
        tell(f"downloading {url} to {directory}, once")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download.", dir=directory.parent) as place:
            part = Path(place) / "model"
            if marker is None:
                remote.copy(part, content)
            else:
                remote.download(part)
            if not directory.is_dir():
                shutil.move(part, directory)
        return directory
    except RemoteError as error:
        raise ConfigError(f"{key}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{key}: {error.filename or url} cannot be written ({error.strerror or error}); "
            "expected a cache directory with enough space; set XDG_CACHE_HOME to another one"
        ) from error
