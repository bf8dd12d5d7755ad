"""Starts an agent's program, each time in a process of its own, forked from one that imported it.

Importing a framework takes seconds. The program is run from its file, as the main module, with the
environment, the arguments and the directory that the request names; it finds its imports done.

    python launcher.py SOCKET PROGRAM [MODULE ...]

SOCKET: the number of a listening socket; a connection brings one line of JSON, and is sent what the
program prints, and behind it a line `ended CODE`. MODULE: imported before. Standard library only:
it runs in the agent's own environment, and the program does not know it.
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
    # Nobody waits for the children: their ends are told by themselves.
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
    # Without the ends of what was begun before the fork.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
