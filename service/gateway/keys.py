"""The two keys of a session: one for its agent, one for its judge, who rewards it.

Each key names its session, so that an agent needs only the key.

Both are derived from the key of the client that creates the session: the same request gets the same
keys, and only digests of the keys are stored. An API on loopback may require no key. Session keys
are then derived from a random secret of the run (`service.launch.run_dir`): an agent knows its
session's name, and must not be able to compute the judge's key from it.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from service.access.keys import digest_of
from service.intake.session import SessionKeys

AGENT, REWARD = "agent", "reward"


def session_key(client_key: str, session_id: str, scope: str) -> str:
    """Return a session's key: rl.SCOPE.SESSION.HMAC-SHA256(client's key, scope and session).

    Args: client_key: the run's secret if the API requires no key. scope: agent or reward.
    """
    text = f"rayloom session\n{scope}\n{session_id}"
    mark = hmac.new(client_key.encode(), text.encode(), sha256).hexdigest()
    return f"rl.{scope}.{session_id}.{mark}"


def session_of_key(key: str) -> str:
    """Return the session that a key names, or ''. Example: rl.agent.task-9-3.f00… -> task-9-3"""
    kind, _, rest = key.partition(".")
    _, _, rest = rest.partition(".")
    return rest.rpartition(".")[0] if kind == "rl" else ""


def key_digests(client_key: str, session_id: str) -> SessionKeys:
    """Return the digests of a session's keys, which are stored instead of them."""
    return SessionKeys(
        agent=digest_of(session_key(client_key, session_id, AGENT)),
        reward=digest_of(session_key(client_key, session_id, REWARD)),
    )
