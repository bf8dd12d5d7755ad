"""An HTTP server on loopback that takes its answers from a function of the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A function of method, path, bearer token and the body, decoded from JSON. It returns the status,
# and a text or a value to encode as JSON.
Answer = Callable[[str, str, str, Any], tuple[int, Any]]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Serve a function's answers until the end of the block. Yields: the address."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
            status, said = answer(self.command, self.path, token, body)
            text = (said if isinstance(said, str) else json.dumps(said)).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = reply

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(Handler) as address:
        yield address


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on a free port of loopback until the end of the block. Yields: the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
