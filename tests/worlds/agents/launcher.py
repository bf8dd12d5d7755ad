"""A server that starts an agent's program for each request, in a forked process.

Importing a framework takes seconds, so the server imports its modules once, before it forks. The
program then runs from its file, as the main module, with the environment variables, the arguments
and the directory of the request.

    python launcher.py SOCKET PROGRAM [MODULE ...]

SOCKET: file descriptor of a listening socket. A client sends one line of JSON; it receives what the
program prints, and then a line `ended CODE`. MODULE: a module to import before the first request.
This file uses only the standard library, because it runs in the agent's own virtual environment.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback


def main(listening: int, program: str, *modules: str) -> None:
    for module in modules:
        importlib.import_module(module)
    # The server does not wait for its children: each one sends its exit status to its client.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = socket.socket(fileno=listening)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _play(connection, program)
        connection.close()


def _play(connection: socket.socket, program: str) -> None:
    asked = json.loads(connection.makefile().readline())
    os.dup2(connection.fileno(), 1)
    os.dup2(connection.fileno(), 2)
    os.environ.update(asked["env"])
    os.chdir(asked["directory"])
    sys.argv = [program, *asked["arguments"]]
    code = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  # whatever an agent raises is its end
        traceback.print_exc()
        code = 1
    print(f"ended {code}", flush=True)
    # This leaves out the exit handlers of the modules that the server imported before the fork.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
