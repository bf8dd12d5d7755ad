"""`rayloom nodes`: print the commands that start a Ray cluster on machines without Kubernetes.

Ray 2.59 and later use token authentication if the head finds a token in `~/.ray`, where every local
run leaves one; the head then rejects a worker without `RAY_AUTH_MODE=token` and the same token.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from service.config.file import ConfigError

_TOKEN_LIMIT_S = 60.0


def cluster_commands(host: str, *, port: int) -> str:
    """Return the commands for all machines, after creating this user's token if it is missing.

    Args: host: the address at which other machines reach the head. port: the head's port.
    Raises: ConfigError if Ray provides no token.
    """
    ray = Path(sys.executable).with_name("ray")
    made = subprocess.run(
        [ray, "get-auth-token", "--generate"],
        capture_output=True, text=True, timeout=_TOKEN_LIMIT_S, check=False,
    )  # fmt: skip
    token = made.stdout.strip()
    if made.returncode or not token or len(token.split()) != 1:
        raise ConfigError(
            f"nodes: got no token of `{ray} get-auth-token --generate` ({made.stderr.strip()}); "
            "expected one in ~/.ray/auth_token; correct the file or its permissions"
        )
    activate = f"source {shlex.quote(str(ray.with_name('activate')))}"
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"""\
# On the head, {host}:
{activate}
export RAY_AUTH_MODE=token
ray start --head --node-ip-address={host} --port={port} --include-dashboard=false

# On each other machine, where the same version of Rayloom is in the same directory. The token is a
# secret, and replaces the one that this user has there:
{activate}
export RAY_AUTH_MODE=token
mkdir -p ~/.ray && (umask 077 && printf %s {token} > ~/.ray/auth_token)
ray start --address={address}

# On one of them, to train:
{activate}
rayloom train CONFIG --address {address}

# On each, at the end:
ray stop"""
