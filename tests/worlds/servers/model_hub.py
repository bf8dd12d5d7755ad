"""A model hub on loopback for huggingface_hub and datasets: repositories with commits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from worlds.servers.json_server import serving

# The commits by repository, "models/OWNER/NAME" or "datasets/OWNER/NAME"; of each commit the files
# by name. The last commit is main.
Repositories = Mapping[str, Mapping[str, Mapping[str, bytes]]]


@contextmanager
def model_hub(repositories: Repositories) -> Iterator[str]:
    """Serve repositories until the end of the block. Yields: the address, for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[0] == "api" and "/".join(parts[1:4]) in repositories:
                return self.describe("/".join(parts[1:4]), *parts[4:])
            kind, *rest = parts if parts[0] == "datasets" else ["models", *parts]
            name = "/".join([kind, *rest[:2]])
            if name in repositories and rest[2:3] == ["resolve"]:
                return self.file(name, rest[3], "/".join(rest[4:]))
            self.answer(404, X_Error_Code="RepoNotFound")

        def describe(
            self, name: str, route: str = "revision", revision: str = "main", *_: str
        ) -> None:
            commit = commit_of(name, revision)
            files = repositories[name][commit]
            told: object = {
                "id": name.partition("/")[2],
                "sha": commit,
                "siblings": [{"rfilename": each} for each in files],
            }
            if route == "tree":
                told = [
                    {
                        "type": "file",
                        "path": each,
                        "size": len(files[each]),
                        "oid": tag(files[each]),
                    }
                    for each in files
                ]
            self.answer(200, json.dumps(told).encode(), Content_Type="application/json")

        def file(self, name: str, revision: str, path: str) -> None:
            commit = commit_of(name, revision)
            content = repositories[name][commit].get(path)
            if content is None:
                return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            self.answer(200, content, ETag=f'"{tag(content)}"', X_Repo_Commit=commit)

        do_GET = do_HEAD = do_POST = reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    def commit_of(name: str, revision: str) -> str:
        return list(repositories[name])[-1] if revision == "main" else revision

    def tag(content: bytes) -> str:
        return hashlib.sha1(content).hexdigest()

    with serving(Handler) as address:
        yield address
