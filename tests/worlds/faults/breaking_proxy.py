"""A proxy before PostgreSQL that breaks a connection before or after the server gets its COMMIT."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

COMMIT = b"COMMIT"


@dataclass
class BreakingProxy:
    """A proxy that forwards all bytes, except while it is cut, and at the COMMIT set by `arm`."""

    server_port: int
    port: int = 0
    num_broken: int = 0
    is_cut: bool = False
    _armed: str | None = None
    _ends: list[socket.socket] = field(default_factory=list)

    def arm(self, *, when: str) -> None:
        """Break the connection that sends the next COMMIT.

        when: "before": before the server gets the COMMIT; "after": when the server has answered it.
        """
        self._armed = when

    def cut(self) -> None:
        """Break every connection, and refuse new ones until `mend`."""
        self.is_cut = True
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self.is_cut = False

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self.is_cut:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.server_port))
            except OSError:
                # The server restarts.
                client.close()
                continue
            self._ends += [client, server]
            drops = threading.Event()
            for source, sink, is_client in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, drops, is_client), daemon=True
                ).start()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, drops: threading.Event, is_client: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_client and self._armed and COMMIT in data:
                    when, self._armed = self._armed, None
                    self.num_broken += 1
                    if when == "before":
                        break
                    drops.set()
                elif not is_client and drops.is_set():
                    # The server has committed, but the client must not get the answer.
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._ends:
            end.close()


@contextlib.contextmanager
def breaking_proxy(server_port: int) -> Iterator[BreakingProxy]:
    proxy = BreakingProxy(server_port=server_port)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.port = listener.getsockname()[1]
        thread = threading.Thread(target=proxy.serve, args=(listener,), daemon=True)
        thread.start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=10)
    proxy.close()
